"""The other-process client, with a real child running the counting engine: death, restart, bounds, silence."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from quire.config import EngineConfig
from quire.engine.transport import wire
from quire.engine.transport.child import CHILD, ROOT
from quire.engine.transport.process_client import ProcessClient
from quire.engine.types import Event, Request
from quire.observe.errors import BadModelFile, BadRequest, Busy, EngineDead, NotFound, QuireError, TooLarge, Unavailable
from quire.runner.params import SamplingParams
from tests.unit.engine.fake_engine import DEADLY, POISON, STUCK

BUILDER = "tests.unit.engine.fake_engine:build"


class Lines(list[str]):
    """Collects what the engine says."""

    def __call__(self, line: str) -> None:
        self.append(line)


def client(
    path: str = "", *, restarts: int = 5, hang: float = 60.0, lines: Lines | None = None, **options: object
) -> ProcessClient:
    config = EngineConfig(path=path, name="counter", **options)  # type: ignore[arg-type]
    on_line = Lines() if lines is None else lines
    return ProcessClient(config, builder=BUILDER, restarts=restarts, hang_seconds=hang, on_line=on_line)


def request(name: str, start: int, max_tokens: int | None = 3) -> Request:
    return Request(id=name, tokens=[start], sampling=SamplingParams(max_tokens=max_tokens))


async def collect(c: ProcessClient, r: Request) -> list[Event]:
    return [event async for event in c.generate(r)]


def tokens(events: list[Event]) -> list[int]:
    return [t for e in events for t in e.tokens]


async def until(check: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_life_of_an_engine() -> None:
    seen: list[tuple[int, int]] = []
    config = EngineConfig(path="", name="counter", max_seqs=4)
    c = ProcessClient(config, builder=BUILDER, on_progress=lambda done, total: seen.append((done, total)))
    info = await c.start()
    try:
        assert (info.model, info.architecture) == ("counter", "counter")
        assert c.alive
        assert c.why == ""
        assert seen == [(i, 5) for i in range(1, 6)]
        answers = await asyncio.gather(*(collect(c, request(f"r{i}", i, i + 1)) for i in range(20)))
        for i, events in enumerate(answers):
            assert tokens(events) == [i + 1 + k for k in range(i + 1)]
            assert events[-1].finish == "length"
            assert events[-1].receipt is not None
        await until(lambda: c.stats().output_tokens == sum(range(1, 21)))
        assert c.stats().running == 0
        (bad,) = await collect(c, Request(id="x", tokens=[1] * 5000))
        assert bad.finish == "error"
        (poisoned,) = await collect(c, request("p", POISON))
        assert "poison" in (poisoned.error or "")
        pid = c.pid
        assert pid is not None
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # a terminal's and a supervisor's, which reach the whole group: the parent drains
            os.kill(pid, number)
        assert tokens(await collect(c, request("after", 1))) == [2, 3, 4]
    finally:
        await c.close()
    assert gone(pid)
    with pytest.raises(Unavailable, match="shut down"):
        await collect(c, request("late", 1))


def test_it_works_under_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop", reason="needs uvloop")

    async def main() -> None:
        c = client("slow=0.002")
        await c.start()
        answers = await asyncio.gather(*(collect(c, request(f"r{i}", i, 5)) for i in range(8)))
        assert [tokens(a) for a in answers] == [list(range(i + 1, i + 6)) for i in range(8)]
        os.kill(c.pid or 0, signal.SIGKILL)
        await until(lambda: not c.alive)
        await until(lambda: c.alive)
        assert tokens(await collect(c, request("a", 1))) == [2, 3, 4]
        await c.close()

    uvloop.run(main())


async def test_leaving_early_aborts() -> None:
    c = client("slow=0.01")
    await c.start()
    try:
        stream = c.generate(request("a", 1, None))
        async for _ in stream:
            break
        await stream.aclose()
        await until(lambda: c.stats().steps > 0 and c.stats().running == 0)
        assert c.stats().output_tokens < 10
        assert tokens(await collect(c, request("a", 5))) == [6, 7, 8]
    finally:
        await c.close()


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
async def test_death_fails_what_it_held_and_restarts(sig: signal.Signals) -> None:
    lines = Lines()
    c = client("slow=0.01", lines=lines)
    await c.start()
    try:
        task = asyncio.create_task(collect(c, request("a", 1, None)))
        await until(lambda: c.stats().running == 1)
        pid = c.pid
        assert pid is not None
        os.kill(pid, sig)
        with pytest.raises(EngineDead, match=sig.name):
            await asyncio.wait_for(task, 20)
        assert not c.alive
        assert sig.name in c.why
        with pytest.raises(Unavailable, match="restarted") as caught:
            await collect(c, request("b", 1))
        assert "try again" in caught.value.cure
        assert c.stats().running == 0
        counted = c.stats().output_tokens
        assert counted > 0
        await until(lambda: c.alive)
        assert c.pid != pid
        assert not c.gave_up and c.hangs == 0
        assert tokens(await collect(c, request("a", 5))) == [6, 7, 8]
        await until(lambda: c.stats().output_tokens == counted + 3)  # counters go on
        assert any(sig.name in line for line in lines)
    finally:
        await c.close()


async def test_a_request_that_kills_the_engine_each_time_ends_in_a_clear_refusal() -> None:
    lines = Lines()
    c = client(restarts=1, lines=lines)
    await c.start()
    try:
        with pytest.raises(EngineDead, match="status 9"):
            await collect(c, request("a", DEADLY))
        await until(lambda: c.alive)
        with pytest.raises(EngineDead, match="status 9"):
            await collect(c, request("a", DEADLY))
        await until(lambda: "stays down" in c.why)
        assert c.gave_up
        with pytest.raises(Unavailable, match="2 times within a minute") as caught:
            await collect(c, request("b", 1))
        assert caught.value.cure == ""  # trying again is no use
        assert not c.alive
        assert "stays down" in lines[-1]
    finally:
        await c.close()


@pytest.mark.parametrize("how", ["stopped busy", "stopped idle", "stuck in a step"])
async def test_an_engine_that_hangs_is_killed_and_restarted(how: str) -> None:
    lines = Lines()
    c = client("slow=0.01", hang=1.0, lines=lines)
    await c.start()
    try:
        pid, task = c.pid or 0, None
        if how != "stopped idle":
            task = asyncio.create_task(collect(c, request("a", STUCK if how == "stuck in a step" else 1, None)))
            await (asyncio.sleep(0.1) if how == "stuck in a step" else until(lambda: c.stats().running == 1))
        if how != "stuck in a step":
            os.kill(pid, signal.SIGSTOP)
        if task is not None:
            with pytest.raises(
                EngineDead, match=r"did not answer for [1-9][\d.]* s and did nothing: it hung"
            ) as caught:
                await asyncio.wait_for(task, 20)
            assert caught.value.cure == "send it again"
        await until(lambda: c.hangs == 1)
        await until(lambda: gone(pid))
        await until(lambda: c.alive)
        assert c.pid != pid and not c.gave_up
        assert any("it hung and was killed; restarting it" in line for line in lines)
        assert tokens(await collect(c, request("a", 5))) == [6, 7, 8]
    finally:
        await c.close()


async def test_a_long_step_is_not_a_hang() -> None:
    c = client("burn=1.5", hang=0.8)  # silent for longer than that, and at most ten times as long on a busy machine
    await c.start()
    try:
        pid = c.pid
        assert tokens(await collect(c, request("a", 5))) == [6, 7, 8]
        assert (c.pid, c.hangs) == (pid, 0)
        await asyncio.sleep(1.0)  # nor is idleness
        assert (c.pid, c.hangs, c.alive) == (pid, 0, True)
    finally:
        await c.close()


async def test_hanging_can_be_allowed() -> None:
    c = client("slow=0.01", hang=0.0)
    await c.start()
    try:
        task = asyncio.create_task(collect(c, request("a", 1, 30)))
        await until(lambda: c.stats().running == 1)
        os.kill(c.pid or 0, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        assert c.alive
        os.kill(c.pid or 0, signal.SIGCONT)
        assert len(tokens(await task)) == 30
    finally:
        await c.close()


async def test_a_hang_too_often_is_given_up() -> None:
    c = client(restarts=1, hang=0.4)
    await c.start()
    try:
        for left in (True, False):
            with pytest.raises(EngineDead, match="it hung"):
                await collect(c, request("a", STUCK))
            await until(lambda expected=left: c.alive if expected else c.gave_up)
        assert c.hangs == 2 and "stays down" in c.why
    finally:
        await c.close()


async def test_a_stopped_engine_can_be_closed() -> None:
    c = client()
    await c.start()
    pid = c.pid or 0
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(c.close(), 10)
    assert gone(pid)


async def test_a_model_that_goes_bad_between_restarts(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark").replace("/", "|")
    c = client(f"once={mark}", restarts=2)
    await c.start()
    try:
        os.kill(c.pid or 0, signal.SIGKILL)
        await until(lambda: "stays down" in c.why)
        assert "gone bad since" in c.why
    finally:
        await c.close()


async def test_loading_errors_are_the_real_ones() -> None:
    for path, kind, text in (
        ("bad-model", BadModelFile, "tensor 'x' at byte 12 is broken (fetch it again)"),
        ("bug", QuireError, "the engine could not start: ZeroDivisionError: a bug"),
        ("die-loading", EngineDead, "the engine process ended with status 7 while it was loading"),
    ):
        lines = Lines()
        c = client(path, lines=lines)
        with pytest.raises(kind) as caught:
            await c.start()
        assert str(caught.value) == text
        assert not c.alive
        assert c.pid is None
        assert any("ZeroDivisionError" in line for line in lines) == (path == "bug")  # its trace goes to stderr
        assert all(line.startswith("engine: ") for line in lines)


async def test_the_socket_is_private_and_soon_nameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    c = client("loads=0.5")
    task = asyncio.create_task(c.start())
    await until(lambda: c.pid is not None)
    (directory,) = tmp_path.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [stat.S_ISSOCK(f.stat().st_mode) for f in directory.iterdir()] == [True]
    await task
    assert list(tmp_path.iterdir()) == []
    os.kill(c.pid or 0, signal.SIGKILL)
    await until(lambda: not c.alive)
    await until(lambda: c.alive)
    assert list(tmp_path.iterdir()) == []
    assert tokens(await collect(c, request("a", 1))) == [2, 3, 4]
    await c.close()


async def test_a_socket_that_cannot_be_made_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(QuireError, match=r"cannot open the engine's socket .* \(is TMPDIR too long\?\)"):
        await client().start()
    assert list(deep.iterdir()) == []


async def test_giving_up_while_it_loads_leaves_no_process() -> None:
    c = client("loads=30")
    task = asyncio.create_task(c.start())
    await until(lambda: c.pid is not None)
    pid = c.pid or 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gone(pid)


async def test_the_queue_is_bounded() -> None:
    c = client("slow=0.01", max_seqs=1, max_waiting=1)
    await c.start()
    try:
        tasks = [asyncio.create_task(collect(c, request(f"r{i}", i, 10))) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await collect(c, request("x", 1))
        for task in tasks:
            await task
    finally:
        await c.close()


async def test_an_oversize_message_is_refused_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    c = client()
    await c.start()
    try:
        monkeypatch.setattr(wire, "MAX_MESSAGE", 4096)
        with pytest.raises(TooLarge, match="4096"):
            await collect(c, Request(id="big", tokens=[1000] * 5000))
        assert len(c._pending) == 0
        assert tokens(await collect(c, request("small", 1))) == [2, 3, 4]
    finally:
        await c.close()


async def test_what_cannot_be_encoded_is_refused_and_loses_nothing() -> None:
    c = client()
    await c.start()
    try:
        for bad in (Request(id="\ud800", tokens=[1]), Request(id="a", tokens=[2**70])):
            with pytest.raises(BadRequest, match="cannot be sent"):
                await collect(c, bad)
        assert len(c._pending) == 0
        assert tokens(await collect(c, request("small", 1))) == [2, 3, 4]
    finally:
        await c.close()
    with pytest.raises(BadRequest, match="not UTF-8"):
        client("/models/\udcff.gguf")


async def test_a_message_that_cannot_be_read_ends_the_engine_clearly() -> None:
    c = client("slow=0.01")
    await c.start()
    try:
        task = asyncio.create_task(collect(c, request("a", 1, None)))
        await until(lambda: c.stats().running == 1)
        assert c._child is not None and c._child._socket is not None
        c._child._socket.send(b"\xc1 not msgpack")
        with pytest.raises(EngineDead, match=r"DecodeError|ValidationError"):
            await asyncio.wait_for(task, 20)
        await until(lambda: c.alive)
    finally:
        await c.close()


async def test_close_drains_when_asked() -> None:
    c = client("slow=0.01")
    await c.start()
    task = asyncio.create_task(collect(c, request("a", 1, 20)))
    await until(lambda: c.stats().running == 1)
    await c.close(drain_seconds=10)
    assert tokens(await task) == list(range(2, 22))


async def test_close_aborts_what_does_not_end() -> None:
    c = client("slow=0.01")
    await c.start()
    task = asyncio.create_task(collect(c, request("a", 1, None)))
    await until(lambda: c.stats().running == 1)
    await asyncio.wait_for(c.close(drain_seconds=0.1), 20)  # all of it would take twice as long
    assert (await task)[-1].finish == "abort"


async def test_idle_costs_nothing() -> None:
    c = client()
    await c.start()
    try:
        await collect(c, request("a", 1))
        await asyncio.sleep(0.7)  # the last statistics
        pid = c.pid or 0
        before, mine = cpu_seconds(pid), time.process_time()
        await asyncio.sleep(2.0)
        assert cpu_seconds(pid) - before <= 0.05
        assert time.process_time() - mine < 0.1
    finally:
        await c.close()


async def test_the_engine_dies_with_its_parent() -> None:
    script = f"""
