"""FP8: a weight of e4m3 numbers beside its scales: w = number * scale.

weight                         [n, k] e4m3
weight_scale_inv, weight_scale one scale, [n, 1], or one for each tile of [n / rows, k / columns], the last ones cut off

Despite its name weight_scale_inv is what the numbers are multiplied by. input_scale and activation_scale say how other engines round
activations; they are not rounded here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.formats.hub import Parts, Settings, Stored, Wrong, need, text
from quire.formats.hub._blocks import BLOCK, finite, float8
from quire.layouts import Floats, Layout
from quire.observe.errors import BadModelFile, Unsupported

METHODS = ("fp8", "fbgemm_fp8")
NAMES = ("weight_scale_inv", "weight_scale")
KINDS = ("F32", "BF16", "F16", "F8_E8M0")
# How other engines round activations, keys and values.
IDLE = (".input_scale", ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".input_scale_ub")


@dataclass(frozen=True, slots=True)
class Fp8:
    """The way in which one FP8 folder stores its matrices."""

    tile: tuple[int, int] | None  # None: a scale for all, or one a row
    label: str
    notes: tuple[str, ...] = ()
    float8: bool = True
    parts: tuple[str, ...] = ("weight", *NAMES)
    idle: tuple[str, ...] = IDLE

    def marks(self, stored: Stored) -> bool:
        return stored.type.startswith("F8")

    def shape(self, parts: Parts) -> tuple[int, int]:
        weight = need(parts, "weight", ("F8_E4M3",), None)
        if len(weight.shape) != 2:
            raise Wrong("weight", f"has shape {text(weight.shape)}: an FP8 matrix has two axes", supported=False)
        n, k = weight.shape
        if n == 0 or k == 0 or k % BLOCK:
            raise Wrong("weight", f"has {k} columns: they must be whole blocks of {BLOCK}", supported=False)
        self._steps(parts, n, k)
        return n, k

    def _steps(self, parts: Parts, n: int, k: int) -> tuple[Stored, int, int]:
        """The scales, and how many rows and columns share one."""
        both = [name for name in NAMES if name in parts]
        if len(both) == 2:
            raise Wrong(both[1], f"is there beside {both[0]}: one of them is needed")
        name = both[0] if both else NAMES[0] if self.tile else NAMES[1]
        scale = need(parts, name, KINDS, None, f": a weight of {n}x{k} FP8 numbers has no scale")
        if self.tile is not None:
            rows, columns = self.tile
            why = f" for {n}x{k} numbers in tiles of {rows}x{columns}"
            return need(parts, name, KINDS, (-(-n // rows), -(-k // columns)), why), rows, columns
        if scale.shape in ((), (1,), (1, 1)):
            return scale, n, k
        if scale.shape in ((n,), (n, 1)):
            return scale, 1, k
        raise Wrong(name, f"has shape {text(scale.shape)}: one scale, or one for each of {n} rows, is needed")

    def read(self, parts: Parts) -> Layout:
        n, k = self.shape(parts)
        stored, rows, columns = self._steps(parts, n, k)
        finite(next(name for name in NAMES if name in parts), _floats(stored))

        def scales(first: int, end: int) -> Floats:
            table = _floats(stored).reshape(-(-n // rows), -1)
            return table[np.arange(first, end) // rows]

        return float8(parts["weight"].octets(), scales, (rows, columns))


def _floats(stored: Stored) -> Floats:
    if stored.type != "F8_E8M0":
        return stored.floats()
    bits = stored.octets()
    return np.where(bits == 255, np.float32("nan"), np.ldexp(np.float32(1), bits.astype(np.int32) - 127))


def scheme(settings: Settings) -> Fp8:
    if settings.text("fmt", "e4m3") != "e4m3":
        raise Unsupported(f"{settings.where}: FP8 numbers of kind {settings.get('fmt')} are not read: e4m3 are")
    if settings.text("expert_dtype", "fp8") != "fp8":
        raise Unsupported(f"{settings.where}: experts of kind {settings.get('expert_dtype')} are not read beside FP8")
    tile = settings.get("weight_block_size")
    if tile is None:
        return Fp8(None, "FP8 (e4m3)", told(settings.get("activation_scheme")))
    size = tile_of(settings.where, "weight_block_size", tile)
    return Fp8(size, f"FP8 (e4m3, tiles of {size[0]}x{size[1]})", told(settings.get("activation_scheme")))


def tile_of(where: str, key: str, tile: object) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    fine = isinstance(tile, list) and len(tile) == 2 and all(type(n) is int and 0 < n <= 1 << 24 for n in tile)
    if not isinstance(tile, list) or not fine:
        raise BadModelFile(f"{where}: {key} is {str(tile)[:40]}: two whole numbers are needed")
    if tile[1] % BLOCK:
        raise Unsupported(f"{where}: {key} is {tile}: tiles whose columns are multiples of {BLOCK} are read")
    return tile[0], tile[1]


def told(activations: object) -> tuple[str, ...]:
    """A line for people where the file wants activations rounded."""
    if not activations:
        return ()
    return ("the file asks for rounded activations: they are rounded as the backend says, not as the file does",)
