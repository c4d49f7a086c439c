"""Native attention with windows, caps and sinks, over latent keys, and of encoders: a row has one result, to the bit, however it
is computed; and what lies behind a window is never read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from quire.backends.batch import Batch
from quire.backends.cases import ragged
from quire.backends.choose import open_backend
from quire.backends.native import available
from quire.backends.native.backend import NativeBackend, extension
from quire.backends.ops import KV
from quire.layouts import Dense, Rope
from quire.observe.errors import Unsupported
from tests.unit.backends.native_kit import affine

LENGTH, HEADS, KV_HEADS, DIM = 600, 6, 2, 32
PAGES = [int(p) for p in np.random.default_rng(9).permutation(160)]
SINKS = Dense(np.linspace(-1, 3, HEADS, dtype=np.float32), "f32")
KINDS: dict[str, dict[str, Any]] = {
    "window 1": {"window": 1},
    "window 24": {"window": 24},
    "window 256": {"window": 256},
    "window 300, cap": {"window": 300, "softcap": 3.0},
    "cap, sinks": {"softcap": 20.0, "sinks": SINKS},
    "window 130, cap, sinks": {"window": 130, "softcap": 2.0, "sinks": SINKS},
    "latent": {},
    "latent off the vector": {},
}


class Kind:
    """One way to attend, with a pool and inputs for it. The second of two layers must find everything as the first did."""

    def __init__(self, name: str, dtype: str = "f16"):
        self.options = KINDS.get(name, {})
        self.latent = name.startswith("latent")
        self.heads, self.dim = HEADS, DIM
        if self.latent:
            self.heads, self.dim, value = (12, 80, 64) if name == "latent" else (5, 72, 40)
            self.kv = KV(2, 160, 16, 1, self.dim, latent=value)
            self.widths = {"q": self.heads * self.dim, "k": self.dim}
        else:
            self.kv = KV(2, 160, 16, KV_HEADS, DIM, dtype)
            self.widths = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        rng = np.random.default_rng(4)
        self.given = {n: rng.standard_normal((LENGTH, w)).astype(np.float32) for n, w in self.widths.items()}

    def forward(self, ops, batch, i):
        how = {"heads": self.heads, "scale": self.dim**-0.5}
        for layer in (0, 1):
            if self.latent:
                x = ops.latent_attention(i["q"], i["k"], batch, layer=layer, **how)
            else:
                x = ops.attention(i["q"], i["k"], i["v"], batch, layer=layer, **how, **self.options)
        return x

    def compile(self, backend: Any = None, **options: Any) -> Any:
        backend = backend or NativeBackend(**options)
        return backend.compile(self.forward, kv=self.kv, max_tokens=640, max_rows=0, inputs=self.widths)


def batch_of(rows: list[tuple[int, int, list[int]]]) -> Batch:
    batch = ragged(rows)
    batch.logit_rows = batch.logit_rows[:0]
    return batch


def feed(program: Any, given: Mapping[str, np.ndarray], start: int, end: int, pages: list[int]) -> np.ndarray:
    part = {name: x[start:end] for name, x in given.items()}
    return program.run(batch_of([(start, end - start, pages)]), part).copy()


CASES = [(name, "f16") for name in KINDS] + [("window 24", "int8"), ("window 130, cap, sinks", "int8")]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[1]}")
_wanted: dict[tuple[str, str], np.ndarray] = {}


def wanted(case: tuple[str, str]) -> np.ndarray:
    """Every row, computed token by token on one thread."""
    if case not in _wanted:
        kind = Kind(*case)
        program = kind.compile()
        _wanted[case] = np.concatenate([feed(program, kind.given, t, t + 1, PAGES[:38]) for t in range(LENGTH)])
    return _wanted[case]


@EVERY
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_chunks_and_threads_do_not_show(case: tuple[str, str], threads: int) -> None:
    kind = Kind(*case)
    program = kind.compile(threads=threads)
    for cuts in ((600,), (255, 2, 343), (13,) * 46 + (2,)):
        rows = []
        for start, end in itertools.pairwise(itertools.accumulate(cuts, initial=0)):
            rows.append(feed(program, kind.given, start, end, PAGES[:38]))
        np.testing.assert_array_equal(np.concatenate(rows), wanted(case))


@EVERY
@pytest.mark.parametrize("isa", available())
def test_kernel_sets_do_not_show(case: tuple[str, str], isa: str) -> None:
    kind = Kind(*case)
    program = kind.compile(isa=isa, threads=2)
    rows = [feed(program, kind.given, s, e, PAGES[:38]) for s, e in ((0, 500), (500, 599), (599, 600))]
    np.testing.assert_array_equal(np.concatenate(rows), wanted(case))


@EVERY
@pytest.mark.parametrize("threads", [1, 2])
def test_company_does_not_show(case: tuple[str, str], threads: int) -> None:
    """Sequences that begin with the same pages, in all or in part, and one that has nothing to do with them."""
    kind = Kind(*case)
    program = kind.compile(threads=threads)
    feed(program, kind.given, 0, 590, PAGES[:37])
    others = iter(PAGES[38:])
    sequences = [(584, 3, [*PAGES[:36], PAGES[36]]), (576, 1, [*PAGES[:36], next(others)])]
    sequences += [
        (576, 2, [*PAGES[:36], next(others)]),
        (256, 1, [*PAGES[:16], next(others)]),
        (0, 40, [next(others) for _ in range(3)]),
    ]
    own = [next(others) for _ in range(34)]
    turned = {name: x[::-1].copy() for name, x in kind.given.items()}
    feed(program, turned, 0, 528, own)
    together = {
        n: np.concatenate([x[s : s + k] for s, k, _ in sequences] + [turned[n][528:532]]) for n, x in kind.given.items()
    }
    got = program.run(batch_of([*sequences, (528, 4, own)]), together).copy()
    alone = kind.compile()
    feed(alone, turned, 0, 528, own)
    want = [wanted(case)[s : s + k] for s, k, _ in sequences] + [feed(alone, turned, 528, 532, own)]
    np.testing.assert_array_equal(got, np.concatenate(want))


@EVERY
def test_the_reference_agrees(case: tuple[str, str]) -> None:
    kind = Kind(*case)
    oracle = kind.compile(open_backend("reference"))
    rows = 270 if kind.latent else LENGTH  # that one is slow there
    np.testing.assert_allclose(feed(oracle, kind.given, 0, rows, PAGES[:38]), wanted(case)[:rows], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", [c for c in CASES if "window" in c[0]], ids=lambda c: f"{c[0]} {c[1]}")
def test_what_lies_behind_a_window_is_never_read(case: tuple[str, str], threads: int) -> None:
    """The table names no page there, and those that it named before hold nothing but NaN."""
    kind = Kind(*case)
    window = kind.options["window"]
    program = kind.compile(threads=threads)
    for start, end in ((0, 300), (300, 555), (555, 599), (599, 600)):
        batch = batch_of([(start, end - start, PAGES[:38])])
        gone = max(0, start - window + 1) // 16
        batch.pages[0, :gone] = -1
        if gone:  # as if someone else had the pages now
            spoiled = {n: np.full((16 * gone, w), math.nan, np.float32) for n, w in kind.widths.items()}
            program.run(batch_of([(0, 16 * gone, PAGES[:gone])]), spoiled)
        got = program.run(batch, {n: x[start:end] for n, x in kind.given.items()})
        np.testing.assert_array_equal(got, wanted(case)[start:end])
        if start >= window:
            batch.pages[0, gone] = -1  # the first one that is needed
            with pytest.raises(ValueError, match="not a page"):
                program.run(batch, {n: x[start:end] for n, x in kind.given.items()})


def test_a_program_that_sees_everything_needs_every_page() -> None:
    """One layer with a window is not enough."""
    kind = Kind("window 24")

    def mixed(ops, batch, i):
        a = ops.attention(i["q"], i["k"], i["v"], batch, layer=0, heads=HEADS, scale=1.0, window=24)
        return ops.attention(a, i["k"], i["v"], batch, layer=1, heads=HEADS, scale=1.0)

    program = NativeBackend().compile(mixed, kv=kind.kv, max_tokens=640, max_rows=0, inputs=kind.widths)
    feed(program, kind.given, 0, 100, PAGES[:38])
    batch = batch_of([(100, 1, PAGES[:38])])
    batch.pages[0, 0] = -1
    with pytest.raises(ValueError, match="not a page"):
        program.run(batch, {n: x[100:101] for n, x in kind.given.items()})


@pytest.mark.parametrize("threads", [1, 2])
def test_options_that_change_nothing_change_no_bit(threads: int) -> None:
    """A window that no row fills, and sinks far below every score."""
    kind = Kind("plain")
    plain = feed(kind.compile(threads=threads), kind.given, 0, LENGTH, PAGES[:38])
    for options in ({"window": 600}, {"window": 10**9}, {"sinks": Dense(np.full(HEADS, -1e9, np.float32), "f32")}):
        kind.options = options
        np.testing.assert_array_equal(feed(kind.compile(threads=threads), kind.given, 0, LENGTH, PAGES[:38]), plain)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_reaches_the_rows_whose_window_holds_it(value: float) -> None:
    kind = Kind("window 24")
    given = {name: x.copy() for name, x in kind.given.items()}
    given["v"][250, :DIM] = value  # the first of two KV heads
    got, clean = feed(kind.compile(threads=2), given, 0, LENGTH, PAGES[:38]), wanted(("window 24", "f16"))
    half = HEADS // KV_HEADS * DIM
    assert not np.isfinite(got[250:274, :half]).any()
    got[250:274, :half] = clean[250:274, :half]
    np.testing.assert_array_equal(got, clean)


def test_a_large_sink_takes_everything() -> None:
    kind = Kind("plain")
    kind.options = {"sinks": Dense(np.array([90, -90, 90, -90, 90, -90], np.float32), "f32")}
    got = feed(kind.compile(), kind.given, 0, 40, PAGES[:38]).reshape(40, HEADS, DIM)
    assert np.abs(got[:, ::2]).max() < 1e-20 < 1e-3 < np.abs(got[:, 1::2]).max()


@pytest.mark.parametrize("isa", available())
def test_a_cap_holds_far_beyond_it(isa: str) -> None:
    """Scores of a millionth to a million, and infinite ones where a number of a key was too large for a half."""
    kind = Kind("plain")
    kind.options = {"softcap": 5.0}
    given = {name: x[:40].copy() for name, x in kind.given.items()}
    given["q"] *= np.float32(10.0) ** np.linspace(-6, 6, 40, dtype=np.float32)[:, None]
    given["k"][7, 0] = 1e6
    got = feed(kind.compile(isa=isa), given, 0, 40, PAGES[:38])
    with np.errstate(over="ignore"):
        want = feed(kind.compile(open_backend("reference")), given, 0, 40, PAGES[:38])
    there = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), there)
    np.testing.assert_allclose(got[there], want[there], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize(("name", "token", "column"), [("k", 7, 0), ("k", 8, 1), ("v", 9, 2), ("v", 10, 3)])
def test_what_is_too_large_for_a_half_is_seen_by_one_query_as_by_many(
    name: str, token: int, column: int, isa: str
) -> None:
    kind = Kind("plain")
    given = {n: x[:24].copy() for n, x in kind.given.items()}
    given[name][token, column] = 1e6
    together = feed(kind.compile(isa=isa), given, 0, 24, PAGES[:38])
    program = kind.compile(isa=isa)
    alone = np.concatenate([feed(program, given, t, t + 1, PAGES[:38]) for t in range(24)])
    assert not np.isfinite(together).all() and np.isfinite(together[:token]).all()
    np.testing.assert_array_equal(alone, together)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["plain", "window 24"])
def test_rows_may_look_at_what_is_stored_for_others_in_the_same_step(name: str, threads: int) -> None:
    """A row of each sequence is stored by whoever attends, but not where another one looks at it."""
    kind = Kind(name)
    program, pages = kind.compile(threads=threads), PAGES[:38]
    feed(program, kind.given, 0, 20, pages)
    part = {n: x[20:23] for n, x in kind.given.items()}
    got = program.run(batch_of([(20, 1, pages), (21, 1, pages), (22, 1, pages)]), part)
    np.testing.assert_array_equal(got, wanted((name, "f16"))[20:23])


def test_memory_is_touched_ahead_of_what_was_written() -> None:
    """In pieces, only so far, and without a trace."""
    kind = Kind("plain")
    touched, plain = kind.compile(), kind.compile()
    page = 2 * KV_HEADS * 2 * 2 * DIM * 16
    assert [touched._plan.touch(page, 3 * page) for _ in range(4)] == [True, True, True, False]
    for program in (touched, plain):
        feed(program, kind.given, 0, 20, [0, 5])  # page 5 is the last one written: from there on
    assert [touched._plan.touch(2 * page, 3 * page) for _ in range(3)] == [True, True, False]
    np.testing.assert_array_equal(*(feed(p, kind.given, 20, 32, [0, 5]) for p in (touched, plain)))
    while touched.idle():  # to the end of the pool, and there it ends
        pass
    assert not touched._plan.touch(1 << 30, 1 << 40)


def test_fusions_carry_the_options() -> None:
    """Rotation on the way into the cache and int8 on the way out, with everything that attention may have."""
    rope = Rope((1.0 / 10000 ** (np.arange(0, DIM, 2) / DIM)).astype(np.float32), DIM, True)
    weight, kind = affine("Q4_0", 64, HEADS * DIM), Kind("window 130, cap, sinks")

    def forward(ops, batch, i):
        q, k = ops.rope(i["q"], batch.pos, rope, HEADS), ops.rope(i["k"], batch.pos, rope, KV_HEADS)
        x = ops.attention(q, k, i["v"], batch, layer=0, heads=HEADS, scale=0.2, **kind.options)
        return ops.linear(x, weight)

    limits: dict[str, Any] = {"kv": kind.kv, "max_tokens": 640, "max_rows": 0, "inputs": kind.widths}
    fused, plain = (NativeBackend(**options).compile(forward, **limits) for options in ({}, {"passes": ()}))
    for start, end in ((0, 200), (200, 201)):
        np.testing.assert_array_equal(*(feed(p, kind.given, start, end, PAGES[:38]) for p in (fused, plain)))


@pytest.mark.parametrize(
    ("heads", "dim", "latent"), [(1, 8, 8), (3, 576, 512), (16, 576, 512), (40, 32, 32), (71, 24, 16)]
)
def test_latent_shapes(heads: int, dim: int, latent: int) -> None:
    kv, widths = KV(1, 32, 16, 1, dim, latent=latent), {"q": heads * dim, "k": dim}

    def forward(ops, batch, i):
        return ops.latent_attention(i["q"], i["k"], batch, layer=0, heads=heads, scale=dim**-0.5)

    limits: dict[str, Any] = {"kv": kv, "max_tokens": 300, "max_rows": 0, "inputs": widths}
    native, alone = (NativeBackend(threads=t).compile(forward, **limits) for t in (2, 1))
    oracle = open_backend("reference").compile(forward, **limits)
    rng, low = np.random.default_rng(dim), [p for p in PAGES if p < 32]
    a, b = low[:20], low[20:24]
    for rows in ([(0, 258, a), (0, 5, b)], [(258, 1, a), (5, 17, b)], [(259, 1, a), (22, 1, b)]):
        batch = batch_of(rows)
        inputs = {n: rng.standard_normal((batch.tokens, w)).astype(np.float32) for n, w in widths.items()}
        got = native.run(batch, inputs).copy()
        np.testing.assert_allclose(got, oracle.run(batch, inputs), rtol=2e-4, atol=2e-5)
        at = 0
        for start, n, pages in rows:
            single = alone.run(batch_of([(start, n, pages)]), {k: x[at : at + n] for k, x in inputs.items()})
            np.testing.assert_array_equal(single, got[at : at + n])
            at += n


def test_latent_pools_are_counted_once_and_refused_by_name() -> None:
    kv = KV(5, 7, 16, 1, 576, latent=512)
    plan = extension().Plan(NativeBackend()._machine, (5, 7, 1, 576, False, 512, 0), 1, 0, 64)
    assert plan.page_bytes == kv.page_bytes == 16 * 5 * 576 * 2

    def forward(ops, batch, i):
        return ops.latent_attention(i["q"], i["k"], batch, layer=0, heads=2, scale=1.0)

    for kv, match in (
        (KV(1, 4, 16, 1, 64, "int8", latent=32), "f16, not as int8"),
        (KV(1, 4, 16, 1, 640, latent=512), "640"),
    ):
        widths = {"q": 2 * kv.head_dim, "k": kv.head_dim}
        with pytest.raises(Unsupported, match=match):
            NativeBackend().compile(forward, kv=kv, max_tokens=1, max_rows=0, inputs=widths)


def encoder(heads: int, dim: int):
    def forward(ops, batch, i):
        x = ops.encode(i["q"], i["k"], i["v"], batch, heads=heads, scale=dim**-0.5)
        return ops.encode(x, i["k"], i["v"], batch, heads=heads, scale=dim**-0.5)

    return forward


def encoded(
    heads: int,
    kv_heads: int,
    dim: int,
    lengths: list[int],
    inputs: dict[str, np.ndarray],
    backend: Any = None,
    **options,
):
    """What a step of sequences of those lengths gives. There is no pool, and no page."""
    widths = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    backend = backend or NativeBackend(**options)
    kv = KV(0, 0, 16, kv_heads, dim)
    program = backend.compile(encoder(heads, dim), kv=kv, max_tokens=sum(lengths), max_rows=0, inputs=widths)
    batch = batch_of([(0, n, list(range(-(-n // 16)))) for n in lengths])
    batch.pages = np.zeros((len(lengths), 0), np.int32)
    return program.run(batch, inputs).copy()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 32), (6, 2, 64), (12, 12, 8), (5, 1, 24), (80, 1, 16), (1, 1, 256)]
)
def test_a_sequence_is_encoded_the_same_in_any_company(heads: int, kv_heads: int, dim: int) -> None:
    lengths = [1, 300, 17, 0, 520, 16, 255, 257] if heads < 20 else [1, 20, 0, 260]
    rng = np.random.default_rng(dim)
    widths = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    inputs = {n: rng.standard_normal((sum(lengths), w)).astype(np.float32) for n, w in widths.items()}
    got = encoded(heads, kv_heads, dim, lengths, inputs, threads=2)
    want = encoded(heads, kv_heads, dim, [n for n in lengths if n], inputs, open_backend("reference"))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
    at = 0
    for n in lengths:
        if n:
            own = {name: x[at : at + n] for name, x in inputs.items()}
            np.testing.assert_array_equal(encoded(heads, kv_heads, dim, [n], own, threads=1), got[at : at + n])
        at += n


@pytest.mark.parametrize("isa", available())
def test_kernel_sets_encode_the_same(isa: str) -> None:
    rng = np.random.default_rng(1)
    inputs = {n: rng.standard_normal((350, w)).astype(np.float32) for n, w in {"q": 240, "k": 80, "v": 80}.items()}
    got = encoded(6, 2, 40, [300, 50], inputs, isa=isa, threads=2)
    np.testing.assert_array_equal(got, encoded(6, 2, 40, [300, 50], inputs, isa="scalar"))


def test_an_encoder_finds_nothing_of_the_step_before() -> None:
    """Its pages are used again: what a longer sequence left in them must not matter."""
    rng = np.random.default_rng(2)
    widths = {"q": 64, "k": 64, "v": 64}
    program = NativeBackend().compile(encoder(2, 32), kv=KV(0, 0, 16, 2, 32), max_tokens=400, max_rows=0, inputs=widths)
    batch = batch_of([(0, 5, [0])])
    inputs = {n: rng.standard_normal((5, w)).astype(np.float32) for n, w in widths.items()}
    clean = program.run(batch, inputs).copy()
    program.run(
        batch_of([(0, 400, list(range(25)))]), {n: np.full((400, w), math.nan, np.float32) for n, w in widths.items()}
    )
    np.testing.assert_array_equal(program.run(batch, inputs), clean)


def test_estimates_count_an_encoders_pages() -> None:
    backend, widths = NativeBackend(), {"q": 256, "k": 256, "v": 256}
    limits: dict[str, Any] = {"kv": KV(0, 0, 16, 4, 64), "max_rows": 0, "inputs": widths}
    small, large = (backend.estimate(encoder(4, 64), max_tokens=t, **limits).working for t in (512, 8192))
    assert large - small >= (8192 - 512) * 256 * 4 * (4 + 2)  # k, v, what lies between and the result; k and v in pages
