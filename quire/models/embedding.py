"""How rows become an embedding: what every engine that makes any must know. What a checkpoint says about it is read by pooling.py,
which an engine for a GGUF that says nothing does not even import."""

from __future__ import annotations

import msgspec

KINDS = ("mean", "cls", "last")
UNSAID = ("the file does not say", "there is no modules.json that says")  # of a GGUF, and of a folder


class Pooling(msgspec.Struct, frozen=True):
    """How rows become an embedding."""

    kind: str  # of KINDS: the mean of all rows, the first, the last
    normalize: bool  # to length 1
    context: int | None = None  # the longest text it is meant for, where the checkpoint says
    prompts: dict[str, str] = {}  # what goes before a text, by name; "" is the default
    cuts: list[int] | None = None  # how many numbers may be kept: None: all; an empty list: any; else these
    lines: tuple[str, ...] = ()


def of_gguf(kind: str, why: str = UNSAID[0]) -> Pooling:
    """What a GGUF can say, or leaves unsaid."""
    return Pooling(kind, True, lines=(f"pooling: {kind} ({why}), normalized (a GGUF cannot say)",))
