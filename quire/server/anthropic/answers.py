"""Answers of /v1/messages: content blocks as they come, and the same blocks as one body.

`Blocks` is the one place where chunks become blocks: a stream sends its events, a whole answer takes the content that the
same events left behind, so that the two cannot differ.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from quire.chat.types import Call, Chunk
from quire.engine.types import Receipt
from quire.server.feed import News
from quire.server.shared.answers import Partial, arguments_of, receipt_body

PING = {"type": "ping"}
# Of each kind of block: the delta that adds to it, and the field that has what is added.
_EMPTY = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class Blocks:
    """Content blocks of one answer, in the order in which they were made."""

    def __init__(self, omits: bool = False, thinks: bool = False) -> None:
        self.omits = omits  # thinking is a block without its text
        self.thinks = thinks  # the answer is expected to begin with thinking
        self.content: list[dict[str, Any]] = []  # whole blocks, as a body has them
        self._kind = ""  # of the block that is open, if one is
        self._parts: list[str] = []  # of it

    def take(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """Events of one chunk."""
        if chunk.reasoning:
            if self._kind != "thinking":
                yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
            if not self.omits:
                yield self._more({"type": "thinking_delta", "thinking": chunk.reasoning}, chunk.reasoning)
        if chunk.text:
            if self._kind != "text":
                yield from self._start({"type": "text", "text": ""})
            yield self._more({"type": "text_delta", "text": chunk.text}, chunk.text)
        for part in chunk.calls:
            if part.id is not None:
                yield from self._start({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            if part.arguments:
                yield self._more({"type": "input_json_delta", "partial_json": part.arguments}, part.arguments)

    def alive(self) -> Iterator[dict[str, Any]]:
        """Events that add nothing to the open block, or open one, for clients that wait for more than pings. The answer most likely goes on in it."""
        if not self._kind:
            thinks = self.thinks and not self.content
            yield from self._start(
                {"type": "thinking", "thinking": "", "signature": ""} if thinks else {"type": "text", "text": ""}
            )
        name, field = _EMPTY[self._kind]
        yield self._more({"type": name, field: ""}, "")

    def end(self) -> Iterator[dict[str, Any]]:
        """Events of the end. An answer that said nothing has a block that says so: clients look at the first."""
        if not self.content:
            yield from self._start({"type": "text", "text": ""})
        yield from self._stop()

    def _start(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._stop()
        self._kind = block["type"]
        self.content.append(dict(block))
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": block}

    def _more(self, delta: dict[str, Any], text: str) -> dict[str, Any]:
        self._parts.append(text)
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _stop(self) -> Iterator[dict[str, Any]]:
        if not self._kind:
            return
        block, said, index = self.content[-1], "".join(self._parts), len(self.content) - 1
        if self._kind == "thinking":
            # Nothing is secret or sealed here: it says which thoughts these are, and is taken back unread.
            block["thinking"], block["signature"] = said, hashlib.sha256(said.encode()).hexdigest()
            delta = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        elif self._kind == "text":
            block["text"] = said
        else:
            found = arguments_of(Call(block["id"], block["name"], said))
            if found is None:  # cut: an object cannot hold it
                block["partial_json"] = said
            else:
                block["input"] = found
        self._kind, self._parts = "", []
        yield {"type": "content_block_stop", "index": index}


def told(notes: list[str]) -> dict[str, Any]:
    """Quire's own field, which is there where there is something to tell."""
    return {"quire": {"notes": notes}} if notes else {}


class Answer:
    """What both answers say, whatever their form."""

    def __init__(
        self,
        model: str,
        prompt: int,
        overlong: bool,
        notes: list[str],
        applied: list[dict[str, Any]] | None = None,
        receipts: bool = False,
    ):
        self.id = f"msg_{secrets.token_hex(12)}"
        self.model = model
        self.prompt = prompt  # tokens
        self.overlong = overlong  # max_tokens is over what the context leaves
        self.notes = notes  # what of the request has no effect
        self.receipts = receipts  # the end tells what happened to the request
        self.edits = {} if applied is None else {"context_management": {"applied_edits": applied}}

    def message(self, content: list[Any], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        """The message object."""
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **stop, "usage": usage, **told(self.notes)}

    def opening(self) -> dict[str, Any]:
        """The answer before its first token. What the cache gives is not known yet: clients add numbers up, so it is 0 until the end."""
        usage = {"input_tokens": self.prompt, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return self.message([], {"stop_reason": None, "stop_sequence": None}, usage)

    def receipt(self, said: Partial) -> dict[str, Any]:
        """What happened to the request, where it asks for that."""
        return {"quire": {"receipts": [receipt_body(0, said.receipt)]}} if self.receipts else {}

    def stop(self, said: Partial) -> dict[str, Any]:
        """Why it ended."""
        if said.finish == "length":
            why = "model_context_window_exceeded" if self.overlong else "max_tokens"
            return {"stop_reason": why, "stop_sequence": None}
        if said.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(said.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": said.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def usage(self, said: Partial) -> dict[str, Any]:
        """Input is what was computed; what the cache gave is counted beside it. Keeping it costs nothing extra: 0."""
        receipt: Receipt | None = said.receipt
        cached = 0 if receipt is None else receipt.cached_tokens
        body: dict[str, Any] = {
            "input_tokens": self.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": len(said.tokens),
        }
        if said.thoughts.tokens:
            body["output_tokens_details"] = {"thinking_tokens": said.thoughts.tokens}
        return body


class Stream:
    """Events of an answer: its start, blocks in pieces, why it stopped and what it cost."""

    def __init__(self, answer: Answer, omits: bool = False, thinks: bool = False):
        self.answer = answer
        self.said = Partial()
        self.blocks = Blocks(omits, thinks)

    def opening(self) -> Iterable[object]:
        yield {"type": "message_start", "message": self.answer.opening()}
        yield PING

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.said.add(chunk)
            yield from self.blocks.take(chunk)

    def closing(self) -> Iterable[object]:
        yield from self.blocks.end()
        stop, usage = self.answer.stop(self.said), self.answer.usage(self.said)
        yield {
            "type": "message_delta",
            "delta": stop,
            "usage": usage,
            **self.answer.edits,
            **self.answer.receipt(self.said),
        }
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        """The answer as one body, once all news have come."""
        for _ in self.blocks.end():
            pass
        stop, usage = self.answer.stop(self.said), self.answer.usage(self.said)
        made = self.answer.message(self.blocks.content, stop, usage) | self.answer.edits
        if receipt := self.answer.receipt(self.said):
            made["quire"] = made.get("quire", {}) | receipt["quire"]
        return made
