"""Floors: bytes and operations counted from the file, and rates looked up by size."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import floors
from benchmarks.floors import Cost, Peaks
from benchmarks.sections import context

PEAKS = Peaks(
    2,
    {"avx512vnni": {"1": 100.0, "2": 200.0}, "avx2": {"1": 50.0, "2": 90.0}, "amx": {"1": 1000.0, "2": 1900.0}},
    {"avx512": {"1": 10.0, "2": 20.0}},
    {"64": {"1": 20.0, "2": 40.0}, "256": {"1": 10.0, "2": 20.0}, "1024": {"1": 8.0, "2": 16.0}},
)


def test_the_dot_product_rate_is_the_best_instruction_and_not_the_tiles() -> None:
    assert PEAKS.dot(2) == ("avx512vnni", 200e9)
    assert PEAKS.amx(1) == 1000e9
    assert Peaks(1, {}, {}, {}).dot(1) is None


def test_the_ceiling_of_a_kernel_set_is_that_of_the_instructions_it_uses() -> None:
    assert PEAKS.within("avx2").dot(2) == ("avx2", 90e9)
    assert PEAKS.within("avx2").amx(2) is None
    assert PEAKS.within("avx512").dot(2) == ("avx512vnni", 200e9)
    assert PEAKS.within("avx512").amx(2) is None
    assert PEAKS.within(None) == PEAKS.within("amx") == PEAKS


def test_a_ceiling_is_the_best_that_was_seen() -> None:
    busy = Peaks(2, {"avx512vnni": {"1": 120.0, "2": 150.0}, "avx2": {"1": 1.0, "2": 1.0}}, {}, {})
    both = PEAKS.or_better(busy)
    assert both.int8["avx512vnni"] == {"1": 120.0, "2": 200.0}
    assert both.int8["avx2"] == PEAKS.int8["avx2"]
    assert both.read == PEAKS.read


@pytest.mark.parametrize(("mib", "rate"), [(1, 40.0), (64, 40.0), (128, 30.0), (256, 20.0), (512, 18.0), (9999, 16.0)])
def test_bandwidth_between_measured_sizes(mib: int, rate: float) -> None:
    assert PEAKS.bandwidth(mib * 2**20, 2) == pytest.approx(rate * 1e9)


def test_floors_from_a_cost() -> None:
    cost = Cost(weight_bytes=64 << 20, kv_bytes=1 << 20, operations=10**9, output_operations=10**9)
    assert cost.decode_floor(PEAKS, 2, 0) == pytest.approx(40e9 / (64 << 20))
    assert cost.decode_floor(PEAKS, 2, 192) == pytest.approx(20e9 / (256 << 20))
    assert cost.prefill_floor(200e9, 1) == pytest.approx(100.0)
    assert cost.prefill_floor(200e9, 1000) == pytest.approx(200 / 1.001)


def test_the_cost_of_the_default_model(model_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the gguf package")
    from tests.readers import Reader

    reader = Reader(model_path)
    cost = floors.cost(model_path)
    names = {t.name: t for t in reader.tensors}
    assert "output.weight" not in names  # the output matrix is the embedding
    assert cost.weight_bytes == sum(t.n_bytes for t in reader.tensors)
    layers = sum(
        math.prod(map(int, t.shape)) for n, t in names.items() if len(t.shape) == 2 and n != "token_embd.weight"
    )
    assert cost.operations == 2 * layers
    assert cost.output_operations == 2 * math.prod(map(int, names["token_embd.weight"].shape))
    fields = {k: reader.fields[f"llama.{k}"].contents() for k in ("block_count", "attention.head_count_kv")}
    width = names["blk.0.attn_k.weight"].shape[1]  # kv heads times head size
    assert cost.kv_bytes == fields["block_count"] * int(width) * 2 * 2  # keys and values of 16 bits


def test_peaks_of_a_program_that_cannot_be_built_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "cmake" in str(floors.measure(1))


def test_peaks_are_read_as_the_program_prints_them() -> None:
    body = {"threads": 2, "int8": PEAKS.int8, "fp32": PEAKS.fp32, "read": PEAKS.read, "checksum": 1}
    assert floors.parse(json.loads(json.dumps(body))) == PEAKS


def test_the_line_is_least_squares() -> None:
    depths, costs = [0, 512, 1024, 4096], [5.0, 5.9, 7.2, 13.1]
    slope, intercept = np.polyfit(depths, costs, 1)
    assert context.line(depths, costs) == pytest.approx((intercept, slope))


def test_a_cost_that_grows_faster_than_its_line_is_told() -> None:
    straight = context.derive({d: 10 + 0.002 * d for d in context.DEPTHS}, {})
    assert straight[context.BEND, ""] == pytest.approx(1.0)
    assert straight[context.SLOPE, ""] == pytest.approx(2000.0)  # nanoseconds for a token of context
    curve = {d: 10 + 0.002 * d + 3e-7 * d * d for d in context.DEPTHS}
    assert context.derive(curve, {})[context.BEND, ""] > 1.1


def test_cost_grows_as_reading_the_bytes_does() -> None:
    """Beyond the last cache a token of context costs more to read: no fault of ours, if it is all that is added."""
    floors = {d: 2 + (0.001 * d if d <= 4096 else 0.001 * 4096 + 0.003 * (d - 4096)) for d in context.DEPTHS}
    costs = {d: 1 + 1.2 * floors[d] for d in context.DEPTHS}
    assert context.derive(costs, {})[context.BEND, ""] > 1.1
    assert context.derive(costs, floors)[context.BEND, ""] == pytest.approx(1.0)
    slower = costs | {context.DEPTHS[-1]: 1.3 * costs[context.DEPTHS[-1]]}
    assert context.derive(slower, floors)[context.BEND, ""] == pytest.approx(1.3)
