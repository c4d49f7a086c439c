"""A few hundred mutated tokenizer files of every kind; `python -m tests.fuzz.tokenizers` does more."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the test extra: it writes the tokenizers")
pytest.importorskip("sentencepiece", reason="needs the test extra: it writes tokenizer.model")


def test_mutated_files_make_a_tokenizer_or_are_refused(tmp_path: Path):
    from tests.fuzz.tokenizers import fuzz

    outcomes = fuzz(range(250), 2026, tmp_path)
    assert outcomes["read"] > 30 and outcomes["refused"] > 60, outcomes
