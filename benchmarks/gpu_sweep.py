"""Tries launch configurations of the CUDA kernels and prints the best few of each shape: where the static tables come from.

    python -m benchmarks.gpu_kernels --sweep [skinny] [decode] [prompt] [fp8] [int4] [tiled] [tiled8]

Configurations are compiled first, by many processes at once, on small inputs of the same kind (Triton keeps them on
disk); then each is timed alone on 8B shapes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_timing import graph_seconds
from quire.backends.cuda.kernels.attention import Tile, attend, workspace
from quire.backends.cuda.kernels.combine import combine
from quire.backends.cuda.kernels.int4 import int4_product
from quire.backends.cuda.kernels.skinny import Shape, skinny
from quire.backends.cuda.kernels.tiled import tiled_product
from quire.backends.cuda.tiles import GroupedRows
from quire.backends.torch.quantized import WIDTH, Tiled

# name: n, k, swiglu, norm, residual
PROJECTIONS = {
    "qkv 6144x4096": (6144, 4096, False, True, False),
    "o 4096x4096": (4096, 4096, False, False, True),
    "gate_up 28672x4096": (14336, 4096, True, True, False),
    "down 4096x14336": (4096, 14336, False, False, True),
    "head 128256x4096": (128256, 4096, False, True, False),
}


def skinny_calls(
    name: str, shape: Shape, m: int, kind: str, *, small: bool, memory: float = 1.5e9
) -> tuple[list[Callable[[], None]], int]:
    """Launches over enough weight copies to defeat the L2, and the bytes of one."""
    n, k, swiglu, norm, residual = PROJECTIONS[name]
    if small:
        n, k = max(64, shape.block_n), shape.block_k * shape.splits * 16
    w_dtype = torch.bfloat16 if kind == "skinny" else torch.float8_e4m3fn
    rows = 2 * n if swiglu else n
    w_bytes = rows * k * w_dtype.itemsize
    copies = 1 if small else max(2, int(memory / w_bytes))
    base = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    ws = [base.to(w_dtype).clone() for _ in range(copies)]
    half = torch.bfloat16 if w_dtype == torch.bfloat16 else torch.float16  # fp8 becomes fp16 in one instruction
    x = torch.randn(m, k, device="cuda", dtype=half)
    y = torch.empty(m, n, device="cuda", dtype=half)
    options: dict[str, Any] = {"act": "swiglu" if swiglu else ""}
    if kind == "w8a8":
        x, options["x_scale"] = x.to(w_dtype), torch.rand(m, device="cuda")
    if norm and not shape.dot:
        options |= {"norm": torch.rand(k, device="cuda").to(half), "eps": 1e-5}
    if residual:
        options["residual"] = torch.randn(m, n, device="cuda").to(half)
    if w_dtype != torch.bfloat16:
        options["w_scale"] = torch.rand(rows, device="cuda")
    if shape.splits > 1:
        if swiglu:
            return [], 0
        options |= {"part": torch.empty(shape.splits, m, n, device="cuda"), "add_parts": False}
    calls = [lambda w=w: skinny(x, w, y, shape, **options) for w in ws]
    return calls * max(1, 16 // copies), w_bytes


def skinny_shapes(m: int, kind: str) -> Iterator[Shape]:
    """What is tried for a product: `kind` is skinny (bf16), fp8 (fp8 weights, fp16 rows) or w8a8 (both fp8)."""
    f = 1 if kind == "skinny" else 2
    swapped = [
        (64, 128, 4, 1), (64, 128, 3, 4), (64, 128, 4, 4), (64, 128, 5, 2), (64, 128, 6, 2), (64, 64, 6, 4), (64, 64, 7, 1),
        (128, 64, 4, 4), (128, 64, 6, 2), (128, 128, 3, 2),
    ]  # fmt: skip
    plain = [
        (64, 128, 4, 1), (64, 128, 4, 4), (64, 128, 3, 4), (32, 128, 5, 2), (32, 128, 5, 1), (32, 128, 4, 4), (32, 256, 3, 2),
        (64, 64, 6, 1), (64, 64, 5, 8), (32, 256, 3, 1), (64, 128, 3, 1), (128, 64, 4, 1),
    ]  # fmt: skip
    for n, k, s, splits in () if kind == "fp8" else swapped:
        yield Shape(n, k * f, 4, s, splits, swap=True, pdl=True)
    for n, k, s, splits in plain if kind == "fp8" else ():
        yield Shape(n, k * f, 4, s, splits, pdl=True)
        if n == 64:
            yield Shape(n, k * f, 8, s, splits, pdl=True)
    if kind == "skinny" and m == 1:
        for n, k, w in ((4, 1024, 4), (8, 512, 4), (4, 512, 2), (4, 2048, 8), (16, 256, 4)):
            yield Shape(n, k, w, 1, dot=False, pdl=True)


def int4_calls(name: str, shape: Shape, m: int, *, small: bool) -> tuple[list[Callable[[], None]], int]:
    group = 128
    n, k, swiglu, _, _ = PROJECTIONS[name]
    if small:
        n, k = 256, 2 * group * 4 * shape.splits
    rows = 2 * n if swiglu else n
    copies = 1 if small else max(2, int(1e9 / (rows * k / 2)))
    ws = [torch.randint(0, 256, (rows, k // 2), device="cuda", dtype=torch.uint8) for _ in range(copies)]
    scale, zero = (torch.rand(k // group, rows, device="cuda").half() for _ in range(2))
    x, y = torch.randn(m, k, device="cuda").half(), torch.empty(m, n, device="cuda").half()
    if shape.splits > 1 and swiglu:
        return [], 0
    part = torch.empty(shape.splits, m, n, device="cuda")
    calls = [
        lambda w=w: int4_product(
            x, w, scale, zero, y, shape, group=group, act="swiglu" if swiglu else "", part=part, add_parts=False
        )
        for w in ws
    ]
    return calls * max(1, 16 // copies), rows * k // 2 + 2 * scale.nbytes


def tiled_calls(name: str, shape: Shape, m: int, high: int, *, small: bool) -> tuple[list[Callable[[], None]], float]:
    """fp8 weights with scales for tiles. `high`: rows of a program, which are fp8 then; 0: few rows of bf16.

    Bytes of few rows, operations of many.
    """
    n, k, swiglu, _, residual = PROJECTIONS[name]
    swiglu = swiglu and not high
    if small:
        n, k = 256, 128 * 4 * shape.splits
    elif not swiglu and PROJECTIONS[name][2]:
        n *= 2
    if shape.splits > 1 and swiglu:
        return [], 0
    rows = 2 * n if swiglu else n
    copies = 1 if small else max(2, int((1.5e9 if not high else 4e8) / (rows * k)))
    ws = [Tiled.empty(rows, k, WIDTH, torch.device("cuda")) for _ in range(copies)]
    for w in ws:
        w.codes.view(torch.uint8).random_(0, 0x70)  # numbers, all of them
        w.scale.uniform_(1e-4, 1e-3)
    x, y = torch.randn(m, k, device="cuda").bfloat16(), torch.empty(m, n, device="cuda").bfloat16()
    options: dict[str, Any] = {"act": "swiglu" if swiglu else ""}
    if high:
        made = GroupedRows.of(x)
        x, options = made.codes, {"x_scale": made.scale, "rows": high}
    elif residual:
        options["residual"] = torch.randn(m, n, device="cuda").bfloat16()
    if shape.splits > 1:
        options |= {"part": torch.empty(shape.splits, m, n, device="cuda"), "add_parts": False}
    calls = [lambda w=w: tiled_product(x, w, y, shape, **options) for w in ws]
    work = 2.0 * m * n * k if high else float(ws[0].codes.nbytes + ws[0].scale.nbytes)
    return calls * max(1, (16 if not high else 4) // copies), work


def tiled_jobs(what: list[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    names = [name for name in PROJECTIONS if not name.startswith("head")]
    few = [(n, w, st, splits, swap) for n, w, st in ((64, 4, 3), (64, 4, 5), (32, 4, 5), (128, 8, 4)) for splits in (1, 2, 4, 8) for swap in (False, True)]  # fmt: skip
    many = [
        (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 8, 4), (128, 128, 8, 3),
        (128, 128, 8, 4), (128, 64, 4, 4), (128, 64, 8, 4),
    ]  # fmt: skip
    for m in (1, 16, 64) if "tiled" in what else ():
        for name in names:
            for n, w, st, splits, swap in few:
                yield f"tiled m={m} {name}", (tiled_calls, name, Shape(n, 0, w, st, splits, swap=swap, pdl=True), m, 0)
    for m in (64, 256, 2048) if "tiled8" in what else ():
        for name in names:
            for high, n, w, st in many:
                for swap in (False, True):
                    shape = Shape(n, 0, w, st, swap=swap, pdl=True)
                    yield f"tiled8 m={m} {name}", (tiled_calls, name, shape, m, high)


def decode_calls(
    batch: int,
    context: int,
    tile: Tile,
    splits: int,
    *,
    small: bool,
    dtype: torch.dtype = torch.bfloat16,
    pdl: bool = True,
) -> tuple[list[Callable[[], None]], int]:
    heads, kv_heads, dim = 32, 8, 128
    if small:
        batch, context = min(batch, 2), 64
    pages = -(-context // 16)
    one = batch * context * kv_heads * dim * 2 * dtype.itemsize
    layers = 1 if small else max(2, min(32, int(1.5e9 / one)))
    shape = (batch * pages, 16, kv_heads, dim)
    first = torch.randn(shape, device="cuda").to(dtype)
    caches = [(first.clone(), first.clone()) for _ in range(layers)]
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
        scales = torch.ones(batch * pages, kv_heads, 16, device="cuda")
        arrays |= {"k_scale": scales, "v_scale": scales}
    space = workspace(batch, heads, dim, splits, "cuda") if splits > 1 else None

    def call(k: torch.Tensor, v: torch.Tensor) -> None:
        attend(q, k, v, out, tile=tile, max_rows=1, scale=dim**-0.5, splits=splits, space=space, pdl=pdl, **arrays)
        if space is not None:
            combine(space.part, space.lse, out, q_start=arrays["q_start"], max_q=1, parts=splits, pdl=pdl)

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
        (32, 1, 4), (32, 1, 5), (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3), (128, 4, 2),
    )),
]  # fmt: skip
PROMPT_TILES = [
    Tile(r, n, w, s)
    for r, n, w, s in (
        (128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 4, 2), (128, 32, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3),
        (256, 64, 8, 3), (256, 32, 8, 4), (128, 128, 8, 3), (256, 128, 8, 2), (128, 64, 4, 2), (64, 64, 2, 3), (128, 128, 4, 3),
    )
]  # fmt: skip


def jobs(what: list[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(group, arguments of its calls) of everything that is tried."""
    for kind, rows in (("skinny", (1, 8, 64)), ("fp8", (1, 8)), ("w8a8", (1, 16, 64))):
        if kind in what:
            for m in rows:
                for name in PROJECTIONS:
                    for shape in skinny_shapes(m, kind):
                        yield f"{kind} m={m} {name}", (skinny_calls, name, shape, m, kind)
    if "int4" in what:
        for m in (1, 8):
            for name in PROJECTIONS:
                for n, w, st, splits in (
                    (64, 4, 3, 1), (64, 4, 4, 4), (64, 8, 3, 4), (64, 8, 4, 1), (128, 8, 3, 4), (32, 4, 4, 4), (32, 4, 4, 1), (32, 2, 4, 4),
                ):  # fmt: skip
                    yield f"int4 m={m} {name}", (int4_calls, name, Shape(n, 0, w, st, splits), m)
    yield from tiled_jobs(what)
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
            name, shape, m, form = rest
            key = (*PROJECTIONS[name][2:], shape, m > 16, form)
        elif make is int4_calls:
            key = (PROJECTIONS[rest[0]][2], rest[1])
        elif make is tiled_calls:
            key = (
                *PROJECTIONS[rest[0]][2:3],
                PROJECTIONS[rest[0]][4] and not rest[3],
                rest[1],
                rest[2] if not rest[3] else 0,
                rest[3],
            )
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
    before, lines = "", []
    for group, job in [*jobs(what), ("", None)]:
        if group != before:
            print(before, *(line for _, line in sorted(lines)[:best]), sep="\n   ", flush=True)
            before, lines = group, []
        if job is None:
            break
        try:
            calls, work = build(job, False)
            if calls:
                seconds = graph_seconds(calls, replays=3)
                make, *rest = job
                text = " ".join(str(r) for r in rest if isinstance(r, Shape | Tile))
                text += f" splits={rest[3]}" if make is decode_calls else ""
                text += f" rows={rest[3]}" if make is tiled_calls else ""
                lines.append((seconds, f"{seconds * 1e6:8.1f} us {work / seconds / 1e12:7.2f} T/s  {text}"))
            del calls
        except Exception as e:
            print("failed", group, job[1:], str(e).splitlines()[-1][:100], flush=True)
    print(f"swept in {time.time() - started:.0f} s", flush=True)
