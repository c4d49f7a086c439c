"""Items of an answer on their way: each takes texts as they come, and tells its events and what it is in the end.

A message, reasoning, a function's call and the text of a `custom` one are told piece by piece. Calls whose items have fields of their own
(a command, a change of a file, a search) are told when they are whole. An event is a pair of its name and its fields; the answer numbers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeAlias

from quire.server.openai.responses.calls import CUSTOM, FUNCTION, SHELL, Known, is_json
from quire.server.openai.responses.items import SEAL_SUMMARY, Item, new_id, seal
from quire.server.shared.texts import TextArgument

Told: TypeAlias = Iterator[tuple[str, dict[str, Any]]]


class Opened(Protocol):
    """An item on its way. `index` is its place in the output."""

    kind: str
    index: int

    def begin(self) -> Told:
        """What tells that there is an item."""
        ...

    def take(self, text: str, entries: list[Any]) -> Told:
        """Take text in, with the log probabilities of its tokens."""
        ...

    def end(self, status: str) -> Told:
        """What tells that the item is whole, or cut."""
        ...

    def done(self, status: str) -> Item | None:
        """The item as it is by now; None where it is none yet."""
        ...


class OpenText:
    """A message, or reasoning."""

    def __init__(self, kind: str, index: int, summarized: bool = False, sealed: bool = False):
        self.kind = kind
        self.index = index
        self._id = new_id(kind)
        self._summarized = summarized and kind == "reasoning"  # it is told as its summary too
        self._sealed = sealed  # it carries itself wrapped up
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._name = "output_text" if kind == "message" else "reasoning_text"

    def begin(self) -> Told:
        yield "output_item.added", {"output_index": self.index, "item": self._begun()}
        yield "content_part.added", {**self._at(), "content_index": 0, "part": self._part("")}
        if self._summarized:
            part = {"type": "summary_text", "text": ""}
            yield "reasoning_summary_part.added", {**self._at(), "summary_index": 0, "part": part}

    def take(self, text: str, entries: list[Any]) -> Told:
        self._texts.append(text)
        self._logprobs += entries
        more = {"logprobs": entries} if self.kind == "message" else {}
        yield f"{self._name}.delta", {**self._at(), "content_index": 0, "delta": text, **more}
        if self._summarized:
            yield "reasoning_summary_text.delta", {**self._at(), "summary_index": 0, "delta": text}

    def end(self, status: str) -> Told:
        text = "".join(self._texts)
        more = {"logprobs": self._logprobs} if self.kind == "message" else {}
        yield f"{self._name}.done", {**self._at(), "content_index": 0, "text": text, **more}
        yield "content_part.done", {**self._at(), "content_index": 0, "part": self._part(text)}
        if self._summarized:
            part = {"type": "summary_text", "text": text}
            yield "reasoning_summary_text.done", {**self._at(), "summary_index": 0, "text": text}
            yield "reasoning_summary_part.done", {**self._at(), "summary_index": 0, "part": part}
        yield "output_item.done", {"output_index": self.index, "item": self.done(status)}

    def done(self, status: str) -> Item:
        text = "".join(self._texts)
        made = self._begun() | {"status": status, "content": [self._part(text)]}
        if self._summarized:
            made["summary"] = [{"type": "summary_text", "text": text}]
        if self._sealed and self.kind == "reasoning":
            made["encrypted_content"] = seal(text)
        return made

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": self.index}

    def _begun(self) -> Item:
        head: Item = {"id": self._id, "type": self.kind, "status": "in_progress"}
        return head | (
            {"role": "assistant", "content": []} if self.kind == "message" else {"summary": [], "content": []}
        )

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


class OpenSummary:
    """A compaction: a summary, wrapped up."""

    kind = "compaction"

    def __init__(self, index: int):
        self.index = index
        self._id = new_id(self.kind)
        self._texts: list[str] = []

    def begin(self) -> Told:
        item = {"id": self._id, "type": self.kind, "encrypted_content": ""}
        yield "output_item.added", {"output_index": self.index, "item": item}
        yield "compaction.compacting", {"item_id": self._id, "output_index": self.index}

    def take(self, text: str, entries: list[Any]) -> Told:
        self._texts.append(text)
        yield from ()

    def end(self, status: str) -> Told:
        yield "output_item.done", {"output_index": self.index, "item": self.done(status)}

    def done(self, status: str) -> Item:
        text = "".join(self._texts).strip()
        return {"id": self._id, "type": self.kind, "encrypted_content": seal(text, SEAL_SUMMARY)}


class OpenCall:
    """A function's call, or that of a tool which takes a text."""

    def __init__(self, index: int, known: Known, call: str | None):
        self.kind = known.kind
        self.index = index
        self._id = new_id(known.item("", "")["type"])
        self._begun = known.item(self._id, call or f"call_{self._id.partition('_')[2]}")
        self._texts: list[str] = []
        self._argument = TextArgument() if known.kind == CUSTOM else None

    def begin(self) -> Told:
        yield "output_item.added", {"output_index": self.index, "item": self._begun}

    def take(self, text: str, entries: list[Any]) -> Told:
        if self._argument is not None:
            text = self._argument.feed(text)
        if text:
            yield from self._more(text)

    def _more(self, text: str) -> Told:
        self._texts.append(text)
        kind = "function_call_arguments" if self.kind == FUNCTION else "custom_tool_call_input"
        yield f"{kind}.delta", {"item_id": self._id, "output_index": self.index, "delta": text}

    def end(self, status: str) -> Told:
        if self._argument is not None and (rest := self._argument.finish()):
            yield from self._more(rest)
        made, at = self.done(status), {"item_id": self._id, "output_index": self.index}
        if self.kind == FUNCTION:
            yield "function_call_arguments.done", {**at, "name": made["name"], "arguments": made["arguments"]}
        else:
            yield "custom_tool_call_input.done", {**at, "input": made["input"]}
        yield "output_item.done", {"output_index": self.index, "item": made}

    def done(self, status: str) -> Item:
        field = "arguments" if self.kind == FUNCTION else "input"
        return self._begun | {"status": status, field: "".join(self._texts)}


