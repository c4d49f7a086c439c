"""Mutated safetensors files, configurations and tokenizers against their readers: read whole, or refused with a QuireError.

    python -m tests.fuzz.safetensors --runs 100000 --seed 7

A run is decided by (seed, number) alone; one that fails is written to a file and can be run again with --only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import struct
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from quire.observe.errors import QuireError
from quire.weights.safetensors import DENSE, Safetensors

EXTREMES = [0, 1, -1, 2, 7, 8, 9, 63, 255, 256, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1, 2**64, -(2**63), 10**40]
STRANGE: list[Any] = [None, True, False, 1.5, 1e308, "", "F32", "x" * 600, [], {}, [[]], [1, 2, 3], {"a": 1}, "\ud800"]


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


def stir(value: Any, rng: random.Random) -> Any:
    """A JSON value with one thing in it changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        made = dict(value)
        key = rng.choice(list(made))
        how = rng.random()
        if how < 0.1:
            del made[key]
        elif how < 0.2:
            made[rng.choice(["extra", "", key + "2", "__metadata__"])] = made[key]
        else:
            made[key] = stir(made[key], rng)
        return made
    if isinstance(value, list) and value and rng.random() < 0.8:
        made_list = list(value)
        i = rng.randrange(len(made_list))
        how = rng.random()
        if how < 0.15:
            del made_list[i]
        elif how < 0.3:
            made_list.append(made_list[i])
        else:
            made_list[i] = stir(made_list[i], rng)
        return made_list
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.7:
        return rng.choice([value + 1, value - 1, value * 2, -value, value + 8, rng.choice(EXTREMES)])
    return rng.choice([*STRANGE, *EXTREMES])


def mutant(seed: int, number: int) -> tuple[str, bytes]:
    """What was done, and the file."""
    rng = random.Random(f"{seed}:{number}")
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


def fuzz(numbers: Iterable[int], seed: int, folder: Path) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    path = folder / "m.safetensors"
    for number in numbers:
        how, data = mutant(seed, number)
        path.unlink(missing_ok=True)  # an older one may still be mapped
        path.write_bytes(data)
        try:
            look(path)
            outcomes["opened"] += 1
            outcomes[f"{how} opened"] += 1
        except QuireError as e:
            assert str(path) in str(e), f"run {number}: {e} does not name the file"
            str(e).encode()  # a terminal can show it
            outcomes["refused"] += 1
            outcomes[f"{how} refused"] += 1
        except BaseException:
            kept = Path(tempfile.gettempdir()) / f"safetensors-{seed}-{number}.bin"
            kept.write_bytes(data)
            print(f"run {number} ({how}) failed; the file is {kept}")
            raise
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    args = parser.parse_args()
    numbers = range(args.runs) if args.only is None else [args.only]
    with tempfile.TemporaryDirectory() as folder:
        for name, count in sorted(fuzz(numbers, args.seed, Path(folder)).items()):
            print(f"{count:10,}  {name}")


if __name__ == "__main__":
    main()
