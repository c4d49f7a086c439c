"""A request on its way through the engine. Mutable, and owned by the scheduler alone.

  tokens     [ prompt ........ | output ... ]
  KV         [ computed ....... | in flight .. ]        in flight: dispatched, not yet committed

* 0 <= computed <= len(tokens): KV of tokens[:computed] is present and verified
* the lease covers [0, computed + in_flight), an upper bound of what the device has written
* epoch += 1 on preemption, so that results of work planned before it can be told and dropped
* waiting -> running -> finished; running -> waiting is a preemption
* waiting -> loading -> waiting: pages of it are on their way (loads.py), and it has neither lease nor slot
"""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import dataclass, field
from typing import Any

from quire.cache.prefix_tree import Lease
from quire.engine.types import Receipt, Request
from quire.runner.plan import Logprob, Work

WAITING = "waiting"
LOADING = "loading"
RUNNING = "running"
FINISHED = "finished"

_MASK = (1 << 64) - 1


def mix_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th sequence of a request: 64 bits, well spread even for neighbouring seeds."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a waiting sequence was not taken: these many pages of each group were not to be had."""

    need: list[int]  # in each group, with those of its cached prefix that were in nobody's row
    returned: int  # the tree's count when that was found: while it stays, no page has come free


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request, from its arrival to its end."""

    key: int  # its name in plans; also its order of arrival
    request: Request
    order: tuple[Any, int]  # what comes first is planned first and preempted last
    seed: int  # as asked or drawn; the device gets it mixed with request.index
    stop_ids: KeysView[int]  # ordered, for a stable Open
    max_len: int  # prompt and output together
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0
    min_len: int = 0  # up to here a stop token does not end it
    status: str = WAITING
    computed: int = 0
    in_flight: int = 0
    sampling: int = 0  # steps in flight that sample: while there are any, only the device knows the last token
    sampled_here: bool = False  # the device sampled the last token in this slot, so it knows it
    slot: int = -1
    lease: Lease | None = None
    again: Work | None = None  # for the one token that the device knows, in this slot: the same in every such step
    waits_for: int | None = None  # the key of a sequence that a limit lets it wait for
    no_room: NoRoom | None = None  # when it was last tried
    not_before: int = 0  # the plan in which it may be tried again
    epoch: int = 0
    loads: int = 0  # in this epoch, loads that it waited for; loads.TRIES: it waits for no more
    loaded: int = 0  # tokens that were brought for it
    whole: int = 0  # tokens that it had left when it first shared steps with later prompts; 0: it has not
    lent: int = 0  # tokens of later prompts that were computed before its own since then
    prompt_rows: int = 0  # leading positions whose logits are wanted
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    admitted: bool = False  # has held a slot at least once
    cached: int = 0
    chunks: int = 0
    steps: int = 0
    preemptions: int = 0
    drafted: int = 0  # draft tokens that were verified
    accepted: int = 0  # ... and accepted

    @classmethod
    def of(cls, request: Request, key: int, rank: Any, seed: int, context: int) -> Sequence:
        """A waiting sequence that may grow to `context` tokens."""
        sampling = request.sampling
        prompt = len(request.tokens)
        stops = [*(() if sampling.ignore_eos else request.eos_ids), *sampling.stop_token_ids]
        room = context - prompt
        most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        return cls(
            key=key,
            request=request,
            order=(rank, key),
            seed=seed,
            stop_ids=dict.fromkeys(stops).keys(),
            max_len=prompt + (1 if request.vector else most),  # a vector stands in the place of a token
            tokens=list(request.tokens),
            prompt_len=prompt,
            min_len=prompt + sampling.min_tokens,
            prompt_rows=0 if sampling.prompt_logprobs is None or request.vector else prompt - 1,
        )

    @property
    def held(self) -> Lease:
        """The lease of a sequence that runs, which has one."""
        if self.lease is None:
            raise RuntimeError(f"sequence {self.key} is {self.status} and has no lease")
        return self.lease

    @property
    def prompt_done(self) -> bool:
        """Whether its prompt has been computed (perhaps in an earlier epoch: those pages are cached, or can be again)."""
        return len(self.tokens) > self.prompt_len

    @property
    def reusable(self) -> int:
        """Tokens that may come from the tree: not the last, whose row is needed, and no row still wanted."""
        if self.request.fresh:
            return 0
        if len(self.prompt_logprobs) < self.prompt_rows:
            return len(self.prompt_logprobs)
        return len(self.tokens) - 1

    @property
    def left(self) -> int:
        """Known tokens that no step computes yet."""
        return len(self.tokens) - self.computed - self.in_flight

    @property
    def wanted(self) -> int:
        """Tokens to have KV of: those it has and the next one; the last token of all needs none."""
        return min(len(self.tokens) + 1, self.max_len - 1)

    def receipt(self) -> Receipt:
        """What happened to the request so far, in numbers; the engine loop adds the times."""
        return Receipt(
            prompt_tokens=self.prompt_len,
            output_tokens=len(self.tokens) - self.prompt_len,
            cached_tokens=self.cached,
            loaded_tokens=self.loaded,
            chunks=self.chunks,
            steps=self.steps,
            preemptions=self.preemptions,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            seed=self.seed,
            enforced="" if self.request.constraint is None else self.request.constraint.kind,
            adapter=self.request.adapter,
        )
