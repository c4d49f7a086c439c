"""How a step walks along the states of its sequences: which one it goes on from, and which it leaves behind.

A group of states has one for each of some pages of a sequence: the state after the last token of that page that was
computed (ops.py, `conv`). This is the one place that says so for backends that are written in Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.backends.batch import Batch


@dataclass(frozen=True, slots=True)
class Walk:
    """One sequence of a step."""

    rows: slice
    load: int  # the page of the state before its first row; -1: there is none, the sequence begins
    stops: list[tuple[int, int]]  # how many of its rows are behind, and the page of the state after them


def walks(batch: Batch, group: int, size: int) -> Iterator[Walk]:
    """Every sequence that has rows. Raises ValueError where the table lacks a state that must be there."""
    pages = batch.table(group).pages
    for b in range(batch.sequences):
        start, stop = int(batch.q_start[b]), int(batch.q_start[b + 1])
        if start == stop:
            continue
        first, end = int(batch.pos[start]), int(batch.kv_len[b])
        load = int(pages[b, (first - 1) // size]) if first else -1
        ends = [*range((first // size + 1) * size, end, size), end]
        stops = [(at - first, page) for at in ends if (page := int(pages[b, (at - 1) // size])) >= 0]
        if (first and load < 0) or not stops or stops[-1][0] != end - first:
            raise ValueError(f"sequence {b}: no state before position {first}, or none for the one after {end - 1}")
        yield Walk(slice(start, stop), load, stops)
