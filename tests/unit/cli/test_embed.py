"""`quire embed` without a model: where texts come from, what comes out, and what is said beside it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import quire.llm
from quire.cli.app import app
from quire.models.pooling import pooling_of


class Reader:
    """Embeds a text as its length; scores it by its length."""

    decisions = ("pooling: mean, normalized (modules.json)",)

    def __init__(self, model: str, **options: Any):
        self.info = SimpleNamespace(decisions=list(self.decisions))
        self.options = options

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def embed(self, texts: list[str], **_: Any) -> np.ndarray:
        return np.array([[len(t), 1.0] for t in texts], np.float32)

    def score(self, query: str, texts: list[str], **_: Any) -> list[float]:
        return [float(len(t)) for t in texts]


@pytest.fixture(autouse=True)
def reader(monkeypatch: pytest.MonkeyPatch) -> type[Reader]:
    made = type("Made", (Reader,), {})
    monkeypatch.setattr(quire.llm, "LLM", made)
    return made


def embed(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["embed", "m", *args], input=stdin)


def test_texts_and_lines_become_lines_of_json():
    done = embed("ab", "c")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"index": 0, "embedding": [2.0, 1.0]},
        {"index": 1, "embedding": [1.0, 1.0]},
    ]
    assert done.stderr == ""
    assert embed(stdin="ab\n\nc\n").stdout == embed("-", stdin="ab\nc").stdout == done.stdout
    for stdin in ("", "\n \n"):
        assert embed(stdin=stdin).exit_code == 1


def test_scores_come_best_first_and_cosines_in_a_table():
    done = embed("a", "abc", "--query", "q")
    assert [json.loads(line)["index"] for line in done.stdout.splitlines()] == [1, 0]
    assert embed("a", "--query", "q", "--similarity").exit_code == 1
    table = embed("a", "abc", "--similarity").stdout.splitlines()
    assert table[1].split() == ["0", "1.0000", "0.8944", "a"]


def test_a_model_that_says_nothing_of_embeddings_is_doubted_aloud(reader: type[Reader]):
    reader.decisions = pooling_of(None, encoder=False).lines
    told = embed("a")
    assert told.exit_code == 0 and "m says nothing of embeddings, and was perhaps not made for them" in told.stderr
    reader.decisions = ("pooling: mean (the file says so), normalized (a GGUF cannot say)",)
    assert embed("a").stderr == ""
