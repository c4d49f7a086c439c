"""Windows, caps, sinks, latent keys and experts at the sizes of real models, under graph replay, and with equal bits."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install quire[test]")
pytest.importorskip("triton", reason="needs triton: pip install quire[test]")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.backends.cuda import experts as module  # noqa: E402
from quire.backends.cuda.kernels import grouped as tiles  # noqa: E402
from quire.backends.cuda.kernels.attention import attention, encode, rows_as_pages, workspace  # noqa: E402
from quire.backends.cuda.kernels.latent import latent_attention, latent_splits  # noqa: E402
from quire.backends.cuda.kernels.product import product  # noqa: E402
from quire.backends.torch import experts as plain  # noqa: E402
from quire.backends.torch.quantized import E4M3, Int4, Scaled  # noqa: E402
from quire.layouts import Routing  # noqa: E402
from tests.unit.backends.cuda.paged import error, exact, paged  # noqa: E402
from tests.unit.backends.cuda.test_deterministic import part  # noqa: E402
from tests.unit.backends.cuda.test_latent import exact as exact_latent  # noqa: E402

BF16 = torch.bfloat16
CUDA = torch.device("cuda")


@pytest.mark.parametrize("heads, kv_heads, dim, window, softcap, sinks", [
    (64, 8, 64, 128, 0.0, True),  # gpt-oss
    (16, 8, 256, 1024, 50.0, False),  # Gemma 2, with a shorter window
    (8, 4, 256, 512, 0.0, False),  # Gemma 3
])  # fmt: skip
@pytest.mark.parametrize("split_len", [0, 512])
def test_windows_of_real_models(
    heads: int, kv_heads: int, dim: int, window: int, softcap: float, sinks: bool, split_len: int
):
    """Pages before a window are gone, and what lies before the first page is no number."""
    rows, lens = [1] * 6 + [300, 5], [1, 100, 129, 900, 2500, 4000, 1500, 3000]
    p = paged(rows, lens, heads=heads, kv_heads=kv_heads, dim=dim, dtype=BF16, device="cuda")
    options: dict[str, Any] = {"window": window, "softcap": softcap}
    options["sinks"] = torch.randn(heads, device="cuda") if sinks else None
    want = exact(p, dim**-0.5, **options)
    for b in range(len(rows)):
        first = max(0, int(p.pos[p.q_start[b]]) - window + 1)
        p.table[b, : first // 16] = -1
    for name in ("k_cache", "v_cache"):
        cache = getattr(p, name)
        setattr(p, name, torch.cat([torch.full_like(cache[:1], float("nan")), cache])[1:])
    for splits in (1, 4) if not split_len else (1, 8):
        out = torch.full_like(p.q, float("nan"))
        space = None
        if splits > 1:
            space = workspace(p.q.shape[0], heads, dim, splits, "cuda", sums=split_len > 0)
        attention(
            p.q, p.k_cache, p.v_cache, out, **p.arrays, scale=dim**-0.5, max_q=300, splits=splits, space=space,
            split_len=split_len, **options,
        )  # fmt: skip
        assert error(out, want) < 1e-2


def test_an_encoder():
    lengths = [512, 7, 130, 1, 300]
    heads, dim = 12, 64
    q_start = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    qkv = torch.randn(sum(lengths), 3 * heads * dim, device="cuda", dtype=BF16)
    q, k, v = (x.unflatten(-1, (heads, dim)) for x in qkv.chunk(3, -1))
    out = torch.full((sum(lengths), heads, dim), float("nan"), device="cuda", dtype=BF16)
    counts, table = rows_as_pages(q_start, 512)
    encode(q, k, v, out, q_start=q_start, lengths=counts, table=table, scale=0.125)
    for first, n in zip(q_start.tolist(), lengths, strict=False):
        own = [x[first : first + n].transpose(0, 1)[None].float() for x in (q, k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(*own, scale=0.125)[0].transpose(0, 1)
        assert error(out[first : first + n], want) < 1e-2


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_keys_of_deepseek(heads: int):
    scale = 192**-0.5
    for rows, lens in (([1] * 5, [1, 64, 700, 3000, 5000]), ([200, 1, 3, 1], [900, 2000, 64, 1])):
        p = paged(rows, lens, heads=heads, kv_heads=1, dim=576, dtype=BF16, device="cuda")
        want = exact_latent(p, 512, scale)
        chosen = latent_splits(p.q.shape[0], heads, max(lens))
        for splits in {1, 3, chosen} if len(rows) == 5 else {1}:
            out = torch.full((p.q.shape[0], heads, 512), float("nan"), device="cuda", dtype=BF16)
            space = workspace(p.q.shape[0], heads, 512, splits, "cuda") if splits > 1 else None
            latent_attention(
                p.q, p.k_cache, out, **p.arrays, scale=scale, max_q=max(rows), splits=splits, space=space
            )  # fmt: skip
            assert error(out, want) < 1e-2


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_rows_have_the_same_bits_however_they_come(heads: int):
    p = paged([600], [1400], heads=heads, kv_heads=1, dim=576, dtype=BF16, device="cuda")

    def run(q: Any, splits: int) -> Any:
        rows = q.q.shape[0]
        out = torch.full((rows, heads, 512), float("nan"), device="cuda")  # float32: rounding would hide a difference
        space = workspace(rows, heads, 512, splits, "cuda", sums=True) if splits > 1 else None
        told = {"scale": 0.07, "max_q": rows, "splits": splits, "split_len": 512, "space": space}
        latent_attention(q.q, q.k_cache, out, **q.arrays, **told)
        return out

    whole = run(p, 1)
    assert error(whole, exact_latent(p, 512, 0.07)) < 1e-2
    for rows in (slice(599, 600), slice(0, 1), slice(223, 225), slice(100, 140)):
        for splits in (1, 3):
            assert torch.equal(run(part(p, rows), splits), whole[rows]), (rows, splits)


def mixture(d: int, f: int, count: int, routing: Routing, kind: Any = None, **options: Any) -> plain.Mixture:
    held: list[Any] = []
    for n, k in ((count * 2 * f, d), (count * d, f)):
        if kind is None:
            held.append(torch.randn(n, k, device="cuda", dtype=BF16) * k**-0.5)
            continue
        made: Any = Int4.empty(n, k, kind, CUDA) if isinstance(kind, int) else Scaled.empty(n, k, kind, CUDA)
        for first in range(0, n, 8192):
            own = made.rows(first, min(n, first + 8192))
            own.fill(torch.randn(own.shape, device="cuda") * k**-0.5)
        held.append(made)
    biases = [torch.randn(count, n, device="cuda") * 0.1 for n in (2 * f, d)] if options.get("limit") else [None, None]
    return plain.Mixture(*held, *biases, count, options.get("limit"), routing, None)


QWEN3 = (2048, 768, 128, Routing(8, renormalize=True))
GPT_OSS = (2880, 2880, 32, Routing(4, renormalize=True))
DEEPSEEK = (2048, 512, 256, Routing(8, sigmoid=True, renormalize=True, scale=2.5, groups=8, top_groups=4, pair=True))


@pytest.mark.parametrize("shape", [QWEN3, GPT_OSS, DEEPSEEK], ids=["qwen3", "gpt-oss", "deepseek"])
@pytest.mark.parametrize("kind", [None, E4M3, torch.int8, 32], ids=["bf16", "fp8", "int8", "int4"])
def test_experts_of_real_models(shape: Any, kind: Any):
    d, f, count, routing = shape
    m = mixture(d, f, count, routing, kind, limit=7.0 if shape is GPT_OSS else None)
    for rows in (1, 7, 64, 500):
        x = torch.randn(rows, d, device="cuda", dtype=BF16)
        logits = torch.randn(rows, count, device="cuda")
        want = plain.mix(x.float(), logits, as_floats(m), blocks=True)
        assert error(module.mix(x, logits, m, exact=True), want) < 2e-2, rows
        assert error(module.mix(x, logits, m), want) < (6e-2 if kind is E4M3 else 2e-2), rows  # many rows become fp8


def as_floats(m: plain.Mixture) -> plain.Mixture:
    from dataclasses import replace

    wide = [w.float() if isinstance(w, torch.Tensor) else w for w in (m.both, m.down)]
    return replace(m, both=wide[0], down=wide[1])


def test_experts_give_a_row_the_same_bits_in_every_tile_and_batch():
    """A configuration that does not has to leave TILES (kernels/grouped.py)."""
    d, f, count, routing = QWEN3
    m = mixture(d, f, count, routing)
    x, logits = torch.randn(2100, d, device="cuda", dtype=BF16), torch.randn(2100, count, device="cuda")
    whole = module.mix(x, logits, m)
    assert [tiles.tile_of(BF16, n * 8, count).rows for n in (1, 500, 2100)] == [16, 64, 128]
    for rows in (slice(0, 1), slice(2099, 2100), slice(10, 30), slice(700, 1200), slice(0, 2000)):
        assert torch.equal(module.mix(x[rows], logits[rows], m), whole[rows]), rows


def test_a_graph_replays_with_other_rows_and_routes():
    d, f, count, routing = QWEN3
    m = mixture(d, f, count, routing)
    x, logits = torch.randn(16, d, device="cuda", dtype=BF16), torch.zeros(16, count, device="cuda")
    module.mix(x, logits, m)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.mix(x, logits, m, pdl=True)
    for seed in range(3):
        g = torch.Generator("cuda").manual_seed(seed)
        x.copy_(torch.randn(16, d, device="cuda", generator=g))
        logits.copy_(torch.randn(16, count, device="cuda", generator=g) * 4)
        graph.replay()
        assert torch.equal(out, module.mix(x, logits, m))


def test_products_by_head_at_every_number_of_rows():
    x = torch.randn(300, 16 * 128, device="cuda", dtype=BF16)
    w = torch.randn(16 * 512, 128, device="cuda", dtype=BF16) * 128**-0.5
    whole = torch.empty(300, 16 * 512, device="cuda")
    product(x, w, whole, heads=16)
    want = torch.einsum("thk,hnk->thn", x.view(300, 16, 128).float(), w.view(16, 512, 128).float()).flatten(1)
    assert error(whole, want) < 5e-3
    for m in (1, 16, 17, 64, 65, 299):
        y = torch.empty(m, 16 * 512, device="cuda")
        product(x[300 - m :], w, y, heads=16)
        assert torch.equal(y, whole[300 - m :]), m
