"""Prompts with spans that are no text, from a request to its tokens, on every backend that runs without a GPU.

The oracle that needs no tolerance: a span whose rows are those that the embedding has for some tokens gives what these tokens give, bit
for bit, however it is cut into chunks, cached or preempted. The independent one is transformers with `inputs_embeds`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.engine import Engine
from quire.engine.spans import FIRST, ids_of
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams
from quire.runner.slots import Slots
from quire.runner.spans import SlotSpans, Span

pytest.importorskip("transformers", reason="needs transformers, which makes the model")

from tests.unit.models import folders

V, WIDTH, PAGE = 160, 96, 16
RNG = np.random.default_rng(5)
PROJECTION = RNG.standard_normal((256, WIDTH)).astype(np.float32)
PROMPT = RNG.integers(3, V, 90).tolist()
BACKENDS = ["reference", "native", "torch"]


def picture(data: bytes, start: int) -> Span:
    """A toy encoder: each byte is a token, and its row is that byte's column of a fixed projection."""
    rows = PROJECTION[np.frombuffer(data, np.uint8)]
    return Span(
        start=start,
        length=len(data),
        kind="image",
        digest=hashlib.sha256(data).digest(),
        rows=rows.astype("<f4").tobytes(),
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = folders.build("llama", bos_token_id=None)
    return model, folders.save(model, tmp_path_factory.mktemp("spans") / "model")


@pytest.fixture(scope="module")
def path(made: tuple[Any, Path]) -> Path:
    return made[1]


@pytest.fixture(scope="module")
def embedding(made: tuple[Any, Path]) -> np.ndarray:
    return made[0].get_input_embeddings().weight.detach().float().numpy()


def engine_of(path: Path, backend: str, **options: Any) -> Engine:
    where = {"device": "cpu", "dtype": "float32", "threads": 1} if backend == "torch" else {"threads": 2}
    if backend == "native":
        pytest.importorskip("quire.backends.native._native", reason="needs the native backend: pip install -e .")
    if backend == "torch":
        pytest.importorskip("torch", reason="needs torch: the torch extra")
    config = EngineConfig(
        itl_slo=0.0,  # steps of one size: the reference rounds otherwise for another
        path=str(path),
        backend=backend,
        **where,
        **{"max_seqs": 4, "max_batch_tokens": 48, **options},
    )
    return build_engine(config, Environment(home=path.parent))[0]


def serve(engine: Engine, *requests: Request) -> dict[str, list[Event]]:
    heard: dict[str, list[Event]] = {}
    for request in requests:
        engine.add(request)
    while engine.busy:
        for event in engine.step():
            heard.setdefault(event.id, []).append(event)
    return heard


def said(events: list[Event]) -> list[tuple[int, Any]]:
    assert events[-1].error is None, events[-1].error
    return [pair for event in events for pair in zip(event.tokens, event.logprobs, strict=True)]


def equal(backend: str, *heard: list[tuple[int, Any]]) -> bool:
    """Bit for bit; elsewhere products round by the shape of the batch, so there the tokens are what counts."""
    told = heard if backend == "native" else [[token for token, _ in own] for own in heard]
    return all(own == told[0] for own in told)


def request(name: str, tokens: list[int], *spans: Span, **more: Any) -> Request:
    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True, **more.pop("params", {})}
    )
    return Request(id=name, tokens=tokens, sampling=params, spans=spans, **more)


def own_rows(embedding: np.ndarray, start: int, end: int, kind: str = "image") -> Span:
    """A span over the prompt's tokens that gives their own rows."""
    rows = embedding[PROMPT[start:end]].astype("<f4").tobytes()
    return Span(start=start, length=end - start, kind=kind, digest=hashlib.sha256(rows).digest(), rows=rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [7, 16, 48, 96])
