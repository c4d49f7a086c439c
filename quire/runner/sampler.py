"""The sampler: rows of logits become tokens and log probabilities, on the host.

It knows rows and streams, never slots, plans or a device. A row's answer depends on that row and its stream alone, so batch
mates cannot change a bit of it. With the compiled module a call is one call of C++ for all rows; without, rows go through
rules.py one by one. Both give the same bits (masses.py says why they can).

Sampling and verifying drafts are one call. A token is a pure function of (logits, stream, position), so a draft is right
exactly when it equals the token that plain sampling gives there: k = 0 drafts is plain sampling, and k > 0 changes how
many rows are used, never which tokens come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.backends.ops import HostSampler
from quire.layouts import Floats
from quire.runner.masses import bits_a_nat, distances, log, masses, unit_bits, weights
from quire.runner.params import SamplingParams
from quire.runner.plan import Logprob
from quire.runner.random import draw53
from quire.runner.rules import RULED_OUT, Choice, History, NoToken, needs_history, rules_for
from quire.runner.select import best

Masks: TypeAlias = Mapping[int, npt.NDArray[np.bool_]]
"""Which tokens a constraint allows: [V], or [1 + drafts, V], by the sequence's place in the batch."""


class Stream:
    """How one sequence chooses its tokens: parameters, the rules they need, seed, and history where a rule looks at it."""

    __slots__ = ("history", "masked_rules", "native", "params", "plain", "rules", "seed", "stop_ids")

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        *,
        stop_ids: Sequence[int] = (),
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
    ):
        self.params = params
        self.seed = seed
        self.rules = rules_for(params)
        self.masked_rules = rules_for(params, masked=True)
        self.stop_ids = np.array(stop_ids, np.intp)
        self.history = History(prompt, output) if needs_history(params) else None
        self.native: Any = None  # the same as a handle of the compiled module, once there is one
        self.plain = params.temperature == 0.0 and not self.rules and params.logprobs is None
        bias = np.array(list(params.logit_bias), np.intp)
        seen = self.history.ids if self.history is not None else bias[:0]
        for name, ids in (("logit_bias", bias), ("stop_ids", self.stop_ids), ("tokens", seen)):
            outside = ids[(ids < 0) | (ids >= vocab_size)]  # a negative index would quietly mean another token
            if outside.size:
                raise ValueError(f"{name} has token {outside[0]}: the vocabulary has {vocab_size}")


