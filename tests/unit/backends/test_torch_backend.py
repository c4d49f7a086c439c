"""The torch backend: weights, fusions and whole models, against numpy, the unfused program and transformers."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from quire.backends import cases
from quire.backends.choose import open_backend
from quire.layouts import Dense
from quire.observe.errors import Unsupported
from tests.unit.backends.test_conformance import WEIGHTS
from tests.unit.models import tiny
from tests.unit.models.programs import Loaded
from tests.unit.models.recorded import CONTINUATIONS

torch = pytest.importorskip("torch", reason="needs the torch extra")

backend = importlib.import_module("quire.backends.torch.backend")
fuse = importlib.import_module("quire.backends.torch.fuse")
weights = importlib.import_module("quire.backends.torch.weights")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_the_dequantized_numbers(name: str):
    layout = WEIGHTS[name](19, 512, np.random.default_rng(3))
    held = weights.Weights(torch.device("cpu"), torch.float32)
    held.load([[layout]])
    np.testing.assert_array_equal(held[layout].numpy(), layout.dequantize())
    if not isinstance(layout, Dense):  # what a GPU does with the packed bytes
        packed = torch.from_numpy(layout.data)
        np.testing.assert_array_equal(weights.dequantize(packed, layout.codec).numpy(), layout.dequantize())
    half = weights.Weights(torch.device("cpu"), torch.bfloat16)
    half.load([[layout]])
    assert torch.equal(half[layout], torch.from_numpy(layout.dequantize()).to(torch.bfloat16))


def test_weights_of_one_product_lie_together_and_are_loaded_once():
    rng = np.random.default_rng(0)
    a, b, c = (WEIGHTS["q4_0"](n, 64, rng) for n in (8, 4, 6))
    told = []
    held = weights.Weights(torch.device("cpu"), torch.float32)
    held.load([[a, b], [a], [c]], lambda layout, done, total: told.append((layout, done, total)))
    whole = held.joined([a, b])
    assert whole is not None and whole.shape == (12, 64)
    assert held[b].data_ptr() == whole[8:].data_ptr()
    assert [t[0] for t in told] == [a, b, c]
    assert told[-1][1] == told[-1][2] == a.nbytes + b.nbytes + c.nbytes
    assert held.nbytes == 18 * 64 * 4
    held.load([[b, c]], lambda *_: pytest.fail("loaded twice"))
    assert held.joined([b, c]) is None


def test_random_weights_need_no_data():
    layout = Dense(np.broadcast_to(np.zeros(1, np.uint16), (64, 32)), "bf16")
    norm, bias = (Dense(np.broadcast_to(np.array([one], np.uint16), (64,)), "bf16") for one in (0x3F80, 0))  # 1.0, 0.0
    held = [weights.Weights(torch.device("cpu"), torch.bfloat16, random=True) for _ in range(2)]
    for h in held:
        h.load([[layout], [norm], [bias]])
    assert torch.equal(held[0][layout], held[1][layout])
    assert 0.01 < float(held[0][layout].float().std()) < 0.03
    assert 0.9 < float(held[0][norm].mean()) < 1.1
    assert -0.1 < float(held[0][bias].mean()) < 0.1


def recorded(path: Path):
    from quire import models
    from quire.backends.recorder import record
    from quire.weights.gguf.file import GGUF

    model = models.load(GGUF.open(path))
    return model, record(model.forward, model.kv(4, 16), {})


def test_a_layer_is_five_instructions(tmp_path: Path):
    path = tiny.write_gguf(tiny.build(), tmp_path / "m.gguf")
    _, recording = recorded(path)
    ops = [i.op for i in fuse.fuse(recording.instructions, recording.output)]
    start, end = ["linear", "attention", "linear_add_norm"], ["gated", "linear_add_norm"]
    layer = [*start, *end]
    assert ops == ["embed", "norm", *layer, *layer, *layer, "take", "linear"]


def test_fusions_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tiny.write_gguf(tiny.build(attention_bias=False), tmp_path / "m.gguf")
    tokens = np.random.default_rng(4).integers(0, 160, 50).tolist()
    fused = Loaded(path, "torch", most=64).logits(tokens, 20)
    monkeypatch.setattr(fuse, "PASSES", (fuse.attention,))
    plain = Loaded(path, "torch", most=64).logits(tokens, 20)
    np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=1e-5)  # a wider product may be blocked differently


def test_values_that_something_else_reads_are_kept():
    """A gate that is used twice, a sum that is read by two, a rotated key that is also the output."""
    rng = np.random.default_rng(5)
    up, gate = (WEIGHTS["f32"](64, 64, rng) for _ in range(2))
    norm = Dense(np.ones(64, np.float32), "f32")

    def forward(ops, batch, inputs):
        x = inputs["x"]
        a, b = ops.linear(x, gate), ops.linear(x, up)
        total = ops.add(ops.swiglu(a, b), a)
        both = ops.add(ops.rms_norm(total, norm, 1e-5), total)
        return ops.linear(both, gate)

    limits = {"kv": cases.NO_KV, "max_tokens": 32, "max_rows": 32, "inputs": {"x": 64}}
    batch, x = cases.single(5), cases.floats(rng, 5, 64)
    want = open_backend("reference").compile(forward, **limits).run(batch, {"x": x})
    got = open_backend("torch", device="cpu").compile(forward, **limits).run(batch, {"x": x})
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_a_stale_page_cannot_poison_attention():
    """What an earlier sequence left behind a sequence's end may be anything."""
    kv = cases.KV(layers=1, pages=4, page_size=16, kv_heads=2, head_dim=16)

    def forward(ops, batch, inputs):
        return ops.attention(inputs["q"], inputs["k"], inputs["v"], batch, layer=0, heads=2, scale=0.25)

    widths = dict.fromkeys("qkv", 32)
    program = open_backend("torch", device="cpu").compile(forward, kv=kv, max_tokens=32, max_rows=32, inputs=widths)
    for pool in (
        pages for layers in program.kernels.caches for cache in layers for pages in (cache.keys, cache.values)
    ):
        pool.fill_(float("nan"))
    rng = np.random.default_rng(6)
    for rows in ([(0, 5, [2])], [(5, 1, [2]), (0, 3, [1])], [(6, 1, [2]), (3, 1, [1])]):
        batch = cases.ragged(rows)
        inputs = {name: cases.floats(rng, batch.tokens, 32) for name in "qkv"}
        assert np.isfinite(program.run(batch, inputs)).all()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "tpu"}, "no device"),
        ({"device": "meta"}, "never tried"),
        ({"dtype": "int3"}, "no dtype"),
    ],
)
def test_what_is_not_there_is_refused(options: dict, why: str):
    with pytest.raises(Unsupported, match=why):
        open_backend("torch", **options)


