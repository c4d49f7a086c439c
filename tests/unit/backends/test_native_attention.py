"""Native attention over long pasts: cut at chunks, shared between sequences, kept as f16, int8 or int16. Every way to compute a row
gives the same bits, and stale memory never shows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from quire.backends.batch import Batch
from quire.backends.cases import attention_bound, ragged
from quire.backends.choose import open_backend
from quire.backends.native import available
from quire.backends.native.backend import CELLS, NativeBackend, extension
from quire.backends.ops import KV
from quire.observe.errors import Unsupported

DTYPES = pytest.mark.parametrize("dtype", NativeBackend.kv_dtypes)
LENGTH, HEADS, KV_HEADS, DIM = 700, 6, 2, 32
WIDTHS = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
PAGES = [int(p) for p in np.random.default_rng(9).permutation(200)]


def attention(heads: int, dim: int):
    def forward(ops, batch, i):
        for layer in (0, 1):  # the second must find everything as the first did
            x = ops.attention(i["q"], i["k"], i["v"], batch, layer=layer, heads=heads, scale=dim**-0.5)
        return x

    return forward


def compiled(dtype: str, *, pages: int = 200, **options):
    kv = KV(2, pages, 16, KV_HEADS, DIM, dtype)
    limits = {"kv": kv, "max_tokens": 768, "max_rows": 0, "inputs": WIDTHS}
    return NativeBackend(**options).compile(attention(HEADS, DIM), **limits)


def taking(dtype: str, **options):
    """The same, where of the second layer only some rows are taken."""

    def forward(ops, batch, i):
        return ops.take(attention(HEADS, DIM)(ops, batch, i), batch.logit_rows)

    kv = KV(2, 200, 16, KV_HEADS, DIM, dtype)
    return NativeBackend(**options).compile(forward, kv=kv, max_tokens=768, max_rows=768, inputs=WIDTHS)


def batch_of(rows: list[tuple[int, int, list[int]]]) -> Batch:
    batch = ragged(rows)
    batch.logit_rows = batch.logit_rows[:0]
    return batch


@pytest.fixture(scope="module")
def given() -> dict[str, np.ndarray]:
    """q, k and v of one long sequence."""
    rng = np.random.default_rng(4)
    return {name: rng.standard_normal((LENGTH, width)).astype(np.float32) for name, width in WIDTHS.items()}


def feed(program, given, start: int, end: int, pages: list[int]) -> np.ndarray:
    part = {name: x[start:end] for name, x in given.items()}
    return program.run(batch_of([(start, end - start, pages)]), part).copy()


@pytest.fixture(scope="module")
def wanted(given) -> dict[str, np.ndarray]:
    """Every row, computed token by token on one thread."""
    found = {}
    for dtype in NativeBackend.kv_dtypes:
        program = compiled(dtype)
        found[dtype] = np.concatenate([feed(program, given, t, t + 1, PAGES[:44]) for t in range(LENGTH)])
    return found


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("cuts", [(700,), (256, 256, 188), (255, 2, 443), (13,) * 53 + (11,), (699, 1)])
def test_chunks_and_threads_do_not_show(given, wanted, dtype: str, threads: int, cuts: tuple[int, ...]) -> None:
    program, rows = compiled(dtype, threads=threads), []
    for start, end in itertools.pairwise(itertools.accumulate(cuts, initial=0)):
        rows.append(feed(program, given, start, end, PAGES[:44]))
    np.testing.assert_array_equal(np.concatenate(rows), wanted[dtype])


@DTYPES
@pytest.mark.parametrize("isa", available())
def test_kernel_sets_do_not_show(given, wanted, dtype: str, isa: str) -> None:
    program = compiled(dtype, isa=isa, threads=2)
    rows = [feed(program, given, 0, 600, PAGES[:44]), feed(program, given, 600, 699, PAGES[:44])]
    rows.append(feed(program, given, 699, 700, PAGES[:44]))
    np.testing.assert_array_equal(np.concatenate(rows), wanted[dtype])


@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_shared_prefix_does_not_show(given, wanted, dtype: str, threads: int, rows: int) -> None:
    """Sequences that begin with the same 0, 256, 512 or 640 tokens, in the same pages and in pages of their own."""
    program = compiled(dtype, threads=threads)
    feed(program, given, 0, 640, PAGES[:40])
    others = iter(PAGES[44:])
    sequences = [(640, rows, [*PAGES[:40], next(others)]) for _ in range(8)]
    for shared in (16, 16, 16, 32, 32, 0):  # pages in common
        own = [next(others) for _ in range(34 - shared)]
        program.run(
            batch_of([(shared * 16, 528 - shared * 16, PAGES[:shared] + own)]),
            {name: x[shared * 16 : 528] for name, x in given.items()},
        )
        sequences.append((528, rows, PAGES[:shared] + own))
    sequences += [(0, rows, [next(others)]), (304, rows, [*PAGES[:19], next(others)]), (640, rows, PAGES[:41])]
    together = {n: np.concatenate([x[s : s + n_] for s, n_, _ in sequences]) for n, x in given.items()}
    want = np.concatenate([wanted[dtype][s : s + n] for s, n, _ in sequences])
    # One more of the same length, with a past of its own.
    other, own = {name: x[::-1].copy() for name, x in given.items()}, [next(others) for _ in range(34)]
    feed(program, other, 0, 528, own)
    alone = compiled(dtype)
    feed(alone, other, 0, 528, own)
    want = np.concatenate([want, feed(alone, other, 528, 528 + rows, own)])
    sequences.append((528, rows, own))
    together = {n: np.concatenate([x, other[n][528 : 528 + rows]]) for n, x in together.items()}
    got = program.run(batch_of(sequences), together)
    np.testing.assert_array_equal(got, want)


REQUESTS = {
    "the last": [698],
    "none": [],
    "here and there": [0, 1, 2, 15, 16, 254, 255, 256, 257, 258, 259, 400, 511, 512, 640, 698],
    "in any order, and twice": [640, 3, 698, 3, 256],
    "all": list(range(699)),
}


@DTYPES
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", REQUESTS.values(), ids=REQUESTS)
def test_rows_that_nobody_takes_do_not_show(given, wanted, dtype: str, threads: int, rows: list[int]) -> None:
    """A prompt in one piece and then a row: those taken are right, and all were stored."""
    program = taking(dtype, threads=threads)
    batch = ragged([(0, 699, PAGES[:44])])
    batch.logit_rows = np.array(rows, np.int32)
    got = program.run(batch, {name: x[:699] for name, x in given.items()})
    np.testing.assert_array_equal(got, wanted[dtype][batch.logit_rows])
    batch = ragged([(699, 1, PAGES[:44])])
    got = program.run(batch, {name: x[699:] for name, x in given.items()})
    np.testing.assert_array_equal(got, wanted[dtype][699:])


STEPS = [  # new tokens of each sequence, and the rows that are taken
    ((300, 20, 40, 10), (0, 299, 339)),
    ((60, 1, 1, 3), (60, 64)),
    ((1, 1, 1, 1), (2,)),
    ((1, 1, 1, 1), (0, 1, 2, 3)),
]


@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_some_sequences_alone_do_not_show(given, wanted, dtype: str, threads: int) -> None:
    """Long and short ones together, with one row each at the end, where who attends would store."""
    program, own = taking(dtype, threads=threads), [PAGES[44 * i : 44 * (i + 1)] for i in range(4)]
    starts = [0, 0, 0, 0]
    for lengths, rows in STEPS:
        batch = ragged([(s, n, p) for s, n, p in zip(starts, lengths, own, strict=True)])
        batch.logit_rows = np.array(rows, np.int32)
        at = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        got = program.run(batch, {name: x[at] for name, x in given.items()})
        np.testing.assert_array_equal(got, wanted[dtype][at[list(rows)]])
        starts = [s + n for s, n in zip(starts, lengths, strict=True)]


@DTYPES
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 32, 71])
def test_any_number_of_queries_share_a_key(dtype: str, group: int) -> None:
    check_against_the_reference(group, 1, 16, dtype)


@DTYPES
@pytest.mark.parametrize("dim", [8, 16, 24, 40, 64, 72, 96, 112, 128, 200, 256])
def test_head_sizes(dtype: str, dim: int) -> None:
    check_against_the_reference(4, 2, dim, dtype)


def check_against_the_reference(heads: int, kv_heads: int, dim: int, dtype: str) -> None:
    """A prefill over two chunks, a chunk of a second sequence, then decode of both; each row also alone, to the bit."""
    kv = KV(2, 64, 16, kv_heads, dim, dtype)
    widths = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    limits = {"kv": kv, "max_tokens": 320, "max_rows": 0, "inputs": widths}
    forward, rng = attention(heads, dim), np.random.default_rng(dim + heads)
    native, alone = (NativeBackend(threads=t).compile(forward, **limits) for t in (2, 1))
    oracle = open_backend("reference").compile(forward, **limits)
    a, b = PAGES_64[:20], PAGES_64[20:40]
    for rows in ([(0, 290, a), (0, 5, b)], [(290, 1, a), (5, 17, b)], [(291, 1, a), (22, 1, b)]):
        batch = batch_of(rows)
        inputs = {n: rng.standard_normal((batch.tokens, w)).astype(np.float32) for n, w in widths.items()}
        got = native.run(batch, inputs).copy()
        np.testing.assert_allclose(got, oracle.run(batch, inputs), rtol=2e-4, atol=attention_bound(kv))
        at = 0
        for start, n, pages in rows:
            single = alone.run(batch_of([(start, n, pages)]), {k: x[at : at + n] for k, x in inputs.items()})
            np.testing.assert_array_equal(single, got[at : at + n])
            at += n


PAGES_64 = [p for p in PAGES if p < 64]


@DTYPES
@pytest.mark.parametrize("length", [3, 250, 260, 520])
def test_stale_memory_is_never_read(dtype: str, length: int) -> None:
    """Pages used before by someone else may hold infinities and NaN, in slots not yet written."""
    program, clean = compiled(dtype, pages=64), compiled(dtype, pages=64)
    rng = np.random.default_rng(1)
    for value in (math.inf, math.nan):
        dirty = {name: np.full((640, width), value, np.float32) for name, width in WIDTHS.items()}
        program.run(batch_of([(0, 640, PAGES_64[:40])]), dirty)
    inputs = {name: rng.standard_normal((length, width)).astype(np.float32) for name, width in WIDTHS.items()}
    batch = batch_of([(0, length, PAGES_64[:40])])
    got = program.run(batch, inputs)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, clean.run(batch, inputs))


@DTYPES
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_reaches_those_who_look_and_no_others(dtype: str, value: float) -> None:
    program = compiled(dtype, pages=64)
    rng = np.random.default_rng(2)
    inputs = {name: rng.standard_normal((40, width)).astype(np.float32) for name, width in WIDTHS.items()}
    clean = program.run(batch_of([(0, 40, PAGES_64[:3])]), inputs).copy()
    inputs["v"][20, :DIM] = value  # the first of two KV heads
    got = program.run(batch_of([(0, 40, PAGES_64[:3])]), inputs)
    np.testing.assert_array_equal(got[:20], clean[:20])
    half = HEADS // 2 * DIM
    np.testing.assert_array_equal(got[:, half:], clean[:, half:])
    assert not np.isfinite(got[20:, :half]).any()


def test_int8_is_codes_and_a_scale() -> None:
    """One token seen by itself comes back as its own rounding: round(v * 127 / amax) * (amax / 127)."""
    program = compiled("int8")
    rng = np.random.default_rng(3)
    inputs = {name: rng.standard_normal((3, width)).astype(np.float32) for name, width in WIDTHS.items()}
    inputs["v"][1] *= 1e-38
    inputs["v"][2] = 0
    rows = [(0, 1, [PAGES[i]]) for i in range(3)]
    got = program.run(batch_of(rows), inputs).reshape(3, HEADS, DIM)
    v = inputs["v"].reshape(3, KV_HEADS, DIM)
    amax = np.abs(v).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        want = np.where(amax < 1e-36, 0, np.rint(v * (np.float32(127) / amax)) * (amax / np.float32(127)))
    np.testing.assert_array_equal(got, np.repeat(want.astype(np.float32), HEADS // KV_HEADS, axis=1))


def whole(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The last axis as 256 high + low times a scale, as int16 keeps it."""
    amax = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32)
    codes = np.rint(x.astype(np.float32) * (np.float32(32639) / amax)).astype(np.int64)
    high = (codes + 128) >> 8
    return high, codes - 256 * high, (amax / np.float32(32639)).astype(np.float64)


