"""Answers: how a model writes reasoning and tool calls, found from its chat template, and how they are read."""

from __future__ import annotations

_WORDS = ("think", "THINK", "reasoning", "tool", "channel")


def plain(source: str) -> bool:
    """Whether a template can show neither reasoning nor calls: it has none of the words for them. Here, and not in find.py,
    because most of what such a model is asked needs nothing of this room."""
    return not any(word in source for word in _WORDS)
