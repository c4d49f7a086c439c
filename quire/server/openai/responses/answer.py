"""The answer of the Responses API as it comes together: a response object, and the events that tell how it grew.

    created -> (queued) -> in_progress -> [item added -> parts, deltas, dones -> item done]* -> completed | incomplete
                                                                                      error -> failed

One item is open at a time; news of another kind, or of another call, closes it. The events' deltas, joined, are the object's
texts, and their numbers count from 0 without a gap. Knows chunks and OpenAI's shapes; knows no HTTP and no store.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quire.chat.types import Call, CallPart, Chunk
from quire.engine.types import Receipt
from quire.observe.errors import QuireError
from quire.server import errors
from quire.server.feed import News
from quire.server.openai.responses.items import Item, new_id, seal
from quire.server.shared import logprobs as token_logprobs
from quire.server.shared.answers import Thoughts, arguments_of, receipt_body

Event = dict[str, Any]


class Answer:
    """One response. `body` is the object without its output; `prompt` counts the tokens of its input."""

    def __init__(
        self,
        body: dict[str, Any],
        prompt: int,
        *,
        summarized: bool,
        logprobs: bool,
        sealed: bool,
        told: bool,
        spaces: Mapping[str, tuple[str, str]],
    ):
        self._body = body
        self._prompt = prompt
        self._summarized = summarized  # the reasoning is told as its summary too
        self._logprobs = logprobs
        self._sealed = sealed  # reasoning items carry themselves wrapped up
        self._told = told  # receipts are asked for
        self._spaces = spaces  # namespace and name of functions that the model knows by one name
        self._number = 0
        self._items: list[Item] = []  # whole ones
        self._open: _Open | None = None
        self._calls = 0  # begun so far
        self._thoughts = Thoughts()
        self._tokens = 0
        self._held: list[Any] = []  # log probabilities of tokens whose text has not come
        self._finish: str | None = None
        self._receipt: Receipt | None = None

    @property
    def id(self) -> str:
        return self._body["id"]

    @property
    def output(self) -> list[Item]:
        """The items that are whole."""
        return self._items

    @property
    def state(self) -> dict[str, Any]:
        """The object without its output."""
        return self._body

    def body(self) -> dict[str, Any]:
        """The response object as it is now."""
        return self._body | {"output": list(self._items)}

    # Events

    def created(self) -> Iterator[Event]:
        """The events of a response that was created; a background one waits for its turn."""
        yield self._event("response.created", response=self.body())
        if self._body["status"] == "queued":
            yield self._event("response.queued", response=self.body())

    def begun(self) -> Iterator[Event]:
        """The events of a response that begins to run."""
        self._body["status"] = "in_progress"
        yield self._event("response.in_progress", response=self.body())

    def opening(self) -> Iterable[Event]:
        yield from self.created()
        yield from self.begun()

    def news(self, items: list[News]) -> Iterable[Event]:
        for _, chunk in items:
            yield from self._chunk(chunk)

    def closing(self) -> Iterable[Event]:
        """The events of a response that ended as it should, or for want of tokens."""
        cut = self._finish == "length"
        if not self._items and self._open is None:
            yield from self._switch("message")
        yield from self._close("incomplete" if cut or self._half_a_call() else "completed")
        self._body["usage"] = self._usage()
        if self._told:
            told = {"receipts": [receipt_body(0, self._receipt)]}
            self._body["quire"] = self._body.get("quire", {}) | told
        if cut:
            self._body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            yield self._event("response.incomplete", response=self.body())
        else:
            self._body |= {"status": "completed", "completed_at": int(time.time())}
            yield self._event("response.completed", response=self.body())

    def failing(self, error: QuireError) -> Iterable[Event]:
        """The events of a response that did not end as it should."""
        said = errors.text(error)
        code = (
            "rate_limit_exceeded"
            if error.status == 429
            else "server_error"
            if error.status >= 500
            else "invalid_prompt"
        )
        self._abandon()
        self._body |= {"status": "failed", "error": {"code": code, "message": said}}
        yield self._event("error", code=error.code, message=said, param=error.param)
        yield self._event("response.failed", response=self.body())

    def cancelled(self) -> Iterable[Event]:
        """Somebody stopped it. The API has no event of that name; whoever listens is told by an error."""
        self._abandon()
        self._body["status"] = "cancelled"
        yield self._event("error", code="response_cancelled", message="the response was cancelled", param=None)

    def waiting(self) -> Event:
        """The event of a long silence. Clients that count the seconds between events do not count comments."""
        return self._event("keepalive")

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    # Pieces

    def _chunk(self, chunk: Chunk) -> Iterator[Event]:
        self._tokens += len(chunk.tokens)
        self._thoughts.add(chunk)
        entries = self._entries(chunk)
        if chunk.reasoning:
            yield from self._switch("reasoning")
            yield from self._delta(chunk.reasoning)
        if chunk.text:
            yield from self._switch("message")
            yield from self._delta(chunk.text, entries)
        for part in chunk.calls:
            yield from self._call(part)
        if chunk.finish is not None:
            self._finish, self._receipt = chunk.finish, chunk.receipt

    def _entries(self, chunk: Chunk) -> list[Any]:
        """Log probabilities of the text in a chunk, those of tokens that were held back for it included."""
        if not self._logprobs:
            return []
        if chunk.text or chunk.calls or chunk.reasoning:
            inside = self._open is not None and self._open.kind == "reasoning"
            made, self._held = [*([] if inside else self._held), *chunk.logprobs], []
            return token_logprobs.chat(made) if chunk.text else []
        self._held += chunk.logprobs
        return []

    def _switch(self, kind: str) -> Iterator[Event]:
        """Make an item of that kind the open one."""
        if self._open is not None and self._open.kind == kind:
            return
        yield from self._close("completed")
        self._open = _Open(kind, new_id(kind), len(self._items))
        yield from self._opened(self._open)

    def _call(self, part: CallPart) -> Iterator[Event]:
        if part.index == self._calls:
            yield from self._close("completed")
            self._calls += 1
            item = new_id("function_call")
            call = part.id or f"call_{item.partition('_')[2]}"
            space, name = self._spaces.get(part.name or "", ("", part.name or ""))
            self._open = _Open("function_call", item, len(self._items), call, name, space)
            yield from self._opened(self._open)
        if self._open is None or self._open.kind != "function_call" or part.index != self._calls - 1:
            raise QuireError("the answer went back to a call that was over")
        if part.arguments:
            yield from self._delta(part.arguments)

    def _opened(self, item: _Open) -> Iterator[Event]:
        yield self._event("response.output_item.added", output_index=item.index, item=item.begun())
        if item.kind != "function_call":
            yield self._event("response.content_part.added", **item.at(), content_index=0, part=item.part(False))
        if item.kind == "reasoning" and self._summarized:
            part = {"type": "summary_text", "text": ""}
            yield self._event("response.reasoning_summary_part.added", **item.at(), summary_index=0, part=part)

    def _delta(self, text: str, entries: list[Any] | None = None) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        item.texts.append(text)
        if item.kind == "message":
            item.logprobs += entries or []
            more = {"content_index": 0, "delta": text, "logprobs": entries or []}
            yield self._event("response.output_text.delta", **item.at(), **more)
        elif item.kind == "reasoning":
            yield self._event("response.reasoning_text.delta", **item.at(), content_index=0, delta=text)
            if self._summarized:
                yield self._event("response.reasoning_summary_text.delta", **item.at(), summary_index=0, delta=text)
        else:
            yield self._event("response.function_call_arguments.delta", **item.at(), delta=text)

    def _close(self, status: str) -> Iterator[Event]:
        """The open item is whole, or cut."""
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.texts)
        done = self._done(item, status)
        self._items.append(done)
        if item.kind == "message":
            more = {"content_index": 0, "text": text, "logprobs": item.logprobs}
            yield self._event("response.output_text.done", **item.at(), **more)
            yield self._event("response.content_part.done", **item.at(), content_index=0, part=item.part())
        elif item.kind == "reasoning":
            yield self._event("response.reasoning_text.done", **item.at(), content_index=0, text=text)
            yield self._event("response.content_part.done", **item.at(), content_index=0, part=item.part())
            if self._summarized:
                part = done["summary"][0]
                yield self._event("response.reasoning_summary_text.done", **item.at(), summary_index=0, text=text)
                yield self._event("response.reasoning_summary_part.done", **item.at(), summary_index=0, part=part)
        else:
            more = {"name": item.name, "arguments": text}
            yield self._event("response.function_call_arguments.done", **item.at(), **more)
        yield self._event("response.output_item.done", output_index=item.index, item=done)

    def _half_a_call(self) -> bool:
        """A stop string ended the answer inside of a call."""
        item = self._open
        if item is None or item.kind != "function_call":
            return False
        return arguments_of(Call(item.call, item.name, "".join(item.texts))) is None

    def _abandon(self) -> None:
        """Keep open items as far as they came, without events."""
        if self._open is not None:
            self._items.append(self._done(self._open, "incomplete"))
            self._open = None
        self._body["usage"] = self._usage()

    def _done(self, item: _Open, status: str) -> Item:
        done = item.begun() | {"status": status}
        text = "".join(item.texts)
        if item.kind == "function_call":
            return done | {"arguments": text}
        done["content"] = [item.part()]
        if item.kind == "reasoning":
            if self._summarized:
                done["summary"] = [{"type": "summary_text", "text": text}]
            if self._sealed:
                done["encrypted_content"] = seal(text)
        return done

    def _usage(self) -> dict[str, Any]:
        cached = 0 if self._receipt is None else self._receipt.cached_tokens
        return {
            "input_tokens": self._prompt,
            # Prefixes are kept without a price of their own: nothing is counted as written.
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._thoughts.tokens},
            "total_tokens": self._prompt + self._tokens,
        }


class _Open:
    """An item on its way."""

    def __init__(self, kind: str, id: str, index: int, call: str = "", name: str = "", space: str = ""):
        self.kind = kind
        self.id = id
        self.index = index
        self.call = call
        self.name = name
        self.space = space  # the namespace that the name is of
        self.texts: list[str] = []
        self.logprobs: list[Any] = []

    def at(self) -> dict[str, Any]:
        """The fields by which an event names its item."""
        return {"item_id": self.id, "output_index": self.index}

    def begun(self) -> Item:
        """The item with nothing in it."""
        head: Item = {"id": self.id, "type": self.kind, "status": "in_progress"}
        if self.kind == "message":
            return head | {"role": "assistant", "content": []}
        if self.kind == "reasoning":
            return head | {"summary": [], "content": []}
        space = {"namespace": self.space} if self.space else {}
        return head | {"call_id": self.call, "name": self.name, **space, "arguments": ""}

    def part(self, whole: bool = True) -> dict[str, Any]:
        """The one content part of the item."""
        text = "".join(self.texts) if whole else ""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self.logprobs)}
