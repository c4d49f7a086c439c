"""Pictures for the harness: of some requests a stretch of the prompt is no text. A row is one number, which is all that there is to see.

Where pictures are is the same in all requests of a run, so that prompts which share a beginning may share pictures or differ in nothing
else. What they show is said here from the request alone; the code under test has to bring the same to the device.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from quire.engine.types import Request
from quire.runner.spans import Span

NO_TEXT = 1 << 62  # ids from here on stand for what a span holds


def picture(start: int, length: int, number: int) -> Span:
    """One of many; each of its rows is like no other."""
    rows = np.arange(length, dtype="<f4") + 1000 * number + 1
    return Span(
        start=start,
        length=length,
        kind="image",
        digest=blake2b(rows.tobytes(), digest_size=16).digest(),
        rows=rows.tobytes(),
    )


def with_pictures(seed: int, requests: list[Request]) -> list[Request]:
    """Of every third seed some requests have pictures."""
    rng = random.Random(seed + 0.5)
    if seed % 3:
        return requests
    stretches, at = list[tuple[int, int]](), rng.randint(0, 5)
    for _ in range(rng.randint(1, 3)):
        stretches.append((at, rng.choice([1, 2, 4, 5, 9])))
        at = sum(stretches[-1]) + rng.choice([0, 0, 1, 3])
    made = []
    for request in requests:
        spans = tuple(
            picture(start, length, rng.choice([1, 1, 2]))
            for start, length in stretches
            if start + length <= len(request.tokens)
        )
        fits = spans and request.sampling.prompt_logprobs is None and rng.random() < 0.8
        made.append(msgspec.structs.replace(request, spans=spans) if fits else request)
    return made


def seen(tokens: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """What a model sees at each place: a token, or a number below zero for a row."""
    made = list(tokens)
    for span in spans:
        made[span.start : span.end] = [-int(x) for x in np.frombuffer(span.rows, "<f4")]
    return made
