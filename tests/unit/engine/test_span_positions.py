"""Positions with several axes: a span says where its tokens are along each, text is at one place along all, and what follows goes on
from where the span ended. The oracle is transformers' Qwen2-VL, whose text model is a Qwen2 with such positions.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.backends.batch import Batch
from quire.layouts import Rope
from quire.models import llama
from quire.runner.spans import SlotSpans, Span
from tests.unit.engine.test_spans import PROMPT, WIDTH, engine_of, picture, request, said, serve

pytest.importorskip("transformers", reason="needs transformers, which makes the model")

from tests.unit.models import folders

SECTIONS = [2, 3, 3]
AXES = (0, 0, 1, 1, 1, 2, 2, 2)
ROWS, COLUMNS = 4, 6  # of a picture's grid


def grid(start: int, data: bytes, frames: int = 1) -> Span:
    """A picture whose tokens are at (0, row, column) from where it begins, and which takes up the longer side."""
    t, h, w = np.meshgrid(np.arange(frames), np.arange(ROWS), np.arange(COLUMNS), indexing="ij")
    positions = np.stack([t.ravel(), h.ravel(), w.ravel()]).astype("<i4")
    assert len(data) == positions.shape[1]
    return msgspec.structs.replace(
        picture(data, start), positions=positions.tobytes(), advance=int(positions.max()) + 1
    )


ONE, TWO = grid(10, bytes(range(24))), grid(40, bytes(range(100, 148)), frames=2)


def places(spans: tuple[Span, ...], count: int) -> np.ndarray:
    """The same, one token at a time: [3, count]."""
    made, at = np.zeros((3, count), np.int64), 0
    for i in range(count):
        span = next((s for s in spans if s.start <= i < s.end), None)
        if span is None:
            made[:, i], at = at, at + 1
            continue
        own = np.frombuffer(span.positions, "<i4").reshape(3, -1)
        made[:, i] = at + own[:, i - span.start]
        at += span.advance if i == span.end - 1 else 0
    return made


def test_positions_of_any_chunk_are_those_of_the_whole() -> None:
    spans = (ONE, TWO, msgspec.structs.replace(picture(bytes(3), 90)))
    plain = picture(bytes(3), 90)
    whole = places((ONE, TWO), 90)
    own = SlotSpans((ONE, TWO, plain))
    assert own.shifts and own.axes == 3 and not SlotSpans((plain,)).shifts and len(spans) == 3
    for start in range(90):
        for end in range(start, 91):
            assert (own.coords(start, end) == whole[:, start:end]).all()
            blanked = own.blanked(list(range(start, end)), -1, start)
            rows = {start + at + i: row for at, part in own.given(start, end) for i, row in enumerate(part)}
            for i in range(start, end):
                span = next((s for s in (ONE, TWO) if s.start <= i < s.end), None)
                assert blanked[i - start] == (i if span is None else -1)
                assert (i in rows) == (span is not None)
                if span is not None:
                    assert (rows[i] == np.frombuffer(span.rows, "<f4").reshape(-1, WIDTH)[i - span.start]).all()
    assert own.coords(93, 95).tolist() == [[whole[0, 89] + 4, whole[0, 89] + 5]] * 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = folders.build("qwen2", num_hidden_layers=2, rope_theta=100.0)
    return model, folders.save(model, tmp_path_factory.mktemp("positions") / "model")


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the Llama kind rotate along three axes."""
    plain = llama.rotation
    monkeypatch.setattr(llama, "rotation", lambda *a, **k: dataclasses.replace(plain(*a, **k), axes=AXES))
    monkeypatch.setattr(llama.Model, "axes", 3, raising=False)


