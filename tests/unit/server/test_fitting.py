"""Conversations that do not fit: what is cut where a client asks for it, what never is, how many prompts that takes, and that it is told."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.observe.errors import BadRequest
from quire.server.shared import fitting
from quire.server.shared.conversation import Conversation
from quire.server.shared.fitting import HEADER, Fit, last_tokens, without_middle
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, events, service_over

CONTEXT = 400  # a token is a byte: "user:" and a line end around each turn
Turn = dict[str, Any]


def turn(role: str, text: str, **more: Any) -> Turn:
    return {"role": role, "content": text, **more}


def calls(*ids: str) -> list[Turn]:
    return [{"id": i, "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in ids]


def result(id: str, text: str = "r" * 20) -> Turn:
    return turn("tool", text, tool_call_id=id, name="f")


def exchanges(n: int, size: int = 20) -> list[Turn]:
    return [turn(role, f"{role[0]}{i}".ljust(size, ".")) for i in range(n) for role in ("user", "assistant")]


SYSTEM = turn("system", "Be brief.")
NEWEST = turn("user", "newest?")


def served(completer: FakeCompleter) -> Any:
    return service_over(completer).models.first.served()


async def fitted(
    turns: list[Turn], fit: Fit | None = None, context: int = CONTEXT
) -> tuple[Conversation, FakeCompleter, list[int]]:
    completer = FakeCompleter(context=context)
    completer.answer_format = None
    said = Conversation([dict(t) for t in turns])
    tokens = await fitting.encode(served(completer), said, fit or Fit("truncation"))
    return said, completer, tokens


async def test_what_fits_is_left_alone() -> None:
    turns = [SYSTEM, *exchanges(3), NEWEST]
    said, completer, _ = await fitted(turns)
    assert said.turns == turns and said.dropped is None and not said.notes and len(completer.rendered) == 1


async def test_the_oldest_are_left_out_and_it_is_told() -> None:
    turns = [SYSTEM, *exchanges(12), NEWEST]
    said, completer, tokens = await fitted(turns)
    whole = len("".join(f"{t['role']}:{t['content']}\n" for t in turns))
    assert len(tokens) <= CONTEXT - CONTEXT // 8 < whole
    assert said.turns[0] == SYSTEM and said.turns[-1] == NEWEST and said.turns[1]["role"] == "user"
    assert said.turns[1:] == turns[len(turns) - len(said.turns) + 1 :]
    gone = len(turns) - len(said.turns)
    assert said.dropped is not None and said.dropped.body() == {
        "param": "truncation",
        "tokens": whole - len(tokens),
        "where": "from the beginning of the conversation",
        "messages": gone,
        "of": len(turns),
        "roles": {"user": gone // 2, "assistant": gone // 2},
    }
    assert said.notes == [said.dropped.note] and f"{gone} of {len(turns)} messages" in said.notes[0]
    assert completer.rendered[-1][0] is not turns


async def test_nothing_is_cut_unless_it_is_asked_for() -> None:
    completer = FakeCompleter(context=CONTEXT)
    said = Conversation([SYSTEM, *exchanges(12), NEWEST])
    assert len(await fitting.encode(served(completer), said, None)) > CONTEXT and said.dropped is None


@pytest.mark.parametrize("answer", [None, 1, 100, 300])
async def test_there_is_room_for_the_answer(answer: int | None) -> None:
    _, _, tokens = await fitted([SYSTEM, *exchanges(12), NEWEST], Fit("truncation", answer))
    assert len(tokens) <= CONTEXT - (CONTEXT // 8 if answer is None else answer)


async def test_a_handful_of_prompts_is_rendered_however_many_turns_there_are() -> None:
    for n in (100, 1000, 9000):
        said, completer, _ = await fitted([SYSTEM, *exchanges(n), NEWEST], context=2000)
        assert said.dropped is not None and len(completer.rendered) <= 2 + (2 * n * 20 // 2000).bit_length() + 1, n


async def test_a_cut_stays_where_it_is_while_a_conversation_grows() -> None:
    """The prefix of the next turn's prompt is in the cache, but for a move every so many turns."""
    moved, before = 0, ""
    for n in range(10, 60):
        _, _, tokens = await fitted([SYSTEM, *exchanges(n), NEWEST])
        text = bytes(tokens).decode().removesuffix("user:newest?\n")
        moved += not text.startswith(before)
        before = text
    assert 2 <= moved <= 10, moved  # of 50; a cut of just what is too much would have moved 44 times


