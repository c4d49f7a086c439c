"""Changes to the scores of single tokens, before a token is chosen: logit_bias, penalties, the constraint's mask, min_tokens.

Order and meaning are the host's. Scores are a float32 copy of the rows in question; the logits stay as the model gave them
(log probabilities are of those). Histories are read where they lie, masks as bits. A logit that is NaN or +inf becomes
+inf whatever rules it out, so that it is seen; `alive` tells a row that the model itself left no token from one that
rules left none.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.launch import Launcher

_CHUNK = tl.constexpr(4096)


# Arguments that must not cause another compilation: which rules the rows use (flags as numbers), and the alignment of arrays.
@Launcher
@triton.jit(
    do_not_specialize=["words", "first", "pick", "penalty", "masked"],
    do_not_specialize_on_alignment=["source", "rows", "told", "history", "seen", "counts", "masks", "allowed"],
)
def _adjust(
    source, scores, alive, rows, told, history, seen, counts, masks, allowed, vocab, words, chunks, stride_in,
    stride_out, first, pick, penalty, masked, COLS: tl.constexpr,
):  # fmt: skip
    """first: the source is the logits, of which `pick` takes some rows; else it is the scores."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * _CHUNK + tl.arange(0, _CHUNK)
    keep = ids < vocab
    source_row = row
    if pick != 0:
        source_row = tl.load(rows + row).to(tl.int64)
    value = tl.load(source + source_row * stride_in + ids, mask=keep, other=float("-inf")).to(tl.float32)
    broken = (value != value) | (value == float("inf"))
    if first != 0:
        tl.store(alive + row * chunks + tl.program_id(1), tl.max((value > float("-inf")).to(tl.int32), 0))
    if penalty != 0:
        own = told + row * COLS
        repetition = tl.load(own + 5).to(tl.float32)
        frequency = tl.load(own + 6).to(tl.float32)
        presence = tl.load(own + 7).to(tl.float32)
        past = tl.load(history + row).to(tl.int64) * vocab
        here = tl.load(seen + past + ids, mask=keep, other=0) != 0
        times = tl.load(counts + past + ids, mask=keep, other=0).to(tl.float32)
        value = tl.where(here, tl.where(value > 0.0, value / repetition, value * repetition), value)
        value -= frequency * times + tl.where(times > 0.0, presence, 0.0)
    if masked != 0:
        mask = tl.load(masks + row).to(tl.int64)
        word = tl.load(allowed + mask * words + ids // 32, mask=ids < tl.where(mask >= 0, vocab, 0), other=-1)
        value = tl.where(((word >> (ids % 32)) & 1) != 0, value, float("-inf"))
    tl.store(scores + row * stride_out + ids, tl.where(broken, float("inf"), value), mask=keep)


@Launcher
@triton.jit(
    do_not_specialize=["entries"], do_not_specialize_on_alignment=["rows", "tokens", "values"]
)  # fmt: skip
def _scatter(scores, rows, tokens, values, entries, stride, ADD: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = lane < entries
    row = tl.load(rows + lane, mask=keep, other=0).to(tl.int64)
    place = scores + row * stride + tl.load(tokens + lane, mask=keep, other=0)
    value = tl.load(place, mask=keep, other=0.0)
    if ADD:
        value += tl.load(values + lane, mask=keep, other=0.0).to(tl.float32)
    else:
        value = tl.where(value == float("inf"), value, float("-inf"))
    tl.store(place, value, mask=keep)


def pieces(vocab: int) -> int:
    """Columns of `alive`."""
    return triton.cdiv(vocab, _CHUNK.value)


def apply_rules(
    logits: torch.Tensor,
    scores: torch.Tensor,
    alive: torch.Tensor,
    params: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    history: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    stops: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Fill scores [n, V] float32 from the logits' `rows` (int32 [n]; None: the first n), and alive int32 [n, pieces].

    params as for `choose`. bias is (places, tokens, values) and stops (places, tokens), one entry a pair. A row has the
    history `history[row]` of seen (bool) and counts (int32) [.., V], and the mask `mask[row]` (-1: none) of allowed
    [.., words], int32 with a bit a token, the lowest first. All contiguous.
    """
    count, vocab = scores.shape
    grid = (count, pieces(vocab))
    if (history is None) != (seen is None) or (seen is None) != (counts is None):
        raise ValueError("penalties need histories: whose, the seen tokens and their counts")
    if (mask is None) != (allowed is None):
        raise ValueError("a mask needs its bits")
    none = alive  # a pointer that is never read
    penalized, masked = seen is not None, mask is not None
    given = none if rows is None else rows
    past = (
        none if history is None else history,
        (none if seen is None else seen).view(torch.uint8),
        none if counts is None else counts,
        none if mask is None else mask,
        none if allowed is None else allowed,
    )
    sizes = vocab, 0 if allowed is None else allowed.shape[1], grid[1]
    if bias is not None:  # the bias comes before the penalties, so it needs a copy to be added to
        _adjust[grid](
            logits, scores, alive, given, params, *past, *sizes, logits.stride(0), scores.stride(0),
            1, int(rows is not None), 0, 0, COLS=params.shape[1], num_warps=4,
        )  # fmt: skip
        _scatter[(triton.cdiv(bias[0].shape[0], 128),)](
            scores, *bias, bias[0].shape[0], scores.stride(0), ADD=True, BLOCK=128, num_warps=4
        )
    if bias is None or penalized or masked:
        first = bias is None
        source = logits if first else scores
        _adjust[grid](
            source, scores, alive, given, params, *past, *sizes, source.stride(0), scores.stride(0),
            int(first), int(first and rows is not None), int(penalized), int(masked), COLS=params.shape[1], num_warps=4,
        )  # fmt: skip
    if stops is not None:
        _scatter[(triton.cdiv(stops[0].shape[0], 128),)](
            scores, *stops, scores, stops[0].shape[0], scores.stride(0), ADD=False, BLOCK=128, num_warps=4
        )
