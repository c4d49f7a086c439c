"""A model that was loaded to generate embeds, too: in the same steps, with the same numbers, and no answer minds."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.engine.engine import Engine
from quire.engine.types import Constraint, Event, Request
from quire.layouts import Floats
from quire.runner.params import SamplingParams
from tests.unit.engine.test_pooled import TEXTS, decoder, made, vectors, wanted
from tests.unit.models import families, folders, mixtures
from tests.unit.models.encoders import save

torch = pytest.importorskip("torch", reason="needs torch: the test extra")
transformers = pytest.importorskip("transformers", reason="needs transformers: the test extra")

PROMPTS = [[5, 9, 2] * 4, [17] * 3, list(range(40, 60)), [80, 81, 80, 81, 80, 81, 80]]
SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=14, logprobs=2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)


def answers() -> list[Request]:
    return [
        Request(id=f"answer-{i}", tokens=tokens, sampling=(SAMPLED, GREEDY)[i % 2]) for i, tokens in enumerate(PROMPTS)
    ]


def texts(which: list[list[int]] = TEXTS, **more: Any) -> list[Request]:
    return [Request(id=f"text-{i}", tokens=tokens, vector=True, **more) for i, tokens in enumerate(which)]


def told(engine: Engine, requests: list[Request], apart: int = 0) -> dict[str, Any]:
    """What came of each: tokens and log probabilities of an answer, the bytes of a vector. `apart` steps between them."""
    heard: dict[str, Any] = {}

    def step() -> None:
        for e in engine.step():
            assert e.error is None, e
            if e.vector:
                assert e.finish == "stop" and not e.tokens
                heard[e.id] = e.vector
            elif e.tokens:
                heard.setdefault(e.id, []).append((e.tokens, e.logprobs))

    for request in requests:
        engine.add(request)
        for _ in range(apart):
            step()
    while engine.busy:
        step()
    assert heard.keys() == {r.id for r in requests}
    return heard


def mixed(engine: Engine) -> int:
    """Steps in which texts and answers were computed beside each other."""
    kinds = [{name.split("-")[0] for name, _ in step.rows} for step in engine.steps()]
    return sum(len(kind) == 2 for kind in kinds)


def floats(vector: bytes) -> Floats:
    return np.frombuffer(vector, "<f4")


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_vectors_are_those_of_transformers_and_of_an_engine_that_embeds(backend: str, how: str, tmp_path: Path):
    model = decoder()
    path = save(model, tmp_path / "m", pooling=how)
    which = TEXTS if backend != "reference" else TEXTS[:2]
    engine, info = made(path, task="generate", backend=backend, max_seqs=4, max_batch_tokens=48)
    assert (info.task, info.dimensions) == ("generate", 96)
    assert any(line.startswith(f"embeddings: pooling: {how}, normalized") for line in info.decisions)
    own = told(engine, [*answers()[:2], *texts(which)])
    other = vectors(made(path, task="embed", backend=backend)[0], which)
    for i, (tokens, vector) in enumerate(zip(which, other, strict=True)):
        mine = floats(own[f"text-{i}"])
        assert float(mine.astype(np.float64) @ wanted(model, tokens, how)) > 0.9999  # keys and values are float16
        np.testing.assert_allclose(mine, vector, atol=2e-4)
        if backend == "native":
            assert mine.tobytes() == vector.tobytes()
    assert mixed(engine) >= 1


def test_of_a_llama(tmp_path: Path):
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**folders.tiny.TINY)).eval()
    engine, info = made(folders.save(model, tmp_path / "m"))
    assert info.task == "generate" and any("last, normalized (there is no modules.json" in x for x in info.decisions)
    with torch.no_grad():
        rows = [model(torch.tensor([t]), output_hidden_states=True).hidden_states[-1][0, -1].numpy() for t in TEXTS]
    own = told(engine, texts())
    for i, row in enumerate(rows):
        np.testing.assert_allclose(floats(own[f"text-{i}"]), row / np.linalg.norm(row), atol=2e-3)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("kit", "kind"),
    [(families, "gemma3"), (mixtures, "deepseek3"),
     (mixtures, "qwen3next"), (mixtures, "gpt-oss")],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_of_other_families(kit: Any, kind: str, backend: str, tmp_path: Path):
    """Windows, latent caches, states: what a sequence needs is there, since it is one like any other."""
    model = kit.build(kind)
    engine, info = made(folders.save(model, tmp_path / "m"), backend=backend, max_seqs=4, max_batch_tokens=64)
    assert info.task == "generate"
    which = [[t % info.vocab_size for t in tokens] for tokens in (TEXTS[0], TEXTS[3], TEXTS[7])]
    own = told(engine, [*answers()[:2], *texts(which)])
    for i, tokens in enumerate(which):
        with torch.no_grad():
            row = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1].double().numpy()
        assert float(floats(own[f"text-{i}"]).astype(np.float64) @ row) / np.linalg.norm(row) > 0.999


@pytest.mark.parametrize("how", ["last", "mean"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"backend": "torch"}, {"backend": "torch", "padded": True}, {"speculate": "ngram"},
     {"backend": "torch", "speculate": "ngram"}, {"backend": "torch", "speculate": "ngram", "padded": True}],
    ids=lambda s: "-".join(map(str, s.values())) or "native",
)  # fmt: skip
def test_answers_are_the_same_tokens_whether_or_not_texts_ride_along(
    settings: dict[str, Any], depth: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On the native backend to the last bit, log probabilities and vectors, too."""
    if settings.get("padded"):
        from quire.runner.device import runner

        monkeypatch.setattr(runner, "DeviceRunner", functools.partial(runner.DeviceRunner, padded=True))
    settings = {name: value for name, value in settings.items() if name != "padded"}
    path = save(decoder(), tmp_path / "m", pooling=how)

    def new() -> Engine:
        return made(path, task="generate", depth=depth, max_seqs=6, max_batch_tokens=64, **settings)[0]

    alone, texts_alone = told(new(), answers()), told(new(), texts())
    together = new()
    order = [r for pair in zip(texts(), [*answers(), *[None] * len(TEXTS)], strict=False) for r in pair if r]
    both = told(together, order, apart=1)
    assert mixed(together) >= 4
    native = settings.get("backend") is None
    for name, said in alone.items():
        flat = [[t for tokens, _ in one for t in tokens] for one in (said, both[name])]
        assert flat[0] == flat[1]
        if native:
            details = [[p for _, logprobs in one for p in logprobs] for one in (said, both[name])]
            assert details[0] == details[1]
    for name, vector in texts_alone.items():
        if native:
            assert vector == both[name]
        np.testing.assert_allclose(floats(vector), floats(both[name]), atol=1e-5)


