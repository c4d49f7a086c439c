"""One decode step of an 8B Llama shape as a chain of kernels in a CUDA graph: what a backend can reach, no engine around it.

Rows are sequences of one context length. Up to 64 rows run the skinny products, more go through cuBLAS. Weights are
random; the arithmetic is a real step's, from the first norm to the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_timing import graph_seconds
from quire.backends.cuda.kernels.attention import Tile, attend, choose_splits, decode_tile, workspace
from quire.backends.cuda.kernels.combine import combine
from quire.backends.cuda.kernels.fp8 import quantize_rows, scaled_product
from quire.backends.cuda.kernels.gates import gated_rows
from quire.backends.cuda.kernels.norm import rms_norm
from quire.backends.cuda.kernels.rope import angle_table, rope_write
from quire.backends.cuda.kernels.skinny import skinny
from quire.backends.cuda.kernels.tuning import FEW, ROWS, skinny_shape

D, H, HK, DIM, INNER, VOCAB = 4096, 32, 8, 128, 14336, 128256
QKV = (H + 2 * HK) * DIM


class Step:
    """Buffers and weights of one step; `run` launches it."""

    def __init__(self, rows: int, context: int, *, fp8: bool, layers: int = 32, pdl: bool = True):
        self.rows, self.context, self.fp8, self.layers, self.pdl = rows, context, fp8, layers, pdl
        self.half = torch.float16 if fp8 and rows <= FEW else torch.bfloat16
        new = lambda *s, dtype=self.half: torch.empty(*s, device="cuda", dtype=dtype)  # noqa: E731

        def weight(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            w = torch.randn(n, k, device="cuda", dtype=self.half) * k**-0.5
            if not fp8:
                return w, None
            return (w * 16).to(torch.float8_e4m3fn), torch.full((n,), 1 / 16, device="cuda")

        self.w = [(weight(QKV, D), weight(D, H * DIM), weight(2 * INNER, D), weight(D, INNER)) for _ in range(layers)]
        self.head = weight(VOCAB, D)
        pages = -(-context // 16)
        shape = (rows * pages, 16, HK, DIM)
        self.kv = [
            (torch.randn(shape, device="cuda").to(self.half), torch.randn(shape, device="cuda").to(self.half))
            for _ in range(layers)
        ]
        self.gain = torch.ones(D, device="cuda")  # float32, as models have it
        self.h, self.x, self.act = torch.randn(rows, D, device="cuda").to(self.half), new(rows, D), new(rows, INNER)
        self.qkv, self.gate_up, self.logits = new(rows, QKV), new(rows, 2 * INNER), new(rows, VOCAB)
        self.q, self.out = new(rows, H, DIM), new(rows, H, DIM)
        self.arrays: dict[str, Any] = {
            "q_start": torch.arange(rows + 1, device="cuda").int(),
            "kv_len": torch.full((rows,), context, device="cuda").int(),
            "pos": torch.full((rows,), context - 1, device="cuda").int(),
            "table": torch.randperm(rows * pages, device="cuda").int().view(rows, pages),
        }
        self.write = self.arrays["table"][:, (context - 1) // 16] * 16 + (context - 1) % 16
        self.angles = angle_table(torch.rand(DIM // 2), context).cuda()
        self.splits = choose_splits(rows, HK, context)
        self.space = workspace(rows, H, DIM, self.splits, "cuda") if self.splits > 1 else None
        self.tile: Tile = decode_tile(rows * HK * self.splits, H // HK)
        self.parts: dict[int, torch.Tensor] = {}
        self.x8, self.s = new(rows, INNER, dtype=torch.float8_e4m3fn), new(rows, dtype=torch.float32)

    def product(
        self, x: torch.Tensor, w: tuple[torch.Tensor, torch.Tensor | None], y: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """A skinny product; returns its parts where it leaves some, else y."""
        n = y.shape[1]
        eight = x.dtype == torch.float8_e4m3fn
        fused = self.rows == 1 and not self.fp8
        shape = skinny_shape(
            n, x.shape[1], self.rows, w[0].dtype, gated=bool(options.get("act")), fused=fused, eight=eight
        )
        if eight:
            options["x_scale"] = self.s
        if shape.splits > 1:
            if n not in self.parts:
                self.parts[n] = torch.empty(shape.splits, self.rows, n, device="cuda")
            options |= {"part": self.parts[n], "add_parts": False}
        skinny(x, w[0], y, shape, w_scale=w[1], **options)
        return self.parts[n] if shape.splits > 1 else y

    def attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        k, v = self.kv[layer]
        rope_write(
            qkv, self.q, k, v, angles=self.angles, pos=self.arrays["pos"], write=self.write, pairs=False, pdl=self.pdl
        )
        attend(
            self.q, k, v, self.out, tile=self.tile, max_rows=1, scale=DIM**-0.5, splits=self.splits, space=self.space,
            pdl=self.pdl, **self.arrays,
        )  # fmt: skip
        if self.space is not None:
            combine(
                self.space.part, self.space.lse, self.out, q_start=self.arrays["q_start"], max_q=1, parts=self.splits,
                pdl=self.pdl,
            )  # fmt: skip
        return self.out.view(self.rows, H * DIM)

    def one_row(self) -> None:
        """bf16, one row: seven launches a layer."""
        norm = {"norm": self.gain, "eps": 1e-5}
        for i, (wqkv, wo, wgu, wd) in enumerate(self.w):
            qkv = self.product(self.h, wqkv, self.qkv, **norm)
            out = self.attend(qkv, i)
            self.product(out, wo, self.h, residual=self.h)
            self.product(self.h, wgu, self.act, act="swiglu", **norm)
            self.product(self.act, wd, self.h, residual=self.h)
        self.product(self.h, self.head, self.logits, **norm)

    def few_rows(self) -> None:
        """Up to 64 rows, or fp8: norms add the parts that split products leave."""
        parts: torch.Tensor | None = None
        x = torch.empty_like(self.x, dtype=torch.float8_e4m3fn) if self.fp8 else self.x
        for i, (wqkv, wo, wgu, wd) in enumerate(self.w):
            self.norm(parts, x)
            out = self.attend(self.product(x, wqkv, self.qkv), i)
            self.norm(self.product(self.eight(out), wo, self.x), x)
            self.product(x, wgu, self.act, act="swiglu")
            parts = self.product(self.eight(self.act), wd, self.x)
        self.norm(parts, x)
        self.product(x, self.head, self.logits)

    def eight(self, x: torch.Tensor) -> torch.Tensor:
        """fp8 rows where that pays: few rows are multiplied as they are."""
        if not self.fp8 or self.rows <= FEW:
            return x
        x8 = self.x8.view(-1)[: x.numel()].view(x.shape)
        quantize_rows(x, x8, self.s, pdl=self.pdl)
        return x8

    def norm(self, parts: torch.Tensor | None, out: torch.Tensor) -> None:
        scales = self.s if out.dtype == torch.float8_e4m3fn else None
        if parts is None:
            rms_norm(self.h, self.gain, 1e-5, out, scales=scales, pdl=self.pdl)
        else:
            rms_norm(parts, self.gain, 1e-5, out, residual=self.h, scales=scales, pdl=self.pdl)

    def many_rows(self) -> None:
        """cuBLAS for the products."""
        if self.fp8:
            self.many_rows_fp8()
            return
        for i, (wqkv, wo, wgu, wd) in enumerate(self.w):
            self.norm(None if i == 0 else self.x, self.x)
            out = self.attend(torch.mm(self.x, wqkv[0].t(), out=self.qkv), i)
            self.norm(torch.mm(out, wo[0].t(), out=self.x), self.x)
            torch.mm(self.x, wgu[0].t(), out=self.gate_up)
            gated_rows(self.gate_up, self.act, "swiglu")
            torch.mm(self.act, wd[0].t(), out=self.x)
        self.norm(self.x, self.x)
        torch.mm(self.x, self.head[0].t(), out=self.logits)

    def many_rows_fp8(self) -> None:
        x8, s = torch.empty_like(self.x, dtype=torch.float8_e4m3fn), self.s
        for i, (wqkv, wo, wgu, wd) in enumerate(self.w):
            rms_norm(self.h if i == 0 else self.x, self.gain, 1e-5, x8, residual=None if i == 0 else self.h, scales=s)
            scaled_product(x8, s, *wqkv, self.qkv)  # type: ignore[arg-type]
            quantize_rows(self.attend(self.qkv, i), x8, s)
            scaled_product(x8, s, *wo, self.x)  # type: ignore[arg-type]
            rms_norm(self.x, self.gain, 1e-5, x8, residual=self.h, scales=s)
            scaled_product(x8, s, *wgu, self.gate_up)  # type: ignore[arg-type]
            gated_rows(self.gate_up, self.x8, "swiglu", scales=s)
            scaled_product(self.x8, s, *wd, self.x)  # type: ignore[arg-type]
        rms_norm(self.x, self.gain, 1e-5, x8, residual=self.h, scales=s)
        scaled_product(x8, s, *self.head, self.logits)  # type: ignore[arg-type]

    @property
    def run(self) -> Callable[[], None]:
        if self.rows > ROWS:
            return self.many_rows
        return self.one_row if self.rows == 1 and not self.fp8 else self.few_rows

    @property
    def floor_bytes(self) -> int:
        """Weights and cache, each read once."""
        own = sum(w.nbytes for layer in self.w for w, _ in layer) + self.head[0].nbytes
        return own + self.layers * self.rows * self.context * HK * DIM * 2 * self.half.itemsize


def step_seconds(rows: int, context: int, *, fp8: bool, pdl: bool = True) -> tuple[float, int]:
    """Seconds of a step, and the bytes it must read."""
    step = Step(rows, context, fp8=fp8, pdl=pdl)
    return graph_seconds([step.run], replays=9), step.floor_bytes
