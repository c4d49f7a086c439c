"""Pages as bytes, on every backend: moved between pools and programs they give the same bits, and they hold what is documented."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from quire.backends import cases
from quire.backends.cases import groups
from quire.backends.choose import open_backend
from quire.backends.kv import KV, KV_DTYPES
from quire.backends.pages import PageLayout
from quire.layouts import Floats
from tests.unit.backends.moving import LIMITS, check_moves, garbage, page_cases, scramble

VARIANTS: dict[str, dict[str, Any]] = {"reference": {}}
if importlib.util.find_spec("quire.backends.native._native") is not None:
    from quire.backends.native import available

    VARIANTS |= {f"native-{isa}": {"isa": isa, "threads": 1 + n % 2} for n, isa in enumerate(available())}
if importlib.util.find_spec("torch") is not None:
    VARIANTS |= {f"torch-{dtype}": {"device": "cpu", "dtype": dtype} for dtype in ("float32", "bfloat16")}

CASES = {case.name: case for case in page_cases(list(KV_DTYPES))}


def backend_of(variant: str) -> Any:
    return open_backend(variant.split("-")[0], **VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_pages_that_were_moved_give_the_same_bits(variant: str, case: str):
    backend = backend_of(variant)
    if CASES[case].kv.dtype not in ("f16", *backend.kv_dtypes):
        pytest.skip(f"needs K and V as {CASES[case].kv.dtype}, which this backend does not keep")
    results = check_moves(backend.compile, CASES[case])
    assert all(np.isfinite(x).all() and x.any() for x in results)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_no_number_in_other_pages_stays_there(variant: str):
    """Pools are full of NaNs and infinities before pages come: programs that look away from them do so after a write, too."""
    case = groups.grouped((0, 40), "f16", np.random.default_rng(2))
    results = check_moves(backend_of(variant).compile, case, bits=0xFF)
    assert all(np.isfinite(x).all() for x in results)
    fresh, dirty = (backend_of(variant).compile(case.forward, kv=case.kv, inputs=case.widths, **LIMITS) for _ in "ab")
    for g, own in enumerate(case.kv.groups):
        dirty.write_pages(g, range(own.pages), np.full((own.pages, dirty.page_layout(g).nbytes), 0xFF, np.uint8)).wait()
    for step in case.steps:
        np.testing.assert_array_equal(dirty.run(step.batch, step.inputs), fresh.run(step.batch, step.inputs))


@pytest.mark.skipif(not any(v.startswith("native") for v in VARIANTS), reason="needs the native extension")
def test_a_native_pool_knows_that_it_was_given_what_is_not_finite():
    """Some kernels read halves faster where all are known to be finite: what is written counts as what steps store."""
    value = np.array([np.inf, -np.inf, np.nan], np.float16).view(np.uint8).reshape(3, 2)
    for kv in (KV(2, 3, 16, 1, 16), KV(2, 3, 16, 1, 16, "int8"), KV(2, 3, 16, 1, 16, "int16")):
        for one in value:
            program = open_backend("native").compile(
                lambda ops, batch, inputs: ops.scale(inputs["x"], 1.0), kv=kv, inputs={"x": 8}, **LIMITS
            )
            rows = garbage(np.random.default_rng(1), (2, program.page_layout(0).nbytes))
            program.write_pages(0, [0, 2], rows)
            assert program._plan.finite(0)
            rows[1, -66:-64] = one  # a value of the last layer: of codes, a part of them
            program.write_pages(0, [2, 1], rows)
            assert program._plan.finite(0) == (kv.dtype != "f16")


# ---- what the bytes are


def decode_reference(rows: np.ndarray, kv: KV) -> Floats:
    """[pages, layers, 2, token, head, column] of rows of the order reference-rows."""
    shape = kv.page_size, kv.kv_heads, kv.head_dim
    types = {"f16": np.float16, "fp8": np.float16, "int8": np.int8, "int16": np.int16}
    return fields(rows, kv, [(types[kv.dtype], shape), (np.float32, shape[:2])] * 2, lambda k, a, v, b: (k, a, v, b))


def decode_torch(rows: np.ndarray, kv: KV) -> Floats:
    shape = kv.page_size, kv.kv_heads, kv.head_dim
    types = {"f16": np.float16, "fp8": np.uint8, "int8": np.int8}
    kinds = [(types[kv.dtype], shape)] * 2 + [(np.float32, (kv.kv_heads, kv.page_size))] * 2
    numbers = e4m3 if kv.dtype == "fp8" else lambda x: x
    return fields(rows, kv, kinds, lambda k, v, a, b: (numbers(k), a.swapaxes(-1, -2), numbers(v), b.swapaxes(-1, -2)))


def decode_native(rows: np.ndarray, kv: KV) -> Floats:
    """Cells of each head: keys by column, values by token; of int16 the upper bytes of four columns, then the lower ones."""
    n, d = kv.page_size, kv.head_dim
    if kv.dtype == "int16":
        kinds = [
            (np.int8, (kv.kv_heads, d // 4, 2, n, 4)), (np.int8, (kv.kv_heads, n // 4, 2, d, 4)),
            (np.float32, (kv.kv_heads, 2, n)),
        ]  # fmt: skip
    else:
        type_ = np.float16 if kv.dtype == "f16" else np.int8
        kinds = [(type_, (kv.kv_heads, d, n)), (type_, (kv.kv_heads, n, d)), (np.float32, (kv.kv_heads, 2, n))]
    cells = rows.reshape(len(rows), kv.layers, kv.kv_heads, -1)
    parts, at = [], 0
    for type_, (_, *shape) in kinds if kv.dtype != "f16" else kinds[:2]:
        size = int(np.prod(shape)) * np.dtype(type_).itemsize
        parts.append(np.ascontiguousarray(cells[..., at : at + size]).view(type_).reshape(*cells.shape[:3], *shape))
        at += size
    assert at == cells.shape[-1]
    keys, values = parts[0].astype(np.float32), parts[1].astype(np.float32)
    if kv.dtype == "int16":  # [.., four columns, 2, token, 4] -> [.., column, token]
        keys = (keys[..., 0, :, :] * 256 + keys[..., 1, :, :]).swapaxes(-1, -2).reshape(*cells.shape[:3], d, n)
        values = (values[..., 0, :, :] * 256 + values[..., 1, :, :]).swapaxes(-1, -2).reshape(*cells.shape[:3], n, d)
    both = np.stack([keys.swapaxes(-1, -2), values], axis=2)  # [pages, layers, 2, head, token, column]
    if kv.dtype != "f16":
        both = both * parts[2].transpose(0, 1, 3, 2, 4)[..., None]
    return both.swapaxes(3, 4)


def fields(rows: np.ndarray, kv: KV, kinds: list[Any], named: Callable[..., tuple[np.ndarray, ...]]) -> Floats:
    if kv.dtype == "f16":
        kinds = [kind for kind in kinds if kind[0] is not np.float32]
    by_layer, at, parts = rows.reshape(len(rows), kv.layers, -1), 0, []
    for type_, shape in kinds:
        size = int(np.prod(shape)) * np.dtype(type_).itemsize
        parts.append(
            np.ascontiguousarray(by_layer[..., at : at + size]).view(type_).reshape(*by_layer.shape[:2], *shape)
        )
        at += size
    assert at == by_layer.shape[-1]
    if kv.dtype == "f16":
        return np.stack(parts, axis=2).astype(np.float32)
    k, a, v, b = named(*parts)
    return np.stack([k.astype(np.float32) * a[..., None], v.astype(np.float32) * b[..., None]], axis=2)


def e4m3(codes: np.ndarray) -> Floats:
    """Numbers of one sign bit, four bits of exponent and three behind the point."""
    sign, exponent, rest = codes >> 7, (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(rest / 8, -6), np.ldexp(1 + rest / 8, exponent - 7))
    return np.where(sign == 1, -size, size).astype(np.float32)


DECODE = {"reference-rows": decode_reference, "torch-rows": decode_torch, "native-cells": decode_native}
STEP = {"f16": 0.0, "int8": 1.01 / 127, "int16": 1.01 / 32639, "fp8": 0.13}  # of the largest number of a head


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.endswith("bfloat16")])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_bytes_are_the_keys_and_values_that_went_in(variant: str, dtype: str):
    backend = backend_of(variant)
    if dtype not in backend.kv_dtypes:
        pytest.skip(f"needs K and V as {dtype}, which this backend does not keep")
    case = groups.grouped((0, 40), dtype, np.random.default_rng(4))
    program = backend.compile(case.forward, kv=case.kv, inputs=case.widths, **LIMITS)
    step, layer = case.steps[0], 1  # the one that the case computes
    program.run(step.batch, step.inputs)
    for g, kv in enumerate(case.kv.groups):
        layout, places = program.page_layout(g), step.batch.table(g).write
        assert layout.kind == ("window" if kv.window else "full") and layout.layers == kv.layers
        rows = program.read_pages(g, range(kv.pages)).wait()
        decoded = DECODE[layout.order](rows, kv)[:, layer].swapaxes(0, 1).reshape(2, -1, kv.kv_heads, kv.head_dim)
        for name, got in zip("kv", decoded, strict=True):
            given = step.inputs[f"{name}{g}"].reshape(-1, kv.kv_heads, kv.head_dim)
            given = given.astype(np.float16).astype(np.float32) if dtype == "f16" else given
            assert (np.abs(got[places] - given) <= STEP[dtype] * np.abs(given).max(-1, keepdims=True)).all()
            assert not np.delete(got, places, axis=0).any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_state_is_its_numbers(variant: str):
    """conv keeps the rows that it saw last, whatever it is computed in."""
    case = next(cases.conv_cases({}, np.random.default_rng(3)))
    program = backend_of(variant).compile(case.forward, kv=case.kv, inputs=case.widths, **LIMITS)
    step = case.steps[0]
    program.run(step.batch, step.inputs)
    layout = program.page_layout(1)
    assert (layout.kind, layout.dtype, layout.layer_nbytes) == ("state", "float32", 4 * case.kv.groups[1].state)
    (row,) = program.read_pages(1, [5], layers=range(1, 2)).wait()  # that is where the sequence of 20 tokens ends
    width = step.inputs["x"].shape[1]
    seen = step.inputs["x"][20 - row.size // (4 * width) : 20]
    np.testing.assert_allclose(row.view(np.float32).reshape(-1, width), seen, rtol=8e-3 if "bfloat16" in variant else 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_programs_can_tell_whose_pages_they_can_take(variant: str):
    backend = backend_of(variant)

    def layouts(kv: KV) -> list[PageLayout]:
        program = backend.compile(
            lambda ops, batch, inputs: ops.scale(inputs["x"], 1.0), kv=kv, inputs={"x": 8}, **LIMITS
        )
        return [program.page_layout(g) for g in range(len(kv.groups))]

    more = KV(2, 5, 16, 1, 32, window=48), KV(2, 4, 16, 0, 0, state=24)
    kv = KV(3, 6, 16, 2, 64, more=more)
    same, other = layouts(kv), layouts(kv.sized([9, 2, 7]))
    assert same == other and [x.describe() for x in same] == [x.describe() for x in other]
    assert [x.kind for x in same] == ["full", "window", "state"]
    assert [x.nbytes for x in same] == [own.page_bytes for own in kv.groups]
    assert [x.kind for x in layouts(KV(1, 2, 16, 1, 64, latent=32))] == ["latent"]
    every = [same[0], same[1], same[2]]
    every += [
        layouts(KV(*sizes))[0] for sizes in [(2, 6, 16, 2, 64), (3, 6, 16, 1, 64), (3, 6, 16, 2, 32), (3, 6, 16, 4, 32)]
    ]
    every += [layouts(KV(3, 6, 16, 2, 64, dtype))[0] for dtype in backend.kv_dtypes if dtype != "f16"]
    assert len(set(every)) == len({x.describe() for x in every}) == len(every)


# ---- hostile requests

REFUSED = [
    ({"group": 2}, "no group 2"),
    ({"group": -1}, "no group -1"),
    ({"pages": [0, 6]}, "pages 0 to 5: 6 is not"),
    ({"pages": [0, -1]}, "pages 0 to 5: -1 is not"),
    ({"pages": [1 << 62, 1]}, "is not one of them"),
    ({"pages": [1 << 70, 1]}, "whole numbers"),
    ({"pages": [3, 3]}, "named twice"),
    ({"pages": [0.5, 1.0]}, "whole numbers"),
    ({"pages": [[0, 1]]}, "whole numbers"),
    ({"layers": range(2, 4)}, "layers 0 to 2"),
    ({"layers": range(-1, 2)}, "layers 0 to 2"),
    ({"layers": range(0, 3, 2)}, "not some of them in a row"),
    ({"rows": 1}, "must have shape"),
    ({"rows": 3}, "must have shape"),
    ({"columns": -8}, "must have shape"),
    ({"dtype": np.int8}, "uint8"),
    ({"order": "F"}, "contiguous"),
]


@pytest.mark.parametrize("variant", ["reference", *[v for v in VARIANTS if v != "reference"][:1], "torch-float32"])
@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=lambda x: str(x)[:40])
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_what_does_not_fit_is_refused_and_touches_nothing(
    variant: str, wrong: dict[str, Any], message: str, write: bool
):
    if variant not in VARIANTS:
        pytest.skip("needs torch: the torch extra")
    kv = KV(3, 6, 16, 2, 8, more=(KV(2, 4, 16, 0, 0, state=24),))
    program = backend_of(variant).compile(
        lambda ops, batch, inputs: ops.scale(inputs["x"], 1.0), kv=kv, inputs={"x": 8}, **LIMITS
    )
    scramble(program, kv, np.random.default_rng(0))
    before = [program.read_pages(g, range(own.pages)).wait().copy() for g, own in enumerate(kv.groups)]
    columns = program.page_layout(0).nbytes + wrong.get("columns", 0)
    buffer = np.full((wrong.get("rows", 2), columns), 7, wrong.get("dtype", np.uint8), order=wrong.get("order", "C"))
    group, pages, layers = wrong.get("group", 0), wrong.get("pages", [0, 1]), wrong.get("layers")
    copy = program.write_pages if write else program.read_pages
    with pytest.raises(ValueError, match=message):
        copy(group, pages, buffer, layers=layers)
    assert (buffer == 7).all()
    for g, own in enumerate(kv.groups):
        np.testing.assert_array_equal(program.read_pages(g, range(own.pages)).wait(), before[g])


@pytest.mark.parametrize("variant", VARIANTS)
def test_buffers_of_any_memory(variant: str):
    """Part of a reused buffer, memory that may not be written, memory that begins anywhere, and nothing at all."""
    kv = KV(3, 6, 16, 2, 8)
    program = backend_of(variant).compile(
        lambda ops, batch, inputs: ops.scale(inputs["x"], 1.0), kv=kv, inputs={"x": 8}, **LIMITS
    )
    nbytes, rng = program.page_layout(0).nbytes, np.random.default_rng(1)
    assert program.read_pages(0, []).wait().shape == (0, nbytes)
    assert program.write_pages(0, [], np.zeros((0, nbytes), np.uint8)).done()
    with pytest.raises(ValueError, match="-1 pages"):
        program.page_buffer(0, -1)
    given = garbage(rng, (2, nbytes))
    given.flags.writeable = False
    copy = program.write_pages(0, np.array([4, 1], np.int32), given)
    copy.fence()
    assert copy.wait() is given and copy.done()
    with pytest.raises(ValueError, match="writable"):
        program.read_pages(0, [4, 1], given)
    whole = program.page_buffer(0, 5)
    assert whole.shape == (5, nbytes) and not whole.any()
    copy = program.read_pages(0, [1, 4], whole[2:4])
    assert copy.wait().base is not None and np.array_equal(whole[2:4], given[::-1]) and not whole[[0, 1, 4]].any()
    odd = np.zeros(1 + 2 * nbytes, np.uint8)[1:].reshape(2, nbytes)
    program.read_pages(0, [4, 1], odd).wait()
    np.testing.assert_array_equal(odd, given)
    program.write_pages(0, [0, 5], odd).wait()
    np.testing.assert_array_equal(program.read_pages(0, [0, 5]).wait(), given)


# ---- what it costs


def calls(task: Callable[[], Any]) -> int:
    """Functions that Python enters meanwhile, its own and C's."""
    count = 0

    def tell(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tell)
    try:
        task()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_the_work_in_python_is_the_same_for_a_page_and_for_hundreds(variant: str, write: bool):
    def work(pages: int, layers: int) -> int:
        kv = KV(layers, 400, 16, 1, 8)
        program = backend_of(variant).compile(
            lambda ops, batch, inputs: ops.scale(inputs["x"], 1.0), kv=kv, inputs={"x": 8}, **LIMITS
        )
        buffer = program.page_buffer(0, pages)
        ids = np.arange(pages)
        copy = partial(program.write_pages if write else program.read_pages, 0, ids, buffer)
        copy()
        return calls(copy)

    assert work(1, 1) == work(300, 1) == work(300, 4)


