"""`Pooling`: how hidden rows become an embedding, as every engine that makes embeddings must know.

What a checkpoint says about it is read by pooling.py, which an engine does not even import for a GGUF that says nothing.
"""

from __future__ import annotations

import msgspec

KINDS = ("mean", "cls", "last")
UNSAID = ("the file does not say", "there is no modules.json that says")  # of a GGUF, and of a folder


class Pooling(msgspec.Struct, frozen=True):
    """How the hidden rows of a text become one embedding."""

    kind: str  # of KINDS: the mean of all rows, the first, the last
    normalize: bool  # to length 1
    context: int | None = None  # the longest text it is meant for, where the checkpoint says
    prompts: dict[str, str] = {}  # what goes before a text, by name; "" is the default
    cuts: list[int] | None = None  # how many numbers may be kept: None: all; an empty list: any; else these
    lines: tuple[str, ...] = ()


def of_gguf(kind: str, why: str = UNSAID[0]) -> Pooling:
    """The pooling of a GGUF, which cannot say whether to normalize; `why` it is this kind."""
    return Pooling(kind, True, lines=(f"pooling: {kind} ({why}), normalized (a GGUF cannot say)",))
