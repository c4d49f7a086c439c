"""The fingerprint of a real engine: the same in every process, and another one for everything that changes a number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cache.events import Removed, Stored
from quire.cache.keys import Keys
from quire.config import EngineConfig, Environment
from quire.engine.construction import fingerprint
from quire.engine.construction.build import build_engine
from quire.engine.engine import Engine
from quire.engine.types import Request
from quire.runner.params import SamplingParams

pytest.importorskip("torch", reason="needs the test extra: torch makes the model")
pytest.importorskip("gguf", reason="needs gguf, which writes the model")

from tests.unit.models import families, folders, tiny

TOKENS = list(range(3, 83))


class Heard:
    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def stored(self, event: Stored) -> None:
        self.keys.append(event.key)

    def removed(self, event: Removed) -> None:
        raise AssertionError(event)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    families.write_gguf("mistral, window", families.build("mistral, window"), path / "m.gguf")
    folders.save(tiny.build(num_hidden_layers=2), path / "folder")
    folders.save(tiny.build(seed=1, num_hidden_layers=2), path / "other")
    return path


def build(path: Path, home: Path, **settings: Any) -> Engine:
    config = EngineConfig(path=str(path), **{"backend": "native", "max_seqs": 2, "max_batch_tokens": 32, **settings})
    return build_engine(config, Environment(home=home, threads=1))[0]


def keys_of(engine: Engine, namespace: str = "t") -> list[bytes]:
    """What a listener hears of a request for TOKENS."""
    heard = Heard()
    assert engine.pages is not None
    engine.pages.listen(heard)
    weights: Any = engine.pages._names
    weights = weights._weights
    if not isinstance(weights, str):
        weights.join()
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine.add(Request(id="r", tokens=TOKENS, sampling=sampling, namespace=namespace))
    while engine.busy:
        assert all(event.error is None for event in engine.step())
    engine.close()
    return heard.keys


def served(path: Path, home: Path, **settings: Any) -> list[bytes]:
    return keys_of(build(path, home, **settings))


SAME = [
    {},
    {"max_seqs": 3, "max_batch_tokens": 64},
    {"context": 128},
    {"kv_memory": 1 << 22},
    {"depth": 1},
    {"speculate": "ngram"},
    {"isa": "scalar", "kv_dtype": "f16"},
]


def test_what_changes_no_number_changes_no_key(models: Path, tmp_path: Path) -> None:
    """Sizes, overlap, drafts and the kernel set. The pages that a prompt leaves differ in number only where the window lets go."""
    found = [set(served(models / "folder", tmp_path, kv_dtype="f16"))]
    found += [set(served(models / "folder", tmp_path, **{"kv_dtype": "f16", **settings})) for settings in SAME[1:]]
    assert len(found[0]) == 5 and all(keys == found[0] for keys in found)


OTHER = [
    {},
    {"kv_dtype": "int8"},
    {"kv_dtype": "int16"},
    {"backend": "reference"},
    {"backend": "torch", "device": "cpu", "dtype": "float32"},
    {"backend": "torch", "device": "cpu", "dtype": "bfloat16"},
    {"backend": "torch", "device": "cpu", "dtype": "float32", "quantize": "int8"},
]


def test_what_changes_numbers_changes_every_key(models: Path, tmp_path: Path) -> None:
    runs = [served(models / "folder", tmp_path, **{"kv_dtype": "f16", **s}) for s in OTHER]
    runs += [served(models / name, tmp_path, kv_dtype="f16") for name in ("other", "m.gguf")]
    runs += [served(models / "folder", tmp_path / "another secret", kv_dtype="f16")]
    runs += [keys_of(build(models / "folder", tmp_path, kv_dtype="f16"), "other namespace")]
    every = [key for keys in runs for key in set(keys)]
    assert all(runs) and len(set(every)) == len(every)


def test_the_default_namespace_is_the_same_on_every_machine(models: Path, tmp_path: Path) -> None:
    one, two = (keys_of(build(models / "folder", tmp_path / home), "") for home in ("1", "2"))
    assert one == two and len(one) == 5
    assert not (tmp_path / "1" / "namespace-secret").exists()


def test_another_process_gives_the_same_keys(models: Path, tmp_path: Path) -> None:
    ours = served(models / "m.gguf", tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.unit.engine.construction.test_fingerprint import served\n"
        "print(*(key.hex() for key in served(Path(sys.argv[1]), Path(sys.argv[2]))))"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(models / "m.gguf"), str(tmp_path)],
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert said.split() == [key.hex() for key in ours] and ours


def test_a_start_finds_nothing_out(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("an engine that nobody listens to looked for its weights' digest")

    monkeypatch.setattr(fingerprint.Naming, "start", never)
    monkeypatch.setattr(Keys, "key", never)
    engine = build(models / "folder", tmp_path)
    engine.add(Request(id="r", tokens=TOKENS, sampling=SamplingParams(max_tokens=2), namespace="t"))
    while engine.busy:
        engine.step()
    engine.close()
    assert not (tmp_path / "namespace-secret").exists() and not (tmp_path / "digests.json").exists()


def test_pages_get_keys_once_the_weights_are_known(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on meanwhile, and then everything that is cached is told."""
    import threading

    from quire.weights.store.digests import WeightsDigest

    go, real = threading.Event(), WeightsDigest._read

    def slow(self: WeightsDigest, path: Path, identity: str) -> str | None:
        go.wait()
        return real(self, path, identity)

    monkeypatch.setattr(WeightsDigest, "_read", slow)
    engine, heard = build(models / "folder", tmp_path), Heard()
    assert engine.pages is not None
    engine.pages.listen(heard)
    names: Any = engine.pages._names
    sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for name in "ab":
        engine.add(Request(id=name, tokens=TOKENS, sampling=sampling, namespace="t"))
        while engine.busy:
            engine.step()
        if name == "a":
            assert not heard.keys
            go.set()
            names._weights.join()
    engine.close()
    assert heard.keys == served(models / "folder", tmp_path)


def test_random_weights_are_named_by_their_shape(tmp_path: Path) -> None:
    shape = {"model_type": "llama", "hidden_size": 64}
    for name, changes in (("a", {}), ("b", {}), ("c", {"hidden_size": 128})):
        (tmp_path / f"{name}.json").write_text(json.dumps({**shape, **changes}))
    a, b, c = (fingerprint.random_weights(str(tmp_path / f"{name}.json")) for name in "abc")
    assert a == b != c and a != fingerprint.random_weights("shape:llama-3.2-1b")


def test_a_context_counts_where_positions_are_turned_by_it() -> None:
    configs = [EngineConfig(path="m", context=context) for context in (None, 4096, 8192)]
    assert len({str(fingerprint.settings(config, False)) for config in configs}) == 1
    assert len({str(fingerprint.settings(config, True)) for config in configs}) == 3
    modes = [EngineConfig(path="m", deterministic=on, quantize=how) for on in (False, True) for how in ("none", "fp8")]
    assert len({str(fingerprint.settings(config, False)) for config in modes}) == 4
