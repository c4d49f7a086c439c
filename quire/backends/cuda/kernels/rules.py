"""What is said about single tokens, before a token is chosen: logit_bias, penalties, the constraint's mask, min_tokens.

Order and meaning are the host's. Scores are a float32 copy of the logits, which stay as the model gave them (log
probabilities are of those). A logit that is NaN or +inf becomes +inf whatever rules it out, so that it is seen.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = tl.constexpr(4096)


@triton.jit
def _adjust(
    source, scores, wishes, seen, counts, allowed, vocab, stride_in, stride_out, COLS: tl.constexpr,
    PENALTY: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * _CHUNK + tl.arange(0, _CHUNK)
    keep = ids < vocab
    value = tl.load(source + row * stride_in + ids, mask=keep, other=0.0).to(tl.float32)
    broken = (value != value) | (value == float("inf"))
    if PENALTY:
        own = wishes + row * COLS
        repetition = tl.load(own + 5).to(tl.float32)
        frequency = tl.load(own + 6).to(tl.float32)
        presence = tl.load(own + 7).to(tl.float32)
        here = tl.load(seen + row * vocab + ids, mask=keep, other=0) != 0
        times = tl.load(counts + row * vocab + ids, mask=keep, other=0).to(tl.float32)
        value = tl.where(here, tl.where(value > 0.0, value / repetition, value * repetition), value)
        value -= frequency * times + tl.where(times > 0.0, presence, 0.0)
    if MASK:
        value = tl.where(tl.load(allowed + row * vocab + ids, mask=keep, other=0) != 0, value, float("-inf"))
    tl.store(scores + row * stride_out + ids, tl.where(broken, float("inf"), value), mask=keep)


@triton.jit
def _scatter(scores, rows, tokens, values, entries, stride, ADD: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = lane < entries
    row = tl.load(rows + lane, mask=keep, other=0).to(tl.int64)
    place = scores + row * stride + tl.load(tokens + lane, mask=keep, other=0)
    if ADD:
        value = tl.load(place, mask=keep, other=0.0) + tl.load(values + lane, mask=keep, other=0.0).to(tl.float32)
    else:
        value = tl.full([BLOCK], float("-inf"), tl.float32)
    tl.store(place, value, mask=keep)


def apply_rules(
    logits: torch.Tensor,
    scores: torch.Tensor,
    wishes: torch.Tensor,
    *,
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    stops: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Fill scores [n, V] float32. wishes as for `choose`.

    bias is (rows, tokens, values) and stops (rows, tokens), one entry a pair; seen and allowed are bool [n, V], counts
    int32 [n, V], contiguous. Penalties need both seen and counts.
    """
    rows, vocab = logits.shape
    grid = (rows, triton.cdiv(vocab, _CHUNK.value))
    if (seen is None) != (counts is None):
        raise ValueError("penalties need both the seen tokens and their counts")
    if bias is not None:  # the bias comes before the penalties, so it needs a copy to be added to
        _adjust[grid](
            logits, scores, wishes, scores, scores, scores, vocab, logits.stride(0), scores.stride(0),
            COLS=wishes.shape[1], PENALTY=False, MASK=False, num_warps=4,
        )  # fmt: skip
        _scatter[(triton.cdiv(bias[0].shape[0], 128),)](
            scores, *bias, bias[0].shape[0], scores.stride(0), ADD=True, BLOCK=128, num_warps=4
        )
    source = logits if bias is None else scores
    if bias is None or seen is not None or allowed is not None:
        _adjust[grid](
            source, scores, wishes, scores if seen is None else seen.view(torch.uint8),
            scores if counts is None else counts, scores if allowed is None else allowed.view(torch.uint8), vocab,
            source.stride(0), scores.stride(0), COLS=wishes.shape[1], PENALTY=seen is not None,
            MASK=allowed is not None, num_warps=4,
        )  # fmt: skip
    if stops is not None:
        _scatter[(triton.cdiv(stops[0].shape[0], 128),)](
            scores, *stops, scores, stops[0].shape[0], scores.stride(0), ADD=False, BLOCK=128, num_warps=4
        )
