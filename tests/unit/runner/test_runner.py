"""The runner on a tiny random model: however tokens are cut into steps, they are those of naive recomputation."""

import msgspec
import numpy as np
import pytest

from quire.runner.params import SamplingParams
from quire.runner.plan import Plan
from tests.unit.runner.naive_sampling import logprobs
from tests.unit.runner.tiny_llama import (
    CONTEXT,
    PAGE,
    V,
    all_logits,
    decode,
    generate,
    known,
    make_runner,
    opening,
    program,
)

GREEDY = SamplingParams(temperature=0.0)
MIXED = SamplingParams(
    temperature=1.5, top_k=30, repetition_penalty=1.3, frequency_penalty=0.8, min_tokens=6, logprobs=3
)
PROMPT = [5, 17, 4, 80, 80, 31, 9, 12, 66, 1, 40]


@pytest.fixture(params=[False, True], ids=["inline", "overlap"])
def overlap(request):
    return request.param


@pytest.fixture
def runner(overlap):
    runner = make_runner(overlap=overlap)
    yield runner
    runner.close()


class Steps:
    """Counts the steps of plans."""

    def __init__(self, runner):
        self.runner, self.step = runner, 0

    def __call__(self, *work, opened=(), closed=()):
        plan = Plan(step=self.step, work=list(work), opened=list(opened), closed=list(closed))
        self.step += 1
        rows = self.runner.step(plan).rows
        assert len(rows) == len(work)
        return rows


def _fine(row):
    assert row.error is None, row.error
    return row


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("cuts", [[11], [1, 10], [4, 4, 3], [5, 1, 2, 3], [1] * 11])
def test_chunks_and_decode_are_naive_generation(runner, params, cuts):
    go, pages, at = Steps(runner), [9, 3, 30, 1, 22], 0
    opened = [opening(0, PROMPT, params)]
    for n in cuts:
        last = at + n == len(PROMPT)
        row = _fine(
            go(known(0, PROMPT[at : at + n], at, sample=last, pages=pages if at == 0 else []), opened=opened)[0]
        )
        assert row.accepted == n and len(row.tokens) == last
        at, opened = at + n, []
    output, probs = row.tokens, row.logprobs
    for i in range(8):
        if i % 2:  # the host knows the token it was told ...
            row = _fine(go(known(0, output[-1:], len(PROMPT) + i, sample=True))[0])
        else:  # ... or leaves it to the device
            row = _fine(go(decode(0))[0])
        assert row.accepted == 1
        output, probs = output + row.tokens, probs + row.logprobs
    assert output == generate(PROMPT, params, 7, 9, stop_ids=[2, 3])
    if params.logprobs is not None:
        rows = all_logits(PROMPT + output)[len(PROMPT) - 1 :]
        for token, prob, logits in zip(output, probs, rows, strict=False):
            assert prob.token == token and prob.logprob == pytest.approx(logprobs(logits)[token], abs=1e-12)


