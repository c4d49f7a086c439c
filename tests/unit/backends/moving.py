"""Programs whose pages are moved between steps: what the tests of page copies share, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.backends import cases
from quire.backends.batch import I32, Batch, Table
from quire.backends.cases import groups
from quire.backends.ops import KV
from quire.layouts import Floats

SIZE = 16  # tokens of a page
LIMITS = {"max_tokens": 128, "max_rows": 128}
WORDS = 0x3F  # bits of garbage: halves of such bytes are finite


def page_cases(dtypes: Sequence[str], **sizes: Any) -> Iterator[cases.Case]:
    """Every kind of group, with keys and values of these types: full, with a window, latent, and states."""
    rng = np.random.default_rng(11)
    for dtype in dtypes:
        yield groups.grouped((0, 40), dtype, rng, **sizes)
    yield next(case for case in cases.latent_attention_cases({}, rng) if case.kv.dtype == "f16")
    yield next(cases.conv_cases({}, rng))
    yield next(cases.delta_rule_cases({}, rng))


@dataclass(slots=True)
class Places:
    """Where the pages of a case's own numbers are, in each group's pool of a program."""

    program: Any
    kv: KV
    of: list[I32]  # by the case's page


def told(batch: Batch, where: Sequence[I32]) -> Batch:
    """The batch, for a program that has each page elsewhere."""
    tables = []
    for g, places in enumerate(where):
        pages, write = batch.table(g).pages, batch.table(g).write
        tables.append(
            Table(
                np.where(pages < 0, pages, places[np.maximum(pages, 0)]).astype(np.int32),
                np.where(write < 0, write, places[np.maximum(write, 0) // SIZE] * SIZE + write % SIZE).astype(np.int32),
            )
        )
    first, *more = tables
    return Batch(
        batch.ids, batch.pos, batch.q_start, batch.kv_len, first.pages, first.write, batch.logit_rows, tuple(more)
    )


def garbage(rng: np.random.Generator, shape: tuple[int, ...], bits: int = WORDS) -> npt.NDArray[np.uint8]:
    return rng.integers(0, 256, shape, np.uint8) & np.uint8(bits)


def scramble(program: Any, kv: KV, rng: np.random.Generator, bits: int = WORDS) -> None:
    """Every page of every group becomes something else."""
    for g, own in enumerate(kv.groups):
        nbytes = program.page_layout(g).nbytes
        program.write_pages(g, range(own.pages), garbage(rng, (own.pages, nbytes), bits)).wait()


def move(here: Places, there: Places, rng: np.random.Generator) -> None:
    """All pages of one program into the other's, at places of their own: some at once, some a few layers at a time."""
    for g, own in enumerate(here.kv.groups):
        there.of[g] = rng.permutation(there.kv.groups[g].pages)[: len(here.of[g])].astype(np.int32)
        layout = here.program.page_layout(g)
        half, middle = len(here.of[g]) // 2, own.layers // 2
        buffer = here.program.page_buffer(g, len(here.of[g]))
        for part in (slice(0, half), slice(half, None)):
            rows = here.program.read_pages(g, here.of[g][part], buffer[part]).wait()
            there.program.write_pages(g, there.of[g][part][:3], rows[:3].copy()).wait()
            for layers in (range(middle), range(middle, own.layers)):
                columns = slice(layers.start * layout.layer_nbytes, layers.stop * layout.layer_nbytes)
                few = here.program.read_pages(g, here.of[g][part][3:], layers=layers).wait()
                np.testing.assert_array_equal(few, rows[3:, columns])
                there.program.write_pages(g, there.of[g][part][3:], few, layers=layers).wait()


def spacious(kv: KV, more: int) -> KV:
    """The same groups with so many pages more."""
    return kv.sized([own.pages + more for own in kv.groups])


def check_moves(compiled: Callable[..., Any], case: cases.Case, bits: int = WORDS) -> list[Floats]:
    """Run a case in two programs by turns, its pages moved after every step: every bit is as if they had stayed.

    Pools are scrambled before each move, so nothing is right that was not moved. Returns the results.
    """
    rng = np.random.default_rng(7)
    stays = compiled(case.forward, kv=case.kv, inputs=case.widths, **LIMITS)
    both = []
    for more in (3, 9):
        kv = spacious(case.kv, more)
        program = compiled(case.forward, kv=kv, inputs=case.widths, **LIMITS)
        both.append(Places(program, kv, [np.arange(own.pages, dtype=np.int32) for own in case.kv.groups]))
    here, there = both
    results = []
    for i, step in enumerate(case.steps):
        want = np.array(stays.run(step.batch, step.inputs))
        got = here.program.run(told(step.batch, here.of), step.inputs)
        np.testing.assert_array_equal(got, want, err_msg=f"step {i}")
        results.append(want)
        scramble(there.program, there.kv, rng, bits)
        move(here, there, rng)
        here, there = there, here
    return results
