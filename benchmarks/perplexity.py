"""Perplexity of a model over a text with K and V kept as f16 and as int8 (or --kv-dtype), and what that buys in decode speed.

With `--against FILE` the other side is another file of the same model, K and V in f16 on both: what a quantization costs, or
a way to multiply (float16 weights beside the same numbers in float32).

The text is cut into windows of `--context` tokens, one every `--stride`; each predicts the tokens that no window before it
has, so that every prediction but the first window's sees at least context - stride tokens. Both sides see the same
windows: the difference has a standard error over windows, paired. Speed is a greedy stream through the whole engine at
given depths, both in turn, the prompt coming from the prefix cache after the first round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import files
from benchmarks.figures import spread
from benchmarks.record import ROOT, median, save
from quire.backends.batch import Batch
from quire.backends.ops import Backend
from quire.config import PAGE_SIZE, EngineConfig, Environment, available_cores
from quire.models import Model

STEP = 128  # tokens in a step; each has a row of logits as wide as the vocabulary

F64 = npt.NDArray[np.float64]


def windows(tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(first token, first token predicted, end) of each window. Together they predict every token but the very first."""
    if not 0 < stride < context:
        raise ValueError(f"a stride of {stride} does not fit a context of {context}")
    begin, done = 0, 1
    while done < tokens:
        end = min(begin + context, tokens)
        yield begin, done, end
        begin, done = begin + stride, end


class Scorer:
    """Negative log likelihoods of tokens, through a compiled program with a pool of one window."""

    def __init__(self, backend: Backend, model: Model, context: int, dtype: str):
        self._pages = -(-context // PAGE_SIZE)
        kv = replace(model.kv(self._pages, PAGE_SIZE), dtype=dtype)
        self._program = backend.compile(model.forward, kv=kv, max_tokens=STEP, max_rows=STEP)

    def __call__(self, tokens: list[int], wanted: int) -> F64:
        """Of tokens[wanted:], each given all that come before it. `wanted` is at least 1."""
        found: list[F64] = []
        for start in range(0, len(tokens) - 1, STEP):
            end = min(start + STEP, len(tokens) - 1)  # the last token is only predicted
            rows = np.arange(max(start, wanted - 1), end)
            logits = self._program.run(self._batch(tokens, start, end, rows - start))
            if rows.size:
                found.append(_losses(logits, np.array([tokens[r + 1] for r in rows])))
        return np.concatenate(found)

    def _batch(self, tokens: list[int], start: int, end: int, rows: npt.NDArray[np.integer]) -> Batch:
        pos = np.arange(start, end, dtype=np.int32)
        return Batch(
            ids=np.array(tokens[start:end], np.int32),
            pos=pos,
            q_start=np.array([0, end - start], np.int32),
            kv_len=np.array([end], np.int32),
            pages=np.arange(self._pages, dtype=np.int32)[None, :],
            write=pos,
            logit_rows=rows.astype(np.int32),
        )


def _losses(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.integer]) -> F64:
    wide = logits.astype(np.float64)
    high = wide.max(axis=-1)
    total = high + np.log(np.exp(wide - high[:, None]).sum(axis=-1))
    return total - wide[np.arange(len(targets)), targets]


def losses(scorer: Scorer, tokens: list[int], context: int, stride: int) -> list[F64]:
    """Per window, the losses of the tokens it predicts."""
    cuts = windows(len(tokens), context, stride)
    return [scorer(tokens[begin:end], wanted - begin) for begin, wanted, end in cuts]


def perplexity(per_window: list[F64]) -> float:
    return float(np.exp(np.concatenate(per_window).mean()))


def difference(of: list[F64], base: list[F64]) -> tuple[float, float]:
    """Mean loss of the one less the other's, and its standard error over windows (tokens of one are not independent)."""
    deltas = np.array([(a - b).mean() for a, b in zip(of, base, strict=True)])
    weights = np.array([len(a) for a in of], np.float64)
    mean = float((deltas * weights).sum() / weights.sum())
    error = float(deltas.std(ddof=1) / np.sqrt(len(deltas))) if len(deltas) > 1 else float("nan")
    return mean, error


