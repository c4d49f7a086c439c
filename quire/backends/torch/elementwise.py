"""The elementwise ops in torch: an expression for each declaration of backends/elementwise.py, by its name.

Inputs are in the compute dtype. What is more than one rounding is computed in float32 and rounded once. A number that an op takes
comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quire.backends.elementwise import Elementwise
from quire.observe.errors import Unsupported


def _sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (x.float() * gate.float().sigmoid()).to(x.dtype)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.silu(gate.float()) * up.float()).to(up.dtype)


def _geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(up.dtype)


def _scale(factor: float, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.float32(factor))


def _softcap(cap: float, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x.float() / cap) * cap).to(x.dtype)


EXPRESSIONS: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add,
    "sigmoid_gate": _sigmoid_gate,
    "swiglu": _swiglu,
    "geglu": _geglu,
    "gelu": F.gelu,  # rounded once: half floats are computed in float32 inside
    "scale": _scale,
    "softcap": _softcap,
}


def function_of(op: Elementwise, number: float = 0.0, own: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The op as a function of its tensors: a device's `own` kernel, or the expression here."""
    found = own or EXPRESSIONS.get(op.name)
    if found is None:
        raise Unsupported(
            f"the torch backend has no expression for the op {op.name!r}", cure="add one to torch/elementwise.py"
        )
    return partial(found, number) if op.number is not None else found
