"""The random numbers of `quire/runner/random.py` on the device: Philox4x64, a pure function of (seed, position).

The same bits as the host draws, so that a step may draw for itself where the host does not know the position yet.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _uniforms(seeds, positions, draws, rows, BLOCK: tl.constexpr):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k0 = tl.load(seeds + lane, mask=lane < rows, other=0).to(tl.uint64, bitcast=True)
    c0 = tl.load(positions + lane, mask=lane < rows, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
    zero = c0 ^ c0
    k1, c1, c2, c3 = zero, zero, zero, zero
    m0 = zero + 0xD2E7470EE14C6C93
    m1 = zero + 0xCA5A826395121157
    for _ in tl.static_range(10):
        h0, l0 = tl.umulhi(c0, m0), c0 * m0
        h1, l1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 = k0 + 0x9E3779B97F4A7C15
        k1 = k1 + 0xBB67AE8584CAA73B
    draw = (c0 >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
    tl.store(draws + lane, draw, mask=lane < rows)


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, draws: torch.Tensor) -> None:
    """draws [n] float64 in [0, 1), of seeds [n] int64 (as they are modulo 2**64) at positions [n] int32 or int64."""
    _uniforms[(triton.cdiv(seeds.shape[0], 128),)](seeds, positions, draws, seeds.shape[0], BLOCK=128, num_warps=4)
