"""Adapters on the CUDA backend: rows of any mixture against float64, in place, at addresses that stay; and decode steps with them.

Compiled on a GPU; in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.backends.adapters import Pair, Target
from quire.backends.cuda.adapters import Bundle, FixedStack
from quire.backends.cuda.kernels.lora import adapt
from quire.layouts import Dense
from quire.runner.device.decode import ADAPTED_SIZES, DecodeSteps
from quire.runner.device.prefill import PrefillSteps
from quire.runner.device.state import DeviceState

SLOTS, RANK = 5, 40
RANKS = (16, 40, 3, 0, 17)  # the fourth has nothing here


def made(n: int, k: int, dtype: torch.dtype, device: str) -> tuple[FixedStack, list[np.ndarray | None]]:
    """A target with those pairs, and what each adds to a weight. The last pair is no numbers at all."""
    rng = np.random.default_rng(n + k)
    target = Target("here", n, k, slots=SLOTS, rank=RANK)
    stack = Bundle([target], torch.device(device), dtype).stacks[target]
    whole: list[np.ndarray | None] = []
    for slot, rank in enumerate(RANKS):
        if not rank:
            whole.append(None)
            continue
        a, b = (rng.standard_normal(shape).astype(np.float16) * np.float16(0.1) for shape in ((rank, k), (n, rank)))
        if slot == SLOTS - 1:
            a[:], b[:] = np.nan, np.nan
        stack.set(slot, Pair(Dense(a, "f16"), Dense(b, "f16"), scale=1.5))
        whole.append(1.5 * b.astype(np.float64) @ a.astype(np.float64))
    return stack, whole


def products(x: torch.Tensor, slots: list[int], whole: list[np.ndarray | None], n: int) -> np.ndarray:
    rows = x.double().cpu().numpy()
    found = np.zeros((len(slots), n))
    for t, slot in enumerate(slots):
        if slot >= 0 and whole[slot] is not None:
            found[t] = whole[slot] @ rows[t]
    return found


@pytest.mark.parametrize(("n", "k"), [(70, 96), (64, 1100), (130, 1152)])
@pytest.mark.parametrize("tokens", [1, 5, 37])
def test_rows_of_any_mixture(n: int, k: int, tokens: int, half: torch.dtype, device: str):
    """Columns of a wider tensor, in place; what is beside them is left alone, and so are rows of nobody's."""
    for dtype, bound in ((torch.float32, 1e-4), (half, 2e-2)):
        stack, whole = made(n, k, dtype, device)
        g = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, k + 3, generator=g).to(dtype).to(device)[:, :k]
        wide = torch.randn(tokens, n + 16, generator=g).to(dtype).to(device)
        before, y = wide.clone(), wide[:, 8 : 8 + n]
        slots = [(0, 1, -1, 2, 3, 1, 1)[t % 7] for t in range(tokens)]
        if tokens > 20:
            slots[20] = SLOTS - 1
        adapt(y, x, stack.pairs, torch.tensor(slots, dtype=torch.int32, device=device))
        want = before[:, 8 : 8 + n].double().cpu().numpy() + products(x, slots, whole, n)
        got = y.double().cpu().numpy()
        broken = np.array(slots) == SLOTS - 1
        assert np.isnan(got[broken]).all() and np.isfinite(got[~broken]).all()
        scale = np.abs(want[~broken]).max(initial=1.0)
        assert np.abs(got - want)[~broken].max(initial=0.0) < bound * scale
        still = [t for t, slot in enumerate(slots) if slot in (-1, 3)]
        assert torch.equal(wide[still], before[still])
        assert torch.equal(wide[:, :8], before[:, :8]) and torch.equal(wide[:, 8 + n :], before[:, 8 + n :])


def test_targets_of_one_product_are_done_together(device: str):
    """Three targets whose channels are neighbours, of other widths and ranks, against each for itself."""
    rng, k = np.random.default_rng(3), 80
    targets = [Target(f"s{n}", n, k, slots=2, rank=20) for n in (70, 16, 33)]
    bundle = Bundle(targets, torch.device(device), torch.float32)
    for target, ranks in zip(targets, ((20, 3), (5, 0), (0, 18)), strict=True):
        for slot, rank in enumerate(ranks):
            if rank:
                halves = (
                    Dense(rng.standard_normal(s).astype(np.float32), "f32") for s in ((rank, k), (target.n, rank))
                )
                bundle.stacks[target].set(slot, Pair(*halves, scale=0.1))
    x = torch.from_numpy(rng.standard_normal((19, k)).astype(np.float32)).to(device)
    slots = torch.tensor([t % 3 - 1 for t in range(19)], dtype=torch.int32, device=device)
    whole = torch.ones(19, 119, device=device)
    apart = whole.clone()
    adapt(whole, x, bundle.pairs, slots)
    for y, target in zip(apart.split([target.n for target in targets], 1), targets, strict=True):
        adapt(y, x, bundle.stacks[target].pairs, slots)
    assert torch.equal(whole, apart) and (whole[1:3] != 1.0).any() and torch.equal(whole[0], torch.ones_like(whole[0]))


