"""The CUDA backend's kernels in the mode whose promise is bits: a row's result does not depend on its batch.

Products are `kernels/product.py` for any number of rows, attention is cut at multiples of SPLIT tokens for prompts and
decode rows alike, recurrent layers are walked row by row, residuals are added and rounded at one place, and every norm is the
same compiled kernel. What depends on the batch here is only who computes something, never in which order it is summed. Shared
prefixes are read by each row for itself. The price is measured by `benchmarks.gpu --also-deterministic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.backends.cuda.backend import CudaBackend
from quire.backends.cuda.kernels import attention as paged
from quire.backends.cuda.kernels import latent
from quire.backends.cuda.kernels.gates import KINDS, gated_rows
from quire.backends.cuda.kernels.product import product
from quire.backends.cuda.ops import CudaKernels
from quire.backends.cuda.sampler import CudaSampler
from quire.backends.elementwise import Elementwise
from quire.backends.ops import KV
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.caches import Cache
from quire.backends.torch.kernels import PLAIN, Sight, TorchKernels
from quire.backends.torch.quantized import Weight
from quire.backends.torch.sampler import DeviceSampler

SPLIT = 512  # tokens of a context that are one sum
_SPACE = 1 << 28  # bytes that the parts of split contexts may take


class DeterministicKernels(CudaKernels):
    """Kernels that give the same bits for the same row: alone, in any batch, in any chunk, from a graph or not."""

    skinny_rows = 0  # no product whose kernel depends on how many rows there are
    invariant = True
    chunked = False  # every row of a recurrent layer as a decode row

    def __init__(self, kv: KV, device: torch.device, dtype: torch.dtype):
        super().__init__(kv, device, dtype)
        self._chain = device.type == "cuda"

    def sampler(self) -> DeviceSampler:
        return CudaSampler(self.device, alone=True)

    def linear(self, x: Any, weight: Any, bias: torch.Tensor | None, *, loose: bool = False) -> torch.Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=self.dtype, device=self.device)
        product(x, weight, out, bias=bias, pdl=self._chain)
        return out

    def logits(
        self, x: Any, weight: Any, bias: torch.Tensor | None, *, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._wide(x.shape[0], weight.shape[0], into)
        product(x, weight, out, bias=bias, pdl=self._chain)
        return out

    def gated(
        self, x: Any, weight: Any, bias: torch.Tensor | None, act: Elementwise, *, soon: Sequence[Weight] = ()
    ) -> Any:
        if act.name not in KINDS:
            return super().gated(x, weight, bias, act, soon=soon)
        both = self.linear(x, weight, bias)
        out = torch.empty(both.shape[0], both.shape[1] // 2, dtype=self.dtype, device=self.device)
        gated_rows(both, out, act.name, pdl=self._chain)
        return out

    def head_linear(self, x: torch.Tensor, weight: torch.Tensor, heads: int) -> torch.Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=self.dtype, device=self.device)
        product(x, weight, out, heads=heads, pdl=self._chain)
        return out

    def linear_add_norm(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        *,
        soon: Sequence[Weight] = (),
    ) -> tuple[torch.Tensor, Any]:
        product(x, weight, residual, bias=bias, residual=residual, pdl=self._chain)
        return residual, self.rms_norm(residual, norm, eps)

    def add_norm(
        self, a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, *, soon: Sequence[Weight] = ()
    ) -> tuple[torch.Tensor, Any]:
        return TorchKernels.add_norm(self, a, b, weight, eps, soon=soon)  # with the norm that all others are

    def attend(
        self, q: torch.Tensor, batch: DeviceBatch, cache: Cache, scale: float, sight: Sight = PLAIN
    ) -> torch.Tensor:
        out, kv_heads = torch.empty_like(q), cache.kv.kv_heads
        tiles = batch.sequences + q.shape[0] * q.shape[1] // kv_heads // paged.INVARIANT.rows
        splits, space = self._in_order(out, batch, tiles * kv_heads)
        paged.attention(
            q, *cache.both, out, q_start=batch.q_start, kv_len=batch.kv_len,
            table=batch.table(cache.group).pages, pos=batch.pos, scale=scale, max_q=batch.longest, splits=splits, split_len=SPLIT,
            space=space, window=sight.window, softcap=sight.softcap, sinks=sight.sinks, pdl=self._chain,
        )  # fmt: skip
        return out

    def attend_latent(self, q: torch.Tensor, batch: DeviceBatch, cache: Cache, scale: float) -> torch.Tensor:
        out = torch.empty(*q.shape[:2], cache.kv.latent, dtype=self.dtype, device=self.device)
        tiles = batch.sequences + q.shape[0] * q.shape[1] // latent.FEW.rows
        splits, space = self._in_order(out, batch, tiles)
        latent.latent_attention(
            q, cache.keys, out, q_start=batch.q_start, kv_len=batch.kv_len, table=batch.table(cache.group).pages,
            pos=batch.pos, scale=scale, max_q=batch.longest, splits=splits, split_len=SPLIT, space=space, pdl=self._chain,
        )  # fmt: skip
        return out

    def _in_order(self, out: torch.Tensor, batch: DeviceBatch, programs: int) -> tuple[int, paged.Workspace | None]:
        """Parts of the longest context, and space for them where the rows alone would not fill the device."""
        tokens, heads, dim = out.shape
        splits = -(-batch.reach // SPLIT)
        if splits == 1 or programs >= 2 * self._processors or tokens * heads * dim * splits * 4 > _SPACE:
            return splits, None
        key = "parts in order", heads, dim
        return splits, batch.once(key, lambda: paged.workspace(tokens, heads, dim, splits, out.device, sums=True))


class DeterministicBackend(CudaBackend):
    """The CUDA backend with these kernels."""

    kernels = DeterministicKernels
    shares = False
    packs = False

    def describe(self) -> str:
        return f"{super().describe()}, the same bits in any batch"

    def implementations(self) -> dict[str, str]:
        cut, one = "Triton (cut at fixed positions)", "Triton (one order of sums)"
        own = {"linear": one, "head_linear": one, "attention": cut, "latent_attention": cut}
        return super().implementations() | own
