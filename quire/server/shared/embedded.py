"""Shared by the routes of embeddings and scores: bounds, usage, how much of a text was cut, metrics."""

from __future__ import annotations

from typing import Any

from quire.chat.embedder import Embedded
from quire.observe.errors import BadRequest
from quire.server.served import Served

MAX_INPUTS = 2048  # in one request, as OpenAI has it


def check_count(n: int, param: str) -> None:
    """Refuse no texts, and too many."""
    if not 1 <= n <= MAX_INPUTS:
        raise BadRequest(f"{param} has {n} texts: 1 to {MAX_INPUTS} are taken in one request", param=param)


def usage(made: list[Embedded]) -> dict[str, int]:
    """The `usage` object: what was computed."""
    total = sum(one.tokens for one in made)
    return {"prompt_tokens": total, "total_tokens": total}


def cut(made: list[Embedded]) -> dict[str, Any]:
    """A field of the answer about texts that were cut: how many tokens of each, by index. Empty where none was."""
    cuts = {str(i): one.cut for i, one in enumerate(made) if one.cut}
    return {"quire": {"cut_tokens": cuts}} if cuts else {}


def count(served: Served, made: list[Embedded]) -> None:
    """Into the metrics."""
    if served.metrics is None:
        return
    for one in made:
        r = one.receipt
        took = r.queue_seconds + r.prefill_seconds + r.decode_seconds
        served.metrics.finished(
            "stop",
            prompt=one.tokens,
            output=0,
            e2e=took,
            queue=r.queue_seconds,
            prefill=r.prefill_seconds,
            decode=r.decode_seconds,
        )