def test_bits_do_not_depend_on_the_batch(half: torch.dtype, device: str):
    stack, _ = made(70, 1100, half, device)
    x = torch.randn(20, 1100, generator=torch.Generator().manual_seed(1)).to(half).to(device)
    slots = torch.tensor([t % 3 for t in range(20)], dtype=torch.int32, device=device)
    whole = torch.zeros(20, 70, dtype=half, device=device)
    adapt(whole, x, stack.pairs, slots)
    for t in (0, 7, 19):
        alone = torch.zeros(1, 70, dtype=half, device=device)
        adapt(alone, x[t : t + 1], stack.pairs, slots[t : t + 1])
        assert torch.equal(alone[0], whole[t])


def test_a_slot_is_written_where_it_lies(device: str):
    """Loading and unloading move nothing: what was captured reads the new numbers."""
    stack, _ = made(32, 48, torch.float32, device)
    places = [x.data_ptr() for x in (stack.a, stack.b, stack.ranks)]
    x, slots = torch.ones(1, 48, device=device), torch.tensor([0], dtype=torch.int32, device=device)
    pair = Pair(Dense(np.ones((2, 48), np.float32), "f32"), Dense(np.ones((32, 2), np.float32), "f32"), scale=0.5)
    stack.set(0, pair)
    y = torch.zeros(1, 32, device=device)
    adapt(y, x, stack.pairs, slots)
    assert torch.equal(y, torch.full_like(y, 48.0))  # nothing of the larger pair is left
    stack.set(0, None)
    adapt(y, x, stack.pairs, slots)
    assert torch.equal(y, torch.full_like(y, 48.0))
    assert [x.data_ptr() for x in (stack.a, stack.b, stack.ranks)] == places
    large = Pair(Dense(np.ones((50, 48), np.float32), "f32"), Dense(np.ones((32, 50), np.float32), "f32"), scale=1.0)
    with pytest.raises(ValueError, match="a pair of rank 50, and room for 48"):
        stack.set(0, large)


class Heard:
    """A program that notes whose adapters it was told of."""

    device = torch.device("cpu")
    graphs, shares, sparse, adapts = False, True, False, True
    kv: Any = type("KV", (), {"page_size": 16})()

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int] | None, bool]] = []
        self.sampler: Any = self

    def hidden_buffers(self, most: int) -> None:
        """It keeps no rows."""

    def launch(self, batch: Any) -> torch.Tensor:
        told = None if batch.adapters is None else batch.adapters.tolist()
        self.told.append((batch.tokens, told, batch.shared is not None))
        return batch.into[: batch.logit_rows.shape[0]].zero_()

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(logits), dtype=torch.int64)


def test_decode_steps_are_padded_with_rows_of_nobody():
    program: Any = Heard()
    decoder = DecodeSteps(program, DeviceState(20, 4, [9], 16, program.device), 20, 64, 10)
    assert decoder.adapted_sizes == [s for s in ADAPTED_SIZES if s < 20] + [20]
    ints = lambda *x: np.array(x, np.int32)  # noqa: E731
    own, none = ints(3, 1, 0), ints()
    step = (ints(5, 6, 7), ints(0, 1, 2), [ints(0, 1, 2)], own, none, [none])
    more = [np.arange(64 * 3, dtype=np.int32)]
    told = decoder.run(*step, adapters=ints(2, -1, 0), more=more)[2]
    assert torch.equal(told[0], torch.from_numpy(more[0]))
    decoder.run(*step)
    assert program.told == [(4, [2, -1, 0, -1], False), (4, None, False)]


def test_prompt_steps_are_padded_with_rows_of_nobody():
    from quire.backends.cases import ragged

    program: Any = Heard()
    state = DeviceState(20, 4, [9], 16, program.device)
    prompter = PrefillSteps(program, state, max_seqs=20, max_tokens=128, max_context=64, vocab=10)
    batch = ragged([(0, 40, [0, 1, 3]), (3, 1, [2])])
    batch.logit_rows = np.array([39, 40], np.int32)
    none = np.zeros(0, np.int32)
    plain = prompter.kind_for(batch)
    assert plain is not None
    batch.adapters = np.array([1] * 40 + [-1], np.int32)
    kind = prompter.kind_for(batch)
    assert kind is not None
    assert plain[:2] == prompter.sizes[1] and kind[:2] == prompter.adapted_sizes[1] == prompter.sizes[-1] != plain[:2]
    told = prompter.run(kind, batch, np.array([4, 5], np.int32), none, [none], [np.arange(9, dtype=np.int32)])[1]
    assert told[0].tolist() == list(range(9))
    assert program.told == [(kind.tokens, [1] * 40 + [-1] * (kind.tokens - 40), False)]


def test_mixtures_have_longer_captured_steps():
    """Their launches take the host longer than the device: a step of 2,000 rows is captured with experts alone."""
    from quire.backends.cases import ragged

    found = {}
    for sparse in (False, True):
        program: Any = Heard()
        program.sparse = sparse
        state = DeviceState(20, 4, [9], 16, program.device)
        steps = PrefillSteps(program, state, max_seqs=20, max_tokens=4096, max_context=4096, vocab=10)
        batch = ragged([(0, 2000, list(range(125)))])
        batch.logit_rows = np.array([1999], np.int32)
        found[sparse] = steps.kind_for(batch), steps.sizes[-1]
    kind, largest = found[True]
    assert kind is not None and kind.tokens == 2048 and largest == (2048, 16)
    assert found[False] == (None, (1024, 21))
