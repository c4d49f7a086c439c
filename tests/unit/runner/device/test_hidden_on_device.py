"""Rows that a program keeps, through every way a step can be launched: eager, padded prompts, decode rows, and verified drafts.

Each step's program is launched once more as it came, without the runner's buffers: the rows a step is said to have kept are those.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: the torch extra")

from quire.backends.choose import open_backend  # noqa: E402
from quire.backends.ops import KV  # noqa: E402
from quire.backends.outputs import Hidden  # noqa: E402
from quire.backends.torch.batch import DeviceBatch  # noqa: E402
from quire.models.embedding import Pooling  # noqa: E402
from quire.runner.device.proposer import DeviceRows, HiddenRows  # noqa: E402
from quire.runner.device.runner import DeviceRunner  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from quire.runner.plan import Plan, Work  # noqa: E402
from quire.runner.pooler import Pooler  # noqa: E402
from tests.unit.runner.test_speculate import Told  # noqa: E402
from tests.unit.runner.tiny_llama import KV_HEADS, LAYERS, WIDTH, TinyLlama, V, decode, known, opening  # noqa: E402

PAGE, CONTEXT, SEQS, MOST = 16, 64, 8, 64
KEEP = (Hidden(0), Hidden(LAYERS), Hidden(1, taken=True))
MODEL, POOL = TinyLlama(head_dim=8), KV(LAYERS, 40, PAGE, KV_HEADS, 8)
GREEDY = SamplingParams(temperature=0.0)


class Watched:
    """A program whose every launch is done twice, the second time into memory of its own."""

    def __init__(self, inner: Any):
        self._inner = inner
        self.batches: list[DeviceBatch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, batch: DeviceBatch) -> torch.Tensor:
        again = replace(batch, hidden_into=None, hidden={}, into=None, derived={})
        self._inner.launch(again)
        self.batches.append(again)
        return self._inner.launch(batch)


def compiled(keep: tuple[Hidden, ...]) -> Any:
    backend = open_backend("torch", device="cpu", dtype="float32")
    return backend.compile(MODEL.forward, kv=POOL, max_tokens=MOST, max_rows=40, keep=keep)


def runner(keep: tuple[Hidden, ...] = KEEP, *, padded: bool, proposer: Any = None) -> tuple[DeviceRunner, Watched]:
    program = Watched(compiled(keep))
    made = DeviceRunner(
        program, kv=POOL, vocab_size=V, max_seqs=SEQS, max_tokens=MOST, max_context=CONTEXT, max_rows=40,
        padded=padded, proposer=proposer, drafts=4,
    )  # fmt: skip
    return made, program


def whole_rows(program: Watched, batch: DeviceBatch, layer: int) -> torch.Tensor:
    """What a program that keeps a layer's rows for every token says of the same batch, over the same pools."""
    other = compiled((Hidden(layer),))
    for mine, theirs in zip(other.kernels.pools, program.kernels.pools, strict=True):
        mine.numbers.copy_(theirs.numbers)
    again = replace(batch, hidden={}, derived={})
    other.launch(again)
    return again.hidden[Hidden(layer)]


def check(made: DeviceRunner, program: Watched, plan: Plan, tokens: int, taken: int) -> list[list[int]]:
    """Run a step. What it kept are the rows that its launch kept, of so many tokens and logit rows; row 0 is embeddings."""
    program.batches.clear()
    pending = made.forward(plan)
    (batch,) = program.batches
    assert set(pending.hidden) == set(KEEP)
    for which, rows in pending.hidden.items():
        assert rows.shape == (taken if which.taken else tokens, WIDTH)
        torch.testing.assert_close(rows, batch.hidden[which][: len(rows)], rtol=0, atol=0)
    np.testing.assert_array_equal(pending.hidden[Hidden(0)].numpy(), MODEL.table.data[batch.ids[:tokens].numpy()])
    own = batch.hidden[Hidden(1, taken=True)]
    assert torch.equal(own[:taken], whole_rows(program, batch, 1)[batch.logit_rows[:taken].long()])
    return [row.tokens for row in made.sample(pending).result().rows]


def prompts(*lengths: int) -> tuple[list[list[int]], Plan]:
    rng = np.random.default_rng(4)
    said = [rng.integers(4, V, n).tolist() for n in lengths]
    work = [known(i, own, 0, sample=True, pages=[3 * i, 3 * i + 1, 3 * i + 2]) for i, own in enumerate(said)]
    return said, Plan(step=0, work=work, opened=[opening(i, own, GREEDY) for i, own in enumerate(said)])


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
def test_prompts_and_decode_rows(padded: bool):
    made, program = runner(padded=padded)
    _, plan = prompts(20, 5, 9)
    check(made, program, plan, tokens=34, taken=3)
    check(made, program, Plan(step=1, work=[decode(i) for i in range(3)]), tokens=3, taken=3)
    more = known(3, [7, 8, 9, 10], 0, sample=True, pages=[30])
    mixed = Plan(step=2, work=[decode(0), decode(2), more], opened=[opening(3, [7, 8, 9, 10], GREEDY)])
    check(made, program, mixed, tokens=6, taken=3)
    quiet = Plan(step=3, work=[known(3, [11, 12], 4), decode(1)])  # a part of a prompt that ends nothing
    check(made, program, quiet, tokens=3, taken=1)


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
def test_verified_drafts(padded: bool):
    """Several rows of each sequence: its last token and its draft tokens."""
    made, program = runner(padded=padded, proposer=Told([5, 6, 7, 8], [8, 9, 10, 11]))
    _, plan = prompts(20, 5)
    check(made, program, plan, tokens=25, taken=2)
    check(made, program, Plan(step=1, work=[verify(i, 4) for i in range(2)]), tokens=10, taken=10)
    assert program.batches[0].uniform == padded  # by the ladder of verification, where there is one