class Stream:
    """One greedy stream at one depth."""

    def __init__(self, path: str, threads: int, dtype: str, depth: int, decode: int):
        from quire.engine.construction.build import build_engine

        config = EngineConfig(
            path=path, backend="native", threads=threads, context=depth + decode + 1, max_seqs=1, kv_dtype=dtype
        )
        self._engine, self.info = build_engine(config, Environment.read())
        self._prompt = [(i * 15485863 + 3) % self.info.vocab_size for i in range(depth)]
        self._decode, self._runs = decode, 0

    def speed(self) -> float:
        """Tokens per second after the first."""
        from quire.engine.types import Request
        from quire.runner.params import SamplingParams

        self._runs += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=self._decode + 1, ignore_eos=True)
        self._engine.add(Request(id=str(self._runs), tokens=self._prompt, sampling=sampling))
        first = 0.0
        while self._engine.busy:
            if any(e.tokens for e in self._engine.step()) and not first:
                first = time.perf_counter()
        return self._decode / (time.perf_counter() - first)

    def close(self) -> None:
        self._engine.close()


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: a file, and what its keys and values are kept in."""

    name: str
    path: str
    dtype: str = "f16"


def measure_quality(args: argparse.Namespace, sides: tuple[Side, Side], threads: int) -> dict[str, Any]:
    """Of each text: the perplexity of both sides, and how much more the second loses."""
    from quire.backends.choose import open_backend
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.models import load
    from quire.weights.gguf.file import GGUF

    with ExitStack() as stack:
        files = {side.path: stack.enter_context(GGUF.open(side.path)) for side in sides}
        tokenizers = {path: Tokenizer.from_gguf(gguf.metadata) for path, gguf in files.items()}
        models = {path: load(gguf) for path, gguf in files.items()}
        backend = open_backend("native", threads=threads)
        scorers = {side.name: Scorer(backend, models[side.path], args.context, side.dtype) for side in sides}
        base, other = (side.name for side in sides)
        found: dict[str, Any] = {}
        for file in texts(args.text):
            text = file.read_text(encoding="utf-8")[: args.tokens * 8]
            read = [t.encode(text, add_special=False, parse_special=False)[: args.tokens] for t in tokenizers.values()]
            if any(tokens != read[0] for tokens in read):
                sys.exit(
                    f"{file.name}: the two models do not read the same tokens in it, so their losses cannot be compared"
                )
            tokens = read[0]
            lost = {name: losses(s, tokens, args.context, args.stride) for name, s in scorers.items()}
            delta, error = difference(lost[other], lost[base])
            found[file.name] = {
                "tokens": len(tokens) - 1,
                "windows": len(lost[base]),
                "perplexity": {name: perplexity(x) for name, x in lost.items()},
                "loss_difference": delta,
                "standard_error": error,
            }
            line = "   ".join(f"{name} {perplexity(x):.4f}" for name, x in lost.items())
            print(
                f"  {file.name:14} {len(tokens) - 1:6} tokens   {line}   loss {delta:+.5f} +- {error:.5f}", flush=True
            )
    return found


def measure_speed(args: argparse.Namespace, depths: list[int], path: str, threads: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    base, other = "f16", args.kv_dtype
    for depth in depths:
        streams = {dtype: Stream(path, threads, dtype, depth, args.decode) for dtype in (base, other)}
        for stream in streams.values():
            stream.speed()  # the prefill
        speeds: dict[str, list[float]] = {dtype: [] for dtype in streams}
        for _ in range(args.rounds):
            for dtype, stream in streams.items():
                speeds[dtype].append(stream.speed())
        for stream in streams.values():
            stream.close()
        line = "   ".join(f"{dtype} {spread(x)}" for dtype, x in speeds.items())
        print(f"  depth {depth:6}   {line}   ratio {median(speeds[other]) / median(speeds[base]):.2f}", flush=True)
        found[str(depth)] = speeds
    return found


def texts(place: Path) -> list[Path]:
    """The file, or every file of the folder."""
    found = [place] if place.is_file() else sorted(p for p in place.glob("*") if p.is_file()) if place.is_dir() else []
    if not found:
        sys.exit(f"{place}: no text there; name a file or a folder with --text")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a name or a path; the default model when absent")
    parser.add_argument("--against", default=None, help="compare it with this model instead; a name or a path")
    parser.add_argument(
        "--text", type=Path, default=ROOT.parent / "shared" / "data" / "text", help="a file or a folder"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="of each file; 0: speed only")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    parser.add_argument(
        "--depths", type=int, nargs="*", default=None, help="for decode speed (2048 8128); none, or --against: skip it"
    )
    parser.add_argument("--kv-dtype", choices=("int8", "int16"), default="int8", help="what is compared with f16")
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write a record to benchmarks/results")
    args = parser.parse_args()
    path, threads = str(files.model(args.model)), args.threads or available_cores()
    sides = tuple(Side(dtype, path, dtype) for dtype in ("f16", args.kv_dtype))
    if args.against:
        other = str(files.model(args.against))
        sides = (Side(Path(other).stem, other), Side(Path(path).stem, path))
        if len({side.name for side in sides}) < 2:
            sys.exit(f"--against {args.against}: that is the same model, or has the same file name")
        if not args.tokens:
            sys.exit("--tokens 0 measures speed alone, and --against compares what is read: give it some tokens")
        if args.depths:
            sys.exit("--depths measures the two kinds of keys and values, and --against compares files: one at a time")
    depths = [] if args.against else [2048, 8192 - 64] if args.depths is None else args.depths
    quality: dict[str, Any] = {}
    speed: dict[str, Any] = {}
    if args.tokens:
        print(f"{args.model or 'default model'}: perplexity, windows of {args.context} every {args.stride} tokens")
        quality = measure_quality(args, (sides[0], sides[1]), threads)
    if depths:
        print(f"decode tokens/s, {threads} threads, median of {args.rounds} (lowest to highest)")
        speed = measure_speed(args, depths, path, threads)
    if args.save:
        sizes = {"context": args.context, "stride": args.stride, "threads": threads, "decode": args.decode}
        name = "perplexity" if quality else f"kv-dtypes-depth{'-'.join(map(str, depths))}"
        other = Path(sides[0].path).name if args.against else None
        body = {"model": Path(path).name, "against": other, **sizes, "quality": quality, "decode": speed}
        print("saved", save(name, body))


if __name__ == "__main__":
    main()