import asyncio, sys
from quire.config import EngineConfig
from quire.engine.transport.process_client import ProcessClient
async def main():
    c = ProcessClient(EngineConfig(path=""), builder={BUILDER!r})
    await c.start()
    print(c.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(await asyncio.to_thread(parent.stdout.readline))
    assert not gone(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    await until(lambda: gone(pid), 5)


def test_a_malformed_configuration_is_a_sentence_not_a_trace() -> None:
    for boot in (b"", b"{}\n", b"\xff\n", b'{"version": 1, "config": {"path": 3}}\n'):
        done = subprocess.run([sys.executable, "-P", "-c", CHILD, ROOT], input=boot, capture_output=True, timeout=20)
        assert done.returncode == 2
        assert b"cannot read the engine's configuration" in done.stderr
        assert b"Traceback" not in done.stderr


async def test_versions_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken = wire.VERSION
    monkeypatch.setattr(wire, "VERSION", 99)
    with pytest.raises(QuireError, match=f"version 99 of the protocol, the engine {spoken}"):
        await client().start()


def test_messages_survive_the_wire() -> None:
    request = Request(
        id="a", tokens=[1, 2], sampling=SamplingParams(temperature=0, logit_bias={5: -1.0}, seed=2**64 - 1)
    )
    sent = [wire.Add(request=request), wire.Abort(ids=["a", "b"]), wire.Ping(), wire.Shutdown()]
    assert [wire.decode_to_engine(wire.encode(m)) for m in sent] == sent
    for error in (BadModelFile("bad", cure="good"), QuireError("plain", code="own")):
        fatal = wire.decode_from_engine(wire.encode(wire.Fatal.of(error)))
        assert isinstance(fatal, wire.Fatal)
        again = fatal.error()
        assert (type(again), str(again), again.code) == (type(error), str(error), error.code)
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(wire.encode(wire.Progress(done=1, total=2)))


async def again(c: ProcessClient) -> None:
    """Kill the engine, and wait for the next."""
    os.kill(c.pid or 0, signal.SIGKILL)
    await until(lambda: not c.alive)
    await until(lambda: c.alive)


async def test_the_books_of_adapters_follow_the_engine_and_not_who_asked(tmp_path: Path) -> None:
    release = tmp_path / "release"
    held = "release=" + str(release).replace("/", "|")
    c = client(loras=(("first", "one"), ("slow", "two")))
    await c.start()
    try:
        assert [a.name for a in c.adapters] == ["first", "slow"]
        loading = asyncio.create_task(c.load_adapter("late", held))
        unloading = asyncio.create_task(c.unload_adapter("slow"))
        await until(release.with_suffix(".reached").exists)
        for task in (loading, unloading):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        release.touch()
        await until(lambda: [a.name for a in c.adapters] == ["first", "late"])
        await c.unload_adapter("first")
        await c.load_adapter("first", "another")
        await again(c)
        # A second unload is answered by the engine, after everything before it: it has these and no others.
        with pytest.raises(NotFound):
            await c.unload_adapter("slow")
        assert {a.name: os.path.basename(a.path) for a in c.adapters} == {"late": held, "first": "another"}
        for name in ("late", "first"):
            await c.unload_adapter(name)
    finally:
        await c.close()


async def test_an_engine_that_dies_while_it_gets_its_adapters_again_gets_them_from_the_next(tmp_path: Path) -> None:
    lines, mark = Lines(), tmp_path / "mark"
    c = client(lines=lines)
    await c.start()
    try:
        await c.load_adapter("a", "mark=" + str(mark).replace("/", "|"))
        await c.load_adapter("b", "b")
        mark.touch()
        os.kill(c.pid or 0, signal.SIGKILL)
        await until(lambda: not mark.exists() and not c.alive)
        await until(lambda: c.alive)
        for name in ("a", "b"):  # they are there
            await c.unload_adapter(name)
        assert not any("could not be loaded again" in line for line in lines)
    finally:
        await c.close()


async def test_an_adapter_that_is_bad_by_now_is_told_and_gone() -> None:
    lines = Lines()
    c = client(lines=lines)
    await c.start()
    try:
        made = await c.load_adapter("a", "a")
        c._adapters.loaded["a"] = msgspec.structs.replace(made, path="bad")
        await again(c)
        await until(lambda: any("the adapter a could not be loaded again: no adapter" in line for line in lines))
        assert c.adapters == []
    finally:
        await c.close()


async def test_a_process_that_cannot_be_spawned_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, real, times = Lines(), asyncio.create_subprocess_exec, [0]

    async def spawn(*args: object, **more: object) -> object:
        times[0] += 1
        if times[0] == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await real(*args, **more)  # type: ignore[arg-type]

    c = client(lines=lines)
    await c.start()
    try:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
        place = tempfile.mkdtemp()  # where nobody else starts and stops engines; a socket's path has to be short
        monkeypatch.setattr(tempfile, "tempdir", place)
        await again(c)
        assert tokens(await collect(c, request("a", 5))) == [6, 7, 8]
        assert any("cannot be started: [Errno 11]" in line for line in lines)
    finally:
        await c.close()
    os.rmdir(place)  # nothing is left behind
