"""Whole repositories of the hub, pulled from a local server into the hub's own cache layout."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
from pathlib import Path

import pytest

from quire.config import Environment
from quire.observe.errors import BadModelFile, DownloadFailed, NotFound, QuireError, Unsupported
from quire.weights.checkpoint import Opened
from quire.weights.download import hub_cache, parallel
from quire.weights.download.web import Http
from quire.weights.sources.hf import HubTarget
from quire.weights.store import catalogue
from quire.weights.store.catalogue import Entry
from quire.weights.store.store import Store

from .conftest import Recorder
from .origin import Body, Fault, Origin, Seen

COMMIT = "c0ffee" + "0" * 34
CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode()
SHARDS = {f"model-0000{i}-of-00003.safetensors": random.Random(i).randbytes(200_000 + i) for i in (1, 2, 3)}
INDEX = json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(SHARDS)}}).encode()
SHARDED = {"config.json": CONFIG, "tokenizer.json": b"{}", "model.safetensors.index.json": INDEX, **SHARDS}
UNWANTED = {
    "README.md": b"# hello",
    "pytorch_model.bin": b"\x80\x04pickle",
    "original/consolidated.00.pth": b"x",
    "onnx/model.onnx": b"x",
    "model-fp32.safetensors": b"other weights",
    "modeling_custom.py": b"raise SystemExit",
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """A repository on the local server, as the hub's interface shows it."""

    def __init__(self, origin: Origin, files: dict[str, bytes], commit: str = COMMIT, revision: str = "main"):
        self.origin, self.files, self.commit = origin, dict(files), commit
        self.api = f"/api/models/org/repo/revision/{revision}?blobs=true"
        origin.routes[self.api] = self.describe
        for path, data in files.items():
            origin.files[self.path(path)] = Body(data)

    def path(self, name: str) -> str:
        return f"/org/repo/resolve/{self.commit}/{name}"

    def entry(self, name: str, data: bytes) -> dict[str, object]:
        if name.endswith((".safetensors", ".bin", ".pth")):
            large = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            return {"rfilename": name, "size": len(data), "blobId": "f" * 40, "lfs": large}
        return {"rfilename": name, "size": len(data), "blobId": git(data)}

    def describe(self, seen: Seen) -> tuple[int, dict[str, str], bytes]:
        listed = [self.entry(n, d) for n, d in self.files.items()]
        return 200, {"Content-Type": "application/json"}, json.dumps({"sha": self.commit, "siblings": listed}).encode()

    def fetched(self) -> list[str]:
        prefix = self.path("")
        return sorted({s.path.removeprefix(prefix) for s in self.origin.seen if s.path.startswith(prefix)})


@pytest.fixture
def store(origin: Origin, tmp_environment: Environment, http: Http, tmp_path: Path) -> Store:
    env = dataclasses.replace(
        tmp_environment, hf_endpoint=origin.url, hf_token="hf_secret", hf_cache=tmp_path / "hub" / "cache"
    )
    return Store(env, http)


def folder(store: Store) -> Path:
    assert store.env.hf_cache is not None
    return store.env.hf_cache / "models--org--repo"


def test_a_sharded_repository_arrives_in_the_hubs_own_layout(store: Store, origin: Origin, recorder: Recorder):
    hub = Hub(origin, SHARDED | UNWANTED)
    snapshot = store.pull("hf:org/repo", recorder)
    assert snapshot == folder(store) / "snapshots" / COMMIT
    assert {p.name for p in snapshot.iterdir()} == set(SHARDED)
    assert hub.fetched() == sorted(SHARDED)  # nothing else was asked for
    for name, data in SHARDED.items():
        link = snapshot / name
        assert link.is_symlink() and not os.path.isabs(os.readlink(link)) and link.read_bytes() == data
        assert link.resolve().name == (sha256(data) if name in SHARDS else git(data))
    assert (folder(store) / "refs" / "main").read_text() == COMMIT
    assert {p.name for p in (folder(store) / "blobs").iterdir()} == {p.resolve().name for p in snapshot.iterdir()}
    assert store.resolve("hf:org/repo") == snapshot == store.resolve(f"hf:org/repo@{COMMIT}")
    assert recorder.said(f"main is commit {COMMIT[:12]}") and recorder.advanced == sum(map(len, SHARDED.values()))
    asked = len(origin.seen)
    assert store.pull("hf:org/repo", recorder) == snapshot and len(origin.seen) == asked  # from then on, no network
    assert all(s.headers["authorization"] == "Bearer hf_secret" for s in origin.seen)


