"""Batch invariance at full size, with no tolerance: what only a GPU can tell, since its instructions do the sums.

Every launch configuration of `product` and of attention at fixed positions must give a row the same bits. One that does
not has to leave `TILES` (kernels/product.py) or `INVARIANT_TALL` (kernels/attention.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install quire[test]")
pytest.importorskip("triton", reason="needs triton: pip install quire[test]")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.backends.cuda.kernels import attention as tiles_of_attention  # noqa: E402
from quire.backends.cuda.kernels.attention import attention, workspace  # noqa: E402
from quire.backends.cuda.kernels.norm import rms_norm  # noqa: E402
from quire.backends.cuda.kernels.product import TILES, product  # noqa: E402
from quire.backends.cuda.sampler import CudaSampler  # noqa: E402
from quire.engine.types import Event, Request  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from tests.gpu import kit  # noqa: E402
from tests.unit.backends.cuda.paged import error, exact, paged  # noqa: E402
from tests.unit.backends.cuda.test_deterministic import part  # noqa: E402

BF16 = torch.bfloat16
ROWS = 300


@pytest.fixture(scope="module", params=kit.MATRICES_8B.values(), ids=lambda s: f"{s[0]}x{s[1]}")
def operands(request: pytest.FixtureRequest) -> Any:
    n, k = request.param
    g = torch.Generator("cuda").manual_seed(n + k)
    x = torch.randn(ROWS, k, device="cuda", dtype=BF16, generator=g)
    w = torch.randn(n, k, device="cuda", dtype=BF16, generator=g) * k**-0.5
    whole = torch.empty(ROWS, n, device="cuda")
    product(x, w, whole)
    return x, w, whole


def test_products_at_every_number_of_rows(operands: Any):
    x, w, whole = operands
    assert error(whole, x.float() @ w.float().T) < 5e-3
    wrong: list[int] = []
    for m in range(1, ROWS + 1):
        for rows in (slice(0, m), slice(ROWS - m, ROWS)):
            y = torch.empty(m, w.shape[0], device="cuda")
            product(x[rows], w, y)
            if not torch.equal(y, whole[rows]):
                wrong.append(m)
    assert not wrong, f"other bits at {sorted(set(wrong))} rows"


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.channels}")
def test_products_in_every_tile(operands: Any, tile: Any):
    x, w, whole = operands
    for m in (1, tile.rows, ROWS):  # segments apart, and in one loop
        y = torch.empty(m, w.shape[0], device="cuda")
        product(x[:m], w, y, tile=tile)
        assert torch.equal(y, whole[:m]), m


def test_norms_of_one_row_and_of_many():
    x, gain = torch.randn(ROWS, 4096, device="cuda", dtype=BF16), torch.randn(4096, device="cuda", dtype=BF16)
    whole = torch.empty_like(x)
    rms_norm(x, gain, 1e-5, whole, pdl=True)
    for m in (1, 2, 17, 64):
        out = torch.empty(m, 4096, device="cuda", dtype=BF16)
        rms_norm(x[ROWS - m :], gain, 1e-5, out, pdl=True)
        assert torch.equal(out, whole[ROWS - m :])


@pytest.mark.parametrize("heads, dim", [(32, 128), (8, 64), (16, 256)])
def test_attention_however_a_row_comes(heads: int, dim: int, monkeypatch: pytest.MonkeyPatch):
    """A prompt, its chunks and its rows alone; parts walked by one program or by many; the tile of few rows and of many."""
    p = paged([1700], [2900], heads=heads, kv_heads=8, dim=dim, dtype=BF16, device="cuda")
    split_len = 512
    scale = dim**-0.5

    def run(q: Any, *, apart: bool, tall: bool) -> Any:
        rows = q.q.shape[0]
        out = torch.full(q.q.shape, float("nan"), device="cuda")  # float32: rounding would hide a difference
        space = workspace(rows, heads, dim, 6, "cuda", sums=True) if apart else None
        with monkeypatch.context() as patch:
            if not tall:
                patch.setattr(tiles_of_attention, "INVARIANT_TALL", tiles_of_attention.INVARIANT)
            attention(
                q.q, q.k_cache, q.v_cache, out, **q.arrays, scale=scale, max_q=rows if not tall else max(rows, 64),
                splits=6, split_len=split_len, space=space,
            )  # fmt: skip
        return out

    whole = run(p, apart=False, tall=True)
    assert error(whole, exact(p, scale)) < 1e-2
    for rows in (slice(1699, 1700), slice(0, 1), slice(335, 336), slice(336, 337), slice(100, 107), slice(300, 600)):
        for apart in (False, True):
            for tall in (False, True):
                found = run(part(p, rows), apart=apart, tall=tall)
                assert torch.equal(found, whole[rows]), (rows, apart, tall)


def test_choices_and_log_probabilities():
    logits = torch.randn(64, 128256, device="cuda") * 3
    sampler, tokens = CudaSampler(torch.device("cuda"), alone=True), torch.arange(64, device="cuda") * 7
    best, told = sampler.greedy(logits), sampler.logprobs(logits, tokens, 5)
    for at in (0, 13, 63):
        own = slice(at, at + 1)
        assert torch.equal(sampler.greedy(logits[own]), best[own])
        assert torch.equal(sampler.logprobs(logits[own], tokens[own], 5), told[own])


# ---- the engine: two layers of an 8B

SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def requests() -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95, "seed": 1},
        {"temperature": 1.1, "typical_p": 0.9, "repetition_penalty": 1.2, "seed": 2},
        {"temperature": 0.7, "top_k": 40, "seed": 3},
    ]
    lengths = (5, 600, 1100, 64, 17, 1025, 300, 513)
    return [
        Request(
            id=str(i),
            tokens=[(7919 * (i + 3) * (j + 1)) % 128256 for j in range(length)],
            sampling=SamplingParams(max_tokens=24, logprobs=2, prompt_logprobs=1 if i == 3 else None, **kinds[i % 4]),
        )
        for i, length in enumerate(lengths)
    ]


def answers(folder: Path, asked: list[Request], *, graphs: bool = True, **options: Any) -> dict[str, list[Any]]:
    settings = {"dtype": "auto", "max_seqs": 16, "max_batch_tokens": 2048, "context": 2048, "kv_memory": 1 << 30}
    path = kit.write_shape(folder, **SHAPE)
    engine, _ = kit.build(path, load_format="dummy", deterministic=True, **(settings | options))
    if not graphs:
        engine._runner._decode = None
    heard = kit.serve(engine, asked, lambda event: [event], together=len(asked))
    engine.close()
    torch.cuda.empty_cache()
    return {name: [tokens_of(events), told_of(events)] for name, events in heard.items()}


def tokens_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.tokens]


def told_of(events: list[Event]) -> list[Any]:
    return [(p.token, p.logprob, p.rank, p.top) for e in events for p in [*e.prompt_logprobs, *e.logprobs]]


def test_the_engine_keeps_its_promise(tmp_path: Path):
    asked = requests()
    alone = answers(tmp_path, asked, max_seqs=1, depth=0, prefix_cache=False)
    cases: dict[str, dict[str, Any]] = {
        "together": {"depth": 0},
        "ahead": {"depth": 1},
        "without graphs": {"depth": 1, "graphs": False},
        "in chunks": {"max_batch_tokens": 100},
        "one by one, from the tree": {"max_seqs": 1},
    }
    for name, options in cases.items():
        have = answers(tmp_path, asked, **options)
        assert [r.id for r in asked if have[r.id] != alone[r.id]] == [], name
    twice = [*asked, *(Request(id=f"again {r.id}", tokens=r.tokens, sampling=r.sampling) for r in asked)]
    have = answers(tmp_path, twice, max_seqs=8)
    assert [r.id for r in twice if have[r.id] != alone[r.id.removeprefix("again ")]] == []
