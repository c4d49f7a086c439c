"""One file per section of the CPU benchmarks; each has `groups(world)`, which says what to measure and measures nothing.

The order here is the order of a whole run.
"""

from __future__ import annotations

NAMES = (
    "decode",
    "prefill",
    "ceiling",
    "streams",
    "served",
    "start",
    "load",
    "memory",
    "context",
    "threads",
    "neighbour",
    "onnx",
)