def test_the_hubs_own_tools_find_it(store: Store, origin: Origin):
    hub_tools = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub: the test extra")
    Hub(origin, SHARDED)
    snapshot = store.pull("hf:org/repo")
    assert hub_tools.snapshot_download("org/repo", cache_dir=store.env.hf_cache, local_files_only=True) == str(snapshot)
    found = hub_tools.try_to_load_from_cache("org/repo", "config.json", cache_dir=store.env.hf_cache)
    assert found == str(snapshot / "config.json")
    scanned = hub_tools.scan_cache_dir(store.env.hf_cache)
    assert [r.repo_id for r in scanned.repos] == ["org/repo"] and not scanned.warnings


def test_one_weight_file_a_subfolder_and_a_tag(store: Store, origin: Origin):
    files = {"config.json": CONFIG, "model.safetensors": b"w" * 1000, "1_Pooling/config.json": b'{"p": 1}'}
    Hub(origin, files | {"2_Dense/pytorch_model.bin": b"x"}, revision="v1%2F2")
    snapshot = store.pull("hf:org/repo@v1/2")
    assert (snapshot / "1_Pooling" / "config.json").read_bytes() == b'{"p": 1}'
    assert (folder(store) / "refs" / "v1" / "2").read_text() == COMMIT
    assert not (snapshot / "2_Dense").exists()


def test_an_architecture_is_refused_before_its_weights_come(store: Store, origin: Origin):
    asked: list[str] = []

    def refuse(checkpoint: Opened) -> None:
        asked.append(checkpoint.architecture)
        raise Unsupported(f"the architecture {checkpoint.architecture} is not supported ({checkpoint.path})")

    hub = Hub(origin, SHARDED)
    choosy = Store(store.env, store.http, accepts=refuse)
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM is not supported \(hf:org/repo\)"):
        choosy.pull("hf:org/repo")
    assert asked == ["LlamaForCausalLM"] and hub.fetched() == ["config.json"]
    with pytest.raises(NotFound):  # a configuration alone is no model
        choosy.resolve("hf:org/repo")


def test_what_the_cli_accepts_is_what_there_is_a_family_for(store: Store, origin: Origin):
    from quire.cli.pull import supported

    hub = Hub(origin, SHARDED | {"config.json": b'{"architectures": ["MambaForCausalLM"]}'})
    with pytest.raises(Unsupported, match=r"MambaForCausalLM.*supported: .*LlamaForCausalLM"):
        Store(store.env, store.http, accepts=supported).pull("hf:org/repo")
    assert hub.fetched() == ["config.json"]
    Hub(origin, SHARDED)
    assert Store(store.env, store.http, accepts=supported).pull("hf:org/repo").is_dir()


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": CONFIG, "pytorch_model.bin": b"x"}, r"only as pickles \(pytorch_model.bin\).*save_pretrained"),
        ({"config.json": CONFIG, "a.safetensors": b"x", "b.safetensors": b"y"}, "2 safetensors files and no"),
        ({"config.json": CONFIG}, "no safetensors file"),
        ({"x-Q4_0.gguf": b"GGUF"}, r"no config.json.*x-Q4_0.gguf"),
    ],
)
def test_what_is_no_model_is_refused_before_anything_comes(
    store: Store, origin: Origin, files: dict[str, bytes], says: str
):
    hub = Hub(origin, files)
    with pytest.raises(Unsupported, match=f"hf:org/repo: .*{says}"):
        store.pull("hf:org/repo")
    assert hub.fetched() == []


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"{", "no index"),
        (b"[]", "no index"),
        (b'{"weight_map": {}}', "names 0 files"),
        (b'{"weight_map": {"a": "../../etc/x.safetensors"}}', "no safetensors file here"),
        (b'{"weight_map": {"a": 3}}', "no safetensors file here"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', "does not have"),
    ],
)
def test_an_index_that_lies(store: Store, origin: Origin, index: bytes, says: str):
    hub = Hub(origin, SHARDED | {"model.safetensors.index.json": index})
    with pytest.raises(BadModelFile, match=says):
        store.pull("hf:org/repo")
    assert not any(name in SHARDS for name in hub.fetched())


