"""Sampling on the device: a token for each row of scores, without a sort and without the host.

The meaning is that of the host's sampler: temperature, then top_k (of equals the smaller id), top_p (the shortest run
of best tokens that holds that much), min_p, then the token at a drawn number of the cumulative distribution, tokens in
the order of their ids. Scores are float32 here and float64 there, so the same token comes out unless two candidates are
nearer to a border than that rounding. typical_p is not here: its rows take another path.

A filter is a threshold and how many of the tokens at it are kept. A threshold is found by narrowing a bracket of float
bits over the candidates, three pivots a pass; the bracket shrinks to numbers that are really there.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels import rules
from quire.backends.cuda.kernels.candidates import CAP, CHUNK, Found, find_best, find_candidates, find_peaks, row_peak
from quire.backends.cuda.kernels.launch import Launcher

BROKEN, RULED_OUT = -1, -2  # in place of a token: the scores are not numbers; no token is left
# Columns of the parameter table.
TEMPERATURE, TOP_K, TYPICAL_P, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, DRAW = range(9)
COLUMNS = 9

_BLOCK = tl.constexpr(2048)
_BROKEN = tl.constexpr(-1)
_RULED_OUT = tl.constexpr(-2)


@triton.jit
def _key(value):
    """Bits of a float32 in the order of numbers; both zeros are one."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(source, start, size):
    """Scores and keys of a block of a source; what lies past its end can never be kept."""
    lane = start + tl.arange(0, _BLOCK)
    value = tl.load(source + lane, mask=lane < size, other=float("-inf")).to(tl.float32)
    return value, _key(value), lane


@triton.jit
def _weigh(value, peak, temperature):
    """Probability up to a factor, float64: 1 for the best."""
    return tl.exp((value.to(tl.float64) - peak.to(tl.float64)) / temperature)


@triton.jit
def _threshold(source, size, floor, peak, temperature, goal, BY_MASS: tl.constexpr):
    """The largest key T with measure(key >= T) >= goal, among keys >= floor; measure counts or weighs tokens."""
    low = floor.to(tl.int64)
    high = _key(peak).to(tl.int64)
    while low < high:
        quarter = (high - low) // 4
        p1 = low + tl.maximum(quarter, 1)
        p2 = tl.minimum(low + tl.maximum(2 * quarter, 1), high)
        p3 = tl.minimum(low + tl.maximum(3 * quarter, 1), high)
        m1 = tl.zeros([], tl.float64)
        m2 = tl.zeros([], tl.float64)
        m3 = tl.zeros([], tl.float64)
        least = high
        most = low
        for start in range(0, size, _BLOCK):
            value, key, _ = _load(source, start, size)
            wide = key.to(tl.int64)
            if BY_MASS:
                measure = _weigh(value, peak, temperature)
            else:
                measure = tl.where(value > float("-inf"), 1.0, 0.0).to(tl.float64)
            m1 += tl.sum(tl.where(wide >= p1, measure, 0.0), 0)
            m2 += tl.sum(tl.where(wide >= p2, measure, 0.0), 0)
            m3 += tl.sum(tl.where(wide >= p3, measure, 0.0), 0)
            least = tl.minimum(least, tl.min(tl.where(wide >= low, wide, high), 0))
            most = tl.maximum(most, tl.max(tl.where(wide <= high, wide, low), 0))
        if least == most:  # one number is left
            low = most
            high = most
        elif m3 >= goal:
            low = tl.maximum(p3, least)
            high = most
        elif m2 >= goal:
            low = tl.maximum(p2, least)
            high = tl.minimum(p3 - 1, most)
        elif m1 >= goal:
            low = tl.maximum(p1, least)
            high = tl.minimum(p2 - 1, most)
        else:
            low = least
            high = tl.minimum(p1 - 1, most)
    return low.to(tl.int32)


@triton.jit
def _held(source, size, threshold, ties, peak, temperature):
    """Count and mass above the threshold, and the weight of one token and the number of tokens at it."""
    above = 0
    level = 0
    mass = tl.zeros([], tl.float64)
    one = tl.zeros([], tl.float64)
    for start in range(0, size, _BLOCK):
        value, key, _ = _load(source, start, size)
        weight = _weigh(value, peak, temperature)
        above += tl.sum((key > threshold).to(tl.int32), 0)
        level += tl.sum((key == threshold).to(tl.int32), 0)
        mass += tl.sum(tl.where(key > threshold, weight, 0.0), 0)
        one = tl.maximum(one, tl.max(tl.where(key == threshold, weight, 0.0), 0))
    return above, mass, one, tl.minimum(level, ties)


