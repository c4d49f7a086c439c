"""An engine in a process of its own: reads its Boot from standard input, loads, then serves one local socket.

One thread does everything: between steps it looks at the socket without waiting, and with nothing to do it sleeps on
the socket. It dies with its parent (standard input closes; on Linux also by signal) and leaves Ctrl-C to it.
Nothing is printed here: what is worth telling goes over the socket, and stderr is for crashes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from quire.config import Environment
from quire.engine.engine import Engine
from quire.engine.transport import wire
from quire.engine.transport.span_rows import HeldRows
from quire.engine.types import AdapterInfo, EngineInfo, Stats
from quire.observe.errors import QuireError

STATS_SECONDS = 0.5
EXIT_FATAL = 3  # the error went over the socket


def main() -> int:
    """The whole life of an engine process; returns its exit status."""
    import faulthandler

    faulthandler.enable()
    # Ctrl-C and a supervisor reach the whole group: the parent drains, and tells this process when to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline(1 << 20)
    try:
        boot = msgspec.json.decode(line, type=wire.Boot)
    except (msgspec.DecodeError, msgspec.ValidationError) as e:
        print(f"cannot read the engine's configuration from standard input: {e}", file=sys.stderr)
        return 2
    _die_with_parent(boot)
    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the number of requests, which the client bounds
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE)
    socket.setsockopt(zmq.LINGER, 2000)  # a Fatal must still get out
    socket.connect(boot.address)
    try:
        return _life(boot, socket)
    finally:
        socket.close()
        context.term()


def _life(boot: wire.Boot, socket: zmq.Socket[bytes]) -> int:
    def send(message: wire.FromEngine) -> None:
        socket.send(wire.encode(message))

    try:
        if boot.version != wire.VERSION:
            raise QuireError(f"the client speaks version {boot.version} of the protocol, the engine {wire.VERSION}")
        engine, info = _builder(boot.builder)(boot.config, Environment.read(), progress=_Progress(send))
    except QuireError as e:
        send(wire.Fatal.of(e))
        return EXIT_FATAL
    except MemoryError:
        send(wire.Fatal(kind="QuireError", message="not enough memory to load the model", code="out_of_memory"))
        return EXIT_FATAL
    except Exception as e:
        send(wire.Fatal(kind="QuireError", message=f"the engine could not start: {type(e).__name__}: {e}"))
        raise
    engine.settle()
    send(wire.Ready(version=wire.VERSION, info=info))
    try:
        return serve(engine, socket, send)
    except Exception as e:
        send(wire.Fatal(kind="EngineDead", message=f"the engine failed: {type(e).__name__}: {e}"))
        raise
    finally:
        engine.close()


def serve(engine: Engine, socket: zmq.Socket[bytes], send: Callable[[wire.FromEngine], None]) -> int:
    """Step while there is work, sleep while there is none, until told to stop."""
    told, due = Stats(), 0.0  # the snapshot the client has, and when it may get another
    fresh: Stats | None = None
    rows = HeldRows()
    while True:
        now = time.monotonic()
        if fresh is not None and now >= due:
            send(wire.StatsUpdate(stats=fresh))
            told, due, fresh = fresh, now + STATS_SECONDS, None
        if not engine.busy and not engine.idle():  # sleep: forever, or until the snapshot that is owed is due
            socket.poll(None if fresh is None else max(1, int((due - now) * 1000) + 1))
        if not _receive(engine, socket, send, rows):
            return 0
        if engine.busy:
            events = engine.step()
            if events:
                send(wire.Events(events=events))
            stats = engine.stats()
            fresh = stats if stats != told else None


def _receive(
    engine: Engine, socket: zmq.Socket[bytes], send: Callable[[wire.FromEngine], None], rows: HeldRows
) -> bool:
    """Take in every message that is there. False: stop."""
    while True:
        try:
            data = socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return True
        match message := wire.decode_to_engine(data):
            case wire.Add(request):
                engine.add(rows.filled(request) if request.spans else request)
            case wire.Rows():
                rows.take(message)
            case wire.Forget(names):
                rows.forget(names)
            case wire.SetVocabulary(vocabulary):
                engine.set_vocabulary(vocabulary)
            case wire.Abort(ids):
                for request_id in ids:
                    engine.abort(request_id)
            case wire.Load(ticket, name, path):
                send(_answer(ticket, lambda name=name, path=path: engine.hooks.load(name, path)))
            case wire.Unload(ticket, name):
                send(_answer(ticket, lambda name=name: engine.hooks.unload(name)))
            case wire.AskSteps(ticket, most):
                send(wire.Steps(ticket=ticket, steps=engine.steps(most)))
            case wire.Ping():
                send(wire.Pong())
            case wire.Shutdown():
                return False


def _answer(ticket: int, task: Callable[[], AdapterInfo | None]) -> wire.Answer:
    """Do it, and say what came of it: a fault of one adapter is nobody else's."""
    try:
        return wire.Answer(ticket=ticket, adapter=task())
    except QuireError as e:
        return wire.Answer(ticket=ticket, error=wire.Fatal.of(e))
    except MemoryError:
        text = "not enough memory to load the adapter"
        return wire.Answer(ticket=ticket, error=wire.Fatal(kind="NotEnoughMemory", message=text))
    except Exception as e:
        text = f"the adapter could not be changed: {type(e).__name__}: {e}"
        return wire.Answer(ticket=ticket, error=wire.Fatal(kind="QuireError", message=text))


class _Progress:
    """Relays loading progress, at most a hundred times."""

    def __init__(self, send: Callable[[wire.FromEngine], None]):
        self._send = send
        self._told = -1

    def __call__(self, done: int, total: int) -> None:
        percent = done * 100 // max(1, total)
        if percent != self._told:
            self._told = percent
            self._send(wire.Progress(done=done, total=total))


def _builder(name: str) -> Callable[..., tuple[Engine, EngineInfo]]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _die_with_parent(boot: wire.Boot) -> None:
    """End when the parent does, however it does."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):  # nothing more is ever written
                pass
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    # The signal is tied to the parent's thread that forked, so only a main thread's death means the process's.
    if boot.bound_to_thread and sys.platform == "linux":
        import ctypes

        libc: Any = ctypes.CDLL(None, use_errno=True)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != boot.parent:  # it died before we could ask
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
