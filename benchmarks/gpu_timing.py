"""How a kernel is timed on a GPU: many launches over different buffers in one CUDA graph, the median of its replays.

Buffers rotate so that nothing is found in the L2 that a real step would not find there; launches follow one another as
they do in a step, so that the gaps between kernels are inside the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Row:
    name: str
    error: float | None  # None: timed only
    seconds: float
    work: float  # bytes or FLOP of one launch
    flops: bool = False
    eight: bool = False  # operations on fp8, which have a ceiling of their own

    def line(self, bandwidth: float, matmul: float, eight: float) -> str:
        rate = self.work / self.seconds
        unit, ceiling = ("TFLOP/s", eight if self.eight else matmul) if self.flops else ("TB/s", bandwidth)
        shown = "        -" if self.error is None else f"{self.error:9.1e}"
        return (
            f"{self.name:44s} {shown} {self.seconds * 1e6:9.1f} us {rate / 1e12:7.2f} {unit:7s} {rate / ceiling:5.0%}"
        )


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def graph_seconds(calls: Sequence[Callable[[], None]], replays: int = 7) -> float:
    """Seconds of one call: the median replay of a graph that holds them all, over their number."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2] / len(calls)


def copy_rate(gigabytes: float = 4.0) -> float:
    """Bytes a second of a device-to-device copy, read and written counted: the bandwidth ceiling."""
    source = torch.randn(int(gigabytes * 1e9) // 4, device="cuda")
    target = torch.empty_like(source)  # through a kernel: a graph's own copy node is slower
    return 2 * source.nbytes / graph_seconds([lambda: torch.neg(source, out=target)] * 4)


def matmul_rate(dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """FLOP a second of a large product through cuBLAS: the arithmetic ceiling."""
    a, b = (torch.randn(size, size, device="cuda") for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        a8, b8, one = a.to(dtype), b.to(dtype), torch.ones((), device="cuda")
        call = lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # noqa: E731
    else:
        a, b = a.to(dtype), b.to(dtype)
        call = lambda: torch.mm(a, b)  # noqa: E731
    return 2 * size**3 / graph_seconds([call] * 4)
