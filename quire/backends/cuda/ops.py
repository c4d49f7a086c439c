"""The hot ops of the CUDA backend: TorchKernels with Triton kernels, chosen by the number of rows and by what weights are.

Large products go to cuBLAS. Every launch depends on shapes and host-side bounds alone, so a captured step serves any contents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton

from quire.backends.cuda import states
from quire.backends.cuda.adapters import FixedStack
from quire.backends.cuda.elementwise import OWN
from quire.backends.cuda.experts import fits, mix
from quire.backends.cuda.kernels import attention as paged
from quire.backends.cuda.kernels import latent
from quire.backends.cuda.kernels.combine import combine
from quire.backends.cuda.kernels.gates import KINDS
from quire.backends.cuda.kernels.head_norm import head_norm
from quire.backends.cuda.kernels.lora import adapt
from quire.backends.cuda.kernels.norm import rms_norm
from quire.backends.cuda.kernels.prefix import prefix_splits, shared_attention
from quire.backends.cuda.kernels.rope import angle_table, rope_write
from quire.backends.cuda.kernels.tuning import ROWS
from quire.backends.cuda.products import (
    Place,
    QuantizedProducts,
    Rows,
    Unnormed,
    count,
    few_rows,
    norms_along,
    wants_fp8,
    wants_groups,
)
from quire.backends.cuda.sampler import CudaSampler
from quire.backends.cuda.tiles import GroupedRows
from quire.backends.elementwise import Elementwise
from quire.backends.ops import KV
from quire.backends.torch.adapters import Stack, slots_of
from quire.backends.torch.batch import DeviceBatch, Shared
from quire.backends.torch.caches import Cache
from quire.backends.torch.elementwise import function_of
from quire.backends.torch.experts import Mixture
from quire.backends.torch.kernels import PLAIN, Sight, TorchKernels
from quire.backends.torch.quantized import Mixed, Part, Scaled, Weight
from quire.backends.torch.sampler import DeviceSampler
from quire.backends.torch.states import Heads, Inputs
from quire.backends.torch.words import MxWords
from quire.layouts import Rope

_SPLIT_SPACE = 1 << 28  # bytes that the parts of split contexts may take


class CudaKernels(TorchKernels):
    """Hot ops in Triton. Products of up to `skinny_rows` rows too: one row takes its norm along, more leave parts."""

    skinny_rows = ROWS
    chunked = True  # whether long sequences go through recurrent layers a chunk at a time

    def __init__(self, kv: KV, device: torch.device, dtype: torch.dtype):
        super().__init__(kv, device, dtype)
        self._angles: dict[int, tuple[Rope, torch.Tensor]] = {}
        self._gains: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        on_gpu = device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 4
        # Products of half floats are summed in float32: the logits need not be rounded on the way out.
        self._wide_logits = on_gpu and dtype != torch.float32
        self._few = 0 if dtype == torch.float32 else self.skinny_rows
        # A kernel may start while the one before it ends: only where every kernel between waits for its inputs.
        self._chain = on_gpu and self._few > 0
        self._place = Place(device, dtype, self._processors, self._chain)
        self._quantized = QuantizedProducts(self._place)

    def sampler(self) -> DeviceSampler:
        return CudaSampler(self.device)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, heads: int = 1, soon: Sequence[Weight] = ()
    ) -> Any:
        if heads > 1:
            out = torch.empty(x.shape, dtype=self.dtype, device=self.device)
            head_norm(x, weight, eps, out, heads=heads, pdl=self._chain)
            return out
        if soon and x.shape[0] == 1 <= self._few and all(norms_along(w) for w in soon):
            return Unnormed(x, self._gain(weight), eps)
        return self._normed(x, weight, eps, soon)

    def _gain(self, weight: torch.Tensor) -> torch.Tensor:
        """A norm's gain in the rows' own type where that is exact, as it is for a model that was trained so: a small product
        feels the bytes that come beside its weights."""
        held = self._gains.get(id(weight))
        if held is None:
            if self._chain and torch.cuda.is_current_stream_capturing():
                return weight  # nobody can look at numbers now; and the bits are the same
            narrow = weight.to(self.dtype)
            held = self._gains[id(weight)] = weight, narrow if torch.equal(narrow.float(), weight) else weight
        return held[1]

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, heads: int = 1
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=self.dtype, device=self.device)
        head_norm(x, weight, eps, out, heads=heads, bias=bias, centre=True, pdl=self._chain)
        return out

    def elementwise(self, op: Elementwise, number: float = 0.0) -> Callable[..., torch.Tensor]:
        own = OWN.get(op.name)
        return function_of(op, number, None if own is None else partial(own, self.dtype, self._chain))

    def adapt(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        stacks: Sequence[Stack],
        batch: DeviceBatch,
        *,
        taken: bool,
        alone: bool,
    ) -> Sequence[torch.Tensor]:
        """Add the products of adapters in place, where nothing else uses ys: columns of one product stay neighbours."""
        if batch.adapters is None:
            return ys
        ys = ys if alone else [y.clone() for y in ys]
        held = [stack for stack in stacks if isinstance(stack, FixedStack)]  # the backend makes no others
        slots, whole, bundle = slots_of(batch, taken), side_by_side(*ys), held[0].bundle
        if whole is not None and list(bundle.stacks.values()) == held:
            adapt(whole, x, bundle.pairs, slots, pdl=self._chain)
        else:
            for y, stack in zip(ys, held, strict=True):
                adapt(y, x, stack.pairs, slots, pdl=self._chain)
        return ys

    def conv(
        self, x: torch.Tensor, weight: torch.Tensor, batch: DeviceBatch, *, layer: int, group: int, at: int
    ) -> torch.Tensor:
        where = states.place_of(self.states, batch, layer=layer, group=group, at=at, page_size=self.kv.page_size)
        return states.conv(x, weight, batch, where, pdl=self._chain)

    def delta_rule(
        self, inputs: Inputs, batch: DeviceBatch, heads: Heads, *, layer: int, group: int, at: int
    ) -> torch.Tensor:
        where = states.place_of(self.states, batch, layer=layer, group=group, at=at, page_size=self.kv.page_size)
        return states.delta_rule(inputs, batch, where, heads, chunked=self.chunked, pdl=self._chain)

    def moe(self, x: torch.Tensor, logits: torch.Tensor, mixture: Mixture, *, loose: bool = False) -> torch.Tensor:
        if not fits(mixture, self.dtype):
            return super().moe(x, logits, mixture)
        return mix(x, logits, mixture, exact=self.invariant, loose=loose, pdl=self._chain)

    def add_norm(
        self, a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, *, soon: Sequence[Weight] = ()
    ) -> tuple[torch.Tensor, Any]:
        """a + b, and its norm; b may be [parts, T, d]."""
        total = torch.empty_like(a)
        return total, self._normed(b, weight, eps, soon, a, total)

    def _normed(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        soon: Sequence[Weight],
        residual: torch.Tensor | None = None,
        total: torch.Tensor | None = None,
    ) -> torch.Tensor | Rows | GroupedRows:
        """The norm of x, or of residual += x; in fp8 where only products with such weights read it."""
        if self.dtype != torch.float32 and wants_groups(soon, x.shape[-2]):
            groups = GroupedRows.empty(x.shape[-2], x.shape[-1], x.device)
            rms_norm(x, weight, eps, groups.codes, residual=residual, total=total, scales=groups.scale, pdl=self._chain)
            return groups
        if self.dtype != torch.float32 and wants_fp8(soon):
            made = Rows.empty(x.shape[-2:], x.device)
            rms_norm(x, weight, eps, made.codes, residual=residual, total=total, scales=made.scale, pdl=self._chain)
            return made
        out = torch.empty_like(x if residual is None else residual)
        rms_norm(x, weight, eps, out, residual=residual, total=total, pdl=self._chain)
        return out

    def linear(self, x: Any, weight: Weight, bias: torch.Tensor | None, *, loose: bool = False) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            if count(x) > self._few:
                return super().linear(x, weight, bias)
            return self._skinny(x, weight, bias, loose=loose)
        if self.dtype == torch.float32:
            return super().linear(x, weight, bias)
        if isinstance(weight, Mixed):
            return self._mixed(x, weight, bias)
        return self._quantized.linear(x, weight, bias, loose=loose)

    def _mixed(self, x: torch.Tensor, weight: Mixed, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply with each kind of weight into its own columns."""
        out = torch.empty(x.shape[0], weight.shape[0], dtype=self.dtype, device=self.device)
        first = 0
        for part in weight.parts:
            columns = slice(first, first + part.shape[0])
            self._linear_into(x, part, None if bias is None else bias[columns], out[:, columns])
            first = columns.stop
        return out

    def _linear_into(self, x: torch.Tensor, weight: Part, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        if not isinstance(weight, torch.Tensor):
            self._quantized.linear(x, weight, bias, out=out)
        elif x.shape[0] <= self._few:
            self._skinny(x, weight, bias, out=out)
        elif bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)

    def linear_add_norm(
        self,
        x: Any,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        *,
        soon: Sequence[Weight] = (),
    ) -> tuple[torch.Tensor, Any]:
        if count(x) == 1 <= self._few and isinstance(weight, torch.Tensor | Scaled):
            self._skinny(x, weight, bias, out=residual, residual=residual)
            return residual, self.rms_norm(residual, norm, eps, soon=soon)
        product = self.linear(x, weight, bias, loose=bias is None)
        return residual, self._normed(product, norm, eps, soon, residual)

    def logits(
        self, x: Any, weight: Weight, bias: torch.Tensor | None, *, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = count(x)
        if rows == 0:  # a step of prompt chunks that ends none
            return self._wide(0, weight.shape[0], into)
        if not isinstance(weight, torch.Tensor):
            if isinstance(weight, Mixed) or self.dtype == torch.float32:
                return super().logits(x, weight, bias)
            return self._quantized.linear(x, weight, bias, out=self._wide(rows, weight.shape[0], into))
        if rows <= self._few:
            return self._skinny(x, weight, bias, out=self._wide(rows, weight.shape[0], into))
        if bias is None and self._wide_logits:
            out = self._wide(rows, weight.shape[0], into)
            return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        return super().logits(x, weight, bias)

    def _wide(self, rows: int, n: int, into: torch.Tensor | None) -> torch.Tensor:
        """The buffer for float32 results."""
        if into is not None:
            return into[:rows]
        return torch.empty(rows, n, dtype=torch.float32, device=self.device)

    def gated(
        self,
        x: Any,
        weight: Weight,
        bias: torch.Tensor | None,
        act: Elementwise,
        *,
        soon: Sequence[Weight] = (),
    ) -> Any:
        if act.name not in KINDS:
            return super().gated(x, weight, bias, act, soon=soon)
        rows = count(x)
        half = self.dtype != torch.float32
        if half and bias is None and not isinstance(weight, torch.Tensor | Mixed | MxWords):
            return self._quantized.gated(x, weight, soon, act.name)
        if rows <= self._few and bias is None and isinstance(weight, torch.Tensor):
            out = torch.empty(rows, weight.shape[0] // 2, dtype=self.dtype, device=self.device)
            return few_rows(self._place, x, weight, None, out=out, act=act.name)
        return self._quantized.gate(self.linear(x, weight, bias), soon if half else (), act.name)

    def _skinny(
        self,
        x: torch.Tensor | Unnormed,
        weight: torch.Tensor | Scaled,
        bias: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        loose: bool = False,
    ) -> torch.Tensor:
        """A product of few rows, into `out` if given; with `loose` perhaps as parts, to be added by who reads them."""
        return few_rows(self._place, x, weight, bias, out=out, residual=residual, loose=loose)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: DeviceBatch,
        *,
        cache: Cache,
        heads: int,
        scale: float,
        rope: Rope | None,
        sight: Sight = PLAIN,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        qkv = side_by_side(q, k, v)
        if rope is None or qkv is None or (batch.coords is not None and rope.axes):
            told: dict[str, Any] = {"rope": rope, "sight": sight, "norms": norms}
            return super().attention(q, k, v, batch, cache=cache, heads=heads, scale=scale, **told)
        tokens = q.shape[-2]
        turned = torch.empty(tokens, heads, cache.kv.head_dim, dtype=self.dtype, device=self.device)
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        rope_write(
            qkv,
            turned,
            *cache.both,
            angles=self.angles(rope, batch.reach),
            pos=batch.pos,
            write=batch.table(cache.group).write,
            pairs=rope.pairs,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            pdl=self._chain,
            **cache.scales,
        )
        return self.attend(turned, batch, cache, scale, sight).view(tokens, -1)

    def attend(
        self, q: torch.Tensor, batch: DeviceBatch, cache: Cache, scale: float, sight: Sight = PLAIN
    ) -> torch.Tensor:
        tokens, heads, dim = q.shape
        out, kv_heads, table = torch.empty_like(q), cache.kv.kv_heads, batch.table(cache.group).pages
        # A prefix that rows share lies before a window, or is cut by it otherwise for each row. Its pages are the first group's.
        if batch.shared is not None and batch.longest == 1 and not sight.window and cache.group == 0:
            return self._attend_shared(q, batch, batch.shared, cache, scale, sight, out)
        longest, shortest = batch.longest, batch.shortest
        reach = min(batch.reach, sight.window) if sight.window else batch.reach
        splits = paged.choose_splits(batch.sequences, kv_heads, reach, self._processors)
        splits = max(1, min(splits, _SPLIT_SPACE // (tokens * heads * dim * 4)))
        space = self._space(out, batch, splits) if splits > 1 else None
        arrays: dict[str, Any] = {
            "q_start": batch.q_start,
            "kv_len": batch.kv_len,
            "table": table,
            "pos": batch.pos,
            "window": sight.window,
            "softcap": sight.softcap,
            "sinks": sight.sinks,
            **cache.scales,
        }
        keys, values = cache.both
        group = int(triton.next_power_of_2(heads // kv_heads))
        few = longest == 1 or (batch.uniform and longest * group <= paged.VERIFIED)
        if not few or not self._chain:
            bounds: dict[str, Any] = {"max_q": longest, "min_q": shortest, "reach": batch.reach, "once": batch.once}
            paged.attention(q, keys, values, out, scale=scale, splits=splits, space=space, **bounds, **arrays)
            return out
        tile = (
            paged.decode_tile(batch.sequences * kv_heads, group) if longest == 1 else paged.verify_tile(longest * group)
        )
        told: dict[str, Any] = {
            "tile": tile,
            "max_rows": longest,
            "scale": scale,
            "splits": splits,
            "space": space,
            "pdl": True,
        }
        paged.attend(q, keys, values, out, **told, **arrays)
        if space is not None:
            bounds = {"q_start": batch.q_start, "max_q": longest, "parts": splits}
            combine(space.part, space.lse, out, sinks=sight.sinks, pdl=True, **bounds)
        return out

    def attend_latent(self, q: torch.Tensor, batch: DeviceBatch, cache: Cache, scale: float) -> torch.Tensor:
        tokens, heads, _ = q.shape
        out = torch.empty(tokens, heads, cache.kv.latent, dtype=self.dtype, device=self.device)
        splits = latent.latent_splits(tokens, heads, batch.reach, self._processors)
        splits = max(1, min(splits, _SPLIT_SPACE // (out.numel() * 4)))
        latent.latent_attention(
            q,
            cache.keys,
            out,
            q_start=batch.q_start,
            kv_len=batch.kv_len,
            table=batch.table(cache.group).pages,
            pos=batch.pos,
            scale=scale,
            max_q=batch.longest,
            splits=splits,
            space=self._space(out, batch, splits) if splits > 1 else None,
            k_scale=cache.key_scale,
            pdl=self._chain,
        )
        return out

    def _space(self, out: torch.Tensor, batch: DeviceBatch, parts: int) -> paged.Workspace:
        """The buffer where the parts of contexts leave results for `out`; layers of one kind share it."""
        tokens, heads, dim = out.shape
        return batch.once(
            ("parts", heads, dim, parts), lambda: paged.workspace(tokens, heads, dim, parts, out.device)
        )  # fmt: skip

    def encode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: DeviceBatch, *, heads: int, scale: float
    ) -> torch.Tensor:
        queries, keys, values = (x.unflatten(-1, (-1, q.shape[1] // heads)) for x in (q, k, v))
        out = torch.empty(queries.shape, dtype=self.dtype, device=self.device)
        lengths, table = batch.once("rows", lambda: paged.rows_as_pages(batch.q_start, batch.longest))
        paged.encode(
            queries, keys, values, out, q_start=batch.q_start, lengths=lengths, table=table, scale=scale,
            pdl=self._chain,
        )  # fmt: skip
        return out.flatten(1)

    def _attend_shared(
        self,
        q: torch.Tensor,
        batch: DeviceBatch,
        shared: Shared,
        cache: Cache,
        scale: float,
        sight: Sight,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Rows with a common beginning: that is read once for all of them."""
        tokens, heads, _ = q.shape
        own = paged.choose_splits(batch.sequences, cache.kv.kv_heads, batch.reach, self._processors)
        together = prefix_splits(tokens, heads, cache.kv.kv_heads, self._processors)
        shared_attention(
            q,
            *cache.both,
            out,
            q_start=batch.q_start,
            kv_len=batch.kv_len,
            table=batch.pages,
            pos=batch.pos,
            groups=shared,
            scale=scale,
            max_q=1,
            space=self._space(out, batch, own + together),
            own_splits=own,
            prefix_splits=together,
            softcap=sight.softcap,
            sinks=sight.sinks,
            pdl=self._chain,
            **cache.scales,
        )
        return out

    def angles(self, rope: Rope, reach: int) -> torch.Tensor:
        """Cosines and sines up to position `reach` at least. It grows by doubling; graphs ask for the most at once."""
        held = self._angles.get(id(rope))
        if held is None or held[1].shape[0] < reach:
            positions = max(1024, int(triton.next_power_of_2(reach)))
            held = self._angles[id(rope)] = rope, angle_table(self.frequencies(rope), positions, rope.magnitude)
        return held[1]


def side_by_side(*parts: torch.Tensor) -> torch.Tensor | None:
    """One view over tensors that are neighbouring columns of the same rows; None where they are not."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or part.stride() != first.stride() or part.stride(-1) != 1:
            return None
        end += part.shape[-1]
    width = end - first.storage_offset()
    return first.as_strided((*first.shape[:-1], width), first.stride()) if width <= first.stride(-2) else None