def test_native_pages_can_be_copied_while_a_step_runs():
    """Reads and writes of pages that no step uses, from another thread: every bit of both is right."""
    if not any(v.startswith("native") for v in VARIANTS):
        pytest.skip("needs the native extension")
    case = groups.grouped((0, 40), "f16", np.random.default_rng(6))
    kv = case.kv.sized([own.pages + 40 for own in case.kv.groups])
    backend = open_backend("native", threads=2)
    want = backend.compile(case.forward, kv=case.kv, inputs=case.widths, **LIMITS)
    program = backend.compile(case.forward, kv=kv, inputs=case.widths, **LIMITS)
    others = range(case.kv.pages, kv.pages)
    rows = garbage(np.random.default_rng(8), (len(others), program.page_layout(0).nbytes))
    stop, wrong = threading.Event(), []

    def copy() -> None:
        while not stop.is_set():
            program.write_pages(0, others, rows)
            if not np.array_equal(program.read_pages(0, others).wait(), rows):
                wrong.append("a page changed")

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        for step in case.steps:
            np.testing.assert_array_equal(program.run(step.batch, step.inputs), want.run(step.batch, step.inputs))
    finally:
        stop.set()
        thread.join()
    assert not wrong


@pytest.mark.skipif("torch-float32" not in VARIANTS, reason="needs torch: the torch extra")
@pytest.mark.parametrize("chunk", [1, 20_000, 1 << 20])
def test_pages_go_through_a_staging_buffer_of_bounded_size(monkeypatch: pytest.MonkeyPatch, chunk: int):
    """What a GPU does, here: a page at a time, some at a time, all of them, for every kind of group and of numbers."""
    module = importlib.import_module("quire.backends.torch.pages")
    made: list[int] = []
    room = module._Way.room

    def watched(way: Any, nbytes: int, device: Any) -> Any:
        made.append(nbytes)
        return room(way, nbytes, device)

    monkeypatch.setattr(module._Way, "room", watched)
    staged = partial(module.DevicePages, staged=True, chunk=chunk)
    monkeypatch.setattr("quire.backends.torch.backend.DevicePages", staged)
    backend = backend_of("torch-float32")
    for case in CASES.values():
        if case.kv.dtype in backend.kv_dtypes:
            made.clear()
            check_moves(backend.compile, case)
            largest = max(own.page_bytes for own in case.kv.groups)
            assert made and max(made) <= max(chunk, largest)
