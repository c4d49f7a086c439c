"""A few hundred mutated configurations and adapters; `python -m tests.fuzz.models` does more, of every family."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the test extra: it writes the models")

KINDS = (
    "gemma3",
    "phi3, long factors",
    "deepseek3",
    "gpt-oss",
    "qwen3next",
    "distilbert-score",
    "gguf, gemma3",
    "adapter",
)


def test_mutated_files_make_a_model_or_are_refused(tmp_path: Path):
    from tests.fuzz.models import fuzz

    outcomes = fuzz(range(320), 2026, tmp_path, KINDS)
    assert all(outcomes[f"{kind} {end}"] > 0 for kind in KINDS for end in ("read", "refused")), outcomes