def test_a_mixed_batch_is_each_sequence_alone(runner):
    """Prefill chunks, decode rows and finished slots in one step; a slot is used again by another sequence."""
    go = Steps(runner)
    a, b, c = PROMPT, PROMPT[3:9], [70, 71, 72, 73, 74, 75]
    first = _fine(go(known(3, a, 0, sample=True, pages=[0, 1, 2, 3]), opened=[opening(3, a, MIXED)])[0])
    two = go(
        decode(3),
        known(1, b[:4], 0, pages=[4, 5, 6]),
        opened=[opening(1, b, GREEDY)],
    )
    three = go(known(1, b[4:], 4, sample=True), decode(3))
    out_a = first.tokens + two[0].tokens + three[1].tokens
    out_b = three[0].tokens
    # Slot 3 goes to c, and its pages too, in another order.
    four = go(
        known(3, c, 0, sample=True, pages=[2, 0, 3]),
        decode(1),
        opened=[opening(3, c, MIXED, seed=11)],
        closed=[3],
    )
    five = go(decode(1), decode(3))
    out_b += four[1].tokens + five[0].tokens
    out_c = four[0].tokens + five[1].tokens
    assert out_a == generate(a, MIXED, 7, 3, [2, 3])
    assert out_b == generate(b, GREEDY, 7, 3)
    assert out_c == generate(c, MIXED, 11, 2, [2, 3])


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("kept_pages", [0, 2])
def test_resuming_after_preemption_changes_nothing(runner, params, kept_pages):
    """Penalty counts, min_tokens and the random stream go on from the tokens that were generated before."""
    go = Steps(runner)
    output = _fine(
        go(known(0, PROMPT, 0, sample=True, pages=[0, 1, 2, 3, 4]), opened=[opening(0, PROMPT, params)])[0]
    ).tokens
    for _ in range(4):
        output += _fine(go(decode(0))[0]).tokens
    so_far = PROMPT + output
    start = kept_pages * PAGE  # that much was still in the prefix tree
    pages = [0, 1, 2, 3, 4][:kept_pages] + [20, 21, 22, 23, 24][kept_pages:]
    again = opening(5, so_far, params, prompt_len=len(PROMPT))
    output += _fine(go(known(5, so_far[start:], start, sample=True, pages=pages), opened=[again], closed=[0])[0]).tokens
    for _ in range(4):
        output += _fine(go(decode(5))[0]).tokens
    assert output == generate(PROMPT, params, 7, 10, stop_ids=[2, 3])


@pytest.mark.parametrize("cuts", [[11], [3, 1, 7], [1] * 11])
def test_prompt_logprobs_across_chunks(runner, cuts):
    go, at, found = Steps(runner), 0, []
    params = SamplingParams(temperature=0.0, prompt_logprobs=4)
    opened = [opening(0, PROMPT, params), opening(1, [8, 9], GREEDY)]
    mate = known(1, [8, 9], 0, sample=True, pages=[50, 51, 52, 53])
    for n in cuts:
        rows = min(at + n, len(PROMPT) - 1) - at
        last = at + n == len(PROMPT)
        work = known(0, PROMPT[at : at + n], at, prompt_logits=rows, sample=last, pages=[7, 8, 9] if at == 0 else [])
        row, other = go(work, mate, opened=opened)
        found += _fine(row).prompt_logprobs
        assert len(_fine(other).tokens) == 1
        at, opened, mate = at + n, [], decode(1)
    assert [p.token for p in found] == PROMPT[1:]
    for logits, token, prob in zip(all_logits(PROMPT), PROMPT[1:], found, strict=False):
        want = logprobs(logits)
        assert prob.logprob == pytest.approx(want[token], abs=1e-12)
        assert [t for t, _ in prob.top] == sorted(range(V), key=lambda t: (-logits[t], t))[:4]
        assert prob.rank == sum(x > logits[token] for x in logits) + 1
    assert row.tokens == generate(PROMPT, GREEDY, 7, 1)


def test_pages_can_be_rewritten(runner):
    """A duplicate page is replaced by the tree's own, which holds the same tokens."""
    go = Steps(runner)
    opened = [opening(0, PROMPT, GREEDY), opening(1, PROMPT, GREEDY)]
    works = [known(i, PROMPT, 0, sample=True, pages=[10 * i, 10 * i + 1, 10 * i + 2]) for i in range(2)]
    first, second = go(*works, opened=opened)
    assert first.tokens == second.tokens
    row = go(decode(1, page_from=0, pages=[0, 1, 12]))[0]
    assert first.tokens + _fine(row).tokens == generate(PROMPT, GREEDY, 7, 2)


class Faulty:
    """A program that fails when told to."""

    def __init__(self, pages=64):
        self.inner, self.fault, self.nan = program(pages), None, []

    def run(self, batch, inputs={}):  # noqa: B006
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        logits = self.inner.run(batch, inputs)
        logits[self.nan, 5] = np.nan
        return logits


