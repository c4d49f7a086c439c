"""Mutated safetensors files against their reader: read whole, or refused with a QuireError.

python -m tests.fuzz.safetensors --runs 100000 --seed 7
"""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from quire.weights.safetensors import DENSE, Safetensors
from tests.fuzz import kit
from tests.fuzz.kit import EXTREMES, stir


def build(entries: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    """A file of this header and these bytes; `length` may lie."""
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + data


def sample() -> tuple[dict[str, Any], bytes]:
    """A header with every kind of tensor, and its data."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, kind, size, shape in (
        ("a", "F32", 4, [3, 4]),
        ("b", "BF16", 2, [8]),
        ("empty", "F16", 2, [0, 4]),
        ("c", "F16", 2, [2, 5]),
        ("scalar", "F32", 4, []),
        ("bytes", "U8", 1, [7]),
        ("wide", "I64", 8, [2]),
    ):
        nbytes = size * int(np.prod(shape))
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    return entries, bytes(range(256))[:at].ljust(at, b"\x07")


def mutant(rng: random.Random) -> tuple[str, bytes]:
    """What was done, and the file."""
    entries, data = sample()
    whole = bytearray(build(entries, data))
    how = rng.choice(["truncate", "flip", "splice", "length", "json", "json", "json", "data"])
    if how == "truncate":
        del whole[rng.randrange(len(whole)) :]
    elif how == "flip":
        for _ in range(rng.choice((1, 1, 2, 8))):
            whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
    elif how == "splice":
        a, b, n = rng.randrange(len(whole)), rng.randrange(len(whole)), rng.choice((1, 2, 8, 33))
        whole[a : a + rng.choice((0, n))] = whole[b : b + n]
    elif how == "length":
        whole[:8] = struct.pack("<Q", rng.choice([len(whole), *[e % 2**64 for e in EXTREMES]]))
    elif how == "json":
        for _ in range(rng.choice((1, 1, 2, 3))):
            entries = stir(entries, rng)
            if not isinstance(entries, dict):
                break
        whole = bytearray(build(entries, data))
    else:
        whole += rng.randbytes(rng.choice((1, 8, 64)))
    return how, bytes(whole)


def look(path: Path) -> None:
    """Open, and read every number."""
    with Safetensors.open(path) as file:
        spans = []
        for name, info in file.tensors.items():
            assert 8 <= info.offset <= info.offset + info.nbytes <= file.size
            spans.append((info.offset, info.nbytes))
            if info.type in DENSE:
                layout = file.tensor(name)
                assert layout.shape == info.shape and layout.nbytes == info.nbytes
                layout.data.tobytes()
            file.release(name)
        spans.sort()
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(spans))


def fuzz(numbers: Iterable[int], seed: int, folder: Path, tell: Callable[[str], None] | None = None) -> Counter[str]:
    path = folder / "m.safetensors"

    def put(rng: random.Random) -> kit.Mutant:
        how, data = mutant(rng)
        path.unlink(missing_ok=True)  # an older one may still be mapped
        path.write_bytes(data)
        return kit.Mutant(path, how)

    return kit.drive(numbers, seed, put, look, tell=tell)


if __name__ == "__main__":
    kit.main(__doc__, fuzz, runs=10_000)
