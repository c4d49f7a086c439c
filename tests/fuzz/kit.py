"""What the fuzzers share: the loop over mutants, what may come of one, ways to spoil JSON and bytes, and a command line.

A run is decided by (seed, number) alone. Its mutant must be read whole, or be refused with an error that names the file, within a
bound of time and of memory. One that does anything else is kept beside the temporary files; --only runs it again.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.observe.errors import QuireError

GROWTH = 1 << 30  # bytes that one mutant may add to the peak
TELL_EVERY = 10.0  # seconds
EXTREMES = [0, 1, -1, 2, 7, 8, 9, 63, 255, 256, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64 - 1, 2**64, -(2**63), 10**40]
STRANGE: list[Any] = [None, True, False, 1.5, 1e308, "", "F32", "x" * 600, [], {}, [[]], [1, 2, 3], {"a": 1}, "\ud800"]


@dataclass(slots=True)
class Mutant:
    path: Path  # a file, or a folder of them
    kind: str  # what outcomes are counted by
    how: str = ""


def random_of(seed: int, number: int) -> random.Random:
    return random.Random(f"{seed}:{number}")


def drive(
    numbers: Iterable[int],
    seed: int,
    put: Callable[[random.Random], Mutant],
    look: Callable[[Path], None],
    *,
    refusal: type[QuireError] = QuireError,
    seconds: float = 20.0,
    tell: Callable[[str], None] | None = None,
) -> Counter[str]:
    """How many mutants were "read" and "refused", in all and by kind. Raises on the first that does something else.

    `put` writes a mutant, `look` reads all of it.
    """
    outcomes: Counter[str] = Counter()
    told, slowest = time.monotonic(), 0.0
    for number in numbers:
        mutant = put(random_of(seed, number))
        start, before = time.process_time(), peak()
        try:
            outcome = _outcome(mutant.path, look, refusal)
            took, grew = time.process_time() - start, peak() - before
            assert took < seconds, f"it took {took:.1f} s"
            assert grew < GROWTH, f"it took {grew >> 20} MiB"
        except BaseException:
            print(
                f"seed {seed}, run {number} ({mutant.kind} {mutant.how}) failed; kept in {_keep(mutant.path, seed, number)}"
            )
            raise
        outcomes[outcome] += 1
        outcomes[f"{mutant.kind} {outcome}"] += 1
        slowest = max(slowest, took)
        if tell and time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            tell(f"run {number}: {outcomes['read']} read, {outcomes['refused']} refused, slowest {slowest:.3f} s")
    return outcomes


def _outcome(path: Path, look: Callable[[Path], None], refusal: type[QuireError]) -> str:
    try:
        look(path)
    except refusal as e:
        assert str(path) in str(e), f"the file is not named: {e}"
        str(e).encode()  # a terminal can show it
        return "refused"
    return "read"


def _keep(path: Path, seed: int, number: int) -> Path:
    kept = Path(tempfile.gettempdir()) / f"fuzz-{seed}-{number}-{path.name}"
    if path.is_dir():
        shutil.copytree(path, kept, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, kept)
    return kept


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def put_folder(
    of: Path, at: Path, kind: str, mutate: Callable[[Path, random.Random], str], rng: random.Random
) -> Mutant:
    """A copy of folder `of` with one file changed."""
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(of, at)
    return Mutant(at, kind, mutate(at, rng))


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


def mangle(data: bytes, rng: random.Random) -> bytes:
    """Bytes with a few places changed, cut or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 6))):
        at = rng.randrange(max(1, len(out)))
        how = rng.randrange(5)
        if how == 0:
            out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)]) if out else b"x"
        elif how == 1:
            del out[at : at + rng.choice((1, 5, 100))]
        elif how == 2:
            out[at:at] = rng.choice((b"\xff" * 10, bytes(8), rng.randbytes(4), b'"', b"{", b"[" * 2000))
        elif how == 3:
            del out[at:]
        else:
            out[at:at] = out[at : at + 40]
    return bytes(out)


def main(doc: str | None, fuzz: Callable[..., Counter[str]], *, runs: int, kinds: bool = False) -> None:
    """The command line of `fuzz(numbers, seed, folder, tell=…)`, which takes `kinds` as well where it is told so."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one run by its number")
    if kinds:
        parser.add_argument("--kind", action="append", help="only this one; several may be given", dest="kinds")
    options = vars(parser.parse_args())
    count, only, seed = (options.pop(name) for name in ("runs", "only", "seed"))
    numbers = range(count) if only is None else [only]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fuzz(numbers, seed, Path(folder), tell=lambda line: print(line, flush=True), **options)
    for what, n in sorted(outcomes.items()):
        print(f"{n:10,}  {what}")
