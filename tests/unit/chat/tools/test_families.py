"""What models of some families are known to write, beyond what their templates show."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from quire.chat.templates.template import ChatTemplate
from quire.chat.tools.detect import detect_format
from quire.chat.tools.types import Format, Tools
from quire.observe.errors import BadRequest
from tests.unit.chat.tools.kit import ToyTokenizer, every_way, tools
from tests.unit.chat.tools.test_reading import ASSISTANT, HERMES, read

F = [("f", {"a": 1})]
OBJECT = '{"name": "f", "arguments": {"a": 1}}'

ANSWERS = {
    "openai-gpt-oss-120b": [
        (
            '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
            ("hm", "", F),
        ),
        (
            "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            ("", "First.Hi", []),
        ),
        ("no channels at all", ("", "no channels at all", [])),
        (
            "<|channel|>commentary to=functions.f<|message|>words",
            ("", "<|channel|>commentary to=functions.f<|message|>words", []),
        ),
    ],
    "google-gemma-4-31B-it": [
        (
            '<|tool_call>call:f{a:1,b:<|"|>x "y"\n<|"|>,c:[true,{d:null}]}<tool_call|>',
            ("", "", [("f", {"a": 1, "b": 'x "y"\n', "c": [True, {"d": None}]})]),
        ),
        ("<|channel>thought\nhm<channel|>Hi", ("hm", "Hi", [])),
        ("<|tool_call>call me", ("", "<|tool_call>call me", [])),
        ("<|tool_call>call:f{}<tool_call|>", ("", "", [("f", {})])),
    ],
    "meta-llama-Llama-3.2-3B-Instruct": [
        ('{"name": "f", "parameters": {"a": 1}}', ("", "", F)),
        (
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            ("", "", [*F, ("g", {})]),
        ),
        ("[f(a=1), g()]", ("", "", [*F, ("g", {})])),
        ('{"name": "other", "parameters": {}}', ("", '{"name": "other", "parameters": {}}', [])),
        ('{"answer": 5}', ("", '{"answer": 5}', [])),
        ("[1, 2]", ("", "[1, 2]", [])),
    ],
    "LFM2-8B-A1B": [
        ("<|tool_call_start|>[f(a=1)]<|tool_call_end|>", ("", "", F)),
        (
            "ok <|tool_call_start|>[f(a=x)]<|tool_call_end|>",
            ("", "ok <|tool_call_start|>[f(a=x)]<|tool_call_end|>", []),
        ),
        ("<|tool_call_start|>[f(a=(1,", ("", "<|tool_call_start|>[f(a=(1,", [])),
        (
            "<|tool_call_start|>[f(b='x\\'y', c=true, d={'e': [1.5, None]})]",
            ("", "", [("f", {"b": "x'y", "c": True, "d": {"e": [1.5, None]}})]),
        ),
    ],
    "moonshotai-Kimi-K2": [
        (
            '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
            ("", "", F),
        ),
    ],
    "mistralai-Mistral-Nemo-Instruct-2407": [
        (f"[TOOL_CALLS] [{OBJECT}]", ("", "", F)),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}]', ("", "", F)),
        ("[TOOL_CALLS] none", ("", "[TOOL_CALLS] none", [])),
    ],
    "MiniMax-M3": [
        ("</mm:think>Hi", ("", "Hi", [])),
    ],
    "meetkai-functionary-medium-v3.2": [
        ('all\nText >>> more\n>>>f\n{"a": 1}', ("", "Text >>> more", F)),
        ("unknown\n{}", ("", "unknown\n{}", [])),
    ],
}


def format_for(shared_data: Path, name: str) -> tuple[Format, str]:
    template = ChatTemplate((shared_data / "templates" / f"{name}.jinja").read_text(), "", "")
    form = detect_format(template, ToyTokenizer())
    assert form is not None
    return form, template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ANSWERS)
def test_families(shared_data: Path, name: str) -> None:
    form, prompt = format_for(shared_data, name)
    for text, wanted in ANSWERS[name]:
        assert every_way(form.reading(prompt[-300:], tools("f", "g")), text) == wanted


def test_ids_are_the_models_own_or_what_its_template_takes(shared_data: Path) -> None:
    def ids(name: str, text: str) -> list[str | None]:
        form, prompt = format_for(shared_data, name)
        parser = form.reading(prompt, tools("f")).parser()
        pieces = [*parser.feed(text), *parser.finish()]
        return [part.id for piece in pieces for part in piece.calls if part.name]

    (text, _), *_ = ANSWERS["moonshotai-Kimi-K2"]
    assert ids("moonshotai-Kimi-K2", text) == ["functions.f:3"]
    (made,) = ids("mistralai-Mistral-Nemo-Instruct-2407", f"[TOOL_CALLS] [{OBJECT}]")
    assert made is not None and len(made) == 9 and made.isalnum()
    own = ids("Mistral-Small-3.2-24B-Instruct-2506", '[TOOL_CALLS]f[CALL_ID]abcabcabc[ARGS]{"a": 1}')
    assert own == ["abcabcabc"]


@pytest.mark.parametrize("text", [OBJECT, f"```json\n{OBJECT}\n```", f"\n{OBJECT}"])
def test_a_forgotten_mark(text: str) -> None:
    assert read(HERMES, text) == ("", "", F)
    assert read(HERMES, f"Here: {text}")[2] == []
    assert read(HERMES, text.replace('"f"', '"h"'))[2] == []
    assert read(HERMES, text, Tools())[2] == []
    strict = tools("f")
    strict = dataclasses.replace(strict, tools=[dataclasses.replace(strict.tools[0], strict=True)])
    assert read(HERMES, text, strict)[2] == []


def test_code_in_a_fence_is_text() -> None:
    code = "```json\n" + json.dumps({"name": "f"}) + "\n```"
    assert read(HERMES, code) == ("", code, [])


def test_a_format_by_name() -> None:
    template = ChatTemplate(HERMES, "", "")
    by_name = detect_format(template, ToyTokenizer(), "hermes")
    assert by_name is not None and by_name.name == "hermes"
    think = detect_format(template, ToyTokenizer(), "think")
    assert think is not None and not think.calls
    assert every_way(think.reading(ASSISTANT, Tools()), "<think>a</think>b") == ("a", "b", [])
    with pytest.raises(BadRequest, match="does not write 'kimi-k2'"):
        detect_format(template, ToyTokenizer(), "kimi-k2")