async def test_a_result_is_never_without_its_call() -> None:
    rng = random.Random(5)
    for _ in range(200):
        turns, n = [SYSTEM], 0
        for _ in range(rng.randint(1, 8)):
            turns.append(turn("user", "u" * rng.randint(1, 40)))
            for _ in range(rng.randint(0, 4)):
                ids = [f"c{n + i}" for i in range(rng.randint(1, 3))]
                n += len(ids)
                turns += [turn("assistant", "", tool_calls=calls(*ids)), *map(result, ids)]
            if rng.random() < 0.7:
                turns.append(turn("assistant", "a" * rng.randint(1, 60)))
        if turns[-1]["role"] == "assistant":
            turns.append(NEWEST)
        try:
            said, _, tokens = await fitted(turns)
        except BadRequest as error:
            assert error.code == "context_length_exceeded"
            continue
        assert len(tokens) <= CONTEXT - CONTEXT // 8
        known = {c["id"] for t in said.turns for c in t.get("tool_calls", ())}
        results = {t["tool_call_id"] for t in said.turns if t["role"] == "tool"}
        assert results <= known
        assert known == results, "a call lost its result"
        first = next(t for t in said.turns if t["role"] != "system")
        assert first["role"] == "user" and said.turns[0] == SYSTEM
        asked = [t for t in turns if t["role"] == "user"][-1]
        assert asked in said.turns and turns[-1] in said.turns


async def test_one_question_with_many_steps_keeps_the_question_and_the_last_steps() -> None:
    steps = [t for i in range(20) for t in (turn("assistant", f"step {i}", tool_calls=calls(f"c{i}")), result(f"c{i}"))]
    said, _, tokens = await fitted([SYSTEM, *exchanges(2), turn("user", "the task"), *steps])
    assert len(tokens) <= CONTEXT - CONTEXT // 8
    assert [t["content"] for t in said.turns[:2]] == ["Be brief.", "the task"]
    assert said.turns[2]["role"] == "assistant" and said.turns[2:] == steps[-len(said.turns) + 2 :]
    assert said.dropped is not None and "the newest question" in said.dropped.where
    assert said.dropped.roles == {
        "user": 2,
        "assistant": 2 + 20 - (len(said.turns) - 2) // 2,
        "tool": 20 - (len(said.turns) - 2) // 2,
    }


async def test_a_late_result_holds_its_call() -> None:
    turns = [
        turn("user", "x" * 200),
        turn("assistant", "", tool_calls=calls("a")),
        turn("user", "y" * 150),
        result("a"),
        NEWEST,
    ]
    said, _, _ = await fitted(turns)
    assert said.turns == [NEWEST]


@pytest.mark.parametrize(
    "turns",
    [
        [SYSTEM, *exchanges(3), turn("user", "x" * 500)],
        [turn("system", "x" * 500), *exchanges(3), NEWEST],
        [turn("user", "x" * 500)],
        [NEWEST, turn("assistant", "", tool_calls=calls("a")), result("a", "x" * 500)],
    ],
)
async def test_what_is_never_cut_is_refused_with_numbers(turns: list[Turn]) -> None:
    with pytest.raises(BadRequest, match=r"alone have \d\d\d tokens.*context length is 400 tokens") as refused:
        await fitted(turns)
    assert refused.value.code == "context_length_exceeded"


async def test_texts_too_long_to_be_tokenized_are_cut_without_being_rendered() -> None:
    turns = [SYSTEM, turn("user", "x" * 50_000), turn("assistant", "ok"), NEWEST]
    said, completer, _ = await fitted(turns)
    assert said.turns == [SYSTEM, NEWEST] and said.dropped is not None and said.dropped.tokens is None
    assert "more tokens than could be counted" in said.notes[0] and len(completer.rendered) == 1
    with pytest.raises(BadRequest, match="50019 characters"):
        await fitted([SYSTEM, turn("user", "x" * 50_000)])


