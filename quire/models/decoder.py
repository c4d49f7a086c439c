"""The decoder that Llama-shaped families are: an embedding, layers one after another, a last norm and a head.

A family's `Model` is a Decoder that says what differs: how its configuration is read (`of_gguf`, `of`), which weights a layer has
(its own `Layer`) and what a layer computes (`block`). Everything around the layers is here, and so is what the engine asks of any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.backends.outputs import FINAL
from quire.layouts import Layout
from quire.models import metadata
from quire.models.kv_layout import KVLayout
from quire.models.parts import Dims, Weights, own_code_line, refuse_unknown, windows_line
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values


class Decoder:
    """What all Llama-shaped families share. A family writes `block`, and overrides any other method that differs."""

    unused: ClassVar[tuple[str, ...]] = ()  # how tensors begin that a file may have and the family leaves alone

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        *,
        windows: tuple[int | None, ...] | None = None,
        tied: bool | None = None,
        plus: float = 0.0,
    ):
        """`windows`: how many tokens each layer sees, None for all of them; tied: see Weights.head; plus: see Weights.norm."""
        seen = windows or (None,) * dims.layers
        self.config = dims
        self.notes = windows_line(seen)
        self.kv_layout = KVLayout(seen, dims.context)
        self.tensors = weights.tensors
        self.embedding = weights.matrix("embedding", dims.vocab_size, dims.width)
        self.norm = weights.norm("norm", dims.width, plus=plus)
        self.head = weights.head(dims, self.embedding, tied)

    # ---- reading a checkpoint

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Self:
        """The model in a GGUF, with every tensor of the file used."""
        tensors = Tensors(gguf)
        model = cls.of_gguf(metadata.Keys(gguf), tensors)
        model.notes += refuse_unknown(gguf, tensors, model.config, known=lambda name: name.startswith(cls.unused))
        return model

    @classmethod
    def from_hf(cls, folder: Folder) -> Self:
        """The model in a folder, with every tensor of it used."""
        tensors = Tensors(folder)
        model = cls.of(folder.config, folder.architecture, tensors)
        unused = cls.unused if "ConditionalGeneration" in folder.architecture else ()
        model.notes += refuse_unknown(
            folder, tensors, model.config, tied=model.tied, known=lambda name: name.startswith(unused)
        )
        model.notes += own_code_line(folder, model.config)
        return model

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Self:
        """The model that a GGUF's metadata describes."""
        raise NotImplementedError

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Self:
        """The model that a config.json describes."""
        raise NotImplementedError

    # ---- what the engine asks for

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head is self.embedding

    def kv(self, pages: int, page_size: int) -> KV:
        """The pools for keys and values, with so many pages each."""
        return self.kv_layout.kv(pages, page_size, self.config.kv_heads, self.config.head_dim)

    def release(self, layout: Layout) -> None:
        """A backend has taken that weight over."""
        self.tensors.release(layout)

    # ---- the forward

    def embedded(self, ops: Ops, batch: Batch) -> Tensor:
        """The input of the first layer, [T, d]: the embeddings of the tokens."""
        return ops.embed(batch.ids, self.embedding)

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        """Layer i: [T, d] -> [T, d]."""
        raise NotImplementedError

    def last_norm(self, ops: Ops, x: Tensor) -> Tensor:
        """The norm behind the last layer."""
        return ops.rms_norm(x, self.norm, self.config.eps)

    def hidden(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rows batch.logit_rows as they go into the head.

        The norm stands before the rows are taken, so that rows behind it can be kept for every token. Where none are, backends take
        the rows first (backends/early.py).
        """
        x = self.embedded(ops, batch)
        for i in range(self.config.layers):
            ops.mark(x, i)
            x = self.block(ops, batch, x, i)
        ops.mark(x, self.config.layers)
        x = self.last_norm(ops, x)
        ops.mark(x, FINAL)
        return ops.take(x, batch.logit_rows)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return ops.linear(self.hidden(ops, batch, inputs), self.head)
