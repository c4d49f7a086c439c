"""Breaks of the prefix cache over HTTP: in receipts, in metrics, at /v1/cache/breaks; canonicalization as it is asked for.

The server is real, and so is the prefix tree behind it; only the model is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from benchmarks.prefixes import NAME, Replay, Said
from quire.chat.canonical import names
from tests.unit.chat.prefixes.kit import template, tokenizer

RULES = " ".join(f"Rule {n}: do thing number {n * 7}." for n in range(60))
TOOL = {"description": "Does it.", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}


def server(canonicalize: str = "none", **more: Any) -> Replay:
    return Replay(tokenizer(), template(), names(canonicalize, "test"), **more)


def functions(*called: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, **TOOL}} for name in called]


def chat(system: str, *said: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said or ("hi",))]
    return {"model": NAME, "messages": [{"role": "system", "content": system}, *turns], "receipts": True, **more}


async def receipt(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    r = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert r.status_code == 200, r.text
    return r.json()["quire"]["receipts"][0]


def in_chat(system: str) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", chat(system)


def in_messages(system: str) -> tuple[str, dict[str, Any]]:
    user = [{"role": "user", "content": "hi"}]
    return "/v1/messages", {"model": NAME, "max_tokens": 99, "system": system, "messages": user, "receipts": True}


def in_responses(system: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": NAME, "instructions": system, "input": "hi", "receipts": True, "store": False}


def in_ollama(system: str) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {**chat(system), "stream": False}


@pytest.mark.parametrize("dialect", [in_chat, in_messages, in_responses, in_ollama])
async def test_a_break_is_told_in_the_receipt_of_every_dialect(dialect: Callable[[str], tuple[str, dict[str, Any]]]):
    replay = server()
    replay.says(Said("fine"))
    async with replay.http() as http:
        for day in (19, 20):
            path, body = dialect(f"Today is 2026-11-{day}.\n{RULES}")
            r = await http.post(path, json=body)
            assert r.status_code == 200, r.text
        told = r.json()["quire"]["receipts"][0]["prefix"]
    assert (told["cause"], told["part"], told["where"], told["kind"]) == (
        "diverged",
        "system",
        "messages[0] (system)",
        "date",
    )
    assert told["before"] == "2026-11-19."
    assert told["now"] == "2026-11-20."
    assert told["lost_tokens"] >= len(RULES)
    assert "--canonicalize dates" in told["cure"]


async def test_streams_tell_it_too():
    replay = server()
    replay.says(Said("fine"))
    async with replay.http() as http:
        for system in ("one", "two"):
            r = await http.post("/v1/chat/completions", json=chat(f"{system}\n{RULES}", stream=True))
        lines = [json.loads(x[6:]) for x in r.text.splitlines() if x.startswith("data: {")]
        (told,) = [line["quire"]["receipts"][0]["prefix"] for line in lines if "quire" in line]
        assert told["cause"] == "diverged"
        for system in ("three", "four"):
            path, body = in_messages(f"{system}\n{RULES}")
            r = await http.post(path, json=body | {"stream": True})
        (told,) = [json.loads(x[6:])["quire"]["receipts"][0] for x in r.text.splitlines() if '"receipts"' in x]
        assert told["prefix"]["cause"] == "diverged"


async def test_short_prompts_are_not_watched():
    replay = server()
    async with replay.http() as http:
        assert "prefix" not in await receipt(http, chat("be kind"))
        assert replay.server.models.first.finder is None, "nothing is made for them"
        raw = {"model": NAME, "prompt": RULES, "receipts": True, "max_tokens": 1}
        assert (await http.post("/v1/completions", json=raw)).json()["quire"]["receipts"][0]["prefix"]["cause"] == "new"


async def test_metrics_count_breaks_by_cause():
    replay = server()
    tools = functions(*(f"tool_{n}" for n in range(8)))
    async with replay.http() as http:
        await receipt(http, chat(RULES, tools=tools))
        await receipt(http, chat(RULES, tools=[tools[3], *tools[:3], *tools[4:]]))
        await receipt(http, chat(f"now {RULES}", tools=tools))
        text = (await http.get("/metrics")).text
    assert f'quire_prefix_breaks_total{{cause="tools",model_name="{NAME}"}} 1.0' in text
    assert f'quire_prefix_breaks_total{{cause="system",model_name="{NAME}"}} 1.0' in text
    assert f'quire_prefix_break_tokens_total{{cause="system",model_name="{NAME}"}}' in text


async def test_evicted_pages_are_told():
    replay = server(pages=140)
    async with replay.http() as http:
        await receipt(http, chat(RULES))
        await receipt(http, chat(f"something else entirely: {RULES[::-1]}"))
        told = (await receipt(http, chat(RULES)))["prefix"]
    assert told["cause"] == "evicted"
    assert "--kv-memory" in told["cure"]


async def test_breaks_are_listed_with_their_agents():
    replay = server()
    async with replay.http() as http:
        for n in range(3):
            await receipt(http, chat(f"Request number {n}.\n{RULES}"), **{"user-agent": "coder/1.2 (x)"})
        listed = (await http.get("/v1/cache/breaks")).json()
    (one,) = listed["data"]
    assert (one["agent"], one["times"], one["kind"], one["volatile"]) == ("coder", 2, "number", True)
    assert one["lost_tokens"] >= 2 * len(RULES)
    (agent,) = listed["agents"]
    assert (agent["agent"], agent["requests"], agent["lost_tokens"]) == ("coder", 3, one["lost_tokens"])


async def test_a_key_sees_its_own_breaks_alone():
    replay = server(api_keys=(("ann", "annskey12"), ("bob", "bobskey12")))
    ann, bob = ({"authorization": f"Bearer {key}"} for key in ("annskey12", "bobskey12"))
    secret = "Ann's secret"
    async with replay.http() as http:
        for n in range(2):
            for salt in ("", "more"):
                await receipt(http, chat(f"{secret} {n}\n{RULES}", cache_salt=salt or None), **ann)
        assert (await receipt(http, chat(f"{secret} 2\n{RULES}"), **bob))["prefix"]["cause"] == "new"
        seen = (await http.get("/v1/cache/breaks", headers=bob)).json()
        assert seen["data"] == []
        assert secret not in json.dumps(seen)
        assert len((await http.get("/v1/cache/breaks", headers=ann)).json()["data"]) == 1
        assert len((await http.get("/v1/cache/breaks?cache_salt=more", headers=ann)).json()["data"]) == 1
        assert (await http.get("/v1/cache/breaks?cache_salt=no", headers=ann)).json()["data"] == []
        assert (await http.get("/v1/cache/breaks")).status_code == 401


async def test_canonicalization_is_off_unless_it_is_asked_for():
    line = "x-anthropic-billing-header: cc_version=2; cch=1;"
    body = chat(f"{line}\n{RULES}")
    replay = server()
    async with replay.http() as http:
        plain = await receipt(http, body)
        assert "changes" not in plain["prefix"]
        made = await receipt(http, body, **{"x-quire-canonicalize": "billing"})
        assert made["prompt_tokens"] == plain["prompt_tokens"] - len(line) - 1
        assert made["prefix"]["changes"] == [
            "billing: messages[0] (system): the line x-anthropic-billing-header was removed"
        ]
        r = await http.post("/v1/chat/completions", json=body, headers={"x-quire-canonicalize": "all"})
        assert r.status_code == 400
        assert "x-quire-canonicalize" in r.text
    replay = server("billing")
    async with replay.http() as http:
        assert (await receipt(http, body))["prompt_tokens"] == made["prompt_tokens"]
        assert (await receipt(http, body, **{"x-quire-canonicalize": "none"}))["prompt_tokens"] == plain[
            "prompt_tokens"
        ]
        short = await receipt(http, chat(f"{line}\nbe kind"))
        assert short["prefix"]["changes"], "told however short the prompt is"


async def test_canonicalization_saves_what_a_break_costs():
    """Tools in another order and other keys each time, as MCP servers answer: all of it is found again."""
    for canonical, least, most in (("auto", 0.9, 1.0), ("none", 0.0, 0.6)):
        replay = server(canonical)
        last: dict[str, Any] = {}
        async with replay.http() as http:
            for n in range(4):
                tools = functions(*(f"tool_{(i + n) % 8}" for i in range(8)))
                last = await receipt(http, chat(RULES, tools=tools))
        assert least <= last["cached_tokens"] / last["prompt_tokens"] <= most, canonical


async def test_a_rewritten_answer_of_messages_is_told_in_its_notes():
    async with server("dates").http() as http:
        path, body = in_messages(f"Today is 2026-11-19.\n{RULES}")
        told = (await http.post(path, json=body)).json()
        counted = (
            await http.post(f"{path}/count_tokens", json={k: body[k] for k in ("model", "messages", "system")})
        ).json()
    (note,) = told["quire"]["notes"]
    assert note.startswith("dates: messages[0] (system): moved to the head of messages[1] (user)")
    assert counted["quire"]["notes"] == [note]


async def test_an_answer_that_was_cut_short_is_remembered_too():
    replay = server()
    replay.says(Said("word " * 100))
    async with replay.http() as http:
        await receipt(http, chat(RULES, max_tokens=40))
        finder = replay.server.models.first.finder
        assert finder is not None
        (entry,) = finder.recent._spaces["", ""]
        assert len(entry.ids) == entry.prompt + 40
        assert entry.ended is not None
