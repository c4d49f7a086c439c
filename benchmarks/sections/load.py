"""How soon a large model answers: from starting the process to the first token, on a GGUF of 1.1 GB, warm page cache.

Measured as in `start`, whose programs and settings these are: a file that is only mapped is read while the first tokens are computed, so
"loaded" alone would compare different things. The model is the store's qwen2.5-coder:1.5b, which is not fetched here.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.figures import Group
from benchmarks.sections.start import start_group
from benchmarks.world import World
from quire.observe.errors import QuireError

MODEL = "qwen2.5-coder:1.5b"
SHAPE, FORMAT = "qwen2.5-coder-1.5b", "q4_k_m"


def groups(world: World) -> list[Group]:
    try:
        path = find() if world.make else Path(MODEL)
    except QuireError as e:
        world.without[f"{SHAPE} {FORMAT}"] = str(e)
        return []
    return [start_group(world, "load", path, SHAPE, FORMAT, rounds=7)]


def find() -> Path:
    """The model's file in the store. Raises NotFound where it has to be pulled first."""
    from quire.weights.store.store import Store

    return Store().resolve(MODEL)