@dataclass(slots=True)
class Chosen:
    """The tokens that one sequence got: the accepted drafts and one token more, or an error."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    error: str | None = None


class Sampler:
    """Holds scratch memory, and nothing between calls. `native` is a program's own sampler, where it has one."""

    def __init__(self, vocab_size: int, native: HostSampler | None = None):
        self._vocab_size = vocab_size
        self._native = native
        self._scratch = np.empty(vocab_size if native is None else 0, np.float64)

    def sample(
        self,
        logits: Floats,
        streams: Sequence[Stream],
        positions: Sequence[int],
        *,
        drafts: Sequence[Sequence[int]] | None = None,
        masks: Masks | None = None,
    ) -> list[Chosen]:
        """Tokens for each stream. logits [L, V] holds 1 + len(drafts[i]) rows for stream i, one stream after another.

        `positions[i]` is how many tokens the sequence has generated. Histories are updated; logits are not changed.
        """
        rows = len(streams) + (sum(map(len, drafts)) if drafts else 0)
        if logits.shape != (rows, self._vocab_size):
            raise ValueError(f"logits are {list(logits.shape)}: expected {[rows, self._vocab_size]}")
        if self._native is not None:
            return self._compiled(self._native, logits, streams, positions, drafts or (), masks)
        if not drafts and not masks and all(stream.plain for stream in streams):
            return self._argmax(logits)
        chosen, first = [], 0
        for i, stream in enumerate(streams):
            ahead = drafts[i] if drafts else ()
            own = logits[first : first + 1 + len(ahead)]
            mask = np.atleast_2d(masks[i]) if masks and i in masks else None
            chosen.append(self._sequence(own, stream, int(positions[i]), ahead, mask))
            first += own.shape[0]
        return chosen

    def native_params(self, streams: Sequence[Stream]) -> list[Any]:
        """How each stream samples, as handles of the compiled module."""
        assert self._native is not None
        return [stream.native or _native_params(self._native, stream) for stream in streams]

    def logprobs(self, logits: Floats, tokens: Sequence[int], top: int) -> list[Logprob]:
        """`logprob` of one token a row. Raises ValueError when a row is not numbers."""
        if self._native is None:
            return [self.logprob(row, token, top) for row, token in zip(logits, tokens, strict=True)]
        told = self._native.logprobs(logits, tokens, top)
        if told is None:
            raise ValueError(next(_broken(row) for row in logits if not math.isfinite(float(row.max()))))
        return [Logprob(token, *one) for token, one in zip(tokens, told, strict=True)]

    def _compiled(
        self,
        native: HostSampler,
        logits: Floats,
        streams: Sequence[Stream],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: Masks | None,
    ) -> list[Chosen]:
        params = self.native_params(streams)
        seen = [(i, s.history.ids, s.history.counts) for i, s in enumerate(streams) if s.history is not None]
        ruled = [(i, np.atleast_2d(mask)) for i, mask in masks.items()] if masks else ()
        chosen, first = [], 0
        told = native.choose(logits, params, positions, drafts, seen, ruled)
        for i, (stream, (tokens, facts)) in enumerate(zip(streams, told, strict=True)):
            if tokens[-1] < 0:
                chosen.append(Chosen(error=_broken(logits[first + len(tokens) - 1]) if tokens[-1] == -1 else RULED_OUT))
                tokens.pop()  # those before it were chosen, and count
            else:
                logprobs = [Logprob(token, *one) for token, one in zip(tokens, facts, strict=True)] if facts else []
                chosen.append(Chosen(tokens, logprobs))
            if stream.history is not None:
                for token in tokens:
                    stream.history.add(token)
            first += 1 + (len(drafts[i]) if drafts else 0)
        return chosen

    def _argmax(self, logits: Floats) -> list[Chosen]:
        """Plain greedy: the best logit, the smallest id among equals. NaN beats every number here, so it is seen."""
        tokens = logits.argmax(axis=1)
        fine = np.isfinite(logits[np.arange(tokens.size), tokens])
        if fine.all():
            return [Chosen([token]) for token in tokens.tolist()]
        pairs = enumerate(zip(tokens.tolist(), fine.tolist(), strict=True))
        return [Chosen([token]) if ok else Chosen(error=_broken(logits[i])) for i, (token, ok) in pairs]

    def _sequence(
        self,
        logits: Floats,
        stream: Stream,
        position: int,
        drafts: Sequence[int],
        mask: npt.NDArray[np.bool_] | None,
    ) -> Chosen:
        out = Chosen()
        for j, row in enumerate(logits):
            if not math.isfinite(float(row.max())):
                return Chosen(error=_broken(row))
            try:
                token = self._choose(row, stream, position + j, None if mask is None else mask[j])
            except NoToken as error:
                return Chosen(error=str(error))
            out.tokens.append(token)
            if stream.params.logprobs is not None:
                out.logprobs.append(self.logprob(row, token, stream.params.logprobs))
            if stream.history is not None:
                stream.history.add(token)
            if j < len(drafts) and drafts[j] != token:
                break  # what follows was computed after a draft token that was rejected
        return out

    def _choose(self, row: Floats, stream: Stream, position: int, mask: npt.NDArray[np.bool_] | None) -> int:
        rules = stream.rules if mask is None else stream.masked_rules
        if not rules and stream.params.temperature == 0.0:
            return int(row.argmax())
        np.copyto(self._scratch, row)
        choice = Choice(self._scratch, stream.params, position, stream.stop_ids, stream.history, mask)
        for rule in rules:
            rule.apply(choice)
        if stream.params.temperature == 0.0:
            choice.peak()  # raises when nothing is left
            place = int(choice.scores.argmax())
            return place if choice.ids is None else int(choice.ids[place])
        return draw(choice, draw53(stream.seed, position))

    def logprob(self, row: Floats, token: int, top: int) -> Logprob:
        """Log-softmax of the logits as the model gave them: of `token`, and of the `top` best, ties by id.

        The rank counts tokens that come before it in that order. Raises ValueError when the row is not numbers.
        """
        peak = float(row.max())
        if not math.isfinite(peak):
            raise ValueError(_broken(row))
        mass = masses(weights(distances(row.astype(np.float64), peak, bits_a_nat(1.0))), row.size)
        total = peak + log(float(mass.sum()) / 2.0 ** unit_bits(row.size))
        own = row[token]
        rank = 1 + int(np.count_nonzero(row > own)) + int(np.count_nonzero(row[:token] == own))
        alternatives = best(row, top) if top else ()
        return Logprob(token, float(own) - total, rank, [(int(t), float(row[t]) - total) for t in alternatives])


def draw(choice: Choice, number: int) -> int:
    """The token at `number` / 2**53 of the cumulative distribution, tokens in the order of their ids."""
    cumulative = np.cumsum(choice.masses())
    place = int(np.searchsorted(cumulative, number * int(cumulative[-1]) >> 53, side="right"))
    return place if choice.ids is None else int(choice.ids[place])


def _broken(row: Floats) -> str:
    """Why these logits cannot be used: NaN and +inf have no place in a softmax, and neither has a row of -inf."""
    counts = (("NaN", np.isnan(row).sum()), ("+inf", np.isposinf(row).sum()), ("-inf", np.isneginf(row).sum()))
    found = ", ".join(f"{int(count)} {name}" for name, count in counts if count)
    return f"the model produced NaN or infinite logits ({found} of {row.size})"


def _native_params(native: HostSampler, stream: Stream) -> Any:
    p = stream.params
    stream.native = native.params(
        p.temperature, p.top_k, p.typical_p, p.top_p, p.min_p, p.repetition_penalty, p.frequency_penalty,
        p.presence_penalty, p.min_tokens, stream.seed & (2**64 - 1), -1 if p.logprobs is None else p.logprobs,
        list(p.logit_bias.items()), stream.stop_ids.tolist(),
    )  # fmt: skip
    return stream.native
