"""Who may talk to the server: keys, hosts, origins. Every route is refused without the key but the two probes."""

from __future__ import annotations

import inspect

import httpx
import pytest

from quire.config import ServerConfig
from quire.server import middleware
from quire.server.app import create_app
from tests.unit.server.fakes import MODEL, URL, FakeCompleter, client_for, service_over

KEY = "s3cret"
GOOD = {"authorization": f"Bearer {KEY}"}
CHAT, ANTHROPIC = "/v1/chat/completions", "/v1/messages"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def routes(config: ServerConfig) -> list[tuple[str, str]]:
    app = create_app(config, service_over(FakeCompleter(), config))
    found = []
    for route in app.routes:
        path = getattr(route, "path", "").replace("{model_id:path}", MODEL)
        found += [(method, path) for method in getattr(route, "methods", None) or ()]
    return found


async def test_every_route_needs_the_key_but_the_probes():
    config = ServerConfig(api_key=KEY)
    all_routes = routes(config)
    assert len(all_routes) >= 10
    async with client_for(config=config) as http:
        for method, path in all_routes:
            r = await http.request(method, path)
            with_key = await http.request(method, path, headers=GOOD)
            if path.startswith(ANTHROPIC):  # its errors have another shape
                assert (r.status_code, r.json()["error"]["type"]) == (401, "authentication_error")
                assert with_key.status_code != 401
                continue
            if path in ("/live", "/health", "/ready"):
                assert r.status_code == 200, path
            else:
                assert r.status_code == 401, path
                assert r.headers["www-authenticate"] == "Bearer"
                assert with_key.status_code != 401
                if method == "HEAD":
                    continue  # an answer without a body
                assert "needs an API key" in r.json()["error"] or "needs an API key" in r.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nope",
        "//health",
        "/health/",
        "/HEALTH",
        "/health/../metrics",
        "/v1//models",
        "//v1/models",
        "/V1/models",
        "/%68ealth/",
        "/v1/models/",
    ],
)
async def test_lookalike_paths_stay_closed(path: str):
    async with client_for(config=ServerConfig(api_key=KEY)) as http:
        r = await http.request("GET", httpx.URL(URL).copy_with(raw_path=path.encode()))
        assert r.status_code == 401


@pytest.mark.parametrize(
    "header",
    [
        "",
        "s3cret",
        "Bearer",
        "Bearer ",
        "Bearer s3cre",
        "Bearer s3crett",
        "Bearer S3CRET",
        "Basic s3cret",
        "Bearer \xff",
    ],
)
async def test_wrong_keys(header: str):
    async with client_for(config=ServerConfig(api_key=KEY)) as http:
        r = await http.post(CHAT, json=HI, headers=[(b"authorization", header.encode("latin-1"))])
        assert r.status_code == 401
        r = await http.post(CHAT, json=HI, headers={"authorization": f"bearer {KEY}"})
        assert r.status_code == 200


async def test_two_keys_are_none():
    async with client_for(config=ServerConfig(api_key=KEY)) as http:
        double = [(b"authorization", b"Bearer x"), (b"authorization", f"Bearer {KEY}".encode())]
        assert (await http.get("/v1/models", headers=double)).status_code == 401


async def test_anthropics_header_holds_the_key_too():
    body = HI | {"model": MODEL, "max_tokens": 5}
    async with client_for(config=ServerConfig(api_key=KEY)) as http:

        async def status(*headers: tuple[str, str]) -> int:
            return (await http.post(ANTHROPIC, json=body, headers=list(headers))).status_code

        good, bad = ("x-api-key", KEY), ("x-api-key", "s3cre")
        assert await status(good) == 200
        assert await status(("authorization", f"Bearer {KEY}")) == 200
        assert await status(good, ("authorization", "Bearer another")) == 200  # clients with both send both
        assert await status(bad, ("authorization", f"Bearer {KEY}")) == 200
        for wrong in ([bad], [("x-api-key", "")], [("x-api-key", f"Bearer {KEY}")], [good, bad], [bad, good]):
            assert await status(*wrong) == 401, wrong
        refused = await http.post(ANTHROPIC, json=body)
        assert refused.json()["error"]["type"] == "authentication_error"
        assert (await http.post(CHAT, json=HI, headers=[good])).status_code == 200


def test_the_key_is_compared_in_constant_time():
    source = inspect.getsource(middleware.KeyCheck)
    assert "hmac.compare_digest(key.strip(), known)" in source
    assert "== known" not in source and "break" not in source  # nor does it stop at the right one


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:1", "[::1]:80", "[::1]", "localhost.", "my.name"]
)
async def test_local_names_are_answered(host: str):
    async with client_for(config=ServerConfig(allowed_hosts=("my.name",))) as http:
        assert (await http.get("/health", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "",
        "[::1].evil.example",
        "localhost:80@evil",
        "0.0.0.0",
        "10.0.0.1",
    ],
)
async def test_foreign_names_are_not(host: str):
    async with client_for() as http:
        for path in ("/health", "/v1/models"):
            r = await http.get(path, headers={"host": host})
            assert r.status_code == 403
            assert r.json()["error"]["code"] == "forbidden_host"


async def test_a_public_bind_answers_to_any_name_unless_told():
    async with client_for(config=ServerConfig(host="0.0.0.0")) as http:
        assert (await http.get("/health", headers={"host": "public.example"})).status_code == 200
    async with client_for(config=ServerConfig(host="0.0.0.0", allowed_hosts=("public.example",))) as http:
        assert (await http.get("/health", headers={"host": "public.example"})).status_code == 200
        assert (await http.get("/health", headers={"host": "other.example"})).status_code == 403


async def test_cors_is_off_by_default():
    async with client_for() as http:
        r = await http.get("/v1/models", headers={"origin": "https://evil.example"})
        assert not [h for h in r.headers if h.startswith("access-control")]
        preflight = await http.options(
            CHAT, headers={"origin": "https://evil.example", "access-control-request-method": "POST"}
        )
        assert preflight.status_code == 405
        assert not [h for h in preflight.headers if h.startswith("access-control")]


async def test_cors_for_configured_origins_only():
    config = ServerConfig(cors_origins=("https://mine.example",), api_key=KEY)
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    async with client_for(config=config) as http:
        mine = await http.options(CHAT, headers={"origin": "https://mine.example"} | ask)
        assert mine.status_code == 204
        assert mine.headers["access-control-allow-origin"] == "https://mine.example"
        assert {"authorization", "x-api-key", "anthropic-version"} <= set(
            mine.headers["access-control-allow-headers"].split(", ")
        )
        evil = await http.options(CHAT, headers={"origin": "https://evil.example"} | ask)
        assert evil.status_code == 403
        assert "access-control-allow-origin" not in evil.headers
        r = await http.post(CHAT, json=HI, headers=GOOD | {"origin": "https://mine.example"})
        assert r.status_code == 200
        assert r.headers["access-control-allow-origin"] == "https://mine.example"
        assert "access-control-allow-credentials" not in r.headers
        r = await http.post(CHAT, json=HI, headers=GOOD | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in r.headers


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.1.1.1", False),
        ("name.example", False),
    ],
)
def test_what_is_loopback(host: str, loopback: bool):
    assert middleware.is_loopback(host) is loopback
