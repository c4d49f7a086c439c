"""Prompts of every dialect: a text, or a conversation through the model's chat template, becomes tokens.

A dialect makes turns (plain dicts in the shape that chat templates expect: role, content, tool_calls, tool_call_id, name,
reasoning_content), tools and keywords into a `Conversation`; `encode` makes its tokens, and `answering` what the answer must be and
how it is read. `History` ties results of tools to the calls they answer. What cannot fit the context is refused before it is tokenized.
Knows no dialect's shapes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from quire.chat.tools.types import Tools
from quire.chat.types import Origin
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from quire.server.served import WATCHED, Served
from quire.server.shared import bodies
from quire.server.shared.tools import NO_TOOLS, check_name, shown, told_in_words

if TYPE_CHECKING:
    from quire.chat.tools.types import Reading

MAX_TURNS = 20_000
MAX_CALLS = 1024  # in one turn
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Names by which templates are told whether to reason, and how much. A template is told by all those that it reads.
SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning": (False, True),
    "thinking_mode": ("disabled", "enabled"),
}
LEVELS = ("reasoning_effort", "thinking_effort")
# Names that a template is given by us; a client's kwargs may not take their place.
RESERVED = frozenset(
    {
        *("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "return_dict"),
    }
)


@dataclass(slots=True)
class Dropped:
    """What was left out of a prompt, because a client asked for it to be cut where it does not fit."""

    param: str
    tokens: int | None  # of the prompt; None: the whole was too long to be counted
    messages: int = 0
    roles: dict[str, int] = field(default_factory=dict)
    of: int = 0  # messages that there were
    where: str = ""

    def body(self) -> dict[str, Any]:
        """For an answer, as an object."""
        made: dict[str, Any] = {"param": self.param, "tokens": self.tokens, "where": self.where}
        return made | ({"messages": self.messages, "of": self.of, "roles": self.roles} if self.of else {})

    @property
    def note(self) -> str:
        """For an answer, as a sentence."""
        count = "more tokens than could be counted" if self.tokens is None else f"{self.tokens} tokens"
        if not self.of:
            return f"{self.param}: {count} were left out, {self.where}"
        roles = ", ".join(f"{n} {role}" for role, n in self.roles.items())
        return f"{self.param}: {self.messages} of {self.of} messages ({roles}), {count}, were left out, {self.where}"

    @property
    def header(self) -> str:
        """For a header of the response."""
        tokens = "unknown" if self.tokens is None else self.tokens
        return f"tokens={tokens}" + (f", messages={self.messages}" if self.of else "")


@dataclass(slots=True)
class Conversation:
    """A conversation, ready for the model's template."""

    turns: list[dict[str, Any]]
    tools: Tools = NO_TOOLS
    kwargs: dict[str, Any] = field(default_factory=dict)
    generation_prompt: bool = True  # ends with the beginning of an answer
    continues: bool = False  # the answer goes on with the last turn, which is the assistant's
    documents: list[dict[str, Any]] | None = None
    notes: list[str] = field(
        default_factory=list
    )  # what became of it on its way into the prompt, for the answer to tell
    dropped: Dropped | None = None  # what was left out to make it fit

    def told(self) -> dict[str, Any]:
        """Quire's own fields of an answer about all this."""
        made: dict[str, Any] = {"notes": self.notes} if self.notes else {}
        return made if self.dropped is None else made | {"dropped": self.dropped.body()}

    origin: Origin | None = None  # once it was encoded, of a long prompt
    changes: tuple[str, ...] = ()  # what was rewritten because that was asked for
    canonical: bool = False  # that was done


