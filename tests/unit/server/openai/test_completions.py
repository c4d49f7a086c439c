"""POST /v1/completions against a scripted engine."""

from __future__ import annotations

from typing import Any

from quire.chat.infill import Infill
from quire.chat.types import TokenLogprob
from quire.config import ServerConfig
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, events

ROUTE = "/v1/completions"


async def test_text_prompt_and_the_default_of_sixteen():
    completer = FakeCompleter(answer="x" * 40)
    async with client_for(completer) as http:
        body = (await http.post(ROUTE, json={"model": MODEL, "prompt": "say"})).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("x" * 16, "length", None)
    assert completer.seen[0].prompt == list(b"say")
    assert body["usage"]["total_tokens"] == 19


async def test_the_four_forms_of_prompt():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        for prompt, count in (("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97, 98], [99]], 2)):
            r = await http.post(ROUTE, json={"prompt": prompt, "n": 2})
            assert r.status_code == 200, r.text
            assert [c["index"] for c in r.json()["choices"]] == list(range(count * 2))
            assert r.json()["usage"]["prompt_tokens"] == (3 if count == 2 else 2)
    assert [g.prompt for g in completer.seen] == [[97, 98], *([[97, 98], [99]]), [97, 98], *([[97, 98], [99]])]
    assert len({g.id for g in completer.seen}) == 6


async def test_the_default_does_not_refuse_a_prompt_that_leaves_less_room():
    completer = FakeCompleter(answer="x" * 40, context=20)
    async with client_for(completer) as http:
        r = await http.post(ROUTE, json={"prompt": "x" * 15})
        assert r.json()["choices"][0]["text"] == "xxxxx"
        r = await http.post(ROUTE, json={"prompt": "x" * 15, "max_tokens": 16})
        assert r.status_code == 400
        assert r.json()["error"]["code"] == "context_length_exceeded"


async def test_legacy_logprobs():
    async with client_for() as http:
        body = (await http.post(ROUTE, json={"prompt": "ab", "logprobs": 2})).json()
    lp = body["choices"][0]["logprobs"]
    assert lp["tokens"][:3] == ["H", "e", "l"]
    assert lp["tokens"][8:10] == ["bytes:\\xc3", "bytes:\\xb6"]
    assert lp["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11]
    assert lp["token_logprobs"] == [-0.5] * 13
    assert lp["top_logprobs"][0] == {"H": -0.5, "I": -1.5}


async def test_echo_with_logprobs_scores_the_prompt():
    completer = FakeCompleter()
    ask = {"prompt": "añb", "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
    async with client_for(completer) as http:
        body = (await http.post(ROUTE, json=ask)).json()
    assert completer.seen[0].sampling.prompt_logprobs == 1
    for choice in body["choices"]:
        assert choice["text"] == "añbHe"
        lp = choice["logprobs"]
        assert lp["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xb1", "b", "H", "e"]
        assert lp["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
        assert lp["top_logprobs"][0] is None
        assert lp["text_offset"] == [0, 1, 1, 2, 3, 4]


async def test_echo_of_tokens_and_scoring_only():
    async with client_for() as http:
        body = (await http.post(ROUTE, json={"prompt": [97, 98, 99], "echo": True})).json()
        assert body["choices"][0]["text"] == "abcHello, wörld"
        ask = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 0}
        body = (await http.post(ROUTE, json=ask)).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert body["usage"]["completion_tokens"] == 0


async def test_a_single_token_prompt_has_nothing_to_score():
    async with client_for() as http:
        ask = {"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 1, "n": 2}
        body = (await http.post(ROUTE, json=ask)).json()
    assert [c["logprobs"]["tokens"] for c in body["choices"]] == [["a", "H"]] * 2


async def test_prompt_logprobs_without_echo():
    async with client_for() as http:
        ask = {"prompt": "abc", "prompt_logprobs": 1, "logprobs": 3, "max_tokens": 1}
        (choice,) = (await http.post(ROUTE, json=ask)).json()["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}},
        {"99": {"logprob": -0.5, "rank": 1, "decoded_token": "c"}},
    ]
    assert choice["logprobs"]["tokens"] == ["H"]


async def test_echo_and_prompt_logprobs_each_get_their_count():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        ask = {"prompt": "ab", "echo": True, "logprobs": 3, "prompt_logprobs": 1, "max_tokens": 1}
        (choice,) = (await http.post(ROUTE, json=ask)).json()["choices"]
    assert completer.seen[0].sampling.prompt_logprobs == 3
    assert list(choice["prompt_logprobs"][1]) == ["98"]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["b", "c", "d"]


async def test_streaming_several_prompts():
    ask = {
        "prompt": ["a", "b"],
        "n": 2,
        "stream": True,
        "echo": True,
        "logprobs": 1,
        "stream_options": {"include_usage": True},
        "receipts": True,
        "return_token_ids": True,
    }
    async with client_for() as http:
        *chunks, usage, done = events((await http.post(ROUTE, json=ask)).text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 13 * 2 + 14 * 2
    assert usage["usage"]["prompt_tokens"] == 2
    for index in range(4):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        expected = "ab"[index // 2] + "Hello, wörld" + ("1" if index % 2 else "")
        assert "".join(c["text"] for c in mine) == expected
        assert len([t for c in mine for t in c["logprobs"]["tokens"]]) == len(expected.encode())
        assert [t for c in mine for t in c["token_ids"]] == list(expected[1:].encode())
        assert mine[0]["prompt_token_ids"] == [97 + index // 2]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
    receipts = [c["quire"]["receipts"][0]["index"] for c in chunks if "quire" in c]
    assert sorted(receipts) == [0, 1, 2, 3]


async def test_usage_so_far_in_every_chunk_is_of_its_choice():
    options = {"include_usage": True, "continuous_usage_stats": True}
    ask = {"prompt": ["a", "bcd"], "n": 2, "stream": True, "stream_options": options}
    async with client_for() as http:
        *chunks, usage, _ = events((await http.post(ROUTE, json=ask)).text)
    for index in range(4):
        mine = [c for c in chunks if c["choices"][0]["index"] == index]
        said, prompt = 0, (1, 3)[index // 2]
        for chunk in mine:
            said += len(chunk["choices"][0]["text"].encode())
            assert chunk["usage"] == {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    assert usage["usage"]["completion_tokens"] == 13 * 2 + 14 * 2


async def test_best_of_equal_to_n_and_receipts():
    async with client_for() as http:
        body = (await http.post(ROUTE, json={"prompt": "a", "n": 2, "best_of": 2, "receipts": True})).json()
    assert [r["index"] for r in body["quire"]["receipts"]] == [0, 1]


class Scored(FakeCompleter):
    """Choices whose log probabilities differ: of each prompt, number 2 is the best, then 0."""

    order = (-1.0, -3.0, -0.1, -2.0)
    last = 0

    async def _chunks(self, g: Any) -> Any:
        async for chunk in super()._chunks(g):
            self.last = chunk.index
            entries = [
                TokenLogprob(e.token, self.order[chunk.index] / len(g.prompt), e.rank, e.top) for e in chunk.logprobs
            ]
            yield type(chunk)(
                index=chunk.index,
                text=chunk.text,
                tokens=chunk.tokens,
                logprobs=entries,
                finish=chunk.finish,
                receipt=chunk.receipt,
            )


async def test_best_of_is_by_the_summed_log_probability_and_its_price_is_told():
    completer = Scored(answer="abcdef")
    async with client_for(completer) as http:
        ask = {"prompt": ["x", "yy"], "n": 2, "best_of": 4, "max_tokens": 20, "receipts": True}
        body = (await http.post(ROUTE, json=ask)).json()
        one = (await http.post(ROUTE, json={"prompt": "x", "best_of": 4, "logprobs": 1})).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "abcdef2"),
        (1, "abcdef"),
        (2, "abcdef2"),
        (3, "abcdef"),
    ]
    assert all(c["logprobs"] is None for c in body["choices"])
    assert [r["index"] for r in body["quire"]["receipts"]] == [0, 1, 2, 3]
    assert body["usage"]["completion_tokens"] == 2 * (6 + 7 + 7 + 7)  # all that was made
    assert completer.seen[0].sampling.n == 4
    assert completer.seen[0].sampling.logprobs == 0
    (choice,) = one["choices"]
    assert choice["text"] == "abcdef2" and len(choice["logprobs"]["tokens"]) == 7


async def test_a_suffix_is_written_with_the_models_own_tokens():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        r = await http.post(ROUTE, json={"prompt": "ab", "suffix": "yz"})
        assert r.status_code == 400
        assert r.json()["error"]["param"] == "suffix" and "fake:1b" in r.json()["error"]["message"]
        completer.tokenizer.infill = Infill(260, 261, 262, (260, 261, 262, 263))
        r = await http.post(ROUTE, json={"prompt": "ab", "suffix": "yz", "stop_token_ids": [7]})
        assert r.json()["choices"][0]["text"] == "Hello, wörld"
        assert completer.seen[-1].prompt == [260, 97, 98, 261, 121, 122, 262]
        assert completer.seen[-1].sampling.stop_token_ids == (7, 260, 261, 262, 263)
        assert r.json()["usage"]["prompt_tokens"] == 7
        await http.post(ROUTE, json={"prompt": [1, 2], "suffix": "z", "ignore_eos": True})
        assert completer.seen[-1].prompt == [260, 1, 2, 261, 122, 262]
        assert completer.seen[-1].sampling.stop_token_ids == ()
        completer.tokenizer.add_bos, completer.tokenizer.bos_id = True, 299
        await http.post(ROUTE, json={"prompt": "a", "suffix": "z", "n": 2, "stream": True})
        assert completer.seen[-1].prompt == [299, 260, 97, 261, 122, 262]


async def test_the_number_of_prompts_is_bounded():
    async with client_for(config=ServerConfig(max_prompts=3)) as http:
        assert (await http.post(ROUTE, json={"prompt": ["a"] * 3})).status_code == 200
        r = await http.post(ROUTE, json={"prompt": ["a"] * 4})
    assert r.status_code == 400
    assert "at most 3" in r.json()["error"]["message"]