@pytest.mark.parametrize(("limit", "want"), [("1", 1), ("7", 3), ("", 3), ("0", 3), ("many", 3)])
def test_no_more_threads_are_asked_for_than_openmp_gives(limit: str, want: int, monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    try:
        backend.TorchBackend("cpu", threads=3)
        assert torch.get_num_threads() == want
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said():
    with pytest.raises(Unsupported, match="no CUDA device"):
        open_backend("torch", device="cuda")


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 1}, {"tie_word_embeddings": True}])
def test_logits_equal_transformers(changes: dict, tmp_path: Path):
    model = tiny.build(**changes)
    loaded = Loaded(tiny.write_gguf(model, tmp_path / "m.gguf"), "torch", most=256)
    rng = np.random.default_rng(1)
    for length, chunk in ((1, None), (16, 5), (17, None), (100, 33), (200, 64)):
        tokens = rng.integers(0, 160, length).tolist()
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        np.testing.assert_allclose(loaded.logits(tokens, chunk), expected, atol=2e-2, rtol=2e-3)


def test_the_default_model_continues_as_transformers_does(model_path: Path):
    """Greedy, 10 tokens a prompt, float32 on the CPU."""
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.weights.gguf.file import GGUF

    with GGUF.open(model_path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    loaded = Loaded(model_path, "torch")
    for text, want in CONTINUATIONS.items():
        prompt = tokenizer.encode(text, add_special=False, parse_special=False)
        logits, output = loaded.logits(prompt)[-1], []
        while len(output) < len(want):
            output.append(int(logits.argmax()))
            at = len(prompt) + len(output) - 1
            pages = list(range(at // 16 + 1))
            logits = loaded.program.run(cases.ragged([(at, 1, pages)], ids=np.array(output[-1:])))[0]
        assert output == want
