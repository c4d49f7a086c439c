"""The digest of loaded weights: what the store says, or what a thread in the background finds and a file remembers."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

import pytest

from quire.weights.store import digests
from quire.weights.store.digests import FILE, WeightsDigest
from quire.weights.store.home import Home
from quire.weights.store.manifest import File, Manifest, digest_of, encode

CONTENT = b"weights" * 1000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of(home: Path, *paths: Path, folder: Path | None = None) -> WeightsDigest:
    return WeightsDigest([(path, path.stat()) for path in paths], home, folder)


def found(digest: WeightsDigest) -> str | None:
    digest.start()
    digest.join()
    return digest.digest


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that was read whole."""
    seen, real = list[Path](), WeightsDigest._read

    def read(self: WeightsDigest, path: Path, identity: str) -> str | None:
        seen.append(path)
        return real(self, path, identity)

    monkeypatch.setattr(WeightsDigest, "_read", read)
    return seen


def test_a_file_is_read_once_and_remembered(tmp_path: Path, reads: list[Path]) -> None:
    home, model = tmp_path / "home", tmp_path / "m.gguf"
    model.write_bytes(CONTENT)
    first = of(home, model)
    assert first.digest is None and not reads
    assert found(first) == sha256(CONTENT) and reads == [model]
    again = of(home, model)
    again.start()
    assert again.digest == sha256(CONTENT) and len(reads) == 1
    os.link(model, tmp_path / "other-name.gguf")  # which changes its time: it is read again, and nothing else is wrong
    assert found(of(home, tmp_path / "other-name.gguf")) == sha256(CONTENT)


def test_a_file_that_changed_is_read_again(tmp_path: Path, reads: list[Path]) -> None:
    home, model = tmp_path / "home", tmp_path / "m.gguf"
    model.write_bytes(CONTENT)
    found(of(home, model))
    other = CONTENT[:-1] + b"!"
    when = model.stat()
    model.write_bytes(other)
    os.utime(model, ns=(when.st_atime_ns, when.st_mtime_ns))  # the same size, and the same time of change
    assert found(of(home, model)) == sha256(other) and len(reads) == 2


def test_what_the_store_has_is_not_read(tmp_path: Path, reads: list[Path]) -> None:
    place = Home(tmp_path)
    place.prepare()
    blob = place.blob(sha256(CONTENT))
    blob.write_bytes(CONTENT)
    one = of(tmp_path, blob)
    one.start()
    assert one.digest == sha256(CONTENT) and not reads and not (tmp_path / FILE).exists()


def test_a_folder_is_the_same_in_the_store_and_anywhere_else(tmp_path: Path, reads: list[Path]) -> None:
    contents = {"config.json": b"{}", "model.safetensors": CONTENT, "tokenizer.json": b"[]"}
    weights = ["config.json", "model.safetensors"]
    home, place = tmp_path / "home", Home(tmp_path / "home")
    place.prepare()
    files = tuple(File(name, len(data), sha256(data)) for name, data in contents.items())
    whole = digest_of(files)
    tree, elsewhere = place.tree(whole), tmp_path / "elsewhere"
    for folder in (tree, elsewhere):
        folder.mkdir()
        for name, data in contents.items():
            (folder / name).write_bytes(data)
    manifest = Manifest("m", "hf:a/b", f"sha256:{whole}", 1, "2026-01-01", files=files)
    place.manifest("m").write_bytes(encode(manifest))
    stored = of(home, *(tree / name for name in weights), folder=tree)
    stored.start()
    assert stored.digest == digest_of(files[:2]) and not reads
    assert found(of(home, *(elsewhere / name for name in weights), folder=elsewhere)) == stored.digest
    assert len(reads) == 2
    place.manifest("m").unlink()  # nobody knows the folder any more: it is read
    assert found(of(home, *(tree / name for name in weights), folder=tree)) == stored.digest and len(reads) == 4


def test_one_changed_file_of_a_folder_is_another_model(tmp_path: Path, reads: list[Path]) -> None:
    names = ["config.json", "a.safetensors", "b.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    paths = [tmp_path / name for name in names]
    first = found(of(tmp_path, *paths, folder=tmp_path))
    for path in paths:
        path.write_bytes(path.read_bytes() + b"!")
        second = found(of(tmp_path, *paths, folder=tmp_path))
        assert second and second != first
        first = second
    assert len(reads) == 3 + 3  # each once, and each again when it had changed


@pytest.mark.parametrize("how", ["replaced", "written", "gone"])
def test_a_file_that_is_not_the_one_that_was_loaded_has_no_digest(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(CONTENT)
    opened = of(tmp_path / "home", model)
    if how == "written":
        with model.open("r+b") as file:
            file.write(b"other")
        os.utime(model, ns=(1, 1))
    else:
        model.unlink()
    if how == "replaced":
        model.write_bytes(CONTENT)
    assert found(opened) is None and opened.failed
    assert len(caplog.records) == 1 and "get no keys" in caplog.records[0].getMessage()
    assert not (tmp_path / "home" / FILE).exists()


def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(CONTENT)
    opened, real = of(tmp_path / "home", model), digests.hashlib.sha256

    class Meddling:
        def __init__(self) -> None:
            self.made = real()

        def update(self, data: bytes) -> None:
            self.made.update(data)
            model.write_bytes(CONTENT * 2)

        def hexdigest(self) -> str:
            return self.made.hexdigest()

    monkeypatch.setattr(digests.hashlib, "sha256", Meddling)
    assert found(opened) is None and "changed while" in opened.failed


@pytest.mark.parametrize("text", ["", "[]", '{"a": 3, "b": "zz"}', "[" * 100_000, "\0"])
def test_a_broken_memory_is_written_anew(text: str, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(CONTENT)
    (tmp_path / FILE).write_text(text)
    assert found(of(tmp_path, model)) == sha256(CONTENT)
    assert list(json.loads((tmp_path / FILE).read_text()).values()) == [sha256(CONTENT)]


def test_the_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "KEEP", 3)
    for i in range(5):
        (tmp_path / f"{i}.gguf").write_bytes(b"%d" % i)
        found(of(tmp_path, tmp_path / f"{i}.gguf"))
    assert list(json.loads((tmp_path / FILE).read_text()).values()) == [sha256(b"%d" % i) for i in (2, 3, 4)]


def test_a_memory_that_cannot_be_kept_costs_the_next_reading(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    model = tmp_path / "m.gguf"
    model.write_bytes(CONTENT)
    with caplog.at_level(logging.WARNING):
        assert found(of(tmp_path / "file", model)) == sha256(CONTENT)
    assert not caplog.records


def test_closing_stops_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(CONTENT)
    one = of(tmp_path / "home", model)
    one._stop.set()
    one.start()
    one.close()
    assert one.digest is None and not one.failed and not (tmp_path / "home" / FILE).exists()
