"""Elementwise ops that have a Triton kernel of their own; torch has an expression for every one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quire.backends.cuda.kernels.gate import gate as gate_by
from quire.backends.cuda.kernels.softcap import softcap


def _softcap(dtype: torch.dtype, pdl: bool, cap: float, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    softcap(x, out, cap, pdl=pdl)
    return out


def _swiglu(dtype: torch.dtype, pdl: bool, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate_by(up, gate, torch.empty(up.shape, dtype=dtype, device=up.device), silu=True, pdl=pdl)


def _sigmoid_gate(dtype: torch.dtype, pdl: bool, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return gate_by(x, gate, torch.empty(x.shape, dtype=dtype, device=x.device), pdl=pdl)


# By the op's name. They take the compute dtype and whether a kernel may start while the one before it ends; then what the op takes.
OWN: dict[str, Callable[..., torch.Tensor]] = {"softcap": _softcap, "swiglu": _swiglu, "sigmoid_gate": _sigmoid_gate}
