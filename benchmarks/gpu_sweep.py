"""Tries launch configurations of the CUDA kernels and prints the best few of each shape: where the static tables come from.

    python -m benchmarks.gpu_kernels --sweep [skinny] [decode] [prompt] [fp8] [int4]

Configurations are compiled first, by many processes at once, on small inputs of the same kind (Triton keeps them on
disk); then each is timed alone on 8B shapes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_timing import graph_seconds
from quire.backends.cuda.kernels.attention import Tile, attend, workspace
from quire.backends.cuda.kernels.combine import combine
from quire.backends.cuda.kernels.skinny import Shape, skinny

# name: n, k, swiglu, norm, residual
PROJECTIONS = {
    "qkv 6144x4096": (6144, 4096, False, True, False),
    "o 4096x4096": (4096, 4096, False, False, True),
    "gate_up 28672x4096": (14336, 4096, True, True, False),
    "down 4096x14336": (4096, 14336, False, False, True),
    "head 128256x4096": (128256, 4096, False, True, False),
}


def skinny_calls(
    name: str, shape: Shape, m: int, w_dtype: torch.dtype, *, small: bool, memory: float = 1.5e9
) -> tuple[list[Callable[[], None]], int]:
    """Launches over enough weight copies to defeat the L2, and the bytes of one."""
    n, k, swiglu, norm, residual = PROJECTIONS[name]
    if small:
        n, k = max(64, shape.block_n), shape.block_k * shape.splits * 16
    rows = 2 * n if swiglu else n
    w_bytes = rows * k * w_dtype.itemsize
    copies = 1 if small else max(2, int(memory / w_bytes))
    base = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    ws = [base.to(w_dtype).clone() for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"swiglu": swiglu}
    if norm:
        options |= {"norm": torch.rand(k, device="cuda").bfloat16(), "eps": 1e-5}
    if residual:
        options["residual"] = torch.randn(m, n, device="cuda").bfloat16()
    if w_dtype != torch.bfloat16:
        options["w_scale"] = torch.rand(rows, device="cuda")
    if shape.splits > 1:
        if norm or swiglu:
            return [], 0
        options["part"] = torch.empty(shape.splits, m, n, device="cuda")
    calls = [lambda w=w: skinny(x, w, y, shape, **options) for w in ws]
    return calls * max(1, 16 // copies), w_bytes


def skinny_shapes(m: int, fp8: bool) -> Iterator[Shape]:
    f = 2 if fp8 else 1
    plain = [
        *(Shape(n, k * f, w, s) for n, k, w, s in (
            (16, 256, 4, 4), (16, 512, 4, 3), (16, 128, 2, 6), (32, 128, 4, 5), (32, 256, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6),
        )),
        *(Shape(n, k * f, w, s, swap=True) for n, k, w, s in ((64, 128, 4, 4), (64, 64, 4, 7), (128, 64, 4, 4))),
        Shape(64, 128 * f, 4, 4, splits=4), Shape(32, 128 * f, 4, 5, splits=2),
    ]  # fmt: skip
    if m == 1:
        plain += [
            Shape(n, k * f, w, s, dot=False)
            for n, k, w, s in ((2, 2048, 4, 1), (4, 1024, 4, 1), (8, 512, 4, 1), (4, 512, 2, 1), (4, 2048, 8, 1), (1, 4096, 4, 1), (8, 512, 4, 3))
        ]  # fmt: skip
    for shape in plain:
        yield shape
        if shape.splits == 1:
            yield replace(shape, pdl=True)
            yield replace(shape, pdl=True, lines=8)


def decode_calls(
    batch: int, context: int, tile: Tile, splits: int, *, small: bool, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Callable[[], None]], int]:
    heads, kv_heads, dim = 32, 8, 128
    if small:
        batch, context = min(batch, 2), 64
    pages = -(-context // 16)
    one = batch * context * kv_heads * dim * 2 * dtype.itemsize
    layers = 1 if small else max(2, min(32, int(1.5e9 / one)))
    shape = (batch * pages, 16, kv_heads, dim)
    caches = [tuple(torch.randn(shape, device="cuda").to(dtype) for _ in range(2)) for _ in range(layers)]
    table = torch.randperm(batch * pages, device="cuda").int().view(batch, pages)
    q = torch.randn(batch, heads, dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    arrays: dict[str, Any] = {
        "q_start": torch.arange(batch + 1, device="cuda").int(),
        "kv_len": torch.full((batch,), context, device="cuda").int(),
        "pos": torch.full((batch,), context - 1, device="cuda").int(),
        "table": table,
    }
    if dtype != torch.bfloat16:
        arrays |= {"k_scale": torch.ones(kv_heads, device="cuda"), "v_scale": torch.ones(kv_heads, device="cuda")}
    space = workspace(batch, heads, dim, splits, "cuda") if splits > 1 else None

    def call(k: torch.Tensor, v: torch.Tensor) -> None:
        attend(q, k, v, out, tile=tile, max_rows=1, scale=dim**-0.5, splits=splits, space=space, **arrays)
        if space is not None:
            combine(space.part, space.lse, out, q_start=arrays["q_start"], max_q=1, parts=splits)

    return [lambda k=k, v=v: call(k, v) for k, v in caches] * max(1, 16 // layers), one


def prompt_calls(tokens: int, tile: Tile, *, small: bool) -> tuple[list[Callable[[], None]], float]:
    heads, kv_heads, dim = 32, 8, 128
    tokens = 256 if small else tokens
    pages = tokens // 16
    k, v = (torch.randn(pages, 16, kv_heads, dim, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    blocks = tokens // (tile.rows // (heads // kv_heads)) + 1

    def call() -> None:
        attend(
            q, k, v, out, tile=tile, blocks=blocks, q_start=start, kv_len=length, pos=pos, table=table, scale=dim**-0.5
        )

    start = torch.tensor([0, tokens], device="cuda").int()
    length = torch.tensor([tokens], device="cuda").int()
    pos, table = torch.arange(tokens, device="cuda").int(), torch.randperm(pages, device="cuda").int().view(1, pages)
    return [call] * 3, 2.0 * tokens * tokens * dim * heads


DECODE_TILES = [
    *(Tile(16, n, w, s) for n, w, s in (
        (32, 1, 4), (32, 2, 4), (32, 4, 3), (32, 4, 5), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 4, 3),
        (128, 8, 3), (16, 1, 6),
    )),
]  # fmt: skip
PROMPT_TILES = [
    Tile(r, n, w, s)
    for r, n, w, s in (
        (64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2),
        (128, 128, 8, 3), (64, 128, 4, 2), (128, 32, 8, 4), (256, 64, 8, 2), (128, 64, 4, 3),
    )
]  # fmt: skip


def jobs(what: list[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(group, arguments of its calls) of everything that is tried."""
    for kind in ("skinny", "fp8"):
        if kind in what:
            dtype = torch.float8_e4m3fn if kind == "fp8" else torch.bfloat16
            for m in (1, 8):
                for name in PROJECTIONS:
                    for shape in skinny_shapes(m, kind == "fp8"):
                        if shape.pdl != ("pdl" in what):
                            continue
                        yield f"{kind} m={m} {name}", (skinny_calls, name, shape, m, dtype)
    for kind, dtype in (("decode", torch.bfloat16), ("kv8", torch.float8_e4m3fn)):
        if kind in what:
            for batch, context, splits in (
                (1, 640, (4, 8, 16)),
                (1, 8192, (16, 32, 64)),
                (64, 608, (1, 2)),
                (256, 608, (1,)),
            ):
                for tile in DECODE_TILES:
                    for s in splits:
                        yield f"{kind} {batch}x{context}", (decode_calls, batch, context, tile, s, dtype)
    if "prompt" in what:
        for tile in PROMPT_TILES:
            yield "prompt 8192", (prompt_calls, 8192, tile)


