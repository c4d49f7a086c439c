"""compressed-tensors: what llm-compressor writes. Each group of its configuration has a format of its own.

pack-quantized   weight_packed [n, k * bits / 32] i32, the lowest bits first; weight_scale [n, groups]; weight_shape [2]: n and k;
                 weight_zero_point [n * bits / 32, groups] i32 packed along rows, or [n, groups] i8; weight_g_idx [k]
int-quantized    weight [n, k] i8, weight_scale of one number or [n, 1]
float-quantized  weight [n, k] e4m3 with weight_scale: as in fp8.py, also naive-quantized

Packed codes and zeros are 2^(bits - 1) more than the signed numbers they stand for: w = scale * (code - zero).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.formats.hub import Parts, Settings, Stored, Wrong, need, text
from quire.formats.hub._blocks import affine, finite, groups_of, in_order, scattered, unpacked
from quire.formats.hub.fp8 import IDLE, Fp8, tile_of, told
from quire.formats.hub.gptq import FLOATS, SCATTERED, group_size
from quire.layouts import Bytes, Floats, Layout
from quire.observe.errors import BadModelFile, Unsupported

METHODS = ("compressed-tensors", "compressed_tensors")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True, slots=True)
class Ints:
    """Matrices of whole numbers."""

    bits: int
    group: int  # -1: all columns
    packed: bool
    label: str
    notes: tuple[str, ...] = ()
    float8: bool = False
    idle: tuple[str, ...] = IDLE

    @property
    def parts(self) -> tuple[str, ...]:
        mark = "weight_packed" if self.packed else "weight"
        return mark, "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"

    def marks(self, stored: Stored) -> bool:
        return self.packed or stored.type == "I8"

    def shape(self, parts: Parts) -> tuple[int, int]:
        mark = self.parts[0]
        stored = need(parts, mark, ("I32",) if self.packed else ("I8",), None)
        if len(stored.shape) != 2 or 0 in stored.shape:
            raise Wrong(mark, f"has shape {text(stored.shape)}: a matrix has two axes", supported=False)
        n, k = stored.shape
        if self.packed:
            n, k = self._size(parts, stored)
        _, groups = groups_of(mark, k, self.group)
        why = f" for {n}x{k} numbers in groups of {self.group}" if self.group != -1 else f" for {n} rows"
        scale = need(parts, "weight_scale", FLOATS, None, why)
        if not (groups == 1 and scale.shape in ((), (1,), (n,))):
            need(parts, "weight_scale", FLOATS, (n, groups), why)
        if (zero := parts.get("weight_zero_point")) is not None:
            if zero.type == "I32":
                need(parts, "weight_zero_point", ("I32",), (-(-n * self.bits // 32), groups), why)
            elif not (groups == 1 and zero.shape in ((), (1,), (n,))):
                need(parts, "weight_zero_point", ("I8",), (n, groups), why)
        if "weight_g_idx" in parts:
            need(parts, "weight_g_idx", ("I32",), (k,), why)
        return n, k

    def _size(self, parts: Parts, stored: Stored) -> tuple[int, int]:
        shape = need(
            parts, "weight_shape", ("I64", "I32"), (2,), ": two numbers say what the packed ones are of"
        ).integers()
        n, k = int(shape[0]), int(shape[1])
        words = (n, -(-k * self.bits // 32))
        if min(n, k) < 1 or stored.shape != words:
            raise Wrong(
                "weight_packed",
                f"has shape {text(stored.shape)}, but {n}x{k} numbers of {self.bits} bits take {text(words)}",
            )
        return n, k

    def read(self, parts: Parts) -> Layout:
        n, k = self.shape(parts)
        group, groups = groups_of(self.parts[0], k, self.group)
        order = parts["weight_g_idx"].integers() if "weight_g_idx" in parts else None
        scale, zero, half = parts["weight_scale"], parts.get("weight_zero_point"), 1 << (self.bits - 1)
        finite("weight_scale", scale.floats())
        data = parts[self.parts[0]].octets()

        def codes(first: int, end: int) -> Bytes:
            part = data[first:end]
            return part if self.packed else part ^ np.uint8(0x80)

        def scales(first: int, end: int) -> Floats:
            if scale.shape == (n, groups):
                return scale.floats(slice(first, end))
            return np.broadcast_to(scale.floats().reshape(-1, 1), (n, 1))[first:end]

        def zeros(first: int, end: int) -> npt.NDArray[np.int16]:
            assert zero is not None
            if zero.type == "I32":  # packed along rows
                words = np.ascontiguousarray(zero.integers().T).view(np.uint8)  # [groups, bytes]
                return unpacked(words, self.bits)[:, first:end].T.astype(np.int16)
            signed = np.broadcast_to(zero.integers().reshape(-1, groups), (n, groups))
            return signed[first:end].astype(np.int16) + half

        name, own = f"int{self.bits}", half if zero is None else zeros
        if order is not None and not in_order("weight_g_idx", order, group, groups):
            return scattered(self.bits, (n, k), codes, scales, own, order)
        return affine(name, self.bits, (n, k), codes, scales, own, group)


def scheme(settings: Settings) -> Ints | Fp8:
    groups = settings.inside("config_groups")
    if groups is None or not groups.raw:
        raise BadModelFile(f"{settings.where}: config_groups is missing")
    sparse = settings.inside("sparsity_config") if settings.get("sparsity_config") else None
    if sparse is not None and (kind := sparse.text("format", "dense")) != "dense":
        raise Unsupported(f"{settings.where}: sparse weights ({kind[:40]}) are not read")
    found = {_scheme(settings, group) for name in groups.raw if (group := groups.inside(name)) is not None}
    if len(found) != 1:
        labels = sorted(s.label for s in found)
        raise Unsupported(
            f"{settings.where}: matrices quantized in {len(labels)} ways ({'; '.join(labels)}) are not read"
        )
    return found.pop()


def _scheme(settings: Settings, group: Settings) -> Ints | Fp8:
    form = group.text("format", None) or settings.text("format")
    if form not in FORMATS:
        raise Unsupported(
            f"{settings.where}: the format {form[:40]!r} of compressed-tensors is not read",
            cure=f"read: {', '.join(FORMATS)}",
        )
    weights = group.inside("weights")
    if weights is None:
        raise BadModelFile(f"{group.where}: weights is missing")
    kind, bits = weights.text("type", "int"), weights.count("num_bits", 8, most=32)
    strategy = weights.text("strategy", None) or ("group" if weights.get("group_size") else "tensor")
    notes = told(group.get("input_activations"))
    if kind == "float" and bits == 8 and form in ("float-quantized", "naive-quantized"):
        return _floats(weights, strategy, notes)
    if kind != "int" or bits not in (4, 8) or form == "float-quantized" or (bits == 4 and form != "pack-quantized"):
        raise Unsupported(f"{weights.where}: {kind[:20]} weights of {bits} bits as {form} are not read")
    if strategy not in ("group", "channel", "tensor"):
        raise Unsupported(f"{weights.where}: the strategy {strategy[:40]!r} is not read for whole numbers")
    size = group_size(weights, "group_size") if strategy == "group" else -1
    words = f"groups of {size}" if size != -1 else "one group a row"
    if weights.get("actorder") in ("group", True) and size != -1:
        notes = (*notes, SCATTERED)
    return Ints(bits, size, form == "pack-quantized", f"{form} ({bits} bits, {words})", notes)


def _floats(weights: Settings, strategy: str, notes: tuple[str, ...]) -> Fp8:
    if strategy in ("tensor", "channel"):
        return Fp8(None, "FP8 (e4m3)", notes)
    if strategy == "block":
        size = tile_of(weights.where, "block_structure", weights.get("block_structure"))
        return Fp8(size, f"FP8 (e4m3, tiles of {size[0]}x{size[1]})", notes)
    raise Unsupported(f"{weights.where}: the strategy {strategy[:40]!r} is not read for FP8")
