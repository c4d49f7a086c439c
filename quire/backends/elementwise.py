"""The elementwise ops, one declaration each: what the op computes, how far a backend may be off, and what numbers show that.

Each number of such an op's result comes from the numbers at the same place of its inputs. From a declaration follow the recorder's
instruction, the reference backend, the conformance cases, the row of the op table, whether rows that nobody takes are left out
(early.py), and whether the op is fused with the two products that it reads (`gates`).

A backend brings a kernel of the same name: native/src/elementwise.h lists those of C++, torch/elementwise.py those of torch, and
cuda/kernels/gates.py what Triton kernels do behind a product. A program that uses an op without a kernel is refused when it is
compiled. docs/how-to/add-an-op.md goes through the files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.layouts import Floats

Tensor: TypeAlias = Any  # an array, or a symbol while recording
Wide: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that an op reads, and the numbers that its conformance cases give it: normal ones times `scale`."""

    name: str
    scale: float = 1.0
    corners: tuple[float, ...] = ()  # what the first row begins with
    span: float = 0.0  # the second row runs evenly from -span to span; 0: it is like the others


@dataclass(frozen=True, slots=True)
class Number:
    """A constant of the program that an op takes beside its tensors."""

    name: str
    example: float  # in conformance cases
    positive: bool = False


@dataclass(frozen=True, slots=True)
class Within:
    """The largest error of a result against the reference: `times` a size, which `of` finds from the expected result and the
    inputs."""

    times: float
    text: str = "relative"
    of: Callable[..., Floats] = lambda expected, *inputs: np.abs(expected)

    def __str__(self) -> str:
        return f"{self.times:g} {self.text}" if self.times else "exact"

    def allowed(self, expected: Floats, inputs: tuple[Floats, ...]) -> Floats:
        """The error that each number may have."""
        return self.times * self.of(expected, *inputs) + (1e-30 if self.times else 0.0)


EXACT = Within(0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Elementwise:
    """An elementwise op. `reference` takes float64 arrays, and the number if there is one."""

    name: str
    inputs: tuple[Input, ...]
    reference: Callable[..., Wide]
    within: Within
    number: Number | None = None
    gates: bool = False  # it is the activation of a gated MLP: act(gate, up), where both are products of one x

    def __post_init__(self) -> None:
        if self.gates and (len(self.inputs) != 2 or self.number is not None):
            raise ValueError(
                f"{self.name}: an activation that gates reads two tensors and nothing else, as fused kernels do"
            )

    @property
    def shapes(self) -> str:
        """The shapes, as the op table tells them."""
        return f"{', '.join(f'{own.name} [T, d]' for own in self.inputs)} -> [T, d]"


def evaluate(op: Elementwise, inputs: tuple[Floats, ...], number: float) -> Floats:
    """The op in float64, rounded once: what every backend is compared with."""
    given: tuple[Any, ...] = tuple(x.astype(np.float64) for x in inputs)
    with np.errstate(over="ignore"):
        return op.reference(*given, *((number,) if op.number else ())).astype(np.float32)


def silu(x: Wide) -> Wide:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):
        return x / (1.0 + np.exp(-x))


def _gelu_tanh(x: Wide) -> Wide:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _gelu(x: Wide) -> Wide:
    return 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))


EXTREMES = (0.0, -0.0, 80.0, -80.0, 120.0, -120.0, 1e-30, -1e-30)  # both tails of an exponential
TAILS = (0.0, -0.0, 80.0, -80.0, 12.0, -12.0, 1e-30, -1e-30)

ADD = Elementwise("add", (Input("a"), Input("b")), lambda a, b: a + b, EXACT)
SIGMOID_GATE = Elementwise(
    "sigmoid_gate",
    (Input("x"), Input("gate", 6.0, (0.0, 80.0, -80.0, -200.0), 12.0)),
    lambda x, gate: x / (1.0 + np.exp(-gate)),
    Within(2e-6),
)
SWIGLU = Elementwise(
    "swiglu",
    (Input("gate", 4.0, EXTREMES, 12.0), Input("up")),
    lambda gate, up: silu(gate) * up,
    Within(2e-6),
    gates=True,
)
GEGLU = Elementwise(
    "geglu",
    (Input("gate", 3.0, TAILS, 7.0), Input("up")),
    lambda gate, up: _gelu_tanh(gate) * up,
    Within(4e-6, "relative to |gate * up|", lambda _, gate, up: np.abs(gate * up)),
    gates=True,
)
GELU = Elementwise(
    "gelu", (Input("x", 2.0, TAILS, 7.0),), _gelu, Within(4e-6, "relative to |x|", lambda _, x: np.abs(x))
)
SCALE = Elementwise(
    "scale", (Input("x"),), lambda x, factor: x * np.float32(factor), EXACT, Number("factor", 25.298221281347036)
)
SOFTCAP = Elementwise(
    "softcap",
    (Input("x", 20.0, (0.0, 1e-3, 30.0, -30.0, 1e4, -1e4), 90.0),),
    lambda x, cap: cap * np.tanh(x / cap),
    Within(4e-6, "of the cap", lambda expected, x: np.full_like(expected, 30.0)),  # of the example
    Number("cap", 30.0, positive=True),
)

ELEMENTWISE: Mapping[str, Elementwise] = {
    op.name: op for op in (ADD, SIGMOID_GATE, SWIGLU, GEGLU, GELU, SCALE, SOFTCAP)
}


class ElementwiseOps(Protocol):
    """The elementwise ops as models call them. Whoever computes or records them defines `elementwise` and inherits the rest."""

    def elementwise(self, op: Elementwise, *inputs: Tensor, number: float = 0.0) -> Tensor:
        """Compute any op that is declared in this file."""
        ...

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b."""
        return self.elementwise(ADD, a, b)

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * sigmoid(gate)."""
        return self.elementwise(SIGMOID_GATE, x, gate)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate * sigmoid(gate) * up."""
        return self.elementwise(SWIGLU, gate, up)

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up, with the tanh form of gelu: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
        return self.elementwise(GEGLU, gate, up)

    def gelu(self, x: Tensor) -> Tensor:
        """x * normal_cdf(x): the exact form, 0.5 x (1 + erf(x / sqrt(2)))."""
        return self.elementwise(GELU, x)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x * float32(factor)."""
        return self.elementwise(SCALE, x, number=factor)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap)."""
        return self.elementwise(SOFTCAP, x, number=cap)