@triton.jit
def _kept(source, start, size, threshold, ties, before, peak, temperature, minimum):
    """Weights of the kept tokens of a block, 0 for the others, and how many at the threshold came so far."""
    value, key, lane = _load(source, start, size)
    level = (key == threshold).to(tl.int32)
    rank = before + tl.cumsum(level, 0) - level
    weight = _weigh(value, peak, temperature)
    keep = (key > threshold) | ((level > 0) & (rank < ties))
    keep = keep & (lane < size) & (weight >= minimum) & (value > float("-inf"))
    return tl.where(keep, weight, 0.0), lane, before + tl.sum(level, 0)


@triton.jit
def _draw(source, size, threshold, ties, peak, temperature, minimum, draw):
    """The place in the source of the token at `draw` of the kept tokens' cumulative distribution."""
    total = tl.zeros([], tl.float64)
    before = 0
    for start in range(0, size, _BLOCK):
        weight, _, before = _kept(source, start, size, threshold, ties, before, peak, temperature, minimum)
        total += tl.sum(weight, 0)
    goal = draw * total
    place = -1
    last = 0
    start = 0
    before = 0
    running = tl.zeros([], tl.float64)
    while (start < size) & (place < 0):
        weight, lane, before = _kept(source, start, size, threshold, ties, before, peak, temperature, minimum)
        reached = running + tl.cumsum(weight, 0)
        hit = tl.min(tl.where((reached > goal) & (weight > 0.0), lane, 2147483647), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, lane, 0), 0))
        place = tl.where(hit < 2147483647, hit, -1)
        running += tl.sum(weight, 0)
        start += _BLOCK
    return tl.where(place < 0, last, place)  # the goal rounded up to the total: the last that has a share


@Launcher
@triton.jit(do_not_specialize=["pieces"], do_not_specialize_on_alignment=["scores", "told", "wanted", "tokens"])
def _choose(
    scores, told, wanted, alive, peaks, places, masses, sizes, cand_ids, cand_scores, tokens, vocab, chunks, pieces,
    stride, CHUNKS_PAD: tl.constexpr, PIECES_PAD: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    own = told + row * COLS
    lane = tl.arange(0, CHUNKS_PAD)
    peak = row_peak(peaks, row, chunks, CHUNKS_PAD)
    if peak == float("inf"):
        tl.store(tokens + row, _BROKEN)
        return
    if peak == float("-inf"):
        piece = tl.arange(0, PIECES_PAD)
        live = tl.max(tl.load(alive + row * pieces + piece, mask=piece < pieces, other=0), 0)
        tl.store(tokens + row, tl.where(live > 0, _RULED_OUT, _BROKEN))
        return
    temperature = tl.load(own)
    best = tl.load(peaks + row * chunks + lane, mask=lane < chunks, other=float("-inf"))
    if temperature <= 0.0:
        place = tl.load(places + row * chunks + lane, mask=lane < chunks, other=2147483647)
        tl.store(tokens + row, tl.min(tl.where(best == peak, place, 2147483647), 0))
        return
    draw = tl.load(own + 8)
    base = scores + row.to(tl.int64) * stride
    lowest = tl.full([], -2147483647, tl.int32)
    everyone = tl.full([], 2147483647, tl.int32)
    if tl.load(wanted + row) == 0:  # no filter: find the chunk, then the token inside it
        share = tl.load(masses + row * chunks + lane, mask=lane < chunks, other=0.0)
        share = tl.where(best == float("-inf"), 0.0, share * _weigh(best, peak, temperature))
        cumulative = tl.cumsum(share, 0)
        goal = draw * tl.sum(share, 0)
        chunk = tl.min(tl.where((cumulative > goal) & (share > 0.0), lane, CHUNKS_PAD), 0)
        chunk = tl.where(chunk == CHUNKS_PAD, tl.max(tl.where(share > 0.0, lane, 0), 0), chunk)
        mine = tl.sum(tl.where(lane == chunk, share, 0.0), 0)
        inner = (goal - tl.sum(tl.where(lane < chunk, share, 0.0), 0)) / mine
        first = chunk * CHUNK
        size = tl.minimum(vocab - first, CHUNK)
        place = _draw(base + first, size, lowest, everyone, peak, temperature, 0.0, inner)
        tl.store(tokens + row, first + place)
        return
    size = tl.load(sizes + row)
    listed = size <= CAP
    if listed:
        source = cand_scores + row.to(tl.int64) * CAP
    else:
        source = base
        size = vocab
    threshold = lowest
    ties = everyone
    k = tl.load(own + 1).to(tl.int32)
    p = tl.load(own + 3)
    if (k > 0) & (k < size):
        threshold = _threshold(source, size, lowest, peak, temperature, k.to(tl.float64), False)
        above, mass, one, ties = _held(source, size, threshold, ties, peak, temperature)
        ties = tl.minimum(ties, k - above)
    if p < 1.0:
        above, mass, one, level = _held(source, size, threshold, ties, peak, temperature)
        if (k <= 0) & listed:  # what is not listed counts in the whole
            share = tl.load(masses + row * chunks + lane, mask=lane < chunks, other=0.0)
            share = tl.where(best == float("-inf"), 0.0, share * _weigh(best, peak, temperature))
            goal = p * tl.sum(share, 0)
        else:
            goal = p * (mass + one * level)
        if mass >= goal:  # the run ends above what top_k ended at
            threshold = _threshold(source, size, threshold, peak, temperature, goal, True)
            ties = everyone
            above, mass, one, level = _held(source, size, threshold, ties, peak, temperature)
        missing = tl.ceil((goal - mass) / tl.maximum(one, 1e-300))
        ties = tl.maximum(tl.minimum(missing, level.to(tl.float64)).to(tl.int32), 1)
    place = _draw(source, size, threshold, ties, peak, temperature, tl.load(own + 4), draw)
    if listed:
        place = tl.load(cand_ids + row.to(tl.int64) * CAP + place)
    tl.store(tokens + row, place)


@Launcher
@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _greedy(peaks, places, tokens, chunks, CHUNKS_PAD: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNKS_PAD)
    best = tl.load(peaks + row * chunks + lane, mask=lane < chunks, other=float("-inf"))
    place = tl.load(places + row * chunks + lane, mask=lane < chunks, other=2147483647)
    peak = tl.max(best, 0)
    fine = (peak > float("-inf")) & (peak < float("inf"))
    tl.store(tokens + row, tl.where(fine, tl.min(tl.where(best == peak, place, 2147483647), 0), _BROKEN))


def greedy(scores: torch.Tensor, tokens: torch.Tensor) -> None:
    """tokens [n] (int32 or int64): the best of each row of scores [n, V], of equals the smallest id; or BROKEN."""
    rows, chunks = scores.shape[0], triton.cdiv(scores.shape[1], CHUNK.value)
    peaks = torch.empty(rows, chunks, dtype=torch.float32, device=scores.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=scores.device)
    find_best(scores, peaks, places)
    _greedy[(rows,)](peaks, places, tokens, chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), num_warps=1)