class History:
    """The calls of a conversation and which of them were answered. Places are OpenAI's (`messages[2].tool_calls[0].id`)."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # of every call so far, by id
        self._open: list[tuple[str, str]] = []  # id and name of those without a result
        self._numbered = False  # a call came with an id of its own

    @property
    def unnumbered(self) -> bool:
        """Whether there are calls, and none has an id that the client knows."""
        return bool(self._names) and not self._numbered

    def called(self, where: str, id: str | None, name: str, arguments: str) -> dict[str, Any]:
        """A call in an assistant's turn, as templates expect it. `arguments` is JSON text; no id gets one."""
        check_name(f"{where}.name", name)
        self._numbered = self._numbered or bool(id)
        id = id or f"call{len(self._names):05d}"  # letters and digits, nine of them: some templates insist
        self._names[id] = name
        self._open.append((id, name))
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def answered(self, where: str, id: str | None, text: str, name: str | None = None) -> dict[str, Any]:
        """A result's turn. Without an id it answers the first open call, of that name if one is given."""
        if id is None:
            id = next((i for i, n in self._open if name in (None, n)), None)
            if id is None:
                what = f"call of {name[:128]!r}" if name else "call"
                raise BadRequest(f"{where}: there is no {what} before it that has no result yet", param=where)
        if id not in self._names:
            raise BadRequest(f"{where}: no earlier message has a call with the id {id[:128]!r}", param=where)
        self._open = [one for one in self._open if one[0] != id]
        return {"role": "tool", "content": text, "tool_call_id": id, "name": name or self._names[id]}


def arguments_text(where: str, value: Any) -> str:
    """Arguments of a call in the history, which some dialects send as text and others as an object, as text.

    Text that is no JSON goes on as it is: a model wrote it once, and must see what it got an error for.
    """
    if not isinstance(value, str):
        bodies.bounded(where, value)
        return msgspec.json.encode(value or {}).decode()
    try:
        bodies.bounded(where, json.loads(value or "{}"))
    except RecursionError:
        raise BadRequest(f"{where} is nested too deeply", param=where) from None
    except ValueError:
        pass
    return value or "{}"


def check_count(turns: list[Any], param: str = "messages") -> None:
    """Refuse a conversation with more turns than any honest one."""
    if len(turns) > MAX_TURNS:
        raise BadRequest(f"{param} has {len(turns)} items: at most {MAX_TURNS} are taken", param=param)


# Reasoning


def thinking(served: Served, on: bool | None, effort: str | None, param: str) -> dict[str, Any]:
    """Keywords that make the template ask for reasoning, for none, or for so much of it; BadRequest where it cannot.

    A template that only knows on and off takes every effort but none and minimal as on.
    """
    completer, reads = served.completer, template_reads(served)
    reasons = reasons_apart(served)
    level = next((name for name in LEVELS if name in reads), None)
    switches = [name for name in SWITCHES if name in reads]
    made: dict[str, Any] = {}
    if effort is not None:
        if effort not in EFFORTS:
            raise BadRequest(f"{param} is {effort[:64]!r}: it must be one of {', '.join(EFFORTS)}", param=param)
        off = effort in ("none", "minimal")
        words = str(getattr(completer.template, "source", ""))
        if level is not None and (not off or f'"{effort}"' in words or f"'{effort}'" in words):
            made[level] = effort
        elif not off and not switches:
            refusal = BadRequest(
                f"{param} is {effort}: {_no_place(served)}",
                cure="leave it out",
                param=param,
                code="unsupported_parameter",
            )
            served.reading.excuse(refusal)
            return {}
        on = not off if level not in made or not off else on
    if on is None:
        return made
    if not switches and level not in made and on != reasons:
        name = served.model.name
        refusal = BadRequest(
            f"{param}: {name} does not reason apart from its answers"
            if on
            else f"{param}: the reasoning of {name} cannot be turned off",
            cure="leave it out" if on else "",
            param=param,
            code="unsupported_parameter",
        )
        served.reading.excuse(refusal)
    return made | {name: SWITCHES[name][on] for name in switches}


def effort_ignored(served: Served, effort: str) -> str | None:
    """Why an effort has no effect where an API takes it as a hint: the template has no place for it. None where it has one, and
    for `none`, which is a demand."""
    if effort not in EFFORTS or effort == "none" or not template_reads(served).isdisjoint((*LEVELS, *SWITCHES)):
        return None
    return _no_place(served)


def _no_place(served: Served) -> str:
    why = "always reasons, as much as it will" if reasons_apart(served) else "does not reason apart from its answers"
    return f"{served.model.name} {why}; its chat template has no place for it"


def reasons_apart(served: Served) -> bool:
    """Whether the model writes reasoning that can be told from its answers."""
    answers = served.completer.answer_format
    return answers is not None and answers.reasons


def can_switch(served: Served) -> bool:
    """Whether the template can be told not to reason."""
    return not template_reads(served).isdisjoint(SWITCHES)


