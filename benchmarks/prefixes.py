"""Which part of recorded agents' prompts comes from the prefix cache, without a model: real tokenizer, template, dialects and prefix tree.

    python -m benchmarks.prefixes FOLDER... [--model qwen2.5-coder:1.5b] [--canonicalize auto]

A FOLDER has the requests that one agent sent, in order: NNN.json with `path`, `headers`, `body` (the JSON that was sent) and `answer` (the whole body or stream that
came back). Each is sent to the server's own routes in one process. The engine behind them computes nothing: it looks the prompt up in a real `PrefixTree`
and answers what the recording answered, written as the model's own format writes calls, and both are published. So what the next request brings back of
an answer is compared with what was generated, through the same parser, dialect and template as ever.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.chat.canonical import names
from quire.chat.completer import Completer
from quire.chat.loading import tokenizer_and_template
from quire.chat.templates.template import ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.config import ServerConfig
from quire.engine.types import EngineInfo, Event, Receipt, Request, Stats, Vocabulary
from quire.observe.steps import StepInfo
from quire.server.app import create_app
from quire.server.served import Model
from quire.server.server import Server
from quire.weights.checkpoint import open_checkpoint
from quire.weights.store.store import Store

PAGE = 16
PAGES = 1 << 15  # half a million tokens: nothing is evicted unless that is asked for
CONTEXT = 1 << 17
NAME = "replayed"


@dataclass(slots=True)
class Seen:
    """One prompt that reached the engine."""

    prompt: int
    cached: int
    first: bool = (
        False  # of its conversation: no earlier request has its system prompt's first words and its first question
    )


@dataclass(slots=True)
class Said:
    """An answer as it was recorded."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # names, and arguments as JSON


class TreeClient:
    """An EngineClient that answers what it is told, and caches as an engine does."""

    def __init__(self, info: EngineInfo, pages: int = PAGES):
        self.info: EngineInfo | None = info
        self.alive = True
        self.tree = PrefixTree(Pool(pages), PAGE)
        self.says: list[int] = []
        self.seen: list[Seen] = []

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        tokens, said = list(request.tokens), self.says
        room = request.sampling.max_tokens
        length = room is not None and len(said) > room
        said = said[:room] if length else said
        lease = self.tree.match(request.namespace, tokens, len(tokens) - 1)
        cached = lease.shared * PAGE
        whole = [*tokens, *said]
        if not self.tree.extend(lease, len(whole)):
            raise RuntimeError("the pool is too small for this prompt")
        self.tree.publish(lease, whole, len(whole) - 1)  # the last token was sampled and not computed
        self.tree.release(lease)
        self.seen.append(Seen(len(tokens), cached))
        receipt = Receipt(prompt_tokens=len(tokens), output_tokens=len(said), cached_tokens=cached)
        yield Event(id=request.id, tokens=said, finish="length" if length else "stop", receipt=receipt)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        pass

    def abort(self, request_id: str) -> None:
        pass

    def stats(self) -> Stats:
        return Stats(evictions=self.tree.evictions, pages_total=self.tree.pool.size)

    async def steps(self, most: int = 0) -> list[StepInfo]:
        return []

    async def start(self) -> EngineInfo:
        assert self.info is not None
        return self.info

    async def close(self, drain_seconds: float = 0.0) -> None:
        self.alive = False


