"""Decode-only steps that a program takes by itself, beside the same plans in Python's own steps: rows and slots are the same."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from quire.backends.adapters import Pair as Halves
from quire.backends.adapters import Target
from quire.backends.native.backend import NativeBackend
from quire.layouts import Dense
from quire.runner.lora import Loras
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan, Result
from quire.runner.runner import Runner
from tests.unit.runner.tiny_llama import KV_HEADS, WIDTH, TinyLlama, V, decode, known, opening

PAGE, CONTEXT, SEQS = 16, 60, 8
ARRAYS = ("last", "length", "position", "covered", "adapter", "live")
GREEDY = SamplingParams(temperature=0.0)
TELLS = SamplingParams(temperature=0.0, logprobs=2)
SILENT = {
    "greedy": GREEDY,
    "drawn": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01),
    "biased": SamplingParams(temperature=0.0, logit_bias={5: 4.0, 9: -3.0}),
    "held back": SamplingParams(temperature=0.7, min_tokens=12, logit_bias={2: 30.0}),
    "looks back": SamplingParams(temperature=0.6, top_k=30, repetition_penalty=1.3, presence_penalty=0.2),
    "counts": SamplingParams(temperature=0.0, frequency_penalty=1.5, min_tokens=6),
}


class Plain:
    """A program that runs, samples, and no more."""

    def __init__(self, program: Any):
        self.run, self.host_sampler = program.run, program.host_sampler


class Counting:
    """A program's own steps, and how many it took."""

    def __init__(self, inner: Any):
        self._inner, self.ran, self.chose = inner, 0, 0

    def run(self, slot: Any) -> Any:
        found = self._inner.run(slot)
        self.ran += found is not None
        return found

    def choose(self, params: Any, seen: Any) -> Any:
        found = self._inner.choose(params, seen)
        self.chose += found is not None
        return found


class Pair:
    """Two runners of one model: in one the program takes its own steps, in the other Python does."""

    def __init__(self, model: TinyLlama | None = None, threads: int = 2, seqs: int = SEQS):
        model = model or TinyLlama(head_dim=8)
        self._vocab = len(model.table.data)
        kv = model.kv_layout.kv(1, PAGE, KV_HEADS, model.head_dim).sized((2 * seqs,))
        most = {"max_tokens": 64 + 8 * seqs, "max_rows": 32 + seqs}
        made = [NativeBackend(threads).compile(model.forward, kv=kv, **most) for _ in range(2)]
        sizes = {"vocab_size": self._vocab, "max_seqs": seqs, "max_context": CONTEXT, **most}
        self.programs = made
        self.own, self.plain = (Runner(p, kv=kv, **sizes) for p in (made[0], Plain(made[1])))
        assert self.plain._steps is None and self.own._steps is not None
        self.own._steps = self.counts = Counting(self.own._steps)
        self._step = 0

    def step(self, *work: Any, opened: Any = (), closed: Any = (), masks: Any = None) -> Result:
        plan = Plan(step=self._step, work=list(work), opened=list(opened), closed=list(closed))
        self._step += 1
        results = [r.sample(r.forward(plan), masks).result() for r in (self.own, self.plain)]
        assert results[0] == results[1]
        for name in ARRAYS:
            ours, theirs = (getattr(r._slots, name) for r in (self.own, self.plain))
            assert np.array_equal(ours, theirs), name
        return results[0]

    def begin(self, *params: SamplingParams) -> None:
        """Sequences in slots 0 and so on, with prompts of 3 to 7 tokens and two pages each."""
        prompts = [[(7 * s + 11 * i) % (self._vocab - 9) + 5 for i in range(3 + s % 5)] for s in range(len(params))]
        work = [known(s, p, 0, sample=True, page_from=0, pages=[2 * s, 2 * s + 1]) for s, p in enumerate(prompts)]
        self.step(*work, opened=[opening(s, p, params[s], seed=s) for s, p in enumerate(prompts)])


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("count", [1, 3])
def test_steps_are_the_same(name: str, count: int) -> None:
    pair = Pair()
    pair.begin(*[SILENT[name]] * count)
    for _ in range(20):  # beyond a page
        pair.step(*map(decode, range(count)))
    assert pair.counts.ran == pair.counts.chose == 20


def test_every_kind_together_in_any_order_and_company() -> None:
    pair = Pair()
    pair.begin(*SILENT.values())
    for slots in ([0, 1, 2, 3, 4, 5, 6], [6, 4, 2, 0], [1], [3, 4, 0, 6, 1, 5, 2], [2], [0, 1]):
        for _ in range(2):
            pair.step(*map(decode, slots))
    for slots in ([4, 6, 5, 3, 2, 1, 0],) * 18:  # the longest first
        pair.step(*map(decode, slots))
    assert pair.counts.ran == pair.counts.chose == 30


