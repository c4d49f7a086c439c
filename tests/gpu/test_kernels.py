"""The CUDA kernels at full size, and under graph replay: what the interpreter is too slow for or cannot know."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install quire[test]")
pytest.importorskip("triton", reason="needs triton: pip install quire[test]")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from quire.backends.cuda.kernels import candidates, fp8  # noqa: E402
from quire.backends.cuda.kernels.attention import attention, choose_splits, workspace  # noqa: E402
from quire.backends.cuda.kernels.norm import rms_norm  # noqa: E402
from quire.backends.cuda.kernels.prefix import shared_attention  # noqa: E402
from quire.backends.cuda.kernels.sample import choose  # noqa: E402
from quire.backends.cuda.kernels.skinny import skinny  # noqa: E402
from quire.backends.cuda.kernels.tuning import skinny_shape  # noqa: E402
from tests.gpu.kit import MATRICES_8B  # noqa: E402
from tests.unit.backends.cuda.paged import error, exact, paged  # noqa: E402
from tests.unit.backends.cuda.test_prefix import groups_of  # noqa: E402

BF16 = torch.bfloat16
SHAPES = [size for name, size in MATRICES_8B.items() if name != "gate_up"]


@pytest.mark.parametrize("n, k", SHAPES)
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("eight", [False, True])
def test_projections(n: int, k: int, m: int, eight: bool):
    w = torch.randn(n, k, device="cuda", dtype=BF16) * k**-0.5
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    y = torch.full((m, n), float("nan"), device="cuda", dtype=BF16)
    options = {}
    want = x.float() @ w.float().T
    if eight:
        w, options["w_scale"] = fp8.quantize_weight(w)
        x8, options["x_scale"] = torch.empty(m, k, device="cuda", dtype=fp8.E4M3), torch.empty(m, device="cuda")
        fp8.quantize_rows(x, x8, options["x_scale"])
        x = x8
        want = (x8.float() * options["x_scale"][:, None]) @ fp8.dequantize_weight(w, options["w_scale"]).T
    shape = skinny_shape(n, k, m, w.dtype, eight=eight)
    if shape.splits > 1:
        options["part"] = torch.empty(shape.splits, m, n, device="cuda")
    skinny(x, w, y, shape, **options)
    assert error(y, want) < 1e-2


def test_large_fp8_product():
    x, w = torch.randn(300, 4096, device="cuda", dtype=BF16), torch.randn(6144, 4096, device="cuda", dtype=BF16)
    x8, xs = torch.empty(300, 4096, device="cuda", dtype=fp8.E4M3), torch.empty(300, device="cuda")
    fp8.quantize_rows(x, x8, xs)
    for kind in ("channel", "tensor"):
        w8, ws = fp8.quantize_weight(w, kind)
        out = torch.empty(300, 6144, device="cuda", dtype=BF16)
        fp8.scaled_product(x8, xs, w8, ws, out)
        assert error(out, (x8.float() * xs[:, None]) @ fp8.dequantize_weight(w8, ws).T) < 1e-2


@pytest.mark.parametrize("window, softcap", [(0, 0.0), (1000, 0.0), (0, 30.0)])
def test_a_large_mix(window: int, softcap: float):
    rows, lens = [1] * 30 + [700, 5, 1200], [1 + 97 * i for i in range(30)] + [2100, 4000, 1200]
    p = paged(rows, lens, heads=32, kv_heads=8, dim=128, dtype=BF16, device="cuda")
    want = exact(p, 128**-0.5, window=window, softcap=softcap)
    for splits in (1, 6):
        out = torch.full_like(p.q, float("nan"))
        space = workspace(p.q.shape[0], 32, 128, splits, "cuda") if splits > 1 else None
        attention(
            p.q, p.k_cache, p.v_cache, out, **p.arrays, scale=128**-0.5, max_q=1200, splits=splits, space=space,
            window=window, softcap=softcap,
        )  # fmt: skip
        assert error(out, want) < 1e-2


RAGGED = ((100, 100), (300, 300), (17, 1000), (700, 2100), (1, 33), (5, 77), (1200, 1200), (128, 128), (33, 4097))


@pytest.mark.parametrize(
    "heads, kv_heads, dim, window, sinks",
    [(32, 8, 128, 0, False), (64, 8, 64, 0, True), (28, 4, 128, 1000, False), (4, 4, 64, 0, False),
     (64, 8, 64, 128, True), (16, 1, 128, 300, True)],
)  # fmt: skip
def test_prompts_on_hopper(heads: int, kv_heads: int, dim: int, window: int, sinks: bool):
    """Ragged prompts with and without a past, decode rows among them; slots that nobody wrote hold no numbers."""
    from quire.backends.cuda.kernels import prompt

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is Hopper's")
    rows, lens = ([pair[i] for pair in RAGGED] for i in (0, 1))
    for dtype, bound in ((BF16, 5e-3), (torch.float16, 7e-4)):
        p = paged(rows, lens, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, device="cuda")
        assert prompt.takes(p.q, p.k_cache, p.v_cache)
        own = torch.randn(heads, device="cuda") if sinks else None
        want = exact(p, dim**-0.5, window=window, sinks=own)
        for few in (0, 16):
            tiles = prompt.tile_list(p.q_start, p.kv_len, p.pos, group=heads // kv_heads, min_rows=few)
            out = torch.full_like(p.q, 7.0)
            prompt.attend_prompts(
                p.q, p.k_cache, p.v_cache, out, tiles=tiles, table=p.table, scale=dim**-0.5, window=window, sinks=own
            )
            for b, n in enumerate(rows):
                part = slice(int(p.q_start[b]), int(p.q_start[b + 1]))
                assert error(out[part], want[part]) < bound if n > few else bool((out[part] == 7.0).all())


def test_a_shared_prefix_at_full_size():
    p = paged(
        [1] * 64,
        [2048 + 10 + i for i in range(64)],
        heads=32,
        kv_heads=8,
        dim=128,
        dtype=BF16,
        device="cuda",
        shared=2048,
    )
    space = workspace(64, 32, 128, 5, "cuda")
    out = torch.full_like(p.q, float("nan"))
    shared_attention(
        p.q, p.k_cache, p.v_cache, out, **p.arrays, groups=groups_of(p, [64], [2048]), scale=128**-0.5, max_q=1,
        space=space, own_splits=1, prefix_splits=4,
    )  # fmt: skip
    assert error(out, exact(p, 128**-0.5)) < 1e-2


def test_a_graph_replays_with_other_contents():
    """Captured with one set of lengths, replayed with others: the grid comes from bounds."""
    short = paged([1] * 8, [3 + i for i in range(8)], heads=32, kv_heads=8, dim=128, dtype=BF16, device="cuda")
    long = paged([1] * 8, [900 + 37 * i for i in range(8)], heads=32, kv_heads=8, dim=128, dtype=BF16, device="cuda")
    splits = choose_splits(8, 8, 2048)
    space, out = workspace(8, 32, 128, splits, "cuda"), torch.empty_like(long.q)
    table = torch.zeros(8, long.table.shape[1], dtype=torch.int32, device="cuda")
    table[:, : short.table.shape[1]] = short.table
    arrays = {"q_start": short.q_start, "kv_len": short.kv_len, "pos": short.pos, "table": table}
    q, k, v = short.q.clone(), torch.zeros_like(long.k_cache), torch.zeros_like(long.v_cache)
    run = lambda: attention(q, k, v, out, **arrays, scale=0.1, max_q=1, splits=splits, space=space)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for target, source in ((q, long.q), (k, long.k_cache), (v, long.v_cache), (table, long.table)):
        target.copy_(source)
    arrays["kv_len"].copy_(long.kv_len)
    arrays["pos"].copy_(long.pos)
    graph.replay()
    assert error(out, exact(long, 0.1)) < 1e-2


def test_kernels_that_overlap_wait_for_one_another():
    """A chain with programmatic launches, in a graph, gives what the same chain gives without them."""
    m, d = 4, 4096
    ws = [torch.randn(d, d, device="cuda", dtype=BF16) * d**-0.5 for _ in range(24)]
    gain = torch.ones(d, device="cuda", dtype=BF16)
    start = torch.randn(m, d, device="cuda", dtype=BF16)
    shape = skinny_shape(d, d, m, BF16)
    part = torch.empty(shape.splits, m, d, device="cuda")
    h, x = torch.empty_like(start), torch.empty_like(start)

    def chain() -> None:
        h.copy_(start)
        x.copy_(start)
        for w in ws:
            skinny(x, w, x, shape, part=part, add_parts=False)
            rms_norm(part, gain, 1e-5, x, residual=h, pdl=True)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    residual, value = start.clone(), start.clone()
    for w in ws:
        residual = (residual.float() + value.float() @ w.float().T).to(BF16)
        value = torch.nn.functional.rms_norm(residual.float(), (d,), eps=1e-5).to(BF16)
    first = None
    for _ in range(20):
        x.fill_(float("nan"))
        part.fill_(float("nan"))
        graph.replay()
        assert error(h, residual) < 2e-2
        first = h.clone() if first is None else first
        assert torch.equal(h, first)


def test_sampling_a_real_vocabulary():
    rows, vocab = 64, 128256
    scores = torch.randn(rows, vocab, device="cuda") * 3
    found, tokens = candidates.scratch(rows, vocab, "cuda"), torch.empty(rows, dtype=torch.int32, device="cuda")
    draws = torch.rand(rows, dtype=torch.float64, device="cuda")
    for temperature, k, p in (
        (0.0, 0, 1.0),
        (0.8, 0, 1.0),
        (0.8, 40, 1.0),
        (0.8, 0, 0.9),
        (1.0, 200, 0.95),
        (1.5, 30_000, 1.0),
    ):
        params = torch.zeros(rows, 9, dtype=torch.float64, device="cuda")
        params[:, 0], params[:, 1], params[:, 2], params[:, 3], params[:, 8] = temperature, k, 1.0, p, draws
        wanted = torch.full((rows,), int(temperature > 0 and (k > 0 or p < 1)), dtype=torch.int32, device="cuda")
        choose(scores, params, wanted, tokens, found)
        same = (tokens.long() == by_sort(scores, temperature, k, p, draws)).float().mean()
        assert same == 1.0 or (same > 0.96 and k == 0 and temperature > 0), (temperature, k, p, float(same))


def by_sort(scores: torch.Tensor, temperature: float, k: int, p: float, draws: torch.Tensor) -> torch.Tensor:
    """The same choice by sorting everything, in float64. A draw at a border may differ by the rounding of a sum."""
    if temperature == 0.0:
        return scores.argmax(1)
    weight = ((scores.double() - scores.double().amax(1, keepdim=True)) / temperature).exp()
    order = scores.sort(dim=1, descending=True, stable=True).indices
    ranked = weight.gather(1, order)
    if k:
        ranked[:, k:] = 0.0
    held = ranked.cumsum(1)
    count = (held < p * held[:, -1:]).sum(1, keepdim=True) + 1
    ranked = ranked.where(torch.arange(scores.shape[1], device="cuda") < count, 0.0)
    kept = torch.zeros_like(weight).scatter_(1, order, ranked)
    cumulative = kept.cumsum(1)
    return torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)[:, 0].clamp(
        max=scores.shape[1] - 1
    )
