"""The safetensors reader: what the format's own package writes is read bit for bit, and what is wrong is told with numbers."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.observe.errors import BadModelFile, NotFound, Unsupported
from quire.weights.safetensors import Safetensors
from tests.fuzz import kit
from tests.fuzz import safetensors as fuzzer
from tests.fuzz.safetensors import build


def open_bytes(folder: Path, data: bytes) -> Safetensors:
    path = folder / "m.safetensors"
    path.write_bytes(data)
    return Safetensors.open(path)


def entry(kind: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


def test_what_the_package_writes_is_read(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="needs the test extra")
    save = pytest.importorskip("safetensors.torch", reason="needs the test extra").save_file
    rng = np.random.default_rng(3)
    made = {
        "a.weight": torch.from_numpy(rng.standard_normal((33, 17)).astype(np.float32)),
        "half": torch.from_numpy(rng.standard_normal((5, 8)).astype(np.float16)),
        "brain": torch.from_numpy(rng.standard_normal((12, 4)).astype(np.float32)).bfloat16(),
        "vector": torch.arange(7, dtype=torch.float32),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "ids": torch.arange(4),
        "eight": torch.zeros(4, dtype=torch.float8_e4m3fn),
    }
    path = tmp_path / "m.safetensors"
    save(made, path, metadata={"format": "pt"})
    with Safetensors.open(path) as file:
        assert file.tensors.keys() == made.keys()
        for name, tensor in made.items():
            assert file.tensors[name].shape == tuple(tensor.shape)
            if tensor.is_floating_point() and name != "eight":
                layout = file.tensor(name)
                have = layout.dequantize() if layout.shape else layout.data  # a single number has no rows
                np.testing.assert_array_equal(have, tensor.float().numpy())
                assert not layout.data.flags.owndata and not layout.data.flags.writeable  # a view of the map
        for name, kind in (("ids", "I64"), ("eight", "F8_E4M3")):
            with pytest.raises(Unsupported, match=f"{path}: tensor '{name}' holds {kind}"):
                file.tensor(name)
    np.testing.assert_array_equal(layout.dequantize(), np.zeros((0, 3)))  # layouts outlive the file


def test_released_pages_are_read_again(tmp_path: Path):
    data = np.random.default_rng(1).standard_normal(1 << 20).astype(np.float32)
    file = open_bytes(tmp_path, build({"w": entry("F32", [1 << 10, 1 << 10], 0, data.nbytes)}, data.tobytes()))
    layout = file.tensor("w")
    before = layout.dequantize().sum()
    file.release("w")
    assert layout.dequantize().sum() == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps")
def test_release_gives_memory_back(tmp_path: Path):
    size = 16 << 20
    file = open_bytes(tmp_path, build({"w": entry("F32", [size // 4], 0, size)}, bytes(size)))

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text().split("m.safetensors", 1)[1]
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss:")) << 10

    file.tensor("w").dequantize()
    assert resident() > size // 2
    file.release("w")
    assert resident() < size // 8


BAD: dict[str, tuple[bytes, str]] = {
    "seven bytes": (b"1234567", "has 7 bytes"),
    "header beyond the file": (struct.pack("<Q", 100) + b"{}", r"ends at byte 108, the file at 10"),
    "absurd header": (struct.pack("<Q", 2**63) + b"{}", "a header of 9223372036854775808 bytes"),
    "over the limit": (struct.pack("<Q", 100_000_001) + b"{}", "at most 100000000"),
    "not JSON": (struct.pack("<Q", 4) + b"{abc", "not JSON"),
    "not an object": (struct.pack("<Q", 2) + b"[]", r"begins with b'\[\]'"),
    "not UTF-8": (struct.pack("<Q", 4) + b'{"\xff"', "not JSON"),
    "deep": (struct.pack("<Q", 200_000) + b'{"a":' + b"[" * 199_995, "not JSON"),
    "twice": (struct.pack("<Q", 12) + b'{"a":1,"a":2' + b"}", "not JSON"),
    "twice, whole": (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "has 'a' twice"),
    "no dtype": (build({"w": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "tensor 'w' is not described"),
    "unknown dtype": (build({"w": entry("F31", [1], 0, 4)}, bytes(4)), "tensor 'w' has the dtype 'F31'"),
    "negative": (build({"w": entry("F32", [-1], 0, 4)}, bytes(4)), "tensor 'w' has the shape"),
    "boolean": (build({"w": entry("F32", [True], 0, 4)}, bytes(4)), "tensor 'w' has the shape"),
    "many axes": (build({"w": entry("F32", [1] * 9, 0, 4)}, bytes(4)), "at most 8 numbers"),
    "backwards": (build({"w": entry("F32", [1], 4, 0)}, bytes(4)), r"data_offsets \[4, 0\]"),
    "wrong size": (build({"w": entry("F32", [3], 0, 8)}, bytes(8)), "has 8 bytes, but 3 numbers of F32 take 12"),
    "overflow": (build({"w": entry("F32", [2**61, 2**61], 0, 4)}, bytes(4)), "tensor 'w' has 4 bytes, but"),
    "overlap": (
        build({"w": entry("F32", [2], 0, 8), "x": entry("F32", [1], 4, 8)}, bytes(8)),
        r"tensor 'x' begins at byte \d+, but tensor 'w' goes on to \d+: they overlap",
    ),
    "a gap": (
        build({"w": entry("F32", [1], 0, 4), "x": entry("F32", [1], 8, 12)}, bytes(12)),
        "before tensor 'x', belong to no tensor",
    ),
    "cut short": (build({"w": entry("F32", [4], 0, 16)}, bytes(12)), r"cut short: tensor 'w' is bytes \d+ to \d+, the"),
    "beyond the file": (build({"w": entry("F32", [1 << 40], 0, 4 << 40)}, bytes(12)), "cut short: tensor 'w'"),
    "more than tensors": (build({"w": entry("F32", [1], 0, 4)}, bytes(5)), "the file goes on to"),
    "metadata": (build({"__metadata__": 3}, b""), "__metadata__"),
    "a long name": (build({"w" * 513: entry("F32", [1], 0, 4)}, bytes(4)), "a name of 513 characters"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told(name: str, tmp_path: Path):
    data, why = BAD[name]
    with pytest.raises(BadModelFile, match=why) as caught:
        open_bytes(tmp_path, data)
    assert "m.safetensors" in caught.value.message


def test_the_package_refuses_what_we_refuse(tmp_path: Path):
    """Our rules are the format's: of these files its own implementation reads none either."""
    package = pytest.importorskip("safetensors", reason="needs the test extra")
    lenient = {"boolean", "many axes", "a long name", "twice, whole"}
    for name, (data, _) in BAD.items():
        path = tmp_path / "m.safetensors"
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        if name in lenient:
            continue
        with pytest.raises(Exception), package.safe_open(path, "np") as file:  # noqa: B017
            for key in file.keys():  # noqa: SIM118
                file.get_tensor(key)


