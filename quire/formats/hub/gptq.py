"""GPTQ: whole numbers of 4 or 8 bits packed along columns, a scale and a zero for each group: w = scale * (code - zero).

qweight [k * bits / 32, n] i32   the lowest bits of a word are the first of its columns
qzeros  [groups, n * bits / 32]  the zeros, one less than they are in the first version of the format, as they are in gptq_v2
scales  [groups, n]              f16, bf16 or f32
g_idx   [k] i32                  each column's group; with desc_act (act-order) in any order, and the matrix becomes plain numbers

A zero that is stored as the highest number is one more than any code: the kernels of the first version compute so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.formats.hub import Parts, Settings, Stored, need
from quire.formats.hub._blocks import affine, finite, groups_of, in_order, scattered, unpacked
from quire.layouts import Bytes, Floats, Layout
from quire.observe.errors import BadModelFile, Unsupported

METHODS = ("gptq",)
FLOATS = ("F16", "BF16", "F32")
SCATTERED = (
    "columns are in the order of their activations (desc_act): such matrices are held as plain numbers, not as codes"
)


@dataclass(frozen=True, slots=True)
class Gptq:
    """The way in which one GPTQ folder stores its matrices."""

    bits: int
    group: int  # -1: all columns
    later: bool  # zeros are stored as they are
    label: str
    notes: tuple[str, ...] = ()
    float8: bool = False
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")
    idle: tuple[str, ...] = ()

    def marks(self, stored: Stored) -> bool:
        return True

    def shape(self, parts: Parts) -> tuple[int, int]:
        per = 32 // self.bits
        packed = need(parts, "qweight", ("I32",), None)
        if len(packed.shape) != 2:
            need(parts, "qweight", ("I32",), (0, 0))
        k, n = packed.shape[0] * per, packed.shape[1]
        _, groups = groups_of("qweight", k, self.group)
        why = f" for {n} rows and {k} columns, {self.bits} bits and group_size {self.group}"
        need(parts, "scales", FLOATS, (groups, n), why)
        need(parts, "qzeros", ("I32",), (groups, -(-n // per)), why)
        if "g_idx" in parts:
            need(parts, "g_idx", ("I32",), (k,), why)
        return n, k

    def read(self, parts: Parts) -> Layout:
        n, k = self.shape(parts)
        group, groups = groups_of("qweight", k, self.group)
        order = parts["g_idx"].integers() if "g_idx" in parts else None
        finite("scales", parts["scales"].floats())
        words, zeros_of, more = parts["qweight"].integers(), parts["qzeros"].octets(), 0 if self.later else 1

        def codes(first: int, end: int) -> Bytes:
            return np.ascontiguousarray(words[:, first:end].T).view(np.uint8)

        def scales(first: int, end: int) -> Floats:
            return parts["scales"].floats(slice(None), slice(first, end)).T

        def zeros(first: int, end: int) -> npt.NDArray[np.int16]:
            return unpacked(zeros_of, self.bits)[:, first:end].T.astype(np.int16) + more

        if order is not None and not in_order("g_idx", order, group, groups):
            return scattered(self.bits, (n, k), codes, scales, zeros, order)
        return affine(f"GPTQ-{self.bits}", self.bits, (n, k), codes, scales, zeros, group)


def scheme(settings: Settings) -> Gptq:
    bits = settings.count("bits", most=32)
    if bits not in (4, 8):
        raise Unsupported(f"{settings.where}: GPTQ with {bits} bits is not read", cure="4 and 8 bits are")
    form = settings.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2") or settings.flag("is_marlin_format", False):
        form = form if form not in ("gptq", "gptq_v2") else "marlin"
        raise Unsupported(f"{settings.where}: checkpoint_format {form[:40]!r} is not read", cure="gptq and gptq_v2 are")
    if settings.text("pack_dtype", "int32") != "int32":
        raise Unsupported(f"{settings.where}: pack_dtype is {settings.get('pack_dtype')}: only int32 is read")
    dynamic = settings.get("dynamic")
    if isinstance(dynamic, dict) and any(isinstance(v, dict) and v for v in dynamic.values()):
        raise Unsupported(f"{settings.where}: dynamic gives some matrices other bits or groups, which is not read")
    group = group_size(settings, "group_size")
    words = "one group a row" if group == -1 else f"groups of {group}"
    moved = settings.flag("desc_act", False) and group != -1 and not settings.flag("static_groups", False)
    return Gptq(bits, group, form == "gptq_v2", f"GPTQ ({bits} bits, {words})", (SCATTERED,) if moved else ())


def group_size(settings: Settings, *keys: str) -> int:
    """A number of columns, or -1: all of them."""
    key = next((key for key in keys if settings.get(key) is not None), keys[0])
    value = settings.get(key)
    if type(value) is not int or not (value == -1 or 0 < value <= 1 << 24):
        raise BadModelFile(f"{settings.where}: {key} is {str(value)[:40]}: a number of columns, or -1, is needed")
    return value
