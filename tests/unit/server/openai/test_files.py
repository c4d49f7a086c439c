"""/v1/files: uploads as they come, hostile forms and names, pages, what is on disk."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import FileDeleted, FileObject

from quire.config import ServerConfig
from quire.server.openai.batches.files import Files
from quire.server.openai.batches.upload import label
from quire.server.state import State, default_folder
from tests.unit.server.fakes import FakeCompleter, client_for, service_over


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return ServerConfig(state_dir=tmp_path / "state", max_file=100_000)


async def upload(http: httpx.AsyncClient, data: bytes = b"one\n", name: str = "a.jsonl", purpose: str = "batch") -> Any:
    return await http.post("/v1/files", data={"purpose": purpose}, files={"file": (name, data)})


async def test_up_and_down(config):
    data = os.urandom(50_000)
    async with client_for(config=config) as http:
        r = await upload(http, data, "my data.bin", "user_data")
        assert r.status_code == 200, r.text
        body = r.json()
        FileObject.model_validate(body)
        assert (body["filename"], body["bytes"], body["purpose"], body["status"]) == (
            "my data.bin",
            50_000,
            "user_data",
            "processed",
        )
        assert (await http.get(f"/v1/files/{body['id']}")).json() == body
        content = await http.get(f"/v1/files/{body['id']}/content")
        assert content.content == data
        assert (
            "my%20data.bin" in content.headers["content-disposition"]
            or "my data.bin" in content.headers["content-disposition"]
        )
        gone = await http.delete(f"/v1/files/{body['id']}")
        FileDeleted.model_validate(gone.json())
        for path in ("", "/content"):
            r = await http.get(f"/v1/files/{body['id']}{path}")
            assert r.status_code == 404 and r.json()["error"]["code"] == "file_not_found"
        assert (await http.delete(f"/v1/files/{body['id']}")).status_code == 404
    assert list((config.state_dir / "files").iterdir()) == []


async def test_a_name_is_only_a_name(config):
    names = ["../../etc/passwd", "..\\..\\x", "/abs/passwd", "a\x00b\x1b[2J", "..", "x" * 5000, "日本.jsonl"]
    folder = config.state_dir / "files"
    async with client_for(config=config) as http:
        for name in names:
            part = 'Content-Disposition: form-data; name="'
            form = f'--b\r\n{part}purpose"\r\n\r\nbatch\r\n--b\r\n{part}file"; filename="{name}"\r\n\r\nhi\r\n--b--\r\n'
            headers = {"content-type": "multipart/form-data; boundary=b"}
            r = await http.post("/v1/files", content=form.encode(), headers=headers)
            if r.status_code == 400:  # a head that the parser does not take
                assert r.json()["error"]["code"] == "invalid_form"
            else:
                assert r.status_code == 200, r.text
                told = r.json()["filename"]
                assert "/" not in told and "\\" not in told and told.isprintable() and len(told) <= 255
                (on_disk,) = folder.iterdir()
                assert on_disk.name == r.json()["id"]
                await http.delete(f"/v1/files/{on_disk.name}")
            assert list(folder.iterdir()) == [], name


def test_labels():
    assert label("a/b\\c.txt") == "c.txt"
    assert label("..") == ".." and label("") == "upload" and label("///") == "upload"
    assert label("a\nb") == "a_b"


async def test_an_id_is_not_a_path(config):
    (config.state_dir / "files").mkdir(parents=True)
    secret = config.state_dir / "secret"
    secret.write_text("s")
    async with client_for(config=config) as http:
        for bad in ("../secret", "..%2Fsecret", "%2e%2e%2fsecret", ".", "batches.db"):
            r = await http.get(f"/v1/files/{bad}/content")
            assert r.status_code in (404, 405) and r.text != "s"
            r = await http.delete(f"/v1/files/{bad}")
            assert r.status_code in (404, 405)
    assert secret.exists()


async def test_too_large(config):
    async with client_for(config=config) as http:
        assert (await upload(http, b"x" * 100_000)).status_code == 200
        over = await upload(http, b"x" * 100_001)
        assert over.status_code == 413 and over.json()["error"]["param"] == "file"
        far = await upload(http, b"x" * 200_000)  # the layer in front counts too
        assert far.status_code == 413
        json_over = await http.post(
            "/v1/chat/completions", content=b"x" * (9 << 20), headers={"content-type": "application/json"}
        )
        assert json_over.status_code == 413  # only this path may be larger than other bodies
    assert len(list((config.state_dir / "files").iterdir())) == 1


async def test_a_huge_file_is_never_whole_in_memory(config, monkeypatch):
    """Its largest piece is bounded, however it arrives."""
    from quire.server.openai.batches import upload as uploads

    largest = 0
    write = uploads.MultipartParser.write

    def watched(self: Any, data: bytes) -> int:
        nonlocal largest
        largest = max(largest, len(data))
        return write(self, data)

    monkeypatch.setattr(uploads.MultipartParser, "write", watched)
    size = 20 << 20
    config = ServerConfig(state_dir=config.state_dir, max_file=size)
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'

    async def body():
        yield head
        for _ in range(size >> 16):
            yield b"y" * (1 << 16)
        yield b"\r\n--b--\r\n"

    async with client_for(config=config) as http:
        r = await http.post("/v1/files", content=body(), headers={"content-type": "multipart/form-data; boundary=b"})
        assert r.status_code == 200 and r.json()["bytes"] == size
    assert largest <= 2 * uploads.GATHER


BAD_FORMS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"data": {"purpose": "batch"}, "files": {"other": ("a", b"x")}}, 400, "other"),
    ({"data": {"purpose": "nothing"}, "files": {"file": ("a", b"x")}}, 400, "purpose"),
    ({"files": {"file": ("a", b"x")}}, 400, "purpose"),
    ({"data": {"purpose": "batch", "color": "red"}, "files": {"file": ("a", b"x")}}, 400, "color"),
    ({"data": {"purpose": "x" * 5000}, "files": {"file": ("a", b"x")}}, 400, "purpose"),
    ({"data": {"purpose": "batch"}, "files": [("file", ("a", b"x")), ("file", ("b", b"y"))]}, 400, "file"),
    (
        {
            "data": {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            "files": {"file": ("a", b"x")},
        },
        400,
        "expires_after.seconds",
    ),
    (
        {
            "data": {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "4000"},
            "files": {"file": ("a", b"x")},
        },
        400,
        "expires_after.anchor",
    ),
    ({"json": {"purpose": "batch"}}, 415, None),
    ({"content": b"--b\r\ngarbage", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, None),
    ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=b"}}, 400, None),
    ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, 415, None),
    (
        {
            "content": b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nhalf',
            "headers": {"content-type": "multipart/form-data; boundary=b"},
        },
        400,
        None,
    ),
]


async def test_bad_forms(config):
    async with client_for(config=config) as http:
        for form, status, param in BAD_FORMS:
            r = await http.post("/v1/files", **form)
            assert (r.status_code, r.json()["error"]["param"]) == (status, param), (form, r.text)
    assert list((config.state_dir / "files").iterdir()) == []


async def test_a_page_of_another_origin_may_not_upload(config):
    allowed = ServerConfig(state_dir=config.state_dir, cors_origins=("https://good.example",))
    service = service_over(FakeCompleter(), allowed)
    async with client_for(config=allowed, service=service) as http:
        for headers, status in (
            ({"origin": "https://evil.example"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"origin": "https://good.example", "sec-fetch-site": "cross-site"}, 200),
            ({"sec-fetch-site": "same-origin"}, 200),
            ({}, 200),
        ):
            r = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"x")}, headers=headers)
            assert r.status_code == status, (headers, r.text)


async def test_pages(config):
    async with client_for(config=config) as http:
        ids = [(await upload(http, purpose="batch" if i % 2 else "evals")).json()["id"] for i in range(5)]
        first = (await http.get("/v1/files?limit=2")).json()
        second = (await http.get(f"/v1/files?limit=2&after={first['last_id']}")).json()
        oldest = (await http.get("/v1/files?order=asc")).json()
        some = (await http.get("/v1/files?purpose=batch")).json()
        bad = await http.get("/v1/files?after=file-none")
    assert [f["id"] for f in first["data"] + second["data"]] == ids[:0:-1]
    assert (first["has_more"], second["has_more"], oldest["has_more"]) == (True, True, False)
    assert [f["id"] for f in oldest["data"]] == ids
    assert [f["id"] for f in some["data"]] == [ids[3], ids[1]]
    assert bad.status_code == 400


async def test_files_expire(config, monkeypatch):
    async with client_for(config=config) as http:
        fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        body = (await http.post("/v1/files", data=fields, files={"file": ("a", b"x")})).json()
        assert body["expires_at"] == body["created_at"] + 3600
        later = time.time() + 3601
        monkeypatch.setattr("quire.server.openai.batches.files.time.time", lambda: later)
        assert (await http.get(f"/v1/files/{body['id']}")).status_code == 404
        assert (await http.get("/v1/files")).json()["data"] == []


async def test_bytes_of_a_dead_upload_are_swept(config):
    folder = config.state_dir / "files"
    folder.mkdir(parents=True)
    async with client_for(config=config) as http:
        kept = (await upload(http)).json()["id"]
        http._transport.app.state.server.close()
    (folder / "file-dead.part").write_bytes(b"half")
    service = service_over(FakeCompleter(), config)
    async with client_for(config=config, service=service) as http:
        app = http._transport.app
        fresh = (await upload(http)).json()["id"]
        files: Files = app.state.batches.files
        await files.sweep()
        assert {p.name for p in folder.iterdir()} == {kept, fresh}


async def test_a_disk_that_is_full(config, monkeypatch):
    def full(out: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quire.server.openai.batches.upload._sync", full)
    async with client_for(config=config) as http:
        r = await upload(http)
    assert r.status_code == 507 and r.json()["error"]["code"] == "storage_full"
    assert list((config.state_dir / "files").iterdir()) == []


async def test_a_client_that_leaves_leaves_nothing(config):
    async def body():
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        yield b"z" * 1000
        await asyncio.sleep(60)

    async with client_for(config=config) as http:
        task = asyncio.create_task(
            http.post("/v1/files", content=body(), headers={"content-type": "multipart/form-data; boundary=b"})
        )
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert list((config.state_dir / "files").iterdir()) == []


async def test_off_without_a_folder():
    async with client_for() as http:
        for r in (await upload(http), await http.get("/v1/files"), await http.get("/v1/batches")):
            assert r.status_code == 501, r.text
            assert r.json()["error"]["code"] == "no_state_folder" and "--state-dir" in r.json()["error"]["message"]


def test_a_folder_that_served_nothing_is_taken_back(tmp_path: Path):
    state = State(tmp_path / "state" / "m")
    (tmp_path / "state" / "m" / "responses.db").write_text("")
    state.unused()
    state.close()
    assert list(tmp_path.iterdir()) == []
    kept = State(tmp_path / "state" / "m")
    (tmp_path / "state" / "m" / "files" / "file-1").write_text("uploaded while the model was loading")
    kept.unused()
    kept.close()
    again = State(tmp_path / "state" / "m")  # it was there before this start
    (tmp_path / "state" / "m" / "files" / "file-1").unlink()
    again.unused()
    again.close()
    assert (tmp_path / "state" / "m" / "files").is_dir()
    beside = State(tmp_path / "state" / "n")
    beside.unused()
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["m"]


def test_state_folders(tmp_path):
    first = State(tmp_path / "s")
    assert first.folder == tmp_path / "s" and "files, batches" in first.line()
    assert (tmp_path / "s").stat().st_mode & 0o77 == 0
    second = State(tmp_path / "s")
    assert second.folder is None and "another server" in second.line()
    first.close()
    assert State(tmp_path / "s").folder is not None
    (tmp_path / "file").write_text("")
    bad = State(tmp_path / "file" / "x")
    assert bad.folder is None and "cannot be written" in bad.line() and "in memory" in bad.line()
    assert default_folder(tmp_path, "a/../b:1") == tmp_path / "state" / "a%2F..%2Fb:1"
    assert default_folder(tmp_path, "..").name == "model"


@pytest.mark.parametrize("broken", ["batches.db", "responses.db"])
async def test_a_broken_database_is_done_without_and_told(config, caplog, broken):
    config.state_dir.mkdir(parents=True)
    (config.state_dir / broken).write_bytes(b"not a database" * 100)
    async with client_for(config=config) as http:
        assert (await http.get("/v1/files")).status_code == (501 if broken == "batches.db" else 200)
        r = await http.post("/v1/responses", json={"input": "hi"})
        assert r.status_code == 200
        assert (await http.get(f"/v1/responses/{r.json()['id']}")).status_code == 200
    assert "responses are in memory" in caplog.text
    assert ("batches are off" in caplog.text) == (broken == "batches.db")
