"""Which plans only decode, and that what is kept of one is never taken for another's; and pages that are placed together."""

from typing import cast

import msgspec
import numpy as np
import pytest

from quire.backends.adapters import Adapts
from quire.backends.ops import KV
from quire.runner.batch_builder import DecodeOnly
from quire.runner.host_state import HostState, Pending
from quire.runner.lora import Loras
from quire.runner.params import SamplingParams
from quire.runner.plan import Open, Plan, Work
from quire.runner.slots import Slots


def on(slot: int, /, **other: object) -> Work:
    return msgspec.structs.replace(Work(key=slot, epoch=0, slot=slot, n=1, start=-1, tokens=None, sample=True), **other)


def test_slots_are_read_once_while_works_stay_the_same():
    plans, plan = DecodeOnly(8), [on(s) for s in (3, 1, 7)]
    assert plans.take(plan) and plans.slot.tolist() == [3, 1, 7]
    first = plans.slot
    assert plans.take([plan[0], on(1, page_from=2, pages=[5]), plan[2]]), "another object of the same slot"
    assert plans.take(list(plan)) and plans.slot is first
    assert plans.take([plan[1], plan[0], plan[2]]) and plans.slot.tolist() == [1, 3, 7]
    assert plans.take(plan[:2]) and plans.slot.tolist() == [3, 1]
    assert plans.take([*plan, on(0)]) and plans.slot.tolist() == [3, 1, 7, 0]


@pytest.mark.parametrize(
    "other",
    [
        {"tokens": [4], "start": 9},
        {"n": 2, "drafts": 1},
        {"start": 0},
        {"sample": False},
        {"prompt_logits": 1},
        {"slot": 8},
        {"slot": -1},
        {"slot": 1},
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_one_other_work_makes_a_plan_another(other: dict[str, object], known: bool):
    plans, plan = DecodeOnly(8), [on(s) for s in (3, 1, 7)]
    assert not known or plans.take(plan)
    assert not plans.take([on(3, **other), *plan[1:]])
    assert plans.take(plan) and plans.slot.tolist() == [3, 1, 7]


def test_an_empty_plan_is_none():
    assert not DecodeOnly(4).take([])


def opened(groups: int = 1) -> Slots:
    slots = Slots(6, 10, pages=50, vocab_size=9, more=[(50, 0)] * (groups - 1))
    for slot in range(5):
        slots.open(Open(slot=slot, sampling=SamplingParams(), seed=1, tokens=[1], prompt_len=1, stop_ids=[]))
        slots.place(on(slot, pages=[slot, 10 + slot], more=[[0, 0]] * (groups - 1)))
    return slots


def test_pages_placed_together_are_those_placed_one_by_one():
    works = [on(s, page_from=p, pages=[20 + s]) for s, p in ((0, 2), (4, 1), (2, 0))]
    one, together = opened(), opened()
    for work in works:
        one.place(work)
    assert together.place_ones(works)
    assert (one.table == together.table).all() and (one.covered == together.covered).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"page_from": 3},  # a gap
        {"page_from": -1},
        {"page_from": 10},
        {"pages": [50]},
        {"pages": [-1]},
        {"pages": [1, 2]},
        {"slot": 5},  # not open
        {"slot": 6},
        {"slot": -1},
    ],
)
def test_what_is_wrong_with_one_is_left_to_a_look_at_each(bad: dict[str, object]):
    slots = opened()
    before = slots.table.copy(), slots.covered.copy()
    assert not slots.place_ones([on(0, page_from=2, pages=[20]), on(1, **{"page_from": 2, "pages": [21], **bad})])
    assert all(map(np.array_equal, before, (slots.table, slots.covered)))
    assert not opened(groups=2).place_ones([on(0, page_from=2, pages=[20], more=[[3]])])


def test_a_failed_slot_is_not_live_until_it_is_opened_again():
    slots = opened()
    slots.fail([1, 99], "broken")
    assert slots.live.tolist() == [True, False, True, True, True, False]
    assert not slots.place_ones([on(1, page_from=2, pages=[20])])
    slots.close(1)
    slots.close(2)
    slots.open(Open(slot=1, sampling=SamplingParams(), seed=1, tokens=[1], prompt_len=1, stop_ids=[]))
    assert slots.live.tolist() == [True, True, False, True, True, False]


def test_a_plan_with_an_adapter_or_a_failed_slot_is_looked_at_row_by_row():
    host = HostState(KV(1, 8, 4, 1, 8), vocab_size=9, max_seqs=4, max_tokens=8, max_context=16, max_rows=4)
    opened = [Open(slot=s, sampling=SamplingParams(), seed=1, tokens=[1], prompt_len=1, stop_ids=[]) for s in range(3)]
    plan = Plan(step=0, work=[on(s, pages=[s]) for s in range(3)], opened=opened)
    host.apply(plan)
    slot = host.decode_only(plan)
    assert slot is not None and slot.tolist() == [0, 1, 2]
    host.loras = Loras(cast(Adapts, None), 1)
    assert host.decode_only(plan) is slot
    host.slots.adapter[1] = 0
    assert host.decode_only(plan) is None
    host.slots.adapter[1] = -1
    host.fail(Pending(plan), [2], "broken")
    assert host.decode_only(plan) is None
