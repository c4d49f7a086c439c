"""One engine process from its spawning to its end, and the private local socket to it.

The socket lies in a folder that only we can enter, and loses its name as soon as both ends hold it, so nothing is left behind
however either ends. What comes in is decoded and handed on; knows no requests, no statistics and no restarts. Used from one
asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

import quire
from quire.config import EngineConfig
from quire.engine.transport import wire
from quire.observe.errors import QuireError, Unavailable

ROOT = str(Path(quire.__file__).resolve().parent.parent)
# Our own package first in the child, and the working directory not on its path at all (-P).
CHILD = (
    "import sys; root = sys.argv.pop(); root in sys.path or sys.path.insert(0, root); "
    "from quire.engine.transport.process_main import main; sys.exit(main())"
)


class Child:
    """Made for one process, and of no use after it."""

    def __init__(self, hear: Callable[[wire.FromEngine], None], on_line: Callable[[str], None]):
        """`hear` gets every message, `on_line` what the process prints."""
        self._hear = hear
        self._on_line = on_line
        self._socket: zmq.Socket[bytes] | None = None
        self._directory: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._relay: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def connected(self) -> bool:
        """Whether there is a socket; it does not say whether the process at the other end answers."""
        return self._socket is not None

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        status = self._process.returncode if self._process else None
        if status is None:
            return "stopped answering"
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-status).name}"
            return f"was killed by signal {-status}"
        return f"ended with status {status}"

    async def spawn(self, context: zmq.Context[zmq.Socket[bytes]], config: EngineConfig, builder: str) -> None:
        """A new socket, a new process, and its configuration on its standard input."""
        self._directory = tempfile.mkdtemp(prefix="quire-")  # 0700
        address = f"ipc://{self._directory}/{secrets.token_hex(8)}"
        boot = wire.Boot(
            version=wire.VERSION,
            config=config,
            address=address,
            parent=os.getpid(),
            builder=builder,
            bound_to_thread=threading.current_thread() is threading.main_thread(),
        )
        try:
            self._listen(context, address)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", CHILD, ROOT),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in the terminal is the parent's to answer
            )
        except BaseException:
            self.hang_up()
            self.unname()
            raise
        stdin = self._process.stdin
        if stdin is not None:  # stays open: its closing is how the child learns of our death
            stdin.write(msgspec.json.encode(boot) + b"\n")
        self._relay = asyncio.create_task(self._relay_stderr(self._process))

    async def wait(self) -> None:
        """Wait until the process has ended."""
        if self._process is not None:
            await self._process.wait()

    def kill(self) -> None:
        """Harmless when it has ended."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, seconds: float) -> None:
        """Ask, and insist after so many seconds."""
        self.unname()
        process = self._process
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(QuireError):
                    self.send(wire.Shutdown())
                try:
                    await asyncio.wait_for(process.wait(), seconds)
                except TimeoutError:
                    self.kill()
                    await process.wait()
            if process.stdin is not None:
                process.stdin.close()
            if self._relay is not None:
                await self._relay
        self.hang_up()

    def unname(self) -> None:
        """Remove the name of the socket once both ends are connected, so that nothing is left behind however the processes end."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _relay_stderr(self, process: asyncio.subprocess.Process) -> None:
        """Whatever the engine prints is somebody's clue: pass it on, marked."""
        stream = process.stderr
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the stream's limit: it was dropped
                line = b"(a very long line)\n"
            if not line:
                return
            self._on_line("engine: " + line.decode(errors="replace").rstrip("\n"))

    # The socket.

    def _listen(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, wire.MAX_MESSAGE),
        ):
            socket.setsockopt(option, value)
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            socket.close()
            raise QuireError(f"cannot open the engine's socket {address}: {e}", cure="is TMPDIR too long?") from e
        self._socket = socket
        asyncio.get_running_loop().add_reader(_descriptor(socket), self.drain)

    def hang_up(self) -> None:
        """Close the socket. What is in it is lost."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(_descriptor(self._socket))
            self._socket.close()
            self._socket = None

    def send(self, message: wire.ToEngine) -> None:
        """Send a message without waiting. Raises Unavailable where no process is at the other end."""
        data = wire.encode(message)
        try:
            if self._socket is None:
                raise zmq.Again
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:  # no peer: it has just died, or has not connected yet
            raise Unavailable("the engine process does not answer", cure="try again in a few seconds") from None
        # The descriptor is edge-triggered, and sending may have eaten the edge of something that came in.
        asyncio.get_running_loop().call_soon(self.drain)

    def drain(self) -> None:
        """Take in everything that is there."""
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = wire.decode_from_engine(data)
            except msgspec.DecodeError as e:  # not our engine, or not in its right mind
                self._hear(wire.Fatal(kind="EngineDead", message=f"it sent a message that cannot be read: {e}"))
                self.kill()
                return
            self._hear(message)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
