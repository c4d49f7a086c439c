"""The device runner does what the host's does: the same tests, the same tokens; and what only it can get wrong."""

import dataclasses
import functools
import random

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from quire.engine.types import Request  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from quire.runner.plan import Plan  # noqa: E402
from quire.runner.spans import Span  # noqa: E402
from tests.unit.runner import test_runner_overlap as overlapped  # noqa: E402
from tests.unit.runner import tiny_llama  # noqa: E402
from tests.unit.runner.device.kit import OnDevice, make_device_runner  # noqa: E402
from tests.unit.runner.naive_sampling import logprobs  # noqa: E402
from tests.unit.runner.test_runner import (  # noqa: E402, F401
    GREEDY,
    MIXED,
    PROMPT,
    Steps,
    _fine,
    test_a_bad_opening_is_refused_alone,
    test_a_bad_row_is_refused_alone,
    test_a_mixed_batch_is_each_sequence_alone,
    test_chunks_and_decode_are_naive_generation,
    test_masks_are_by_place_in_the_plan,
    test_pages_can_be_rewritten,
    test_prompt_logprobs_across_chunks,
    test_resuming_after_preemption_changes_nothing,
)
from tests.unit.runner.tiny_llama import all_logits, decode, generate, known, make_runner, opening  # noqa: E402


@pytest.fixture(params=[False, True], ids=["eager", "padded"])
def padded(request):
    return request.param


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Steps with prompts are padded here too, but not to sizes that only a GPU computes at once."""
    monkeypatch.setattr("quire.runner.device.prefill.SIZES", ((6, 3), (12, 5)))


@pytest.fixture
def runner(padded):
    """Takes the place of the host's in the tests imported above."""
    runner = make_device_runner(padded=padded)
    yield runner
    runner.close()


def _close(have, want, bound=1e-12):
    """Equal tokens; equal log probabilities up to the rounding of a float64 sum."""
    assert have.keys() == want.keys()
    for name in want:
        assert have[name][0] == want[name][0]
        for mine, theirs in zip(have[name][1:], want[name][1:], strict=True):
            assert [(p.token, p.rank, [t for t, _ in p.top]) for p in mine] == [
                (p.token, p.rank, [t for t, _ in p.top]) for p in theirs
            ]
            for p, q in zip(mine, theirs, strict=True):
                assert p.logprob == pytest.approx(q.logprob, abs=bound)
                assert [x for _, x in p.top] == pytest.approx([x for _, x in q.top], abs=bound)


def _more_requests(rng: random.Random) -> list[Request]:
    """The requests of the host's own test, with every other rule mixed in."""
    requests = overlapped._requests(rng)
    for i, request in enumerate(requests):
        p = request.sampling
        if rng.random() < 0.6:
            p = SamplingParams(
                temperature=rng.choice([0.0, 0.6, 1.0, 1.4]),
                top_k=rng.choice([0, 1, 7, 40, 200]),
                top_p=rng.choice([1.0, 0.5, 0.95]),
                min_p=rng.choice([0.0, 0.05]),
                typical_p=rng.choice([1.0, 0.8]),
                presence_penalty=rng.choice([0.0, 0.7]),
                repetition_penalty=rng.choice([1.0, 0.8, 1.5]),
                logit_bias=rng.choice([{}, {3: 4.0, 70: -5.0, 2: 1.5}]),
                seed=rng.randrange(2**63),
                max_tokens=rng.randint(1, 12),
                min_tokens=rng.choice([0, 1]),
                logprobs=rng.choice([None, 0, 5]),
            )
        requests[i] = Request(id=request.id, tokens=request.tokens, sampling=p, eos_ids=(2, 3))
    return requests


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_host_runner(seed, padded, monkeypatch):
    """Random requests through the scheduler: greedy and seeded, penalties, filters, logprobs, preemptions, depth 0 to 2."""
    rng = random.Random(seed)
    requests = _more_requests(rng)
    size = {"pages": rng.randint(14, 24), "budget": rng.randint(4, 24), "slots": rng.randint(2, 6)}
    want, _ = overlapped._serve(requests, 0, False, **size)
    monkeypatch.setattr(overlapped, "make_runner", functools.partial(make_device_runner, padded=padded))
    for depth in (0, 1, 2):
        have, _ = overlapped._serve(requests, depth, False, **size)
        _close(have, want)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_share_a_beginning_are_put_together(seed, monkeypatch):
    """Traffic over few prompts, with every shared page told: the same tokens, and what is told is true (see OnDevice)."""
    monkeypatch.setattr("quire.runner.device.runner.WORTH", 1)
    monkeypatch.setattr("quire.runner.device.sharing.LEAST", 1)
    monkeypatch.setattr("quire.runner.device.runner.LEAST", 1)
    rng = random.Random(seed)
    bases = [[rng.randrange(4, 30) for _ in range(rng.randrange(9, 21))] for _ in range(3)]
    requests = [
        Request(
            id=str(i),
            tokens=rng.choice(bases)[: rng.randrange(9, 21)] + [rng.randrange(4, 30) for _ in range(rng.randrange(4))],
            sampling=SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=i, max_tokens=rng.randrange(4, 20)),
        )
        for i in range(14)
    ]
    size = {"pages": rng.randint(24, 48), "budget": rng.randint(12, 30), "slots": rng.randint(4, 6)}
    want, _ = overlapped._serve(requests, 0, False, **size)
    seen = OnDevice(size["pages"])
    monkeypatch.setattr(overlapped, "make_runner", functools.partial(make_device_runner, padded=True, run=seen))
    for depth in (0, 1):
        have, _ = overlapped._serve(requests, depth, False, **size)
        _close(have, want)
    assert seen.shared > 20


