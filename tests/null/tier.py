"""A tier for the null device: slow, failing, lying and forgetful; and a listener that knows what the tree must hold.

Time is a number that the harness raises. What a transfer writes, it writes at the worst moments: a buffer is filled when
the job ends, a page is scribbled over when its copy begins and filled when that ends, whether anybody asks or not. So pages
that were given to somebody else meanwhile hold what nobody should read, and the device notices.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.backends.pages import PageBytes, PageIds
from quire.cache.events import Removed, Stored
from quire.cache.tiers import Part
from tests.null.device import STATE, Device, expect

NOTHING = -(1 << 63)  # in a buffer: a position that was never computed


@dataclass
class Time:
    """The harness's clock, and what happens when it gets there."""

    now: int = 0
    due: list[tuple[int, Callable[[], None]]] = field(default_factory=list)

    def at(self, when: int, deed: Callable[[], None]) -> None:
        self.due.append((when, deed))

    def tick(self) -> None:
        self.now += 1
        ready = [deed for when, deed in self.due if when <= self.now]
        self.due = [(when, deed) for when, deed in self.due if when > self.now]
        for deed in ready:
            deed()


class DevicePages:
    """The device's pages as bytes: what a runner does with a program's."""

    def __init__(self, device: Device, time: Time, rng: random.Random, fail: float) -> None:
        self.device, self.time, self.rng, self.fail = device, time, rng, fail

    def cells(self, group: int, page: int) -> range:
        size = self.device.page_size
        return range(page, page + 1) if self.device.windows[group] == STATE else range(page * size, (page + 1) * size)

    def page_buffer(self, group: int, count: int) -> PageBytes:
        return np.zeros((count, 8 * len(self.cells(group, 0))), np.uint8)

    def read_pages(self, group: int, pages: PageIds, out: PageBytes | None = None) -> PageBytes:
        kv = self.device.kv[group]
        rows = [[NOTHING if kv[c] is None else kv[c] for c in self.cells(group, int(page))] for page in pages]
        return np.array(rows, np.int64).view(np.uint8)

    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes) -> Copy:
        if self.rng.random() < self.fail:
            raise RuntimeError("this copy could not begin")
        return Copy(self, group, [int(page) for page in pages], buffer)

    def put(self, group: int, page: int, values: Sequence[int | None]) -> None:
        for cell, value in zip(self.cells(group, page), values, strict=True):
            self.device.kv[group][cell] = value


class Copy:
    """Pages that are being written."""

    def __init__(self, pages: DevicePages, group: int, own: list[int], buffer: PageBytes) -> None:
        rng = pages.rng
        self.finished, self.fails = False, rng.random() < pages.fail
        self.pages, self.group, self.own, self.buffer = pages, group, own, buffer
        for page in own:
            pages.put(group, page, [rng.getrandbits(40) for _ in pages.cells(group, page)])
        delay = rng.choice([0, 0, 1, 2, 6])
        if delay:
            pages.time.at(pages.time.now + delay, self.finish)
        else:
            self.finish()

    def finish(self) -> None:
        if not self.finished:
            self.finished = True
            for page, row in zip(self.own, self.buffer.view(np.int64).tolist(), strict=True):
                self.pages.put(self.group, page, [None if v == NOTHING or self.fails else v for v in row])

    def done(self) -> bool:
        if self.finished and self.fails:
            raise RuntimeError("this copy failed")
        return self.finished

    def wait(self) -> PageBytes:
        self.finish()
        return self.buffer

    def fence(self) -> None:
        self.finish()


@dataclass
class Manners:
    """How badly a tier behaves: chances, and the longest time that a load takes."""

    slow: int = 0
    fails: float = 0.0
    raises: float = 0.0
    lies: float = 0.0  # it says that it has what it has not, and gives something else for it
    spoils: float = 0.0  # it gives other bytes than it was given
    forgets: float = 0.0  # at any look

    @classmethod
    def of(cls, rng: random.Random) -> Manners:
        def some(most: float) -> float:
            return rng.choice([0.0, 0.0, most])

        return cls(rng.choice([0, 2, 6, 40]), some(0.3), some(0.1), some(0.3), some(0.3), some(0.1))


class FakeJob:
    """A load that ends when its time has come."""

    def __init__(self, well: bool) -> None:
        self.well = well
        self.over = False

    def ended(self) -> bool | None:
        return self.well if self.over else None

    def wait(self, seconds: float) -> None: ...


