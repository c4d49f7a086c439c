"""Cases of the elementwise ops, all from their declarations: a row alone, and rows with the numbers that are hard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from quire.backends.batch import Batch
from quire.backends.cases.kit import Case, Step, floats, single
from quire.backends.elementwise import Elementwise, Input
from quire.backends.ops import Ops, Tensor
from quire.layouts import Floats


def elementwise_cases(op: Elementwise, rng: np.random.Generator) -> Iterator[Case]:
    """Widths off the vector size; corners in the first row, and in the second numbers from one end to the other."""
    number = 0.0 if op.number is None else op.number.example
    names = [own.name for own in op.inputs]

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.elementwise(op, *(inputs[name] for name in names), number=number)

    for rows, width in ((1, 72), (5, 208)):
        given = {own.name: _numbers(own, rows, width, rng) for own in op.inputs}

        def bound(expected: Floats, given: dict[str, Floats] = given) -> Floats:
            return op.within.allowed(expected, tuple(given.values()))

        yield Case(
            f"{op.name}-{rows}x{width}", forward, [Step(single(rows), given, bound)], dict.fromkeys(names, width)
        )


def _numbers(own: Input, rows: int, width: int, rng: np.random.Generator) -> Floats:
    x = floats(rng, rows, width, scale=own.scale)
    x[0, : len(own.corners)] = own.corners
    if own.span and rows > 1:
        x[1] = np.linspace(-own.span, own.span, width, dtype=np.float32)
    return x
