"""Pages of KV as bytes: what `Program.read_pages` gives and `Program.write_pages` takes.

A buffer has a row for each page, and a row holds all layers of the page's group, one layer after another. What is in a
layer's bytes is the backend's business; `PageLayout` names it, so that two programs can tell whether the pages of one are
good for the other. Two processes with the same model, backend and settings have equal layouts, and write the same bytes
for the same tokens. Rows can be kept, hashed and sent one by one: they are the payload of KV tiers and of transfers
between machines. This file knows numpy alone; it moves nothing itself.

Whoever gives a page's bytes back is trusted with what they mean: wrong bytes are wrong keys and values, never a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.backends.kv import KV

PageBytes: TypeAlias = npt.NDArray[np.uint8]  # [pages, bytes of a row], C-contiguous
PageIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The layout of the bytes of a page. Programs with equal layouts can take each other's pages."""

    kind: str  # what the group keeps: full, window, latent or state
    order: str  # how a layer's numbers are laid out: a name that the backend gives, "native-cells" for one
    dtype: str  # of the numbers, as numpy or torch call it
    layers: int
    page_size: int  # tokens
    kv_heads: int
    head_dim: int
    latent: int
    window: int
    state: int  # numbers of a layer's state
    layer_nbytes: int  # of one layer of one page, with the scales of its codes

    @classmethod
    def of(cls, kv: KV, *, order: str, dtype: str, layer_nbytes: int) -> PageLayout:
        """The layout of one group's pages."""
        kind = "state" if kv.state else "latent" if kv.latent else "window" if kv.window else "full"
        sizes = (kv.layers, kv.page_size, kv.kv_heads, kv.head_dim, kv.latent, kv.window, kv.state)
        return cls(kind, order, dtype, *sizes, layer_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of one page: of a row of the buffer."""
        return self.layers * self.layer_nbytes

    def describe(self) -> str:
        """All of it in one line, the same in every process: to be shown, hashed, or compared with another machine's."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


class PageCopy(Protocol):
    """Pages on their way between a pool and a buffer.

    Until the copy is done nobody may write pages that are being read, read or write pages that are being written, or touch
    the buffer. It is done when `done` says so or `wait` returns.
    """

    def done(self) -> bool:
        """Whether all of it has been copied. Does not wait; raises what went wrong."""
        ...

    def wait(self) -> PageBytes:
        """Waits until all of it has been copied, and returns the buffer."""
        ...

    def fence(self) -> None:
        """Orders the device, without waiting here: what is launched after this call begins when the copy is done."""
        ...


class CopiedPages:
    """A copy that was made while its caller waited, as backends on the CPU make it."""

    __slots__ = ("_buffer",)

    def __init__(self, buffer: PageBytes) -> None:
        self._buffer = buffer

    def done(self) -> bool:
        return True

    def wait(self) -> PageBytes:
        return self._buffer

    def fence(self) -> None:
        """Do nothing: no copy is under way."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which pages and layers of a group a copy is of, once they are known to be there."""

    pages: npt.NDArray[np.int64]  # distinct, each in the pool
    first: int  # layer
    layers: int

    @classmethod
    def checked(cls, groups: Sequence[KV], group: int, pages: PageIds, layers: range | None) -> PageRequest:
        """The request; a ValueError, where it names what is not there."""
        kv = groups[checked_group(groups, group)]
        ids = np.array(pages)  # a copy: what is checked is what is used
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise ValueError(f"pages are named by a list of whole numbers, not by {ids.dtype} of shape {ids.shape}")
        outside = ids[(ids < 0) | (ids >= kv.pages)]
        if outside.size:
            raise ValueError(f"group {group} has pages 0 to {kv.pages - 1}: {int(outside[0])} is not one of them")
        if np.unique(ids).size != ids.size:
            raise ValueError("a page is named twice in one copy")
        if layers is None:
            layers = range(kv.layers)
        if layers.step != 1 or not 0 <= layers.start <= layers.stop <= kv.layers:
            raise ValueError(f"group {group} has layers 0 to {kv.layers - 1}: {layers} are not some of them in a row")
        return cls(ids.astype(np.int64), layers.start, len(layers))

    @property
    def span(self) -> slice:
        """The layers."""
        return slice(self.first, self.first + self.layers)

    def shape(self, layout: PageLayout) -> tuple[int, int]:
        """The shape of the buffer: a row for each page, of what these layers have."""
        return self.pages.size, self.layers * layout.layer_nbytes

    def fresh(self, layout: PageLayout) -> PageBytes:
        """A buffer of that shape, in memory of no special kind."""
        return np.zeros(self.shape(layout), np.uint8)

    def check_buffer(self, buffer: PageBytes, layout: PageLayout, *, written: bool) -> None:
        """Raises ValueError unless the buffer has a row for each page, of these layers' bytes; `written`: by the copy."""
        shape = self.shape(layout)
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8:
            raise ValueError(
                f"a buffer of pages is a numpy array of uint8, not {getattr(buffer, 'dtype', type(buffer))}"
            )
        if buffer.shape != shape:
            raise ValueError(
                f"a buffer for {shape[0]} pages of {shape[1]} bytes must have shape {shape}, not {buffer.shape}"
            )
        if not buffer.flags.c_contiguous or (written and not buffer.flags.writeable):
            raise ValueError("a buffer of pages must be contiguous, and writable where pages are read into it")


def checked_group(groups: Sequence[KV], group: int) -> int:
    """The group, if there is one of that number."""
    if not 0 <= group < len(groups):
        raise ValueError(f"there is no group {group}: the program has {len(groups)}")
    return group


def blank(layout: PageLayout, count: int) -> PageBytes:
    """A buffer of so many zeroed rows, in memory of no special kind."""
    return np.zeros((checked_count(count), layout.nbytes), np.uint8)


def checked_count(count: int) -> int:
    """How many pages a buffer is asked for, if that makes sense."""
    if count < 0:
        raise ValueError(f"a buffer cannot hold {count} pages")
    return count
