"""`quire doctor cache`: asks a running server what made it compute prompts again, and prints it with a cure.

The server keeps that of recent requests in memory, and tells each caller about its own namespace alone. Nothing is changed.
"""

from __future__ import annotations

import contextlib
from urllib.parse import quote, urlsplit

import msgspec
import typer

from quire.cli.terminal import ui
from quire.config import Environment, ServerConfig
from quire.observe.errors import QuireError, Unavailable

PATH = "/v1/cache/breaks"
SECONDS = 10.0
MAX_ANSWER = 4 << 20
SHOWN = 40  # characters of a text that changes


class Break(msgspec.Struct):
    """One place that breaks prompts."""

    agent: str
    cause: str
    why: str = ""
    where: str = ""
    kind: str = ""
    context: str = ""
    before: str = ""
    now: str = ""
    times: int = 0
    lost_tokens: int = 0
    cure: str = ""


class Traffic(msgspec.Struct):
    """One agent's prompts."""

    agent: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    lost_tokens: int


class Told(msgspec.Struct):
    """The server's answer."""

    model: str
    agents: list[Traffic]
    data: list[Break]


def report(env: Environment, url: str | None, model: str | None, key: str | None, json: bool) -> None:
    """Ask, and print."""
    told = ask(url or address(env), model, key or env.api_key)
    if json:
        ui.emit(msgspec.to_builtins(told))
        return
    if not told.agents:
        ui.echo(f"{_clean(told.model)}: no prompt of 512 tokens or more yet, so there is nothing to explain")
        return
    ui.table(("AGENT", "REQUESTS", "PROMPT TOKENS", "FROM CACHE", "COMPUTED AGAIN"), list(map(_line, told.agents)))
    if not told.data:
        ui.echo("\nnothing broke: all that earlier prompts shared came from the cache")
        return
    typer.echo("")
    ui.table(
        ("", "AGENT", "TIMES", "TOKENS", "WHERE", "WHAT", "TEXT"), [_row(i, b) for i, b in enumerate(told.data, 1)]
    )
    cures = {b.cure: [j for j, other in enumerate(told.data, 1) if other.cure == b.cure] for b in told.data if b.cure}
    typer.echo("")
    for cure, places in cures.items():
        ui.echo(f"cure of {', '.join(map(str, places))}: {_clean(cure)}")


def _line(t: Traffic) -> tuple[str, ...]:
    share = f"{t.cached_tokens / max(1, t.prompt_tokens):.0%}"
    return _clean(t.agent) or "unknown", str(t.requests), str(t.prompt_tokens), share, str(t.lost_tokens)


def _row(i: int, b: Break) -> tuple[str, ...]:
    text = f"{_short(b.context, last=True)}|{_short(b.before)} -> {_short(b.now)}" if b.cause == "diverged" else b.why
    row = (str(i), b.agent or "unknown", str(b.times), str(b.lost_tokens), b.where, b.kind or b.cause, text)
    return tuple(map(_clean, row))


def _clean(text: str) -> str:
    """A text without what would move a terminal's cursor: clients wrote some of it."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _short(text: str, last: bool = False) -> str:
    line = _clean(" ".join(text.split()))
    if last and text[-1:].isspace():
        line += " "
    if len(line) <= SHOWN:
        return line
    return "…" + line[-SHOWN:] if last else line[:SHOWN] + "…"


def address(env: Environment) -> str:
    """The only server that runs on this machine; the default address where none says that it does."""
    from quire.cli.ps import find

    servers = [models[0] for models in find(env.home / "run")]
    if len(servers) > 1:
        listed = ", ".join(f"http://{s.host}:{s.port} ({s.model})" for s in servers)
        raise QuireError(f"several servers run on this machine: {listed}", cure="say which with --url")
    found = servers[0] if servers else ServerConfig()
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(found.host, found.host)
    return f"http://{host}:{found.port}"


def ask(url: str, model: str | None, key: str | None) -> Told:
    """What the server says. Raises QuireError where it cannot be asked."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise QuireError(f"{url[:200]!r} is no address of a server", cure="--url http://127.0.0.1:8000")
    base = parts.path.rstrip("/").removesuffix("/v1")
    path = base + PATH + (f"?model={quote(model, safe='')}" if model else "")
    made = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    try:
        connection = made(parts.hostname, parts.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            status, data = answer.status, answer.read(MAX_ANSWER)
    except (OSError, HTTPException, ValueError) as e:
        raise Unavailable(f"{url} does not answer: {e}", cure="`quire ps` lists the servers here") from None
    if status == 401:
        raise QuireError(f"{url} asks for a key", cure="give it with --api-key, or in QUIRE_API_KEY")
    try:
        if status != 200:
            raise QuireError(f"{url} answered {status}: {msgspec.json.decode(data)['error']['message'][:500]}")
        return msgspec.json.decode(data, type=Told)
    except (msgspec.MsgspecError, KeyError, TypeError):
        raise QuireError(
            f"{url} answered {status}, and not as this version of Quire does", cure="restart the server"
        ) from None