def build(job: tuple[Any, ...], small: bool) -> tuple[list[Callable[[], None]], float]:
    make, *rest = job
    if make is decode_calls:
        batch, context, tile, splits, dtype = rest
        return decode_calls(batch, context, tile, splits, small=small, dtype=dtype)
    return make(*rest, small=small)


def _compile(part: int, parts: int, what: list[str]) -> None:
    seen = set()
    every = [job for _, job in jobs(what)]
    for job in every:
        make, *rest = job
        if make is skinny_calls:
            name, shape, m, dtype = rest
            key = (*PROJECTIONS[name][2:], shape, m == 1 and not shape.dot, dtype)
        elif make is decode_calls:
            key = (rest[2], rest[3] > 1, rest[0] > 1, rest[4])
        else:
            key = (rest[1],)
        if key in seen:
            continue
        seen.add(key)
        if len(seen) % parts != part:
            continue
        try:
            for call in build(job, True)[0][:1]:
                call()
            torch.cuda.synchronize()
        except Exception as e:
            print("cannot compile", job, str(e).splitlines()[-1][:100], flush=True)


def warm(what: list[str], parts: int = 14) -> None:
    """Compile every configuration, many at a time."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_compile, args=(i, parts, what)) for i in range(parts)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def sweep(what: list[str], best: int = 4) -> None:
    started = time.time()
    warm(what)
    print(f"compiled in {time.time() - started:.0f} s", flush=True)
    groups: dict[str, list[tuple[float, str]]] = {}
    for group, job in jobs(what):
        try:
            calls, work = build(job, False)
            if calls:
                seconds = graph_seconds(calls, replays=3)
                make, *rest = job
                text = " ".join(str(r) for r in rest if isinstance(r, Shape | Tile)) + (
                    f" splits={rest[3]}" if make is decode_calls else ""
                )
                groups.setdefault(group, []).append(
                    (seconds, f"{seconds * 1e6:8.1f} us {work / seconds / 1e12:7.2f} T/s  {text}")
                )
            del calls
        except Exception as e:
            print("failed", group, job, str(e).splitlines()[-1][:120], flush=True)
    for group, found in groups.items():
        print(group)
        for _, line in sorted(found)[:best]:
            print("  ", line)
    print(f"swept in {time.time() - started:.0f} s", flush=True)
