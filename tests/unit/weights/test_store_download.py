"""Downloads against a server that misbehaves: what ends up in the store is right or is not there."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest

from quire.observe.errors import BadModelFile, DownloadFailed, NotFound, QuireError, Unsupported
from quire.weights.download import fetch
from quire.weights.store.store import Store

from .conftest import Recorder
from .origin import Body, Fault, Origin

MODEL = b"GGUF" + random.Random(1).randbytes(700_000)
OTHER = b"GGUF" + random.Random(2).randbytes(700_000)
SHA = hashlib.sha256(MODEL).hexdigest()
PATH = "/m.gguf"


@pytest.fixture
def name(origin: Origin) -> str:
    origin.files[PATH] = Body(MODEL)
    return origin.url + PATH


def parts(store: Store) -> list[Path]:
    folder = store.home / "partial"
    return sorted(folder.iterdir()) if folder.exists() else []


def leave_part(store: Store, name: str, origin: Origin, n: int) -> None:
    """Interrupt a pull after `n` bytes, as Ctrl-C would."""

    class Interrupt(Recorder):
        def advance(self, n: int) -> None:
            super().advance(n)
            if self.advanced >= goal:
                raise KeyboardInterrupt

    goal = n
    origin.faults.append(Fault(drop_after=n))
    progress = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        store.pull(name, progress)
    assert progress.said("continues from there")
    assert [p.suffix for p in parts(store)] == [".json", ".part"]
    assert parts(store)[1].stat().st_size == n


def test_a_file_arrives_verified_and_named(store: Store, name: str, origin: Origin, recorder: Recorder):
    path = store.pull(name, recorder)
    assert path.read_bytes() == MODEL
    assert path == store.home / "blobs" / f"sha256-{SHA}"
    assert store.resolve(name) == path
    manifest = store.list()[0]
    assert (manifest.name, manifest.digest, manifest.size) == (name, f"sha256:{SHA}", len(MODEL))
    assert parts(store) == []
    assert recorder.advanced == len(MODEL) and recorder.starts[0] == (len(MODEL), name, 0)
    store.verify(name)
    store.pull(name, recorder)
    assert len(origin.gets(PATH)) == 1 and recorder.said("already here")


def test_a_dropped_connection_is_resumed_where_it_broke(store: Store, name: str, origin: Origin, naps: list[float]):
    origin.faults = [Fault(drop_after=100_000), Fault(drop_after=50_000), None]
    assert store.pull(name).read_bytes() == MODEL
    ranges = [s.headers.get("range") for s in origin.gets(PATH)]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]
    assert all(s.headers["if-range"] == origin.files[PATH].tag() for s in origin.gets(PATH)[1:])
    assert naps == [0.5, 0.5]  # each try brought something, so the pause did not grow


def test_progress_counts_every_byte_once_over_a_resume(store: Store, name: str, origin: Origin, recorder: Recorder):
    origin.faults = [Fault(drop_after=100_000)]
    store.pull(name, recorder)
    assert recorder.advanced == len(MODEL)
    assert [s[2] for s in recorder.starts] == [0, 100_000]


def test_an_interrupted_pull_continues_later(store: Store, name: str, origin: Origin, recorder: Recorder):
    leave_part(store, name, origin, 300_000)
    assert store.problems()[0].cure.startswith(f"`quire pull {name}` continues")
    assert Store(store.env, store.http).pull(name, recorder).read_bytes() == MODEL
    assert recorder.said("continuing after 300.0 kB") and recorder.advanced == len(MODEL) - 300_000
    assert origin.gets(PATH)[-1].headers["range"] == "bytes=300000-"


def test_a_changed_remote_is_not_glued_to_an_old_part(store: Store, name: str, origin: Origin, recorder: Recorder):
    leave_part(store, name, origin, 300_000)
    origin.files[PATH] = Body(OTHER)
    assert store.pull(name, recorder).read_bytes() == OTHER
    assert recorder.said("dropping 300.0 kB") and recorder.said("changed")


def test_a_change_between_two_tries_starts_over(store: Store, name: str, origin: Origin, recorder: Recorder):
    def swap(pause: float) -> None:
        origin.files[PATH] = Body(OTHER)

    origin.faults = [Fault(drop_after=100_000)]
    changing = Store(store.env, fetch.Http(timeout=10, sleep=swap))
    assert changing.pull(name, recorder).read_bytes() == OTHER
    assert recorder.said("the remote file has changed")


def test_a_server_that_ignores_range_is_read_from_the_start(
    store: Store, name: str, origin: Origin, recorder: Recorder
):
    leave_part(store, name, origin, 300_000)
    origin.faults = [Fault(ignore_range=True)]
    assert store.pull(name, recorder).read_bytes() == MODEL
    assert recorder.said("does not resume")


def test_a_range_that_starts_elsewhere_is_refused(store: Store, name: str, origin: Origin, recorder: Recorder):
    leave_part(store, name, origin, 300_000)
    origin.faults = [Fault(shift_range=7)]
    assert store.pull(name, recorder).read_bytes() == MODEL
    assert recorder.said("bytes 300007-")


def test_no_validator_no_resume(store: Store, name: str, origin: Origin, recorder: Recorder):
    origin.files[PATH] = Body(MODEL, etag=None)
    leave_part(store, name, origin, 300_000)
    origin.files[PATH] = Body(OTHER, etag=None)
    assert store.pull(name, recorder).read_bytes() == OTHER
    assert recorder.said("no way to tell")


def test_a_weak_etag_is_no_validator(store: Store, name: str, origin: Origin):
    origin.files[PATH] = Body(MODEL, etag='W/"x"')
    leave_part(store, name, origin, 300_000)
    origin.files[PATH] = Body(OTHER, etag='W/"x"')
    assert store.pull(name).read_bytes() == OTHER


def test_a_part_that_is_whole_needs_only_the_news(store: Store, name: str, origin: Origin):
    leave_part(store, name, origin, 300_000)
    parts(store)[1].write_bytes(MODEL)
    assert store.pull(name).read_bytes() == MODEL


def test_a_part_longer_than_the_remote_is_dropped(store: Store, name: str, origin: Origin, recorder: Recorder):
    leave_part(store, name, origin, 300_000)
    parts(store)[1].write_bytes(MODEL + b"more")
    assert store.pull(name, recorder).read_bytes() == MODEL
    assert recorder.said("ends at or before what is here")


def test_a_length_that_lies_long_gives_up_and_says_so(store: Store, name: str, origin: Origin, naps: list[float]):
    origin.always = Fault(extra_length=1000)
    with pytest.raises(DownloadFailed, match=r"started over 5 times.*701,004"):
        store.pull(name)
    assert store.list() == [] and len(naps) < 20


def test_a_length_that_lies_short_is_not_exceeded(store: Store, name: str, origin: Origin):
    origin.always = Fault(extra_length=-1000)
    assert store.pull(name).stat().st_size == len(MODEL) - 1000  # all that HTTP lets anybody see


def test_a_server_that_never_gets_far_is_given_up(store: Store, name: str, origin: Origin, naps: list[float]):
    origin.always = Fault(drop_after=0)
    with pytest.raises(DownloadFailed, match="gave up after 5 tries"):
        store.pull(name)
    assert naps == [0.5, 1.0, 2.0, 4.0]


def test_a_server_that_breaks_and_cannot_resume_is_given_up(store: Store, name: str, origin: Origin):
    origin.always = Fault(drop_after=100_000, ignore_range=True)
    with pytest.raises(DownloadFailed, match=r"gave up|started over"):
        store.pull(name)
    assert len(origin.gets(PATH)) < 12


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_passing_trouble_is_tried_again(store: Store, name: str, origin: Origin, status: int, recorder: Recorder):
    origin.faults = [Fault(status=status), Fault(status=status)]
    assert store.pull(name, recorder).read_bytes() == MODEL
    assert recorder.said(f"answered {status}") and recorder.said("trying again")


def test_retry_after_is_obeyed_within_reason(store: Store, name: str, origin: Origin, naps: list[float]):
    origin.faults = [
        Fault(status=503, headers={"Retry-After": "7"}),
        Fault(status=503, headers={"Retry-After": "9999"}),
    ]
    store.pull(name)
    assert naps == [7.0, 60.0]


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (404, NotFound, "404"),
        (410, NotFound, "410"),
        (401, DownloadFailed, "credentials"),
        (418, DownloadFailed, "418"),
    ],
)
def test_a_refusal_is_final_and_clear(
    store: Store, name: str, origin: Origin, naps: list[float], status: int, error: type[QuireError], says: str
):
    origin.always = Fault(status=status)
    with pytest.raises(error) as caught:
        store.pull(name)
    assert says in str(caught.value) and naps == [] and len(origin.gets(PATH)) == 1


def test_trouble_that_stays_is_given_up(store: Store, name: str, origin: Origin):
    origin.always = Fault(status=500)
    with pytest.raises(DownloadFailed, match=r"answered 500.*gave up after 5 tries"):
        store.pull(name)


def test_an_html_page_is_not_a_model(store: Store, name: str, origin: Origin):
    origin.files[PATH] = Body(b"<!DOCTYPE html><p>please log in")
    with pytest.raises(BadModelFile, match="not a GGUF"):
        store.pull(name)
    assert store.list() == [] and parts(store) == [] and list((store.home / "blobs").iterdir()) == []


def test_an_architecture_that_is_not_known_is_refused_by_its_first_bytes(store: Store, name: str, origin: Origin):
    """A GGUF says what it is at its beginning: the rest does not come."""
    from quire.cli.pull import supported

    def file(architecture: bytes) -> bytes:
        def text(data: bytes) -> bytes:
            return len(data).to_bytes(8, "little") + data

        keys = text(b"general.alignment") + b"\x04\0\0\0" + b"\x20\0\0\0"
        keys += text(b"general.architecture") + b"\x08\0\0\0" + text(architecture)
        return b"GGUF\x03\0\0\0" + bytes(8) + b"\x02" + bytes(7) + keys + bytes(8 << 20)

    choosy = Store(store.env, store.http, accepts=supported)
    origin.files[PATH] = Body(file(b"mamba"))
    with pytest.raises(Unsupported, match=r"'mamba' is not supported \(http.*supported: .*llama"):
        choosy.pull(name)
    assert store.list() == [] and parts(store) == []
    origin.always = Fault(drop_after=3 << 20)  # it breaks off long after the beginning
    with pytest.raises(Unsupported, match="'mamba'"):
        choosy.pull(name)
    assert len(origin.gets(PATH)) == 2  # not tried again
    origin.always = None
    origin.files[PATH] = Body(file(b"llama"))
    assert choosy.pull(name).is_file()


@pytest.mark.parametrize("cut", range(0, 80, 7))
def test_a_glimpse_of_too_little_says_nothing(cut: int):
    from quire.weights.gguf.peek import peek

    def text(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    whole = b"GGUF\x03\0\0\0" + bytes(16) + text(b"general.architecture") + b"\x08\0\0\0" + text(b"llama") + bytes(9)
    seen = peek("x", whole)
    assert seen is not None and seen.architecture == "llama"
    if cut < 4:
        with pytest.raises(BadModelFile, match="not a GGUF"):
            peek("x", whole[:cut])
    elif cut < len(whole) - 9:
        assert peek("x", whole[:cut]) is None
    huge = whole[:24] + (1 << 63).to_bytes(8, "little") + whole[32:]
    assert peek("x", huge) is None


def test_a_file_of_a_split_model_is_not_fetched_alone(store: Store, origin: Origin):
    for part in ("m-00001-of-00003.gguf", "m-00002-of-00003.gguf"):
        with pytest.raises(Unsupported, match=r"one of 3 files of a split model.*name the first file by its path"):
            store.pull(f"{origin.url}/{part}")
    assert not origin.seen
    origin.files["/m-00001-of-00001.gguf"] = Body(MODEL)
    assert store.pull(f"{origin.url}/m-00001-of-00001.gguf").is_file()


def test_content_encoding_is_refused(store: Store, name: str, origin: Origin):
    origin.files[PATH] = Body(MODEL, headers={"Content-Encoding": "gzip"})
    with pytest.raises(DownloadFailed, match="Content-Encoding"):
        store.pull(name)


def test_disk_space_is_checked_before_the_first_byte(
    store: Store, name: str, origin: Origin, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fetch, "SPARE_DISK", 1 << 60)
    with pytest.raises(DownloadFailed, match="not enough disk space") as caught:
        store.pull(name)
    assert caught.value.code == "disk_full" and "QUIRE_HOME" in caught.value.cure
    assert not [p for p in parts(store) if p.suffix == ".part"]


def test_a_full_disk_keeps_what_came(store: Store, name: str, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    real = fetch.write_all
    calls = []

    def full(out, data, path):
        calls.append(len(data))
        if len(calls) > 1:
            with fetch.disk_errors(path):
                raise OSError(28, "No space left on device")
        real(out, data, path)

    monkeypatch.setattr(fetch, "write_all", full)
    with pytest.raises(DownloadFailed) as caught:
        store.pull(name)
    assert caught.value.code == "disk_full"
    assert next(p for p in parts(store) if p.suffix == ".part").stat().st_size == calls[0]
    monkeypatch.setattr(fetch, "write_all", real)
    assert store.pull(name).read_bytes() == MODEL
    assert origin.gets(PATH)[-1].headers["range"] == f"bytes={calls[0]}-"


def test_redirects_are_followed(store: Store, origin: Origin, name: str):
    origin.routes["/moved.gguf"] = lambda s: (302, {"Location": PATH}, b"")
    assert store.pull(origin.url + "/moved.gguf").read_bytes() == MODEL


def test_a_redirect_loop_ends(store: Store, origin: Origin, naps: list[float]):
    origin.routes["/loop.gguf"] = lambda s: (302, {"Location": "/loop.gguf"}, b"")
    with pytest.raises(DownloadFailed, match="redirects more than"):
        store.pull(origin.url + "/loop.gguf")
    assert naps == [] and len(origin.seen) <= 12


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x.gguf", "data:text/plain,GGUF"])
def test_a_redirect_cannot_leave_http(store: Store, origin: Origin, target: str):
    origin.routes["/away.gguf"] = lambda s: (302, {"Location": target}, b"")
    with pytest.raises(DownloadFailed, match="only http and https"):
        store.pull(origin.url + "/away.gguf")


def test_a_redirect_without_a_place(store: Store, origin: Origin):
    origin.routes["/away.gguf"] = lambda s: (302, {}, b"")
    with pytest.raises(DownloadFailed, match="without saying where"):
        store.pull(origin.url + "/away.gguf")


def test_credentials_stay_with_their_host(store: Store, origin: Origin, name: str):
    elsewhere = Origin()
    elsewhere.files[PATH] = Body(MODEL)
    try:
        origin.routes["/a.gguf"] = lambda s: (302, {"Location": "/b.gguf"}, b"")
        origin.routes["/b.gguf"] = lambda s: (302, {"Location": elsewhere.url + PATH}, b"")
        with_password = origin.url.replace("http://", "http://me:secret@") + "/a.gguf"
        store.pull(with_password)
        assert all(s.headers["authorization"].startswith("Basic ") for s in origin.seen)
        assert len(origin.seen) == 2
        assert all("authorization" not in s.headers for s in elsewhere.seen) and elsewhere.seen
    finally:
        elsewhere.close()
    kept = b"".join(p.read_bytes() for p in (store.home / "manifests").iterdir())
    assert b"secret" not in kept
    assert store.resolve(with_password) == store.resolve(origin.url + "/a.gguf")


def test_nobody_there(store: Store, origin: Origin, naps: list[float]):
    url = origin.url + PATH
    origin.close()
    with pytest.raises(DownloadFailed, match=r"cannot reach 127\.0\.0\.1"):
        store.pull(url)
    assert len(naps) == 4