def test_no_file_and_no_regular_file(tmp_path: Path):
    with pytest.raises(NotFound, match="no file"):
        Safetensors.open(tmp_path / "absent.safetensors")
    with pytest.raises(BadModelFile, match="is a directory"):
        Safetensors.open(tmp_path)


def test_mutated_files_open_whole_or_are_refused(tmp_path: Path):
    runs = 6000
    before = kit.peak()
    outcomes = fuzzer.fuzz(range(runs), seed=2026, folder=tmp_path)
    assert outcomes["read"] + outcomes["refused"] == runs
    # A fuzzer whose mutants all die, or all live, tests nothing.
    for how in ("flip", "splice", "json"):
        assert outcomes[f"{how} read"] > 0 and outcomes[f"{how} refused"] > 0, (how, outcomes)
    assert outcomes["truncate refused"] > 100 and outcomes["data refused"] > 100
    grown = kit.peak() - before
    assert grown < 64 << 20


def test_a_run_is_decided_by_its_seed_and_number():
    assert fuzzer.mutant(kit.random_of(3, 17)) == fuzzer.mutant(kit.random_of(3, 17))
    assert len({fuzzer.mutant(kit.random_of(3, n))[1] for n in range(100)}) > 90


def test_the_sample_itself_is_whole(tmp_path: Path):
    entries, data = fuzzer.sample()
    with open_bytes(tmp_path, build(entries, data)) as file:
        assert list(file.tensors) == [n for n in json.loads(json.dumps(entries)) if n != "__metadata__"]
        assert file.tensor("scalar").shape == ()