def verify(slot: int, drafts: int) -> Work:
    return Work(key=slot, epoch=0, slot=slot, n=1 + drafts, start=-1, tokens=None, drafts=drafts, sample=True)


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
def test_tokens_are_the_same_with_rows_kept_and_without(padded: bool):
    tokens = []
    for keep in (KEEP, ()):
        made, program = runner(keep, padded=padded)
        said = [made.step(prompts(20, 5)[1]).rows]
        said += [made.step(Plan(step=n, work=[decode(i) for i in range(2)])).rows for n in range(1, 6)]
        tokens.append([[row.tokens for row in rows] for rows in said])
        if not keep:
            assert made.forward(Plan(step=6, work=[decode(0)])).hidden == {}
            assert program.hidden_buffers(9) is None and not program.keep
    assert tokens[0] == tokens[1]


class Head:
    """A proposer that reads rows of the model: the head over the last layer's is the token that was sampled from it."""

    on_device: ClassVar[bool] = True
    groups: tuple[KV, ...] = ()
    keep = (Hidden(LAYERS, taken=True),)

    def __init__(self) -> None:
        self.asked = 0

    def follow(self, batch: DeviceBatch, hidden: HiddenRows) -> None:
        raise AssertionError("there are no layers to compute")

    def propose(self, rows: DeviceRows, hidden: HiddenRows) -> tuple[torch.Tensor, torch.Tensor]:
        row = hidden[self.keep[0]]
        normed = row * torch.rsqrt(row.square().mean(dim=1, keepdim=True) + 1e-5)
        best = (normed @ torch.from_numpy(MODEL.head.data).T).argmax(dim=1)
        assert torch.equal(best.int(), rows.tokens)
        self.asked += 1
        return rows.tokens[:, None].repeat(1, 3) + 1, torch.full_like(rows.most, 3)


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
def test_a_proposer_reads_the_row_that_its_token_was_sampled_from(padded: bool):
    """In steps with draft tokens, in those without, and where prompts are among them; never waited for."""
    head = Head()
    made, _ = runner(head.keep, padded=padded, proposer=head)
    plain, _ = runner((), padded=padded)
    _, plan = prompts(20, 5, 9)
    tickets, told = [made.sample(made.forward(plan))], [[], [], []]
    for step in range(1, 6):
        if step == 3:
            work = [decode(i) for i in range(3)]  # one token each, in between
        else:
            work = [verify(i, 3) for i in range(3)]
        tickets.append(made.sample(made.forward(Plan(step=step, work=work))))
    for ticket in tickets:
        for own, row in zip(told, ticket.result().rows, strict=True):
            assert row.error is None
            own += row.tokens
    assert head.asked == 5
    rows = [plain.step(plan).rows]
    rows += [plain.step(Plan(step=i, work=[decode(i) for i in range(3)])).rows for i in range(1, 7)]
    want = [[row[i].tokens[0] for row in rows] for i in range(3)]
    assert all(w[: len(t)] == t[: len(w)] for w, t in zip(want, told, strict=True))


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
def test_vectors_are_made_of_kept_rows_and_decode_steps_copy_none(padded: bool):
    pooler = Pooler(Pooling("last", True))
    pooler.keep = Hidden(1, taken=True)  # which this model marks
    program = Watched(compiled((pooler.keep,)))
    made = DeviceRunner(
        program, kv=POOL, vocab_size=V, max_seqs=SEQS, max_tokens=MOST, max_context=CONTEXT, max_rows=40,
        padded=padded, pooler=pooler,
    )  # fmt: skip
    said, plan = prompts(20, 1, 9)  # the second is as short as a decode row
    for i in (0, 1):
        plan.work[i].vector = plan.opened[i].vector = True
    tickets = [made.sample(made.forward(plan))]
    kept = program.batches[-1].hidden[pooler.keep].clone()  # of the answer first, then of the texts
    pending = made.forward(Plan(step=1, work=[decode(2)]))  # texts are not read yet
    assert set(pending.hidden) == (set() if padded else {pooler.keep})
    tickets.append(made.sample(pending))
    text, short, answer = tickets[0].result().rows
    assert not text.tokens and not short.tokens and len(answer.tokens) == 1 and not answer.vector
    for row, numbers in ((text, kept[1]), (short, kept[2])):
        np.testing.assert_allclose(np.frombuffer(row.vector, "<f4"), numbers / numbers.norm(), atol=1e-6)
    alone = Plan(
        step=2, work=[known(3, said[1], 0, sample=True, pages=[30], vector=True)], opened=[opening(3, said[1], GREEDY)]
    )
    alone.opened[0].vector = True
    [again] = made.step(alone).rows
    np.testing.assert_allclose(np.frombuffer(again.vector, "<f4"), np.frombuffer(short.vector, "<f4"), atol=1e-6)