def test_rows_of_the_embedding_give_what_their_tokens_give(
    path: Path, embedding: np.ndarray, backend: str, chunk: int
) -> None:
    engine = engine_of(path, backend, max_batch_tokens=chunk, prefix_cache=False)
    spans = (own_rows(embedding, 3, 30), own_rows(embedding, 30, 31), own_rows(embedding, 40, 90))
    blank = PROMPT.copy()
    for span in spans:
        blank[span.start : span.end] = [0] * span.length
    params = {"temperature": 0.8, "seed": 3, "presence_penalty": 0.5}
    heard = serve(engine, request("text", PROMPT, params=params))
    heard |= serve(engine, request("spans", blank, *spans, params=params))
    assert said(heard["spans"]) == said(heard["text"])
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_transformers_says_the_same(made: tuple[Any, Path], embedding: np.ndarray, backend: str) -> None:
    import torch

    model, path = made
    span = picture(bytes(range(37)), 20)
    engine = engine_of(path, backend)
    (events,) = serve(engine, request("a", PROMPT, span, params={"max_tokens": 8})).values()
    rows = torch.from_numpy(embedding[PROMPT].copy())
    rows[20:57] = torch.from_numpy(np.frombuffer(span.rows, "<f4").reshape(37, WIDTH).copy())
    with torch.no_grad():
        for token, logprob in said(events):
            logits = model(inputs_embeds=rows[None]).logits[0, -1].double().log_softmax(-1)
            assert int(logits.argmax()) == token
            assert logprob.logprob == pytest.approx(float(logits[token]), abs=2e-2)
            rows = torch.cat([rows, torch.from_numpy(embedding[[token]])])
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_picture_is_found_again_and_never_taken_for_another(path: Path, backend: str) -> None:
    engine = engine_of(path, backend)
    one, two = bytes(range(40)), bytes(range(1, 41))
    alone = {
        name: said(serve(engine_of(path, backend), request(name, PROMPT, picture(data, 20)))[name])
        for name, data in [("one", one), ("two", two)]
    }
    first = serve(engine, request("one", PROMPT, picture(one, 20)))["one"]
    again = serve(engine, request("again", [7] * 20 + PROMPT[20:], picture(one, 20)))["again"]
    same = serve(engine, request("same", PROMPT, picture(one, 20)))["same"]
    other = serve(engine, request("other", PROMPT, picture(two, 20)))["other"]
    tenant = serve(engine, request("tenant", PROMPT, picture(one, 20), namespace="b"))["tenant"]
    text = serve(engine, request("text", PROMPT))["text"]
    found = [
        events[-1].receipt.cached_tokens for events in (first, again, same, other, tenant, text) if events[-1].receipt
    ]
    assert found == [0, 0, 80, 16, 0, 16]  # the prefix up to the picture is text, and shared
    assert equal(backend, said(first), said(same), said(tenant), alone["one"])
    assert equal(backend, said(other), alone["two"])
    assert not equal(backend, alone["one"], alone["two"])
    engine.close()


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("depth", [0, 2])
def test_preempted_and_shared_in_a_tight_pool(path: Path, backend: str, depth: int) -> None:
    page = 3 * 2 * 2 * 16 * PAGE * 2  # layers, K and V, heads, their size
    tight = engine_of(path, backend, kv_memory=14 * page, depth=depth, context=160)
    todo = [
        request(
            f"{i}.{j}", PROMPT[: 60 + i], picture(bytes(range(i, i + 40)), 10 + i), index=j,
            follows=f"{i}.0" if j else None, params={"max_tokens": 40, "temperature": 0.9, "seed": i},
        )
        for i in range(3) for j in range(2)
    ]  # fmt: skip
    heard = serve(tight, *todo)
    assert tight.stats().preemptions > 0
    for own in todo:
        alone = engine_of(path, backend, prefix_cache=False)
        assert equal(
            backend, said(heard[own.id]), said(serve(alone, msgspec.structs.replace(own, follows=None))[own.id])
        )
        alone.close()
    tight.close()


def test_drafts_never_go_on_with_what_is_no_text(path: Path) -> None:
    """The text before a picture is said again after it: what followed there was the picture."""
    tokens = PROMPT[:20] + [0] * 30 + PROMPT[:20]
    asked = request("a", tokens, picture(bytes(range(30)), 20), params={"logprobs": None, "max_tokens": 40})
    drafting, plain = engine_of(path, "native", speculate="ngram"), engine_of(path, "native")
    assert [e.tokens for e in serve(plain, asked)["a"]] != []
    flat = [[t for e in serve(own, asked)["a"] for t in e.tokens] for own in (drafting, plain)]
    assert flat[0] == flat[1]


