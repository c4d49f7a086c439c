"""The perplexity benchmark against transformers: the same windows, computed by somebody else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.perplexity import Scorer, difference, losses, main, perplexity, windows
from quire.backends.choose import open_backend
from quire.models import load
from quire.weights.gguf.file import GGUF
from tests.unit.models import recorded, tiny

pytest.importorskip("transformers", reason="needs transformers, the oracle: the test extra")


@pytest.mark.parametrize(("tokens", "context", "stride"), [(700, 128, 64), (129, 128, 1), (5, 128, 64), (300, 100, 99)])
def test_every_token_but_the_first_is_predicted_once(tokens: int, context: int, stride: int) -> None:
    cuts = list(windows(tokens, context, stride))
    assert [t for _, wanted, end in cuts for t in range(wanted, end)] == list(range(1, tokens))
    assert all(end - begin <= context and begin < wanted for begin, wanted, end in cuts)
    assert all(wanted - begin >= context - stride for begin, wanted, _ in cuts[1:])


def ours(path: Path, tokens: list[int], context: int, stride: int, dtype: str):
    with GGUF.open(path) as gguf:
        model = load(gguf)
        scorer = Scorer(open_backend("native", threads=2), model, context, dtype)
        return losses(scorer, tokens, context, stride)


def test_a_tiny_model_agrees_with_transformers(tmp_path: Path) -> None:
    """float32 weights: only the rounding of K and V is left."""
    oracle = tiny.build(seed=3)
    path = tiny.write_gguf(oracle, tmp_path / "tiny.gguf")
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 160, 500)]
    want = recorded.perplexity(oracle, tokens, 300, 150)
    f16, int8 = (ours(path, tokens, 300, 150, dtype) for dtype in ("f16", "int8"))
    assert perplexity(f16) == pytest.approx(want, rel=1e-3)
    assert perplexity(int8) == pytest.approx(want, rel=2e-2)
    mean, error = difference(int8, f16)
    assert mean == pytest.approx(np.log(perplexity(int8) / perplexity(f16)), abs=1e-9) and mean != 0.0
    assert error > 0.0
    assert difference(f16, f16) == (0.0, 0.0)


def test_the_default_model_agrees_with_transformers(model_path: Path) -> None:
    """Activations are rounded to int8 here and not there, so this is closer than a text's own noise, not exact."""
    from quire.chat.tokenizers.tokenizer import Tokenizer

    with GGUF.open(model_path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
    tokens = tokenizer.encode(recorded.TEXT, add_special=False, parse_special=False)[: recorded.READ]
    for dtype in ("f16", "int8"):
        found = perplexity(ours(model_path, tokens, recorded.CONTEXT, recorded.STRIDE, dtype))
        assert found == pytest.approx(recorded.PERPLEXITY, rel=0.03)


def compare(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", ["perplexity", *map(str, arguments), "--context", "32", "--stride", "16"])
    main()


def test_a_file_is_compared_with_another(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With itself under another name: two models are loaded, and there is nothing between them."""
    text, other = tmp_path / "text", tmp_path / "other.gguf"
    text.write_text(recorded.TEXT)
    other.symlink_to(model_path)
    compare(monkeypatch, "--model", model_path, "--against", other, "--text", text, "--tokens", 80)
    shown = capsys.readouterr().out
    assert "loss +0.00000 +- 0.00000" in shown and f"other {perplexity_in(shown, model_path.stem)}" in shown
    assert "decode" not in shown


def perplexity_in(shown: str, name: str) -> str:
    return shown.split(f"   {name} ")[1].split()[0]


@pytest.mark.parametrize(
    ("more", "why"), [((), "the same file name"), (("--depths", 64), "one at a time"), (("--tokens", 0), "some tokens")]
)
def test_a_comparison_that_says_nothing_is_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...], why: str
) -> None:
    other = tmp_path / "other.gguf"
    other.symlink_to(model_path)
    with pytest.raises(SystemExit, match=why):
        compare(monkeypatch, "--model", model_path, "--against", other if more else model_path, *more)
