"""A model of how long a step takes, learned from the steps that an engine runs. It knows shapes and seconds, and no engine.

A step of decoding alone takes   a + b * rows + c * context                 (rows that decode; KV positions that they attend to)
a step with prompts in it        d + e * (rows + tokens) + f * pairs + c * context     (pairs: prompt token, position it attends to)

Each of the two lines is fitted by weighted least squares, in which an error counts by its share of the time. What was seen is
kept in cells, by size and depth, and each cell forgets by itself: a hundred short chunks do not wear out what one long chunk
has taught. On top of the line are two ratios, which learn in a few steps what no line says: one for all sizes, that the machine is
slower than it was, and one for each power of two of the size, that tiles of kernels are filled or not. `spread` is what a step of a prompt takes at worst
(one in a hundred takes longer), as a multiple of what is predicted.

The arithmetic is plain and in order, so the same steps teach the same. A step that took no time, or none that is a number,
teaches nothing; one that took far too long (the process stood still) is believed by a factor of `TRUST` at a time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

MEMORY = 32  # steps that a cell remembers
SIZES = 20  # powers of two of a size
TRUST = 3.0  # how far from what was predicted a step is believed to be
SURE_AFTER = 4  # steps of a line, before any is disbelieved
SETTLED, SOLVE_EVERY = (
    32,
    8,
)  # steps after which the line is fitted again at every eighth only: the ratios learn meanwhile
ALL, OWN = 0.2, 0.05  # how fast the ratio of all sizes is learned, and that of a step's own size
MOST = 8.0  # the largest of these ratios
RISE, FALL = 0.04, 0.0004  # of the spread: it stands still where one step in a hundred takes longer
WIDEST = 1.4  # the largest spread: where steps differ more than that, shorter ones would not help
STATE = 1  # the form of what `state` gives


class Shape(NamedTuple):
    """What a step computes, in numbers."""

    rows: int = 0  # tokens of sequences that decode, draft tokens among them
    context: int = 0  # KV positions that these attend to, all together
    tokens: int = 0  # tokens of prompts
    pairs: float = 0.0  # (prompt token, KV position that it attends to)


def pairs(start: int, n: int) -> float:
    """The pairs of `n` prompt tokens from position `start` on."""
    return n * (start + 0.5 * (n + 1))


class Costs:
    """Learns what steps take, and predicts it. 0.0 seconds means that nothing is known yet."""

    __slots__ = ("_decode", "_prompt", "spread")

    def __init__(self) -> None:
        self._decode = _Line(flat=True)
        self._prompt = _Line(flat=False)
        self.spread = 1.1

    def learn(self, shape: Shape, seconds: float) -> None:
        """Learn that a step of this shape took so long."""
        if not 0.0 < seconds < math.inf:
            return
        if not shape.tokens:
            self._decode.learn(shape.rows, shape.context, seconds)
            return
        own = self._prompt
        size, reading = shape.rows + shape.tokens, self._reading(shape)
        predicted = self.seconds(shape)
        if own.sure and predicted:
            if seconds > predicted * self.spread:
                self.spread = min(WIDEST, self.spread + RISE)
            else:
                self.spread = max(1.0, self.spread - FALL)
        own.base = self._decode.at(1, 0)
        own.learn(size, shape.pairs, max(seconds - reading, 0.1 * seconds))

    @property
    def known(self) -> bool:
        """Whether anything is known yet."""
        return bool(self._decode.seen or self._prompt.seen)

    def seconds(self, shape: Shape) -> float:
        """How long a step of this shape takes."""
        if not shape.tokens:
            return self._decode.at(shape.rows, shape.context)
        size = shape.rows + shape.tokens
        if self._prompt.seen:
            return self._prompt.at(size, shape.pairs) + self._reading(shape)
        # No prompt was seen: a token of one is taken to cost an eighth of a step of decoding, which is much.
        return self._decode.at(max(1, shape.rows), shape.context) * (1 + shape.tokens / 8)

    def within(self, shape: Shape, start: int, most: int, seconds: float) -> int:
        """How many prompt tokens from position `start` a step may have besides `shape`, `most` of them at most, to end in `seconds`."""
        rows, context, tokens, had = shape
        if self.seconds(Shape(rows, context, tokens + most, had + pairs(start, most))) <= seconds:
            return most
        low, high = 0, most
        while high - low > 1:  # it fits with low, or with none, and not with high
            middle = (low + high) // 2
            if self.seconds(Shape(rows, context, tokens + middle, had + pairs(start, middle))) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def prefill(self, n: int, depth: int = 0, step: int = 512, beside: Shape = Shape()) -> float:
        """Seconds to compute `n` prompt tokens behind `depth` others, `step` of them at a time, each time `beside` other work."""
        if n <= 0:
            return 0.0
        steps = -(-n // step)
        rows, context, tokens, had = beside
        shape = Shape(rows, context, tokens + -(-n // steps), had + pairs(depth, n) / steps)
        return steps * self.seconds(shape)

    def _reading(self, shape: Shape) -> float:
        return shape.context * self._decode.depth_cost() if shape.context else 0.0

    # ---- kept

    def state(self) -> dict[str, Any]:
        """Everything that was learned, as numbers, lists and dicts."""
        return {"form": STATE, "spread": self.spread, "decode": self._decode.state(), "prompt": self._prompt.state()}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Costs:
        """The model that `state` was taken of. Raises ValueError for anything else."""
        made = cls()
        try:
            if state["form"] != STATE:
                raise ValueError(f"costs of form {state['form']}, and not {STATE}")
            made.spread = min(WIDEST, max(1.0, float(state["spread"])))
            made._decode.restore(state["decode"])
            made._prompt.restore(state["prompt"])
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"these are no costs of steps: {e}") from None
        return made


class _Line:
    """Seconds as a line over a size and a number of pairs, and a ratio to it for each power of two of the size."""

    __slots__ = ("_cells", "_coefficients", "_flat", "_level", "_ratios", "_solved", "base", "seen")

    def __init__(self, flat: bool) -> None:
        """`flat`: of one size alone it is taken that the size does not matter, and otherwise that it is all that matters."""
        self._flat = flat
        self._cells: dict[tuple[int, int], list[float]] = {}  # weighted sums: 1 u v uu uv vv y uy vy
        self._level = 1.0
        self._ratios = [1.0] * SIZES
        self._coefficients = (0.0, 0.0, 0.0)
        self._solved = True
        self.base = 0.0  # what size 0 is taken to cost before it is known
        self.seen = 0  # steps

    @property
    def sure(self) -> bool:
        return self.seen >= SURE_AFTER

    def at(self, u: float, v: float) -> float:
        """Seconds at size u with v pairs; 0.0 where nothing was seen."""
        if not self._solved:
            self._solve()
        a, b, c = self._coefficients
        return (a + b * u + c * v) * self._level * self._ratios[min(SIZES - 1, int(u).bit_length())]

    def depth_cost(self) -> float:
        """Seconds for each pair."""
        if not self._solved:
            self._solve()
        return self._coefficients[2] * self._level

    def learn(self, u: int, v: float, seconds: float) -> None:
        size = min(SIZES - 1, u.bit_length())
        if self.sure:
            expected = self.at(u, v)
            seconds = min(max(seconds, expected / TRUST), expected * TRUST)
            off = seconds / expected - 1.0
            self._level = min(max(self._level * (1.0 + ALL * off), 1 / MOST), MOST)
            self._ratios[size] = min(max(self._ratios[size] * (1.0 + OWN * off), 1 / MOST), MOST)
        self.seen += 1
        w = 1.0 / (seconds * seconds)
        wu, wv, wy = w * u, w * v, w * seconds
        new = [w, wu, wv, wu * u, wu * v, wv * v, wy, wy * u, wy * v]
        cell = (size, min(15, int(v / u).bit_length()) // 2 if u else 0)
        old = self._cells.get(cell)
        if old is not None:
            keep = 1.0 - 1.0 / MEMORY
            new = [keep * a + b for a, b in zip(old, new, strict=True)]
        self._cells[cell] = new
        if self.seen <= SETTLED or self.seen % SOLVE_EVERY == 0:
            self._solved = False

    def _solve(self) -> None:
        """Fit the line to what is in the cells. Nothing in it is negative."""
        self._solved = True
        if not self._cells:
            return
        total = [sum(column) for column in zip(*self._cells.values(), strict=True)]
        n, u, v, uu, uv, vv, y, uy, vy = total
        if self._flat:
            uu, vv = 1.001 * uu, 1.001 * vv
        else:  # as if size 0 had been seen once, long ago
            w = 0.1 / self.base**2 if self.base else 1e-3 * n
            n, y, vv = n + w, y + w * self.base, 1.001 * vv
        rows = [[n, u, v, y], [u, uu, uv, uy], [v, uv, vv, vy]]
        used = [i for i in range(3) if rows[i][i] > 0.0]
        while used:
            found = _solved([[rows[i][j] for j in (*used, 3)] for i in used])
            least = min(range(len(used)), key=lambda i: found[i] * math.sqrt(rows[used[i]][used[i]]))
            if found[least] >= 0.0:
                made = dict(zip(used, found, strict=True))
                self._coefficients = (made.get(0, 0.0), made.get(1, 0.0), made.get(2, 0.0))
                return
            del used[least]

    def state(self) -> dict[str, Any]:
        self._solve()
        cells = [[*cell, *sums] for cell, sums in self._cells.items()]
        return {
            "cells": cells,
            "level": self._level,
            "ratios": list(self._ratios),
            "base": self.base,
            "seen": self.seen,
        }

    def restore(self, state: dict[str, Any]) -> None:
        cells = {(int(c[0]), int(c[1])): [float(x) for x in c[2:]] for c in state["cells"]}
        ratios = [float(x) for x in (*state["ratios"], state["level"])]
        numbers = [float(state["base"]), *ratios, *(x for sums in cells.values() for x in sums)]
        known = all(0 <= size < SIZES and 0 <= depth < 8 and len(sums) == 9 for (size, depth), sums in cells.items())
        if not known or len(ratios) != SIZES + 1 or not all(0.0 <= x < math.inf for x in numbers) or min(ratios) <= 0.0:
            raise ValueError("these are no costs of steps: numbers are missing, or out of bounds")
        self._cells, self._ratios, self._level = cells, ratios[:SIZES], ratios[SIZES]
        self.base, self.seen = float(state["base"]), int(state["seen"])
        self._solve()


def _solved(rows: list[list[float]]) -> list[float]:
    """The solution of a small system of equations; 0.0 for what it does not determine."""
    n = len(rows)
    scale = [math.sqrt(rows[i][i]) for i in range(n)]
    m = [[rows[i][j] / (scale[i] * scale[j]) for j in range(n)] + [rows[i][n] / scale[i]] for i in range(n)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(m[r][i]))
        m[i], m[pivot] = m[pivot], m[i]
        if abs(m[i][i]) < 1e-9:
            m[i] = [0.0] * (n + 1)
            continue
        for r in range(i + 1, n):
            f = m[r][i] / m[i][i]
            for c in range(i, n + 1):
                m[r][c] -= f * m[i][c]
    out = [0.0] * n
    for i in reversed(range(n)):
        if m[i][i]:
            out[i] = (m[i][n] - sum(m[i][c] * out[c] for c in range(i + 1, n))) / m[i][i]
    return [x / scale[i] for i, x in enumerate(out)]