def template_reads(served: Served) -> frozenset[str]:
    """Names that the model's template takes from what it is given."""
    return getattr(served.completer.template, "reads", frozenset())


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, checked."""
    kwargs = dict(given or {})
    bodies.bounded("chat_template_kwargs", kwargs)
    for name in RESERVED & kwargs.keys():
        raise BadRequest(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
    return kwargs


# Prompts and answers


def check_text(served: Served, text: str, param: str) -> None:
    """Refuse text that cannot fit the context however it is tokenized, before the work of tokenizing it."""
    context, longest = served.info.context, served.completer.tokenizer.max_token_bytes
    if longest is not None and len(text) > context * longest:
        raise BadRequest(
            f"{param} has {len(text)} characters, more than any {context} tokens (the context of this model)",
            param=param,
            code="context_length_exceeded",
        )


def check_prompt(served: Served, tokens: list[int], max_tokens: int | None, param: str, max_param: str) -> None:
    """Refuse what does not fit the context; nothing is ever cut."""
    context, vocab = served.info.context, served.info.vocab_size
    if not tokens:
        raise BadRequest(f"{param} is empty", param=param)
    if min(tokens) < 0 or max(tokens) >= vocab:
        bad = next(t for t in tokens if not 0 <= t < vocab)
        raise BadRequest(f"{param} holds token {bad}: the vocabulary has {vocab}", param=param)
    room = context - len(tokens)
    if room < 1:
        raise BadRequest(
            # "maximum context length" are OpenAI's words; clients know by them that a prompt is too long and shorten it.
            f"{param} has {len(tokens)} tokens: this model's maximum context length is {context} tokens, and at least one is "
            "for the answer",
            cure="shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > room:
        raise BadRequest(
            f"{max_param} is {max_tokens}: this model's maximum context length is {context} tokens, {param} has "
            f"{len(tokens)}, which leaves {room}",
            param=max_param,
            code="context_length_exceeded",
        )


async def encode_text(served: Served, text: str, param: str, add_special: bool | None = None) -> list[int]:
    """Tokens of a prompt."""
    check_text(served, text, param)
    completer = served.completer
    if add_special is None or add_special:
        return await completer.encode_prompt(text)
    return await asyncio.to_thread(completer.tokenizer.encode, text, add_special=False, parse_special=True)


async def encode(served: Served, said: Conversation, param: str = "messages") -> list[int]:
    """Tokens of a conversation, through the model's own template. Notes in it what explains them, and what was rewritten."""
    completer = served.completer
    if served.canonical and not said.canonical:
        from quire.chat.canonical import rewrite

        check_text(served, "".join(texts(said.turns)), param)
        rewritten = await asyncio.to_thread(rewrite, said.turns, said.tools, served.canonical)
        said.turns, said.tools, said.changes, said.canonical = *rewritten, True
    tools = None
    if said.tools.tools:
        tools = shown(said.tools)
        check_text(served, msgspec.json.encode(tools).decode(), "tools")
    check_text(served, "".join(texts(said.turns)), param)
    kwargs: dict[str, Any] = dict(said.kwargs)
    if tools is not None:
        kwargs["tools"] = tools
    if said.documents:
        if "documents" not in template_reads(served):
            refusal = BadRequest(
                f"documents: the chat template of {served.model.name} has no place for them",
                cure="write them into a message",
                param="documents",
                code="unsupported_parameter",
            )
            served.reading.excuse(refusal)
        else:
            check_text(served, "".join(texts(said.documents)), "documents")
            kwargs["documents"] = said.documents
    if said.continues:
        kwargs["continue_final_message"] = True
    kwargs["add_generation_prompt"] = said.generation_prompt and not said.continues
    try:
        tokens = await completer.encode_chat(said.turns, **kwargs)
    except BadRequest as error:
        if error.param == "prompt":  # the text that the template wrote
            error.param = param
        raise
    if said.tools.tools and (note := told_in_words(served)) is not None and note not in said.notes:
        said.notes.append(note)
    if len(tokens) >= WATCHED or said.changes:
        said.origin = Origin(said.turns, kwargs, said.changes)
    return tokens


async def answering(
    served: Served, prompt: list[int], tools: Tools, answer: Constraint | None
) -> tuple[Reading | None, Constraint | None]:
    """How the answer to a prompt is read, and what it must be."""
    return await served.completer.answering(prompt, tools, answer)


def texts(value: Any) -> Iterator[str]:
    """Every text in plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)
