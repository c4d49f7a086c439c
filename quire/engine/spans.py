"""Requests with spans on their way in: checked, and given ids that stand for what the spans hold.

The prefix tree compares ids and knows nothing else, so a span's tokens get ids that follow from its content: from its digest,
kind and positions, keyed with the request's namespace. The same picture in the same place is found in the cache, and two pictures are not
mistaken for each other: an id has 62 bits of a keyed hash and lies above every vocabulary. It is never computed with, sampled or decoded:
the batch builder replaces it by 0, and the row that the span gives is used.

These are RequestHooks around the engine's own: the scheduler, the tree and the loop do not know spans.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from quire.engine.hooks import Around, RequestHooks
from quire.engine.types import Request
from quire.observe.errors import BadRequest, TooLarge
from quire.runner.spans import Span

FIRST = 1 << 62  # the least id of a token that is no text; all of them fit in 63 bits
MAX_BYTES = 256 << 20  # of rows in a request
MAX_SPANS = 4096  # in a request
MAX_ADVANCE = 1 << 20  # positions that a span takes up
MAX_KIND = 64  # characters
DIGEST = 16, 64  # bytes


class SpanHooks(Around):
    """Checks the spans of requests against the model, then hands on to `inner`."""

    def __init__(self, inner: RequestHooks, *, width: int, axes: int = 1):
        """`width` of the model's embedding; `axes` along which it looks at positions."""
        super().__init__(inner, "spans")
        self._width = width
        self._axes = axes

    def on_request(self, request: Request) -> Request:
        if not request.spans:
            return self._inner.on_request(request)
        check(request, self._width, self._axes)
        spans = request.spans
        request = self._inner.on_request(msgspec.structs.replace(request, spans=()))
        tokens = list(request.tokens)
        for span in spans:
            tokens[span.start : span.end] = ids_of(span, request.namespace)
        return msgspec.structs.replace(request, tokens=tokens, spans=spans)


def ids_of(span: Span, namespace: str) -> list[int]:
    """An id for each of its tokens: the same in every process, and for nobody outside of the namespace to foresee."""
    hashed = hashlib.shake_256()
    for part in (namespace.encode(), span.kind.encode(), span.digest, span.positions):
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    hashed.update(span.advance.to_bytes(8, "little"))
    numbers = np.frombuffer(hashed.digest(8 * span.length), "<u8")
    return (numbers % FIRST + FIRST).tolist()


def check(request: Request, width: int, axes: int) -> None:
    """Raises BadRequest or TooLarge, saying what is wrong with which span."""
    spans = request.spans
    if len(spans) > MAX_SPANS:
        raise TooLarge(f"the prompt has {len(spans)} spans: at most {MAX_SPANS}", param="spans")
    nbytes = sum(len(span.rows) for span in spans)
    if nbytes > MAX_BYTES:
        raise TooLarge(f"the spans have {nbytes} bytes of rows: at most {MAX_BYTES}", param="spans")
    if request.sampling.prompt_logprobs is not None:
        raise BadRequest(
            "prompt_logprobs: what is no text has no log probability",
            param="prompt_logprobs",
            cure="leave prompt_logprobs out of requests with spans",
        )
    end = 0
    for i, span in enumerate(spans):
        wrong = _wrong(span, end, len(request.tokens), width, axes)
        if wrong:
            raise BadRequest(f"spans[{i}]: {wrong}", param="spans")
        end = span.end


def _wrong(span: Span, least: int, tokens: int, width: int, axes: int) -> str:
    """What is wrong with a span, whose tokens must lie from `least` up to `tokens`; empty: nothing."""
    if span.length < 1 or span.start < 0 or span.start > tokens or span.length > tokens - span.start:
        return f"{span.length} tokens from {span.start} on do not lie in a prompt of {tokens}"
    if span.start < least:
        return (
            f"it begins at {span.start}, and the span before it ends at {least}: spans are in order, and do not overlap"
        )
    if not 0 < len(span.kind) <= MAX_KIND:
        return f"its kind has {len(span.kind)} characters: 1 to {MAX_KIND} are needed"
    if not DIGEST[0] <= len(span.digest) <= DIGEST[1]:
        return f"its digest has {len(span.digest)} bytes: {DIGEST[0]} to {DIGEST[1]} are needed"
    if len(span.rows) != 4 * span.length * width:
        return (
            f"its rows have {len(span.rows)} bytes: {span.length} rows of {width} float32 numbers take "
            f"{4 * span.length * width}"
        )
    if not np.isfinite(np.frombuffer(span.rows, "<f4")).all():
        return "its rows have NaN or infinite numbers"
    return _misplaced(span, axes)


def _misplaced(span: Span, axes: int) -> str:
    """What is wrong with a span's positions; empty: nothing."""
    if not span.positions:
        return (
            "" if not span.advance else f"it takes up {span.advance} positions, and does not say where its tokens are"
        )
    if axes == 1:
        return "it has positions of its own, and this model counts tokens"
    if len(span.positions) != 4 * axes * span.length:
        return (
            f"its positions have {len(span.positions)} bytes: {span.length} int32 numbers along each of {axes} axes take "
            f"{4 * axes * span.length}"
        )
    if not 0 < span.advance <= MAX_ADVANCE:
        return f"it takes up {span.advance} positions: 1 to {MAX_ADVANCE} are possible"
    own = np.frombuffer(span.positions, "<i4")
    low, high = int(own.min()), int(own.max())
    if low < 0 or high >= span.advance:
        return f"its positions go from {low} to {high}, and it takes up {span.advance}"
    return ""
