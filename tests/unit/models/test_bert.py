"""Encoders against transformers: rows, embeddings and scores, from folders and from a GGUF, on every backend that has the ops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.backends.choose import open_backend
from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.types import EngineInfo, Event, Request
from quire.layouts import Floats
from quire.observe.errors import BadModelFile, BadRequest, QuireError, Unsupported
from tests.unit.models import encoders

torch = pytest.importorskip("torch", reason="needs torch: the test extra")
pytest.importorskip("transformers", reason="needs transformers: the test extra")

NEEDS = {"encode", "layer_norm", "gelu"}
RNG = np.random.default_rng(5)
TEXTS = [RNG.integers(2, 120, n).tolist() for n in (1, 7, 64, 2, 33, 17)]


def made(path: Path, backend: str = "native", **settings: Any) -> tuple[Any, EngineInfo]:
    lacking = sorted(NEEDS - set(open_backend(backend, threads=1).implementations()))
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)}, which the {backend} backend does not have yet")
    return build_engine(
        EngineConfig(path=str(path), backend=backend, threads=1, **settings), Environment(home=path.parent)
    )


def run(engine: Any, *requests: Request) -> dict[str, Event]:
    for request in requests:
        engine.add(request)
    events: dict[str, Event] = {}
    while engine.busy:
        events |= {e.id: e for e in engine.step()}
    return events


def vectors(engine: Any, texts: list[list[int]] = TEXTS, second: int = 0) -> list[Floats]:
    events = run(engine, *(Request(id=str(i), tokens=t, second=second) for i, t in enumerate(texts)))
    assert all(e.error is None for e in events.values())
    return [np.frombuffer(events[str(i)].vector, "<f4") for i in range(len(texts))]


def rows(model: Any, tokens: list[int]) -> Floats:
    with torch.no_grad():
        return model(torch.tensor([tokens])).last_hidden_state[0].numpy()


def unit(x: Floats) -> Floats:
    return x / np.linalg.norm(x)


POOLED = {"mean": lambda r: r.mean(axis=0), "cls": lambda r: r[0], "last": lambda r: r[-1]}


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "camembert", "distilbert"])
def test_embeddings_are_those_of_transformers(kind: str, backend: str, tmp_path: Path):
    model = encoders.build(kind)
    engine, info = made(encoders.save(model, tmp_path / "m"), backend)
    assert (info.task, info.dimensions) == ("embed", 64)
    assert info.context == (80 if kind in ("bert", "distilbert") else 78)  # RoBERTa's first two are for padding
    for tokens, vector in zip(TEXTS, vectors(engine), strict=True):
        np.testing.assert_allclose(vector, unit(rows(model, tokens).mean(axis=0)), atol=2e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("normalize", [True, False])
def test_the_pooling_is_what_the_folder_says(pooling: str, normalize: bool, tmp_path: Path):
    model = encoders.build("bert")
    engine, info = made(encoders.save(model, tmp_path / "m", pooling=pooling, normalize=normalize))
    assert any(line.startswith(f"pooling: {pooling}") for line in info.decisions)
    for tokens, vector in zip(TEXTS, vectors(engine), strict=True):
        wanted = POOLED[pooling](rows(model, tokens))
        np.testing.assert_allclose(vector, unit(wanted) if normalize else wanted, atol=5e-5)


def test_a_text_has_the_same_bits_alone_and_in_any_batch(tmp_path: Path):
    path = encoders.save(encoders.build("bert"), tmp_path / "m")
    together = vectors(made(path)[0])
    alone = [vectors(made(path, max_batch_tokens=80, max_seqs=1)[0], [t])[0] for t in TEXTS]
    other = vectors(made(path)[0], TEXTS[::-1])[::-1]
    for a, b, c in zip(together, alone, other, strict=True):
        assert a.tobytes() == b.tobytes() == c.tobytes()


def test_a_distilbert_that_predicts_words(tmp_path: Path):
    model = encoders.build("distilbert-masked")
    engine, info = made(encoders.save(model, tmp_path / "m"))
    assert any("not used" in line and "vocab_" in line for line in info.decisions)
    want = unit(rows(model.distilbert, TEXTS[1]).mean(axis=0))
    np.testing.assert_allclose(vectors(engine, [TEXTS[1]])[0], want, atol=2e-5)


def test_prefixes_old_names_and_unused_heads(tmp_path: Path):
    """A BertForMaskedLM has `bert.` before its names and a head; the oldest files call a norm's numbers gamma and beta."""
    from safetensors.torch import load_file, save_file

    model = encoders.build("bert-masked")
    path = encoders.save(model, tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
        for k, v in tensors.items()
    }
    assert any("gamma" in k for k in old) and any(k.startswith("bert.") for k in old)
    save_file(old, path / "model.safetensors")
    engine, info = made(path)
    assert any("not used" in line and "cls.predictions" in line for line in info.decisions)
    np.testing.assert_allclose(vectors(engine, [TEXTS[1]])[0], unit(rows(model.bert, TEXTS[1]).mean(axis=0)), atol=2e-5)


