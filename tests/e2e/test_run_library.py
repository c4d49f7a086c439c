"""The library on the default model and the native backend: what a user types, and what must not change between calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.observe.errors import BadRequest, NotFound

GREEDY = SamplingParams(temperature=0, max_tokens=16)
PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    with LLM(str(model_path), context=1024, kv_memory="128MiB") as llm:
        yield llm


def test_it_knows_something(llm: LLM) -> None:
    (output,) = llm.chat(PARIS, GREEDY)
    assert "Paris" in output.text
    assert output.outputs[0].finish_reason == "stop"
    assert output.receipt.prompt_tokens == len(output.prompt_tokens)


def test_info_tells_the_decisions(llm: LLM, model_path: Path) -> None:
    info = llm.info
    assert (info.architecture, info.vocab_size, info.context) == ("llama", 49152, 1024)
    assert info.kv_bytes <= 128 << 20
    text = "\n".join(info.decisions)
    beside = 4 if "KV cache: int16, " in text else 0  # a scale for each token and head
    assert info.kv_bytes == info.pages * 30 * 2 * 16 * 3 * (64 * 2 + beside)
    assert info.weight_bytes < model_path.stat().st_size
    for word in ("model:", "backend: native", "threads:", "KV pool:", "context: 1024", "loaded in"):
        assert word in text


def test_alone_in_a_batch_streamed_and_cached_are_the_same(llm: LLM) -> None:
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3, 4,", "The", "A quire is"]
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=5, max_tokens=16)):
        alone = [llm.generate(p, params)[0] for p in prompts]
        together = llm.generate(prompts, params)
        assert [o.outputs[0].tokens for o in together] == [o.outputs[0].tokens for o in alone]
        assert ["".join(llm.stream(p, params)) for p in prompts] == [o.text for o in alone]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_flight_change_nothing(llm: LLM, model_path: Path, depth: int) -> None:
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):"]
    params = [
        GREEDY,
        SamplingParams(seed=5, max_tokens=12, repetition_penalty=1.2),
        SamplingParams(seed=6, max_tokens=9),
    ]
    with LLM(str(model_path), context=512, depth=depth) as ahead:
        got = ahead.generate(prompts, params)
    assert [o.outputs[0].tokens for o in got] == [o.outputs[0].tokens for o in llm.generate(prompts, params)]


def test_a_conversation_comes_from_the_prefix_tree(llm: LLM) -> None:
    words = " ".join(f"word{i}" for i in range(60))
    first = [{"role": "user", "content": f"Remember this: {words}"}]
    (one,) = llm.chat(first, GREEDY)
    (two,) = llm.chat([*first, {"role": "assistant", "content": one.text}, {"role": "user", "content": "And?"}], GREEDY)
    assert two.receipt.cached_tokens >= len(one.prompt_tokens) // 16 * 16 > 100


def test_tokens_in_text_out(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The capital of France is", add_special=True, parse_special=True)
    (by_ids,), (by_text,) = llm.generate([ids], GREEDY), llm.generate("The capital of France is", GREEDY)
    assert by_ids.outputs[0].tokens == by_text.outputs[0].tokens
    assert by_ids.prompt is None
    assert by_text.prompt_tokens == ids


def test_sampling_options(llm: LLM) -> None:
    several = llm.generate("Once upon a time", SamplingParams(n=3, seed=1, max_tokens=8, logprobs=2))[0]
    assert len({tuple(c.tokens) for c in several.outputs}) > 1
    for choice in several.outputs:
        assert len(choice.logprobs) == len(choice.tokens) == 8
        assert all(len(entry.top) == 2 for entry in choice.logprobs)
    (stopped,) = llm.generate("1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=64, stop=("9",)))
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == "9"
    assert "9" not in stopped.text
    drawn = llm.generate("Once", SamplingParams(max_tokens=12))[0]
    again = llm.generate("Once", SamplingParams(max_tokens=12, seed=drawn.receipt.seed))[0]
    assert again.outputs[0].tokens == drawn.outputs[0].tokens


def test_refusals(llm: LLM, model_path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="1024"):
        llm.generate("word " * 1100)
    with pytest.raises(BadRequest, match="made for 8192"):
        LLM(str(model_path), context=10000)
    with pytest.raises(BadRequest, match="holds 16 tokens"):
        LLM(str(model_path), context=64, kv_memory=400_000)
    with pytest.raises(BadRequest, match="one page"):
        LLM(str(model_path), kv_memory=1000)
    with pytest.raises(BadRequest, match="no backend named"):
        LLM(str(model_path), backend="abacus")
    with pytest.raises(BadRequest, match="threads is 0"):
        LLM(str(model_path), threads=0)
    with pytest.raises(NotFound):
        LLM(str(tmp_path / "nothing.gguf"))


def test_a_small_pool_bounds_the_context_and_says_so(model_path: Path) -> None:
    with LLM(str(model_path), kv_memory="8MiB") as small:
        assert small.info.context == small.info.pages * 16 < 8192
        assert any("what the KV pool holds" in line for line in small.info.decisions)


async def test_async(model_path: Path) -> None:
    async with AsyncLLM(str(model_path), context=512) as llm:
        outputs, talk = await asyncio.gather(
            llm.generate(["The capital of France is"], GREEDY), llm.chat(PARIS, GREEDY)
        )
        assert "Paris" in outputs[0].text
        assert "Paris" in talk[0].text
        pieces = [p async for p in llm.stream("The capital of France is", GREEDY)]
        assert "".join(pieces) == outputs[0].text