def products(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> np.ndarray:
    """a [M, n] times b [N, n] without what both lower bytes would add."""
    return (65536 * (a[0] @ b[0].T) + 256 * (a[0] @ b[1].T + a[1] @ b[0].T)) * a[2] * b[2].T


@pytest.mark.parametrize("dim", [8, 40, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 16])  # 16: with matrix tiles, where there are some
def test_int16_is_sums_of_whole_numbers(dim: int, group: int) -> None:
    """Scores, and values of each 256 tokens, are products of rows that are rounded to 16 bits on both sides; nothing else is rounded."""
    tokens, kv = 600, KV(1, 64, 16, 1, dim, "int16")
    widths, rng = {"q": group * dim, "k": dim, "v": dim}, np.random.default_rng(dim + group)
    inputs = {name: rng.standard_normal((tokens, width)).astype(np.float32) for name, width in widths.items()}
    inputs["k"][:, 1] *= 20  # as some models have it, and numbers of 11 bits lose most by

    def forward(ops, batch, i):
        return ops.attention(i["q"], i["k"], i["v"], batch, layer=0, heads=group, scale=dim**-0.5)

    program = NativeBackend().compile(forward, kv=kv, max_tokens=tokens, max_rows=0, inputs=widths)
    got = program.run(batch_of([(0, tokens, PAGES_64[:40])]), inputs).reshape(tokens, group, dim)
    keys, values = whole(inputs["k"]), whole(inputs["v"])
    for row in (0, 5, 255, 256, 599):
        score = products(whole(inputs["q"][row].reshape(group, dim)), keys)[:, : row + 1] * (dim**-0.5 / math.log(2))
        level = np.floor(np.log2(values[2][: row + 1, 0]))
        want, total = (
            np.zeros((group, dim)),
            np.exp2(score - score.max(axis=-1, keepdims=True)).sum(axis=-1, keepdims=True),
        )
        for start in range(0, row + 1, 256):
            seen = slice(start, min(start + 256, row + 1))
            high = (score[:, seen] + level[seen]).max(axis=-1, keepdims=True)
            codes = np.rint(
                np.exp2(score[:, seen] + level[seen] - high) * values[2][seen, 0] * np.exp2(-level[seen]) * 16319
            ).astype(np.int64)
            upper = (codes + 128) >> 8
            weights = (upper, codes - 256 * upper, np.exp2(high - score.max(axis=-1, keepdims=True)) / 16319)
            want += products(weights, (*(part[seen].T for part in values[:2]), np.ones((dim, 1))))
        # A weight on the border between two codes may fall to either side: a 16,319th of the largest one.
        np.testing.assert_allclose(got[row], want / total, rtol=0, atol=1e-4)


def test_int16_weighs_tokens_whose_values_have_scales_of_all_sizes() -> None:
    """Zeros, values near the smallest and the largest that are kept, and none of them changes what the others weigh."""
    tokens, dim = 300, 64
    widths, rng = {"q": dim, "k": dim, "v": dim}, np.random.default_rng(9)
    inputs = {name: rng.standard_normal((tokens, width)).astype(np.float32) for name, width in widths.items()}
    inputs["v"][::3] *= np.exp2(rng.integers(-30, 8, (tokens // 3, 1))).astype(np.float32)
    inputs["v"][5::7] = 0
    inputs["v"][6::7] *= 1e-36
    q, k, v = (inputs[name].astype(np.float64) for name in "qkv")
    score = np.where(np.tri(tokens, dtype=bool), q @ k.T / 8, -np.inf)
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    exact = weight @ v / weight.sum(axis=-1, keepdims=True)

    def forward(ops, batch, i):
        return ops.attention(i["q"], i["k"], i["v"], batch, layer=0, heads=1, scale=1 / 8)

    limits = {"kv": KV(1, 64, 16, 1, dim, "int16"), "max_tokens": tokens, "max_rows": 0, "inputs": widths}
    got = NativeBackend().compile(forward, **limits).run(batch_of([(0, tokens, PAGES_64[:20])]), inputs)
    largest = np.maximum.accumulate(np.abs(v).max(axis=-1))[:, None]
    assert (np.abs(got - exact) < 4e-4 * largest).all()


def test_int16_is_closer_to_exact_attention_than_f16_where_a_column_is_large() -> None:
    """A scale for a head's columns costs the small ones precision; what that does to a score is still less than a float16's rounding of the large one."""
    tokens, dim = 300, 64
    widths, rng = {"q": dim, "k": dim, "v": dim}, np.random.default_rng(8)
    inputs = {name: rng.standard_normal((tokens, width)).astype(np.float32) for name, width in widths.items()}
    inputs["k"][:, 3] += 100
    q, k, v = (inputs[name].astype(np.float64) for name in "qkv")
    score = np.where(np.tri(tokens, dtype=bool), q @ k.T / 8, -np.inf)
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    exact = weight @ v / weight.sum(axis=-1, keepdims=True)

    def forward(ops, batch, i):
        return ops.attention(i["q"], i["k"], i["v"], batch, layer=0, heads=1, scale=1 / 8)

    errors = {}
    for dtype in ("f16", "int16"):
        limits = {"kv": KV(1, 64, 16, 1, dim, dtype), "max_tokens": tokens, "max_rows": 0, "inputs": widths}
        got = NativeBackend().compile(forward, **limits).run(batch_of([(0, tokens, PAGES_64[:20])]), inputs)
        errors[dtype] = np.sqrt(np.mean((got - exact) ** 2))
    assert errors["int16"] < errors["f16"]


@DTYPES
def test_both_languages_count_the_same_bytes(dtype: str) -> None:
    for heads, dim in ((3, 64), (1, 8), (2, 200)):
        kv = KV(5, 7, 16, heads, dim, dtype)
        plan = extension().Plan(NativeBackend()._machine, (5, 7, heads, dim, CELLS[dtype], 0, 0), 1, 0, 64)
        assert plan.page_bytes == kv.page_bytes == 16 * kv.token_bytes
    assert KV(30, 1, 16, 3, 64).token_bytes == 23040
    assert KV(30, 1, 16, 3, 64, "int8").token_bytes == 30 * 2 * 3 * (64 + 4)
    assert KV(30, 1, 16, 3, 64, "int16").token_bytes == 30 * 2 * 3 * (128 + 4)


def test_a_backend_without_it_refuses() -> None:
    class Plain(NativeBackend):
        kv_dtypes = ()

    with pytest.raises(Unsupported, match="cannot keep K and V as int8"):
        Plain().compile(
            attention(HEADS, DIM), kv=KV(2, 4, 16, KV_HEADS, DIM, "int8"), max_tokens=1, max_rows=0, inputs=WIDTHS
        )