def test_names_of_a_repository_cannot_leave_the_snapshot(store: Store, origin: Origin, tmp_path: Path):
    evil = {"../../../evil.json": b"x", "/etc/x.json": b"x", "a/../../config.json": b"x"}
    Hub(origin, SHARDED | evil)
    store.pull("hf:org/repo")
    assert not list(tmp_path.rglob("evil.json"))


def test_large_files_come_by_redirect_without_the_token(store: Store, origin: Origin):
    cdn = Origin()
    try:
        hub = Hub(origin, SHARDED)
        for name, data in SHARDS.items():
            cdn.files[f"/{sha256(data)}"] = Body(data)
            del origin.files[hub.path(name)]
            place = f"{cdn.url}/{sha256(data)}"
            origin.routes[hub.path(name)] = lambda s, place=place: (302, {"Location": place}, b"")
        assert store.pull("hf:org/repo").is_dir()
        assert len(cdn.seen) == 3 and all("authorization" not in s.headers for s in cdn.seen)
    finally:
        cdn.close()


@pytest.mark.parametrize(("name", "kind"), [(next(iter(SHARDS)), "sha256"), ("tokenizer.json", "git id")])
def test_wrong_bytes_are_refused(store: Store, origin: Origin, name: str, kind: str):
    hub = Hub(origin, SHARDED)
    origin.files[hub.path(name)] = Body(bytes(len(SHARDED[name])))
    with pytest.raises(DownloadFailed, match=f"does not verify: its {kind} is"):
        store.pull("hf:org/repo")
    with pytest.raises(NotFound):
        store.resolve("hf:org/repo")
    origin.files[hub.path(name)] = Body(SHARDED[name])
    assert (store.pull("hf:org/repo") / name).read_bytes() == SHARDED[name]


def test_a_size_that_is_not_the_promised_one(store: Store, origin: Origin):
    hub = Hub(origin, SHARDED)
    shard = next(iter(SHARDS))
    origin.files[hub.path(shard)] = Body(SHARDS[shard] + b"more")
    with pytest.raises(DownloadFailed, match=r"200,005 bytes where 200,001 were promised"):
        store.pull("hf:org/repo")


def test_a_truncated_file_is_resumed(store: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel, "THREADS", 1)
    hub = Hub(origin, SHARDED)
    whole = origin.send

    def cut(h, status, headers, data, drop):
        first = h.path.endswith("00002-of-00003.safetensors") and "Range" not in h.headers
        whole(h, status, headers, data, 50_000 if first else drop)

    origin.send = cut
    store.pull("hf:org/repo")
    path = hub.path("model-00002-of-00003.safetensors")
    assert [s.headers.get("range") for s in origin.gets(path)] == [None, "bytes=50000-"]


def test_an_interrupted_pull_says_what_is_kept_and_continues(store: Store, origin: Origin):
    class Interrupt(Recorder):
        def advance(self, n: int) -> None:
            super().advance(n)
            if self.advanced > 250_000 and not self.said("enough"):
                self.note("enough")
                raise KeyboardInterrupt

    hub = Hub(origin, SHARDED)
    progress = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        store.pull("hf:org/repo", progress)
    with pytest.raises(NotFound):
        store.resolve("hf:org/repo")
    before = len([s for s in origin.seen if s.path == hub.path("config.json")])
    again = Recorder()
    snapshot = store.pull("hf:org/repo", again)
    assert all((snapshot / n).read_bytes() == d for n, d in SHARDED.items())
    assert len([s for s in origin.seen if s.path == hub.path("config.json")]) == before  # it was here
    assert again.advanced < sum(map(len, SHARDED.values()))
    assert not list((folder(store) / "blobs").glob("*.part"))


