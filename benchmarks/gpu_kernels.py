"""Checks and times every CUDA kernel at the shapes of an 8B model: one command, one table.

    python -m benchmarks.gpu_kernels                 check, time, print
    python -m benchmarks.gpu_kernels --json FILE     and write the record
    python -m benchmarks.gpu_kernels --sweep KIND…   try configurations instead (skinny fp8 w8a8 int4 tiled tiled8 decode kv8 prompt)

A row gives the relative error against a float32 or float64 computation of the same inputs, the time of one launch in a
graph of many over rotating buffers, the rate, and the fraction of the ceiling measured on the same machine first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_sweep
from benchmarks.gpu_steps import step_seconds
from benchmarks.gpu_tiled import tiled
from benchmarks.gpu_timing import Row, copy_rate, graph_seconds, matmul_rate, off
from quire.backends.cuda.deterministic import SPLIT
from quire.backends.cuda.kernels import candidates, fp8
from quire.backends.cuda.kernels.attention import PROMPT, attention, choose_splits, decode_tile, workspace
from quire.backends.cuda.kernels.gates import gated_rows
from quire.backends.cuda.kernels.norm import rms_norm
from quire.backends.cuda.kernels.prefix import shared_attention
from quire.backends.cuda.kernels.product import product
from quire.backends.cuda.kernels.rope import angle_table, rope_write
from quire.backends.cuda.kernels.sample import choose
from quire.backends.cuda.kernels.skinny import skinny
from quire.backends.cuda.kernels.tuning import int4_shape, skinny_shape
from quire.backends.torch.batch import Shared

H, HK, DIM, D, INNER = 32, 8, 128, 4096, 14336


def products() -> Iterator[Row]:
    """Every projection, one row and a few, in the forms a backend would use; parts are left to their reader."""
    for kind, m in (("skinny", 1), ("skinny", 2), ("skinny", 8), ("skinny", 16), ("w8a8", 1), ("w8a8", 16), ("fp8", 1)):
        for name, (n, k, glu, norm, _) in gpu_sweep.PROJECTIONS.items():
            fused = m == 1 and kind != "w8a8"  # as a backend has it: the norm on the way in, where there is one
            dtype = torch.bfloat16 if kind == "skinny" else fp8.E4M3
            shape = skinny_shape(n, k, m, dtype, gated=glu, fused=fused, eight=kind == "w8a8")
            calls, work = gpu_sweep.skinny_calls(name, shape, m, kind, small=False)
            form = {"skinny": "bf16", "fp8": "fp8 w, fp16 x", "w8a8": "fp8"}[kind]
            yield Row(
                f"{form} m={m} {name}", product_error(n, k, m, kind, glu, fused and norm), graph_seconds(calls), work
            )
            del calls
    for name, (n, k, glu, _, _) in gpu_sweep.PROJECTIONS.items():
        calls, work = gpu_sweep.int4_calls(name, int4_shape(n, k, gated=glu), 1, small=False)
        yield Row(f"int4 m=1 {name}", None, graph_seconds(calls), work)
        del calls


def product_error(n: int, k: int, m: int, kind: str, glu: bool, norm: bool) -> float:
    """A product of the full depth (k) and up to 4,096 channels, against float64."""
    n = min(n, 4096)
    rows = 2 * n if glu else n
    half = torch.bfloat16 if kind == "skinny" else torch.float16
    w, x = torch.randn(rows, k, device="cuda").to(half) * k**-0.5, torch.randn(m, k, device="cuda").to(half)
    y = torch.full((m, n), float("nan"), device="cuda", dtype=half)
    options: dict[str, Any] = {"act": "swiglu" if glu else ""}
    exact_x, exact_w = x.double(), w.double()
    if kind != "skinny":
        w, options["w_scale"] = fp8.quantize_weight(w)
        exact_w = fp8.dequantize_weight(w, options["w_scale"]).double()
    if kind == "w8a8":
        x8, options["x_scale"] = torch.empty(m, k, device="cuda", dtype=fp8.E4M3), torch.empty(m, device="cuda")
        fp8.quantize_rows(x, x8, options["x_scale"])
        x, exact_x = x8, x8.double() * options["x_scale"].double()[:, None]
    if norm:
        options |= {"norm": torch.rand(k, device="cuda"), "eps": 1e-5}
        exact_x = exact_x / (exact_x.square().mean(1, keepdim=True) + 1e-5).sqrt() * options["norm"].double()
    shape = skinny_shape(n, k, m, w.dtype, gated=glu, fused=m == 1 and kind != "w8a8", eight=kind == "w8a8")
    if shape.splits > 1:
        options["part"] = torch.empty(shape.splits, m, n, device="cuda")
    skinny(x, w, y, shape, **options)
    want = exact_x @ exact_w.T
    if glu:
        gate, up = want.chunk(2, 1)
        want = gate * torch.sigmoid(gate) * up
    return off(y, want)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, length: int
) -> torch.Tensor:
    """One sequence's last rows over its pages, in float32: q [n, H, D]."""
    keys = k[table.long()].reshape(-1, HK, DIM)[:length].float().repeat_interleave(H // HK, 1)
    values = v[table.long()].reshape(-1, HK, DIM)[:length].float().repeat_interleave(H // HK, 1)
    score = torch.einsum("thd,shd->hts", q.float(), keys) * DIM**-0.5
    at = torch.arange(length - q.shape[0], length, device="cuda")
    hidden = torch.arange(length, device="cuda")[None, :] > at[:, None]
    return torch.einsum("hts,shd->thd", score.masked_fill(hidden, float("-inf")).softmax(-1), values)


def paged(batch: int, context: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    pages = -(-context // 16)
    k, v = (torch.randn(batch * pages, 16, HK, DIM, device="cuda").bfloat16() for _ in range(2))
    q = torch.randn(batch * rows, H, DIM, device="cuda").bfloat16()
    return q, k, v, {
        "q_start": (torch.arange(batch + 1, device="cuda") * rows).int(),
        "kv_len": torch.full((batch,), context, device="cuda").int(),
        "pos": torch.arange(context - rows, context, device="cuda").int().repeat(batch),
        "table": torch.randperm(batch * pages, device="cuda").int().view(batch, pages),
    }  # fmt: skip


def attentions() -> Iterator[Row]:
    for batch, context in ((1, 640), (1, 8192), (1, 131072), (64, 640), (256, 640)):
        splits = choose_splits(batch, HK, context)
        q, k, v, arrays = paged(batch, context, 1)
        out, space = torch.empty_like(q), workspace(batch, H, DIM, splits, "cuda") if splits > 1 else None
        attention(q, k, v, out, **arrays, scale=DIM**-0.5, max_q=1, splits=splits, space=space)
        wrong = off(out[-1:], dense_attention(q[-1:], k, v, arrays["table"][-1], context))
        del q, k, v
        for dtype, name in ((torch.bfloat16, "bf16"), (fp8.E4M3, "fp8 cache")):
            tile = decode_tile(batch * HK * splits, H // HK)
            calls, work = gpu_sweep.decode_calls(batch, context, tile, splits, small=False, dtype=dtype)
            error = wrong if dtype == torch.bfloat16 else None
            yield Row(f"decode {batch} x {context} {name}, {splits} parts", error, graph_seconds(calls), work)
            del calls
    for tokens in (512, 2048, 8192):
        q, k, v, arrays = paged(1, tokens, tokens)
        out = torch.empty_like(q)
        attention(q, k, v, out, **arrays, scale=DIM**-0.5, max_q=tokens)
        last = dense_attention(q[-64:], k, v, arrays["table"][0], tokens)
        calls, work = gpu_sweep.prompt_calls(tokens, PROMPT, small=False)
        yield Row(f"prompt {tokens}", off(out[-64:], last), graph_seconds(calls), work, flops=True)
    yield shared_prefix(256, 2048, 128)


def shared_prefix(batch: int, prefix: int, own: int) -> Row:
    """Rows that share a prefix: bytes are those of the prefix once and of each row's own pages."""
    q, k, v, arrays = paged(batch, prefix + own, 1)
    arrays["table"][:, : prefix // 16] = arrays["table"][0, : prefix // 16].clone()
    start = torch.tensor([0, batch], device="cuda").int()
    groups = Shared(
        start, torch.tensor([prefix], device="cuda").int(), arrays["table"][:1, : prefix // 16].contiguous(),
        torch.full((batch,), prefix, device="cuda").int(),
    )  # fmt: skip
    out, space = torch.empty_like(q), workspace(batch, H, DIM, 5, "cuda")

    def call() -> None:
        shared_attention(
            q, k, v, out, **arrays, groups=groups, scale=DIM**-0.5, max_q=1, space=space, own_splits=1, prefix_splits=4
        )

    call()
    wrong = off(out[-1:], dense_attention(q[-1:], k, v, arrays["table"][-1], prefix + own))
    work = 2.0 * 2 * batch * (prefix + own) * DIM * H
    return Row(f"shared prefix {batch} x ({prefix} + {own})", wrong, graph_seconds([call] * 8), work, flops=True)


def elementwise() -> Iterator[Row]:
    for rows in (1, 256, 8192):
        x, r, o = (torch.randn(rows, D, device="cuda").bfloat16() for _ in range(3))
        w = torch.rand(D, device="cuda").bfloat16()
        before = r.clone()
        rms_norm(x, w, 1e-5, o, residual=r)
        summed = (x.float() + before.float()).bfloat16().double()
        want = summed / (summed.square().mean(1, keepdim=True) + 1e-5).sqrt() * w.double()
        wrong = off(o, want)
        seconds = graph_seconds([lambda x=x, r=r, o=o, w=w: rms_norm(x, w, 1e-5, o, residual=r)] * 16)
        yield Row(f"residual + norm {rows} x {D}", wrong, seconds, 4 * x.nbytes)
    for rows in (256, 8192):
        x = torch.randn(rows, 2 * INNER, device="cuda").bfloat16()
        o = torch.empty(rows, INNER, device="cuda").bfloat16()
        o8, s = torch.empty(rows, INNER, device="cuda", dtype=fp8.E4M3), torch.empty(rows, device="cuda")
        gated_rows(x, o, "swiglu")
        gate, up = x[:64].double().chunk(2, 1)
        wrong = off(o[:64], gate * torch.sigmoid(gate) * up)
        yield Row(
            f"SwiGLU {rows} x {INNER}",
            wrong,
            graph_seconds([lambda x=x, o=o: gated_rows(x, o, "swiglu")] * 8),
            x.nbytes + o.nbytes,
        )
        seconds = graph_seconds([lambda x=x, o8=o8, s=s: gated_rows(x, o8, "swiglu", scales=s)] * 8)
        yield Row(f"SwiGLU to fp8 {rows} x {INNER}", None, seconds, x.nbytes + o8.nbytes)
    angles = angle_table(torch.rand(DIM // 2), 8192).cuda()
    for rows in (1, 256, 8192):
        qkv = torch.randn(rows, (H + 2 * HK) * DIM, device="cuda").bfloat16()
        q, k, v, _ = paged(1, max(rows, 16), rows)
        place = torch.randperm(max(rows, 16), device="cuda").int()[:rows]
        pos = torch.randint(0, 8192, (rows,), device="cuda").int()
        call = lambda qkv=qkv, q=q, k=k, v=v, pos=pos, place=place: rope_write(  # noqa: E731
            qkv, q, k, v, angles=angles, pos=pos, write=place, pairs=False
        )
        yield Row(f"RoPE + cache write {rows}", None, graph_seconds([call] * 16), 2 * qkv.nbytes)


def large_products() -> Iterator[Row]:
    """fp8 through cuBLASLt with a scale a row and a channel; the quantization of x beside it."""
    for rows in (64, 256, 2048):
        for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
            x, w = torch.randn(rows, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
            w8, ws = fp8.quantize_weight(w)
            x8, xs = torch.empty(rows, k, device="cuda", dtype=fp8.E4M3), torch.empty(rows, device="cuda")
            fp8.quantize_rows(x, x8, xs)
            out = torch.empty(rows, n, device="cuda").bfloat16()
            fp8.scaled_product(x8, xs, w8, ws, out)
            want = (x8.float() * xs[:, None]) @ fp8.dequantize_weight(w8, ws).T
            call = lambda x8=x8, xs=xs, w8=w8, ws=ws, out=out: fp8.scaled_product(x8, xs, w8, ws, out)  # noqa: E731
            yield Row(
                f"fp8 cuBLASLt {rows} x {n} x {k}", off(out, want), graph_seconds([call] * 8), 2.0 * rows * n * k, True
            )


def invariant() -> Iterator[Row]:
    """What the deterministic mode uses, and cuBLAS at the same shapes. Bytes are told for few rows, operations for many."""
    for m in (1, 16, 64, 256, 2048):
        for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
            ws = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(-(-(1 << 28) // (2 * n * k)))]
            x, y = torch.randn(m, k, device="cuda").bfloat16(), torch.empty(m, n, device="cuda").bfloat16()
            product(x, ws[0], y)
            wrong, many = off(y, x.float() @ ws[0].float().T), m >= 256
            work = 2.0 * m * n * k if many else float(ws[0].nbytes)
            own = graph_seconds([lambda w=w, x=x, y=y: product(x, w, y) for w in ws])
            yield Row(f"invariant {m} x {n} x {k}", wrong, own, work, many)
            library = graph_seconds([lambda w=w, x=x, y=y: torch.mm(x, w.T, out=y) for w in ws])
            yield Row(f"cuBLAS    {m} x {n} x {k}", None, library, work, many)
            del ws
    for batch, context, rows in (
        (1, 640, 1),
        (1, 8192, 1),
        (64, 640, 1),
        (256, 640, 1),
        (1, 2048, 2048),
        (1, 8192, 8192),
    ):
        q, k, v, arrays = paged(batch, context, rows)
        out, splits = torch.empty_like(q), -(-context // SPLIT)
        apart = batch * HK < 264 and rows == 1 and splits > 1
        space = workspace(batch * rows, H, DIM, splits, "cuda", sums=True) if apart else None
        call = lambda q=q, k=k, v=v, out=out, arrays=arrays, rows=rows, splits=splits, space=space: attention(  # noqa: E731
            q, k, v, out, **arrays, scale=DIM**-0.5, max_q=rows, splits=splits, split_len=SPLIT, space=space
        )
        call()
        last = min(rows, 64)
        wrong = off(out[-last:], dense_attention(q[-last:], k, v, arrays["table"][-1], context))
        work = 2.0 * rows * rows * DIM * H if rows > 1 else 4.0 * batch * context * HK * DIM
        yield Row(
            f"invariant attention {batch} x {context}, {rows} rows", wrong, graph_seconds([call] * 4), work, rows > 1
        )


def sampling() -> Iterator[Row]:
    for rows in (1, 64, 256):
        scores = torch.randn(rows, 128256, device="cuda") * 4
        found, tokens = candidates.scratch(rows, 128256, "cuda"), torch.empty(rows, device="cuda").int()
        for name, k, p, wanted in (
            ("greedy", 0, 1.0, 0),
            ("temperature", 0, 1.0, 0),
            ("top-k 40", 40, 1.0, 1),
            ("top-p 0.9", 0, 0.9, 1),
            ("both", 40, 0.9, 1),
        ):
            one = [0.0 if name == "greedy" else 0.8, k, 1.0, p, 0.0, 1.0, 0.0, 0.0, 0.37]
            params = torch.tensor([one] * rows, dtype=torch.float64, device="cuda")
            flags = torch.full((rows,), wanted, device="cuda").int()
            call: Callable[[], None] = lambda s=scores, w=params, f=flags, t=tokens, b=found: choose(s, w, f, t, b)  # noqa: E731
            call()
            wrong = float((tokens != scores.argmax(1)).float().mean()) if name == "greedy" else None
            yield Row(f"sample {rows} x 128256 {name}", wrong, graph_seconds([call] * 4), scores.nbytes)


def steps() -> Iterator[Row]:
    for rows, eight in (
        (1, False),
        (1, True),
        (8, False),
        (16, True),
        (64, False),
        (64, True),
        (256, False),
        (256, True),
    ):
        seconds, work = step_seconds(rows, 640, fp8=eight)
        yield Row(f"step of kernels, {rows} x 640 {'fp8' if eight else 'bf16'}", None, seconds, work)
        torch.cuda.empty_cache()


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "products": products, "attention": attentions, "elementwise": elementwise, "large": large_products,
    "tiled": tiled, "sampling": sampling, "steps": steps, "invariant": invariant,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", nargs="+", metavar="KIND")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device: torch sees none")
    if options.sweep:
        gpu_sweep.sweep(options.sweep)
        return
    bandwidth, matmul, eight = copy_rate(), matmul_rate(), matmul_rate(fp8.E4M3)
    print(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, bf16 {matmul / 1e12:.0f} TFLOP/s, "
        f"fp8 {eight / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    rows: list[Row] = []
    for name in options.only:
        try:
            for row in SECTIONS[name]():
                rows.append(row)
                print(row.line(bandwidth, matmul, eight), flush=True)
        except Exception as e:  # one section that cannot run must not hide the others
            print(f"{name}: {type(e).__name__}: {str(e)[-300:]}", flush=True)
        torch.cuda.empty_cache()
    if options.json:
        record = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy": bandwidth,
            "matmul": matmul,
            "matmul_fp8": eight,
        }
        options.json.write_text(json.dumps(record | {"rows": [asdict(row) for row in rows]}, indent=1))
    bad = [row.name for row in rows if row.error is not None and not row.error < 2e-2]
    if bad:
        raise SystemExit(f"wrong results: {', '.join(bad)}")


if __name__ == "__main__":
    main()
