"""An engine without a model whose logits are noise: the real loop, scheduler, masks, runner and sampler.

The logits of a row depend on its token and place alone, so a sequence gets the same noise whatever batch it rides in, however
often it is preempted and however deep the loop is. Tokens that close things are favoured, or hardly anything would ever end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from quire.backends.ops import KV
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.constraints.enforce import ConstraintMasks
from quire.engine.engine import Engine
from quire.engine.limits import standard
from quire.engine.scheduler import Scheduler
from quire.engine.types import Constraint, Event, Request, Vocabulary
from quire.runner.params import SamplingParams
from quire.runner.runner import Runner

PIECES = [
    '{"',
    '":',
    '",',
    "},",
    "[]",
    "{}",
    "true",
    "false",
    "null",
    "name",
    "age",
    "  ",
    "\n ",
    "é",
    "日本",
    "10",
    "0.",
]
PIECES += [
    "ab",
    "abc",
    "foo",
    "bar",
    "yes",
    "no",
    "maybe",
    '"foo"',
    '": "',
    "-1",
    "e5",
    "2020-",
    "\\n",
    '\\"',
    "://",
    "@",
]
TOKENS = [*(bytes([b]) for b in range(256)), *(p.encode() for p in PIECES), b"<s>", b"<end>", b"<pad>", b""]
SPECIAL = [len(TOKENS) - 4, len(TOKENS) - 3, len(TOKENS) - 2]
EOS = (SPECIAL[1], SPECIAL[2])
PADDING = 7  # rows of logits without a token
V = len(TOKENS) + PADDING
WORDS = Vocabulary(tokens=TOKENS, special=SPECIAL, eos_ids=EOS)
PAGE = 4

_FAVOURED = [TOKENS.index(t) for t in (b'"', b"}", b"]", b'":', b'",', b"0", b"1", b"name", b"true")]


def noise(token: int, place: int, seed: int) -> np.ndarray:
    """One row of logits. Whatever is never allowed is made tempting."""
    row = np.random.default_rng([token + 1, place, seed]).normal(0.0, 2.0, V).astype(np.float32)
    row[_FAVOURED] += 5.0
    row[list(EOS)] += 4.0
    row[SPECIAL[0]] += 6.0
    row[len(TOKENS) - 1 :] += 6.0
    return row


class Noise:
    """A program that computes nothing."""

    def __init__(self, seed: int = 0):
        self.seed = seed

    def run(self, batch: Any) -> np.ndarray:
        rows = batch.logit_rows
        return np.array([noise(int(batch.ids[r]), int(batch.pos[r]), self.seed) for r in rows], np.float32)


def make(*, depth: int = 0, seed: int = 0, pages: int = 256, slots: int = 8, context: int = 512) -> Engine:
    """An engine on the host's runner. Few pages make it preempt."""
    masks = ConstraintMasks(V)
    scheduler = Scheduler(
        PrefixTree(Pool(pages), PAGE),
        slots=slots,
        budget=32,
        context=context,
        draw=lambda: 7,
        limits=(*standard(slots + 8, PAGE), masks.limit),
    )
    runner = Runner(
        Noise(seed),
        kv=KV(1, pages, PAGE, 1, 2),
        vocab_size=V,
        max_seqs=slots,
        max_tokens=32,
        max_context=context,
        max_rows=slots + 8,
        overlap=depth > 0,
    )
    engine = Engine(scheduler, runner, depth, masks=masks)
    engine.set_vocabulary(WORDS)
    return engine


_ids = itertools.count()


def ask(constraint: Constraint | None, *, prompt: Iterable[int] = (1, 2, 3), **sampling: Any) -> Request:
    params = {"temperature": 1.0, "max_tokens": 120, "seed": 0, **sampling}
    return Request(
        id=f"r{next(_ids)}", tokens=list(prompt), sampling=SamplingParams(**params), eos_ids=EOS, constraint=constraint
    )


def run(engine: Engine, requests: Iterable[Request]) -> dict[str, tuple[list[int], Event]]:
    """Tokens and the last event of each request."""
    out: dict[str, tuple[list[int], Event]] = {}
    tokens: dict[str, list[int]] = {}
    for request in requests:
        tokens[request.id] = []
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            tokens[event.id] += event.tokens
            if event.finish is not None:
                out[event.id] = tokens[event.id], event
    return out


def text_of(tokens: list[int]) -> str:
    """What a client would read. Raises if a token that is no text is among them."""
    ended = tokens[:-1] if tokens and tokens[-1] in EOS else tokens
    assert all(t < len(TOKENS) and t not in SPECIAL for t in ended), ended
    return b"".join(TOKENS[t] for t in ended).decode("utf-8", "replace")
