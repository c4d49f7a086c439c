"""Rules: each changes or narrows the scores of one row before a token is drawn. One small class each, one fixed order.

A rule knows the row it is given and the request's parameters, never a batch. Which rules a request needs is decided
once, when its slot opens; a rule that would change nothing is not called at all. Scores are float64; what they weigh is in
masses.py. Tokens are ordered by score, which no temperature changes, and of equal scores the smaller id is first.

`RULES` is the order, and the reasons:
  1. logit_bias, then the penalties: what the caller says about single tokens comes first, on the model's own scale, as
     OpenAI defines it; vLLM, transformers and llama.cpp all add the bias before they penalize.
  2. min_tokens, then the constraint's mask: they only rule out, so they can come anywhere before the filters; before the
     filters, so that a filter never spends its budget on a token that cannot be chosen.
  3. temperature: before the filters, as in vLLM and transformers (llama.cpp does it last), so that top_p, min_p and
     typical_p speak of the distribution that is sampled. It changes what scores weigh, never the scores.
  4. top_k, typical_p, top_p, min_p, each on the distribution renormalized over what the ones before it left. top_k is
     before top_p in all three; top_p is before min_p in transformers and llama.cpp (vLLM turns these two around);
     typical_p is where llama.cpp has it (transformers has it last, vLLM has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.runner.masses import F64, Masses, bits_a_nat, distances, goal, masses, weights
from quire.runner.params import SamplingParams
from quire.runner.select import Index, best, leading


class History:
    """Which tokens a sequence holds: distinct ids, and how often each was generated. Only kept for penalties."""

    __slots__ = ("_counts", "_ids", "_row", "_size")

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()):
        distinct = np.unique(np.asarray(prompt, np.intp))
        self._size = distinct.size
        self._ids = np.zeros(max(64, 2 * distinct.size), np.intp)
        self._ids[: distinct.size] = distinct
        self._counts = np.zeros(self._ids.size, np.float64)
        self._row = {token: i for i, token in enumerate(distinct.tolist())}
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Add one generated token."""
        row = self._row.get(token)
        if row is None:
            row = self._row[token] = self._size
            if row == self._ids.size:
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[row] = token
            self._size += 1
        self._counts[row] += 1.0

    @property
    def ids(self) -> Index:
        """Distinct tokens of prompt and output, in the order they were first seen."""
        return self._ids[: self._size]

    @property
    def counts(self) -> F64:
        """How often each of `ids` was generated; 0 for a token that is in the prompt only."""
        return self._counts[: self._size]


RULED_OUT = "every token is ruled out: by min_tokens and the stop ids, or by the constraint"


class NoToken(ValueError):
    """Every token of the vocabulary is ruled out."""


class Choice:
    """One row on its way to a token: the scores still in play, in the order of token ids."""

    __slots__ = ("by", "history", "ids", "mask", "params", "position", "scores", "stop_ids", "vocab_size")

    def __init__(
        self,
        scores: F64,
        params: SamplingParams,
        position: int = 0,
        stop_ids: Index | None = None,
        history: History | None = None,
        mask: npt.NDArray[np.bool_] | None = None,
    ):
        self.scores = scores  # [m] logits, or what rules made of them; -inf is ruled out
        self.ids: Index | None = None  # [m] ascending; None: the whole vocabulary
        self.vocab_size = scores.size
        self.by = bits_a_nat(1.0)  # what distances between scores are multiplied by
        self.params = params
        self.position = position  # tokens generated so far
        self.stop_ids = stop_ids
        self.history = history
        self.mask = mask  # [V] True: a constraint allows it

    def keep(self, index: Index) -> None:
        """Narrow to these indices of `scores`, given in any order."""
        index = np.sort(index)
        self.scores = self.scores[index]
        self.ids = index if self.ids is None else self.ids[index]

    def peak(self) -> float:
        """The best score. A narrowing filter always keeps it."""
        peak = float(self.scores.max(initial=-np.inf))  # top_k of nothing leaves nothing
        if peak == -np.inf:
            raise NoToken(RULED_OUT)
        return peak

    def distances(self) -> F64:
        """How far each score is below the best one, in bits."""
        return distances(self.scores, self.peak(), self.by)

    def weights(self) -> F64:
        """Probabilities up to a factor: 1 for the best."""
        return weights(self.distances())

    def masses(self) -> Masses:
        """Weights as whole numbers, whose sums are exact."""
        return masses(self.weights(), self.vocab_size)


class Rule(Protocol):
    """`active` is asked once a request; `apply` once a token, and only if active."""

    def active(self, params: SamplingParams) -> bool: ...

    def apply(self, choice: Choice) -> None: ...


class Bias:
    """logit_bias: add a number to the logits of some tokens."""

    def active(self, params: SamplingParams) -> bool:
        return any(value != 0.0 for value in params.logit_bias.values())

    def apply(self, choice: Choice) -> None:
        for token, value in choice.params.logit_bias.items():
            choice.scores[token] += value


