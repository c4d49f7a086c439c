"""A Plan (what the runner does in one step) and a Result (what it answers): plain ints, no tensors, no requests.

The scheduler fills a Plan; the runner turns it into device work and returns a Result, row for row. Both may cross a
process boundary (tensor-parallel ranks), so they are msgspec structs. What there is one of for each row is not tracked by the
garbage collector: it holds numbers and texts, and can be in no cycle.

A sequence's life on the device: `Open` gives it a slot, any number of `Work` rows compute tokens for it, and its slot
number in `Plan.closed` ends it. Plans are executed in the order they were made.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.runner.params import SamplingParams
from quire.runner.spans import Span


class Open(msgspec.Struct, kw_only=True):
    """A sequence takes a slot: everything the device must know that does not change from step to step."""

    slot: int
    sampling: SamplingParams
    seed: int  # already resolved; the random stream depends on it and on the output position alone
    tokens: list[int]  # all tokens so far: the prompt and, after a preemption, what was already generated
    prompt_len: int
    stop_ids: list[int]  # end-of-sequence and stop token ids: masked until min_tokens
    adapter: str = ""  # the key of an adapter that is resident; its rows use that one
    spans: tuple[Span, ...] = ()  # which of the prompt's tokens are no text, and the rows for them


class Work(msgspec.Struct, kw_only=True, gc=False):
    """Compute `n` tokens of the sequence in `slot`.

    With `tokens` the host knows the ids, and they start at absolute position `start`. Without, the device knows the
    id (the last one it sampled) and the position: n is 1 + drafts. A proposer gives the draft tokens where the runner is, so n
    is then the most that may be computed.

    A Work is never changed: a sequence that goes on by a token a step has the same object in every plan.
    """

    key: int  # the scheduler's name for the sequence
    epoch: int  # its epoch when this was planned; stale results are dropped
    slot: int
    n: int
    start: int  # absolute position, or -1 when the device knows it
    tokens: list[int] | None
    drafts: int = 0
    sample: bool = False  # the last row yields a token
    prompt_logits: int = 0  # that many of the leading rows want prompt logprobs (of the token after each)
    page_from: int = 0  # the page-table row changes from this index on ...
    pages: list[int] = []  # ... to these pages; -1: one that is not there, and will not be read
    more: list[list[int]] = []  # and so do the rows of further groups, if there are any
    vector: bool = False  # where `sample` is set, the whole sequence's vector is wanted in place of a token
    second: int = 0  # where the second of two texts begins, for models that tell them apart; 0: there is one


class Plan(msgspec.Struct, kw_only=True):
    """The work of one step. `opened` is applied before the work, `closed` (slots) before that."""

    step: int
    work: list[Work]
    opened: list[Open] = []
    closed: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(w.n for w in self.work)


class Logprob(msgspec.Struct, array_like=True, gc=False):
    """The log probability at one position: the token there, its log probability, its rank (1 is best), and the best alternatives."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Row(msgspec.Struct, gc=False):
    """The answer to one Work: how many of its computed tokens count, and what was sampled.

    What few rows have is an empty tuple in the others: a list for each would take longer to make than the row.
    """

    accepted: int  # tokens whose KV is verified: n for host-known ids; 1 + accepted drafts otherwise
    tokens: list[int] = []
    logprobs: Sequence[Logprob] = ()  # one per token, when the request asked
    prompt_logprobs: Sequence[Logprob] = ()  # one per prompt_logits row
    vector: bytes = b""  # float32: the embedding or score of a whole sequence, where that is what a runner makes
    drafted: int = 0  # draft tokens that were computed; those that were rejected were in vain
    error: str | None = None  # this row alone failed (for instance, logits that are not numbers)


class Result(msgspec.Struct):
    """Rows in the order of Plan.work."""

    rows: list[Row]