def test_who_has_more_to_say_is_computed_alike_and_chosen_in_python() -> None:
    pair = Pair()
    pair.begin(GREEDY, TELLS, SILENT["drawn"])
    for _ in range(6):
        pair.step(decode(0), decode(1), decode(2))
    assert (pair.counts.ran, pair.counts.chose) == (6, 0)
    for _ in range(6):
        pair.step(decode(0), decode(2))
    assert (pair.counts.ran, pair.counts.chose) == (12, 6)


def test_masks_are_for_python() -> None:
    pair = Pair()
    pair.begin(GREEDY, GREEDY)
    allowed = np.zeros(V, bool)
    allowed[[30, 40]] = True
    rows = pair.step(decode(0), decode(1), masks={1: allowed}).rows
    assert rows[1].tokens[0] in (30, 40)
    pair.step(decode(0), decode(1))
    assert (pair.counts.ran, pair.counts.chose) == (2, 1)


def test_pages_come_and_sequences_go() -> None:
    pair = Pair()
    pair.begin(GREEDY, SILENT["drawn"])
    for _ in range(28):
        pair.step(decode(0), decode(1))
    assert pair.own._slots.length[:2].tolist() == [31, 32]
    # The second needs a page. Without one it is refused, alone, and Python says so.
    rows = pair.step(decode(0), decode(1)).rows
    assert rows[0].error is None and "page" in (rows[1].error or "")
    ran = pair.counts.ran
    rows = pair.step(decode(0, page_from=2, pages=[9]), decode(1)).rows  # once failed, it stays so
    assert rows[0].error is None and rows[1].error
    pair.step(decode(0), closed=[1])
    assert pair.counts.ran == ran + 1
    pair.step(
        known(1, [8, 9], 0, sample=True, page_from=0, pages=[2]), opened=[opening(1, [8, 9], SILENT["drawn"], seed=3)]
    )
    pair.step(decode(1), decode(0))
    assert pair.counts.ran == ran + 2


def test_the_end_of_the_context() -> None:
    pair = Pair()
    prompt = list(range(5, 5 + CONTEXT - 2))
    first = known(0, prompt, 0, sample=True, page_from=0, pages=[0, 1, 2, 3])
    pair.step(first, opened=[opening(0, prompt, GREEDY)])
    pair.step(decode(0))
    pair.step(decode(0))
    assert pair.counts.ran == 2
    assert pair.step(decode(0)).rows[0].error is not None
    assert pair.counts.ran == 2


def test_slots_that_are_not_open_or_not_there_or_have_no_token_yet() -> None:
    pair = Pair()
    pair.begin(GREEDY)
    pair.step(known(1, [8, 9], 0, page_from=0, pages=[9]), opened=[opening(1, [8, 9, 10], GREEDY)])
    assert pair.step(decode(0), decode(1)).rows[1].error
    for bad in (3, SEQS, -1):
        rows = pair.step(decode(0), decode(bad)).rows
        assert rows[0].error is None and rows[1].error
    assert pair.counts.ran == 0


def test_logits_that_are_not_numbers_fail_one_sequence() -> None:
    model = TinyLlama(head_dim=8)
    model.table.data[60] = np.inf
    pair = Pair(model)
    pair.begin(GREEDY, SamplingParams(temperature=0.0, logit_bias={60: 1e4}), GREEDY)
    rows = pair.step(decode(0), decode(1), decode(2)).rows
    assert rows[0].tokens and rows[2].tokens and "NaN" in (rows[1].error or "")
    assert (pair.counts.ran, pair.counts.chose) == (1, 0)
    assert "NaN" in (pair.step(decode(0), decode(1), decode(2)).rows[1].error or "")  # it stays failed
    assert pair.counts.ran == 1
    pair.step(decode(0), decode(2))
    assert (pair.counts.ran, pair.counts.chose) == (2, 1)


@pytest.mark.parametrize("vocab", [70, 128, 129, 1500, 5003])
@pytest.mark.parametrize("seqs", [1, 9, 33, 140])
def test_peaks_of_any_vocabulary_and_company(vocab: int, seqs: int) -> None:
    pair = Pair(TinyLlama(head_dim=8, vocab=vocab), threads=3, seqs=seqs)
    kinds = list(SILENT.values())
    pair.begin(*[kinds[s % len(kinds)] for s in range(seqs)])
    for _ in range(3):
        pair.step(*map(decode, range(seqs)))
    assert pair.counts.ran == pair.counts.chose == 3


@pytest.mark.parametrize("sign", [1, -1])
def test_what_lies_behind_the_vocabulary_is_no_peak(sign: int) -> None:
    model = TinyLlama(head_dim=8, vocab=70)  # of five blocks of a matrix, the last one not full
    model.head.data[:] = (
        sign * np.linspace(1, 2, 70, dtype=np.float32)[:, None] * model.head.data[7]
    )  # all logits of one sign
    pair = Pair(model)
    pair.begin(GREEDY, SILENT["drawn"])
    for _ in range(3):
        pair.step(decode(0), decode(1))
    assert pair.counts.chose == 3


