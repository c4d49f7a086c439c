"""Runs groups: sides in turn, round by round, with a progress line on stderr, saving after every round.

Which side begins changes with the round, so that neither always runs on the machine that the other has warmed. Ctrl-C, or
a side that fails, ends the run with what was measured so far printed and saved.
"""

from __future__ import annotations

import sys
import time

from benchmarks.figures import Group
from benchmarks.record import Record
from benchmarks.table import lines

CLEAR = "\r\x1b[K"


class Progress:
    """Says where a run is and how long it will take: guesses at first, corrected by what was measured."""

    def __init__(self, groups: list[Group], quiet: bool = False):
        self._guess = {id(g): sum(s.seconds for s in g.sides) for g in groups}
        self._left = {id(g): g.rounds for g in groups}
        self._order = groups
        self._spent = self._guessed = 0.0
        self._terminal = sys.stderr.isatty()
        self._quiet = quiet

    def remaining(self) -> float:
        """Seconds, about."""
        scale = self._spent / self._guessed if self._guessed else 1.0
        return scale * sum(self._guess[id(g)] * self._left[id(g)] for g in self._order)

    def say(self, group: Group, turn: int, side: str) -> None:
        if self._quiet:
            return
        at = self._order.index(group) + 1
        text = f"[{at}/{len(self._order)}] {group.title}, round {turn + 1} of {group.rounds}, {side}"
        text += f"; about {clock(self.remaining())} left"
        print(
            f"{CLEAR}{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def done(self, group: Group, seconds: float) -> None:
        self._spent += seconds
        self._guessed += self._guess[id(group)]
        self._left[id(group)] -= 1

    def clear(self) -> None:
        if self._terminal and not self._quiet:
            print(CLEAR, end="", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"


def run(groups: list[Group], record: Record, quiet: bool = False) -> bool:
    """Measure everything. False when it was stopped before the end."""
    progress = Progress(groups, quiet)
    for group in groups:
        record.add(group.figures)
        for note in group.notes:
            record.note(note)
        stopped: BaseException | None = None
        try:
            rounds(group, record, progress)
        except (KeyboardInterrupt, RuntimeError, OSError) as e:
            stopped = e
        if group.finish is not None and any(f.rounds for f in group.figures):
            group.finish(group)
        record.save()
        progress.clear()
        for line in lines(group):
            print(line, flush=True)
        if stopped is not None:
            print(f"stopped: {str(stopped) or 'interrupted'}", file=sys.stderr)
            return False
    return True


def rounds(group: Group, record: Record, progress: Progress) -> None:
    for turn in range(group.rounds):
        begun = time.perf_counter()
        order = group.sides if turn % 2 == 0 else group.sides[::-1]
        samples = []
        for side in order:
            progress.say(group, turn, side.name)
            samples.append((side, side.measure()))
        for side, sample in samples:  # a round counts when every side has finished it
            group.add(side, sample)
        progress.done(group, time.perf_counter() - begun)
        record.save()
