"""The convolution and the delta rule that go on from states: against float64, row by row, over ragged batches.

Compiled on a GPU; in Triton's interpreter elsewhere. The pool is full of NaN where no state was put, so what is read that
should not be shows, and so does what is written that should not be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from quire.backends import cases
from quire.backends.cases.states import over_states
from quire.backends.choose import open_backend
from quire.backends.cuda import states as module
from quire.backends.cuda.kernels import delta_chunk
from quire.backends.cuda.kernels.conv import Place, conv
from quire.backends.cuda.kernels.delta import delta_rule
from quire.backends.cuda.states import FEW, owners
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.states import Heads, Inputs
from tests.unit.backends.test_conformance import PLAIN

GPU = torch.cuda.is_available()
STATES = [c for c in PLAIN if any(own.state for own in c.kv.groups)]
SMALL = [c for c in STATES if c.name in ("conv-72-4", "delta_rule-2of2-16x16")]
PAGE, PAGES = 16, 40
WIDE = Heads(key_heads=2, heads=4, key_dim=128, dim=128)
HEADS = WIDE if GPU else Heads(key_heads=1, heads=2, key_dim=16, dim=24)
# First position, rows and the row of states of each sequence: a chunk that ends in a page, decode rows at a page's start, inside
# and at its end, a prompt of several chunks with states on its way, one that begins where another's ended, and a short one.
Rows = list[tuple[int, int, list[int]]]
RAGGED: Rows = [
    (0, 37, [0, -1, 2]),
    (48, 1, [-1, -1, 3, 4]),
    (20, 1, [-1, 5]),
    (31, 1, [-1, 6]),
    (45, 150, [-1, -1, 7, 8, -1, -1, 9, -1, 10, -1, -1, -1, 11]),
    (14, 3, [12, 13]),
    (15, 2, [19, 20]),
    (16, 9, [14, 15]),
    (0, 5, [16]),
    (2, 12, [17]),
]


@dataclass
class World:
    """A batch, its states, and what the pool must hold afterwards (filled in by the oracles)."""

    batch: DeviceBatch
    place: Place
    rows: Rows
    after: np.ndarray  # [PAGES, state] float64

    @property
    def owner(self) -> torch.Tensor:
        found = owners(self.batch)
        assert found is not None
        return found


def world(rows: Rows, state: int, at: int, *, device: str, missing: int = -1, seed: int = 0) -> World:
    """`missing` stands in the table for a page that is not there."""
    rng = np.random.default_rng(seed)
    host = over_states(rows)
    pool = np.full((PAGES, at + state), np.nan, np.float32)
    for first, _, row in rows:
        if first and np.isnan(pool[row[(first - 1) // PAGE], at:]).any():
            pool[row[(first - 1) // PAGE], at:] = rng.standard_normal(state) * 0.3
    batch = DeviceBatch.of(host, torch.device(device))
    table = batch.more[0].pages
    table[table < 0] = missing
    # Other layers' states lie beside those of this one.
    held = torch.full((PAGES, 3, at + state), float("nan"), device=device)
    held[:, 1] = torch.from_numpy(pool)
    place = Place(held[:, 1], at, table, batch.q_start, batch.pos, batch.kv_len, PAGE)
    return World(batch, place, rows, pool.astype(np.float64))


def check(w: World, got: torch.Tensor, want: np.ndarray, bound: float) -> None:
    assert np.abs(got.float().cpu().numpy() - want).max() < bound
    held = w.place.pool.cpu().numpy()
    assert (np.isnan(held) == np.isnan(w.after)).all(), "a state that nobody asked for, or none where one is wanted"
    assert np.nanmax(np.abs(held - w.after)) < bound


def stops(first: int, n: int, row: list[int]) -> dict[int, int]:
    """Positions after which a state is kept, and where."""
    ends = {*range((first // PAGE + 1) * PAGE, first + n, PAGE), first + n}
    return {end: row[(end - 1) // PAGE] for end in ends if row[(end - 1) // PAGE] >= 0}


def exact_conv(w: World, x: np.ndarray, factors: np.ndarray) -> np.ndarray:
    taps, n = factors.shape
    before, at, done = w.after.copy(), w.place.at, 0
    out = np.zeros_like(x)
    for first, count, row in w.rows:
        past = before[row[(first - 1) // PAGE], at:].reshape(taps - 1, n) if first else np.zeros((taps - 1, n))
        seen = np.concatenate([past, x[done : done + count]])
        for t in range(count):
            y = (seen[t : t + taps] * factors).sum(0)
            out[done + t] = y / (1.0 + np.exp(-y))
        for end, page in stops(first, count, row).items():
            w.after[page, at:] = seen[end - first : end - first + taps - 1].ravel()
        done += count
    return out


def exact_delta(w: World, inputs: dict[str, np.ndarray], heads: Heads) -> np.ndarray:
    keys, before, at, done = heads.keys, w.after.copy(), w.place.at, 0
    shape = heads.heads, heads.key_dim, heads.dim
    out = np.zeros((len(inputs["a"]), heads.heads, heads.dim))
    for first, count, row in w.rows:
        state = before[row[(first - 1) // PAGE], at:].reshape(shape).copy() if first else np.zeros(shape)
        wanted = stops(first, count, row)
        for t in range(done, done + count):
            for h in range(heads.heads):
                own = h // (heads.heads // heads.key_heads) * heads.key_dim
                q, k = (inputs["qkv"][t, own + i * keys :][: heads.key_dim] for i in range(2))
                q, k = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q, k))
                v = inputs["qkv"][t, 2 * keys + h * heads.dim :][: heads.dim]
                fade = np.exp(inputs["decay"][h] * np.logaddexp(0.0, inputs["a"][t, h] + inputs["bias"][h]))
                state[h] *= fade
                state[h] += np.outer(k, (v - state[h].T @ k) / (1.0 + np.exp(-inputs["b"][t, h])))
                out[t, h] = state[h].T @ q / np.sqrt(heads.key_dim)
            end = first + t - done + 1
            if end in wanted:
                w.after[wanted[end], at:] = state.ravel()
        done += count
    return out.reshape(len(out), -1)


def numbers(rng: np.random.Generator, tokens: int, heads: Heads) -> dict[str, np.ndarray]:
    """Keys that repeat, updates that replace everything, and rows that forget nearly everything or nothing."""
    found = {
        "qkv": rng.standard_normal((tokens, 2 * heads.keys + heads.heads * heads.dim)),
        "a": rng.standard_normal((tokens, heads.heads)) * 2.0,
        "b": rng.standard_normal((tokens, heads.heads)) * 2.0,
        "decay": -rng.uniform(0.01, 4.0, heads.heads),
        "bias": rng.standard_normal(heads.heads),
    }
    found["qkv"][60:140, heads.keys : 2 * heads.keys] = rng.standard_normal(heads.keys)
    found["a"][60:140] = -20.0
    found["b"][60:140] = 9.0
    found["a"][3::73] = 60.0
    return {name: x.astype(np.float32).astype(np.float64) for name, x in found.items()}


def given(inputs: dict[str, np.ndarray], device: str) -> Inputs:
    """qkv, a and b are columns of one tensor, as a merged product leaves them."""
    names = ("qkv", "a", "b")
    whole = torch.from_numpy(np.concatenate([inputs[name] for name in names], 1)).float().to(device)
    parts = whole.split([inputs[name].shape[1] for name in names], dim=1)
    return Inputs(*parts, *(torch.from_numpy(inputs[name]).float().to(device) for name in ("decay", "bias")))


@pytest.mark.parametrize("case", STATES if GPU else SMALL, ids=lambda c: c.name)
@pytest.mark.parametrize("deterministic", [False, True] if GPU else [False])
def test_conformance(case: cases.Case, deterministic: bool):
    """The cases of the op table, within its own bounds."""
    limits = {"kv": case.kv, "max_tokens": 128, "max_rows": 128, "inputs": case.widths}
    oracle = open_backend("reference").compile(case.forward, **limits)
    backend = open_backend("cuda", device="cuda" if GPU else "cpu", dtype="float32", deterministic=deterministic)
    program = backend.compile(case.forward, **limits)
    for i, step in enumerate(case.steps):
        want, got = oracle.run(step.batch, step.inputs), program.run(step.batch, step.inputs)
        assert np.abs(got - want).max() <= step.bound(want), f"step {i}"


@pytest.mark.parametrize(("taps", "missing"), [(2, -1), (4, PAGES), (6, -1)])
def test_convolution(taps: int, missing: int, device: str):
    rng = np.random.default_rng(taps)
    n = 40
    w = world(RAGGED, (taps - 1) * n, 5, device=device, missing=missing)
    x, factors = rng.standard_normal((w.batch.tokens, n)), rng.standard_normal((taps, n)) * 0.5
    want = exact_conv(w, x, factors)
    wide = torch.from_numpy(np.concatenate([x, x], 1)).float().to(device)
    out = torch.full((w.batch.tokens, n), float("nan"), device=device)
    conv(wide[:, :n], torch.from_numpy(factors.ravel()).float().to(device), out, w.place, owner=w.owner)
    check(w, out, want, 1e-5)


def test_convolution_of_one_row_each(device: str):
    rng = np.random.default_rng(1)
    n, taps = 300, 4
    rows = [(first, 1, [*[-1] * (first // PAGE), i]) for i, first in enumerate((0, 1, 15, 17, 40))]
    rows += [(32, 1, [-1, 7, 8])]
    w = world(rows, (taps - 1) * n, 0, device=device)
    x, factors = rng.standard_normal((w.batch.tokens, n)), rng.standard_normal((taps, n)) * 0.5
    want = exact_conv(w, x, factors)
    out = torch.full((w.batch.tokens, n), float("nan"), device=device)
    assert owners(w.batch) is None
    own, weight = torch.from_numpy(x).float().to(device), torch.from_numpy(factors.ravel()).float().to(device)
    conv(own, weight, out, w.place)
    check(w, out, want, 1e-5)


@pytest.mark.parametrize(("chunked", "missing"), [(False, PAGES), (True, -1), (True, PAGES)])
def test_delta_rule(chunked: bool, missing: int, device: str):
    """Row by row, and in chunks of rows that several sequences share."""
    rows = RAGGED if GPU or chunked else [(first, n, row) for first, n, row in RAGGED if n < 100]
    w = world(rows, HEADS.heads * HEADS.key_dim * HEADS.dim, 3, device=device, missing=missing)
    inputs = numbers(np.random.default_rng(2), w.batch.tokens, HEADS)
    want = exact_delta(w, inputs, HEADS)
    got = module.delta_rule(given(inputs, device), w.batch, w.place, HEADS, chunked=chunked, pdl=False)
    check(w, got, want, 2e-5)


@pytest.mark.skipif(not GPU, reason="needs a GPU: the interpreter takes long for so many numbers")
@pytest.mark.parametrize("heads", [WIDE, Heads(16, 32, 128, 128), Heads(1, 2, 192, 256)])
def test_delta_rule_in_half_floats(heads: Heads, device: str):
    """Long sequences at the sizes of real models: chunks are as right as rows are."""
    rows = [(0, 1000, [*[-1] * 31, 0, *[-1] * 30, 1]), (16, 700, [2, *[-1] * 43, 3]), (3, 1, [4])]
    w = world(rows, heads.heads * heads.key_dim * heads.dim, 0, device=device)
    inputs = numbers(np.random.default_rng(3), w.batch.tokens, heads)
    half = given(inputs, device)
    half = replace(half, **{name: getattr(half, name).bfloat16() for name in ("qkv", "a", "b")})
    held, found = w.place.pool.clone(), []
    for chunked in (False, True):
        w.place.pool.copy_(held)
        got = module.delta_rule(half, w.batch, w.place, heads, chunked=chunked, pdl=False)
        found.append((got, w.place.pool.clone()))
    for a, b in zip(*found, strict=True):
        assert (a.isnan() == b.isnan()).all()
        a, b = a.float().nan_to_num(), b.float().nan_to_num()
        assert (a - b).norm() < 4e-3 * a.norm()


def test_rows_that_only_pad_a_batch(device: str):
    """A captured step has rows too many: one sequence of them at position 0, whose pages are not there, and empty ones."""
    w = world([(4, 2, [0]), (0, 3, [1])], HEADS.heads * HEADS.key_dim * HEADS.dim, 0, device=device)
    tokens, ints = 5 + 30, lambda *x: torch.tensor(x, dtype=torch.int32, device=device)
    inputs = numbers(np.random.default_rng(4), tokens, HEADS)
    want = exact_delta(w, {name: x[:5] if x.ndim > 1 else x for name, x in inputs.items()}, HEADS)
    table = torch.full((5, w.place.table.shape[1]), PAGES, dtype=torch.int32, device=device)
    table[:2] = w.place.table
    batch = replace(
        w.batch, pos=torch.cat([w.batch.pos, ints(*[0] * 30)]), q_start=ints(0, 2, 5, tokens, tokens, tokens),
        ids=ints(*[0] * tokens), kv_len=ints(6, 3, 1, 1, 1), longest=tokens, host=None, derived={},
    )  # fmt: skip
    place = replace(w.place, table=table, q_start=batch.q_start, pos=batch.pos, kv_len=batch.kv_len)
    held = w.place.pool.clone()
    for chunked in (False, True):
        w.place.pool.copy_(held)
        got = module.delta_rule(given(inputs, device), batch, place, HEADS, chunked=chunked, pdl=False)
        assert got.isfinite().all()
        check(w, got[:5], want, 2e-5)
    w = world([(4, 2, [0]), (0, 3, [1])], 3 * 24, 0, device=device)
    x, factors = np.random.default_rng(5).standard_normal((tokens, 24)), np.ones((4, 24))
    want = exact_conv(w, x[:5], factors)
    out = torch.full((tokens, 24), float("nan"), device=device)
    place = replace(w.place, table=table, q_start=batch.q_start, pos=batch.pos, kv_len=batch.kv_len)
    x_there, ones = torch.from_numpy(x).float().to(device), torch.ones(4 * 24, device=device)
    conv(x_there, ones, out, place, owner=owners(batch))
    assert out.isfinite().all()
    check(w, out[:5], want, 1e-5)


def test_bits_do_not_depend_on_the_batch(device: str):
    """Row by row in one step, in several, and among others: the same numbers, and the same states."""
    n, size = 24, HEADS.heads * HEADS.key_dim * HEADS.dim
    inputs = given(numbers(np.random.default_rng(6), 22, HEADS), device)
    x = torch.randn(22, n, generator=torch.Generator().manual_seed(7)).to(device)
    weight = torch.rand(4 * n, generator=torch.Generator().manual_seed(8)).to(device)

    def through(parts: list[Rows], mine: int) -> list[torch.Tensor]:
        """All 22 rows of the sequence that is the `mine`-th of each batch; others see other rows."""
        found: list[list[torch.Tensor]] = [[], []]
        pools = [torch.zeros(PAGES, size, device=device), torch.zeros(PAGES, 3 * n, device=device)]
        for rows in parts:
            batch = DeviceBatch.of(over_states(rows), torch.device(device))
            first = [sum(count for _, count, _ in rows[:i]) for i in range(len(rows))]
            at = torch.cat([torch.arange(start, start + count) % 22 for start, count, _ in rows]).to(device)
            own = slice(first[mine], first[mine] + rows[mine][1])
            places = [
                Place(pool, 0, batch.more[0].pages, batch.q_start, batch.pos, batch.kv_len, PAGE) for pool in pools
            ]
            part = Inputs(inputs.qkv[at], inputs.a[at], inputs.b[at], inputs.decay, inputs.bias)
            got = module.delta_rule(part, batch, places[0], HEADS, chunked=False, pdl=False)
            found[0].append(got[own])
            out = torch.empty(len(at), n, device=device)
            conv(x[at], weight, out, places[1], owner=owners(batch))
            found[1].append(out[own])
        return [torch.cat(kept) for kept in found] + [pool[1] for pool in pools]

    row = [0, 1]
    whole = through([[(0, 22, row)]], 0)
    single = through([[(at, 1, row)] for at in range(22)], 0)
    mixed = through([[(0, 5, [5]), (0, 7, row)], [(5, 1, [5]), (7, 12, row)], [(6, 12, [5, 6]), (19, 3, row)]], 1)
    for a, b, c in zip(whole, single, mixed, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_chunks_are_used_where_there_are_many_rows(device: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(module.delta, "delta_rule", lambda *_, most=0, **__: seen.append(("rows", most)))
    monkeypatch.setattr(delta_chunk, "delta_rule_of_many", lambda *_, few, **__: seen.append(("chunks", few)))
    size = HEADS.heads * HEADS.key_dim * HEADS.dim
    for rows, chunked in (([1, 1], True), ([FEW, 1], True), ([FEW + 1, 1], True), ([9, 30], True), ([9, 30], False)):
        w = world([(0, n, [3 * i, 3 * i + 1]) for i, n in enumerate(rows)], size, 0, device=device)
        inputs = given(numbers(np.random.default_rng(9), 200, HEADS), device)
        part = replace(inputs, **{name: getattr(inputs, name)[: sum(rows)] for name in ("qkv", "a", "b")})
        module.delta_rule(part, w.batch, w.place, HEADS, chunked=chunked, pdl=False)
    both = [("rows", FEW), ("chunks", FEW)]
    assert seen == [("rows", 0), ("rows", 0), *both, ("chunks", FEW), ("rows", 0)]


def test_what_does_not_fit_is_refused(device: str):
    w = world([(0, 4, [0])], 64, 0, device=device)
    inputs = given(numbers(np.random.default_rng(0), 200, HEADS), device)
    out = torch.empty(200, HEADS.heads * HEADS.dim, device=device)
    with pytest.raises(ValueError, match="the delta rule of"):
        delta_rule(inputs, out, w.place, HEADS)
    with pytest.raises(ValueError, match="a convolution of"):
        conv(
            torch.zeros(4, 24, device=device),
            torch.zeros(96, device=device),
            torch.empty(4, 24, device=device),
            w.place,
        )
