"""What the tests on a GPU share: the matrices of a real model, a shape for random weights, an engine over it, and traffic through it.

Knows no GPU: whoever imports it has looked for one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.engine import Engine
from quire.engine.types import EngineInfo, Event, Request

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
MATRICES_8B = {  # rows and columns, of a Llama 3.1 8B
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
BF16_BOUND = 6e-3  # of ||error||: bf16 results (2^-9 at most, each), and sums on the tensor cores
SETTINGS: dict[str, Any] = {
    "backend": "cuda",
    "device": "cuda",
    "dtype": "float32",
    "max_seqs": 8,
    "max_batch_tokens": 128,
    "context": 512,
    "kv_memory": 64 << 20,
}


def write_shape(folder: Path, **more: Any) -> str:
    """A model's config.json, for weights that are random."""
    path = folder / "config.json"
    path.write_text(json.dumps(SHAPE | more))
    return str(path)


def build(path: str | Path, **options: Any) -> tuple[Engine, EngineInfo]:
    """An engine on the GPU, unless told otherwise."""
    config = EngineConfig(path=str(path), **(SETTINGS | options))
    return build_engine(config, Environment(home=Path(path).parent))


def serve(
    running: Engine,
    requests: Sequence[Request],
    told: Callable[[Event], Iterable[Any]],
    *,
    together: int = 1,
    aborts: Mapping[str, int] | None = None,
) -> dict[str, list[Any]]:
    """What is told of every event, by request; so many requests come before each step.

    `aborts` lets a request go after so much was told of it.
    """
    heard: dict[str, list[Any]] = {}
    waiting = list(reversed(requests))
    while waiting or running.busy:
        for _ in range(min(together, len(waiting))):
            request = waiting.pop()
            heard[request.id] = []
            running.add(request)
        for event in running.step():
            assert event.error is None, event.error
            heard[event.id] += told(event)
            if event.finish is None and aborts and len(heard[event.id]) >= aborts.get(event.id, 1 << 30):
                running.abort(event.id)
    return heard
