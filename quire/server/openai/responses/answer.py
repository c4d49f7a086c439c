"""The answer of the Responses API as it comes together: a response object, and the events that tell how it grew.

    created -> (queued) -> in_progress -> [item added -> parts, deltas, dones -> item done]* -> completed | incomplete
                                                                                      error -> failed

One item is open at a time; news of another kind, or of another call, closes it. The events' deltas, joined, are the object's
texts, and their numbers count from 0 without a gap. Knows chunks and OpenAI's shapes; knows no HTTP and no store.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from quire.chat.types import Call, CallPart, Chunk
from quire.engine.types import Receipt
from quire.observe.errors import QuireError
from quire.server import errors
from quire.server.feed import News
from quire.server.openai.responses.calls import CALLS, CUSTOM, FUNCTION, SEARCH, Item, Known
from quire.server.openai.responses.items import new_id
from quire.server.openai.responses.opened import Opened, OpenSummary, OpenText, Told, open_call
from quire.server.shared import logprobs as token_logprobs
from quire.server.shared.answers import Thoughts, arguments_of, receipt_body

Event = dict[str, Any]


class Searching(Protocol):
    """Searches for tools that are done here."""

    prompted: int  # tokens of further prompts, which searches made

    def find(self, arguments: Any) -> list[Item]:
        """The tools that the next search finds."""
        ...

    def told(self) -> dict[str, Any]:
        """Quire's own fields about the prompts that searches made."""
        ...


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
        known: Mapping[str, Known],
        compacts: bool = False,
        searches: Searching | None = None,
    ):
        self._body = body
        self._prompt = prompt
        self._summarized = summarized  # the reasoning is told as its summary too
        self._logprobs = logprobs
        self._sealed = sealed  # reasoning items carry themselves wrapped up
        self._told = told  # receipts are asked for
        self._known = known  # what the model's names of tools stand for
        self._compacts = compacts  # the text is a summary of the conversation, and becomes one item
        self._searches = searches  # for tools, where those are done here
        self._number = 0
        self._items: list[Item] = []  # whole ones
        self._open: Opened | None = None
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
        cut = self._finish == "length" and not self._compacts  # a summary that is cut is one still
        if self._compacts and (self._open is None or self._open.kind != "compaction"):
            raise QuireError("the model wrote no summary", cure="try again, or go on with the conversation as it is")
        if self._compacts and self._finish == "length":
            self._note(f"the summary was cut after {self._tokens} tokens")
        if self._searches is not None and (told := self._searches.told()):
            for note in told.pop("notes"):
                self._note(note)
            self._body["quire"] |= told
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

    def _note(self, note: str) -> None:
        told = self._body.get("quire", {})
        self._body["quire"] = told | {"notes": [*told.get("notes", ()), note]}

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
        if chunk.reasoning and not self._compacts:
            yield from self._switch("reasoning")
            yield from self._take(chunk.reasoning)
        if chunk.text:
            yield from self._switch("compaction" if self._compacts else "message")
            yield from self._take(chunk.text, entries)
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
        index = len(self._items)
        self._open = (
            OpenSummary(index) if kind == "compaction" else OpenText(kind, index, self._summarized, self._sealed)
        )
        yield from self._tell(self._open.begin())

    def _call(self, part: CallPart) -> Iterator[Event]:
        if part.index == self._calls:
            yield from self._close("completed")
            self._calls += 1
            known = self._known.get(part.name or "") or Known(name=part.name or "")
            self._open = open_call(len(self._items), known, part.id)
            yield from self._tell(self._open.begin())
        if self._open is None or self._open.kind not in CALLS or part.index != self._calls - 1:
            raise QuireError("the answer went back to a call that was over")
        if part.arguments:
            yield from self._take(part.arguments)

    def _take(self, text: str, entries: list[Any] | None = None) -> Iterator[Event]:
        if self._open is not None:
            yield from self._tell(self._open.take(text, entries or []))

    def _close(self, status: str) -> Iterator[Event]:
        """The open item is whole, or cut."""
        item, self._open = self._open, None
        if item is None:
            return
        yield from self._tell(item.end(status))
        if item.kind == SEARCH and self._items and self._items[-1]["type"] == "tool_search_call":
            yield from self._searched(self._items[-1])

    def _searched(self, call: Item) -> Iterator[Event]:
        """A search that is done here has its result at once."""
        if call["execution"] != "server" or self._searches is None:
            return
        head: Item = {"id": new_id("tool_search_output"), "type": "tool_search_output", "status": "completed"}
        item = head | {"execution": "server", "call_id": None, "tools": self._searches.find(call["arguments"])}
        at = {"output_index": len(self._items)}
        yield from self._tell(iter([("output_item.added", at | {"item": item | {"status": "in_progress"}})]))
        yield from self._tell(iter([("output_item.done", at | {"item": item})]))

    def _tell(self, told: Told) -> Iterator[Event]:
        """Number events. An item that is done is whole from then on."""
        for name, fields in told:
            if name == "output_item.done":
                self._items.append(fields["item"])
            yield self._event(f"response.{name}", **fields)

    def _half_a_call(self) -> bool:
        """A stop string ended the answer inside of a call."""
        item = self._open
        if item is None or item.kind not in CALLS or item.kind == CUSTOM:
            return False
        done = item.done("incomplete")
        return done is None or (item.kind == FUNCTION and arguments_of(Call("", "", done["arguments"])) is None)

    def _abandon(self) -> None:
        """Keep open items as far as they came, without events."""
        if self._open is not None and (item := self._open.done("incomplete")) is not None:
            self._items.append(item)
        self._open = None
        self._body["usage"] = self._usage()

    def _usage(self) -> dict[str, Any]:
        prompt = self._prompt + (0 if self._searches is None else self._searches.prompted)
        cached = 0 if self._receipt is None else self._receipt.cached_tokens
        return {
            "input_tokens": prompt,
            # Prefixes are kept without a price of their own: nothing is counted as written.
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._thoughts.tokens},
            "total_tokens": prompt + self._tokens,
        }
