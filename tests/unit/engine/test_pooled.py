"""Embeddings of decoders against transformers, and texts in the scheduler: chunks, pages, order, aborts, failures."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.engine import Engine
from quire.engine.limits import WholePrompts, standard
from quire.engine.policy import FairShare, FirstCome, Policy
from quire.engine.pooled import Texts
from quire.engine.scheduler import Scheduler
from quire.engine.types import EngineInfo, Event, Request
from quire.layouts import Floats
from quire.observe.errors import BadRequest, Unsupported
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan, Result, Row
from tests.unit.models import folders
from tests.unit.models.encoders import save

torch = pytest.importorskip("torch", reason="needs torch: the test extra")
transformers = pytest.importorskip("transformers", reason="needs transformers: the test extra")

RNG = np.random.default_rng(7)
TEXTS = [RNG.integers(0, 160, n).tolist() for n in (5, 1, 130, 33, 64, 16, 17, 90)]


def decoder(base: bool = False, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        **{**folders.tiny.TINY, "head_dim": 16, "tie_word_embeddings": not base, **changes}
    )
    model = (transformers.Qwen3Model if base else transformers.Qwen3ForCausalLM)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def made(path: Path, **settings: Any) -> tuple[Engine, EngineInfo]:
    settings = {"backend": "native", "threads": 1, **settings}
    return build_engine(EngineConfig(path=str(path), **settings), Environment(home=path.parent))


def vectors(engine: Engine, texts: list[list[int]] = TEXTS) -> list[Floats]:
    for i, tokens in enumerate(texts):
        engine.add(Request(id=str(i), tokens=tokens))
    events: dict[str, Event] = {}
    while engine.busy:
        events |= {e.id: e for e in engine.step()}
    assert all(e.error is None for e in events.values())
    return [np.frombuffer(events[str(i)].vector, "<f4") for i in range(len(texts))]


def wanted(model: Any, tokens: list[int], how: str) -> Floats:
    with torch.no_grad():
        inner = getattr(model, "model", model)
        rows = inner(torch.tensor([tokens])).last_hidden_state[0].double().numpy()
    one = rows.mean(axis=0) if how == "mean" else rows[0] if how == "cls" else rows[-1]
    return one / np.linalg.norm(one)


@pytest.mark.parametrize("how", ["last", "mean", "cls"])
def test_a_decoders_embeddings_are_those_of_transformers_in_any_chunks(how: str, tmp_path: Path):
    model = decoder()
    path = save(model, tmp_path / "m", pooling=how)
    engine, info = made(path)
    assert (info.task, info.dimensions, info.context) == ("embed", 96, 512)
    whole = vectors(engine)
    for tokens, vector in zip(TEXTS, whole, strict=True):
        assert float(vector.astype(np.float64) @ wanted(model, tokens, how)) > 0.9999  # keys and values are float16
    chunked = vectors(made(path, max_batch_tokens=48, max_seqs=3)[0])
    for a, b in zip(whole, chunked, strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_mean_of_a_text_in_chunks_is_not_only_the_right_direction(tmp_path: Path):
    model = decoder()
    path = save(model, tmp_path / "m", pooling="mean", normalize=False)
    with torch.no_grad():
        rows = model.model(torch.tensor([TEXTS[2]])).last_hidden_state[0].numpy()
    [vector] = vectors(made(path, max_batch_tokens=48, max_seqs=3)[0], [TEXTS[2]])
    assert np.linalg.norm(vector) == pytest.approx(float(np.linalg.norm(rows.mean(axis=0))), rel=1e-2)


def test_a_model_without_a_head_is_read_and_only_embeds(tmp_path: Path):
    """As Qwen3-Embedding-8B is saved: no `model.` before the names, and no head though none is tied."""
    model = decoder(base=True)
    path = folders.save(model, tmp_path / "m")
    engine, info = made(path)
    assert info.task == "embed" and any("last, normalized" in line for line in info.decisions)
    assert float(vectors(engine, [TEXTS[2]])[0].astype(np.float64) @ wanted(model, TEXTS[2], "last")) > 0.9999
    with pytest.raises(Unsupported, match="no output head"):
        made(path, task="generate")


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_a_decoder_that_generates_embeds_when_asked(backend: str, tmp_path: Path):
    path = folders.save(decoder(), tmp_path / "m")
    assert made(path)[1].task == "generate"
    engine, info = made(path, task="embed", backend=backend)
    assert info.task == "embed"
    assert float(vectors(engine, [TEXTS[0]])[0].astype(np.float64) @ wanted(decoder(), TEXTS[0], "last")) > 0.9999
    with pytest.raises(Unsupported, match="which tokens are yes and no"):  # a judge needs words
        made(path, task="score")


def test_pages_are_taken_for_a_text_and_given_back(tmp_path: Path):
    path = folders.save(decoder(), tmp_path / "m")
    page = 3 * 2 * 2 * 16 * 2 * 16
    engine, info = made(path, task="embed", kv_memory=10 * page, kv_dtype="f16")
    assert (info.pages, info.context) == (10, 160)
    few = vectors(engine)
    assert engine.stats().pages_used == 0
    many = vectors(made(path, task="embed", kv_dtype="f16")[0])
    assert [v.tobytes() for v in few] == [v.tobytes() for v in many]


class Device:
    """A runner that checks what it is given: every text in order, in its own pages, at most `most` open between steps."""

    def __init__(self, fail: int | None = None, most: int = 1):
        self.open: dict[int, tuple[int, int, list[int]]] = {}  # by slot: whose it is, how far it has come, its pages
        self.fail = fail
        self.most = most
        self.cut = 0

    def forward(self, plan: Plan) -> Plan:
        for slot in (*plan.closed, *(new.slot for new in plan.opened)):
            self.open.pop(slot, None)
        for w in plan.work:
            assert w.vector and w.tokens is not None and len(w.tokens) == w.n > 0
            key, done, pages = self.open.pop(w.slot, (w.key, 0, []))
            assert w.start == done and w.key == key and (not w.pages or w.page_from == len(pages))
            pages = pages + w.pages
            assert not set(pages) & {page for _, _, own in self.open.values() for page in own}
            assert w.start + w.n <= 4 * len(pages)
            self.open[w.slot] = (w.key, w.start + w.n, pages)
        unfinished = [w for w in plan.work if not w.sample]
        self.cut = max(self.cut, len(unfinished))
        assert len(unfinished) <= self.most
        if plan.step == self.fail:
            raise RuntimeError("a step that fails")
        return plan

    def sample(self, pending: Plan) -> Any:
        rows = [Row(accepted=w.n, vector=bytes([w.n % 256])) for w in pending.work]
        return type("T", (), {"result": lambda self: Result(rows=rows)})()

    def close(self) -> None: ...


def scheduler(*, whole: bool = False, budget: int = 16, max_seqs: int = 4, policy: Policy | None = None) -> Scheduler:
    tree = PrefixTree(Pool(max_seqs), 40) if whole else PrefixTree(Pool(12), 4)
    limits = (*standard(), *([WholePrompts(budget, 40)] if whole else []))
    return Scheduler(
        tree, slots=max_seqs, budget=budget, context=40, draw=lambda: 0, limits=limits, prefix_cache=False, vectors=True,
        policy=policy or FirstCome(),
    )  # fmt: skip


def text(name: str, tokens: list[int], priority: int = 0) -> Request:
    return HOOKS.on_request(Request(id=name, tokens=tokens, priority=priority))


HOOKS = Texts(context=40, vocab_size=100)


@pytest.mark.parametrize("policy", [FirstCome, FairShare])
def test_random_texts_all_end_and_leave_nothing_behind(policy: type[FirstCome | FairShare]):
    rng = random.Random(1)
    cut = 0
    for _ in range(60):
        s, device = scheduler(policy=policy()), Device(most=1 if policy is FirstCome else 2)
        engine = Engine(s, device, 0, hooks=HOOKS)
        ids = [str(i) for i in range(30)]
        ended: dict[str, str] = {}
        for name in ids:
            n = rng.choice((1, 3, 4, 15, 16, 17, 40))
            engine.add(Request(id=name, tokens=[1] * n, priority=rng.choice((0, 0, 1))))
            if rng.random() < 0.2:
                engine.abort(rng.choice(ids))
            if rng.random() < 0.5:
                ended |= {e.id: e.finish or "" for e in engine.step()}
        while engine.busy:
            ended |= {e.id: e.finish or "" for e in engine.step()}
        assert set(ended) == set(ids) and set(ended.values()) <= {"stop", "abort"}
        assert s.stats().pages_used == 0 and not s.has_work
        cut = max(cut, device.cut)
    assert cut == (1 if policy is FirstCome else 2)  # a short text is computed beside a long one


def test_priority_comes_before_arrival():
    s = scheduler(max_seqs=1)
    for i, priority in enumerate((1, 0, 0)):
        s.add(text(str(i), [1], priority))
    order = []
    while (plan := s.plan()) is not None:
        order += [e.id for e in s.commit(plan, Result(rows=[Row(accepted=1) for _ in plan.work]))]
    assert order == ["1", "2", "0"]


def test_a_step_that_fails_ends_its_texts_and_no_others():
    s = scheduler(max_seqs=2)
    engine = Engine(s, Device(fail=0), 0, hooks=HOOKS)
    for name in "abc":
        engine.add(Request(id=name, tokens=[1, 2, 3]))
    events: dict[str, Event] = {}
    while engine.busy:
        events |= {e.id: e for e in engine.step()}
    assert {name: e.finish for name, e in events.items()} == {"a": "error", "b": "error", "c": "stop"}
    assert s.stats().pages_used == 0


def test_an_encoders_text_is_never_cut():
    s = scheduler(whole=True, budget=40)
    for name, n in (("a", 30), ("b", 20), ("c", 20)):
        s.add(text(name, [1] * n))
    steps = []
    while (plan := s.plan()) is not None:
        steps.append([w.n for w in plan.work])
        assert all(w.sample for w in plan.work)
        s.commit(plan, Result(rows=[Row(accepted=w.n) for w in plan.work]))
    assert steps == [[30], [20, 20]]
    with pytest.raises(ValueError, match="cannot hold"):
        scheduler(whole=True)


@pytest.mark.parametrize("policy", [FirstCome, FairShare])
def test_random_encoders_texts_are_never_cut_and_none_is_left(policy: type[FirstCome | FairShare]):
    rng = random.Random(2)
    for _ in range(40):
        s, budget = scheduler(whole=True, budget=rng.randint(40, 90), policy=policy()), 0
        names = {str(i): rng.randint(1, 40) for i in range(25)}
        todo = list(names.items())
        ended: list[str] = []
        while todo or s.has_work:
            for name, n in [todo.pop() for _ in range(min(len(todo), rng.randint(0, 4)))]:
                s.add(text(name, [1] * n, rng.choice((0, 0, 1))))
            plan = s.plan()
            if plan is not None:
                assert all(w.sample and w.start == 0 for w in plan.work)
                budget = max(budget, plan.tokens)
                ended += [e.id for e in s.commit(plan, Result(rows=[Row(accepted=w.n) for w in plan.work]))]
            else:
                assert not s.has_work
        assert sorted(ended) == sorted(names) and budget > 30


def test_texts_and_answers_ride_in_one_batch():
    """A scheduler of both: a text ends in the step that computes its last token, beside sequences that go on."""
    s = scheduler(budget=16)
    s.add(Request(id="answer", tokens=[1, 2, 3], sampling=SamplingParams(max_tokens=3)))
    s.add(text("long", [4] * 20))
    s.add(text("short", [5, 6]))
    heard: dict[str, Event] = {}
    shapes = []
    while (plan := s.plan()) is not None:
        shapes.append([(w.n, w.vector) for w in plan.work])
        rows = [
            Row(accepted=w.n, vector=b"v") if w.vector else Row(accepted=w.n, tokens=[9] * w.sample) for w in plan.work
        ]
        heard |= {e.id: e for e in s.commit(plan, Result(rows=rows)) if e.finish}
    assert shapes == [[(3, False), (13, True)], [(1, False), (7, True), (2, True)], [(1, False)]]
    assert heard["answer"].finish == "length" and not heard["answer"].vector
    assert all(heard[name].finish == "stop" and heard[name].vector == b"v" for name in ("long", "short"))
    receipt = heard["long"].receipt
    assert receipt is not None and (receipt.chunks, receipt.output_tokens) == (2, 0)


def test_what_cannot_be_computed_is_refused_with_both_numbers():
    with pytest.raises(BadRequest, match=r"41 tokens.* is 40"):
        HOOKS.on_request(Request(id="x", tokens=[1] * 41))
    for tokens in ([], [100], [-1]):
        with pytest.raises(BadRequest):
            HOOKS.on_request(Request(id="x", tokens=tokens))
    generating = Scheduler(PrefixTree(Pool(12), 4), slots=1, budget=8, context=40, draw=lambda: 0)
    with pytest.raises(BadRequest, match="no embeddings"):
        generating.add(Request(id="x", tokens=[1], vector=True))
