"""The library over the counting engine: a completer that spells tokens as characters. The real model is in tests/e2e."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.chat.types import Chunk, Generation
from quire.config import EngineConfig
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.types import Request
from quire.llm import DEFAULT_PARAMS, asynchronous
from quire.llm.loading import Loaded
from quire.observe.errors import BadRequest, QuireError, Unavailable
from tests.unit.engine.fake_engine import POISON, VOCAB, build


class SpellingCompleter:
    """A token is the character of its number. Enough of a completer for the library."""

    def __init__(self, client: InProcessClient):
        self.client = client

    async def encode_prompt(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    async def encode_chat(self, messages: list[Any]) -> list[int]:
        return [ord(c) for m in messages for c in f"{m['role'][0]}{m['content']}"]

    async def answering(self, prompt: list[int], tools: Any, answer: Any = None) -> tuple[None, Any]:
        return None, answer

    def check(self, generation: Generation) -> None:
        generation.sampling.validate()
        if len(generation.prompt) >= 4096:
            raise BadRequest("longer than the context")

    async def stream(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        for index in range(generation.sampling.n):
            request = Request(
                id=f"{generation.id}.{index}", tokens=generation.prompt, sampling=generation.sampling, index=index
            )
            async for event in self.client.generate(request):
                yield Chunk(
                    index=index,
                    text="".join(map(chr, event.tokens)),
                    tokens=event.tokens,
                    finish=event.finish,
                    error=event.error,
                    receipt=event.receipt,
                )


@pytest.fixture
def slow() -> float:
    return 0.0


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch, slow: float) -> list[EngineConfig]:
    configs: list[EngineConfig] = []

    def load(model: str, config: EngineConfig, progress: bool) -> Loaded:
        configs.append(config)
        client = InProcessClient(EngineConfig(path=f"slow={slow}", max_seqs=config.max_seqs), build=build)
        return Loaded(client, client.wait(), "the tokenizer", SpellingCompleter(client))

    monkeypatch.setattr(asynchronous, "load", load)
    return configs


FIVE = SamplingParams(max_tokens=5)


def test_generate_takes_every_shape_of_prompt() -> None:
    with LLM() as llm:
        assert [o.text for o in llm.generate("abc", FIVE)] == ["defgh"]
        assert [o.text for o in llm.generate(["a", "k"], FIVE)] == ["bcdef", "lmnop"]
        assert [o.text for o in llm.generate([[97], [107, 97]], FIVE)] == ["bcdef", "bcdef"]
        assert [o.text for o in llm.generate([97, 98], FIVE)] == ["cdefg"]
        assert llm.generate([], FIVE) == []
        (output,) = llm.generate("abc", FIVE)
    assert output.prompt == "abc"
    assert output.prompt_tokens == [97, 98, 99]
    (done,) = output.outputs
    assert (done.tokens, done.finish_reason, done.stop_reason) == ([100, 101, 102, 103, 104], "length", None)
    assert output.receipt.output_tokens == 5
    assert output.receipt.prompt_tokens == 3


def test_parameters_for_each_prompt_and_their_default() -> None:
    with LLM() as llm:
        two = llm.generate(["a", "b"], [FIVE, SamplingParams(max_tokens=1)])
        assert [len(o.outputs[0].tokens) for o in two] == [5, 1]
        with pytest.raises(BadRequest, match="1 sampling parameters for 2 prompts"):
            llm.generate(["a", "b"], [FIVE])
        assert len(llm.generate("a")[0].outputs[0].tokens) == DEFAULT_PARAMS.max_tokens == 512
        assert DEFAULT_PARAMS.temperature == 0
        several = llm.generate("a", SamplingParams(max_tokens=2, n=3))[0]
        assert [(c.index, c.text) for c in several.outputs] == [(0, "bc"), (1, "bc"), (2, "bc")]
    with LLM(default_params=SamplingParams(max_tokens=2)) as llm:
        assert llm.generate("a")[0].text == "bc"


def test_chat() -> None:
    hello = [{"role": "user", "content": "abc"}]
    with LLM() as llm:
        (one,) = llm.chat(hello, FIVE)
        assert (one.text, one.prompt, one.prompt_tokens) == ("defgh", None, [ord(c) for c in "uabc"])
        two = llm.chat([hello, [*hello, {"role": "assistant", "content": "x"}]], FIVE)
        assert [o.text for o in two] == ["defgh", "yz{|}"]
        with pytest.raises(BadRequest, match="no messages"):
            llm.chat([], FIVE)


def test_stream() -> None:
    with LLM() as llm:
        stream = llm.stream("a", FIVE)
        assert list(stream) == ["b", "c", "d", "e", "f"]
        assert stream.output is not None
        assert (stream.output.text, stream.output.outputs[0].finish_reason) == ("bcdef", "length")
        assert list(stream) == []
        assert "".join(llm.stream_chat([{"role": "user", "content": "k"}], FIVE)) == "lmnop"
        with pytest.raises(BadRequest, match="n must be 1"):
            list(llm.stream("a", SamplingParams(n=2)))


def test_bad_input_is_refused_before_anything_runs() -> None:
    with LLM() as llm:
        for prompts, text in (
            (["fine", "x" * 5000], "context"),
            ([[1], []], "no tokens"),
            ([[1, VOCAB]], f"{VOCAB} at place 1"),
            ([[1, "a"]], "'a' at place 1"),
            ([[True]], "True at place 0"),
            ([3.5], "prompt 0 is a float"),
        ):
            with pytest.raises(BadRequest, match=text):
                llm.generate(prompts)
        with pytest.raises(BadRequest, match="temperature"):
            llm.generate("a", SamplingParams(temperature=-1))
        assert llm.stats().steps == 0
    with pytest.raises(BadRequest, match="not a size"):
        LLM(kv_memory="lots")
    with pytest.raises(TypeError, match="no such option: thread;"):
        LLM(thread=3)


def test_options_reach_the_engine(counting: list[EngineConfig]) -> None:
    LLM("m", threads=3, context=64, kv_memory="1MiB", backend="reference", max_seqs=2, depth=1).close()
    config = counting[0]
    assert (config.name, config.threads, config.context, config.kv_memory) == ("m", 3, 64, 1 << 20)
    assert (config.backend, config.max_seqs, config.depth) == ("reference", 2, 1)


def test_a_failure_is_raised_and_the_rest_let_go() -> None:
    with LLM() as llm:
        with pytest.raises(QuireError, match="poison"):
            llm.generate([[97]] * 20 + [[POISON]] + [[97]] * 20, SamplingParams(max_tokens=2000))
        _until(lambda: llm.stats().running == llm.stats().waiting == 0)
        assert llm.generate("a", FIVE)[0].text == "bcdef"


@pytest.mark.parametrize("slow", [0.01])
def test_ctrl_c_aborts_generate() -> None:
    with LLM() as llm:
        timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a"] * 100, SamplingParams(max_tokens=2000))
        assert llm.stats().output_tokens < 50 * 2000  # it stopped in the middle
        _until(lambda: llm.stats().running == llm.stats().waiting == 0)
        assert llm.generate("a", FIVE)[0].text == "bcdef"


@pytest.mark.parametrize("slow", [0.01])
def test_leaving_a_stream_aborts_it() -> None:
    with LLM() as llm:
        for piece in llm.stream("a", SamplingParams(max_tokens=2000)):
            assert piece == "b"
            break
        gc.collect()
        _until(lambda: llm.stats().running == 0)
        with llm.stream("a", SamplingParams(max_tokens=2000)) as stream:
            next(stream)
        _until(lambda: llm.stats().running == 0)
        assert list(stream) == []


async def test_works_inside_a_running_loop() -> None:
    with LLM() as llm:
        assert llm.generate("a", FIVE)[0].text == "bcdef"
        assert "".join(llm.stream("a", FIVE)) == "bcdef"


def test_several_threads_share_one() -> None:
    answers: list[str] = []
    with LLM() as llm:
        threads = [threading.Thread(target=lambda: answers.append(llm.generate("a", FIVE)[0].text)) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert answers == ["bcdef"] * 8


def test_closed_is_closed() -> None:
    llm = LLM()
    llm.close()
    llm.close()
    for use in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: llm.info):
        with pytest.raises(Unavailable, match="closed"):
            use()


def test_a_forgotten_model_is_let_go() -> None:
    llm = LLM()
    client = llm._async._have().client
    thread = client._thread
    assert thread is not None
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    thread.join(20)
    assert not thread.is_alive()


async def test_async_forms() -> None:
    llm = AsyncLLM()
    with pytest.raises(Unavailable, match="not loaded"):
        _ = llm.tokenizer
    async with llm:
        assert llm.tokenizer == "the tokenizer"
        assert llm.info.architecture == "counter"
        outputs, talk = await asyncio.gather(
            llm.generate(["a", "k"], FIVE), llm.chat([{"role": "user", "content": "c"}], FIVE)
        )
        assert [o.text for o in outputs + talk] == ["bcdef", "lmnop", "defgh"]
        stream = llm.stream("a", FIVE)
        assert [piece async for piece in stream] == ["b", "c", "d", "e", "f"]
        assert stream.output is not None
        assert stream.output.text == "bcdef"
        assert [p async for p in llm.stream_chat([{"role": "user", "content": "c"}], FIVE)] == list("defgh")
    with pytest.raises(Unavailable):
        await llm.generate("a")


@pytest.mark.parametrize("slow", [0.01])
async def test_cancelling_aborts() -> None:
    async with AsyncLLM() as llm:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.generate(["a"] * 10, SamplingParams(max_tokens=2000)), 0.2)
        stream = llm.stream("a", SamplingParams(max_tokens=2000))
        async for _ in stream:
            break
        await stream.aclose()
        await asyncio.to_thread(_until, lambda: llm.stats().running == llm.stats().waiting == 0)


async def test_it_loads_on_first_use_and_once(counting: list[EngineConfig]) -> None:
    llm = AsyncLLM()
    answers = await asyncio.gather(*(llm.generate("a", FIVE) for _ in range(4)))
    assert [a[0].text for a in answers] == ["bcdef"] * 4
    assert len(counting) == 1
    await llm.close()


async def test_closing_while_it_loads_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, go_on, threads = threading.Event(), threading.Event(), []
    real = asynchronous.load

    def held(*args: Any) -> Loaded:
        loading.set()
        go_on.wait(30)
        loaded = real(*args)
        threads.append(loaded.client._thread)
        return loaded

    monkeypatch.setattr(asynchronous, "load", held)
    llm = AsyncLLM()
    task = asyncio.create_task(llm.start())
    await asyncio.to_thread(loading.wait, 20)
    await llm.close()
    go_on.set()
    with pytest.raises(Unavailable, match="closed"):
        await task
    await asyncio.to_thread(threads[0].join, 5)
    assert not threads[0].is_alive()


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM() as llm:
        llm.generate(["a"] * 3, FIVE)
        assert capsys.readouterr() == ("", "")
        llm.generate(["a"] * 3, FIVE, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3 of 3 prompts, 15 tokens" in err


def _until(check: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_what_waits_is_declared_once() -> None:
    public = {n for n, f in vars(AsyncLLM).items() if not n.startswith("_") and inspect.isfunction(f)}
    for name in public - {"start", "close", "stats"}:
        ours, theirs = inspect.signature(getattr(LLM, name)), inspect.signature(getattr(AsyncLLM, name))
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name
        assert str(ours.return_annotation) == str(theirs.return_annotation).replace("Async", "")
        assert getattr(LLM, name).__doc__ == getattr(AsyncLLM, name).__doc__
        assert not inspect.iscoroutinefunction(getattr(LLM, name))
    with LLM() as llm, pytest.raises(TypeError, match="temprature"):
        llm.generate("a", temprature=1)


def test_what_is_of_a_wrong_kind_is_named_before_anything_runs() -> None:
    for options, says in (
        ({"threads": "2"}, "threads is '2': it must be a whole number"),
        ({"max_seqs": True}, "max_seqs is True: it must be a whole number"),
        ({"prefix_cache": 1}, "prefix_cache is 1: it must be True or False"),
        ({"device": 0}, "device is 0: it must be a text"),
        ({"default_params": {"temperature": 0}}, r"default_params is a dict \(give SamplingParams"),
    ):
        with pytest.raises(BadRequest, match=says):
            LLM(**options)
    with pytest.raises(BadRequest, match="the model is a NoneType"):
        LLM(None)
    assert AsyncLLM(Path("model.gguf")).model == str(Path.cwd() / "model.gguf")  # never a short name
    hello = {"role": "user", "content": "a"}
    with LLM() as llm:
        for call, says in (
            (lambda: llm.generate(None), "the prompts are a NoneType"),
            (lambda: llm.generate(b"ab"), "the prompts are a bytes"),
            (lambda: llm.generate(["a", b"ab"]), "prompt 1 is a bytes"),
            (lambda: llm.generate("a", {"temperature": 0}), "params is a dict"),
            (lambda: llm.generate(["a", "b"], [FIVE, 3]), "params is a int"),
            (
                lambda: llm.generate("a", constraint={"type": "object"}),
                r"constraint is a dict \(give Constraint.json_schema",
            ),
            (lambda: llm.chat("hello"), "messages is a str"),
            (lambda: llm.chat(hello), "messages is a dict"),
            (lambda: llm.chat([[hello], "b"]), "conversation 1: it is a str"),
            (lambda: llm.chat([hello, {"content": "b"}]), r"messages\[1\] has no role"),
            (lambda: llm.chat([{**hello, "content": 5}]), r"messages\[0\]: its content is a int"),
            (lambda: list(llm.stream_chat([[hello], [hello]])), "one conversation: here are 2"),
            (lambda: list(llm.stream("a", {"n": 1})), "params is a dict"),
        ):
            with pytest.raises(BadRequest, match=says):
                call()
        assert llm.stats().steps == 0


@pytest.mark.parametrize("page", ["README.md", "docs/library.md"])
async def test_the_examples_of_the_pages_run_as_they_are_written(page: str) -> None:
    text = (Path(__file__).resolve().parents[2] / page).read_text()
    blocks = [b for b in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "openai" not in b]
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        made = eval(compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if inspect.iscoroutine(made):
            await made
    if isinstance(names["llm"], LLM):
        names["llm"].close()
