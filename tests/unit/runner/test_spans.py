"""What proposers and penalties are told of prompts with spans: their text."""

import msgspec
import numpy as np

from quire.runner.params import SamplingParams
from quire.runner.plan import Plan
from quire.runner.spans import Span
from tests.unit.runner.tiny_llama import WIDTH, decode, known, make_runner, opening

TEXT = [5, 17, 4, 80, 31, 9]
SPAN = Span(
    start=2, length=3, kind="image", digest=b"d" * 16, rows=np.ones((3, WIDTH), "<f4").tobytes()
)  # fmt: skip
TOKENS = [5, 17, *((1 << 62) + i for i in range(3)), 9]


class Proposer:
    """Proposes what it was told to, and remembers what it was told."""

    on_device = False

    def __init__(self) -> None:
        self.opened: dict[int, list[int]] = {}
        self.drafts: dict[int, list[int]] = {}

    def open(self, slot, tokens) -> None:
        self.opened[slot] = list(tokens)

    def close(self, slot) -> None:
        self.opened.pop(slot, None)

    def propose(self, batch, hidden=None) -> list[list[int]]:
        return [self.drafts[slot][:most] for slot, most in zip(batch.slots, batch.most, strict=True)]

    def learn(self, slot, tokens, drafted) -> None:
        pass


def test_a_draft_ends_where_it_would_go_on_with_a_span() -> None:
    proposer = Proposer()
    runner = make_runner(proposer=proposer)
    opened = [
        msgspec.structs.replace(opening(0, TOKENS, SamplingParams(temperature=0.0)), spans=(SPAN,)),
        opening(1, TEXT, SamplingParams(temperature=0.0)),
    ]
    work = [
        known(i, tokens, 0, sample=True, pages=[4 * i, 4 * i + 1, 4 * i + 2]) for i, tokens in enumerate((TOKENS, TEXT))
    ]
    rows = runner.step(Plan(step=0, work=work, opened=opened)).rows
    assert [row.error for row in rows] == [None, None]
    assert proposer.opened == {0: [5, 17, -1, -1, -1, 9], 1: TEXT}
    proposer.drafts = {0: [8, -1, 3], 1: [8, 7, 3]}
    ahead = [msgspec.structs.replace(decode(i), n=4, drafts=3) for i in (0, 1)]
    pending = runner.forward(Plan(step=1, work=ahead))
    assert pending.drafts == {0: [8], 1: [8, 7, 3]}
    assert [row.error for row in runner.sample(pending).result().rows] == [None, None]
    proposer.drafts[0] = [-1, 3]
    pending = runner.forward(Plan(step=2, work=ahead[:1]))
    assert pending.drafts == {} and runner.sample(pending).result().rows[0].error is None


def test_penalties_count_the_text_of_a_prompt_alone() -> None:
    runner = make_runner()
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3)
    new = msgspec.structs.replace(opening(0, TOKENS, params), spans=(SPAN,))
    (row,) = runner.step(Plan(step=0, work=[known(0, TOKENS, 0, sample=True, pages=[0, 1])], opened=[new])).rows
    history = runner._slots.stream(0).history
    assert row.error is None and history is not None
    assert sorted(history.ids.tolist()) == sorted({5, 17, 9, *row.tokens})


def test_a_span_that_ends_behind_its_prompt_fails_that_sequence_alone() -> None:
    runner = make_runner()
    late = msgspec.structs.replace(SPAN, start=4)
    opened = [
        msgspec.structs.replace(opening(0, TOKENS, SamplingParams()), spans=(late,)),
        opening(1, TEXT, SamplingParams()),
    ]
    work = [known(i, tokens, 0, sample=True, pages=[4 * i, 4 * i + 1]) for i, tokens in enumerate((TOKENS, TEXT))]
    bad, good = runner.step(Plan(step=0, work=work, opened=opened)).rows
    assert bad.error is not None and "a span ends at 7, behind a prompt of 6 tokens" in bad.error and good.error is None
