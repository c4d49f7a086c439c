"""fp8 (e4m3): weights quantized at load, activations per token, and the large products through cuBLASLt.

A quantized weight is its codes and one float32 factor a tensor, a channel, or a block of 128 by 128. Codes are the
nearest e4m3 numbers after division by the factor; the largest magnitude maps to 448.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.launch import Launcher

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128
_ROWS = 4096  # weight rows quantized at a time: float32 copies stay small

FP8_MAX = tl.constexpr(448.0)


def quantize_weight(w: torch.Tensor, kind: str = "channel") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n, k] and factors: [n] for "channel", [1] for "tensor", [ceil(n/128), ceil(k/128)] for "block"."""
    n, k = w.shape
    codes = torch.empty(n, k, dtype=E4M3, device=w.device)
    if kind == "block":
        scale = torch.empty(-(-n // BLOCK), -(-k // BLOCK), dtype=torch.float32, device=w.device)
        for first in range(0, n, BLOCK):
            for left in range(0, k, _ROWS):
                part = w[first : first + BLOCK, left : left + _ROWS].float()
                padded = torch.nn.functional.pad(part.abs().amax(0), (0, -part.shape[1] % BLOCK))
                s = _factor(padded.view(-1, BLOCK).amax(1))
                scale[first // BLOCK, left // BLOCK : left // BLOCK + s.numel()] = s
                wide = s.repeat_interleave(BLOCK)[: part.shape[1]]
                codes[first : first + BLOCK, left : left + _ROWS] = _encode(part / wide)
        return codes, scale
    if kind == "tensor":
        peak = torch.stack([w[i : i + _ROWS].abs().amax().float() for i in range(0, n, _ROWS)]).amax()
        scale = _factor(peak).reshape(1)
    elif kind == "channel":
        scale = _factor(w.abs().amax(1).float())
    else:
        raise ValueError(f'fp8 scales are per "tensor", "channel" or "block", not "{kind}"')
    for i in range(0, n, _ROWS):
        own = scale if kind == "tensor" else scale[i : i + _ROWS, None]
        codes[i : i + _ROWS] = _encode(w[i : i + _ROWS].float() / own)
    return codes, scale


def dequantize_weight(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of codes with any of the three kinds of factors."""
    if scale.ndim == 2:
        n, k = codes.shape
        full = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        return codes.float() * full
    return codes.float() * scale.reshape(-1, 1)


def _factor(peak: torch.Tensor) -> torch.Tensor:
    return peak.clamp(min=1e-10) / LARGEST


def _encode(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST, LARGEST).to(E4M3)


@triton.jit
def grouped_codes(value, scales, row, width, stride_g, BLOCK: tl.constexpr):
    """What a row [BLOCK] is to be stored as: divided by the scale of each 128 columns, which is stored at [group, row]."""
    groups: tl.constexpr = BLOCK // 128
    parts = tl.reshape(value, [groups, 128])
    scale = tl.maximum(tl.max(tl.abs(parts), 1), 1e-10) / FP8_MAX
    group = tl.arange(0, groups)
    tl.store(scales + group * stride_g + row, scale, mask=group * 128 < width)
    return tl.reshape(parts / scale[:, None], [BLOCK])  # 448 at most, to within a rounding; a NaN stays one


@Launcher
@triton.jit
def _quantize_rows(
    x, out, scales, width, stride_x, stride_o, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * stride_x + lane, mask=lane < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / FP8_MAX
    tl.store(scales + row, scale)
    value = value / scale  # 448 at most, to within a rounding that e4m3 does not see; a NaN stays one
    tl.store(out + row * stride_o + lane, value.to(out.dtype.element_ty), mask=lane < width)


def quantize_rows(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, *, pdl: bool = False) -> None:
    """out [T, d] fp8 and scales [T] float32, so that out * scales is x to within half a step of e4m3."""
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _quantize_rows[(tokens,)](
        x, out, scales, width, x.stride(0), out.stride(0), BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // 512)), **launch,
    )  # fmt: skip


def scaled_product(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """out [T, n] = (x * x_scale) @ (w * w_scale).T through cuBLASLt; one factor a token and a channel (or one for all).

    k and n must be multiples of 16.
    """
    _tokens, n = out.shape
    torch._scaled_mm(
        x,
        w.t(),
        scale_a=x_scale.view(-1, 1),
        scale_b=w_scale.expand(n).contiguous().view(1, -1) if w_scale.numel() == 1 else w_scale.view(1, -1),
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )


def tile_product(
    x: torch.Tensor, x_scale: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, out: torch.Tensor
) -> None:
    """The same with x_scale [k / 128, T] and w_scale [n / 128, k / 128]. T must be a multiple of 4, and not every version takes it."""
    torch._scaled_mm(x, w.t(), scale_a=x_scale.t(), scale_b=w_scale.t(), out_dtype=out.dtype, out=out)


@cache
def gives(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the library can round such a product to that type here: tried, for the rules change between versions."""
    codes, ones = torch.zeros(16, 16, device=device).to(E4M3), torch.ones(16, device=device)
    try:
        scaled_product(codes, ones, codes, ones, torch.empty(16, 16, dtype=dtype, device=device))
    except (RuntimeError, ValueError):
        return False
    return True
