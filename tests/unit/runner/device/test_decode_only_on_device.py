"""Steps in which every sequence goes on by a token: what a device runner does to all rows at once, and must not do to one."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from quire.runner.device.runner import DeviceRunner  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from quire.runner.plan import Plan, Row  # noqa: E402
from tests.unit.runner.device.kit import OnDevice, make_device_runner  # noqa: E402
from tests.unit.runner.test_runner import GREEDY, MIXED, _fine  # noqa: E402
from tests.unit.runner.tiny_llama import decode, generate, known, make_runner, opening  # noqa: E402

PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7], [11, 12, 13, 14, 15, 16]]
PAGES = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def begin(runner, params):
    """Three sequences with a token each, and room for some more."""
    work = [known(s, PROMPTS[s], 0, sample=True, pages=PAGES[s]) for s in range(3)]
    opened = [opening(s, PROMPTS[s], params[s]) for s in range(3)]
    return runner.step(Plan(step=0, work=work, opened=opened)).rows


def steps(runner, count, works=None):
    """So many decode-only steps, with the same Work each time: the rows of each."""
    works = works or [decode(s) for s in (2, 0, 1)]
    return [runner.step(Plan(step=1 + i, work=list(works))).rows for i in range(count)]


@pytest.fixture
def device():
    return OnDevice(64)


@pytest.fixture
def runner(device, monkeypatch):
    made = make_device_runner(run=device, padded=True)
    taken: list[bool] = []
    launch = DeviceRunner._launch_decode_only
    monkeypatch.setattr(DeviceRunner, "_launch_decode_only", lambda *args: taken.append(launch(*args)) or taken[-1])
    made.taken = taken
    return made


def test_rows_are_those_of_the_host_whatever_each_asks_for(runner):
    params = [GREEDY, SamplingParams(temperature=0.9, top_p=0.8, logprobs=2, seed=3), MIXED]
    host = make_runner()
    have, want = [begin(r, params) for r in (runner, host)]
    have, want = [have, *steps(runner, 6)], [want, *steps(host, 6)]
    assert runner.taken == [False] + [True] * 6
    for mine, theirs in zip(have, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (
                (a.accepted, a.tokens) == (b.accepted, b.tokens) and not a.error and len(a.logprobs) == len(b.logprobs)
            )
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.token == y.token and x.rank == y.rank and x.logprob == pytest.approx(y.logprob, abs=1e-9)


def test_numbers_that_are_none_fail_one_sequence_and_the_others_go_on(runner, device):
    begin(runner, [GREEDY] * 3)
    device.nan = [1]
    (bad,) = steps(runner, 1)
    device.nan = []
    assert "NaN" in bad[1].error and bad[1].accepted == 0 and not bad[1].tokens
    later = steps(runner, 2)
    assert runner.taken == [False, True, False, False]
    assert all(rows[1] == Row(0, error=bad[1].error) for rows in later)
    for place, slot in ((0, 2), (2, 1)):
        heard = [_fine(rows[place]).tokens[0] for rows in (bad, *later)]
        assert heard == generate(PROMPTS[slot], GREEDY, 7, 4)[1:]


def test_a_slot_that_cannot_go_on_is_refused_alone(runner):
    begin(runner, [GREEDY] * 3)
    works = [decode(2), decode(0, page_from=9, pages=[12]), decode(1)]  # a gap in its pages
    (rows,) = steps(runner, 1, works)
    assert "pages 9 to 10" in rows[1].error and runner.taken == [False, False]
    assert [_fine(rows[i]).tokens for i in (0, 2)] == [generate(PROMPTS[s], GREEDY, 7, 2)[1:] for s in (2, 1)]


def test_a_sequence_that_has_no_page_left_is_told_so(runner):
    begin(runner, [GREEDY] * 3)
    *_, last = steps(runner, 11)
    assert runner.taken == [False] + [True] * 10 + [False]
    assert "do not hold" in last[0].error and [_fine(row).tokens for row in last[1:]]


def test_what_was_shared_is_looked_at_again_when_an_old_page_changes(runner, device, monkeypatch):
    """OnDevice checks what it is told of common beginnings against the tables."""
    for name in ("device.runner.WORTH", "device.sharing.LEAST", "device.runner.LEAST"):
        monkeypatch.setattr(f"quire.runner.{name}", 1)
    prompt = list(range(4, 17))
    work = [known(s, prompt, 0, sample=True, pages=own) for s, own in ((0, [0, 1, 2, 3, 4]), (2, [7, 8, 9, 10]))]
    runner.step(Plan(step=0, work=work, opened=[opening(s, prompt, GREEDY) for s in (0, 2)]))
    work = [known(1, prompt[12:], 12, sample=True, pages=[0, 1, 2, 5, 6])]
    runner.step(Plan(step=1, work=work, opened=[opening(1, prompt, GREEDY)]))
    first = steps(runner, 1, [decode(0), decode(1)])
    shared = device.shared
    assert shared and not any(runner.taken[:2]) and runner.taken[2]
    rows = [*first, *steps(runner, 1, [decode(0), decode(1, page_from=0, pages=[7, 8, 9, 5, 6])])]
    assert [[_fine(row).tokens for row in own] for own in rows] == [
        [[t]] * 2 for t in generate(prompt, GREEDY, 7, 3)[1:]
    ]
    assert device.shared == shared and runner.taken[3]


def test_a_failure_is_forgotten_when_its_slot_has_another_sequence(runner, device):
    begin(runner, [GREEDY] * 3)
    device.nan = [1]
    steps(runner, 1)
    device.nan = []
    again = Plan(
        step=2, work=[known(0, PROMPTS[0], 0, sample=True, pages=PAGES[0])], opened=[opening(0, PROMPTS[0], GREEDY)],
        closed=[0],
    )  # fmt: skip
    assert _fine(runner.step(again).rows[0])
    heard = np.array([[_fine(row).tokens[0] for row in rows] for rows in steps(runner, 3)])
    assert runner.taken == [False, True, False, True, True, True] and not runner._answers._lost
    assert heard[:, 1].tolist() == generate(PROMPTS[0], GREEDY, 7, 4)[1:]
