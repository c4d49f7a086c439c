"""Quantization formats, one file each: what a tensor's bytes mean, as a layout whose `dequantize` is exact.

The registry is this directory's listing, and a format is imported when a file uses it. A format knows its own blocks:
not files, not kernels. Files that start with an underscore are shared tables, not formats. What tensors of a folder are made of, several
to a matrix, is in `hub/`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from quire.layouts import Bytes, Layout

# Every number that ggml has given to a type, so that a type without a file here can be refused by its name.
_NAMES = """
    F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K
    IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16
    Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4 Q1_0
"""
GGML_NAMES = dict(enumerate(_NAMES.split()))


class Format(Protocol):
    """The names that each module in this directory has. Quantized ones also have CODEC, dense ones DTYPE."""

    NAME: str
    GGML_TYPE: int
    BLOCK: int  # elements that cannot be split
    NBYTES: int  # bytes that they take

    def read(self, data: Bytes, shape: tuple[int, ...]) -> Layout:
        """The bytes of a tensor as a layout, without a copy; a codebook's are expanded where the layout is read.

        The caller has checked that the sizes agree.
        """
        ...


@cache
def names() -> frozenset[str]:
    """The formats there are, in upper case."""
    return frozenset(m.name.upper() for m in iter_modules(__path__) if not (m.ispkg or m.name.startswith("_")))


@cache
def load(name: str) -> Format:
    """A format by its name. KeyError if there is no such file."""
    if name not in names():
        raise KeyError(name)
    return cast(Format, import_module(f"{__name__}.{name.lower()}"))


def by_ggml_type(number: int) -> Format | None:
    """The format that reads a GGML type, or None."""
    name = GGML_NAMES.get(number)
    if name is not None:
        return load(name) if name in names() else None
    # A number newer than the table: ask the files themselves.
    return next((f for f in map(load, sorted(names())) if number == f.GGML_TYPE), None)


def ggml_name(number: int) -> str:
    """The name of a type number, for messages."""
    name = GGML_NAMES.get(number)
    return f"{name} ({number})" if name else f"{number}, which is no known GGML type"
