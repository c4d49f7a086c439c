"""The CUDA backend: the torch backend with Triton kernels for what is hot, and programs that graphs may replay.

It overrides methods of TorchKernels and nothing else: recording, weights, batches and programs are inherited. Large
products go to cuBLAS. Every launch depends on shapes and host-side bounds alone, so a captured step serves any contents.
Where there is no GPU the same code runs in Triton's interpreter, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue]

from quire.backends.cuda.kernels import attention as paged
from quire.backends.cuda.kernels.combine import combine
from quire.backends.cuda.kernels.norm import rms_norm
from quire.backends.cuda.kernels.prefix import prefix_splits, shared_attention
from quire.backends.cuda.kernels.rope import angle_table, rope_write
from quire.backends.cuda.kernels.skinny import skinny
from quire.backends.cuda.kernels.swiglu import swiglu
from quire.backends.cuda.kernels.tuning import ROWS, skinny_shape
from quire.backends.cuda.sampler import CudaSampler
from quire.backends.ops import KV
from quire.backends.torch.backend import TorchBackend, TorchProgram
from quire.backends.torch.batch import DeviceBatch, Shared
from quire.backends.torch.kernels import TorchKernels
from quire.backends.torch.sampler import DeviceSampler
from quire.layouts import Rope
from quire.observe.errors import Unsupported

_SPLIT_SPACE = 1 << 28  # bytes that the parts of split contexts may take


@dataclass(slots=True)
class Unnormed:
    """A row whose norm is left to the product that reads it."""

    x: torch.Tensor
    gain: torch.Tensor
    eps: float


class CudaKernels(TorchKernels):
    """Hot ops in Triton. Products of up to `skinny_rows` rows too: one row takes its norm along, more leave parts."""

    skinny_rows = ROWS

    def __init__(self, kv: KV, device: torch.device, dtype: torch.dtype):
        super().__init__(kv, device, dtype)
        self._angles: dict[int, tuple[Rope, torch.Tensor]] = {}
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
        # Products of half floats are summed in float32: the logits need not be rounded on the way out.
        self._wide_logits = on_gpu and dtype != torch.float32
        self._few = 0 if dtype == torch.float32 else self.skinny_rows
        # A kernel may start while the one before it ends: only where every kernel between waits for its inputs.
        self._chain = on_gpu and self._few > 0

    def sampler(self) -> DeviceSampler:
        return CudaSampler(self.device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, soon: bool = False) -> Any:
        if soon and x.shape[0] == 1 <= self._few:
            return Unnormed(x, weight, eps)
        out = torch.empty_like(x)
        rms_norm(x, weight, eps, out, pdl=self._chain)
        return out

    def linear(self, x: Any, weight: torch.Tensor, bias: torch.Tensor | None, *, loose: bool = False) -> torch.Tensor:
        if _rows(x) > self._few:
            return super().linear(x, weight, bias)
        return self._skinny(x, weight, bias, loose=loose)

    def linear_add_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        *,
        soon: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        if x.shape[0] == 1 <= self._few:
            self._skinny(x, weight, bias, out=residual, residual=residual)
            return residual, self.rms_norm(residual, norm, eps, soon=soon)
        product = self.linear(x, weight, bias, loose=bias is None)
        out = torch.empty_like(residual)
        rms_norm(product, norm, eps, out, residual=residual, pdl=self._chain)
        return residual, out

    def logits(self, x: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = _rows(x)
        if rows <= self._few:
            out = torch.empty(rows, weight.shape[0], dtype=torch.float32, device=self.device)
            return self._skinny(x, weight, bias, out=out)
        if bias is None and self._wide_logits:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return super().logits(x, weight, bias)

    def gated(self, x: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = _rows(x)
        if rows <= self._few and bias is None:
            out = torch.empty(rows, weight.shape[0] // 2, dtype=self.dtype, device=self.device)
            return self._skinny(x, weight, None, out=out, swiglu=True)
        both = self.linear(x, weight, bias)
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        swiglu(both, out)
        return out

    def _skinny(
        self,
        x: torch.Tensor | Unnormed,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        swiglu: bool = False,
        loose: bool = False,
    ) -> torch.Tensor:
        """A product of few rows, into `out` if given; with `loose` perhaps as parts, to be added by who reads them."""
        source, norm, eps = (x.x, x.gain, x.eps) if isinstance(x, Unnormed) else (x, None, 0.0)
        rows, n = source.shape[0], weight.shape[0] // (2 if swiglu else 1)
        shape = skinny_shape(
            n, source.shape[1], rows, weight.dtype, swiglu=swiglu, fused=rows == 1, processors=self._processors
        )
        if not self._chain and shape.pdl:
            shape = replace(shape, pdl=False, lines=0)
        part = None
        if shape.splits > 1:
            part = torch.empty(shape.splits, rows, n, dtype=torch.float32, device=self.device)
        leave = loose and part is not None and bias is None and residual is None and out is None
        y = torch.empty(rows, n, dtype=self.dtype, device=self.device) if out is None else out
        skinny(
            source, weight, y, shape, bias=bias, residual=residual, norm=norm, eps=eps, swiglu=swiglu, part=part,
            add_parts=not leave,
        )  # fmt: skip
        return part if leave and part is not None else y

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: DeviceBatch,
        *,
        layer: int,
        heads: int,
        scale: float,
        rope: Rope | None,
    ) -> torch.Tensor:
        qkv = side_by_side(q, k, v)
        if rope is None or qkv is None:
            return super().attention(q, k, v, batch, layer=layer, heads=heads, scale=scale, rope=rope)
        tokens = q.shape[-2]
        turned = torch.empty(tokens, heads, self.kv.head_dim, dtype=self.dtype, device=self.device)
        rope_write(
            qkv,
            turned,
            self.keys[layer],
            self.values[layer],
            angles=self.angles(rope, batch.reach),
            pos=batch.pos,
            write=batch.write,
            pairs=rope.pairs,
            pdl=self._chain,
        )
        return self.attend(turned, batch, layer, scale).view(tokens, -1)

    def attend(self, q: torch.Tensor, batch: DeviceBatch, layer: int, scale: float) -> torch.Tensor:
        tokens, heads, dim = q.shape
        out = torch.empty_like(q)
        if batch.shared is not None and batch.longest == 1:
            return self._attend_shared(q, batch, batch.shared, layer, scale, out)
        splits = paged.choose_splits(batch.sequences, self.kv.kv_heads, batch.reach, self._processors)
        splits = max(1, min(splits, _SPLIT_SPACE // (tokens * heads * dim * 4)))
        space = None
        if splits > 1:
            space = batch.once(("parts", heads), lambda: paged.workspace(tokens, heads, dim, splits, q.device))
        arrays: dict[str, Any] = {
            "q_start": batch.q_start,
            "kv_len": batch.kv_len,
            "table": batch.pages,
            "pos": batch.pos,
        }
        keys, values = self.keys[layer], self.values[layer]
        if batch.longest > 1 or not self._chain:
            bounds = {"max_q": batch.longest, "min_q": batch.shortest}
            paged.attention(q, keys, values, out, scale=scale, splits=splits, space=space, **bounds, **arrays)
            return out
        tile = paged.decode_tile(batch.sequences * self.kv.kv_heads, heads // self.kv.kv_heads)
        told: dict[str, Any] = {
            "tile": tile,
            "max_rows": 1,
            "scale": scale,
            "splits": splits,
            "space": space,
            "pdl": True,
        }
        paged.attend(q, keys, values, out, **told, **arrays)
        if space is not None:
            combine(space.part, space.lse, out, q_start=batch.q_start, max_q=1, parts=splits, pdl=True)
        return out

    def _attend_shared(
        self, q: torch.Tensor, batch: DeviceBatch, shared: Shared, layer: int, scale: float, out: torch.Tensor
    ) -> torch.Tensor:
        """Rows with a common beginning: that is read once for all of them."""
        tokens, heads, dim = q.shape
        own = paged.choose_splits(batch.sequences, self.kv.kv_heads, batch.reach, self._processors)
        together = prefix_splits(tokens, heads, self.kv.kv_heads, self._processors)
        parts = own + together
        shared_attention(
            q,
            self.keys[layer],
            self.values[layer],
            out,
            q_start=batch.q_start,
            kv_len=batch.kv_len,
            table=batch.pages,
            pos=batch.pos,
            groups=shared,
            scale=scale,
            max_q=1,
            space=batch.once(("parts", heads), lambda: paged.workspace(tokens, heads, dim, parts, q.device)),
            own_splits=own,
            prefix_splits=together,
            pdl=self._chain,
        )
        return out

    def angles(self, rope: Rope, reach: int) -> torch.Tensor:
        """Cosines and sines up to position `reach` at least. It grows by doubling; graphs ask for the most at once."""
        held = self._angles.get(id(rope))
        if held is None or held[1].shape[0] < reach:
            positions = max(1024, triton.next_power_of_2(reach))
            held = self._angles[id(rope)] = rope, angle_table(self.frequencies(rope), positions, rope.magnitude)
        return held[1]


def _rows(x: torch.Tensor | Unnormed) -> int:
    return x.x.shape[0] if isinstance(x, Unnormed) else x.shape[0]


def side_by_side(*parts: torch.Tensor) -> torch.Tensor | None:
    """One view over tensors that are neighbouring columns of the same rows; None when they are not."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or part.stride() != first.stride() or part.stride(-1) != 1:
            return None
        end += part.shape[-1]
    width = end - first.storage_offset()
    return first.as_strided((*first.shape[:-1], width), first.stride()) if width <= first.stride(-2) else None


class CudaBackend(TorchBackend):
    """Programs on one NVIDIA GPU."""

    name = "cuda"
    kernels = CudaKernels

    def __init__(self, device: str = "auto", dtype: str = "auto", *, threads: int | None = None, random: bool = False):
        super().__init__("cuda" if device == "auto" else device, dtype, threads=threads, random=random)
        if self.device.type != "cuda" and not knobs.runtime.interpret:
            raise Unsupported("the cuda backend needs an NVIDIA GPU", cure="use --backend torch --device cpu")

    def wrap(self, program: TorchProgram) -> TorchProgram:
        program.graphs = self.device.type == "cuda"
        return program

    def implementations(self) -> dict[str, str]:
        hot = {"rms_norm": "Triton", "swiglu": "Triton", "attention": "Triton", "linear": "cuBLAS"}
        hot["rope"] = "Triton (with the KV write)"
        return super().implementations() | hot