def oracle(model: Any) -> Any:
    """transformers' text model of Qwen2-VL with the same weights."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextConfig, Qwen2VLTextModel

    c = model.config
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": SECTIONS}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")  # fmt: skip
    own = Qwen2VLTextConfig(
        **{name: getattr(c, name) for name in names},
        rope_parameters=rope,
        use_sliding_window=False,
        attn_implementation="eager",
    )
    twin = Qwen2VLTextModel(own).eval()
    assert (twin.config.hidden_size // twin.config.num_attention_heads) == 16
    twin.load_state_dict(model.model.state_dict())
    return twin


@pytest.mark.parametrize("chunk", [5, 96])
@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
@pytest.mark.usefixtures("several")
def test_qwen2_vl_says_the_same(made: tuple[Any, Path], backend: str, chunk: int) -> None:
    import torch

    model, path = made
    twin = oracle(model)
    engine = engine_of(path, backend, max_batch_tokens=chunk)
    tokens = PROMPT + PROMPT[:10]
    params = {"max_tokens": 6}
    heard = serve(
        engine,
        request("pictures", tokens, ONE, TWO, params=params),
        request("text", tokens[:30], params=params),
        request("one", tokens, msgspec.structs.replace(ONE, start=60), params=params),
    )
    asked = {
        "pictures": (tokens, (ONE, TWO)),
        "text": (tokens[:30], ()),
        "one": (tokens, (msgspec.structs.replace(ONE, start=60),)),
    }
    table = model.get_input_embeddings().weight.detach()
    for name, (ids, spans) in asked.items():
        rows = table[ids].clone()
        for span in spans:
            rows[span.start : span.end] = torch.from_numpy(np.frombuffer(span.rows, "<f4").reshape(-1, WIDTH).copy())
        with torch.no_grad():
            for token, logprob in said(heard[name]):
                at = torch.from_numpy(places(spans, len(rows)))
                hidden = twin(inputs_embeds=rows[None], position_ids=at[:, None]).last_hidden_state
                logits = model.lm_head(hidden)[0, -1].double().log_softmax(-1)
                assert int(logits.argmax()) == token, name
                assert logprob.logprob == pytest.approx(float(logits[token]), abs=3e-2), name
                rows = torch.cat([rows, table[[token]]])
    # The rows alone do not decide: the same pictures, counted like text, say something else.
    flat = [msgspec.structs.replace(span, positions=b"", advance=0) for span in (ONE, TWO)]
    assert said(serve(engine, request("flat", tokens, *flat, params=params))["flat"]) != said(heard["pictures"])
    engine.close()


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_a_rope_turns_each_frequency_along_its_own_axis(backend: str) -> None:
    """Against numpy, for axes in any order; where no position differs, bit for bit the rope of one axis."""
    from quire.backends.choose import open_backend
    from quire.backends.ops import KV

    rng = np.random.default_rng(1)
    heads, dim, n = 2, 16, 9
    axes = tuple(int(a) for a in rng.integers(0, 3, dim // 2))
    frequencies = (0.5 ** np.arange(dim // 2)).astype(np.float32)
    coords, x = rng.integers(0, 400, (3, n)).astype(np.int32), rng.standard_normal((n, heads * dim)).astype(np.float32)
    count = np.arange(n, dtype=np.int32)
    opened: Any = open_backend(backend, **({"device": "cpu", "dtype": "float32"} if backend == "torch" else {}))

    def run(rope: Rope, at: np.ndarray | None) -> np.ndarray:
        def forward(ops: Any, batch: Batch, inputs: Any) -> Any:
            return ops.rope(inputs["x"], batch.pos, rope, heads)

        kv = KV(0, 0, 16, 1, 16)
        program = opened.compile(forward, kv=kv, max_tokens=16, max_rows=16, inputs={"x": heads * dim})
        pages = np.zeros((1, 1), np.int32)
        batch = Batch(
            count * 0, count, np.array([0, n], np.int32), np.array([n], np.int32), pages, count, count, coords=at
        )
        return np.array(program.run(batch, {"x": x}))

    for pairs in (False, True):
        several, one = Rope(frequencies, dim, pairs, 1.5, axes), Rope(frequencies, dim, pairs, 1.5)
        got, wide = run(several, coords), x.reshape(n, heads, dim).astype(np.float64)
        angle = coords[list(axes)].T.astype(np.float64) * frequencies
        cos, sin = (1.5 * f(angle)[:, None] for f in (np.cos, np.sin))
        a, b = (wide[..., ::2], wide[..., 1::2]) if pairs else (wide[..., : dim // 2], wide[..., dim // 2 :])
        first, second = a * cos - b * sin, a * sin + b * cos
        want = np.stack([first, second], -1).reshape(wide.shape) if pairs else np.concatenate([first, second], -1)
        assert np.abs(got - want.reshape(n, -1)).max() < 2e-4
        assert (run(several, None) == run(one, None)).all()
        assert (run(several, np.tile(count, (3, 1))) == run(one, None)).all()
        assert (run(one, coords) == run(one, None)).all()  # a rope of one axis does not look
        if backend == "native":
            with pytest.raises(ValueError, match="positions along 1 axes, and the program looks at"):
                run(several, coords[:1].copy())
            with pytest.raises(ValueError, match="a position of -1 along an axis"):
                run(several, np.where(coords == coords.max(), -1, coords).astype(np.int32))


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"advance": 5}, "its positions go from 0 to 5, and it takes up 5"),
        ({"advance": 0}, "it takes up 0 positions"),
        ({"advance": 1 << 40}, "it takes up 1099511627776 positions"),
        (
            {"positions": ONE.positions[:-4]},
            "its positions have 284 bytes: 24 int32 numbers along each of 3 axes take 288",
        ),
        ({"positions": np.full(72, -1, "<i4").tobytes()}, "its positions go from -1 to -1"),
    ],
)
def test_positions_that_cannot_be_are_refused(made: tuple[Any, Path], change: dict[str, Any], why: str) -> None:
    engine = engine_of(made[1], "reference")
    (event,) = serve(engine, request("a", PROMPT, msgspec.structs.replace(ONE, **change)))["a"]
    assert event.error is not None and why in event.error and event.param == "spans"
    engine.close()
