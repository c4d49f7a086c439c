"""Folders: shards and their index agree, pickles are refused, and what `show` tells is what is there."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.observe.errors import BadModelFile, NotFound, QuireError, Unsupported
from quire.weights.checkpoint import open_checkpoint, weight_bytes
from quire.weights.folder import INDEX, Folder, describe
from tests.fuzz.kit import stir
from tests.fuzz.safetensors import build

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 4, "hidden_size": 8, "num_attention_heads": 1}


def shard(path: Path, **tensors: list[float]) -> None:
    entries: dict[str, Any] = {}
    data = b""
    for name, values in tensors.items():
        more = np.array(values, "<f4").tobytes()
        entries[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    path.write_bytes(build(entries, data))


def made(path: Path, weight_map: dict[str, str] | None) -> Folder:
    (path / "config.json").write_text(json.dumps(CONFIG))
    if weight_map is not None:
        (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return Folder.open(path)


def test_tensors_come_from_their_shards(tmp_path: Path):
    shard(tmp_path / "a.safetensors", x=[1.0, 2.0], y=[3.0])
    shard(tmp_path / "b.safetensors", z=[4.0])
    folder = made(tmp_path, {"x": "a.safetensors", "z": "b.safetensors", "y": "a.safetensors"})
    assert [folder.tensor(n).dequantize().tolist() for n in "xyz"] == [[1.0, 2.0], [3.0], [4.0]]
    assert weight_bytes(folder) == 16 and folder.file_of("z").endswith("b.safetensors")
    folder.release("z")
    assert folder.tensor("z").dequantize().tolist() == [4.0]
    told = describe(folder)
    assert (told["tensors"], told["shards"], told["types"], told["parameters"]) == (3, 2, {"F32": 16}, 4)
    assert told["name"] == tmp_path.name and told["tokenizer"] is None and told["chat_template"] is False
    folder.close()


def test_one_file_by_any_name(tmp_path: Path):
    shard(tmp_path / "consolidated.safetensors", x=[1.0])
    assert made(tmp_path, None).tensor("x").shape == (1,)
    shard(tmp_path / "other.safetensors", x=[1.0])
    with pytest.raises(BadModelFile, match=r"2 safetensors files and no model.safetensors.index.json"):
        _ = made(tmp_path, None).tensors
    shard(tmp_path / "model.safetensors", y=[1.0])
    assert list(made(tmp_path, None).tensors) == ["y"]


@pytest.mark.parametrize(
    ("weight_map", "why"),
    [
        (
            {"x": "a.safetensors", "y": "a.safetensors", "z": "c.safetensors"},
            "the shard c.safetensors is missing.* 1 tens",
        ),
        (
            {"x": "a.safetensors", "y": "a.safetensors", "q": "b.safetensors", "z": "b.safetensors"},
            r"b.safetensors: .*'q'",
        ),
        ({"x": "a.safetensors", "z": "b.safetensors"}, r"a.safetensors holds tensor 'y', but .* does not name"),
        (
            {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"},
            r"b.safetensors: .* holds tensor 'x': it does",
        ),
        ({"x": "../a.safetensors"}, "which is no file here"),
        ({"x": "/etc/passwd"}, "which is no file here"),
        ({"x": "a.bin"}, "which is no file here"),
        ({"x": 3}, "which is no file here"),
        ({}, "names 0 files"),
    ],
)
def test_an_index_that_lies_is_refused(weight_map: dict[str, Any], why: str, tmp_path: Path):
    shard(tmp_path / "a.safetensors", x=[1.0, 2.0], y=[3.0])
    shard(tmp_path / "b.safetensors", z=[4.0])
    with pytest.raises(BadModelFile, match=why):
        _ = made(tmp_path, weight_map).tensors


def test_a_truncated_shard_names_itself(tmp_path: Path):
    shard(tmp_path / "a.safetensors", x=[1.0, 2.0])
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(data[:-4])
    with pytest.raises(BadModelFile, match=r"a.safetensors is cut short: tensor 'x' is bytes"):
        _ = made(tmp_path, {"x": "a.safetensors"}).tensors


def test_pickles_are_refused_with_the_way_out(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(Unsupported, match=r"pytorch_model.bin is a pickled checkpoint.*save_pretrained"):
        _ = made(tmp_path, None).tensors
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(NotFound, match="no weights"):
        _ = made(tmp_path, None).tensors


def test_folders_that_are_none(tmp_path: Path):
    with pytest.raises(NotFound, match=r"no config.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(NotFound, match="no file"):
        open_checkpoint(tmp_path / "absent")
    for text, why in (
        ("{", "not JSON"),
        ("[1]", "an object is needed"),
        ("\xff", "not JSON"),
        ("[" * 100_000, "not JSON"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadModelFile, match=why):
            open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadModelFile, match="byte 0 is not UTF-8"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (17 << 20))
    with pytest.raises(BadModelFile, match="more than"):
        open_checkpoint(tmp_path)


def test_names_of_snapshots(tmp_path: Path):
    path = tmp_path / "models--org--some-repo" / "snapshots" / "0123"
    path.mkdir(parents=True)
    assert made(path, None).name == "org/some-repo"


def test_mutated_configurations_load_or_are_refused(tmp_path: Path):
    """No crash, no hang, no unbounded memory: a model, or an error that names a file or a tensor."""
    pytest.importorskip("transformers", reason="needs the test extra")
    from tests.unit.models import folders

    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
    folders.save(folders.build("llama", rope_parameters=rope, num_hidden_layers=1), tmp_path, shard="60KB")
    originals = {name: json.loads((tmp_path / name).read_text()) for name in ("config.json", INDEX)}
    outcomes = {"loaded": 0, "refused": 0}
    for number in range(600):
        rng = random.Random(f"7:{number}")
        name = rng.choice(["config.json", "config.json", INDEX])
        values = originals[name]
        for _ in range(rng.choice((1, 1, 2, 4))):
            values = stir(values, rng) if isinstance(values, dict) else values
        (tmp_path / name).write_text(json.dumps(values))
        try:
            checkpoint = open_checkpoint(tmp_path)
            model = models.load(checkpoint)
            assert model.config.vocab_size == 160 and 0 < model.config.context <= 1 << 26
            assert isinstance(checkpoint, Folder)
            describe(checkpoint)
            outcomes["loaded"] += 1
        except QuireError as e:
            said = str(e)
            assert str(tmp_path) in said or "architecture" in said, f"run {number}: {said}"
            said.encode()
            outcomes["refused"] += 1
        (tmp_path / name).write_text(json.dumps(originals[name]))
    assert outcomes["loaded"] > 50 and outcomes["refused"] > 50, outcomes