def test_preemption_changes_nothing(padded, monkeypatch):
    monkeypatch.setattr(overlapped, "make_runner", functools.partial(make_device_runner, padded=padded))
    overlapped.test_preemption_changes_no_bit()


def test_the_host_runs_ahead(padded):
    """Four steps are launched before any answer is read; answers are right in whatever order they are asked for."""
    runner = make_device_runner(padded=padded)
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0, logprobs=2)
    first = Plan(
        step=0, work=[known(0, PROMPT, 0, sample=True, pages=[0, 1, 2, 3])], opened=[opening(0, PROMPT, params)]
    )
    tickets = [runner.sample(runner.forward(first))]
    tickets += [runner.sample(runner.forward(Plan(step=i, work=[decode(0)]))) for i in (1, 2, 3)]
    last = tickets[3].result().rows[0]
    tokens = [ticket.result().rows[0].tokens[0] for ticket in tickets]
    assert tokens == generate(PROMPT, params, 7, 4, [2, 3]) and last.tokens == tokens[3:]


def test_decode_steps_are_padded_to_the_ladder():
    bad = OnDevice(64)
    runner = make_device_runner(run=bad, padded=True, max_seqs=7)
    go = Steps(runner)
    go(
        *(known(i, PROMPT, 0, sample=True, pages=[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]) for i in range(3)),
        opened=[opening(i, PROMPT, GREEDY) for i in range(3)],
    )
    rows = go(*(decode(i) for i in range(3)))
    assert [r.tokens for r in rows] == [generate(PROMPT, GREEDY, 7, 2)[1:]] * 3
    assert all(_fine(row).tokens for row in go(*(decode(i) for i in range(2))))
    assert bad.sizes == [3, 4, 2]  # three prompts are more tokens than any of small_sizes


def test_short_prompts_are_padded_and_long_ones_are_not(monkeypatch):
    """A step that a size fits is padded to it, rows and sequences; any other is launched as it is. The tokens are the same."""
    monkeypatch.setattr("quire.runner.device.prefill.SIZES", ((16, 4), (16, 6)))
    seen = OnDevice(64)
    runner = make_device_runner(run=seen, padded=True, max_seqs=7)
    go = Steps(runner)
    lengths = {0: len(PROMPT), 1: 3, 2: 1, 3: 2, 4: 1}
    whole = {i: (PROMPT * 2)[:n] for i, n in lengths.items()}

    def start(*slots: int):
        return go(
            *(known(i, whole[i], 0, sample=True, pages=[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]) for i in slots),
            opened=[opening(i, whole[i], GREEDY) for i in slots],
        )

    for row, i in zip([*start(0), *start(1, 2, 3, 4)], range(5), strict=True):
        assert row.tokens == generate(whole[i], GREEDY, 7, 1)
    assert seen.sizes == [4 if len(PROMPT) < 16 else 1, 6]
    seen.sizes.clear()
    long = (PROMPT * 9)[:17]
    runner2 = make_device_runner(run=seen, padded=True, max_seqs=7)
    (row,) = Steps(runner2)(
        known(0, long, 0, sample=True, pages=[40, 41, 42, 43, 44]), opened=[opening(0, long, GREEDY)]
    )
    assert row.tokens == generate(long, GREEDY, 7, 1) and seen.sizes == [1]