class OpenFields:
    """A call whose item has fields of its own, which are known once its arguments are whole.

    Arguments that are none for it, which only a model without a grammar writes, are told as a call of a function of its name: nothing of what was
    written is lost. One that was cut short is no item: there is nothing to carry out.
    """

    def __init__(self, index: int, known: Known, call: str | None):
        self.kind = known.kind
        self.index = index
        self._known = known
        self._call = call
        self._id = new_id(known.item("", "")["type"])
        self._texts: list[str] = []

    def begin(self) -> Told:
        yield from ()

    def take(self, text: str, entries: list[Any]) -> Told:
        self._texts.append(text)
        yield from ()

    def end(self, status: str) -> Told:
        made = self.done(status)
        if made is None:
            return
        if made["type"] == "function_call":
            other = OpenCall(self.index, Known(FUNCTION, self.kind), made["call_id"])
            yield from other.begin()
            yield from other.take(made["arguments"], [])
            yield from other.end("completed")
            return
        yield "output_item.added", {"output_index": self.index, "item": made | {"status": "in_progress"}}
        if self.kind == SHELL:
            for i, command in enumerate(made["action"]["commands"]):
                at = {"output_index": self.index, "command_index": i}
                yield "shell_call_command.added", {**at, "command": ""}
                yield "shell_call_command.delta", {**at, "delta": command}
                yield "shell_call_command.done", {**at, "command": command}
        yield "output_item.done", {"output_index": self.index, "item": made}

    def done(self, status: str) -> Item | None:
        text = "".join(self._texts)
        fields = self._known.fields(text)
        if fields is None and status != "completed" and not is_json(text):
            return None
        call = self._call or f"call_{self._id.partition('_')[2]}"
        if fields is None:
            head: Item = {"id": self._id, "type": "function_call", "call_id": call}
            return head | {"name": self.kind, "arguments": text, "status": "completed"}
        return self._known.item(self._id, call) | {"status": "completed"} | fields


def open_call(index: int, known: Known, call: str | None) -> Opened:
    """A call that begins."""
    return (OpenCall if known.kind in (FUNCTION, CUSTOM) else OpenFields)(index, known, call)
