"""Recording, fusing and running whole programs: the bits of a row depend on nothing but the row."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.backends.batch import Batch
from quire.backends.choose import open_backend
from quire.backends.early import take_early
from quire.backends.native import arena, available, fuse, isa
from quire.backends.native.backend import NativeBackend
from quire.backends.ops import KV
from quire.backends.recorder import Instruction, Segment, Value, record
from quire.layouts import Rope
from quire.observe.errors import Unsupported
from tests.unit.backends.native_kit import TinyModel, affine, dense, i32, ragged, rows_batch

MODEL = TinyModel()
IDS = [int(x) for x in np.random.default_rng(0).integers(0, MODEL.vocabulary, 45)]
PAGES = (9, 2, 30, 4)


def compiled(model: TinyModel = MODEL, **options):
    return NativeBackend(**options).compile(model.forward, kv=model.kv, max_tokens=96, max_rows=96)


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    """What every way of running the sequence must give, to the bit."""
    return compiled().run(ragged([(IDS, 0, PAGES)])).copy()


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("F32",), 5e-4),
        (("F16",), 1e-3),
        (("BF16",), 5e-4),
        (("Q4_1", "Q8_0", "Q6_K", "Q4_K"), 0.1),
    ],  # float16 K and V that round apart, and one matrix of 14 bits; all of them; int8
)
def test_the_model_agrees_with_the_reference(names: tuple[str, ...], error: float) -> None:
    model, batch = TinyModel(names), ragged([(IDS, 0, PAGES)])
    got = compiled(model).run(batch)
    want = open_backend("reference").compile(model.forward, kv=model.kv, max_tokens=96, max_rows=96).run(batch)
    assert np.linalg.norm(got - want) <= error * np.linalg.norm(want)


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kernel_sets_and_threads_do_not_show(logits: np.ndarray, name: str, threads: int) -> None:
    np.testing.assert_array_equal(compiled(isa=name, threads=threads).run(ragged([(IDS, 0, PAGES)])), logits)


@pytest.mark.parametrize("cuts", [(1,) * 45, (16, 16, 13), (7, 30, 8), (44, 1)])
def test_chunks_do_not_show(logits: np.ndarray, cuts: tuple[int, ...]) -> None:
    program, rows = compiled(threads=2), []
    for start, stop in itertools.pairwise(itertools.accumulate(cuts, initial=0)):
        rows.append(program.run(ragged([(IDS[start:stop], start, PAGES)])).copy())
    np.testing.assert_array_equal(np.concatenate(rows), logits)


def test_company_does_not_show(logits: np.ndarray) -> None:
    program = compiled(threads=2)
    program.run(ragged([(IDS[:20], 0, PAGES)]))
    others = [([5] * 9, 0, (0,)), (IDS[20:], 20, PAGES), ([7, 8, 9], 0, (1,))]
    got = program.run(ragged(others))
    np.testing.assert_array_equal(got[9:34], logits[20:])


def test_rows_wanted_do_not_show(logits: np.ndarray) -> None:
    batch = ragged([(IDS, 0, PAGES)])
    batch.logit_rows = i32([44, 3, 3, 0])
    np.testing.assert_array_equal(compiled().run(batch), logits[[44, 3, 3, 0]])
    batch.logit_rows = i32([])
    assert compiled().run(batch).shape == (0, MODEL.vocabulary)


@pytest.mark.parametrize("chosen", [(), *((p,) for p in fuse.PASSES), tuple(reversed(fuse.PASSES))])
def test_fusing_does_not_show(logits: np.ndarray, chosen: tuple[fuse.Pass, ...]) -> None:
    np.testing.assert_array_equal(compiled(passes=chosen).run(ragged([(IDS, 0, PAGES)])), logits)


@pytest.mark.parametrize("pairs", [False, True])
def test_fusing_does_not_show_for_plain_weights(pairs: bool) -> None:
    model = TinyModel(names=("Q5_0", "Q2_K", "Q3_K"), pairs=pairs, bias=False)
    runs = [compiled(model, passes=p).run(ragged([(IDS, 0, PAGES)])).copy() for p in ((), fuse.PASSES)]
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize("rows", [2, 33, 100, 160])
@pytest.mark.parametrize("width", [96, 2080, 2656])
def test_a_pair_takes_many_columns_at_a_time(rows: int, width: int) -> None:
    gate, up, down = affine("Q4_0", width, 64), affine("Q4_1", width, 64, seed=1), affine("Q8_0", 64, width, seed=2)

    def forward(ops, batch, inputs):
        return ops.linear(ops.swiglu(ops.linear(inputs["x"], gate), ops.linear(inputs["x"], up)), down)

    recording = record(forward, KV(0, 1, 16, 1, 64), {"x": 64})
    assert "gated" in [i.op for i in fuse.fuse(recording.instructions, recording.output)]
    x = np.random.default_rng(3).standard_normal((rows, 64)).astype(np.float32)
    batch = rows_batch(rows)
    limits = {"kv": KV(0, 1, 16, 1, 64), "max_tokens": rows, "max_rows": rows, "inputs": {"x": 64}}
    runs = [
        NativeBackend(passes=p, threads=t).compile(forward, **limits).run(batch, {"x": x}).copy()
        for p, t in (((), 1), (fuse.PASSES, 1), (fuse.PASSES, 3))
    ]
    for run in runs[1:]:
        np.testing.assert_array_equal(run, runs[0])


def ops_of(passes: tuple[fuse.Pass, ...], model: TinyModel) -> list[str]:
    recording = record(model.forward, model.kv, {})
    return [i.op for i in fuse.fuse(recording.instructions, recording.output, passes)]


def test_what_fusing_leaves() -> None:
    layer = ["norm", "linear", "store", "attend", "linear", "norm", "gated", "linear"]
    plain = TinyModel(bias=False)
    assert ops_of(fuse.PASSES, plain) == ["embed", *layer, *layer, "take", "norm", "linear"]
    assert ops_of((), plain).count("quantize") == 15
    assert ops_of((fuse.share_quantize,), plain).count("quantize") == 9


def test_fusing_leaves_alone_what_is_read_twice() -> None:
    weight = affine("Q4_0", 64, 64)

    def forward(ops, batch, inputs):
        g, u = ops.linear(inputs["x"], weight), ops.linear(inputs["x"], weight)
        return ops.add(ops.swiglu(g, u), g)  # the gate is needed again

    kv = KV(0, 1, 16, 1, 64)
    recording = record(forward, kv, {"x": 64})
    assert "gated" not in [i.op for i in fuse.fuse(recording.instructions, recording.output)]
    x = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    batch = ragged([([0] * 3, 0, (0,))])
    batch.logit_rows = i32([])
    runs = [
        NativeBackend(passes=p).compile(forward, kv=kv, max_tokens=3, max_rows=0, inputs={"x": 64}).run(batch, {"x": x})
        for p in ((), fuse.PASSES)
    ]
    np.testing.assert_array_equal(*runs)


def test_the_last_attention_is_of_the_rows_that_are_taken() -> None:
    recording = take_early(record(MODEL.forward, MODEL.kv, {}))
    program = fuse.fuse(recording.instructions, recording.output)
    assert [i.wanted for i in program if i.op == "attend"] == [False, True]


def test_an_attention_that_is_read_whole_is_whole() -> None:
    x, y, z, total = Value(32), Value(32), Value(32, per_token=False), Value(32)
    attend = Instruction("attend", [x], [y], span=32)
    take, add = Instruction("take", [y], [z]), Instruction("add", [x, y], [total])
    for program, output, wanted in [
        ([attend, take], z, True),
        ([attend, take], y, False),
        ([attend, take, add], z, False),
    ]:
        fuse.attend_wanted(program, output)
        assert attend.wanted is wanted


@pytest.mark.parametrize("again", ["q", "k"])
def test_rotated_tensors_that_are_read_twice_are_kept(again: str) -> None:
    kv, rope = KV(1, 2, 16, 2, 32), Rope(np.linspace(1, 0.01, 16, dtype=np.float32), 32, True)

    def forward(ops, batch, inputs):
        q, k = (ops.rope(inputs[name], batch.pos, rope, 2) for name in "qk")
        a = ops.attention(q, k, inputs["v"], batch, layer=0, heads=2, scale=1.0)
        return ops.add(a, q if again == "q" else k)

    inputs = {name: np.random.default_rng(ord(name)).standard_normal((20, 64)).astype(np.float32) for name in "qkv"}
    batch, widths = ragged([([0] * 20, 0, (1, 0))]), dict.fromkeys("qkv", 64)
    batch.logit_rows = i32([])
    backends = NativeBackend(passes=()), NativeBackend(), open_backend("reference")
    runs = [b.compile(forward, kv=kv, max_tokens=20, max_rows=0, inputs=widths).run(batch, inputs) for b in backends]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_allclose(runs[0], runs[2], rtol=2e-4, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.lists(st.integers(0, 5), max_size=3)), max_size=30)
)
def test_values_that_live_together_never_share_memory(shape: list[tuple[int, int, list[int]]]) -> None:
    values, program = [Value(1)], []
    sizes = {values[0]: 64}
    for _, size, reads in shape:
        out = Value(1)
        sizes[out] = 64 * size
        program.append(Instruction("add", [values[-1 - r] for r in reads if r < len(values)], [out]))
        values.append(out)
    offsets, total = arena.lay_out(program, values[:1], values[-1], sizes.__getitem__)
    memory: dict[int, Value] = {}
    written = [values[:1], *(i.writes() for i in program)]
    for at, new in enumerate(written):
        if at:
            for v in program[at - 1].reads():
                assert all(memory[b] is v for b in range(offsets[v], offsets[v] + sizes[v], 64))
        for v in new:
            assert offsets[v] % 64 == 0 and offsets[v] + sizes[v] <= total
            memory |= dict.fromkeys(range(offsets[v], offsets[v] + sizes[v], 64), v)
    assert memory[offsets[values[-1]]] is values[-1]


def bad(**changes: object) -> Batch:
    batch = ragged([(IDS[:20], 0, (3, 1)), ([1], 16, (4, 6))])
    for name, value in changes.items():
        setattr(batch, name, value)
    return batch


def edited(name: str, index: int | tuple[int, ...], value: int) -> Callable[[], Batch]:
    def make() -> Batch:
        batch = bad()
        getattr(batch, name)[index] = value
        return batch

    return make


HOSTILE: list[tuple[str, Callable[[], Batch]]] = [
    ("vocabulary", edited("ids", 3, MODEL.vocabulary)),
    ("vocabulary", edited("ids", 3, -1)),
    ("outside its sequence", edited("pos", 19, 20)),
    ("outside its sequence", edited("pos", 0, -1)),
    ("not 0", edited("q_start", 0, 1)),
    ("token count", edited("q_start", 2, 22)),
    ("goes back", edited("q_start", 1, 22)),
    ("goes back", edited("q_start", 1, -5)),
    ("page table", edited("kv_len", 0, 129)),
    ("page table", edited("kv_len", 1, -1)),
    ("not a page", edited("kv_len", 0, 33)),
    ("not a page", edited("pages", (0, 1), MODEL.kv.pages)),
    ("not a page", edited("pages", (1, 0), -1)),
    ("not a slot", edited("write", 5, MODEL.kv.pages * 16)),
    ("not a slot", edited("write", 5, -1)),
    ("not a row", edited("logit_rows", 0, 21)),
    ("not a row", edited("logit_rows", 0, -1)),
    ("differ in length", lambda: bad(pos=i32([0]))),
    ("differ in length", lambda: bad(q_start=i32([0, 21]))),
    ("compiled for 96", lambda: bad(logit_rows=i32([0] * 97))),
    ("compiled for 96", lambda: ragged([([1] * 97, 0, range(7))], rows="last")),
]


@pytest.mark.parametrize(("match", "make"), HOSTILE)
def test_hostile_batches_are_refused(match: str, make: Callable[[], Batch]) -> None:
    with pytest.raises(ValueError, match=match):
        compiled().run(make())


def test_a_refused_batch_changes_nothing(logits: np.ndarray) -> None:
    program = compiled()
    program.run(ragged([(IDS[:30], 0, PAGES)]))
    with pytest.raises(ValueError, match="slot"):
        program.run(edited("write", 20, -1)())
    np.testing.assert_array_equal(program.run(ragged([(IDS[30:], 30, PAGES)])), logits[30:])


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError):
        compiled().run(bad(ids=np.zeros(21, np.int64)))
    with pytest.raises(TypeError):
        compiled().run(bad(pages=i32([0, 1])))
    with pytest.raises(ValueError, match="takes the inputs"):
        compiled().run(bad(), {"x": np.zeros((21, 4), np.float32)})


def test_mistakes_in_a_model_are_named() -> None:
    kv, rope = KV(1, 1, 16, 1, 64), Rope(np.ones(32, np.float32), 64, True)
    cases = {
        "the weight's columns": lambda ops, b, i: ops.linear(i["x"], affine("Q4_0", 32, 32)),
        "the bias": lambda ops, b, i: ops.linear(i["x"], affine("Q4_0", 32, 64), dense("f32", 31)),
        "rms_norm": lambda ops, b, i: ops.rms_norm(i["x"], dense("f32", 63), 1e-5),
        "only batch.ids": lambda ops, b, i: ops.embed(b.pos, affine("Q4_0", 32, 64)),
        "different shapes": lambda ops, b, i: ops.add(i["x"], ops.embed(b.ids, affine("Q4_0", 32, 32))),
        "rope": lambda ops, b, i: ops.rope(i["x"], b.pos, rope, 2),
        "layer 1": lambda ops, b, i: ops.attention(i["x"], i["x"], i["x"], b, layer=1, heads=1, scale=1.0),
        "a tensor that an op returned": lambda ops, b, i: None,
    }
    for match, forward in cases.items():
        with pytest.raises((ValueError, TypeError, Unsupported), match=match):
            NativeBackend().compile(forward, kv=kv, max_tokens=1, max_rows=1, inputs={"x": 64})


def test_weights_are_packed_once_and_reported() -> None:
    backend, seen = NativeBackend(), []
    report = lambda w, done, total: seen.append((w, done, total))  # noqa: E731
    backend.compile(MODEL.forward, kv=MODEL.kv, max_tokens=4, max_rows=4, packed=report)
    weights = [w for w, _, _ in seen]
    assert len(set(map(id, weights))) == len(weights) and any(w is MODEL.table for w in weights)
    assert [done for _, done, _ in seen] == list(itertools.accumulate(w.nbytes for w in weights))
    assert {total for _, _, total in seen} == {sum(w.nbytes for w in weights)}
    held = backend.packed_bytes
    backend.compile(MODEL.forward, kv=MODEL.kv, max_tokens=8, max_rows=1, packed=report)
    assert len(seen) == len(weights) and backend.packed_bytes == held


def test_kernel_sets_are_named() -> None:
    assert isa() == available()[0] and available()[-1] == "scalar"
    assert isa() in NativeBackend(threads=2).describe() and "2 threads" in NativeBackend(threads=2).describe()
    with pytest.raises(Unsupported, match="scalar"):
        NativeBackend(isa="abacus")


def test_a_segment_knows_its_reads() -> None:
    x, r, out = Value(4), Value(2), Value(2)
    i = Instruction("linear", segments=[Segment(x, dense("f32", 2, 4), None, out, r)])
    assert i.reads() == [x, r] and i.writes() == [out]