@pytest.mark.parametrize("shifted", [False, True])
def test_steps_with_spans_are_launched_as_they_come(padded, shifted):
    """Chunks of every size that cut a span, with text beside it: what the host's runner says. Steps of text alone are padded;
    so is decoding after a span, unless that moved positions.
    """
    model = tiny_llama.TinyLlama()
    model.rope = dataclasses.replace(model.rope, axes=(0, 0))  # it turns by the positions that spans say
    rows = model.table.data[[7, 8, 9, 60, 61, 62]] * 0.5
    own = {"positions": np.zeros(6, "<i4").tobytes(), "advance": 2} if shifted else {}
    span = Span(start=3, length=6, kind="image", digest=b"d" * 16, rows=rows.astype("<f4").tobytes(), **own)
    tokens = [*PROMPT[:3], *[(1 << 62) + i for i in range(6)], *PROMPT[9:]]
    for cut in (1, 2, 5, 10):
        said = []
        seen = OnDevice(64, model)
        for made in (make_runner(model=model), make_device_runner(run=seen, padded=padded, model=model)):
            go, out = Steps(made), []
            new = [msgspec.structs.replace(opening(0, tokens, MIXED), spans=(span,)), opening(1, PROMPT, GREEDY)]
            first = go(
                known(0, tokens[:cut], 0, pages=[3, 9, 2, 8, 11]),
                known(1, PROMPT, 0, sample=True, pages=[20, 21, 22, 23]),
                opened=new,
            )
            out.append(_fine(first[1]).tokens)
            seen.sizes.clear()
            out += [row.tokens for row in go(known(0, tokens[cut:], cut, sample=True), decode(1))]
            for _ in range(3):
                out += [_fine(row).tokens for row in go(decode(0), decode(1))]
            # The slot is used again by text: nothing of the span is left.
            pages = [3, 9, 2, 8, 11]
            out.append(
                _fine(
                    go(known(0, PROMPT, 0, sample=True, pages=pages), opened=[opening(0, PROMPT, GREEDY)], closed=[0])[
                        0
                    ]
                ).tokens
            )
            out += [_fine(row).tokens for _ in range(2) for row in go(decode(0))]
            assert out[-3:] == [[token] for token in generate(PROMPT, GREEDY, 7, 3)]
            assert not made._slots.spans and not made._slots.shifted
            said.append(out)
            made.close()
        assert said[0] == said[1]
        assert seen.sizes[:4] == ([2] * 4)
        assert said[0][1] != generate(PROMPT, MIXED, 7, 1)


def test_many_page_changes_in_one_decode_step():
    """More than a captured step has room for: every page of two tables at once."""
    runner = make_device_runner(padded=True)
    go = Steps(runner)
    works = [known(i, PROMPT, 0, sample=True, pages=[10 * i, 10 * i + 1, 10 * i + 2]) for i in range(2)]
    told = SamplingParams(temperature=0.0, logprobs=0)
    first, _ = go(*works, opened=[opening(0, PROMPT, GREEDY), opening(1, PROMPT, told)])
    row = go(decode(0), decode(1, page_from=0, pages=[0, 1, 12, 40, 41, 42, 43, 44, 45]))[1]
    after = [_fine(go(decode(1))[0]) for _ in range(3)]  # written to the new pages, and read there
    tokens = first.tokens + _fine(row).tokens + [r.tokens[0] for r in after]
    assert tokens == generate(PROMPT, GREEDY, 7, 5)
    for i, r in enumerate(after):
        logits = all_logits(PROMPT + tokens[: 2 + i])[-1]
        assert r.logprobs[0].logprob == pytest.approx(logprobs(logits)[r.tokens[0]], abs=1e-12)


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("no"), ValueError("no such kernel")])
def test_a_launch_that_fails_fails_its_step_alone(padded, fault):
    bad = OnDevice(64)
    runner = make_device_runner(run=bad, padded=padded)
    go = Steps(runner)
    go(known(0, PROMPT, 0, sample=True, pages=[0, 1, 2, 3]), opened=[opening(0, PROMPT, GREEDY)])
    go(known(1, PROMPT, 0, pages=[4, 5, 6, 7]), opened=[opening(1, PROMPT, GREEDY)])
    bad.fault = fault
    rows = go(decode(0), known(2, PROMPT, 0, sample=True, pages=[8, 9, 10]), opened=[opening(2, PROMPT, GREEDY)])
    for row in rows:
        assert row.accepted == 0 and row.tokens == []
        assert ("ran out of memory" if isinstance(fault, torch.OutOfMemoryError) else str(fault)) in row.error
    rows = go(decode(0), known(1, PROMPT[-1:], 10, sample=True))
    assert rows[0].error is not None
    assert _fine(rows[1]).tokens == generate(PROMPT, GREEDY, 7, 1)
    row = go(known(0, PROMPT, 0, sample=True, pages=[0, 1, 2]), opened=[opening(0, PROMPT, GREEDY)], closed=[0])[0]
    assert _fine(row).tokens == generate(PROMPT, GREEDY, 7, 1)