class Repetition:
    """repetition_penalty, as transformers defines it: over prompt and output, divide positive logits, multiply others."""

    def active(self, params: SamplingParams) -> bool:
        return params.repetition_penalty != 1.0

    def apply(self, choice: Choice) -> None:
        if choice.history is None or not choice.history.ids.size:
            return
        ids, penalty = choice.history.ids, choice.params.repetition_penalty
        seen = choice.scores[ids]
        choice.scores[ids] = np.where(seen > 0.0, seen / penalty, seen * penalty)


class Recurrence:
    """frequency_penalty and presence_penalty, as OpenAI defines them: over the output alone, subtracted."""

    def active(self, params: SamplingParams) -> bool:
        return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0

    def apply(self, choice: Choice) -> None:
        if choice.history is None:
            return
        counts = choice.history.counts
        penalty = choice.params.frequency_penalty * counts + choice.params.presence_penalty * (counts > 0.0)
        choice.scores[choice.history.ids] -= penalty


class MinTokens:
    """min_tokens: no end-of-sequence or stop token before that many tokens."""

    def active(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def apply(self, choice: Choice) -> None:
        if choice.position < choice.params.min_tokens and choice.stop_ids is not None:
            choice.scores[choice.stop_ids] = -np.inf


class Mask:
    """A logits processor: rules out the tokens that a constraint does not allow here. Its mask comes with the step, not with the request."""

    def active(self, params: SamplingParams) -> bool:
        return False  # see `rules_for`

    def apply(self, choice: Choice) -> None:
        if choice.mask is None:
            return
        if 2 * np.count_nonzero(choice.mask) > choice.mask.size:
            choice.scores[~choice.mask] = -np.inf  # few entries to write
        else:  # few are left, and what follows looks at those alone
            choice.ids = np.flatnonzero(choice.mask)
            choice.scores = choice.scores[choice.ids]


class Temperature:
    """Distances to the best score are divided by it; a tiny one cannot overflow what is 0."""

    def active(self, params: SamplingParams) -> bool:
        return params.temperature not in (0.0, 1.0)

    def apply(self, choice: Choice) -> None:
        choice.by = bits_a_nat(choice.params.temperature)


class TopK:
    """Exactly the k best; of equal scores those with the smaller id, so that top_k=1 is greedy."""

    def active(self, params: SamplingParams) -> bool:
        return params.top_k > 0 and params.temperature > 0.0

    def apply(self, choice: Choice) -> None:
        if choice.params.top_k < choice.scores.size:
            choice.keep(best(choice.scores, choice.params.top_k))


class Typical:
    """typical_p: the tokens whose surprise is nearest to the expected surprise, until they hold that much probability.

    Surprise is the distance below the best and a number that is the same for all, so the mean of distances will do for it.
    """

    def active(self, params: SamplingParams) -> bool:
        return params.typical_p < 1.0 and params.temperature > 0.0

    def apply(self, choice: Choice) -> None:
        far = choice.distances()
        weight = weights(far)
        mass = masses(weight, choice.vocab_size)
        total = int(mass.sum())
        far[mass == 0] = -np.inf  # impossible
        with np.errstate(invalid="ignore"):
            share = np.where(mass > 0, weight * -far, 0.0)
        mean = float(masses(share, choice.vocab_size).sum()) / float(total)
        # An impossible token is infinitely far from the mean, and `leading` never lists it.
        choice.keep(leading(-np.abs(-far - mean), mass, goal(choice.params.typical_p, total)))


class TopP:
    """The shortest run of best tokens that holds at least that much probability."""

    def active(self, params: SamplingParams) -> bool:
        return params.top_p < 1.0 and params.temperature > 0.0

    def apply(self, choice: Choice) -> None:
        mass = choice.masses()
        choice.keep(leading(choice.scores, mass, goal(choice.params.top_p, int(mass.sum()))))


class MinP:
    """Tokens at least min_p times as likely as the best one."""

    def active(self, params: SamplingParams) -> bool:
        return params.min_p > 0.0 and params.temperature > 0.0

    def apply(self, choice: Choice) -> None:
        choice.keep(np.flatnonzero(choice.weights() >= choice.params.min_p))


MASK = Mask()
RULES: tuple[Rule, ...] = (
    Bias(),
    Repetition(),
    Recurrence(),
    MinTokens(),
    MASK,
    Temperature(),
    TopK(),
    Typical(),
    TopP(),
    MinP(),
)


def rules_for(params: SamplingParams, *, masked: bool = False) -> tuple[Rule, ...]:
    """The rules that this request needs, in order; with the mask's among them when a step brings one."""
    return tuple(rule for rule in RULES if rule.active(params) or (masked and rule is MASK))


def needs_history(params: SamplingParams) -> bool:
    """Whether a penalty looks at the tokens so far."""
    return params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
