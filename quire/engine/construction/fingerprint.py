"""The fingerprint of an engine: everything that the bytes of its pages depend on, as named parts, and the keys that follow from
them.

The parts are the same in every process that computes the same bytes, on the same machine or on another. What is left out
cannot change a bit of the cache: threads, kernel sets (they agree, see docs/kv-cache.md), batch and pool sizes, depth,
speculation, and the context, unless the model turns its positions differently for another one. Adapters are not in here:
a request's adapter is part of its namespace (adapters.py).

An engine whose pages nobody asks about does none of this: a start notes which files were opened, and that is all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.backends.ops import Backend, Computes, Program
from quire.cache.keys import Keys, fingerprint
from quire.cache.secret import Secret
from quire.config import PAGE_SIZE, VERSION, EngineConfig
from quire.engine.construction.parts import Parts
from quire.models import Stretches
from quire.weights.gguf.file import GGUF

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened
    from quire.weights.store.digests import WeightsDigest


class Naming:
    """Finds out what a model's pages are called. Nothing is done before `start`; `keys` is None until they are known."""

    def __init__(
        self, parts: Callable[[], dict[str, str]], weights: Callable[[], WeightsDigest | str], secret: Secret
    ) -> None:
        """`parts` gives all but the weights, `weights` a text that stands for those or a digest that can be found out."""
        self._parts = parts
        self._open = weights
        self._weights: WeightsDigest | str | None = None
        self._secret = secret

    def start(self) -> None:
        """Find out. Returns at once."""
        if self._weights is None:
            self._weights = self._open()
            if not isinstance(self._weights, str):
                self._weights.start()

    def keys(self) -> Keys | None:
        """The keys, as soon as the weights are known."""
        known = self._weights
        if known is not None and not isinstance(known, str):
            known = known.digest
        if known is None:
            return None
        return Keys(fingerprint({**self._parts(), "weights": known}), PAGE_SIZE, self._secret.salt)

    def close(self) -> None:
        """Stop finding out."""
        if self._weights is not None and not isinstance(self._weights, str):
            self._weights.close()


def naming(config: EngineConfig, home: Path, parts: Parts, program: Program, groups: int, secret: Secret) -> Naming:
    """The naming of pages for an engine whose program has so many groups. Holds neither the model nor its file."""
    about = {"architecture": parts.model.config.architecture, **settings(config, isinstance(parts.model, Stretches))}
    backend = parts.backend
    return Naming(
        lambda: about | computed(backend, program, groups), weights_of(config, home, parts.checkpoint), secret
    )


def settings(config: EngineConfig, stretches: bool) -> dict[str, str]:
    """The settings that change numbers, as parts of the fingerprint. `stretches`: the model is made for the context that is
    served."""
    found = {"version": VERSION, "quantize": config.quantize, "deterministic": str(config.deterministic)}
    return {**found, "context": str(config.context)} if stretches else found


def computed(backend: Backend, program: Program, groups: int) -> dict[str, str]:
    """The backend's arithmetic and the layout of pages, as parts of the fingerprint; the KV type and the page size are in that."""
    who = backend.computes() if isinstance(backend, Computes) else backend.describe()
    return {"backend": who, **{f"pages {g}": program.page_layout(g).describe() for g in range(groups)}}


def weights_of(config: EngineConfig, home: Path, checkpoint: Opened | None) -> Callable[[], WeightsDigest | str]:
    """How to find out which weights these are. What the files are is noted now."""
    if checkpoint is None:
        return lambda: random_weights(config.path)
    path, folder = Path(checkpoint.path).absolute(), None
    if isinstance(checkpoint, GGUF):
        files: list[tuple[Path, os.stat_result]] = [(path, checkpoint.found)]
    else:
        files, folder = [(file.absolute(), found) for file, found in checkpoint.files()], path

    def found() -> WeightsDigest:
        from quire.weights.store.digests import WeightsDigest

        return WeightsDigest(files, home.absolute(), folder)

    return found


def random_weights(source: str) -> str:
    """Numbers that a backend draws in the order of a shape, always from the same seed."""
    from quire.models.shapes import read_shape

    text = json.dumps(read_shape(source).raw, sort_keys=True)
    return f"random, of the shape {hashlib.sha256(text.encode()).hexdigest()}"