def test_logits_that_are_not_numbers_fail_one_sequence(padded):
    bad = OnDevice(64)
    runner = make_device_runner(run=bad, padded=padded)
    go = Steps(runner)
    params = [GREEDY, MIXED, SamplingParams(temperature=0.0, prompt_logprobs=1), GREEDY]
    works = [known(i, PROMPT, 0, sample=True, pages=[3 * i, 3 * i + 1, 3 * i + 2]) for i in range(4)]
    works[2].prompt_logits = 10
    bad.nan = [1, 4 + 6]
    rows = go(*works, opened=[opening(i, PROMPT, p) for i, p in enumerate(params)])
    want = generate(PROMPT, GREEDY, 7, 2)
    assert [row.error is None for row in rows] == [True, False, False, True]
    assert "the model produced NaN" in rows[1].error and "the model produced NaN" in rows[2].error
    assert rows[0].tokens == rows[3].tokens == want[:1] and rows[1].accepted == 0
    bad.nan = []
    rows = go(*(decode(i) for i in range(4)))
    assert [row.error is None for row in rows] == [True, False, False, True]
    assert rows[0].tokens == rows[3].tokens == want[1:]


def test_a_failure_found_late_stays_with_its_sequence(padded):
    """NaN in step 0 is read after step 1 was launched for that sequence, and after step 2 gave its slot to another."""
    bad = OnDevice(64)
    runner = make_device_runner(run=bad, padded=padded)
    bad.nan = [0]
    work = [known(0, PROMPT, 0, sample=True, pages=[0, 1, 2])]
    tickets = [runner.sample(runner.forward(Plan(step=0, work=work, opened=[opening(0, PROMPT, GREEDY)])))]
    bad.nan = []
    tickets.append(runner.sample(runner.forward(Plan(step=1, work=[decode(0)]))))
    again = Plan(step=2, work=work, opened=[opening(0, PROMPT, GREEDY)], closed=[0])
    tickets.append(runner.sample(runner.forward(again)))
    first, second, third = (ticket.result().rows[0] for ticket in tickets)
    assert "NaN" in first.error and "NaN" in second.error and second.tokens == []
    assert _fine(third).tokens == generate(PROMPT, GREEDY, 7, 1)
    row = runner.step(Plan(step=3, work=[decode(0)])).rows[0]
    assert _fine(row).tokens == generate(PROMPT, GREEDY, 7, 2)[1:]


def test_forward_and_sample_alternate_and_close_ends():
    runner = make_device_runner()
    pending = runner.forward(Plan(step=0, work=[]))
    with pytest.raises(RuntimeError, match="twice"):
        runner.forward(Plan(step=1, work=[]))
    assert runner.sample(pending).result().rows == []
    with pytest.raises(RuntimeError, match="not the last"):
        runner.sample(pending)
    work = [known(0, PROMPT, 0, sample=True, pages=[0, 1, 2])]
    ticket = runner.sample(runner.forward(Plan(step=1, work=work, opened=[opening(0, PROMPT, GREEDY)])))
    runner.close()
    runner.close()
    assert ticket.answer is not None and len(ticket.result().rows[0].tokens) == 1
    with pytest.raises(RuntimeError, match="closed"):
        runner.forward(Plan(step=2, work=[]))
    with pytest.raises(ValueError, match="max_rows"):
        make_device_runner(max_rows=3)


