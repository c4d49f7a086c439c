"""Models: one file per family, each plain Python over the op table. The registry is the directory listing.

A family module has `ARCHS` and `HF_ARCHS` (the architecture names it answers to, in a GGUF and in a config.json) and `Model`,
with
  Model.from_gguf(gguf)            reads the configuration and takes its tensors, all checked
  Model.from_hf(folder)            the same from Hugging Face's layout
  model.config                     what the engine must know: see Facts
  model.kv(pages, page_size)       the KV pools it needs, with so many pages each
  model.kv_layout                     where layers have windows: which pool each layer is in (kv_layout.py)
  model.hidden(ops, batch, inputs)  -> rows batch.logit_rows before the head
  model.forward(ops, batch, inputs) -> logits of batch.logit_rows; an encoder has none, and says so
                                   both mark the rows before each layer and behind the last norm: see Ops.mark
  model.release(layout)            a backend has taken that weight over
Where several families answer to one name in a GGUF, those with `owns(gguf)` are asked first whether the file is theirs.
index.py repeats the names, so that a start imports only the modules that can answer.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quire.backends.batch import I32, Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Floats, Layout
from quire.models.kv_layout import KVLayout
from quire.observe.errors import Unsupported
from quire.weights.checkpoint import Opened, naming
from quire.weights.gguf.file import GGUF
from quire.weights.gguf.peek import HeaderStart

if TYPE_CHECKING:
    from quire.models.pooling import ScoreHead


class Facts(Protocol):
    """The part of a configuration that the engine reads."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def width(self) -> int: ...  # numbers in a row between layers
    @property
    def context(self) -> int: ...  # the longest sequence it was made for


class Model(Protocol):
    """A loaded model: configuration and weights, no computation of its own."""

    @property
    def config(self) -> Facts: ...
    def kv(self, pages: int, page_size: int) -> KV: ...
    def hidden(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor: ...
    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor: ...
    def release(self, layout: Layout) -> None: ...
    @property
    def notes(self) -> list[str]:
        """Decisions worth telling, such as tensors that were not used."""
        ...


@runtime_checkable
class Grouped(Protocol):
    """A model whose layers keep K and V for different lengths of time."""

    kv_layout: KVLayout


@runtime_checkable
class SeveralAxes(Protocol):
    """A model whose tokens have a position along each of several axes, such as time, height and width of a picture's parts."""

    axes: int


@runtime_checkable
class Stretches(Protocol):
    """A model whose rotary embedding differs where longer sequences are served (longrope)."""

    def stretch(self, context: int) -> None:
        """Choose the rotation for sequences of up to `context` tokens. Called before the model is compiled."""
        ...


@runtime_checkable
class Encoder(Protocol):
    """A model that sees a text at once and keeps no cache: it embeds or scores, and cannot generate."""

    separators: int  # end tokens between the two texts of a pair

    @property
    def head(self) -> ScoreHead | None:
        """The layers that make a score of the first token's hidden row; None for a model that embeds."""
        ...

    @property
    def inputs(self) -> Mapping[str, int]:
        """The width of each input of `hidden`."""
        ...

    def given(self, pos: I32, second: I32) -> Mapping[str, Floats]:
        """The values of `inputs` for tokens at these positions; second: 1 for tokens of the second of two texts, else 0."""
        ...


def families(architecture: str | None = None) -> list[ModuleType]:
    """Every family module of this package; with an architecture's name, those that answer to it."""
    from quire.models.index import NAMES

    names = [name for name, answers in NAMES.items() if architecture in answers]
    if not names:
        import pkgutil

        names = [info.name for info in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [module for module in modules if hasattr(module, "ARCHS")]


def supported() -> list[str]:
    """Every architecture name that can be loaded from a GGUF."""
    return sorted({arch for module in families() for arch in module.ARCHS})


def supported_hf() -> list[str]:
    """Every architecture name that can be loaded from a folder with a config.json."""
    return sorted(arch for module in families() for arch in module.HF_ARCHS)


def family_of(checkpoint: Opened | HeaderStart) -> ModuleType:
    """The module for a checkpoint's architecture. Raises Unsupported, naming it and what there is instead; reads no
    weights. Of a GGUF that is still on its way, one that may be it."""
    architecture, file = checkpoint.architecture, isinstance(checkpoint, GGUF | HeaderStart)
    found = [m for m in families(architecture) if architecture in (m.ARCHS if file else m.HF_ARCHS)]
    if isinstance(checkpoint, GGUF):
        choosy = [module for module in found if hasattr(module, "owns")]
        found = [m for m in choosy if m.owns(checkpoint)] or [m for m in found if m not in choosy]
    if found:
        return found[0]
    names = supported() if file else supported_hf()
    raise Unsupported(
        f"the architecture {architecture[:80]!r} is not supported ({checkpoint.path})",
        cure=f"supported: {', '.join(names)}",
    )


def load(checkpoint: Opened) -> Model:
    """The model in that checkpoint. An architecture that is not supported is refused before weights are read."""
    family: Any = family_of(checkpoint).Model
    with naming(checkpoint.path):
        return family.from_gguf(checkpoint) if isinstance(checkpoint, GGUF) else family.from_hf(checkpoint)
