"""Peers' programs: found, asked and read; a stand-in that prints what llama.cpp's print. And the streaming client."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import client, cpu, files, peers
from benchmarks.client import Load
from benchmarks.sections import decode, prefill, streams
from benchmarks.world import World
from quire.observe.errors import NotFound
from quire.weights.store.store import Store

BENCH = """
    import itertools, json, sys
    if "--version" in sys.argv:
        print("version: 9 (abc)", file=sys.stderr); print("built with cc", file=sys.stderr); sys.exit()
    a = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if "broken" in a["-m"]:
        sys.exit("no such tensor")
    for fa, p, d in itertools.product(a["-fa"].split(","), a["-p"].split(","), a["-d"].split(",")):
        n = int(a["-n"])
        speed = (2 if fa == "on" else 1) * 100 + int(d) / 1000 + int(p) / 1000
        print("noise")
        print(json.dumps({"flash_attn": int(fa == "on"), "n_prompt": int(p), "n_gen": n, "n_depth": int(d), "avg_ts": speed}))
"""
BATCHED = """
    import json, sys
    a = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    for pl in a["-npl"].split(","):
        print(json.dumps({"pl": int(pl), "speed_tg": int(pl) * (3.0 if a["-fa"] == "on" else 2.0)}))
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, code in (("llama-bench", BENCH), ("llama-batched-bench", BATCHED)):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}")
        path.chmod(0o755)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path


def test_found_and_missing(programs: Path) -> None:
    assert peers.find("llama-bench") == str(programs / "llama-bench")
    assert peers.version() == "version: 9 (abc), built with cc"
    assert peers.find("llama-server") is None
    assert "LLAMA_CPP" in peers.missing("llama-server")


def test_decode_and_prefill_of_every_setting(programs: Path) -> None:
    found = decode.llama(Path("m.gguf"), 2, 64, (0, 2048))
    assert found == {
        ("depth 0", "-fa off"): 100,
        ("depth 2048", "-fa off"): 102.048,
        ("depth 0", "-fa on"): 200,
        ("depth 2048", "-fa on"): 202.048,
    }
    assert prefill.llama(Path("m.gguf"), 2, (128, 512))["512 tokens", "-fa on"] == 200.512


def test_streams_of_every_setting(programs: Path) -> None:
    found = streams.llama(Path("m.gguf"), 2, [1, 8])
    assert found == {
        ("1 stream", "-fa off"): 2,
        ("8 streams", "-fa off"): 16,
        ("1 stream", "-fa on"): 3,
        ("8 streams", "-fa on"): 24,
    }


def test_a_peer_that_fails_says_so_in_its_own_words(programs: Path) -> None:
    with pytest.raises(RuntimeError, match="no such tensor"):
        peers.bench(Path("broken.gguf"), 2, prompt=8)


def test_without_peers_there_is_ours_alone_and_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    groups = cpu.collect(["decode", "streams", "served", "start"], World(tmp_path, 2, make=False))
    for group in groups:
        assert [s.name for s in group.sides] == ["quire"]
        assert any("LLAMA_CPP" in note for note in group.notes)


def test_files_that_cannot_be_made_are_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    files.path_of(tmp_path, files.SMALL, "Q4_1").touch()
    monkeypatch.setattr("quire.weights.store.store.Store.resolve", lambda self, name: tmp_path / "default.gguf")
    world = World(tmp_path, 2)
    assert world.pairs(("q4_1", "q8_0"), (files.SMALL,)) == [(files.SMALL, "q4_1")]
    assert "llama-quantize" in world.without[f"{files.SMALL} q8_0"]


def test_the_default_model_is_fetched_on_a_machine_that_never_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "fetched.gguf"

    def absent(self: Store, name: str) -> Path:
        raise NotFound(f"{name} is not on this machine", cure="", param="model")

    monkeypatch.setattr(Store, "resolve", absent)
    monkeypatch.setattr(Store, "pull", lambda self, name, progress: fetched)
    assert files.prepare(tmp_path / "made", files.SMALL, "Q4_1").readlink() == fetched


async def serve(
    tokens: int, chunks: int, status: str = "200 OK"
) -> tuple[asyncio.Server, int, list[dict[str, object]]]:
    """A server that streams `chunks` chunks and claims `tokens` tokens."""
    asked: list[dict[str, object]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(
            next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")).split(b":")[1]
        )
        asked.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
        for i in range(chunks):
            await asyncio.sleep(1.5 if i else 0.05)
            writer.write(b'data: {"choices": [{"text": "x"}]}\n\n')
        writer.write(
            f'data: {{"choices": [], "usage": {{"completion_tokens": {tokens}}}}}\n\ndata: [DONE]\n\n'.encode()
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1], asked


async def test_the_client_times_first_tokens_and_shares_the_prefix() -> None:
    server, port, asked = await serve(tokens=2, chunks=2)
    async with server:
        answer = await asyncio.to_thread(client.drive, port, Load("shared", requests=4, output=2, concurrency=2))
    assert len(answer.first) == 4
    assert all(0.05 <= first < 1.5 for first in answer.first)  # the second chunk comes that much later
    assert 8 / 30 < answer.tokens_per_second < 8 / 3.1  # two at a time: two waves of 1.55 s
    prompts = [str(a["prompt"]) for a in asked]
    assert all(p.startswith("shared") for p in prompts)
    assert len(set(prompts)) == 4
    assert all(a["temperature"] == 0 and a["ignore_eos"] and a["max_tokens"] == 2 for a in asked)


async def test_an_answer_that_is_too_short_is_an_error() -> None:
    server, port, _ = await serve(tokens=3, chunks=1)
    async with server:
        with pytest.raises(RuntimeError, match="3 tokens: 4 were asked for"):
            await asyncio.to_thread(client.drive, port, Load("x", requests=1, output=4))


async def test_a_first_token_that_comes_in_two_pieces_counts_when_it_is_whole() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in (b'HTTP/1.1 200 OK\r\n\r\ndata: {"choices": []}\n\ndata: {"choices": [{"te', b'xt": "x"}]}\n\n'):
            writer.write(piece)
            await asyncio.sleep(0.3)
        writer.write(b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\ndata: [DONE]\n\n')
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        found = await asyncio.to_thread(client.drive, port, Load("x", requests=1, output=4))
    assert 0.29 <= found.first[0] < 0.59


async def test_an_answer_without_a_token_is_not_an_early_one() -> None:
    server, port, _ = await serve(tokens=4, chunks=0)
    async with server:
        with pytest.raises(RuntimeError, match="streamed no token"):
            await asyncio.to_thread(client.drive, port, Load("x", requests=1, output=4))


async def test_an_error_status_is_an_error() -> None:
    server, port, _ = await serve(tokens=0, chunks=0, status="503 Busy")
    async with server:
        with pytest.raises(RuntimeError, match="503"):
            await asyncio.to_thread(client.drive, port, Load("x", requests=1, output=4))


def test_percentiles() -> None:
    answer = client.Answer(1.0, [float(i) for i in range(100, 0, -1)])
    assert answer.at(0.5) == 51
    assert answer.at(0.99) == 100
    assert client.Answer(1.0, [7.0]).at(0.99) == 7
