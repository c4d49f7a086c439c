"""The native CPU backend: a model's forward is recorded once and replayed in C++, with no Python inside a step.

  recorder.py  the op table in capture mode: calls become instructions over symbols
  fuse.py      optional passes over the instructions; none of them changes a bit of any result
  arena.py     instructions' tensors get places in one block of memory, shared where lifetimes allow
  backend.py   weights packed, the plan handed to C++
  program.py   steps run, pages copied, adapters placed

Nothing is imported here, so that asking for the package costs nothing.
"""

from __future__ import annotations

from typing import Any


def extension() -> Any:
    """The compiled module."""
    from quire.observe.errors import Unsupported

    try:
        from quire.backends.native import _native
    except ImportError as e:
        raise Unsupported(
            f"the native backend is not built here: {e}", cure="install with a C++ compiler at hand: pip install ."
        ) from None
    return _native


def available() -> list[str]:
    """Kernel sets that this CPU can run, best first."""
    return extension().available()


def isa() -> str:
    """The kernel set that is used when none is asked for."""
    return available()[0]
