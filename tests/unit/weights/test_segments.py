"""A large file in several ranges at once: the same bytes as in one stream, whatever becomes of the ranges."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable

import pytest

from quire.weights.download import segments
from quire.weights.download.segments import Prefetch
from quire.weights.store.store import Store

from .conftest import Recorder
from .origin import Body, Fault, Origin

MODEL = b"GGUF" + random.Random(1).randbytes(700_000)
PATH = "/m.gguf"
SEGMENT = 1 << 16


@pytest.fixture
def name(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(segments, "SEGMENT", SEGMENT)
    origin.files[PATH] = Body(MODEL, {"Accept-Ranges": "bytes"})
    return origin.url + PATH


def ranges(origin: Origin) -> list[tuple[int, int]]:
    """What was asked for with a first and a last byte."""
    asked = [re.fullmatch(r"bytes=(\d+)-(\d+)", s.headers.get("range", "")) for s in origin.gets(PATH)]
    return sorted((int(m[1]), int(m[2]) + 1) for m in asked if m)


def test_a_large_file_comes_in_ranges(store: Store, name: str, origin: Origin, recorder: Recorder):
    assert store.pull(name, recorder).read_bytes() == MODEL
    found = ranges(origin)
    assert len(found) > 8 and all(end - first <= SEGMENT for first, end in found)
    assert [end for _, end in found[:-1]] == [first for first, _ in found[1:]] and found[-1][1] == len(MODEL)
    assert recorder.advanced == len(MODEL)
    assert all("if-range" in s.headers for s in origin.gets(PATH) if "range" in s.headers)


def test_a_small_one_does_not(store: Store, name: str, origin: Origin):
    origin.files[PATH] = Body(MODEL[: 2 * SEGMENT], {"Accept-Ranges": "bytes"})
    assert store.pull(name).read_bytes() == MODEL[: 2 * SEGMENT]
    assert ranges(origin) == [] and len(origin.gets(PATH)) == 1


@pytest.mark.parametrize("headers", [{}, {"Accept-Ranges": "none"}])
def test_nor_one_whose_server_offers_no_ranges(store: Store, name: str, origin: Origin, headers: dict[str, str]):
    origin.files[PATH] = Body(MODEL, headers)
    assert store.pull(name).read_bytes() == MODEL
    assert ranges(origin) == []


@pytest.mark.parametrize(
    "fault", [Fault(drop_after=1000), Fault(status=503), Fault(ignore_range=True), Fault(shift_range=7)]
)
def test_a_range_that_fails_is_made_up_for(
    store: Store, name: str, origin: Origin, naps: list[float], recorder: Recorder, fault: Fault
):
    origin.faults = [None, None, None, None, fault]
    assert store.pull(name, recorder).read_bytes() == MODEL
    assert recorder.advanced == len(MODEL) and len(naps) == 1  # it went on from the range that failed


def test_a_server_that_never_gives_ranges_is_read_in_one_stream(store: Store, name: str, origin: Origin):
    origin.always = Fault(ignore_range=True)
    assert store.pull(name).read_bytes() == MODEL


def test_an_interrupted_pull_has_a_beginning_and_goes_on(store: Store, name: str, origin: Origin):
    class Interrupt(Recorder):
        def advance(self, n: int) -> None:
            super().advance(n)
            if self.advanced > 3 * SEGMENT:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pull(name, Interrupt())
    (part,) = (store.home / "partial").glob("*.part")
    here = part.read_bytes()
    assert len(here) > 3 * SEGMENT and MODEL.startswith(here)
    before = len(origin.seen)
    assert store.pull(name).read_bytes() == MODEL
    again = [s.headers["range"] for s in origin.seen[before:] if "range" in s.headers]
    assert min(int(r.removeprefix("bytes=").split("-")[0]) for r in again) == len(here)


def numbers(first: int, end: int, going: Callable[[], None]) -> bytes:
    return bytes(i % 251 for i in range(first, end))


def test_ranges_are_on_their_way_together():
    together = threading.Barrier(4)

    def fetch(first: int, end: int, going: Callable[[], None]) -> bytes:
        together.wait(10)  # nobody passes before four are here
        return numbers(first, end, going)

    coming = Prefetch(fetch, 3, 83, lanes=4, segment=10)
    assert b"".join(coming) == numbers(3, 83, lambda: None)


def test_no_more_is_held_than_there_are_lanes():
    asked: list[int] = []

    def fetch(first: int, end: int, going: Callable[[], None]) -> bytes:
        asked.append(first)
        return numbers(first, end, going)

    coming = Prefetch(fetch, 0, 1000, lanes=3, segment=10)
    stream = iter(coming)
    next(stream)
    for _ in range(200):
        if len(asked) > 4:
            break
        threading.Event().wait(0.001)
    assert len(asked) == 4  # the one that was given, and three
    coming.stop()


def test_a_failure_is_told_in_its_turn():
    def fetch(first: int, end: int, going: Callable[[], None]) -> bytes:
        if first >= 20:
            raise ValueError(str(first))
        return numbers(first, end, going)

    coming, got = Prefetch(fetch, 0, 100, lanes=4, segment=10), b""
    with pytest.raises(ValueError, match="20"):
        for part in coming:
            got += part
    assert got == numbers(0, 20, lambda: None)


def test_a_stop_ends_who_is_fetching():
    ended = threading.Event()

    def fetch(first: int, end: int, going: Callable[[], None]) -> bytes:
        try:
            while True:
                going()
                threading.Event().wait(0.001)
        finally:
            ended.set()

    coming = Prefetch(fetch, 0, 100, lanes=1, segment=10)
    threading.Timer(0.05, coming.stop).start()
    with pytest.raises(segments.NotWanted):
        next(iter(coming))
    assert ended.wait(20)
