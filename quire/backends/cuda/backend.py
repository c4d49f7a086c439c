"""The CUDA backend: the torch backend with Triton kernels for what is hot, and programs that graphs may replay.

It overrides methods of TorchKernels and nothing else: recording, weights, batches and programs are inherited. Large
products go to cuBLAS. Every launch depends on shapes and host-side bounds alone, so a captured step serves any contents.
Where there is no GPU the same code runs in Triton's interpreter, for tests.
"""

from __future__ import annotations

import torch
import triton
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue]

from quire.backends.cuda.kernels import attention as paged
from quire.backends.cuda.kernels.norm import rms_norm
from quire.backends.cuda.kernels.rope import angle_table, rope_write
from quire.backends.cuda.kernels.swiglu import swiglu
from quire.backends.ops import KV
from quire.backends.torch.backend import TorchBackend, TorchProgram
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.kernels import TorchKernels
from quire.layouts import Rope
from quire.observe.errors import Unsupported

_SPLIT_SPACE = 1 << 28  # bytes that the parts of split contexts may take


class CudaKernels(TorchKernels):
    """Hot ops in Triton."""

    def __init__(self, kv: KV, device: torch.device, dtype: torch.dtype):
        super().__init__(kv, device, dtype)
        self._angles: dict[int, tuple[Rope, torch.Tensor]] = {}
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
        # Products of half floats are summed in float32: the logits need not be rounded on the way out.
        self._wide_logits = on_gpu and dtype != torch.float32

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        rms_norm(x, weight, eps, out)
        return out

    def linear_add_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        product = self.linear(x, weight, bias)
        out = torch.empty_like(product)
        rms_norm(product, norm, eps, out, residual=residual)
        return residual, out

    def logits(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is None and self._wide_logits:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return super().logits(x, weight, bias)

    def gated(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        both = self.linear(x, weight, bias)
        out = both.new_empty(both.shape[0], both.shape[1] // 2)
        swiglu(both, out)
        return out

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
        turned = q.new_empty(q.shape[0], heads, self.kv.head_dim)
        angles = self.angles(rope, batch.reach)
        keys, values = self.keys[layer], self.values[layer]
        rope_write(
            qkv, turned, keys, values, angles=angles, pos=batch.pos, write=batch.write, pairs=rope.pairs
        )  # fmt: skip
        return self.attend(turned, batch, layer, scale).view(q.shape[0], -1)

    def attend(self, q: torch.Tensor, batch: DeviceBatch, layer: int, scale: float) -> torch.Tensor:
        tokens, heads, dim = q.shape
        out = torch.empty_like(q)
        splits = paged.choose_splits(batch.sequences, self.kv.kv_heads, batch.reach, self._processors)
        splits = max(1, min(splits, _SPLIT_SPACE // (tokens * heads * dim * 4)))
        space = None
        if splits > 1:
            space = batch.once(("parts", heads), lambda: paged.workspace(tokens, heads, dim, splits, q.device))
        paged.attention(
            q,
            self.keys[layer],
            self.values[layer],
            out,
            q_start=batch.q_start,
            kv_len=batch.kv_len,
            table=batch.pages,
            pos=batch.pos,
            scale=scale,
            max_q=batch.longest,
            splits=splits,
            space=space,
        )
        return out

    def angles(self, rope: Rope, reach: int) -> torch.Tensor:
        """Cosines and sines up to position `reach` at least. It grows by doubling; graphs ask for the most at once."""
        held = self._angles.get(id(rope))
        if held is None or held[1].shape[0] < reach:
            positions = max(1024, triton.next_power_of_2(reach))
            held = self._angles[id(rope)] = rope, angle_table(self.frequencies(rope), positions, rope.magnitude)
        return held[1]


def side_by_side(*parts: torch.Tensor) -> torch.Tensor | None:
    """One view over tensors that are neighbouring columns of the same rows; None when they are not."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or part.stride() != first.stride() or part.stride(1) != 1:
            return None
        end += part.shape[1]
    width = end - first.storage_offset()
    return first.as_strided((first.shape[0], width), first.stride()) if width <= first.stride(0) else None


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