@pytest.mark.parametrize("kind", ["bert-score", "roberta-score", "xlm-roberta-score", "distilbert-score"])
@pytest.mark.parametrize("sigmoid", [True, False])
def test_scores_are_those_of_transformers(kind: str, sigmoid: bool, tmp_path: Path):
    model = encoders.build(kind)
    path = encoders.save(model, tmp_path / "m")
    if not sigmoid:
        config = json.loads((path / "config.json").read_text())
        config["sbert_ce_default_activation_function"] = "torch.nn.modules.linear.Identity"
        (path / "config.json").write_text(json.dumps(config))
    engine, info = made(path)
    assert info.task == "score" and info.separators == (2 if "roberta" in kind else 1)
    for tokens in (TEXTS[1], TEXTS[2]):
        types = torch.tensor([[0] * 3 + [1] * (len(tokens) - 3)])
        with torch.no_grad():
            logit = model(torch.tensor([tokens]), **({"token_type_ids": types} if kind == "bert-score" else {})).logits[
                0, 0
            ]
        wanted = float(torch.sigmoid(logit) if sigmoid else logit)
        assert vectors(engine, [tokens], second=3)[0][0] == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize(("pooling", "backend"), [(None, "native"), (1, "reference"), (2, "native")])
def test_a_gguf_gives_the_same(pooling: int | None, backend: str, tmp_path: Path):
    pytest.importorskip("gguf", reason="needs gguf: the test extra")
    model = encoders.build("bert")
    engine, info = made(encoders.save_gguf(model, tmp_path / "m.gguf", pooling), backend)
    assert info.task == "embed" and any("a GGUF cannot say" in line for line in info.decisions)
    how = "cls" if pooling == 2 else "mean"
    for tokens, vector in zip(TEXTS, vectors(engine), strict=True):
        np.testing.assert_allclose(vector, unit(POOLED[how](rows(model, tokens))), atol=2e-5)


def test_the_context_is_what_sentence_transformers_says_unless_asked(tmp_path: Path):
    path = encoders.save(
        encoders.build("bert"), tmp_path / "m", pooling="mean", sentence_bert_config={"max_seq_length": 32}
    )
    engine, info = made(path)
    assert info.context == 32
    event = run(engine, Request(id="long", tokens=[5] * 33))["long"]
    assert event.finish == "error" and "33 tokens" in (event.error or "") and "32" in (event.error or "")
    assert made(path, context=80)[1].context == 80
    with pytest.raises(BadRequest, match=r"81.*80"):
        made(path, context=81)


def test_bad_ids_are_refused_and_the_engine_goes_on(tmp_path: Path):
    engine, _ = made(encoders.save(encoders.build("bert"), tmp_path / "m"))
    events = run(
        engine, Request(id="a", tokens=[120]), Request(id="b", tokens=[]), Request(id="c", tokens=[3, 4], second=1)
    )
    assert [events[i].finish for i in "abc"] == ["error", "error", "stop"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_hidden_layers": 2}, "2 layers"),
        ({"num_hidden_layers": 4}, "layer.3"),
        ({"max_position_embeddings": 81}, "81"),
    ],
)
def test_what_would_change_the_numbers_is_refused(change: dict[str, Any], what: str, tmp_path: Path):
    path = encoders.save(encoders.build("bert"), tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(QuireError, match=what):
        made(path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"activation": "relu"}, "activation"),
        ({"n_layers": 2}, "2 layers"),
        ({"n_heads": 0}, "n_heads is 0"),
        ({"n_heads": 5}, "heads of 12"),
        ({"hidden_dim": 97}, "lin1.weight' has shape 96x64.*97x64"),
    ],
)
def test_what_would_change_a_distilbert_is_refused(change: dict[str, Any], what: str, tmp_path: Path):
    path = encoders.save(encoders.build("distilbert"), tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(QuireError, match=what):
        made(path)


@pytest.mark.parametrize("pad", ["1", None, -1, 79])
def test_a_padding_token_that_leaves_no_positions_is_refused(pad: Any, tmp_path: Path):
    path = encoders.save(encoders.build("roberta"), tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "pad_token_id": pad}))
    with pytest.raises(BadModelFile, match="pad_token_id"):
        made(path)


def test_modules_that_are_not_understood_are_refused_by_name(tmp_path: Path):
    path = encoders.save(encoders.build("bert"), tmp_path / "m", pooling="mean")
    modules = json.loads((path / "modules.json").read_text())

    def with_(*listed: Any) -> None:
        (path / "modules.json").write_text(json.dumps(list(listed)))

    with_(*modules[:2], {"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    with pytest.raises(Unsupported, match="Dense"):
        made(path)
    with_(modules[0], {**modules[1], "path": "../1_Pooling"})
    with pytest.raises(BadModelFile, match="no folder"):
        made(path)
    with_(modules[0])
    with pytest.raises(Unsupported, match="no pooling"):
        made(path)
    (path / "modules.json").write_text("{")
    with pytest.raises(BadModelFile, match=r"modules\.json"):
        made(path)
    with_(*modules)
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(Unsupported, match="max_tokens"):
        made(path)


def test_an_encoder_cannot_generate_and_a_classifier_of_two_is_no_reranker(tmp_path: Path):
    path = encoders.save(encoders.build("bert"), tmp_path / "m")
    with pytest.raises(Unsupported, match="cannot generate"):
        made(path, task="generate")
    with pytest.raises(Unsupported, match="cannot score"):
        made(path, task="score")
    with pytest.raises(BadRequest, match="task"):
        made(path, task="nonsense")
    two = encoders.save(encoders.build("bert-score", num_labels=2), tmp_path / "two")
    with pytest.raises(Unsupported, match="2 labels"):
        made(two)
