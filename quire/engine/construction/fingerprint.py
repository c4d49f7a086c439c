"""What the bytes of this engine's pages depend on, as named parts, and the keys that follow from them.

The parts are the same in every process that computes the same bytes, on the same machine or on another. What is left out
cannot change a bit of the cache: threads, kernel sets (they agree, see docs/determinism.md), batch and pool sizes, depth,
speculation, and the context, unless the model turns its positions differently for another one. Adapters are not in here:
a request's adapter is part of its namespace (adapters.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from quire.backends.ops import Computes
from quire.backends.pages import PageLayout
from quire.cache.keys import Keys, fingerprint
from quire.cache.secret import Secret
from quire.config import VERSION, EngineConfig
from quire.engine.construction.parts import Parts
from quire.models import Stretches
from quire.weights.gguf.file import GGUF
from quire.weights.store.digests import WeightsDigest


class Naming:
    """Finds out what a model's pages are called. Nothing is done before `start`; `keys` is None until they are known."""

    def __init__(self, parts: dict[str, str], page_size: int, weights: WeightsDigest | str, secret: Secret) -> None:
        """`parts` are all but the weights, which are known by a text of their own or by a digest on its way."""
        self._parts = parts
        self._page_size = page_size
        self._weights = weights
        self._secret = secret

    def start(self) -> None:
        """Find out. Returns at once."""
        if isinstance(self._weights, WeightsDigest):
            self._weights.start()

    def keys(self) -> Keys | None:
        """The keys, as soon as the weights are known."""
        known = self._weights if isinstance(self._weights, str) else self._weights.digest
        if known is None:
            return None
        made = fingerprint({**self._parts, "weights": known})
        return Keys(made, self._page_size, self._secret.salt)

    def close(self) -> None:
        """Stop finding out."""
        if isinstance(self._weights, WeightsDigest):
            self._weights.close()


def naming(config: EngineConfig, home: Path, parts: Parts, layouts: Sequence[PageLayout], secret: Secret) -> Naming:
    """That of an engine. `layouts` are those of its groups."""
    return Naming(parts_of(config, parts, layouts), layouts[0].page_size, _weights(config, home, parts), secret)


def parts_of(config: EngineConfig, parts: Parts, layouts: Sequence[PageLayout]) -> dict[str, str]:
    """Everything but the weights."""
    backend = parts.backend
    found = {
        "version": VERSION,  # a release may change the numbers
        "architecture": parts.model.config.architecture,
        "backend": backend.computes() if isinstance(backend, Computes) else backend.describe(),
        "quantize": config.quantize,
        "deterministic": str(config.deterministic),
        **{f"pages {g}": layout.describe() for g, layout in enumerate(layouts)},
    }
    if isinstance(parts.model, Stretches):
        found["context"] = str(config.context)
    return found


def _weights(config: EngineConfig, home: Path, parts: Parts) -> WeightsDigest | str:
    checkpoint = parts.checkpoint
    if checkpoint is None:
        from quire.models.shapes import read_shape

        text = json.dumps(read_shape(config.path).raw, sort_keys=True)
        return f"random numbers of seed 0, in the shape {hashlib.sha256(text.encode()).hexdigest()}"
    path = Path(checkpoint.path).absolute()
    if isinstance(checkpoint, GGUF):
        return WeightsDigest([(path, checkpoint.found)], home.absolute())
    return WeightsDigest(checkpoint.files(), home.absolute(), path)
