"""Every family on a GPU against transformers: the same tiny models as in tests/unit/models, through the CUDA backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install quire[test]")
pytest.importorskip("triton", reason="needs triton: pip install quire[test]")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.unit.models import families, folders, mixtures  # noqa: E402
from tests.unit.models.families import FAMILIES  # noqa: E402
from tests.unit.models.programs import Loaded  # noqa: E402
from tests.unit.models.test_families import exact_logits  # noqa: E402
from tests.unit.models.test_mixtures import VARIANTS  # noqa: E402

# What ||got - wanted|| / ||wanted|| may be: keys and values of 11 bits; then everything of 8, through a few layers.
BOUNDS = {"float32": 3e-3, "bfloat16": 3e-2}


def check(got: np.ndarray, want: np.ndarray, dtype: str) -> None:
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= BOUNDS[dtype] * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_dense_families(name: str, dtype: str, tmp_path: Path):
    """Prompts that cross pages, chunks and windows, then one behind a prefix that another sequence has left."""
    family, model = FAMILIES[name], families.build(name)
    path = folders.save(model, tmp_path / "m")
    loaded = Loaded(path, "cuda", most=320, context=family.context, device="cuda", dtype=dtype)
    rng = np.random.default_rng(1)
    length, chunk = family.lengths[-1]
    tokens = rng.integers(0, 160, length).tolist()
    want = exact_logits(model, tokens)
    check(loaded.logits(tokens, chunk), want, dtype)
    shared = min(48, (length - 1) // 16 * 16)
    check(loaded.after_hit(tokens, shared, 23), want[shared:], dtype)


def check_rows(got: np.ndarray, want: np.ndarray) -> None:
    """Row by row. A row in twenty may be off: where two experts score alike, rounding decides who is chosen."""
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(error) <= BOUNDS["float32"] / 3
    off = error > BOUNDS["float32"]
    assert off.mean() <= 0.05, f"{np.flatnonzero(off).tolist()}: {error[off].round(4).tolist()}"


@pytest.mark.parametrize("name", VARIANTS)
def test_mixtures(name: str, tmp_path: Path):
    """In float32 alone: a router whose scores are rounded to less would choose others everywhere."""
    kind, changes = VARIANTS[name]
    model = mixtures.build(kind, **changes)
    limit = changes.get("swiglu_limit")
    if limit is not None and model.model.layers[0].mlp.experts.limit != limit:
        pytest.skip("needs a transformers that reads gpt-oss's swiglu_limit: 5.22 does")
    loaded = Loaded(folders.save(model, tmp_path / "m"), "cuda", most=256, device="cuda", dtype="float32")
    tokens = np.random.default_rng(1).integers(0, 160, 110).tolist()
    want = mixtures.exact_logits(model, tokens)
    check_rows(loaded.logits(tokens, 33), want)
    check_rows(loaded.after_hit(tokens, 48, 23), want[48:])