def test_a_step_that_is_too_large_is_refused():
    runner = make_device_runner(max_rows=8)
    opened = [opening(0, PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=0))]
    rows = Steps(runner)(known(0, PROMPT, 0, prompt_logits=10, sample=True, pages=[0, 1, 2]), opened=opened)
    assert "11 logit rows" in rows[0].error


def test_masks_in_a_decode_step(padded):
    runner, host = make_device_runner(padded=padded), make_runner()
    only = np.zeros(89, np.bool_)
    only[[33, 40]] = True
    answers = []
    for each in (runner, host):
        go = Steps(each)
        go(
            *(known(i, PROMPT, 0, sample=True, pages=[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3]) for i in range(2)),
            opened=[opening(0, PROMPT, GREEDY), opening(1, PROMPT, SamplingParams(temperature=2.0, logprobs=1))],
        )
        rows = each.sample(each.forward(Plan(step=1, work=[decode(0), decode(1)])), {0: only, 1: only}).result().rows
        answers.append([r.tokens for r in rows])
        assert all(r.tokens[0] in (33, 40) for r in rows)
        answers[-1] += [_fine(r).tokens for r in go(decode(0), decode(1))]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.large)])
def test_the_triton_sampler_in_its_place(seed, padded, monkeypatch):
    """The same traffic with the kernels' sampler: histories that grow, logprobs, draws; in Triton's interpreter on a CPU."""
    pytest.importorskip("triton", reason="needs the cuda extra")
    from quire.backends.cuda.sampler import CudaSampler

    requests = _more_requests(random.Random(100 + seed))[:5]
    size = {"pages": 20, "budget": 12, "slots": 4}
    want, _ = overlapped._serve(requests, 0, False, **size)
    monkeypatch.setattr(OnDevice, "sampler", CudaSampler(torch.device("cpu")))
    monkeypatch.setattr(overlapped, "make_runner", functools.partial(make_device_runner, padded=padded))
    with np.errstate(all="ignore"):
        have, _ = overlapped._serve(requests, 1, False, **size)
    _close(have, want, 1e-5)


def test_a_slot_that_changed_hands_shares_nothing_any_more(monkeypatch):
    """The next sequence in it has pages of its own, and they came in a step with prompts, which looks for no sharing."""
    for name in ("device.runner.WORTH", "device.sharing.LEAST", "device.runner.LEAST"):
        monkeypatch.setattr(f"quire.runner.{name}", 1)
    seen = OnDevice(64)
    go = Steps(make_device_runner(padded=True, run=seen))
    a, b = PROMPT[:8], [70, 71, 72, 73, 74, 75, 76, 77]
    both = [opening(0, a, GREEDY), opening(1, a, GREEDY)]
    go(known(0, a, 0, sample=True, pages=[0, 1, 2, 3]), opened=both[:1])
    # The prefix of slot 1 was found: it begins with the same pages.
    go(decode(0), known(1, a[4:], 4, sample=True, pages=[0, 10, 11, 12]), opened=both[1:])
    go(decode(0), decode(1))
    assert seen.shared == 2
    four = go(
        decode(0), known(1, b, 0, sample=True, pages=[20, 21, 22, 23]), opened=[opening(1, b, GREEDY)], closed=[1]
    )
    five = go(decode(0), decode(1))
    assert seen.shared == 2
    assert four[1].tokens + five[1].tokens == generate(b, GREEDY, 7, 2)


def test_a_row_that_cannot_be_computed_takes_its_sharing_with_it(monkeypatch):
    for name in ("device.runner.WORTH", "device.sharing.LEAST", "device.runner.LEAST"):
        monkeypatch.setattr(f"quire.runner.{name}", 1)
    seen = OnDevice(64)
    go = Steps(make_device_runner(padded=True, run=seen))
    a, b = PROMPT[:7], [70, 71, 72]
    go(known(0, a, 0, sample=True, pages=[0, 1, 2, 3]), opened=[opening(0, a, GREEDY)])
    go(known(1, a[4:], 4, sample=True, pages=[0, 10]), opened=[opening(1, a, GREEDY)])
    first = go(decode(0), decode(1), known(2, b, 0, sample=True, pages=[20, 21]), opened=[opening(2, b, GREEDY)])
    rows = go(decode(0), decode(1), decode(2))  # slot 1 has no page for this one
    assert "2 pages do not hold 9 tokens" in (rows[1].error or "")
    assert first[2].tokens + rows[2].tokens == generate(b, GREEDY, 7, 2)
