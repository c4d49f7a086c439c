"""Quantized weights on the torch backend: what each kind may lose, what is kept as it is, what lies where, and whole programs."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from quire.backends import cases
from quire.backends.choose import open_backend
from quire.layouts import Affine, Dense, Layout
from tests.unit.backends.test_conformance import WEIGHTS

torch = pytest.importorskip("torch", reason="needs the torch extra")

quantized = importlib.import_module("quire.backends.torch.quantized")
weights = importlib.import_module("quire.backends.torch.weights")

CPU = torch.device("cpu")
KINDS = ("fp8", "int8", "int4")


def matrix(n: int, k: int, seed: int = 0) -> Dense:
    """Rows of very different sizes, one of zeros, and one with a number that dwarfs the others."""
    rng = np.random.default_rng([n, k, seed])
    w = (rng.standard_normal((n, k)) * 10.0 ** rng.uniform(-3, 1, (n, 1))).astype(np.float32)
    w[0] = 0.0
    w[1, 3] = 40.0
    return Dense(w, "f32")


def held(layouts: list[Layout], quantize: str, products: list[Layout] | None = None):
    made = weights.Weights(CPU, torch.float32, quantize=quantize)
    made.load([layouts], products={id(w) for w in (layouts if products is None else products)})
    return made


def loss(w: np.ndarray, kind: str, group: int) -> np.ndarray:
    """The most that each number may have moved."""
    if kind == "fp8":  # half a step of three bits, or of the smallest numbers there are
        return np.abs(w) * 2.0**-4 + np.abs(w).max(1, keepdims=True) / 448 * 2.0**-10
    if kind == "int8":
        return np.broadcast_to(np.abs(w).max(1, keepdims=True) / 127 * 0.5001, w.shape)
    groups = w.reshape(w.shape[0], -1, group)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step = (high - low) / 15
    # Half a step, and at the ends what rounding scale and zero to half floats may have cut off.
    tiny = 2.0**-25
    return np.broadcast_to(
        step * (0.5 + 16 * 2.0**-11) + np.abs(low) * 2.0**-11 + 16 * tiny, groups.shape
    ).reshape(w.shape)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "group"), [(19, 512, 128), (7, 128, 64), (33, 192, 32)])
def test_a_number_moves_by_half_a_step_at_most(kind: str, n: int, k: int, group: int):
    layout = matrix(n, k)
    made = held([layout], kind)[layout]
    assert made.shape == (n, k)
    if kind == "int4":
        assert made.group == group
    back = made.dequantize().numpy().astype(np.float64)
    assert (np.abs(back - layout.data) <= loss(layout.data.astype(np.float64), kind, group)).all()
    assert (back[0] == 0.0).all()
    ids = torch.tensor([3, 0, 3, n - 1])
    np.testing.assert_array_equal(made.take(ids).numpy(), back[ids.numpy()].astype(np.float32))
    np.testing.assert_array_equal(made.rows(2, 6).dequantize().numpy(), back[2:6].astype(np.float32))


def test_codes_use_the_whole_range():
    layout = matrix(9, 256)
    for kind, largest in (("fp8", 448.0), ("int8", 127.0)):
        codes = held([layout], kind)[layout].codes.float().abs()
        assert (codes[1:].amax(1) == largest).all()


def test_encode_tells_what_is_not_finite():
    x = torch.ones(4, 8)
    x[0, 3], x[1, 2], x[2] = float("inf"), float("nan"), 0.0
    for dtype in (quantized.E4M3, torch.int8):
        codes, scale = quantized.encode(x, dtype)
        back = codes.float() * scale[:, None]
        assert back[:2].isnan().all() and (back[2] == 0).all() and torch.allclose(back[3], x[3])


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q4_k"])
def test_four_bits_of_a_file_are_kept(name: str):
    layout = WEIGHTS[name](21, 512, np.random.default_rng(3))
    made = held([layout], "keep")[layout]
    assert isinstance(made, quantized.Int4) and made.group == 32
    want, got = layout.dequantize().astype(np.float64), made.dequantize().numpy()
    if name == "q4_k":  # a product of a half float and six bits, rounded to a half float
        _, scale, bias = layout.parts()
        worst = (np.abs(scale) * 15 + np.abs(bias)) * 2.0**-11 + 2.0**-24
        assert (np.abs(got - want) <= worst.repeat(32, axis=1)).all()
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 3e-4
    else:
        np.testing.assert_array_equal(got, want)


def test_what_has_no_four_bits_stays_in_full():
    rng = np.random.default_rng(4)
    for layout in (
        WEIGHTS["q6_k"](5, 256, rng),
        WEIGHTS["q8_0"](5, 96, rng),
        WEIGHTS["q4_0"](5, 96, rng),
        matrix(5, 64),
    ):
        made = held([layout], "keep")
        np.testing.assert_array_equal(made[layout].numpy(), layout.dequantize())
        assert "0 of 1 matrices" in made.told()[0]
    odd = matrix(5, 40)  # no whole pairs of groups
    assert isinstance(held([odd], "int4")[odd], torch.Tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_multiplied_together_lies_together(kind: str):
    a, b, c = matrix(8, 64), matrix(4, 64), matrix(6, 64)
    made = held([a, b, c], kind)
    whole = made.joined([a, b, c])
    assert whole is not None and whole.shape == (18, 64)
    assert {t.untyped_storage().data_ptr() for t in whole.tensors} >= {
        t.untyped_storage().data_ptr() for t in made[b].tensors
    }
    parts = torch.cat([held([w], kind)[w].dequantize() for w in (a, b, c)])
    assert torch.equal(whole.dequantize(), parts) and torch.equal(made[b].dequantize(), parts[8:12])
    assert made.nbytes == sum(t.nbytes for t in whole.tensors)
    assert f"3 of 3 matrices, {18 * 64 * 4 / 2**20:.0f} MiB" in made.told()[0]


def test_kinds_may_differ_inside_a_product():
    rng = np.random.default_rng(5)
    a, b, c, d = (WEIGHTS[name](n, 256, rng) for name, n in (("q4_k", 6), ("q4_k", 4), ("q6_k", 3), ("q4_0", 5)))
    made = held([a, b, c, d], "keep")
    whole = made.joined([a, b, c, d])
    assert isinstance(whole, quantized.Mixed) and [p.shape[0] for p in whole.parts] == [10, 3, 5]
    assert torch.equal(whole.dequantize(), torch.cat([torch.as_tensor(_floats(made[w])) for w in (a, b, c, d)]))
    for first, end in ((0, 18), (4, 11), (10, 13), (12, 18)):
        assert torch.equal(whole.rows(first, end).dequantize(), whole.dequantize()[first:end])
    line = made.told()[0]
    assert "3 of 4 matrices" in line and "1 Q6_K" in line


def _floats(weight):
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def test_only_matrices_that_are_multiplied_are_quantized():
    table, head, norm = matrix(16, 64), matrix(16, 64, 1), Dense(np.ones(64, np.float32), "f32")
    made = weights.Weights(CPU, torch.float32, quantize="fp8")
    made.load([[table], [norm], [head]], products={id(head)})
    assert isinstance(made[table], torch.Tensor) and isinstance(made[norm], torch.Tensor)
    assert isinstance(made[head], quantized.Scaled)
    assert made.nbytes == 16 * 64 * 4 + 64 * 4 + 16 * 64 + 16 * 4
    assert "1 of 2 matrices" in made.told()[0] and "1 f32" in made.told()[0]


def test_parts_of_a_matrix_are_quantized_as_the_whole(monkeypatch: pytest.MonkeyPatch):
    """What is read a few rows at a time: dense, affine (as a GPU does it too), random."""
    layouts = [matrix(37, 128), WEIGHTS["bf16"](37, 128, np.random.default_rng(1)), WEIGHTS["q4_1"](37, 128, np.random.default_rng(2))]  # fmt: skip
    for kind in (*KINDS, "keep"):
        for layout in layouts:
            whole = _floats(held([layout], kind)[layout])
            monkeypatch.setattr(weights, "_CHUNK", 5 * 128)
            parts = _floats(held([layout], kind)[layout])
            monkeypatch.undo()
            assert torch.equal(whole, parts)
    shape = Dense(np.broadcast_to(np.zeros(1, np.uint16), (64, 64)), "bf16")
    made = weights.Weights(CPU, torch.float32, random=True, quantize="fp8")
    made.load([[shape]], products={id(shape)})
    assert 0.015 < float(made[shape].dequantize().std()) < 0.025


def program(layouts: dict[str, Layout], norm: Dense, bias: Dense):
    """Everything that a fused product may be: joined, gated, added and normed, an embedding that is the head."""

    def forward(ops, batch, inputs):
        x = ops.embed(batch.ids, layouts["table"])
        h = ops.rms_norm(x, norm, 1e-5)
        a = ops.add(ops.linear(h, layouts["a"], bias), ops.linear(h, layouts["b"]))
        x = ops.add(x, ops.linear(a, layouts["o"], bias))
        h = ops.rms_norm(x, norm, 1e-5)
        x = ops.add(
            x, ops.linear(ops.swiglu(ops.linear(h, layouts["gate"]), ops.linear(h, layouts["up"])), layouts["down"])
        )
        return ops.linear(ops.rms_norm(ops.take(x, batch.logit_rows), norm, 1e-5), layouts["table"])

    return forward


@pytest.mark.parametrize("kind", [*KINDS, "keep"])
@pytest.mark.parametrize("chunk", [1 << 26, 200])
def test_a_program_multiplies_the_dequantized_numbers(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.import_module("quire.backends.torch.kernels"), "_NUMBERS", chunk)
    rng = np.random.default_rng(6)
    make = WEIGHTS["q4_0" if kind == "keep" else "f32"]
    sizes = {"table": (50, 64), "a": (64, 64), "b": (64, 64), "o": (64, 64), "gate": (128, 64), "up": (128, 64), "down": (64, 128)}  # fmt: skip
    layouts = {name: make(*size, rng) for name, size in sizes.items()}
    norm, bias = Dense(cases.floats(rng, 64) + 1, "f32"), Dense(cases.floats(rng, 64), "f32")
    limits = {"kv": cases.NO_KV, "max_tokens": 32, "max_rows": 32}
    backend = open_backend("torch", device="cpu", quantize=kind)
    got = backend.compile(program(layouts, norm, bias), **limits)
    plain = {name: Dense(_floats(backend.weights[w]).numpy(), "f32") for name, w in layouts.items()}
    want = open_backend("reference").compile(program(plain, norm, bias), **limits)
    for name, w in layouts.items():
        assert not isinstance(backend.weights[w], torch.Tensor), name
    batch = cases.single(17, rng.integers(0, 50, 17))
    np.testing.assert_allclose(got.run(batch), want.run(batch), rtol=2e-4, atol=2e-5)


def test_readers_of_a_value():
    """A value that something but a product reads, too, is not made for products alone."""
    from quire.backends.recorder import record
    from quire.backends.torch.fuse import fuse, multiplied

    rng = np.random.default_rng(7)
    a, b, c = (WEIGHTS["f32"](64, 64, rng) for _ in range(3))
    norm = Dense(np.ones(64, np.float32), "f32")

    def forward(ops, batch, inputs):
        x = inputs["x"]
        alone = ops.rms_norm(x, norm, 1e-5)
        shared = ops.swiglu(ops.linear(alone, a), ops.linear(alone, b))
        total = ops.add(shared, ops.linear(shared, c))  # the residual is also what is multiplied
        return ops.rms_norm(total, norm, 1e-5)

    recording = record(forward, cases.NO_KV, {"x": 64})
    made = fuse(recording.instructions, recording.output)
    assert [i.op for i in made] == ["norm", "gated", "linear_add_norm"]
    found = multiplied(made, recording.output)
    assert list(found) == [made[0].outputs[0]] and [s.weight for s in found[made[0].outputs[0]][0]] == [a, b]


def test_kept_four_bits_need_a_file_of_them():
    layout = WEIGHTS["q4_k"](3, 256, np.random.default_rng(8))
    (line,) = held([layout], "none").told()  # nothing is quantized; what takes more than in its file is told
    assert isinstance(layout, Affine) and line.startswith("expanded: 1 matrices of Q4_K") and "--quantize keep" in line
    assert "four-bit codes" in held([layout], "keep").told()[0]