@pytest.mark.parametrize("fault", [MemoryError(), ValueError("no such kernel"), OSError("device lost")])
def test_an_exception_fails_the_rows_of_its_step_alone(overlap, fault, caplog):
    bad = Faulty()
    runner = make_runner(overlap=overlap, run=bad)
    go = Steps(runner)
    go(known(0, PROMPT, 0, sample=True, pages=[0, 1, 2, 3]), opened=[opening(0, PROMPT, GREEDY)])
    go(known(1, PROMPT, 0, pages=[4, 5, 6, 7]), opened=[opening(1, PROMPT, GREEDY)])
    bad.fault = fault
    rows = go(decode(0), known(2, PROMPT, 0, sample=True, pages=[8, 9, 10]), opened=[opening(2, PROMPT, GREEDY)])
    for row in rows:
        assert row.accepted == 0 and row.tokens == []
        assert ("memory" if isinstance(fault, MemoryError) else str(fault)) in row.error
    # A step that was planned before the failure was known does not go on from a state that is not true.
    rows = go(decode(0), known(1, PROMPT[-1:], 10, sample=True))
    assert rows[0].error is not None
    assert _fine(rows[1]).tokens == generate(PROMPT, GREEDY, 7, 1)
    # And the slot is as good as new for the next sequence.
    row = go(known(0, PROMPT, 0, sample=True, pages=[0, 1, 2]), opened=[opening(0, PROMPT, GREEDY)], closed=[0])[0]
    assert _fine(row).tokens == generate(PROMPT, GREEDY, 7, 1)
    runner.close()


def test_logits_that_are_not_numbers_fail_one_sequence(overlap):
    bad = Faulty()
    runner = make_runner(overlap=overlap, run=bad)
    go = Steps(runner)
    params = [GREEDY, GREEDY, SamplingParams(temperature=0.0, prompt_logprobs=1), GREEDY]
    opened = [opening(i, PROMPT, p) for i, p in enumerate(params)]
    works = [known(i, PROMPT, 0, sample=True, pages=[3 * i, 3 * i + 1, 3 * i + 2]) for i in range(4)]
    works[2].prompt_logits = 10
    bad.nan = [1, 4 + 6]  # the sampled row of 1, and one prompt row of 2
    rows = go(*works, opened=opened)
    want = generate(PROMPT, GREEDY, 7, 2)
    assert [row.error is None for row in rows] == [True, False, False, True]
    assert "the model produced NaN" in rows[1].error and "the model produced NaN" in rows[2].error
    assert rows[0].tokens == rows[3].tokens == want[:1]
    bad.nan = []
    rows = go(*(decode(i) for i in range(4)))
    assert [row.error is None for row in rows] == [True, False, False, True]
    assert rows[0].tokens == rows[3].tokens == want[1:]
    runner.close()


