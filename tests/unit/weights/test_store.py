"""The store's bookkeeping: names that cannot escape, shared blobs, damage, and two pulls at once."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from quire.config import Environment
from quire.observe.errors import BadModelFile, BadRequest, DownloadFailed, NotFound, QuireError
from quire.weights.store import catalogue
from quire.weights.store.catalogue import Entry
from quire.weights.store.store import Manifest, Store

from .conftest import Recorder
from .origin import Body, Fault, Origin

MODEL = b"GGUF" + random.Random(3).randbytes(900_000)
SHA = hashlib.sha256(MODEL).hexdigest()
ROOT = Path(__file__).resolve().parents[3]

PULL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background is born ignoring it
from pathlib import Path
from quire.config import Environment
from quire.weights.store.store import Store
class Say:
    def start(self, total, label, done=0): print("start", done, flush=True)
    def advance(self, n): print("advance", n, flush=True)
    def finish(self): pass
    def note(self, text): print("note", text, flush=True)
print("path", Store(Environment(home=Path(sys.argv[1]))).pull(sys.argv[2], Say()), flush=True)
"""


def start_pull(store: Store, name: str) -> subprocess.Popen[str]:
    args = [sys.executable, "-c", PULL, str(store.home), name]
    return subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def name(origin: Origin) -> str:
    origin.files["/m.gguf"] = Body(MODEL)
    return origin.url + "/m.gguf"


# Two at once, and a sudden death


def test_two_processes_make_one_download(store: Store, origin: Origin, name: str):
    gate = threading.Event()
    origin.faults = [Fault(pause=gate)]
    first = start_pull(store, name)
    while not origin.seen:
        time.sleep(0.01)
    second = start_pull(store, name)
    said = second.stdout.readline() if second.stdout else ""
    assert "another pull of" in said and "waiting" in said
    gate.set()
    outs = [first.communicate(timeout=30)[0], second.communicate(timeout=30)[0]]
    assert first.returncode == second.returncode == 0
    assert len(origin.gets("/m.gguf")) == 1
    paths = {line for out in outs for line in out.splitlines() if line.startswith("path ")}
    assert paths == {f"path {store.home}/blobs/sha256-{SHA}"}


def test_two_threads_make_one_download(store: Store, origin: Origin, name: str):
    gate = threading.Event()
    origin.faults = [Fault(pause=gate)]
    recorders = [Recorder(), Recorder()]
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda r=r: paths.append(store.pull(name, r))) for r in recorders]
    for t in threads:
        t.start()
    while not any(r.said("waiting for it") for r in recorders):
        time.sleep(0.01)
    gate.set()
    for t in threads:
        t.join(30)
    assert len(paths) == 2 and paths[0] == paths[1] and paths[0].read_bytes() == MODEL
    assert len(origin.gets("/m.gguf")) == 1


def test_kill_9_in_the_middle_then_resume(store: Store, origin: Origin, name: str, recorder: Recorder):
    gate = threading.Event()
    half = len(MODEL) // 2
    # half of the body, then silence: the client is killed while it waits for more
    original = origin.send

    def stall(h, status, headers, data, drop):
        if origin.seen[-1].headers.get("range") is None and not gate.is_set():
            original(h, status, headers, data, half)
            h.wfile.flush()
            gate.wait(30)
        else:
            original(h, status, headers, data, drop)

    origin.send = stall
    child = start_pull(store, name)
    got = 0
    while got < half and child.stdout:
        line = child.stdout.readline().split()
        got += int(line[1]) if line[0] == "advance" else 0
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    gate.set()
    assert store.list() == [] and [p.suffix for p in (store.home / "partial").iterdir()].count(".part") == 1
    assert store.pull(name, recorder).read_bytes() == MODEL
    assert origin.seen[-1].headers["range"] == f"bytes={half}-"
    assert recorder.said("continuing after")
    assert not list((store.home / "partial").iterdir())


def test_kill_9_of_the_holder_lets_the_waiter_go_on(store: Store, origin: Origin, name: str):
    gate = threading.Event()
    origin.faults = [Fault(pause=gate)]
    first = start_pull(store, name)
    while not origin.seen:
        time.sleep(0.01)
    second = start_pull(store, name)
    assert second.stdout and "waiting" in second.stdout.readline()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    out = second.communicate(timeout=30)[0]
    gate.set()
    assert second.returncode == 0 and f"sha256-{SHA}" in out


