"""Run a model's program over one token list, in chunks of any size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quire import models
from quire.backends.cases import ragged
from quire.backends.choose import open_backend
from quire.layouts import Floats
from quire.weights.checkpoint import open_checkpoint


class Loaded:
    """A model compiled on one backend, with every row's logits wanted."""

    def __init__(self, path: Path, backend: str, threads: int = 2, isa: str | None = None, most: int = 1024):
        self.model = models.load(open_checkpoint(path))
        self.pages = -(-most // 16)
        self.kv = self.model.kv(self.pages, 16)
        self.program = open_backend(backend, threads=threads, isa=isa).compile(
            self.model.forward, kv=self.kv, max_tokens=most, max_rows=most
        )

    def logits(self, tokens: list[int], chunk: int | None = None) -> Floats:
        """[len(tokens), vocabulary]"""
        chunk = chunk or len(tokens)
        parts = []
        for start in range(0, len(tokens), chunk):
            part = np.array(tokens[start : start + chunk], np.int32)
            pages = list(range(-(-(start + part.size) // 16)))
            parts.append(self.program.run(ragged([(start, part.size, pages)], ids=part)).copy())
        return np.concatenate(parts)
