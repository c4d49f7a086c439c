"""Attention of prompts over pages: Hopper's kernel, the plain one, and cuDNN through torch on contiguous keys and values, the peer.

    python -m benchmarks.gpu_prompts

Prompts of several lengths, alone and many, with a past and behind windows; microseconds and TFLOP/s of what rows see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.gpu_timing import graph_seconds, off
from benchmarks.record import save


class Case(NamedTuple):
    """So many sequences of so many rows each, after a past."""

    rows: int
    past: int = 0
    many: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int = 0
    sinks: bool = False

    @property
    def name(self) -> str:
        more = f", window {self.window}" if self.window else ""
        return f"{self.many} x {self.rows} after {self.past}, {self.heads}/{self.kv_heads} x {self.dim}{more}"

    @property
    def flops(self) -> float:
        seen = self.rows * self.past + self.rows * (self.rows + 1) / 2
        return self.many * 4 * self.heads * self.dim * (self.rows * self.window if self.window else seen)


LONG = (Case(512), Case(512, many=16), Case(2048), Case(8192), Case(32768), Case(8192, 24576), Case(256, 4096, 8))
SMALL = [Case(n, heads=64, dim=64, sinks=True) for n in (512, 2048, 8192)]
WINDOWS = [Case(8192, heads=64, dim=64, sinks=True, window=n) for n in (128, 1024)] + [Case(8192, window=1024)]
PAGE = 16


def measure(case: Case) -> dict[str, Any]:
    """Seconds of each kernel, and how far Hopper's is from the plain one."""
    import torch

    from quire.backends.cuda.kernels import attention, prompt

    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    whole: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
    total, n = case.rows + case.past, case.many
    pages = -(-total // PAGE)
    keys = torch.randn(n * pages + 1, PAGE, case.kv_heads, case.dim, **half)
    values, q = torch.randn_like(keys), torch.randn(n * case.rows, case.heads, case.dim, **half)
    sinks = torch.randn(case.heads, device="cuda") if case.sinks else None
    arrays: dict[str, Any] = {
        "q_start": torch.arange(0, n * case.rows + 1, case.rows, **whole),
        "kv_len": torch.full((n,), total, **whole),
        "table": torch.randperm(n * pages, **whole).view(n, pages),
        "pos": (torch.arange(case.rows, **whole) + case.past).repeat(n),
    }
    plain, own = torch.empty_like(q), torch.empty_like(q)
    told: dict[str, Any] = {"scale": case.dim**-0.5, "window": case.window, "sinks": sinks}
    attention.specialize = False
    bounds = {"max_q": case.rows, "min_q": case.rows}
    usual = timed(lambda: attention.attention(q, keys, values, plain, **bounds, **arrays, **told))
    tiles = prompt.tile_list(
        arrays["q_start"], arrays["kv_len"], arrays["pos"], group=case.heads // case.kv_heads, min_rows=0
    )
    made = timed(lambda: prompt.attend_prompts(q, keys, values, own, tiles=tiles, table=arrays["table"], **told))
    return {"plain": usual, "hopper": made, "cudnn": cudnn(case), "apart": off(own, plain)}


def cudnn(case: Case) -> float | None:
    """The library's time for one causal prompt without a past, without sinks."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if case.past or case.window or case.many > 1:
        return None
    half: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    heads = (case.heads, case.kv_heads, case.kv_heads)
    q, k, v = (torch.randn(case.rows, own, case.dim, **half).transpose(0, 1).unsqueeze(0) for own in heads)

    def call() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return timed(call)


def timed(call: Callable[[], None]) -> float:
    return graph_seconds([call] * 4, replays=5)


def main() -> None:
    found = []
    for case in (*LONG, *SMALL, *WINDOWS):
        got = measure(case)
        found.append({"name": case.name, **got})
        told = ", ".join(
            f"{name} {1e6 * got[name]:.0f} us ({case.flops / got[name] / 1e12:.0f} TFLOP/s)"
            for name in ("plain", "hopper", "cudnn")
            if got[name] is not None
        )
        print(f"{case.name}: {told}; {got['apart']:.1e} apart", flush=True)
    print(save("gpu-prompts", {"rows": found}))


if __name__ == "__main__":
    main()