def test_sigint_says_how_to_resume(store: Store, origin: Origin, name: str):
    gate = threading.Event()
    origin.faults = [Fault(drop_after=100_000), Fault(pause=gate)]
    args = [sys.executable, "-c", PULL, str(store.home), name]
    child = subprocess.Popen(args, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(origin.seen) < 2:  # it has 100,000 bytes and waits for the rest
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    gate.set()
    assert "KeyboardInterrupt" in err and "100.0 kB kept" in out and f"`quire pull {name}` continues" in out


# Names


@pytest.mark.parametrize(
    "hostile",
    [
        "../../etc/passwd",
        "..",
        "/etc/passwd",
        "hf:../../x/y.gguf",
        "hf:a/b/../../../x.gguf",
        "pypi:a==1/../../x.gguf",
        "pypi:a==1//etc/x.gguf",
        "smollm2:../x",
        "smollm2:135m/../../x",
        "..:..",
        "a\x00b",
        "a\nb",
        "",
        "   ",
        "x" * 5000,
        "file:../../etc/passwd",
        "http://",
        "http:///x.gguf",
        "https://[::1/x.gguf",
        "https://h:port/x.gguf",
        "sha256-" + "0" * 64,
        "~nobody-at-all/x.gguf",
        "s3:bucket/x.gguf",
        ":",
        "ollama:x",
    ],
)
def test_no_name_reads_outside_the_store(store: Store, hostile: str):
    for action in (lambda: store.resolve(hostile, paths=False), lambda: store.remove(hostile)):
        with pytest.raises(QuireError) as caught:
            action()
        assert caught.value.status in (400, 404)
    assert not store.home.exists()


@pytest.mark.parametrize(
    "odd", ["https://h/%2e%2e/%2e%2e/x.gguf", "https://h/../../x.gguf", f"https://h/{'a' * 900}.gguf"]
)
def test_manifests_stay_in_their_folder(store: Store, odd: str):
    path = store.place.manifest(odd)
    assert path.parent == store.home / "manifests" and len(path.name) < 255
    assert path.resolve().parent == (store.home / "manifests").resolve()


def test_a_path_is_used_in_place(store: Store, tmp_path: Path):
    file = tmp_path / "mine.gguf"
    file.write_bytes(MODEL)
    assert store.pull(str(file)) == file == store.resolve(str(file))
    assert not store.home.exists()
    with pytest.raises(BadRequest, match="not by path"):
        store.resolve(str(file), paths=False)
    with pytest.raises(BadRequest, match="outside the store"):
        store.remove(str(file))
    assert file.exists()


def test_what_is_not_here_says_how_to_get_it(store: Store):
    with pytest.raises(NotFound, match="quire pull smollm2:135m"):
        store.resolve("smollm2")
    with pytest.raises(NotFound, match="did you mean smollm2:135m"):
        store.resolve("smolm2:135")


# Blobs and manifests


def test_a_blob_lives_as_long_as_a_name_uses_it(store: Store, origin: Origin, name: str):
    origin.files["/same.gguf"] = Body(MODEL)
    other = origin.url + "/same.gguf"
    blob = store.pull(name)
    assert store.pull(other) == blob
    assert store.remove(name) == 0 and blob.exists()
    assert store.remove(other) == len(MODEL) and not blob.exists()
    with pytest.raises(NotFound):
        store.remove(other)


def test_remove_drops_an_unfinished_download(store: Store, origin: Origin, name: str):
    origin.always = Fault(drop_after=100_000, ignore_range=True)
    with pytest.raises(DownloadFailed):
        store.pull(name)
    assert store.problems()
    assert store.remove(name) >= 100_000
    assert store.problems() == [] and not list((store.home / "partial").iterdir())


def test_damage_is_found_and_cured(store: Store, origin: Origin, name: str):
    blob = store.pull(name)
    broken = bytearray(MODEL)
    broken[500] ^= 1
    blob.write_bytes(broken)
    assert store.problems() == []  # the quick look sees sizes only
    with pytest.raises(BadModelFile) as caught:
        store.verify(name)
    assert SHA in str(caught.value) and hashlib.sha256(broken).hexdigest() in str(caught.value)
    assert store.pull(name, force=True).read_bytes() == MODEL
    store.verify(name)
    blob.write_bytes(MODEL[:-1])
    with pytest.raises(BadModelFile, match="--force"):
        store.resolve(name)
    assert store.problems()[0].fatal
    blob.unlink()
    with pytest.raises(BadModelFile, match="missing"):
        store.resolve(name)


def test_a_broken_manifest_is_a_problem_not_a_crash(store: Store, origin: Origin, name: str):
    blob = store.pull(name)
    path = next((store.home / "manifests").iterdir())
    evil = Manifest(name=name, source="x", digest="sha256:../../../../etc/passwd", size=1, pulled_at="")
    for bad in (b"", b"{", b"[]", b'{"name": 1}', msgspec.json.encode(evil)):
        path.write_bytes(bad)
        assert store.list() == []
        problems = store.problems()
        assert problems[0].fatal and str(path) in problems[0].text
        assert str(blob) in problems[1].text  # nobody names it any more
        with pytest.raises(BadModelFile):
            store.resolve(name)
    store.remove(name)
    assert not path.exists()


def test_an_unwritable_home_is_a_clear_error(origin: Origin, name: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(QuireError, match="QUIRE_HOME"):
        Store(Environment(home=tmp_path / "file" / "home")).pull(name)
    assert Store(Environment(home=tmp_path / "file" / "home")).list() == []


# The catalogue: a digest known beforehand


@pytest.fixture
def entry(origin: Origin, monkeypatch: pytest.MonkeyPatch) -> Entry:
    sources = (origin.url + "/gone.gguf", origin.url + "/m.gguf")
    made = Entry("tiny:1m", sources, SHA, len(MODEL), "MIT", "for tests")
    monkeypatch.setattr(catalogue, "ENTRIES", (*catalogue.ENTRIES, made))
    return made


def test_the_next_source_is_tried(store: Store, name: str, entry: Entry, recorder: Recorder):
    assert store.pull("tiny:1m", recorder).read_bytes() == MODEL
    assert recorder.said("gone.gguf failed") and recorder.said("trying the next source")
    manifest = store.list()[0]
    assert (manifest.name, manifest.licence, manifest.source) == ("tiny:1m", "MIT", name)


def test_a_name_that_left_the_catalogue_can_be_used_and_removed(
    store: Store, name: str, entry: Entry, monkeypatch: pytest.MonkeyPatch
):
    blob = store.pull("tiny:1m")
    monkeypatch.setattr(catalogue, "ENTRIES", ())
    assert store.resolve("tiny:1m") == blob == store.pull("tiny:1m")
    store.verify("tiny:1m")
    assert store.remove("tiny:1m") == len(MODEL)
    with pytest.raises(NotFound, match="no model is called 'tiny:1m'"):
        store.remove("tiny:1m")


def test_every_source_failing_says_so_for_each(store: Store, origin: Origin, entry: Entry):
    with pytest.raises(DownloadFailed, match=r"gone.gguf: .*404.*m.gguf: .*404"):
        store.pull("tiny:1m")


def test_wrong_bytes_never_enter(store: Store, origin: Origin, name: str, entry: Entry):
    wrong = bytes([*MODEL[:-1], MODEL[-1] ^ 1])
    origin.files["/m.gguf"] = Body(wrong)
    with pytest.raises(DownloadFailed) as caught:
        store.pull(name)
    assert SHA in str(caught.value) and hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert store.list() == [] and list((store.home / "blobs").iterdir()) == []
    assert not list((store.home / "partial").iterdir())


def test_a_wrong_length_is_refused_before_the_bytes(store: Store, origin: Origin, name: str, entry: Entry):
    origin.files["/m.gguf"] = Body(MODEL + b"x")
    with pytest.raises(DownloadFailed, match="900,005 bytes where 900,004"):
        store.pull(name)


def test_a_known_digest_is_not_downloaded_twice(
    store: Store, origin: Origin, name: str, entry: Entry, recorder: Recorder
):
    store.pull(name)
    before = len(origin.seen)
    assert store.pull("tiny:1m", recorder) == store.resolve(name)
    assert len(origin.seen) == before and recorder.said("nothing to download")


def test_a_poisoned_part_is_dropped_and_the_file_fetched_whole(
    store: Store, origin: Origin, name: str, entry: Entry, recorder: Recorder
):
    origin.files["/m.gguf"] = Body(MODEL, etag='"stays"')
    origin.faults = [Fault(drop_after=200_000), *[Fault(status=500)] * 5]
    with pytest.raises(DownloadFailed):
        store.pull(name)
    part = next(p for p in (store.home / "partial").iterdir() if p.suffix == ".part")
    part.write_bytes(b"GGUF" + bytes(199_996))
    assert store.pull(name, recorder).read_bytes() == MODEL
    assert recorder.said("does not have the digest it should")


def test_force_checks_what_is_here_before_fetching(
    store: Store, origin: Origin, name: str, entry: Entry, recorder: Recorder
):
    blob = store.pull(name)
    store.pull(name, recorder, force=True)
    assert len(origin.gets("/m.gguf")) == 1  # its digest is known and right
    blob.write_bytes(b"GGUF" + bytes(len(MODEL) - 4))
    store.pull(name, recorder, force=True)
    assert recorder.said("is damaged") and blob.read_bytes() == MODEL
