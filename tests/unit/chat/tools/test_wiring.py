"""Answers through the completer: special tokens as marks, stop strings, the order of chunks, tools that cannot be had."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from typing import Any

import pytest

from quire.chat.completer import Completer
from quire.chat.templates.template import ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.chat.tools.types import Tool, Tools
from quire.chat.types import Chunk, Generation
from quire.engine.types import Constraint, Event, Receipt
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from tests.unit.chat.test_completer import INFO, ScriptedEngine
from tests.unit.chat.tools.test_reading import ASSISTANT, HERMES
from tests.unit.chat.toys import byte_level

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def tokenizer() -> Tokenizer:
    """The toy vocabulary with the marks as control tokens."""
    metadata = byte_level()
    tokens, types = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    return Tokenizer.from_gguf(
        {**metadata, "tokenizer.ggml.tokens": [*tokens, *MARKS], "tokenizer.ggml.token_type": [*types, 3, 3, 3, 3]}
    )


TOKENIZER = tokenizer()
TOOLS = Tools([Tool("f", "", {"type": "object", "properties": {"a": {"type": "string"}}})])
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<b>"}}\n</tool_call>'


def completer(*texts: str, source: str | None = HERMES, step: int = 1) -> Completer:
    """A completer whose engine answers with these texts, `step` tokens at a time."""
    scripts: list[list[Any]] = []
    for text in texts:
        ids = TOKENIZER.encode(text, add_special=False, parse_special=True)
        cut = [ids[i : i + step] for i in range(0, len(ids), step)]
        scripts.append([Event(id="", tokens=tokens) for tokens in cut])
        scripts[-1].append(Event(id="", tokens=[], finish="stop", receipt=Receipt(output_tokens=len(ids))))
    info = type(INFO)(
        **{f: getattr(INFO, f) for f in INFO.__struct_fields__} | {"vocab_size": TOKENIZER.vocab_size, "context": 4096}
    )
    template = None if source is None else ChatTemplate(source, "", "")
    return Completer(ScriptedEngine(*scripts), TOKENIZER, template, info)


def run(made: Completer, tools: Tools = TOOLS, **sampling: Any) -> tuple[Any, list[Chunk]]:
    async def work() -> tuple[Any, list[Chunk]]:
        prompt = TOKENIZER.encode(ASSISTANT, add_special=False, parse_special=True)
        reading, constraint = await made.answering(prompt, tools)
        assert constraint is None
        generation = Generation(id="g", prompt=prompt, sampling=SamplingParams(**sampling), reading=reading)
        chunks = [chunk async for chunk in made.stream(generation)]
        (whole,) = await made.complete(dataclasses.replace(generation, id="again"))
        return whole, chunks

    return asyncio.run(work())


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_an_answer_with_everything(step: int) -> None:
    text = f"<think>\nhm\n</think>\n\nLet me.\n{CALL}"
    made = completer(text, step=step)
    whole, chunks = run(made)
    assert (whole.reasoning, whole.text, whole.finish) == ("hm", "Let me.", "stop")
    assert [(c.name, json.loads(c.arguments)) for c in whole.calls] == [("f", {"a": "<b>"})]
    assert "".join(c.text for c in chunks) == whole.text and "".join(c.reasoning for c in chunks) == whole.reasoning
    assert whole.tokens == TOKENIZER.encode(text, add_special=False, parse_special=True)
    assert chunks[-1].finish == "stop" and chunks[-1].receipt is not None
    assert sum(c.finish is not None for c in chunks) == 1


def test_text_after_a_call_comes_after_it() -> None:
    whole, chunks = run(completer(f"Let me.\n{CALL} Done. ", step=1000))
    assert whole.text == "Let me.Done. " and len(whole.calls) == 1
    order = [what for c in chunks for what, there in (("text", c.text), ("call", c.calls)) if there]
    assert order == ["text", "call", "text", "text"]  # the last is a space that a call might have followed
    assert chunks[0].tokens and not any(c.tokens for c in chunks[1:])


def test_stop_strings_look_at_the_text_alone() -> None:
    made = completer("<think>\nSTOP\n</think>\n\nab STOP cd")
    whole, _ = run(made, stop=["STOP"])
    assert (whole.reasoning, whole.text, whole.stop_reason) == ("STOP", "ab ", "STOP")
    whole, _ = run(completer(CALL.replace("<b>", "STOP")), stop=["STOP"])
    assert json.loads(whole.calls[0].arguments) == {"a": "STOP"} and whole.stop_reason is None


def test_other_special_tokens_are_skipped_as_ever() -> None:
    whole, _ = run(completer("a<|im_start|>b</think>c"))
    assert whole.text == "ab</think>c"


def test_without_a_reading_marks_are_skipped_too() -> None:
    made = completer("<think>a</think>b")

    async def work() -> Any:
        return await made.complete(Generation(id="g", prompt=[1], sampling=SamplingParams()))

    assert asyncio.run(work())[0].text == "ab"


def test_tools_that_cannot_be_had() -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"

    async def ask(made: Completer, tools: Tools, answer: Constraint | None = None) -> Any:
        return await made.answering([1], tools, answer)

    with pytest.raises(BadRequest, match="no chat template") as refused:
        asyncio.run(ask(completer("x", source=None), TOOLS))
    assert refused.value.param == "tools"
    answer = Constraint.json_object()
    assert asyncio.run(ask(completer("x", source=plain), Tools(), answer)) == (None, answer)
    assert asyncio.run(ask(completer("x", source=plain), Tools(TOOLS.tools, "none"))) == (None, None)
    with pytest.raises(BadRequest, match="no tools"):
        asyncio.run(ask(completer("x"), Tools((), "required")))
    with pytest.raises(BadRequest, match="'g'"):
        asyncio.run(ask(completer("x"), Tools(TOOLS.tools, "named", "g")))


def test_a_demanded_call_is_a_constraint_of_the_request() -> None:
    async def ask() -> Any:
        return await completer("x").answering([1], Tools(TOOLS.tools, "required"))

    reading, constraint = asyncio.run(ask())
    assert reading is not None and constraint.kind == "composed"
    assert str(TOKENIZER.token_id("<tool_call>")) in constraint.text


def test_the_format_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.chat.tools import detect as module

    made, count = completer("x"), []
    real = module.detect_format
    monkeypatch.setattr(module, "detect_format", lambda *args: count.append(1) or real(*args))
    threads = [threading.Thread(target=lambda: made.answer_format) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1 and made.answer_format is not None and made.answer_format.name == "hermes"