def receipts(engine: Engine, requests: list[Request]) -> list[Event]:
    ended: list[Event] = []
    for request in requests:  # one after another
        engine.add(request)
        while engine.busy:
            ended += [e for e in engine.step() if e.finish]
    return ended


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
def test_a_texts_prefix_is_taken_from_the_cache_where_the_last_row_is_all_that_counts(how: str, tmp_path: Path):
    path = save(decoder(), tmp_path / "m", pooling=how)
    engine, _ = made(path, task="generate")
    long = TEXTS[2]
    other = [*long[:64], 3, 3, 3]
    first, again, shared = receipts(engine, texts([long, long, other]))
    assert first.vector == again.vector
    cached = [e.receipt.cached_tokens for e in (first, again, shared) if e.receipt]
    assert cached == ([0, 128, 64] if how == "last" else [0, 0, 0])
    assert shared.vector == told(made(path, task="generate")[0], texts([other]))["text-0"]
    chat = Request(id="chat", tokens=[*long, 7], sampling=GREEDY)
    [ended] = receipts(engine, [chat])  # what a text computed is there for everyone
    assert ended.receipt is not None and ended.receipt.cached_tokens == 128
    [apart] = receipts(engine, [Request(id="x", tokens=long, vector=True, namespace="another's")])
    assert apart.receipt is not None and apart.receipt.cached_tokens == 0 and apart.vector == first.vector


def test_texts_that_are_preempted_or_let_go(tmp_path: Path):
    """Pages are short: texts and answers give way to each other, and come to the same."""
    path = save(decoder(), tmp_path / "m", pooling="mean")
    page = 3 * 2 * 2 * 16 * 2 * 16
    short = {"kv_memory": 12 * page, "kv_dtype": "f16", "max_batch_tokens": 16, "max_seqs": 8}
    roomy, tight = (made(path, task="generate", **s)[0] for s in ({"kv_dtype": "f16"}, short))
    longer = msgspec.structs.replace(GREEDY, max_tokens=60)
    requests = [msgspec.structs.replace(r, sampling=longer) for r in answers()] + texts(TEXTS[:4])
    want = told(roomy, requests)
    for turn in range(3):
        gone = Request(id="gone", tokens=TEXTS[2], vector=True)
        tight.add(gone)
        for _ in range(turn):
            tight.step()
        tight.abort("gone")
        while tight.busy:
            tight.step()
        got = told(tight, requests)
        for name in want:
            tokens = [
                [t for tokens, _ in one for t in tokens] if isinstance(one, list) else one
                for one in (want[name], got[name])
            ]
            assert tokens[0] == tokens[1]
    stats = tight.stats()
    assert stats.preemptions > 0 and stats.pages_used == 0


def test_what_cannot_be_a_vector_is_refused_and_the_rest_goes_on(tmp_path: Path):
    engine, info = made(folders.save(decoder(), tmp_path / "m"))
    wrong = {
        "empty": Request(id="empty", tokens=[], vector=True),
        "long": Request(id="long", tokens=[1] * (info.context + 1), vector=True),
        "strange": Request(id="strange", tokens=[info.vocab_size], vector=True),
        "held": Request(id="held", tokens=[1], vector=True, constraint=Constraint.regex("a")),
    }
    for request in wrong.values():
        engine.add(request)
    engine.add(Request(id="fits", tokens=[1] * info.context, vector=True))
    ended: dict[str, Event] = {}
    while engine.busy:
        ended |= {e.id: e for e in engine.step()}
    assert all(ended[name].finish == "error" for name in wrong) and ended["fits"].vector
    assert f"{info.context + 1} tokens" in (ended["long"].error or "")


def test_a_checkpoint_that_asks_for_more_than_pooling_generates_and_says_why_it_does_not_embed(tmp_path: Path):
    path = save(decoder(), tmp_path / "m", pooling="last")
    modules = json.loads((path / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (path / "modules.json").write_text(json.dumps(modules))
    engine, info = made(path, task="generate")
    assert info.dimensions == 0 and any(
        line.startswith("no embeddings:") and "'Dense'" in line for line in info.decisions
    )
    assert told(engine, answers())
    [refused] = receipts(engine, texts([[1, 2]]))
    assert refused.finish == "error" and "no embeddings" in (refused.error or "")
