"""Mixtures of experts: routing, the order of pairs, grouped products of every kind of weight, and equal bits in any batch."""

from __future__ import annotations

import warnings
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from quire.backends.cuda import experts as module
from quire.backends.cuda.kernels.grouped import TILES, WIDE, Tile, add_shares, grouped, tile_of
from quire.backends.cuda.kernels.route import place, route
from quire.backends.reference.backend import route as plain_route
from quire.backends.torch import experts as plain
from quire.backends.torch.quantized import E4M3, Int4, Scaled
from quire.backends.torch.words import MxWords
from quire.layouts import Routing
from tests.unit.backends.cuda.paged import error

WAYS = {
    "one": (4, Routing(1)),
    "all": (4, Routing(4, renormalize=True)),
    "odd": (12, Routing(3, groups=3, top_groups=2)),
    "pairs": (32, Routing(5, sigmoid=True, renormalize=True, scale=2.5, groups=8, top_groups=3, pair=True)),
    "runs of one": (6, Routing(2, groups=6, top_groups=3, pair=True)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("biased", [False, True])
def test_routing(way: str, biased: bool, device: str):
    count, routing = WAYS[way]
    rng = np.random.default_rng(count)
    logits = rng.standard_normal((7, count)).astype(np.float32)
    logits[0] = 0.0  # all equal: the lowest numbers
    logits[1, ::2] = logits[1, 0]
    bias = (rng.standard_normal(count) * 0.2).astype(np.float32) if biased else None
    want = plain_route(logits, routing, bias)
    ids = torch.full((7, routing.top), -1, dtype=torch.int32, device=device)
    shares = torch.full((7, routing.top), float("nan"), device=device)
    on = None if bias is None else torch.from_numpy(bias).to(device)
    route(torch.from_numpy(logits).to(device), on, routing, ids, shares)
    assert (ids[:, 1:] > ids[:, :-1]).all()
    for got_ids, got_shares in ((ids.long(), shares), plain.route(torch.from_numpy(logits).to(device), routing, on)):
        got = torch.zeros(7, count, device=device).scatter_(1, got_ids, got_shares).cpu().numpy()
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)
        assert ((got != 0) == (want != 0)).all()


def test_rows_that_are_no_numbers_stay_inside(device: str):
    """Their result is no number either, but no expert is named that does not exist."""
    logits = torch.randn(3, 8, device=device)
    logits[0], logits[1, 3], logits[2] = float("nan"), float("nan"), float("-inf")
    ids = torch.full((3, 3), 99, dtype=torch.int32, device=device)
    shares = torch.zeros(3, 3, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, in the interpreter
        route(logits, None, Routing(3), ids, shares)
    assert ((ids >= 0) & (ids < 8)).all() and (ids[:, 1:] > ids[:, :-1]).all()
    assert shares[:2].isnan().all()


@pytest.mark.parametrize("pairs, count", [(1, 4), (50, 8), (1500, 3)])
def test_pairs_in_the_order_of_experts(pairs: int, count: int, device: str):
    ids = torch.randint(0, count, (pairs,), dtype=torch.int32, generator=torch.Generator().manual_seed(pairs))
    order = torch.full((pairs,), -1, dtype=torch.int32, device=device)
    starts = torch.full((count + 1,), -1, dtype=torch.int32, device=device)
    place(ids.to(device), order, starts)
    assert torch.equal(order.cpu().long(), ids.sort(stable=True).indices)
    sizes = torch.bincount(ids, minlength=count)
    assert starts.tolist() == [0, *sizes.cumsum(0).tolist()]


def mixture(d: int, f: int, count: int, routing: Routing, dtype: torch.dtype, device: str, **options) -> plain.Mixture:
    g = torch.Generator().manual_seed(d + f)
    random = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    both, down = random(count * 2 * f, d) * d**-0.5, random(count * d, f) * f**-0.5
    kind = options.pop("kind", None)
    if kind in (E4M3, torch.int8):
        weights = [Scaled.empty(*w.shape, kind, torch.device("cpu")) for w in (both, down)]
    elif kind is MxWords:
        weights = [MxWords.empty(*w.shape, torch.device("cpu")) for w in (both, down)]
    elif kind is not None:
        weights = [Int4.empty(*w.shape, kind, torch.device("cpu")) for w in (both, down)]
    else:
        weights = []
    for made, w in zip(weights, (both, down), strict=False):
        made.fill(w)
    held = [_on(w, device) for w in weights] or [w.to(dtype).to(device) for w in (both, down)]
    biased = options.pop("biased", False)
    biases = [random(count, 2 * f).to(device), random(count, d).to(device)] if biased else [None, None]
    return plain.Mixture(*held, *biases, count, options.pop("limit", None), routing, None)


def _on(w: Scaled | Int4 | MxWords, device: str) -> Scaled | Int4 | MxWords:
    held = {f.name: getattr(w, f.name) for f in fields(w)}
    return replace(w, **{name: t.to(device) for name, t in held.items() if isinstance(t, torch.Tensor)})


def by_hand(x: torch.Tensor, logits: torch.Tensor, m: plain.Mixture) -> torch.Tensor:
    """Every expert for every row, in float64, weighted with zero where it was not chosen."""
    share = torch.from_numpy(plain_route(logits.float().cpu().numpy(), m.routing, None)).double().to(x.device)
    both, down = (
        (w if isinstance(w, torch.Tensor) else w.dequantize()).double().unflatten(0, (m.count, -1))
        for w in (m.both, m.down)
    )
    inner = torch.einsum("td,efd->tef", x.double(), both)
    if m.both_bias is not None:
        inner = inner + m.both_bias.double()
    y = torch.einsum("tef,edf->ted", plain.activate(inner, m.limit).double(), down)
    if m.down_bias is not None:
        y = y + m.down_bias.double()
    return torch.einsum("ted,te->td", y, share)


@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("options", [{}, {"limit": 1.5, "biased": True}], ids=["plain", "clamped"])
def test_a_mixture_in_float32(rows: int, options: dict, device: str):
    m = mixture(72, 40, 5, Routing(2, renormalize=True), torch.float32, device, **options)
    x, logits = torch.randn(rows, 72).to(device), torch.randn(rows, 5).to(device)
    want = by_hand(x, logits, m)
    assert error(module.mix(x, logits, m), want) < 2e-5  # by no tensor core
    for blocks in (False, True):  # the plain way, and the plain way that asks the device nothing
        assert error(plain.mix(x, logits, m, blocks=blocks), want) < 2e-3


KINDS = {"half": None, "int8": torch.int8, "fp8": E4M3, "int4": 32, "int4-64": 64, "mxfp4": MxWords}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_mixture_of_every_kind_of_weight(kind: torch.dtype | int | type | None, device: str, half: torch.dtype):
    m = mixture(128, 128, 4, Routing(2), half, device, kind=kind, biased=kind is not None)
    x, logits = torch.randn(9, 128).to(device).to(half), torch.randn(9, 4).to(device)
    assert module.fits(m, half) and module.fits(m, torch.float32) == (kind is None)
    want = by_hand(x, logits, m)
    bound = 2e-2 if half == torch.bfloat16 else 3e-3
    assert error(module.mix(x, logits, m), want) < bound
    for blocks in (False, True):
        assert error(plain.mix(x, logits, m, blocks=blocks), want) < bound


@pytest.mark.parametrize("rows", [1, 21])
def test_a_mixture_of_four_bits(rows: int, device: str, half: torch.dtype):
    """One row, whose products leave parts, and more; with what gpt-oss has, and a last tile that is cut off."""
    m = mixture(192, 192, 5, Routing(3, renormalize=True), half, device, kind=MxWords, biased=True, limit=1.5)
    x, logits = torch.randn(rows, 192).to(device).to(half), torch.randn(rows, 5).to(device)
    want = by_hand(x, logits, m)
    bound = 2e-2 if half == torch.bfloat16 else 3e-3
    assert error(module.mix(x, logits, m), want) < bound
    assert error(plain.mix(x, logits, m, blocks=True), want) < bound


def test_many_rows_of_fp8(device: str, half: torch.dtype):
    """So many that they become fp8 too, which rounds them; and not where exactness was asked for."""
    m = mixture(128, 64, 4, Routing(2), half, device, kind=E4M3)
    x, logits = torch.randn(40, 128).to(device).to(half), torch.randn(40, 4).to(device)
    want = by_hand(x, logits, m)
    rounded, exact = (module.mix(x, logits, m, exact=exact) for exact in (False, True))
    assert 1e-2 < error(rounded, want) < 6e-2 and error(exact, want) < (2e-2 if half == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("tile", [WIDE, Tile(64, 64, 4, 2)], ids=lambda t: str(t.rows))
def test_more_pairs_than_a_block_holds(tile: Tile, device: str):
    """One expert has most of them, one has none."""
    ids = torch.tensor([1] * 40 + [0, 3, 3], dtype=torch.int32, device=device)
    order, starts = torch.empty_like(ids), torch.empty(5, dtype=torch.int32, device=device)
    place(ids, order, starts)
    x, w = torch.randn(43, 64).to(device), torch.randn(4 * 24, 64).to(device)
    y = torch.full((43, 24), float("nan"), device=device)
    grouped(x, w, y, order, starts, top=1, tile=tile)
    want = torch.einsum("pk,pnk->pn", x.double(), w.double().view(4, 24, 64)[ids.long()])
    assert error(y, want[order.long()]) < 2e-3
    back = torch.full((43, 24), float("nan"), device=device)
    grouped(x[order.long()], w, back, order, starts, tile=tile)
    assert error(back, want) < 2e-3


def test_a_row_has_the_same_bits_in_any_batch(device: str, half: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Among others, alone, and where the rows are done in turns. Between tiles tests/gpu compares."""
    m = mixture(64, 32, 6, Routing(3, renormalize=True), half, device)
    x, logits = torch.randn(14, 64).to(device).to(half), torch.randn(14, 6).to(device)
    whole = module.mix(x, logits, m)
    for rows in ([3], [13, 0]):
        assert torch.equal(module.mix(x[rows], logits[rows], m), whole[rows]), rows
    monkeypatch.setattr(module, "_SPACE", 5 * 3 * 96 * 2)
    assert torch.equal(module.mix(x, logits, m), whole)


def test_tiles_and_operands(device: str, half: torch.dtype):
    assert [tile_of(torch.bfloat16, p, 8).rows for p in (1, 128, 129, 512, 513)] == [16, 16, 64, 64, 128]
    assert tile_of(torch.float32, 10**6, 8) is WIDE and len({t.rows for t in TILES}) == 3
    order, starts = (torch.zeros(n, dtype=torch.int32, device=device) for n in (6, 3))
    x, w, y = (torch.zeros(s, device=device) for s in ((3, 8), (2 * 4, 8), (6, 4)))
    for bad in ((x, w[:7], y), (x, w, y[:5]), (x[:2], w, y)):
        with pytest.raises(ValueError, match="rows"):
            grouped(*bad, order, starts, top=2)
    with pytest.raises(ValueError, match="half floats"):
        grouped(x, Scaled(w.to(torch.int8), w[:, 0]), y, order, starts, top=2)
    with pytest.raises(ValueError, match="shares"):
        add_shares(y, torch.zeros(2, 2, device=device), x[:2, :4])
