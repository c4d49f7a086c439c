"""Mutated GGUF files against the reader: each opens and can be read to the last byte, or raises BadModelFile.

    python -m tests.fuzz.gguf --runs 1000000 --seed 7

A run is decided by (seed, number) alone; one that fails is written to a file and can be run again with --only.
"""

from __future__ import annotations

import argparse
import random
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.layouts import Affine
from quire.observe.errors import BadModelFile
from quire.weights.gguf import GGUF, Strings, describe
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


def mutant(seed: int, number: int, of: list[Sample]) -> tuple[str, bytes]:
    """What it is made of, and the file."""
    rng = random.Random(f"{seed}:{number}")
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


def check(path: Path) -> str:
    """Open and read everything. "opened", or why not. Anything but BadModelFile escapes."""
    try:
        with GGUF.open(path) as gguf:
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
    except BadModelFile as e:
        if str(path) not in e.message:
            raise AssertionError(f"the file is not named: {e}") from e
        # A header error names its byte; a key with a value of the wrong kind is named itself.
        if ": byte " not in e.message and "key '" not in e.message:
            raise AssertionError(f"neither a byte nor a key is named: {e}") from e
        return "refused"
    return "opened"


def fuzz(runs: range, seed: int, folder: Path, tell: Callable[[str], None] | None = None) -> Counter[str]:
    """How many mutants of each kind opened and were refused. Raises on the first that does something else."""
    of = samples()
    outcomes: Counter[str] = Counter()
    path = folder / "mutant.gguf"
    slowest = 0.0
    for number in runs:
        kind, data = mutant(seed, number, of)
        path.write_bytes(data)
        start = time.process_time()
        try:
            outcome = check(path)
        except BaseException:
            kept = Path(tempfile.gettempdir()) / f"gguf-fuzz-{seed}-{number}.gguf"
            kept.write_bytes(data)
            print(f"seed {seed}, run {number} ({kind}) kept in {kept}")
            raise
        path.unlink()  # cheaper than cutting the old one to nothing
        slowest = max(slowest, time.process_time() - start)
        outcomes[f"{kind} {outcome}"] += 1
        outcomes[outcome] += 1
        if tell and number % 10_000 == 9_999:
            tell(
                f"{number + 1} runs: {outcomes['opened']} opened, {outcomes['refused']} refused, slowest {slowest:.3f} s"
            )
    if slowest > 5:
        raise AssertionError(f"a file of {max(len(s.data) for s in of)} bytes took {slowest:.1f} s")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this number alone")
    options = parser.parse_args()
    runs = range(options.runs) if options.only is None else range(options.only, options.only + 1)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fuzz(runs, options.seed, Path(folder), tell=lambda line: print(line, flush=True))
    for what, n in sorted(outcomes.items()):
        print(f"{n:8} {what}")


if __name__ == "__main__":
    main()
