"""Weights read ahead in chunks: every number arrives, in order, whatever the sizes; what goes wrong is heard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from quire import formats  # noqa: E402
from quire.backends.torch.feed import Feed  # noqa: E402
from quire.backends.torch.weights import Weights, dequantize  # noqa: E402
from quire.backends.torch.words import MxWords  # noqa: E402
from quire.formats import mxfp4  # noqa: E402
from quire.layouts import Affine, Dense, Layout  # noqa: E402

CPU = torch.device("cpu")


def dense(shape: tuple[int, ...], dtype: str, seed: int = 0, shift: int = 0) -> Dense:
    """Numbers in a view of bytes that may begin at any address, as a file's do."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape)) * (4 if dtype == "f32" else 2)
    values = rng.standard_normal(int(np.prod(shape))).astype("<f4")
    kept = (
        values
        if dtype == "f32"
        else values.astype("<f2")
        if dtype == "f16"
        else (values.view("<u4") >> 16).astype("<u2")
    )
    data = np.zeros(size + shift, np.uint8)
    data[shift:] = np.frombuffer(kept.tobytes(), np.uint8)
    data.flags.writeable = False
    return Dense.of(data[shift:], shape, dtype)


def quantized(n: int, k: int) -> Layout:
    import gguf

    data = gguf.quants.quantize(
        np.random.default_rng(1).standard_normal((n, k)).astype(np.float32), gguf.GGMLQuantizationType.Q4_0
    )
    return formats.load("Q4_0").read(np.ascontiguousarray(data).reshape(-1), (n, k))


def floats(layout: Layout, feed: Feed) -> np.ndarray[Any, Any]:
    out = np.full(layout.shape, np.nan, np.float32)
    at = 0
    for start, stop, rows in feed.rows(layout):
        assert start == at and stop > start
        out[start:stop] = (rows if isinstance(layout, Dense) else dequantize(rows, layout.codec)).float().numpy()
        at = stop
    return out


@pytest.mark.parametrize("chunk", [1, 100, 4096, 1 << 20])
@pytest.mark.parametrize(("threads", "buffers"), [(1, 1), (3, 2), (4, 8)])
def test_everything_arrives_in_order(chunk: int, threads: int, buffers: int):
    layouts = [
        dense((37, 24), "bf16", 1),
        dense((24,), "f32", 2),
        quantized(19, 64),
        dense((5, 300), "f16", 3, shift=1),
        dense((1, 8), "bf16", 4),
        dense((64, 16), "f32", 5, shift=3),
    ]
    with Feed(layouts, CPU, threads=threads, buffers=buffers, chunk=chunk) as feed:
        for layout in layouts:
            np.testing.assert_array_equal(floats(layout, feed), layout.dequantize())


def test_reading_is_ahead_but_bounded(monkeypatch: pytest.MonkeyPatch):
    import quire.backends.torch.feed as module

    began: list[int] = []
    real, lock = module._read, threading.Lock()

    def counted(layout: Layout, start: int, stop: int, buffer: Any) -> None:
        with lock:
            began.append(start)
        real(layout, start, stop, buffer)

    monkeypatch.setattr(module, "_read", counted)
    layout = dense((100, 8), "f32")
    with Feed([layout], CPU, threads=2, buffers=4, chunk=32) as feed:
        rows = feed.rows(layout)
        next(rows)
        feed._pool.submit(lambda: None).result()
        assert 1 < len(began) <= 5  # one used, at most as many more as there are buffers
        list(rows)
    assert sorted(began) == list(range(100))


def test_another_order_is_refused():
    a, b = dense((4, 8), "f32", 1), dense((4, 8), "f32", 2)
    with Feed([a, b], CPU) as feed, pytest.raises(ValueError, match="another order"):
        list(feed.rows(b))
    with Feed([a], CPU) as feed:
        list(feed.rows(a))
        with pytest.raises(ValueError, match="another order"):
            list(feed.rows(b))


def test_a_failed_read_is_raised_where_the_chunk_is_used(monkeypatch: pytest.MonkeyPatch):
    import quire.backends.torch.feed as module

    def fails(layout: Layout, start: int, stop: int, buffer: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(module, "_read", fails)
    layout = dense((4, 8), "f32")
    with Feed([layout], CPU) as feed, pytest.raises(OSError, match="the disk is gone"):
        list(feed.rows(layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_same_fed_and_copied(dtype: Any, monkeypatch: pytest.MonkeyPatch):
    """What a GPU gets through the feed is what a CPU copies; the feed is forced here, since there may be no GPU."""
    groups = [[dense((32, 64), "bf16", 1)], [dense((64,), "f32", 2)], [dense((16, 64), "f16", 3), quantized(24, 64)]]
    plain, fed = Weights(CPU, dtype), Weights(CPU, dtype)
    plain.load(groups)
    told: list[tuple[int, int]] = []
    layouts = [w for group in groups for w in group]
    monkeypatch.setattr(fed, "_feeding", lambda layouts, packed: Feed(layouts, CPU, packed=packed, chunk=700))
    fed.load(groups, lambda layout, done, total: told.append((done, total)))
    for w in layouts:
        assert torch.equal(plain[w], fed[w])
    assert fed.joined(groups[2]) is not None
    assert told[-1][0] == told[-1][1] == sum(w.nbytes for w in layouts) and len(told) == len(layouts)


def microscaled(n: int, k: int, seed: int, *, together: bool) -> Affine:
    """MXFP4 as a GGUF has it, or every other row of two tensors, as a folder has gates."""
    rng = np.random.default_rng(seed)
    if together:
        blocks = rng.integers(0, 256, (n, k // 32, 17), dtype=np.uint8)
        blocks[..., 0] = rng.integers(100, 140, (n, k // 32))
        return formats.load("MXFP4").read(blocks.reshape(-1), (n, k))
    codes = rng.integers(0, 256, (2 * n, k // 32, 16), dtype=np.uint8)
    return mxfp4.join(codes[seed % 2 :: 2], rng.integers(100, 140, (2 * n, k // 32), dtype=np.uint8)[seed % 2 :: 2])


@pytest.mark.parametrize("together", [True, False])
def test_mxfp4_travels_as_the_file_has_it(together: bool, monkeypatch: pytest.MonkeyPatch):
    """Experts that are multiplied packed have the numbers of the file, fed or copied, and no more than its bytes were read."""
    layouts = [microscaled(320, 96, seed, together=together) for seed in (1, 2)]
    ids = {id(w) for w in layouts}
    read: list[int] = []

    class Counted(Feed):
        def rows(self, layout: Layout) -> Iterator[tuple[int, int, torch.Tensor]]:
            for start, stop, rows in super().rows(layout):
                read.append(rows.numel())
                yield start, stop, rows

    for feeds in (False, True):
        weights = Weights(CPU, torch.bfloat16)
        weights.words = True
        if feeds:
            monkeypatch.setattr(
                weights, "_feeding", lambda layouts, packed: Counted(layouts, CPU, packed=packed, chunk=9000)
            )
        weights.load([layouts], products=ids, stacks=ids)
        for w in layouts:
            held: Any = weights[w]
            assert isinstance(held, MxWords)
            np.testing.assert_array_equal(held.dequantize().numpy(), w.dequantize())
    assert sum(read) == 2 * 320 * 3 * 17 and len(read) == 2 * 3  # whole tiles of rows at a time