def test_prompts_that_are_no_conversation() -> None:
    ours, ids = served(FakeCompleter(context=20)), list(range(30))
    assert last_tokens(ours, ids, None, None, 4) == (ids, None)
    assert last_tokens(ours, ids, 5, None, 4)[0] == ids[-5:]
    assert last_tokens(ours, ids, 5, "right", 4)[0] == ids[:5]
    kept, dropped = last_tokens(ours, ids, -1, "left", 4)
    assert kept == ids[-16:] and dropped is not None and dropped.tokens == 14
    assert last_tokens(ours, ids[:3], 5, None, 4) == (ids[:3], None)
    for keep, side in ((0, None), (-2, None), (21, None), (3, "middle")):
        with pytest.raises(BadRequest):
            last_tokens(ours, ids, keep, side, 4)
    kept, dropped = without_middle(ids, Fit("truncate", 4), 20, "prompt", keep=2)
    assert kept == [0, 1, *range(17, 30)] and dropped is not None and dropped.tokens == 15
    assert without_middle(ids[:16], Fit("truncate", 4), 20, "prompt") == (ids[:16], None)
    with pytest.raises(BadRequest, match="18 of its 30 tokens are never cut"):
        without_middle(ids, Fit("truncate", 4), 20, "prompt", newest=18)


# ---- the dialects

LONG = [SYSTEM, *exchanges(12), NEWEST]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_completions(stream: bool) -> None:
    completer = FakeCompleter(context=CONTEXT)
    body = {"model": MODEL, "messages": LONG, "stream": stream}
    async with client_for(completer) as http:
        refused = await http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        r = await http.post("/v1/chat/completions", json=body | {"truncation": "auto", "max_tokens": 60})
        assert r.status_code == 200, r.text
        bodies = [b for b in events(r.text) if b != "[DONE]"] if stream else [r.json()]
        (told,) = [b["quire"] for b in bodies if "quire" in b]
        assert told["dropped"]["messages"] > 4 and told["notes"][0].startswith("truncation: ")
        assert f"messages={told['dropped']['messages']}" in r.headers[HEADER]
        assert len(completer.seen[-1].prompt) <= CONTEXT - 60
        bad = await http.post("/v1/chat/completions", json=body | {"truncation": "some"})
        both = await http.post("/v1/chat/completions", json=body | {"truncation": "auto", "truncate_prompt_tokens": 5})
        assert (bad.status_code, both.status_code) == (400, 400)
        r = await http.post("/v1/chat/completions", json=body | {"truncate_prompt_tokens": 30})
        assert r.status_code == 200 and completer.seen[-1].prompt == completer.tokenizer.encode(_text(LONG))[-30:]
        assert HEADER in r.headers and "truncate_prompt_tokens" in r.text


def _text(turns: list[Turn]) -> str:
    return "".join(f"{t['role']}:{t['content']}\n" for t in turns)


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(stream: bool) -> None:
    completer = FakeCompleter(context=50)
    body = {"model": MODEL, "prompt": ["abcdefghij" * 8, "short"], "max_tokens": 4, "stream": stream}
    async with client_for(completer) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 400
        r = await http.post("/v1/completions", json=body | {"truncate_prompt_tokens": -1, "echo": not stream})
        assert r.status_code == 200, r.text
        assert [bytes(g.prompt).decode() for g in completer.seen] == [("abcdefghij" * 8)[-46:], "short"]
        bodies = [b for b in events(r.text) if b != "[DONE]"] if stream else [r.json()]
        (told,) = [b["quire"]["dropped"] for b in bodies if "quire" in b]
        assert [(d["prompt"], d["tokens"]) for d in told] == [(0, 34)] and r.headers[HEADER] == "tokens=34"
        if not stream:
            assert r.json()["choices"][0]["text"].startswith(("abcdefghij" * 8)[-46:])


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(stream: bool) -> None:
    completer = FakeCompleter(context=CONTEXT)
    items = [{"role": t["role"], "content": t["content"]} for t in LONG[1:]]
    body = {"model": MODEL, "instructions": "Be brief.", "input": items, "stream": stream, "max_output_tokens": 20}
    async with client_for(completer) as http:
        assert (await http.post("/v1/responses", json=body)).status_code == 400
        r = await http.post("/v1/responses", json=body | {"truncation": "auto"})
        assert r.status_code == 200, r.text
        final = events_of(r.text)[-1]["response"] if stream else r.json()
        assert final["truncation"] == "auto" and final["quire"]["dropped"]["messages"] > 4
        assert HEADER in r.headers and completer.rendered[-1][0][0]["content"] == "Be brief."
        follow = {"model": MODEL, "input": "more?", "previous_response_id": final["id"], "truncation": "auto"}
        again = (await http.post("/v1/responses", json=follow)).json()
        assert again["quire"]["dropped"]["param"] == "truncation"
        count = await http.post(
            "/v1/responses/input_tokens",
            json={k: body[k] for k in ("input", "instructions")} | {"model": MODEL, "truncation": "auto"},
        )
        assert count.json()["input_tokens"] <= CONTEXT and "dropped" in count.json()["quire"]


