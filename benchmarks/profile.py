"""Where a step's time goes: `python -m benchmarks.profile [MODEL] [--prompt 512] [--depth 0]`.

Runs the native program by itself (no scheduler, no sampler): a prompt, then single tokens after it, and prints the share of
each kind of step. "waiting" is what the threads did not spend in any item: the ends of steps, and whatever took their cores.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire.backends.batch import Batch
    from quire.backends.native.backend import NativeProgram

PAGE = 16


def stretch(start: int, count: int, vocabulary: int, pages: int) -> Batch:
    """`count` tokens of one sequence from position `start` on; logits of the last."""
    from quire.backends.batch import Batch

    pos = np.arange(start, start + count, dtype=np.int32)
    return Batch(
        ids=((pos.astype(np.int64) * 104729 + 1) % vocabulary).astype(np.int32),
        pos=pos,
        q_start=np.array([0, count], np.int32),
        kv_len=np.array([start + count], np.int32),
        pages=np.arange(pages, dtype=np.int32)[None],
        write=pos.copy(),
        logit_rows=np.array([count - 1], np.int32),
    )


def together(streams: int, at: int, vocabulary: int, pages: int, shared: int = 0) -> Batch:
    """One token of each of `streams` sequences at position `at`; a sequence has `pages` pages, the first `shared` in common."""
    from quire.backends.batch import Batch

    own = np.arange(streams, dtype=np.int32)
    table = own[:, None] * pages + np.arange(pages, dtype=np.int32)[None]
    table[:, :shared] = table[0, :shared]
    return Batch(
        ids=((own.astype(np.int64) * 7919 + at) % vocabulary).astype(np.int32),
        pos=np.full(streams, at, np.int32),
        q_start=np.arange(streams + 1, dtype=np.int32),
        kv_len=np.full(streams, at + 1, np.int32),
        pages=table.astype(np.int32),
        write=(table[:, at // PAGE] * PAGE + at % PAGE).astype(np.int32),
        logit_rows=own,
    )


def timed(program: NativeProgram, batches: list[Batch], threads: int) -> tuple[float, dict[str, float]]:
    """Wall seconds, and thread seconds by kind of step, with what is left over as "waiting"."""
    program.profile()
    begun = time.perf_counter()
    for batch in batches:
        program.run(batch)
    wall = time.perf_counter() - begun
    found = program.profiled()
    found["waiting"] = max(0.0, wall * threads - sum(found.values()))
    return wall, found


def show(title: str, wall: float, found: dict[str, float], count: int) -> None:
    print(f"{title}: {wall * 1000:.1f} ms, {count / wall:.1f} tokens/s")
    total = sum(found.values())
    for name, seconds in sorted(found.items(), key=lambda item: -item[1]):
        if seconds / total >= 0.001:
            print(f"  {name:12} {100 * seconds / total:5.1f}%  {1000 * seconds:9.2f} ms of all threads")


def main() -> None:
    from benchmarks import files
    from quire.backends.native.backend import NativeBackend
    from quire.config import DEFAULT_MODEL, available_cores
    from quire.models import load
    from quire.weights.gguf.file import GGUF

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--depth", type=int, default=0, help="context before the single tokens; 0: the prompt")
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--streams", type=int, nargs="*", default=[], help="also: so many sequences, a token of each")
    parser.add_argument("--shared", type=int, default=0, help="tokens of the prompt that those sequences begin with")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--isa", default=None)
    parser.add_argument("--kv-dtype", choices=NativeBackend.kv_dtypes, default="f16")
    args = parser.parse_args()
    if not 0 <= args.shared <= args.prompt:
        parser.error(f"--shared {args.shared}: the prompt has {args.prompt} tokens")

    model = load(GGUF.open(str(files.model(args.model))))
    depth = max(args.depth, args.prompt)
    pages = -(-(depth + args.decode) // PAGE)
    most = max(args.streams, default=1)
    backend = NativeBackend(threads=args.threads, isa=args.isa)
    kv, tokens = model.kv(1, PAGE), max(args.prompt, most)
    kv = kv.sized([most * pages] * len(kv.groups), args.kv_dtype)
    program = backend.compile(model.forward, kv=kv, max_tokens=tokens, max_rows=most)
    vocabulary = model.config.vocab_size

    def piece(start: int, count: int) -> Batch:
        return stretch(start, count, vocabulary, pages)

    print(f"{args.model}, {backend.describe()}")
    program.run(piece(0, args.prompt))  # warm
    while program.idle():  # so that no step waits for memory
        pass
    show(f"prompt of {args.prompt}", *timed(program, [piece(0, args.prompt)], args.threads), args.prompt)
    for start in range(args.prompt, depth, args.prompt):
        program.run(piece(start, min(args.prompt, depth - start)))
    singles = [piece(depth + i, 1) for i in range(args.decode)]
    show(f"{args.decode} tokens after {depth}", *timed(program, singles, args.threads), args.decode)
    for n in args.streams:
        shared = args.shared // PAGE
        steps = [together(n, shared * PAGE + i, vocabulary, pages, shared) for i in range(args.decode)]
        show(
            f"{args.decode} steps of {n} sequences, {shared * PAGE} tokens shared",
            *timed(program, steps, args.threads),
            n * args.decode,
        )


if __name__ == "__main__":
    main()
