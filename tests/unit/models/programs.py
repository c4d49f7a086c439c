"""Run a model's program over one token list, in chunks of any size, cold or behind a prefix that another has computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.backends.batch import Table
from quire.backends.cases import ragged, single
from quire.backends.choose import open_backend
from quire.layouts import Floats
from quire.weights.checkpoint import open_checkpoint


class Loaded:
    """A model compiled on one backend, with every row's logits wanted. context: serve no more than this."""

    def __init__(
        self,
        path: Path,
        backend: str,
        threads: int = 2,
        isa: str | None = None,
        most: int = 1024,
        context: int | None = None,
        **where: Any,
    ):
        self.model = models.load(open_checkpoint(path))
        if context is not None and isinstance(self.model, models.Stretches):
            self.model.stretch(context)
        self.pages = -(-most // 16)
        self.kv = self.model.kv(self.pages, 16)
        opened = open_backend(backend, threads=threads, isa=isa, **where)
        lacking = sorted(ops_of(self.model) - set(opened.implementations()))
        if lacking:
            pytest.skip(f"needs {', '.join(lacking)}, which the {backend} backend does not have yet")
        self.program = opened.compile(self.model.forward, kv=self.kv, max_tokens=most, max_rows=most)

    def logits(self, tokens: list[int], chunk: int | None = None) -> Floats:
        """[len(tokens), vocabulary]"""
        return self._run(tokens, 0, chunk or len(tokens), list(range(self.pages)))

    def after_hit(self, tokens: list[int], shared: int, chunk: int) -> Floats:
        """Logits from `shared` on, a whole number of pages, where what is before was computed for another sequence, and in
        other chunks. [len(tokens) - shared, vocabulary]"""
        assert shared % 16 == 0 and 2 * len(tokens) + 16 <= self.pages * 16
        first = list(range(self.pages - 1, -1, -1))  # pages in another order than they are made
        other = tokens[:shared] + [(t + 1) % 100 for t in tokens[shared : shared + 9]]
        self._run(other, 0, 7, first)
        fresh = first[: shared // 16] + list(range(self.pages // 2))
        return self._run(tokens, shared, chunk, fresh)

    def _run(self, tokens: list[int], start: int, chunk: int, row: list[int]) -> Floats:
        parts = []
        for at in range(start, len(tokens), chunk):
            part = np.array(tokens[at : at + chunk], np.int32)
            pages = row[: -(-(at + part.size) // 16)]
            batch = ragged([(at, part.size, pages)], ids=part)
            batch.more = (Table(batch.pages, batch.write),) * len(self.kv.more)  # pages of the same numbers
            parts.append(self.program.run(batch).copy())
        return np.concatenate(parts)


class _Spy:
    """Ops that compute nothing and remember what was asked for."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def mark(self, x: Any, layer: int) -> None:
        """No op."""

    def __getattr__(self, name: str) -> Any:
        self.used.add(name)
        return lambda *args, **settings: None


def ops_of(model: models.Model) -> set[str]:
    """The names of the ops that a model's forward uses."""
    spy: Any = _Spy()
    model.forward(spy, single(1), {})
    return spy.used
