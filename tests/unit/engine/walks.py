"""Random walks through a constraint: whatever is allowed next may come, so they visit what no model would write."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from quire.engine.constraints.grammar import Matcher, compile_matcher, tokenizer_of
from quire.engine.types import Constraint
from tests.unit.engine.constraints.guide_kit import _FAVOURED, EOS, TOKENS, WORDS, V

TOKENIZER = tokenizer_of(WORDS, V)  # its first 256 tokens are the bytes
CLOSERS = np.isin(np.arange(V), [*_FAVOURED, *(TOKENS.index(t) for t in (b"}", b"]", b'"', b"},", b"{}", b"[]"))])


def compiled(constraint: Constraint) -> Matcher:
    return compile_matcher(constraint, TOKENIZER)


def admits(matcher: Matcher, text: str) -> bool:
    """Whether the whole text may be written, byte by byte."""
    own = matcher.deep_copy()
    return own.consume_tokens(list(text.encode("utf-8", "surrogatepass"))) and own.is_accepting()


def walk(matcher: Matcher, rng: random.Random, most: int = 150, also: bytes = b"") -> str | None:
    """A text that may be written and may end there; None where no end was in sight. `also`: bytes that come often."""
    likely = CLOSERS | np.isin(np.arange(V), list(also))
    own: Any = matcher.deep_copy()
    written: list[int] = []
    for _ in range(most):
        mask = np.unpackbits(np.frombuffer(own.compute_bitmask(), np.uint8), count=V, bitorder="little").view(np.bool_)
        mask = mask.copy()
        ends = own.is_accepting()
        mask[list(EOS)] = False
        if ends and (rng.random() < 0.5 or not mask.any()):
            return b"".join(TOKENS[t] for t in written).decode()
        near = mask & likely
        pool = np.flatnonzero(near if near.any() and rng.random() < 0.7 else mask)
        if not len(pool):
            return None
        token = int(pool[rng.randrange(len(pool))])
        own.consume_tokens([token])
        written.append(token)
    return None
