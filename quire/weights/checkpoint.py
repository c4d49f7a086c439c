"""A checkpoint: a model's weights and metadata, from either of the two layouts on disk.

A GGUF is one file, a Folder is Hugging Face's layout. What both offer is `Checkpoint`; what only one of them has (metadata
keys, config.json) is read by those who know the difference: a family's configuration and the tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from quire.layouts import Bytes, Layout
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf.file import GGUF

if TYPE_CHECKING:
    from quire.weights.folder import Folder

Opened: TypeAlias = "GGUF | Folder"


class Tensor(Protocol):
    """The name, type and shape of a tensor, known without reading it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


class Checkpoint(Protocol):
    """The weights and the configuration of a model, as families read them."""

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    def tensor(self, name: str) -> Layout:
        """A view of the mapped file."""
        ...

    def octets(self, name: str) -> Bytes:
        """A tensor of unsigned bytes, in its shape: a view of the mapped file."""
        ...

    def release(self, name: str) -> None:
        """Give back the file pages of a tensor that a backend has taken over."""
        ...

    def file_of(self, name: str) -> str:
        """The file that holds it, for messages."""
        ...


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """The model at that path: a folder, or a GGUF file. Reads no weights."""
    if os.path.isdir(path):
        from quire.weights.folder import Folder  # a GGUF does not need it

        return Folder.open(path)
    return GGUF.open(path)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Every complaint about a model names the file: one that was made where only its content is known gets it here."""
    try:
        yield
    except (BadModelFile, Unsupported) as e:
        if os.fspath(path) in e.message:
            raise
        raise type(e)(f"{os.fspath(path)}: {e.message}", cure=e.cure, param=e.param, code=e.code) from None


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of all its tensors."""
    return sum(info.nbytes for info in checkpoint.tensors.values())
