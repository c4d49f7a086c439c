"""AWQ, its gemm version: whole numbers of 4 bits packed along rows, a scale and a zero for each group: w = scale * (code - zero).

qweight [k, n / 8] i32       eight rows of the matrix in a word; from its lowest bits on rows 0, 2, 4, 6, 1, 3, 5, 7
qzeros  [groups, n / 8] i32  the zeros, packed alike
scales  [groups, n]          f16, bf16 or f32
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.formats.hub import Parts, Settings, Stored, need
from quire.formats.hub._blocks import affine, finite, groups_of
from quire.formats.hub.gptq import FLOATS, group_size
from quire.layouts import Bytes, Floats, Layout
from quire.observe.errors import Unsupported

METHODS = ("awq",)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq:
    """The way in which one AWQ folder stores its matrices."""

    group: int  # -1: all columns
    label: str
    notes: tuple[str, ...] = ()
    float8: bool = False
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")
    idle: tuple[str, ...] = ()

    def marks(self, stored: Stored) -> bool:
        return True

    def shape(self, parts: Parts) -> tuple[int, int]:
        packed = need(parts, "qweight", ("I32",), None)
        if len(packed.shape) != 2:
            need(parts, "qweight", ("I32",), (0, 0))
        k, n = packed.shape[0], packed.shape[1] * 8
        _, groups = groups_of("qweight", k, self.group)
        why = f" for {n} rows and {k} columns, 4 bits and group_size {self.group}"
        need(parts, "scales", FLOATS, (groups, n), why)
        need(parts, "qzeros", ("I32",), (groups, n // 8), why)
        return n, k

    def read(self, parts: Parts) -> Layout:
        n, k = self.shape(parts)
        group, _ = groups_of("qweight", k, self.group)
        finite("scales", parts["scales"].floats())
        words, zeros_of = (parts[name].integers().view(np.uint32) for name in ("qweight", "qzeros"))

        def codes(first: int, end: int) -> Bytes:
            low = first // 8
            part = np.ascontiguousarray(words[:, low : -(-end // 8)].T)  # [n / 8, k]
            pairs = part.view(np.uint8).reshape(-1, k // 2, 2, 4)  # neighbours along columns, four bytes each
            even, odd = pairs[:, :, 0], pairs[:, :, 1]
            halves = (even & np.uint8(15)) | odd << np.uint8(4), even >> np.uint8(4) | (odd & np.uint8(0xF0))
            out = np.empty((len(part), 8, k // 2), np.uint8)
            for i, row in enumerate(ORDER):
                out[:, row] = halves[i % 2][..., i // 2]
            return out.reshape(-1, k // 2)[first - 8 * low : end - 8 * low]

        def scales(first: int, end: int) -> Floats:
            return parts["scales"].floats(slice(None), slice(first, end)).T

        return affine("AWQ-4", 4, (n, k), codes, scales, lambda first, end: _rows(zeros_of, first, end), group)


def _rows(words: npt.NDArray[np.uint32], first: int, end: int) -> Bytes:
    """words [columns, n / 8] -> rows first to end, one number in each byte [rows, columns]"""
    low = first // 8
    part = words[:, low : -(-end // 8)].T  # [n / 8, columns]
    out = np.empty((part.shape[0], 8, part.shape[1]), np.uint8)
    for i, row in enumerate(ORDER):
        out[:, row] = part >> np.uint32(4 * i) & np.uint32(15)
    return out.reshape(-1, part.shape[1])[first - 8 * low : end - 8 * low]


def scheme(settings: Settings) -> Awq:
    key = "bits" if settings.get("bits") is not None else "w_bit"
    if settings.count(key, 4, most=32) != 4:
        raise Unsupported(f"{settings.where}: AWQ with {settings.get(key)} bits is not read", cure="4 bits are")
    version = settings.text("version", "gemm").lower()
    if version != "gemm":
        raise Unsupported(
            f"{settings.where}: AWQ's version {version[:40]!r} is not read", cure="the gemm version is; or use a GGUF"
        )
    group = group_size(settings, "group_size", "q_group_size")
    words = "one group a row" if group == -1 else f"groups of {group}"
    return Awq(group, f"AWQ (4 bits, {words})")
