"""The conformance table: docs/compat.md is what it writes, and the server does what it says, row by row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import ServerConfig
from quire.server import compat
from quire.server.app import create_app
from quire.server.shared.compat import HONOURED, NEUTRAL, NO_EFFECT, REFUSED, Endpoint, Row
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, service_over

ENDPOINTS = compat.endpoints()
WITH_FIELDS = [e for e in ENDPOINTS if e.fields]
IDS = [f"{e.method} {e.path}" for e in WITH_FIELDS]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "compat.md"
ASKS = {"x": 1}  # no neutral value is this
# Routes without a body that stand on no page of the table, or whose body is not JSON.
PLAIN = {"/live", "/health", "/ready", "/version", "/metrics", "/debug/steps"}


def test_the_page_is_what_the_table_writes():
    assert PAGE.read_text(encoding="utf-8") == compat.page(), "run `python -m quire.server.compat docs/compat.md`"


@pytest.mark.parametrize("endpoint", WITH_FIELDS, ids=IDS)
def test_every_field_of_the_api_is_accounted_for(endpoint: Endpoint):
    rows = endpoint.rows()
    names = [row.name for row in rows]
    assert len(names) == len(set(names)), "a field has one fate"
    assert set(endpoint.surface.split()) <= set(names)
    assert endpoint.surface, "name the fields that clients know"
    for row in rows:
        if row.verdict in (NO_EFFECT, REFUSED):
            assert row.note, f"{row.name}: say why"
        if row.verdict == NEUTRAL:
            assert None in row.neutral, f"{row.name}: null means the default"


def test_every_route_is_on_the_page():
    app = create_app(ServerConfig(), service_over(FakeCompleter()))
    known = {e.path for e in ENDPOINTS} | PLAIN
    known |= {path for e in ENDPOINTS for path in re.findall(r"`(/[^`]*)`", e.what)}
    known |= {a.path for a in compat.absent()}
    for route in app.routes:
        path = getattr(route, "path", "").replace("/versions/{version}", "").replace("{name:path}", "{name}")
        assert path in known, f"{path} is in no table"


async def test_what_is_said_not_to_be_here_is_not():
    async with client_for() as http:
        for one in compat.absent():
            if one.path == "/generate" and one.dialect == "SGLang":
                continue  # the same path is TGI's
            path = one.path.replace("{name}", MODEL).replace("…", "x")
            for method in ("GET", "POST"):
                r = await http.request(method, path, **({"json": {}} if method == "POST" else {}))
                assert r.status_code in (one.status, 404, 405), (one, r.status_code)


def body_with(endpoint: Endpoint, row: Row, value: Any) -> dict[str, Any]:
    body = dict(endpoint.example)
    if "model" in body and not body["model"]:
        body["model"] = MODEL
    inside, _, name = row.name.rpartition(".")
    if inside:
        body[inside] = {**body.get(inside, {}), name: value}
    else:
        body[name] = value
    return body


async def send(http: httpx.AsyncClient, endpoint: Endpoint, body: Any) -> httpx.Response:
    return await http.request(endpoint.method, endpoint.path.replace("{name}", MODEL), json=body)


def taken(endpoint: Endpoint, r: httpx.Response) -> bool:
    """Answered; or refused for no other reason than that the scripted engine does not embed, or has no store."""
    return r.status_code == 200 or (endpoint.task != "generate" and _needs_another(r))


def _needs_another(r: httpx.Response) -> bool:
    others = (
        "was loaded to generate",
        "without a model store",
        "is not here",
        "no infill tokens",
        "without a state folder",
        "while this server runs",  # adapters, without the right to load any
    )
    return any(words in r.text for words in others)


def rows_of(*verdicts: str) -> list[Any]:
    found: list[Any] = []
    for endpoint in WITH_FIELDS:
        rows = [row for row in endpoint.rows() if row.verdict in verdicts]
        if rows:
            found.append(pytest.param(endpoint, rows, id=f"{endpoint.method} {endpoint.path}"))
    return found


@pytest.mark.parametrize(("endpoint", "rows"), rows_of(NEUTRAL, REFUSED))
async def test_what_is_refused_is_a_400_that_names_it(endpoint: Endpoint, rows: list[Row]):
    completer = FakeCompleter(context=1000)  # which a request to summarize fits, too
    async with client_for(completer) as http:
        for row in rows:
            r = await send(http, endpoint, body_with(endpoint, row, ASKS if row.verdict == NEUTRAL else row.probe))
            assert r.status_code in (400, 422), (row, r.text)
            assert row.name.rpartition(".")[2] in r.text, (row, r.text)
            for value in row.neutral:
                r = await send(http, endpoint, body_with(endpoint, row, value))
                assert taken(endpoint, r), (row, value, r.text)


@pytest.mark.parametrize(("endpoint", "rows"), rows_of(NO_EFFECT))
async def test_what_has_no_effect_is_taken_with_any_value(endpoint: Endpoint, rows: list[Row]):
    completer = FakeCompleter(context=1000)
    async with client_for(completer) as http:
        await send(http, endpoint, body_with(endpoint, Row("model", HONOURED), MODEL))
        for row in rows:
            for value in (ASKS, "x", 1, None, []):
                r = await send(http, endpoint, body_with(endpoint, row, value))
                assert taken(endpoint, r), (row, value, r.text)
    assert len({str((g.prompt, g.sampling, g.constraint)) for g in completer.seen}) <= 1, "it had an effect"


@pytest.mark.parametrize(("endpoint", "rows"), rows_of(HONOURED))
async def test_null_is_the_default_and_an_unknown_field_is_named(endpoint: Endpoint, rows: list[Row]):
    async with client_for(FakeCompleter(context=1000), strict=True) as http:
        r = await send(http, endpoint, body_with(endpoint, Row("surprise", HONOURED), 1))
        assert r.status_code in (400, 422) and "surprise" in r.text, r.text
        needed = set(endpoint.example)
        for row in rows:
            inside, _, name = row.name.rpartition(".")
            if name in needed and not inside:
                continue
            r = await send(http, endpoint, body_with(endpoint, row, None))
            ok = taken(endpoint, r) or (r.status_code in (400, 422) and "missing" in r.text)
            assert ok, (row.name, r.text)