def test_text_pays_nothing_and_decoding_after_a_picture_is_decoding(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without spans none of their code runs; with one, a step of decoding is the same call of C++ as ever."""
    engine = engine_of(path, "native")
    runner: Any = engine._runner
    steps, own = [], runner._steps

    class Counted:
        def run(self, slot: Any) -> Any:
            steps.append(slot.size)
            return own.run(slot)

        def choose(self, *args: Any) -> Any:
            return own.choose(*args)

    runner._steps = Counted()
    plain = {"logprobs": None}
    serve(engine, request("a", PROMPT, picture(bytes(20), 5), params=plain))
    assert sum(steps) == 11  # 12 tokens, the first from the prompt's last row
    steps.clear()

    def never(*args: Any) -> Any:
        raise AssertionError("code for spans ran for text")

    for owner, name in ((SlotSpans, "__init__"), (Slots, "_note")):
        monkeypatch.setattr(owner, name, never)
    from quire.runner.batch_builder import BatchBuilder

    monkeypatch.setattr(BatchBuilder, "_beside", never)
    assert serve(engine, request("b", PROMPT, params=plain))["b"][-1].finish == "length"
    assert sum(steps) == 11
    engine.close()


def test_ids_follow_from_what_a_span_holds() -> None:
    span = Span(start=3, length=40, kind="image", digest=b"d" * 32)
    ids = ids_of(span, "")
    assert ids == ids_of(msgspec.structs.replace(span, start=9, rows=b"other"), "")  # the digest vouches for the rows
    assert len(set(ids)) == 40 and all(FIRST <= i < 2 * FIRST for i in ids)
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(ids))
    assert packed == ids and np.array(ids, np.int64).tolist() == ids
    for change in (
        {"kind": "audio"},
        {"digest": b"e" * 32},
        {"positions": b"\0" * 480, "advance": 1},
        {"positions": b"\0" * 480, "advance": 2},
    ):
        assert not set(ids) & set(ids_of(msgspec.structs.replace(span, **change), ""))
    assert not set(ids) & set(ids_of(span, "tenant"))
    # A digest that continues another's does not run into it.
    assert ids_of(msgspec.structs.replace(span, kind="imaged", digest=b"d" * 31), "")[0] != ids[0]


def nan(span: Span) -> Span:
    rows = np.frombuffer(span.rows, "<f4").copy()
    rows[17] = np.nan
    return msgspec.structs.replace(span, rows=rows.tobytes())


GOOD = picture(bytes(range(10)), 20)
REFUSED: list[tuple[tuple[Span, ...], str]] = [
    ((GOOD, msgspec.structs.replace(GOOD, start=29)), "spans[1]: it begins at 29, and the span before it ends at 30"),
    ((GOOD, msgspec.structs.replace(GOOD, start=5)), "spans[1]: it begins at 5"),
    ((msgspec.structs.replace(GOOD, start=85),), "spans[0]: 10 tokens from 85 on do not lie in a prompt of 90"),
    ((msgspec.structs.replace(GOOD, start=-1),), "do not lie in a prompt"),
    ((msgspec.structs.replace(GOOD, start=1 << 70),), "do not lie in a prompt"),
    ((msgspec.structs.replace(GOOD, length=0),), "0 tokens from 20 on"),
    ((msgspec.structs.replace(GOOD, length=1 << 62),), "do not lie in a prompt"),
    ((msgspec.structs.replace(GOOD, rows=GOOD.rows[:-4]),), "3836 bytes: 10 rows of 96 float32 numbers take 3840"),
    ((msgspec.structs.replace(GOOD, rows=b""),), "its rows have 0 bytes"),
    ((nan(GOOD),), "its rows have NaN or infinite numbers"),
    ((msgspec.structs.replace(GOOD, digest=b"short"),), "its digest has 5 bytes: 16 to 64 are needed"),
    ((msgspec.structs.replace(GOOD, kind=""),), "its kind has 0 characters"),
    ((msgspec.structs.replace(GOOD, kind="k" * 65),), "its kind has 65 characters"),
    ((msgspec.structs.replace(GOOD, advance=4),), "takes up 4 positions, and does not say where"),
    ((msgspec.structs.replace(GOOD, advance=10, positions=bytes(120)),), "this model counts tokens"),
    ((GOOD,) * 4097, "4097 spans: at most 4096"),
]


@pytest.mark.parametrize(("spans", "why"), REFUSED, ids=[why[-40:] for _, why in REFUSED])
def test_what_cannot_be_is_refused_and_harms_nobody(path: Path, spans: tuple[Span, ...], why: str) -> None:
    engine = engine_of(path, "reference")
    heard = serve(engine, request("bad", PROMPT, *spans), request("good", PROMPT[:20], params={"max_tokens": 2}))
    (event,) = heard["bad"]
    assert event.finish == "error" and event.param == "spans" and event.error is not None and why in event.error
    assert len(said(heard["good"])) == 2
    engine.close()


def test_too_many_bytes_and_prompt_logprobs_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(path, "reference")
    (event,) = serve(engine, request("a", PROMPT, GOOD, params={"prompt_logprobs": 1}))["a"]
    assert event.error is not None and "no log probability" in event.error and event.param == "prompt_logprobs"
    monkeypatch.setattr("quire.engine.spans.MAX_BYTES", 3839)
    (event,) = serve(engine, request("b", PROMPT, GOOD))["b"]
    assert event.error is not None and "3840 bytes of rows: at most 3839" in event.error
    engine.close()


def test_an_engine_that_reads_text_alone_says_so(path: Path) -> None:
    from tests.unit.engine.fake_engine import build

    engine, _ = build(EngineConfig(path="fake"), Environment(home=path.parent))
    (event,) = serve(engine, request("a", [1, 2, 3], GOOD))["a"]
    assert event.error is not None and "reads text alone" in event.error
