"""How many prompt tokens fit into the time of a step: the arithmetic behind `StepTime` in limits.py.

A step takes as long for everybody who rides in it. Beside sequences that decode, prompts get what the cost model
(`observe/costs.py`) predicts to fit into the inter-token bound; where nobody decodes, what a newcomer can wait for. Some of one
prompt moves in every step, whatever the bound, so nobody starves. `Pace` is asked only where prompts meet sequences that decode,
or are long: what steps took until then is in `seen`, and is learned when it is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from quire.engine.sequence import RUNNING, Sequence
from quire.observe.costs import Costs, Shape, pairs

FLOOR = 0.05  # seconds between tokens that nobody minds: 20 tokens a second
TIMES = 2.0  # ... or so many steps of decoding alone, where that is longer: streams keep half of their rate
NEWCOMER = 0.5  # seconds of a step in which nobody decodes: a request that comes meanwhile waits for its end
TILE = 16  # rows that matrix kernels compute together: a tile that is not full costs as much as a full one
LEAST = 8  # prompt tokens that move in any case
ALONE = 64  # ... where nobody decodes: fewer would not be computed much sooner, and use a CPU badly
UNKNOWN = 64  # prompt tokens of a step where nothing is known yet of what they cost
KEPT = 256  # steps that are learned from, of those since the last time


class Pace:
    """The time of a step, and what of it is used.

    `asked` is the server's inter-token bound in seconds; None: FLOOR, or TIMES as long as a step of decoding alone; 0: none, but that
    of requests with one of their own.
    """

    __slots__ = ("_asked", "_context", "_shape", "_until", "bound", "costs", "seen")

    def __init__(self, costs: Costs, asked: float | None = None) -> None:
        self.costs = costs
        self._asked = asked
        self.bound = FLOOR if asked is None else asked  # of the newest step that had one
        # (rows, context, tokens, pairs) and seconds of steps that are not learned yet
        self.seen: deque[tuple[tuple[int, int, int, float], float]] = deque(maxlen=KEPT)
        self._context = 0.0  # KV positions of a sequence that decodes, at the last look
        self._shape = Shape()
        self._until = 0.0

    @property
    def line(self) -> str:
        """A line for people about the bound."""
        if self._asked == 0:
            return "time of a step: not bounded, --max-batch-tokens alone bounds it (asked for)"
        if self._asked:
            most = f"at most {1000 * self._asked:g} ms (asked for)"
        else:
            most = f"at most {1000 * FLOOR:g} ms, or {TIMES:g} steps of decoding alone where that is longer"
        return f"time of a step with prompts: beside answers that are being written {most}, else {1000 * NEWCOMER:g} ms"

    def begin(self, rows: int, own: Collection[Sequence], first: Sequence, most: int) -> int:
        """Begin with the prompts of a step in which so many rows decode. `own` are the sequences that have a bound of their own, and
        `first` is the first prompt: how many of its tokens fit, `most` of them at most."""
        while self.seen:
            shape, seconds = self.seen.popleft()
            self.costs.learn(Shape(*shape), seconds)
            if shape[0]:
                self._context = shape[1] / shape[0]
        self._shape = Shape(rows, int(rows * self._context), 0, 0.0)
        self._until = self._seconds(rows, own) / self.costs.spread
        return self.fit(first.computed + first.in_flight, most) if self._until else most

    def _seconds(self, rows: int, own: Collection[Sequence]) -> float:
        """How long the step may take; 0.0: as long as it does."""
        if not rows:
            return NEWCOMER if self._asked != 0 else 0.0
        bounds = [seq.request.itl for seq in own if seq.status == RUNNING and seq.prompt_done and seq.request.itl]
        if len(bounds) < rows:
            asked = self._asked
            if asked is None:
                asked = self.bound = max(FLOOR, TIMES * self.costs.seconds(self._shape))
            if asked:
                bounds.append(asked)
        return min(bounds, default=0.0)

    def fit(self, start: int, n: int) -> int:
        """How many of `n` prompt tokens from position `start` on fit into what is left of the step."""
        rows, _, tokens, _ = shape = self._shape
        if not self._until or n <= 0:
            return n
        if not self.costs.known:
            m = min(n, UNKNOWN - tokens)
        else:
            m = self.costs.within(shape, start, n, self._until)
        if m == n:
            return n
        whole = (rows + tokens + m) // TILE * TILE - rows - tokens
        if whole >= LEAST:
            m = whole
        return min(n, max(0, m, (LEAST if rows else ALONE) - tokens))

    def charge(self, start: int, n: int) -> None:
        """Count prompt tokens that were planned."""
        rows, context, tokens, had = self._shape
        self._shape = Shape(rows, context, tokens + n, had + pairs(start, n))
