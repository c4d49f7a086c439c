"""Steps bounded in time, with the real model: prompts are cut small beside a stream, and no token changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.types import Event, Request
from quire.observe.errors import BadRequest
from quire.observe.steps import STEP_TIME
from quire.runner.params import SamplingParams

PROMPT = random.Random(5).choices(range(1000, 20_000), k=300)


def answer(path: Path, beside: bool, **options: Any) -> tuple[list[int], list[float], int, set[str]]:
    """The tokens of an answer and their odds, in how many chunks its prompt was computed, and what held it back."""
    engine, _ = build_engine(
        EngineConfig(path=str(path), context=1024, prefix_cache=False, **options), Environment.read()
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=7, logprobs=0)
    if beside:
        long = SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
        engine.add(Request(id="stream", tokens=PROMPT[:20], sampling=long))
        for _ in range(5):
            engine.step()
    engine.add(Request(id="own", tokens=PROMPT, sampling=params))
    events: list[Event] = []
    while not any(event.finish for event in events):
        events += [event for event in engine.step() if event.id == "own"]
    held = {reason for step in engine.steps() for reason in step.held}
    engine.close()
    receipt = events[-1].receipt
    assert receipt is not None
    said = [one.logprob for event in events for one in event.logprobs]
    return [token for event in events for token in event.tokens], said, receipt.chunks, held


def test_a_bound_cuts_prompts_and_changes_no_token(model_path: Path) -> None:
    tokens, odds, chunks, _ = answer(model_path, beside=False, itl_slo=0)
    assert chunks == 1 and len(tokens) == 12
    cut = answer(model_path, beside=True, itl_slo=1)
    assert cut[2] > 10 and STEP_TIME in cut[3], "a millisecond is less than any step takes"
    assert cut[:2] == (tokens, odds)
    whole = answer(model_path, beside=True, itl_slo=0)
    assert whole[2] == 1 and STEP_TIME not in whole[3] and whole[:2] == (tokens, odds)


@pytest.mark.parametrize("name", ["itl_slo", "ttft_slo"])
def test_a_bound_is_no_negative_number(model_path: Path, name: str) -> None:
    config: dict[str, Any] = {name: -1}
    with pytest.raises(BadRequest, match=name):
        build_engine(EngineConfig(path=str(model_path), **config), Environment.read())