def test_what_the_hubs_tools_left_unfinished_is_finished(store: Store, origin: Origin):
    hub = Hub(origin, SHARDED)
    snapshot = store.pull("hf:org/repo")
    gone = next(iter(SHARDS))
    (snapshot / gone).resolve().unlink()
    (snapshot / gone).unlink()
    with pytest.raises(NotFound, match="quire pull hf:org/repo"):
        store.resolve("hf:org/repo")
    origin.seen.clear()
    assert store.pull("hf:org/repo") == snapshot and (snapshot / gone).read_bytes() == SHARDS[gone]
    assert hub.fetched() == [gone]


def test_force_finds_damage_and_a_moved_branch(store: Store, origin: Origin, recorder: Recorder):
    Hub(origin, SHARDED)
    snapshot = store.pull("hf:org/repo")
    shard = next(iter(SHARDS))
    blob = (snapshot / shard).resolve()
    blob.write_bytes(bytes(len(SHARDS[shard])))
    assert store.pull("hf:org/repo", recorder, force=True) == snapshot
    assert blob.read_bytes() == SHARDS[shard] and recorder.said(f"{shard} is damaged")
    later = "d" * 40
    Hub(origin, SHARDED | {"tokenizer.json": b'{"new": 1}'}, commit=later)
    assert store.pull("hf:org/repo") == snapshot  # what is here is used
    assert store.pull("hf:org/repo", force=True).name == later == (folder(store) / "refs" / "main").read_text()
    assert store.resolve(f"hf:org/repo@{COMMIT}") == snapshot


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository(store: Store, origin: Origin, status: int):
    hub = Hub(origin, SHARDED)
    origin.routes[hub.api] = lambda s: (status, {}, b"")
    with pytest.raises(DownloadFailed, match=f"{status}.*accept the model's terms"):
        store.pull("hf:org/repo")
    anonymous = Store(dataclasses.replace(store.env, hf_token=None), store.http)
    with pytest.raises(DownloadFailed, match="set HF_TOKEN"):
        anonymous.pull("hf:org/repo")


def test_a_repository_or_a_revision_that_is_not_there(store: Store):
    with pytest.raises(NotFound, match=r"404.*check the repository and the revision 'v9'"):
        store.pull("hf:org/repo@v9")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_trouble_is_waited_for(store: Store, origin: Origin, naps: list[float], status: int):
    Hub(origin, SHARDED)
    origin.faults = [Fault(status=status, headers={"Retry-After": "3"})] * 2  # of the first file
    assert store.pull("hf:org/repo").is_dir() and naps[:2] == [3.0, 3.0]
    origin.always = Fault(status=status)
    with pytest.raises(DownloadFailed, match="gave up after 5 tries"):
        Store(dataclasses.replace(store.env, hf_cache=store.env.home / "other"), store.http).pull("hf:org/repo")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"sha": "main", "siblings": []}', b'{"siblings": 3}'])
def test_an_answer_that_is_no_repository(store: Store, origin: Origin, body: bytes):
    hub = Hub(origin, SHARDED)
    origin.routes[hub.api] = lambda s: (200, {}, body)
    with pytest.raises(QuireError, match=r"describe a repository|names no commit"):
        store.pull("hf:org/repo")


def test_two_who_pull_at_once_make_one_download(store: Store, origin: Origin):
    """Each from a store of its own, into one cache: as two processes do."""
    import threading

    hub = Hub(origin, SHARDED)
    others = [Store(dataclasses.replace(store.env, home=store.env.home / str(i)), store.http) for i in range(3)]
    made: list[Path] = []
    threads = [threading.Thread(target=lambda s=s: made.append(s.pull("hf:org/repo"))) for s in others]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    assert len(made) == 3 and len(set(made)) == 1
    assert all((made[0] / n).read_bytes() == d for n, d in SHARDED.items())
    assert all(len(origin.gets(hub.path(name))) == 1 for name in SHARDED)
    assert not list((folder(store) / "blobs").glob("*.part"))


