"""The types between dialects and a `Completer`: `Generation` in, `Chunk`s and `Choice`s out.

These hold text. The engine below knows tokens alone, and the dialects above have wire formats of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.chat.tools.types import CallPart, Reading
from quire.engine.types import Constraint, Receipt
from quire.runner.params import SamplingParams

if TYPE_CHECKING:
    from quire.chat.shifting import Shift


@dataclass(frozen=True, slots=True)
class Origin:
    """What a prompt was rendered from: what the template was given. It explains a prompt; the tokens are the prompt."""

    messages: list[dict[str, Any]]
    given: dict[str, Any]  # keywords of `ChatTemplate.conversation`
    changes: tuple[str, ...] = ()  # what was rewritten before, because somebody asked for that


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt and the settings of its n continuations."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    priority: int = 0
    deadline: float | None = None
    itl: float = 0.0  # seconds between its tokens that it can bear; 0: what the server is set to
    namespace: str = ""
    constraint: Constraint | None = None  # what the answer must be
    reading: Reading | None = None  # how reasoning and tool calls are told from the text; None: all of it is text
    adapter: str = ""  # the name of a loaded adapter; empty: the model as it is
    shift: Shift | None = None  # how the answer goes on past the context; None: it ends there
    origin: Origin | None = None  # of a long chat prompt, so that a miss of the prefix cache can be explained


@dataclass(frozen=True, slots=True)
class Call:
    """One whole tool call."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as a client sees it."""

    id: int
    text: str  # what it adds to the text, with U+FFFD for bytes that are not whole characters
    bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one token of the output (or of the prompt), with its alternatives."""

    token: TokenText
    logprob: float
    rank: int
    top: list[tuple[TokenText, float]]


@dataclass(slots=True)  # not frozen: there is one for every token, and freezing makes it four times as dear
class Chunk:
    """News of one choice. Texts of a choice, joined, are the answer; the last chunk has `finish` and the receipt.

    Text that might become a stop string, part of a marker or is half a character is held back; tokens and logprobs come
    with the chunk in which they were computed. `reasoning` and `calls` are apart from `text`, and only a generation with
    a `reading` has them; within one chunk the reasoning comes before the text, and the text before the calls.
    """

    index: int = 0
    text: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # first chunk of choice 0
    finish: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: str | int | None = None  # the stop string or token id, when one was asked for
    error: str | None = None
    param: str | None = None  # the field of the request that the error is about
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A whole answer: the chunks of one index, gathered."""

    index: int
    text: str
    tokens: list[int]
    finish: str  # "stop", "length", "abort" or "error"
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    stop_reason: str | int | None = None
    error: str | None = None
    receipt: Receipt | None = None