GOOD = {"pages": [0, 1, 2]}


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (known(1, [V], 0, **GOOD), "vocabulary"),
        (known(1, [3, -1], 0, **GOOD), "vocabulary"),
        (known(1, [3, 2**40], 0, **GOOD), "vocabulary"),
        (known(1, [3], 13, **GOOD), "pages do not hold"),
        (known(1, [3], 0), "pages do not hold"),
        (known(1, [3], 0, pages=[64]), "pool of 64"),
        (known(1, [3], 0, pages=[-1]), "pool of 64"),
        (known(1, [3], 0, page_from=1, pages=[4]), "follow 0"),
        (known(1, [3], 0, page_from=-1, pages=[4]), "follow 0"),
        (known(1, [3], 0, pages=list(range(17))), "follow 0"),
        (known(1, [3], CONTEXT, pages=list(range(16))), "context"),
        (known(1, [3], -2, **GOOD), "position -2"),
        (known(1, [], 0, **GOOD), "n=0"),
        (msgspec.structs.replace(known(1, [3], 0, **GOOD), n=2), "n=2"),
        (known(1, [3, 4], 0, sample=True, prompt_logits=2, **GOOD), "prompt logits"),
        (known(1, [3, 4], 0, prompt_logits=1, **GOOD), "known tokens"),
        (decode(1, **GOOD), "none was sampled"),
        (msgspec.structs.replace(decode(1, **GOOD), n=3, drafts=1), "n=1 + drafts"),
        (msgspec.structs.replace(known(1, [3, 4], 0, **GOOD), drafts=1), "1 drafts"),
        (known(0, [3], 0, **GOOD), "two rows"),
        (known(6, [3], 0, **GOOD), "not open"),
        (known(8, [3], 0, **GOOD), "not open"),
        (known(-1, [3], 0, **GOOD), "not open"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_a_bad_row_is_refused_alone(runner, work, why):
    go = Steps(runner)
    good = known(0, PROMPT, 0, sample=True, pages=[40, 41, 42])
    rows = go(good, work, opened=[opening(0, PROMPT, GREEDY), opening(1, PROMPT, GREEDY)])
    assert why in rows[1].error and rows[1].accepted == 0
    if work.slot != 0:
        assert _fine(rows[0]).tokens == generate(PROMPT, GREEDY, 7, 1)


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (opening(1, [3], SamplingParams(logit_bias={V: 1.0})), "logit_bias"),
        (opening(1, [3], GREEDY, prompt_len=2), "prompt of 2"),
        (opening(1, [], GREEDY), "prompt of 0"),
        (opening(1, [V], SamplingParams(repetition_penalty=1.5)), "vocabulary"),
        (opening(1, [2**70], SamplingParams(repetition_penalty=1.5)), "too large"),
        (opening(0, [3], GREEDY), "opened twice"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_a_bad_opening_is_refused_alone(runner, new, why):
    go = Steps(runner)
    opened = [opening(0, PROMPT, GREEDY), opening(4, PROMPT, GREEDY), new]
    rows = go(known(4, PROMPT, 0, sample=True, pages=[40, 41, 42]), known(new.slot, [3], 0, pages=[1]), opened=opened)
    assert why in rows[1].error
    assert _fine(rows[0]).tokens == generate(PROMPT, GREEDY, 7, 1)


def test_a_step_that_is_too_large_is_refused(overlap):
    runner = make_runner(overlap=overlap, max_rows=8)
    go = Steps(runner)
    opened = [opening(i, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0)) for i in range(7)]
    rows = go(known(0, PROMPT, 0, prompt_logits=10, sample=True, pages=[0, 1, 2]), opened=opened[:1])
    assert "11 logit rows" in rows[0].error
    works = [known(i, PROMPT, 0, pages=[3 * i, 3 * i + 1, 3 * i + 2]) for i in range(1, 7)]
    rows = go(*works, opened=opened[1:])
    assert all("66 tokens in a step of at most 64" in row.error for row in rows)
    runner.close()


def test_masks_are_by_place_in_the_plan(runner):
    works = [known(i, PROMPT, 0, sample=i != 1, pages=[3 * i, 3 * i + 1, 3 * i + 2]) for i in range(3)]
    plan = Plan(step=0, work=works, opened=[opening(i, PROMPT, GREEDY) for i in range(3)])
    only = np.zeros(V, np.bool_)
    only[33] = True
    rows = runner.sample(runner.forward(plan), {2: only}).result().rows
    assert rows[0].tokens == generate(PROMPT, GREEDY, 7, 1)
    assert rows[1].tokens == [] and rows[2].tokens == [33]


def test_forward_and_sample_alternate_and_close_ends(overlap):
    runner = make_runner(overlap=overlap)
    pending = runner.forward(Plan(step=0, work=[]))
    with pytest.raises(RuntimeError, match="twice"):
        runner.forward(Plan(step=1, work=[]))
    assert runner.sample(pending).result().rows == []
    with pytest.raises(RuntimeError, match="not the last"):
        runner.sample(pending)
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward(Plan(step=2, work=[]))
    with pytest.raises(ValueError, match="max_rows"):
        make_runner(max_rows=3)
