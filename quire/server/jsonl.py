"""JSON on one line, whoever reads it: of streams, and of the files of batches."""

from __future__ import annotations

import msgspec

BREAKS = {character.encode(): b"\\u%04x" % ord(character) for character in "\u0085\u2028\u2029"}


def on_one_line(value: object) -> bytes:
    """JSON in which what some clients take for the end of a line is escaped, which means the same.

    Python's `splitlines` does, and so httpx's `iter_lines`, through which Ollama's client reads.
    """
    encoded = msgspec.json.encode(value)
    if not encoded.isascii():
        for character, escape in BREAKS.items():
            encoded = encoded.replace(character, escape)
    return encoded


def line(value: object) -> bytes:
    """One line of JSON."""
    return on_one_line(value) + b"\n"