def events_of(text: str) -> list[Any]:
    import json

    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("stream", [False, True])
async def test_ollamas_chat(stream: bool) -> None:
    completer = FakeCompleter(context=CONTEXT)
    body = {"model": MODEL, "messages": LONG, "stream": stream}
    async with client_for(completer) as http:
        for silent in ({}, {"truncate": False}):
            assert (await http.post("/api/chat", json=body | silent)).status_code == 400
        r = await http.post("/api/chat", json=body | {"truncate": True, "options": {"num_ctx": 200}})
        assert r.status_code == 200, r.text
        last = events_of("data: " + r.text.strip().splitlines()[-1])[0]
        assert last["quire"]["dropped"]["messages"] > 4 and last["prompt_eval_count"] <= 175
        assert HEADER in r.headers and last["quire"]["notes"]


async def test_ollamas_generate() -> None:
    completer = FakeCompleter(context=100)
    body = {"model": MODEL, "prompt": "x" * 150, "stream": False, "raw": True}
    async with client_for(completer) as http:
        assert (await http.post("/api/generate", json=body)).status_code == 400
        r = await http.post("/api/generate", json=body | {"truncate": True, "options": {"num_keep": 3}})
        assert r.status_code == 200 and r.json()["quire"]["dropped"]["tokens"] == 75
        before = {"model": MODEL, "prompt": "hi", "stream": False, "context": [65] * 120}
        assert (await http.post("/api/generate", json=before)).status_code == 400
        r = await http.post("/api/generate", json=before | {"truncate": True})
        assert r.status_code == 200 and bytes(completer.seen[-1].prompt).endswith(b"user:hi\n")
        r = await http.post("/api/generate", json=before | {"truncate": True, "prompt": "y" * 120})
        assert r.status_code == 400 and "never cut" in r.json()["error"]


# ---- answers that go on past the context


async def test_llama_cpps_context_shift() -> None:
    completer = FakeCompleter("y" * 60, context=100)
    ask = {"prompt": "x" * 150, "n_predict": 40}
    async with client_for(completer) as http:
        for silent in ({}, {"n_keep": 5, "n_discard": 10}, {"context_shift": False}):
            assert (await http.post("/completion", json=ask | silent)).status_code == 400
        r = await http.post("/completion", json=ask | {"context_shift": True, "n_keep": 5, "n_discard": 10})
        assert r.status_code == 200 and r.json()["truncated"] is True and r.headers[HEADER] == "tokens=100"
        (asked,) = completer.seen
        assert (asked.shift.keep, asked.shift.discard, asked.sampling.max_tokens) == (5, 10, 40)
        r = await http.post("/completion", json={"prompt": "x", "context_shift": True, "n_keep": -1})
        assert (completer.seen[-1].shift.keep, completer.seen[-1].sampling.max_tokens) == (1, 1000)
        assert r.json()["truncated"] is False and "quire" not in r.json()
        for wrong, param in (
            ({"n_keep": 90}, "n_keep"),
            ({"n_discard": 2}, "n_discard"),
            ({"grammar": "root ::= [a]"}, "context_shift"),
        ):
            r = await http.post("/completion", json=ask | {"context_shift": True} | wrong)
            assert r.status_code == 400 and param in r.json()["error"]["message"], r.text


async def test_ollamas_shift() -> None:
    completer = FakeCompleter("y" * 60, context=100)
    ask = {"model": MODEL, "messages": [NEWEST], "stream": False}
    async with client_for(completer) as http:
        await http.post("/api/chat", json=ask)
        assert completer.seen[-1].shift is None
        await http.post("/api/chat", json=ask | {"shift": True, "options": {"num_ctx": 50}})
        made = completer.seen[-1]
        assert (made.shift.context, made.shift.keep, made.sampling.max_tokens) == (50, len(made.prompt), None)
        await http.post("/api/chat", json=ask | {"shift": True, "options": {"num_predict": 300, "num_keep": 4}})
        assert (completer.seen[-1].shift.keep, completer.seen[-1].sampling.max_tokens) == (4, 300)
        r = await http.post("/api/chat", json=ask | {"shift": True, "format": "json"})
        assert completer.seen[-1].shift is None and "grammar" in r.json()["quire"]["notes"][0]
        r = await http.post("/api/chat", json=ask | {"shift": True, "options": {"num_keep": -2}})
        assert r.status_code == 400 and "num_keep" in r.json()["error"]