def test_a_mirror_that_tells_no_digests(store: Store, origin: Origin):
    hub = Hub(origin, SHARDED)
    listed = [{"rfilename": name} for name in SHARDED]
    origin.routes[hub.api] = lambda s: (200, {}, json.dumps({"sha": COMMIT, "siblings": listed}).encode())
    snapshot = store.pull("hf:org/repo")
    assert all((snapshot / n).read_bytes() == d for n, d in SHARDED.items())


def test_no_room(store: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    from quire.weights.download import fetch

    Hub(origin, SHARDED)
    monkeypatch.setattr(fetch, "SPARE_DISK", 1 << 60)
    with pytest.raises(DownloadFailed, match="not enough disk space") as caught:
        store.pull("hf:org/repo")
    assert caught.value.code == "disk_full"


def test_remove_keeps_what_another_revision_uses(store: Store, origin: Origin):
    Hub(origin, SHARDED)
    snapshot = store.pull("hf:org/repo")
    later = "d" * 40
    Hub(origin, SHARDED | {"tokenizer.json": b'{"new": 1}'}, commit=later, revision="dev")
    other = store.pull("hf:org/repo@dev")
    assert store.remove("hf:org/repo@dev") == len(b'{"new": 1}') and not other.exists()
    assert all((snapshot / n).read_bytes() == d for n, d in SHARDED.items())
    assert hub_cache.listed(store.env)[0].name == "hf:org/repo"
    assert store.remove("hf:org/repo") == sum(map(len, SHARDED.values())) and not folder(store).exists()
    assert hub_cache.listed(store.env) == []
    with pytest.raises(NotFound):
        store.remove("hf:org/repo")


def test_a_short_name_for_a_repository_checks_its_weights(
    store: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch
):
    weights = b"w" * 5000
    hub = Hub(origin, {"config.json": CONFIG, "model.safetensors": weights})
    entry = Entry("tiny:1m", ("hf:org/repo",), "2" * 64, 5000, "MIT", "for tests", folder=True)
    monkeypatch.setattr(catalogue, "ENTRIES", (entry,))
    with pytest.raises(DownloadFailed, match=f"other weights: sha256 {sha256(weights)}, expected {'2' * 64}"):
        store.pull("tiny:1m")
    assert hub.fetched() == ["config.json"]
    monkeypatch.setattr(catalogue, "ENTRIES", (dataclasses.replace(entry, sha256=sha256(weights)),))
    assert store.pull("tiny:1m") == store.resolve("tiny:1m") == folder(store) / "snapshots" / COMMIT
    monkeypatch.setattr(catalogue, "ENTRIES", (entry,))
    with pytest.raises(NotFound):  # what is in the cache is another version
        store.resolve("tiny:1m")


def test_a_file_in_the_hubs_cache_must_be_the_one_a_short_name_means(
    store: Store, monkeypatch: pytest.MonkeyPatch, origin: Origin
):
    data = b"GGUF" + bytes(1000)
    blob = folder(store) / "blobs" / sha256(data)
    link = folder(store) / "snapshots" / COMMIT / "x.gguf"
    link.parent.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_bytes(data)
    link.symlink_to(blob)
    (folder(store) / "refs").mkdir()
    (folder(store) / "refs" / "main").write_text(COMMIT)
    assert hub_cache.find(HubTarget("org", "repo", "x.gguf"), store.env) == link
    entry = Entry("tiny:1m", ("hf:org/repo/x.gguf",), sha256(data), len(data), "MIT", "for tests")
    monkeypatch.setattr(catalogue, "ENTRIES", (entry,))
    assert store.resolve("tiny:1m") == link
    monkeypatch.setattr(catalogue, "ENTRIES", (dataclasses.replace(entry, sha256="3" * 64),))
    with pytest.raises(NotFound):
        store.resolve("tiny:1m")
