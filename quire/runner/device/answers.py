"""The results of a step, read from the device, become the rows of its answer.

A step is read later than it was launched. By then its sequence may have failed in an earlier step, or its slot may belong to
another: each opening of a slot has a number (`turns`), which a step remembers. Knows numbers and slots; launches nothing.
"""

from __future__ import annotations

import numpy as np

from quire.backends.torch.sampler import RULED_OUT as NO_TOKEN
from quire.runner.device.drafting import Drafting
from quire.runner.device.launched import Launched, logprob_of
from quire.runner.host_state import HostState, reason
from quire.runner.plan import Row
from quire.runner.rules import RULED_OUT

_CODES = {NO_TOKEN: RULED_OUT}  # in place of a token
_BROKEN = "the model produced NaN or infinite logits"


class Answers:
    """Reads steps in the order they were launched."""

    def __init__(self, host: HostState, max_seqs: int, drafting: Drafting | None = None):
        self._drafting = drafting
        self.openings = np.zeros(max_seqs, np.int64)  # how often each slot was opened
        self._lost: dict[int, tuple[int, str]] = {}  # slot -> the opening that failed, and why
        self._slots = host.slots

    def read(self, pending: Launched, numbers: np.ndarray | None) -> list[Row]:
        """The rows of a step, from the numbers that came back; None: nothing was sampled."""
        plain = pending.decode_only and pending.blank and not self._lost and not pending.shape.wanted
        if (
            plain and self._drafting is None and numbers is not None and numbers.min() >= 0
        ):  # nobody has failed: a token each, and that is all
            tokens = np.empty_like(numbers)
            tokens[pending.sampled] = numbers
            return [Row(1, [token]) for token in tokens.tolist()]
        if pending.decode_only:
            for row in pending.rows:
                row.accepted = 1 if row.error is None else 0
        if self._lost:
            self._lose(pending)
        if numbers is not None:
            self._tell(pending, numbers)
        return pending.rows

    def fail(self, pending: Launched, error: Exception) -> list[Row]:
        """The rows of a step that failed on the device as a whole: each has the error."""
        for i in np.flatnonzero(pending.openings >= 0).tolist():
            self._fail(pending, i, reason(error))
        return pending.rows

    def _lose(self, pending: Launched) -> None:
        """Fail the rows that were launched for a sequence before it was known that an earlier step of it failed."""
        for i in np.flatnonzero(pending.openings >= 0).tolist():
            slot, turn = pending.plan.work[i].slot, int(pending.openings[i])
            gone = self._lost.get(slot)
            if gone is not None and gone[0] == turn:
                self._fail(pending, i, gone[1])
            elif gone is not None and gone[0] < turn:
                del self._lost[slot]  # all that was launched for that opening has been read

    def _tell(self, pending: Launched, numbers: np.ndarray) -> None:
        """Note tokens and log probabilities in the rows."""
        count, shape, made = pending.slots.size, pending.shape, pending.verification
        right = drafted = [0] * len(pending.sampled)
        if made is not None:
            right, drafted = numbers[count:][: 2 * len(right)].astype(np.int64).reshape(2, -1).tolist()
            count += 2 * len(right)
        details = numbers[count:].reshape(-1, 2 + 2 * shape.top)
        told = {j: (details[at], top) for at, (j, top) in enumerate(shape.wanted)}
        for (i, first), accepted, drafts in zip(pending.firsts().items(), right, drafted, strict=True):
            tokens = self._tokens(pending, i, numbers[first : first + 1 + accepted])
            if tokens and pending.rows[i].error is None:
                pending.rows[i].tokens = tokens
                if first in told:
                    rows = (told[first + j] for j in range(len(tokens)))
                    pairs = zip(tokens, rows, strict=True)
                    pending.rows[i].logprobs = [logprob_of(token, row, top, shape.top) for token, (row, top) in pairs]
                if self._drafting is not None:
                    self._note(self._drafting, pending, i, tokens, drafts)
        at = len(shape.wanted)
        for i, tokens, top in shape.prompt:
            rows, at = details[at : at + len(tokens)], at + len(tokens)
            if np.isnan(rows[:, 0]).any():
                self._fail(pending, i, _BROKEN)
            elif pending.rows[i].error is None:
                told = zip(tokens, rows, strict=True)
                pending.rows[i].prompt_logprobs = [logprob_of(token, row, top, shape.top) for token, row in told]

    def _tokens(self, pending: Launched, index: int, chosen: np.ndarray) -> list[int]:
        """The tokens of a sequence: the draft tokens that were right, and one more. None if one is a code, which fails it."""
        tokens = chosen.astype(np.int64).tolist()
        code = next((token for token in tokens if token < 0), None)
        if code is not None:
            self._fail(pending, index, _CODES.get(code, _BROKEN))
            return []
        return tokens

    def _note(self, drafting: Drafting, pending: Launched, index: int, tokens: list[int], drafted: int) -> None:
        """Tell the proposer the tokens of a row, and how many of its draft tokens were verified."""
        work, row = pending.plan.work[index], pending.rows[index]
        if work.tokens is None:
            row.accepted, row.drafted = len(tokens), drafted
        if self.openings[work.slot] == pending.openings[index]:
            drafting.read(pending, index, tokens, drafted)

    def _fail(self, pending: Launched, index: int, why: str) -> None:
        """Fail the sequence of this row, and its slot, unless another sequence has the slot by now."""
        slot, turn = pending.plan.work[index].slot, int(pending.openings[index])
        if pending.rows[index].error is None:
            pending.rows[index] = Row(accepted=0, error=why)
            self._lost[slot] = turn, why
            if self.openings[slot] == turn:
                self._slots.fail([slot], why)