class Replay:
    """A server in this process whose engine replays."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        canonicalize: tuple[str, ...] = (),
        pages: int = PAGES,
        api_keys: tuple[tuple[str, str], ...] = (),
    ):
        info = EngineInfo(
            model=NAME,
            architecture="none",
            vocab_size=tokenizer.vocab_size,
            context=CONTEXT,
            max_seqs=8,
            max_batch_tokens=512,
            pages=pages,
            page_size=PAGE,
            backend="none",
            weight_bytes=0,
            kv_bytes=0,
        )
        self.tokenizer = tokenizer
        self.client = TreeClient(info, pages)
        self.config = ServerConfig(canonicalize=canonicalize, api_keys=api_keys)
        self.server = Server(self.config, [Model(NAME)])
        self.server.attach(self.server.models.first, self.client, Completer(self.client, tokenizer, template, info))

    def http(self) -> httpx.AsyncClient:
        """A client wired into the server."""
        app = create_app(self.config, self.server)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1", trust_env=False)

    def says(self, said: Said) -> None:
        """What the next answer is, in the form that Qwen's and Hermes' models write."""
        calls = [
            f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {_spaced(arguments)}}}\n</tool_call>'
            for name, arguments in said.calls
        ]
        text = "\n".join([*([said.text] if said.text else []), *calls])
        ids = self.tokenizer.encode(text, add_special=False, parse_special=True)
        self.client.says = [*ids, *list(self.tokenizer.eos_ids)[:1]]


def _spaced(arguments: str) -> str:
    """Arguments with the blanks that models write into JSON, keys in the order in which they were sent."""
    try:
        return json.dumps(json.loads(arguments or "{}"), ensure_ascii=False)
    except ValueError:
        return arguments


# Recordings


def answer_of(path: str, raw: str) -> Said:
    """What an answer said: a stream of any of the three dialects, or a body."""
    events = [json.loads(line[5:]) for line in raw.splitlines() if line.startswith("data:") and "[DONE]" not in line]
    if not events:
        events = [json.loads(raw)] if raw.strip() else []
    if path.endswith("/messages"):
        return _blocks(events)
    if path.endswith("/responses"):
        return _items(events)
    return _chunks(events)


def _chunks(events: list[dict[str, Any]]) -> Said:
    said, calls = Said(), dict[int, list[str]]()
    for event in events:
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice.get("message") or {}
            said.text += delta.get("content") or ""
            for i, call in enumerate(delta.get("tool_calls") or ()):
                made = calls.setdefault(call.get("index", i), ["", ""])
                made[0] += call["function"].get("name") or ""
                made[1] += call["function"].get("arguments") or ""
    said.calls = [(name, arguments) for name, arguments in calls.values()]
    return said


def _blocks(events: list[dict[str, Any]]) -> Said:
    said, calls = Said(), dict[int, list[str]]()
    for event in events:
        for block in event.get("content") or ():  # a whole body
            if block["type"] == "text":
                said.text += block["text"]
            elif block["type"] == "tool_use":
                said.calls.append((block["name"], json.dumps(block["input"])))
        block, delta = event.get("content_block") or {}, event.get("delta") or {}
        if block.get("type") == "tool_use":
            calls[event["index"]] = [block["name"], ""]
        said.text += delta.get("text") or ""
        if delta.get("type") == "input_json_delta":
            calls[event["index"]][1] += delta["partial_json"]
    said.calls += [(name, arguments) for name, arguments in calls.values()]
    return said


def _items(events: list[dict[str, Any]]) -> Said:
    said = Said()
    for event in events:
        if event.get("type") not in ("response.completed", "response.incomplete") and "output" not in event:
            continue
        for item in (event.get("response") or event)["output"]:
            if item["type"] == "message":
                said.text += "".join(part.get("text", "") for part in item["content"])
            elif item["type"] == "function_call":
                said.calls.append((item["name"], item["arguments"]))
    return said


def recordings(folder: Path) -> Iterable[dict[str, Any]]:
    """The requests of a folder that have a body, in order."""
    for path in sorted(folder.glob("*.json")):
        made = json.loads(path.read_text())
        body = made.get("body")
        made["body"] = json.loads(body) if isinstance(body, str) and body.startswith("{") else body
        if isinstance(made["body"], dict) and made.get("status", 200) == 200 and made.get("method", "POST") == "POST":
            yield made


@dataclass(slots=True)
class Outcome:
    """What became of one agent's requests."""

    seen: list[Seen]
    told: dict[str, Any]  # what GET /v1/cache/breaks says at the end
    statuses: list[int]

    @property
    def rate(self) -> float:
        """The share of prompt tokens that the cache gave, from the second request of each conversation on."""
        later = [s for s in self.seen if not s.first]
        return sum(s.cached for s in later) / max(1, sum(s.prompt for s in later))


def opening(body: dict[str, Any]) -> str:
    """What tells a conversation from others: the first words of its instructions, and the first thing that the user says."""
    turns = body.get("messages", body.get("input")) or []
    system = [body.get("instructions"), body.get("system")]
    system += [turn.get("content") for turn in turns if turn.get("role") in ("system", "developer")]
    said = [turn.get("content") for turn in turns if turn.get("role") == "user"]
    texts = [" ".join(_texts(system)).partition("You")[2], " ".join(_texts(said[:1]))]
    return "|".join(text[:100] for text in texts)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(value.get("text"))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


async def replay(server: Replay, requests: Iterable[dict[str, Any]]) -> Outcome:
    """Send requests in order, each with its recorded answer, and see what was cached."""
    statuses: list[int] = []
    begun: set[str] = set()
    async with server.http() as http:
        for one in requests:
            server.says(answer_of(one["path"], one["answer"]))
            agent = next((v for k, v in dict(one["headers"]).items() if k.lower() == "user-agent"), "")
            count = len(server.client.seen)
            reply = await http.post(
                one["path"], json=one["body"] | {"model": NAME}, headers={"user-agent": agent}, timeout=600
            )
            statuses.append(reply.status_code)
            if count < len(server.client.seen):
                server.client.seen[-1].first = (begin := opening(one["body"])) not in begun
                begun.add(begin)
            if reply.status_code != 200:
                print(one["path"], reply.status_code, reply.text[:500], file=sys.stderr)
        told = (await http.get("/v1/cache/breaks")).json()
    return Outcome(server.client.seen, told, statuses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--model", default="qwen2.5-coder:1.5b")
    parser.add_argument("--canonicalize", default="none")
    parser.add_argument("--template", help="a file with another chat template")
    args = parser.parse_args()
    with open_checkpoint(Store().pull(args.model)) as checkpoint:
        tokenizer, template = tokenizer_and_template(checkpoint, args.template)
    print(
        f"{'agent':12} {'requests':>8} {'later':>8} {'prompt':>8} {'cached':>8} {'hit rate':>8}  each (* begins a conversation)"
    )
    for folder in args.folders:
        server = Replay(tokenizer, template, names(args.canonicalize, "--canonicalize"))
        done = asyncio.run(replay(server, recordings(folder)))
        later = [s for s in done.seen if not s.first]
        prompt, cached = sum(s.prompt for s in later), sum(s.cached for s in later)
        each = " ".join(f"{s.cached}/{s.prompt}{'*' * s.first}" for s in done.seen)
        print(f"{folder.name:12} {len(done.seen):8} {len(later):8} {prompt:8} {cached:8} {done.rate:8.1%}  {each}")
        for one in done.told["data"]:
            print(f"    {one}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
