"""Page copies on a GPU: on streams of their own, ordered against steps, through pinned memory, and under captured graphs.

Needs an NVIDIA GPU; skipped elsewhere. What the bytes are is tested in tests/unit/backends/test_pages.py, without one.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from quire.backends.choose import open_backend  # noqa: E402
from quire.backends.ops import KV  # noqa: E402
from quire.backends.torch import backend as torch_backend  # noqa: E402
from quire.backends.torch.pages import DevicePages  # noqa: E402
from quire.engine.types import Request  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from tests.gpu import kit  # noqa: E402
from tests.unit.backends.moving import check_moves, garbage, page_cases, scramble  # noqa: E402

LONG = 2_000_000_000  # cycles: about a second
KV_POOL = KV(4, 40, 16, 2, 64)
CASES = {case.name: case for case in page_cases(["f16", "int8", "fp8"])}


def program(kv: KV = KV_POOL) -> Any:
    return open_backend("cuda", device="cuda").compile(
        lambda ops, batch, inputs: ops.scale(inputs["x"], 1.0), kv=kv, inputs={"x": 8}, max_tokens=32, max_rows=32
    )


@pytest.mark.parametrize("chunk", [1, 100_000, 64 << 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["torch", "cuda"])
def test_pages_that_were_moved_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, chunk: int):
    monkeypatch.setattr(torch_backend, "DevicePages", partial(DevicePages, chunk=chunk))
    backend = open_backend(name, device="cuda", dtype=dtype)
    for case in CASES.values():
        if case.kv.dtype in backend.kv_dtypes:
            results = check_moves(backend.compile, case)
            assert all(np.isfinite(x).all() and x.any() for x in results)


def test_buffers_are_pinned():
    assert torch.from_numpy(program().page_buffer(0, 3)).is_pinned()


def test_a_read_sees_what_was_launched_and_does_not_wait_for_it():
    """The compute stream is busy, then writes a page, all of it ahead of the device: the read returns at once, and is right."""
    p = program()
    p.read_pages(0, range(40)).wait()  # streams and staging are there now
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    p.kernels.pools[0].numbers[:, :, 7] = 1.5
    copy = p.read_pages(0, [7])
    assert not copy.done()
    rows = torch.from_numpy(copy.wait()).view(p.kernels.pools[0].numbers.dtype)
    assert copy.done() and (rows == 1.5).all()


def test_a_write_comes_after_what_was_launched():
    """A step that was launched before writes the same page, late: what was written afterwards stays."""
    p = program()
    rows = p.page_buffer(0, 1)
    rows[:] = garbage(np.random.default_rng(0), rows.shape)
    p.write_pages(0, [3], rows).wait()
    torch.cuda._sleep(LONG)
    p.kernels.pools[0].numbers[:, :, 3] = 0.0
    copy = p.write_pages(0, [3], rows)
    assert not copy.done()
    copy.wait()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(p.read_pages(0, [3]).wait(), rows)


def test_steps_do_not_wait_for_a_write_that_is_under_way_unless_they_are_told_to():
    p = program()
    rows = p.page_buffer(0, 40)
    rows[:] = garbage(np.random.default_rng(0), rows.shape)
    p.write_pages(0, range(40), rows).wait()
    new = p.page_buffer(0, 1)
    new[:] = garbage(np.random.default_rng(1), new.shape)
    with torch.cuda.stream(p._pages._ways[True].stream):
        torch.cuda._sleep(LONG)
    copy = p.write_pages(0, [5], new)
    torch.ones(4, device="cuda").sum().item()  # a step, on the compute stream, waited for
    assert not copy.done()
    copy.fence()
    seen = p.kernels.pools[0].numbers[:, :, 5].clone()  # launched behind the fence
    assert copy.wait() is new
    got = seen.flatten(1).view(torch.uint8).flatten().cpu().numpy()
    np.testing.assert_array_equal(got, new[0])


def test_copies_that_nobody_waits_for_are_finished_and_let_go():
    p = program()
    want = garbage(np.random.default_rng(2), (40, p.page_layout(0).nbytes))
    for page in range(40):
        buffer = p.page_buffer(0, 1)
        buffer[:] = want[page]
        p.write_pages(0, [page], buffer)
        del buffer
    torch.cuda.synchronize()
    np.testing.assert_array_equal(p.read_pages(0, range(40)).wait(), want)
    assert len(p._pages._under_way) <= 1


def test_captured_graphs_read_pages_that_were_written(tmp_path: Path):
    """A prompt that is cached, its pages read, the whole pool scrambled, and all written back: a hit gives the same tokens."""
    path = kit.write_shape(tmp_path)
    running, _ = kit.build(path, load_format="dummy")
    rng = random.Random(3)
    prompt = [rng.randrange(3, 900) for _ in range(100)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, ignore_eos=True)

    def ask(name: str) -> Any:
        return kit.serve(running, [Request(id=name, tokens=prompt, sampling=sampling)], lambda e: e.logprobs)[name]

    ask("first")
    again = ask("again")
    runner: Any = running._runner
    scheduler: Any = running._scheduler
    p, tree = runner._program, scheduler.tree
    kv = p.kv
    kept = [p.read_pages(g, range(own.pages)).wait().copy() for g, own in enumerate(kv.groups)]
    scramble(p, kv, np.random.default_rng(1))
    assert ask("scrambled") != again  # or pages would not matter
    scramble(p, kv, np.random.default_rng(2))
    for g, rows in enumerate(kept):
        p.write_pages(g, range(len(rows)), rows).wait()
    assert [x.token for x in ask("after")] == [x.token for x in again]
    tree.check([])
    running.close()
