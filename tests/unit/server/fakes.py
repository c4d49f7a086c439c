"""A scripted engine behind the server: byte tokens, a fixed answer, and switches for every way it can go wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx

from quire.chat.infill import Infill
from quire.chat.tools.types import Tools
from quire.chat.types import Chunk, Generation, TokenLogprob, TokenText
from quire.config import ServerConfig
from quire.engine.types import Constraint, EngineInfo, Receipt, Stats
from quire.observe.errors import BadRequest, QuireError
from quire.observe.steps import StepInfo
from quire.server.app import create_app
from quire.server.served import Model
from quire.server.server import Server

MODEL = "fake:1b"
VOCAB = 300  # 256 bytes, then specials
EOS = 256
URL = "http://127.0.0.1"


class FakeTokenizer:
    """One token per byte."""

    vocab_size = ordinary_size = VOCAB
    max_token_bytes = 5
    add_bos = add_eos = False
    bos_id: int | None = None
    eos_id: int | None = EOS
    infill: Infill | None = None

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def is_special(self, token: int) -> bool:
        return token >= 256

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def token_text(self, token: int) -> str:
        return bytes([token]).decode(errors="replace") if token < 256 else f"<{token}>"


class FakeTemplate:
    """Reads whatever words its source has."""

    def __init__(self, source: str = "{{ messages }}"):
        self.source = source

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self.source))

    def conversation(self, messages: list[dict[str, Any]], **given: Any) -> Any:
        raise BadRequest("this one only says what it reads")


class FakeClient:
    """Only what the server asks an engine client directly."""

    def __init__(self) -> None:
        self.alive = True
        self.snapshot = Stats(running=1, waiting=2, pages_total=100, pages_used=25, prompt_tokens=7, output_tokens=9)
        self.closed: float | None = None

    def stats(self) -> Stats:
        return self.snapshot

    async def steps(self, most: int = 256) -> list[StepInfo]:
        kept = [StepInfo(i, 0.5, float(i), [("chatcmpl-1", 1), ("chatcmpl-2", 16)], 3, {"slots": 3}) for i in range(4)]
        return kept[-most:] if most else []

    async def close(self, drain_seconds: float = 0.0) -> None:
        self.closed = drain_seconds


class FakeCompleter:
    """Answers every prompt with `answer`, a byte a token, `delay` seconds apart; choice i gets its index appended."""

    def __init__(self, answer: str = "Hello, wörld", context: int = 200):
        self.info = EngineInfo(
            model=MODEL,
            architecture="fake",
            vocab_size=VOCAB,
            context=context,
            max_seqs=4,
            max_batch_tokens=64,
            pages=100,
            page_size=16,
            backend="fake (2 threads)",
            weight_bytes=1000,
            kv_bytes=1000,
        )
        self.client = FakeClient()
        self.tokenizer = FakeTokenizer()
        self.template = FakeTemplate()
        self.answer_format: Any = None  # a Format: what the model writes besides text
        self.script: list[Chunk] | None = None  # news of choice 0, in place of `answer`
        self.asked: list[tuple[Tools, Constraint | None]] = []  # what `answering` was called with
        self.enforces: Constraint | None = None  # what it answers with, if anything
        self.answer = answer
        self.delay = 0.0
        self.gate: asyncio.Event | None = None  # nothing comes before it is set, but
        self.free = 0  # ... for the next so many requests
        self.gate_at = 0  # how many tokens pass it
        self.held = 0  # how many requests wait at it
        self.raises: QuireError | None = None  # before any token
        self.dies: Exception | None = None  # after three tokens
        self.error_event: str | None = None
        self.seen: list[Generation] = []
        self.rendered: list[tuple[list[dict[str, Any]], dict[str, Any]]] = []
        self.running = 0
        self.most = 0  # that ran at a time
        self.aborted = 0

    @property
    def prompts_tools(self) -> bool:
        return self.answer_format is None or not self.answer_format.calls

    async def encode_prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    async def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        self.rendered.append((messages, kwargs))
        return self.tokenizer.encode("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    async def answering(
        self, prompt_ids: list[int], tools: Tools, answer: Constraint | None
    ) -> tuple[Any, Constraint | None]:
        self.asked.append((tools, answer))
        return self.answer_format and "a reading", self.enforces or answer

    def check(self, generation: Generation) -> None:
        """Finds no fault."""

    async def stream(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        self.seen.append(generation)
        self.running += 1
        self.most = max(self.most, self.running)
        done = False
        try:
            async for chunk in self._chunks(generation):
                yield chunk
            done = True
        finally:
            self.running -= 1
            self.aborted += not done

    async def _chunks(self, g: Generation) -> AsyncIterator[Chunk]:
        if self.raises is not None:
            raise self.raises
        if self.gate_at == 0:
            await self._wait()
        if self.error_event is not None:
            yield Chunk(finish="error", error=self.error_event)
            return
        s = g.sampling
        if self.script is not None:
            for chunk in self.script:
                await asyncio.sleep(self.delay)
                yield chunk
            return
        for index in range(s.n):
            data = (self.answer + (str(index) if index else "")).encode()
            finish = "stop"
            if s.max_tokens is not None and len(data) > s.max_tokens:
                data, finish = data[: s.max_tokens], "length"
            held = b""
            for i, byte in enumerate(data):
                await asyncio.sleep(self.delay)
                if i == self.gate_at > 0:
                    await self._wait()
                if self.dies is not None and i == 3:
                    raise self.dies
                held += bytes([byte])
                try:
                    text, held = held.decode(), b""
                except UnicodeDecodeError:
                    text = ""
                last = i == len(data) - 1
                receipt = Receipt(
                    prompt_tokens=len(g.prompt),
                    output_tokens=len(data),
                    cached_tokens=min(16, len(g.prompt)),
                    seed=1234 if s.seed is None else s.seed,
                    queue_seconds=0.01,
                    prefill_seconds=0.02,
                    decode_seconds=0.03,
                )
                yield Chunk(
                    index=index,
                    text=text,
                    tokens=[byte],
                    logprobs=[self._entry(byte, s.logprobs)] if s.logprobs is not None else [],
                    prompt_logprobs=[self._entry(t, s.prompt_logprobs) for t in g.prompt[1:]]
                    if s.prompt_logprobs is not None and index == 0 and i == 0
                    else [],
                    finish=finish if last else None,
                    receipt=receipt if last else None,
                )

    async def _wait(self) -> None:
        if self.gate is None or self.free > 0:
            self.free -= self.free > 0
            return
        self.held += 1
        try:
            await self.gate.wait()
        finally:
            self.held -= 1

    def _entry(self, token: int, k: int | None) -> TokenLogprob:
        def text(t: int) -> TokenText:
            raw = bytes([t]) if t < 256 else b""
            return TokenText(t, raw.decode(errors="replace"), raw)

        best = [(text((token + j) % 256), -0.5 - j) for j in range(k or 0)]
        return TokenLogprob(text(token), -0.5, 1, best)


CALLER = SimpleNamespace(name="fake", reasons=True, calls=True, markers=())  # a Format that finds everything


def service_over(completer: FakeCompleter, config: ServerConfig | None = None) -> Server:
    """A ready service."""
    service = Server(config or ServerConfig(), [Model(MODEL)])
    service.attach(service.models.first, completer.client, completer)
    return service


@asynccontextmanager
async def client_for(
    completer: FakeCompleter | None = None,
    config: ServerConfig | None = None,
    service: Server | None = None,
    *,
    strict: bool = False,
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client wired straight into the app. A strict one's requests want unknown fields refused."""
    config = config or ServerConfig()
    service = service or service_over(completer or FakeCompleter(), config)
    app = create_app(config, service)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    headers = {"x-quire-strict": "true"} if strict else {}
    async with httpx.AsyncClient(transport=transport, base_url=URL, trust_env=False, headers=headers) as client:
        yield client


async def settled(turns: int = 50) -> None:
    """Whatever can happen without waiting has happened."""
    for _ in range(turns):
        await asyncio.sleep(0)


def opened_by(http: httpx.AsyncClient, word: bytes, times: int) -> asyncio.Event:
    """A completer's gate that opens once the server has sent `word` so many times."""
    transport: Any = http._transport
    app, gate, left = transport.app, asyncio.Event(), times

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            nonlocal left
            left -= message.get("body", b"").count(word)
            if left <= 0:
                gate.set()
            await send(message)

        await app(scope, receive, sent)

    transport.app = watched
    return gate


def events(text: str) -> list[Any]:
    """The data of an event stream, `[DONE]` included, comments left out."""
    import json

    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block[6:]
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
