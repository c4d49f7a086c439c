"""The messages between a process client and its engine process: msgspec structs in msgpack, over one local socket.

Tagged unions, one per direction; sizes are bounded on both ends, and both ends carry the same protocol version in their
first message. Nothing is pickled, nothing listens on a network: the socket lives in a directory only its owner can enter.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from quire.config import EngineConfig
from quire.engine.types import AdapterInfo, EngineInfo, Event, Request, Stats, Vocabulary
from quire.observe import errors
from quire.observe.errors import BadRequest, QuireError, TooLarge
from quire.observe.steps import StepInfo

VERSION = 6
MAX_MESSAGE = 64 << 20  # bytes; a prompt of a million tokens is about five million
BUILDER = "quire.engine.construction.build:build_engine"


class Boot(msgspec.Struct, frozen=True):
    """Everything a child needs to become an engine: sent on its standard input, as JSON."""

    version: int
    config: EngineConfig
    address: str  # ipc://...
    parent: int  # pid
    builder: str = BUILDER
    bound_to_thread: bool = False  # the parent forked on its main thread, so its death may be told by signal


# To the engine.


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Run this."""

    request: Request


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Part of the rows of a span, from byte `at` on, ahead of the requests whose spans have `name` in their place."""

    name: bytes
    at: int
    total: int
    data: bytes


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Tell the engine that no later request will name these rows."""

    names: list[bytes]


class SetVocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The bytes of the tokens, before the first request that needs them."""

    vocabulary: Vocabulary


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort these requests."""

    ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop now; whatever runs is dropped."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Read an adapter, and let requests name it. Answered with Answer."""

    ticket: int
    name: str
    path: str


class Unload(msgspec.Struct, frozen=True, tag="unload"):
    """Unload an adapter: no more requests may name it. Answered with Answer."""

    ticket: int
    name: str


class AskSteps(msgspec.Struct, frozen=True, tag="ask_steps"):
    """The newest steps, so many at most. Answered with Steps."""

    ticket: int
    most: int


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Ask whether the engine still answers, which it does between steps."""


# From the engine.


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Loaded; requests may come."""

    version: int
    info: EngineInfo


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Weights taken over so far, in bytes."""

    done: int
    total: int


class Events(msgspec.Struct, frozen=True, tag="events"):
    """All news of one step."""

    events: list[Event]


class StatsUpdate(msgspec.Struct, frozen=True, tag="stats"):
    """A new snapshot."""

    stats: Stats


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to Ping."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The engine cannot start or go on: the error as it was raised, to be raised again by the client."""

    kind: str
    message: str
    cure: str = ""
    code: str = ""

    @classmethod
    def of(cls, error: QuireError) -> Fatal:
        return cls(kind=type(error).__name__, message=error.message, cure=error.cure, code=error.code)

    def error(self) -> QuireError:
        """The error again, as the class it was when that is one of ours."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, QuireError)):
            kind = QuireError
        made = kind(self.message, cure=self.cure)
        made.code = self.code or made.code
        return made


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The outcome of a Load or an Unload."""

    ticket: int
    adapter: AdapterInfo | None = None  # loaded
    error: Fatal | None = None


class Steps(msgspec.Struct, frozen=True, tag="steps"):
    """The records of steps that AskSteps asked for: no more than the engine keeps."""

    ticket: int
    steps: list[StepInfo]


ToEngine: TypeAlias = Add | Rows | Forget | SetVocabulary | Abort | Load | Unload | AskSteps | Ping | Shutdown
FromEngine: TypeAlias = Ready | Progress | Events | StatsUpdate | Answer | Steps | Pong | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Bytes for the socket; TooLarge when the other end would refuse them."""
    try:
        data = _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError) as e:
        raise BadRequest(f"the request cannot be sent to the engine: {e}") from e
    if len(data) > MAX_MESSAGE:
        raise TooLarge(f"the message to the engine has {len(data)} bytes: at most {MAX_MESSAGE}")
    return data


def decode_to_engine(data: bytes) -> ToEngine:
    """Raises msgspec.ValidationError or DecodeError, with the place."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """Raises msgspec.ValidationError or DecodeError, with the place."""
    return _from_engine.decode(data)