class FakeTier:
    """Keeps everything it is told of, as far as its manners go."""

    def __init__(self, time: Time, rng: random.Random, manners: Manners) -> None:
        self.time, self.rng, self.manners = time, rng, manners
        self.kept: dict[tuple[int, bytes], bytes] = {}
        self.asked_well = True  # for nothing but what it had said it has
        self.loads = self.lied = self.spoiled = self.failed = 0

    def _chance(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance

    def has(self, group: int, keys: Sequence[bytes]) -> list[bool]:
        if self._chance(self.manners.raises):
            raise ConnectionError("the tier is not there")
        for key in keys:
            if self._chance(self.manners.forgets):
                self.kept.pop((group, key), None)
        return [(group, key) in self.kept or self._chance(self.manners.lies) for key in keys]

    def load(self, parts: Sequence[Part]) -> FakeJob:
        if self._chance(self.manners.raises):
            raise ConnectionError("the tier is not there")
        for part in parts:
            there = all((part.group, key) in self.kept for key in part.keys)
            fits = len(part.keys) == len(part.buffer) > 0
            self.asked_well = self.asked_well and fits and (there or bool(self.manners.lies))
        self.loads += 1
        job = FakeJob(not self._chance(self.manners.fails))
        self.failed += not job.well

        def finish() -> None:
            job.over = True
            for part in parts if job.well else ():
                for row, key in zip(part.buffer, part.keys, strict=True):
                    kept = self.kept.get((part.group, key))
                    if kept is None and not self.manners.lies:
                        job.well = False  # forgotten since it began
                        continue
                    self.lied += kept is None
                    spoiled = kept is not None and self._chance(self.manners.spoils)
                    self.spoiled += spoiled
                    made = bytearray(kept or self._other(part.group) or self.rng.randbytes(row.size))
                    if spoiled:
                        made[self.rng.randrange(len(made))] ^= 1 << self.rng.randrange(8)
                    row[:] = np.frombuffer(bytes(made), np.uint8)

        delay = self.rng.randint(0, self.manners.slow)
        self.time.at(self.time.now + delay, finish)
        return job

    def _other(self, group: int) -> bytes | None:
        """Some other page of a group."""
        some = [bytes_of for (g, _), bytes_of in self.kept.items() if g == group]
        return self.rng.choice(some) if some and self.rng.random() < 0.7 else None

    def store(self, parts: Sequence[Part]) -> FakeJob:
        for part in parts:
            for row, key in zip(part.buffer, part.keys, strict=True):
                self.kept[part.group, key] = row.tobytes()
        job = FakeJob(True)
        job.over = True
        return job

    def drop(self, group: int, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.kept.pop((group, key), None)


class Follower:
    """A listener: what it was told must be what is there, and one key must always mean one prefix."""

    def __init__(self) -> None:
        self.pages: dict[tuple[bytes, int], int] = {}
        self.means: dict[bytes, tuple[str, tuple[int, ...]]] = {}
        self.heard = 0
        self.keep: Callable[[Stored], None] = lambda event: None  # who stores pages in a tier

    def stored(self, event: Stored) -> None:
        expect((event.key, event.group) not in self.pages, "stored twice", event)
        self.pages[event.key, event.group] = event.page
        self.heard += 1
        self.keep(event)

    def removed(self, event: Removed) -> None:
        expect(self.pages.pop((event.key, event.group), None) == event.page, "removed, but not there", event)
        self.heard += 1

    def compare(self, tree: Any) -> None:
        """Walk over the tree."""
        there: dict[tuple[bytes, int], int] = {}
        stack = [(root, str(name), ()) for name, root in tree._roots.items()]
        while stack:
            node, namespace, prefix = stack.pop()
            for kid in node.kids.values():
                whole = (*prefix, *kid.key)
                stack.append((kid, namespace, whole))
                if max(kid.pages) < 0:
                    continue
                key = tree.address(kid)
                expect(self.means.setdefault(key, (namespace, whole)) == (namespace, whole), "one key, two prefixes")
                there |= {(key, g): page for g, page in enumerate(kid.pages) if page >= 0}
        expect(there == self.pages, "a listener knows something else than what is there")
        expect(len(set(self.means.values())) == len(self.means), "two keys for one prefix")