@pytest.mark.parametrize("what", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("token", [0, 63, 64, 700, 1023, 1402])
def test_a_peak_tells_of_what_is_not_a_number(what: float, token: int) -> None:
    model = TinyLlama(head_dim=8, vocab=1403)
    model.head.data[token] = what
    pair = Pair(model)
    work = [known(s, [8, 9], 0, page_from=0, pages=[s]) for s in range(2)]
    pair.step(*work, opened=[opening(s, [8, 9, 10], GREEDY) for s in range(2)])
    for runner in (pair.own, pair.plain):
        runner._slots.last[:2] = 10
    rows = pair.step(decode(0), decode(1)).rows
    assert all("NaN" in (row.error or "") for row in rows)
    assert (pair.counts.ran, pair.counts.chose) == (1, 0)


class Adapted(TinyLlama):
    """With a place for adapters at its logits."""

    target = Target("head", V, WIDTH, slots=2, rank=4)

    def logits(self, ops: Any, batch: Any, x: Any) -> Any:
        return ops.adapt(super().logits(ops, batch, x), x, batch.taken_adapters, self.target)


def test_adapters_beside_none_and_in_any_order() -> None:
    pair = Pair(Adapted(head_dim=8), seqs=6)
    for runner, program in ((pair.own, pair.programs[0]), (pair.plain, pair.programs[1])):
        loras = Loras(program, 2)
        runner.adopt(loras)
        rng = np.random.default_rng(3)
        for key in ("one", "two"):
            a, b = (Dense(4 * rng.standard_normal(shape).astype(np.float32), "f32") for shape in ((4, WIDTH), (V, 4)))
            loras.put(key, {Adapted.target: Halves(a, b, 1.0)})
    names = ["", "two", "one", "one", "", "two"]
    prompts = [[8, 9, 10 + s] for s in range(6)]
    opened = [msgspec.structs.replace(opening(s, p, GREEDY), adapter=names[s]) for s, p in enumerate(prompts)]
    first = [known(s, p, 0, sample=True, page_from=0, pages=[2 * s]) for s, p in enumerate(prompts)]
    alike = [row.tokens for row in pair.step(*first, opened=opened).rows]
    assert pair.own._slots.adapter[:6].tolist() == [-1, 1, 0, 0, -1, 1]
    for slots in ([0, 4, 2, 3, 1, 5], [2, 3], [1], [0, 1], [4]):
        pair.step(*map(decode, slots))
    assert pair.counts.ran == pair.counts.chose == 5
    pair.step(*map(decode, [1, 2, 0]))  # Python puts rows of one adapter together
    assert pair.counts.ran == 5
    assert len(set(map(tuple, alike))) > 1


def test_what_crosses_the_border_is_checked() -> None:
    pair = Pair()
    pair.begin(GREEDY, GREEDY)
    steps, slots, sampler = pair.own._steps, pair.own._slots, pair.own._sampler
    params = sampler.native_params(slots.streams_of([0, 1]))
    assert steps.choose(params, []) is None  # nothing was computed
    for slot in ([], [0, -1], [-(1 << 40)], [SEQS], [0, 1 << 40]):
        assert steps.run(np.array(slot, np.intp)) is None
    slots.last[1] = V
    assert steps.run(np.array([0, 1], np.intp)) is None
    slots.last[1] = 7
    assert steps.run(np.array([0, 1], np.intp)) is not None
    before = slots.last.copy()
    assert steps.choose(params[:1], []) is None
    stranger = NativeBackend(1).host_sampler(V + 1)
    other = stranger.params(0.0, 0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 1, -1, [], [])
    with pytest.raises(ValueError, match="another sampler"):
        steps.choose([params[0], other], [])
    looks_back = sampler._native.params(0.0, 0, 1.0, 1.0, 0.0, 1.1, 0.0, 0.0, 0, 1, -1, [], [])
    assert steps.choose([params[0], looks_back], []) is None  # at what?
    ids, counts = np.array([5, V], np.int64), np.zeros(2)
    for bad in ((1, ids, counts), (2, ids[:1], counts[:1]), (1, ids[:1], counts)):
        with pytest.raises(ValueError, match=r"vocabulary|nobody's"):
            steps.choose([params[0], looks_back], [bad])
    assert np.array_equal(slots.last, before)
    assert len(steps.choose([params[0], looks_back], [(1, ids[:1], counts[:1])])) == 2
    assert steps.choose(params, []) is None  # only once

    program, native = pair.own._program, sampler._native
    with pytest.raises(ValueError, match="page"):
        program.host_steps(native, slots, 4, CONTEXT, SEQS)
    assert program.host_steps(native, slots, PAGE, CONTEXT, 1).run(np.array([0, 1], np.intp)) is None
    short = type("Short", (), {name: getattr(slots, name) for name in (*ARRAYS, "tables")})
    short.length = slots.length[:2].copy()
    with pytest.raises(ValueError, match="differ"):
        program.host_steps(native, short, PAGE, CONTEXT, SEQS)
