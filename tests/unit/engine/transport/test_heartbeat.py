"""When silence means death: judged tick by tick, with a process whose answers and work are scripted."""

from __future__ import annotations

import os
import time

import pytest

from quire.engine.transport.heartbeat import Heartbeat, Work, patience
from quire.engine.types import EngineInfo


class Enough(Exception):
    """The script is over and nobody was given up."""


class Patient:
    """Each tick is a letter: a answers, w works in silence, p waits for a disk in silence, . does nothing."""

    def __init__(self, script: str, seconds: float = 60.0, patience: float = 600.0, *, tells: bool = True):
        self.script = iter(script)
        self.tells = tells
        self.ticks: list[float] = []
        self.asked = 0
        self.cpu, self.page_ins = 0.0, 0
        self.heartbeat = Heartbeat(seconds, patience, self.ask, self.work, self.sleep)

    def ask(self) -> None:
        self.asked += 1

    def work(self) -> Work | None:
        return Work(self.cpu, self.page_ins) if self.tells else None

    async def sleep(self, seconds: float) -> None:
        self.ticks.append(seconds)
        letter = next(self.script, None)
        if letter is None:
            raise Enough
        self.cpu += {"w": 0.5, ".": 0.005}.get(letter, 0.0) * seconds
        self.page_ins += letter == "p"
        if letter == "a":
            self.heartbeat.heard = True

    async def lost(self) -> str | None:
        """Why it was given up; None when it lives on."""
        try:
            return await self.heartbeat.lost()
        except Enough:
            return None


async def test_stillness_is_lost_after_the_time_set() -> None:
    p = Patient("." * 20)
    assert await p.lost() == "did not answer for 60 s and did nothing"
    assert p.ticks == [15.0] * 4
    assert p.asked == 1  # one question is enough for one silence


@pytest.mark.parametrize(
    ("script", "lives"),
    [
        ("a" * 50, True),
        ("...a" * 20, True),  # each time it answers just before the end
        ("....", False),
        ("...w...w...w", True),  # between two looks it does something
        ("w" * 39, True),  # 39 ticks of 15 s are less than 600 s
        ("w" * 40, False),
        ("p" * 39, True),
        ("wwwww....", False),  # it worked, then it stopped
    ],
)
async def test_what_is_silent_may_work(script: str, lives: bool) -> None:
    p = Patient(script)
    found = await p.lost()
    assert (found is None) is lives
    if found is not None:
        assert len(p.ticks) == len(script)


async def test_where_the_system_does_not_tell_only_the_long_time_counts() -> None:
    assert await Patient("." * 39, tells=False).lost() is None
    p = Patient("." * 50, tells=False)
    assert await p.lost() == "did not answer for 600 s" and len(p.ticks) == 40


async def test_it_is_asked_again_after_each_answer() -> None:
    p = Patient("aa.aaaa")
    await p.lost()
    assert p.asked == 7  # at the start, and after each of the six


def test_patience_grows_with_the_longest_step() -> None:
    def info(weights: int, tokens: int) -> EngineInfo:
        return EngineInfo(
            model="", architecture="", vocab_size=1, context=1, max_seqs=1, max_batch_tokens=tokens, pages=1,
            page_size=16, backend="", weight_bytes=weights, kv_bytes=0,
        )  # fmt: skip

    assert patience(info(0, 512), 60.0) == 600.0
    small, large, wide = info(100 << 20, 512), info(40 << 30, 512), info(40 << 30, 2048)
    assert 600 < patience(small, 60.0) < 700
    # 40 GiB of weights, 512 tokens: six hours at the slowest, which is what such a step may take where it must page.
    assert 20_000 < patience(large, 60.0) < patience(wide, 60.0) / 3


def test_work_of_a_process() -> None:
    pid = os.getpid()
    before = Work.of(pid)
    if before is None:
        pytest.skip("needs a system that tells what a process has done (/proc)")
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    after = Work.of(pid)
    assert after is not None and 0.05 <= after.cpu_seconds - before.cpu_seconds < 5
    assert abs(after.cpu_seconds - sum(os.times()[:2])) < 1
    assert Work.of(2**22 + 1) is None
