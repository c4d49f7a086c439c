"""Quire: one LLM inference engine from a laptop to a fleet. The same tokens every time, told why, told the price.

Importing this package imports nothing heavy; the names below arrive when they are first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing would be the heaviest import of all here
__all__ = ["LLM", "AsyncLLM", "Constraint", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from quire.config import VERSION as __version__
    from quire.engine.types import Constraint
    from quire.llm import LLM, AsyncLLM
    from quire.runner.params import SamplingParams


def __getattr__(name: str) -> object:
    if name == "__version__":
        from quire.config import VERSION

        return VERSION
    if name in ("LLM", "AsyncLLM"):
        from quire import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from quire.runner.params import SamplingParams

        return SamplingParams
    if name == "Constraint":
        from quire.engine.types import Constraint

        return Constraint
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