def choose(
    scores: torch.Tensor,
    params: torch.Tensor,
    wanted: torch.Tensor,
    tokens: torch.Tensor,
    found: Found,
    *,
    alive: torch.Tensor | None = None,
) -> None:
    """tokens [n] (int32 or int64) of scores [n, V] (float32, bf16 or fp16), or a code below 0.

    params float64 [n, 9] holds the columns named above; DRAW is the row's uniform number, REPETITION, FREQUENCY and
    PRESENCE are not looked at (see rules.py). wanted [n] int32: 1 where top_k, top_p or min_p of a drawing row narrows
    anything. A row with temperature 0 gets its best token, of equals the smallest id. `alive` is what `apply_rules`
    left; None: the scores are logits as the model gave them, so that a row of -inf is BROKEN, not RULED_OUT.
    """
    rows, vocab = scores.shape
    if params.shape != (rows, COLUMNS) or not params.is_contiguous() or params.dtype != torch.float64:
        raise ValueError(
            f"sampling parameters are {params.dtype} {list(params.shape)}: float64 {[rows, COLUMNS]} needed"
        )
    column = [params[:, i] for i in range(COLUMNS)]
    find_peaks(scores, column[TEMPERATURE], found)
    find_candidates(scores, column[TEMPERATURE], wanted, column[TOP_K], column[TOP_P], column[MIN_P], found)
    pieces = 0 if alive is None else alive.shape[1]
    _choose[(rows,)](
        scores, params, wanted, found.places if alive is None else alive, found.peaks, found.places, found.masses,
        found.sizes, found.ids, found.scores, tokens, vocab, found.chunks, pieces, scores.stride(0),
        CHUNKS_PAD=triton.next_power_of_2(found.chunks), PIECES_PAD=triton.next_power_of_2(rules.pieces(vocab)),
        COLS=COLUMNS, num_warps=8,
    )  # fmt: skip
