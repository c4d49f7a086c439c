"""A step on its way through a device: what it computes and samples, and how the numbers that come back are to be read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from quire.backends.outputs import Hidden
from quire.runner.device.slot_sampling import RowSampling
from quire.runner.host_state import Pending
from quire.runner.plan import Logprob, Plan

NOTHING: Mapping[Hidden, torch.Tensor] = {}


@dataclass(slots=True)
class Shape:
    """The layout of the numbers that come back from the device: rows of logprobs behind the tokens, all of one width."""

    top: int  # alternatives in each row of logprobs
    wanted: list[tuple[int, int]]  # places among the sampled rows that have logprobs, and how many alternatives
    prompt: list[tuple[int, list[int], int]]  # places in plan.work, the tokens after their prompt rows, alternatives


@dataclass(slots=True)
class Verification:
    """The draft tokens that a step verifies. `indices` are those of its decode rows in plan.work; all lists are in this order."""

    indices: list[int]
    most: list[int]  # draft tokens of each
    predicted: list[list[int]] = field(default_factory=list)  # by the host; empty where the proposer is on the device
    told: list[int] = field(default_factory=list)  # tokens that the host knew of each sequence
    sure: list[bool] = field(default_factory=list)  # whether its length was known, too
    rows: int = 0  # of every sequence, where all get as many; 0: each has 1 + most
    span: int = 0  # tokens by which some length is not known
    shift: torch.Tensor | None = (
        None  # int64: how far each length lies above the least that it can be; 0 behind the last one
    )

    def owners(self, indices: list[int]) -> list[int]:
        """For each of these indices of plan.work its place in `indices`; for rows of prompts the place behind the last one."""
        known = {i: j for j, i in enumerate(self.indices)}
        return [known.get(i, len(known)) for i in indices]

    @property
    def widest(self) -> int:
        """Rows of the sequence that has most."""
        return self.rows or 1 + max(self.most)


class Launched(Pending):
    """A forward on its way, with what its sampling needs."""

    __slots__ = (
        "ahead",
        "best",
        "decode_only",
        "hidden",
        "openings",
        "positions",
        "sampling",
        "sent",
        "shape",
        "slots",
        "verification",
    )

    def __init__(self, plan: Plan):
        super().__init__(plan)
        # Which opening of its slot each work belongs to; -1: not computed.
        self.openings = np.full(len(plan.work), -1, np.int64)
        self.decode_only = False  # all work was computed, a row each
        self.slots = np.zeros(0, np.intp)  # of the sampled rows: as often as a sequence has rows
        self.ahead = np.zeros(0, np.int64)  # of each, the draft tokens before it
        self.positions = np.zeros(0, np.int64)  # of each, the tokens generated before it, at least
        self.verification: Verification | None = None  # what it verifies, with a proposer
        self.shape = Shape(0, [], [])
        self.sampling: RowSampling | None = None
        self.sent: list[torch.Tensor] = []  # slots, prompt tokens, rows with logprobs, then what sampling needs
        self.best: torch.Tensor | None = None  # the best tokens, when the forward noted them already
        # Rows that the program keeps, in the order of the step's rows: valid until the next forward is launched.
        self.hidden: Mapping[Hidden, torch.Tensor] = NOTHING

    def keep(self, hidden: Mapping[Hidden, torch.Tensor] | None, tokens: int, taken: int) -> None:
        """Note the hidden rows that the program kept, without the rows that padded the step: `tokens` of them, or `taken` logit rows."""
        if hidden:
            self.hidden = {which: rows[: taken if which.taken else tokens] for which, rows in hidden.items()}

    def firsts(self) -> dict[int, int]:
        """The first sampled row of each sampled place in plan.work."""
        if not self.drafts and self.verification is None:
            return {i: j for j, i in enumerate(self.sampled)}
        found, at = {}, 0
        for i in self.sampled:
            found[i] = at
            at += self.rows_of(i)
        return found

    def rows_of(self, index: int) -> int:
        """Rows of logits of a sampled work."""
        made = self.verification
        return made.rows if made is not None and made.rows else Pending.rows_of(self, index)


def logprob_of(token: int, row: np.ndarray, top: int, width: int) -> Logprob:
    """A Logprob from one row of numbers. Tokens that the model gives no probability are no alternatives."""
    ids, probs = row[2 : 2 + width][:top].tolist(), row[2 + width :][:top].tolist()
    best = [(int(t), p) for t, p in zip(ids, probs, strict=True) if p > -math.inf]
    return Logprob(token, float(row[0]), int(row[1]), best)
