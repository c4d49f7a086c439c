"""What is open before an engine is made of it: the model, and the backend it will run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.backends.ops import Backend
from quire.layouts import Layout
from quire.models import Model

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened


@dataclass(frozen=True, slots=True)
class Parts:
    """See build_engine, which opens them."""

    model: Model
    name: str
    nbytes: int
    checkpoint: Opened | None
    backend: Backend
    packed: Callable[[Layout, int, int], None]
