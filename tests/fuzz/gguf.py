"""Mutated GGUF files against the reader: each opens and can be read to the last byte, or raises BadModelFile.

python -m tests.fuzz.gguf --runs 1000000 --seed 7
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.layouts import Affine
from quire.observe.errors import BadModelFile
from quire.weights.gguf.file import GGUF, Strings, describe
from tests.fuzz import kit
from tests.fuzz.maker import SAMPLES

EXTREMES = [0, 1, 2, 3, 4, 5, 8, 9, 12, 13, 31, 32, 33, 64, 255, 256, 257, 4096, 65535, 65536]
EXTREMES += [2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33, 2**40, 2**60, 2**61, 2**62, 2**63 - 1, 2**63]
EXTREMES += [2**64 - 1, 2**64 - 2, 2**64 - 8, 2**64 - 32, 2**59 + 1]


@dataclass
class Sample:
    name: str
    data: bytes
    header: int  # bytes of it
    fields: list[tuple[int, int]]


def samples() -> list[Sample]:
    made = [(name, make()) for name, make in SAMPLES.items()]
    return [Sample(name, m.build(), len(m.header()), m.fields()) for name, m in made]


def truncate(s: Sample, rng: random.Random) -> bytes:
    most = len(s.data) if rng.random() < 0.3 else s.header
    return s.data[: rng.randrange(1, most)]


def flip(s: Sample, rng: random.Random) -> bytes:
    out = bytearray(s.data)
    most = len(out) if rng.random() < 0.2 else s.header
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(most)] ^= 1 << rng.randrange(8)
    return bytes(out)


def splice(s: Sample, rng: random.Random) -> bytes:
    """Cut, double, overwrite or insert a stretch of bytes."""
    out = bytearray(s.data)
    n = rng.choice((1, 2, 4, 8, 8, 12, 33, 100))
    a, b = rng.randrange(s.header), rng.randrange(s.header)
    how = rng.randrange(4)
    if how == 0:
        del out[a : a + n]
    elif how == 1:
        out[a:a] = out[b : b + n]
    elif how == 2:
        out[a : a + n] = out[b : b + n]
    else:
        out[a:a] = rng.choice((bytes(n), b"\xff" * n, rng.randbytes(n)))
    return bytes(out)


def extreme(s: Sample, rng: random.Random) -> bytes:
    """Integers of the header set to values that overflow, wrap or lie."""
    out = bytearray(s.data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, size = rng.choice(s.fields)
        now = int.from_bytes(out[at : at + size], "little")
        value = rng.choice(
            (rng.choice(EXTREMES), now + 1, now - 1, now * 2, now + 2**32, now + 32, now << 56, len(out))
        )
        out[at : at + size] = struct.pack("<Q", value % 2**64)[:size]
    return bytes(out)


def replace(s: Sample, rng: random.Random) -> bytes:
    """Random bytes over a stretch, anywhere."""
    out = bytearray(s.data)
    a = rng.randrange(len(out))
    n = rng.choice((1, 4, 8, 16, 64))
    out[a : a + n] = rng.randbytes(n)
    return bytes(out)


MUTATIONS: list[Callable[[Sample, random.Random], bytes]] = [truncate, flip, flip, splice, extreme, extreme, replace]


def mutant(rng: random.Random, of: list[Sample]) -> tuple[str, bytes]:
    """What it is made of, and the file."""
    sample = rng.choice(of)
    mutate = rng.choice(MUTATIONS)
    return f"{sample.name}/{mutate.__name__}", mutate(sample, rng)


def walk(value: object) -> None:
    """Look at all of a metadata value."""
    if isinstance(value, Strings):
        texts = value.tolist()
        if [t.encode("utf-8", "surrogateescape") for t in texts] != value.tobytes() or len(texts) != len(value):
            raise AssertionError("strings do not survive decoding")
    elif isinstance(value, list):
        for item in value:
            walk(item)
    elif isinstance(value, np.ndarray):
        value.tolist()
    else:
        repr(value)


def look(path: Path) -> None:
    """Open and read everything. A refusal names the byte, or the key whose value is of the wrong kind."""
    try:
        with GGUF.open(path) as gguf:
            read(gguf)
    except BadModelFile as e:
        if ": byte " not in e.message and "key '" not in e.message:
            raise AssertionError(f"neither a byte nor a key is named: {e}") from e
        raise


def read(gguf: GGUF) -> None:
    for value in gguf.metadata.values():
        walk(value)
    for name, info in gguf.tensors.items():
        layout = gguf.tensor(name)
        size = info.nbytes
        if isinstance(layout, Affine):  # a codebook's is that of its codes
            size = info.elements // layout.codec.block * layout.codec.nbytes
        if layout.dequantize().shape != info.shape or layout.nbytes != size:
            raise AssertionError(f"{name}: not the shape or size it was said to have")
        gguf.release(name)
    try:
        describe(gguf)
    except BadModelFile as e:
        if "key" not in e.message:
            raise AssertionError(f"no key is named: {e}") from e


def fuzz(runs: Iterable[int], seed: int, folder: Path, tell: Callable[[str], None] | None = None) -> Counter[str]:
    of, path = samples(), folder / "mutant.gguf"

    def put(rng: random.Random) -> kit.Mutant:
        kind, data = mutant(rng, of)
        path.unlink(missing_ok=True)  # cheaper than cutting the old one to nothing
        path.write_bytes(data)
        return kit.Mutant(path, kind)

    return kit.drive(runs, seed, put, look, refusal=BadModelFile, seconds=5, tell=tell)


if __name__ == "__main__":
    kit.main(__doc__, fuzz, runs=100_000)
