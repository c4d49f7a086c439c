"""pull, list, show and rm over a private store and a local server."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from gguf import GGUFWriter
from typer.testing import CliRunner, Result

from quire.cli import app, show
from quire.cli.terminal import ui
from quire.weights.store.store import Store
from tests.unit.weights.origin import Body, Fault, Origin

from .test_main import ROOT, quire

FILLER = b"GGUF" + random.Random(5).randbytes(50_000)


@pytest.fixture
def origin() -> Iterator[Origin]:
    server = Origin()
    yield server
    server.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(*args: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app.app, list(args), input=input)


def a_model(folder: Path) -> bytes:
    """A small GGUF file made by an independent writer."""
    import numpy as np

    path = folder / "made.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_name("Tiny\x1b[2J")
    writer.add_context_length(128)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_pull_list_show_rm(home: Path, origin: Origin, tmp_path: Path):
    origin.files["/m.gguf"] = Body(a_model(tmp_path))
    name = origin.url + "/m.gguf"
    pulled = run("pull", name)
    assert pulled.exit_code == 0 and "pulled" in pulled.stderr and pulled.stdout == ""

    listed = run("list")
    assert re.search(rf"{re.escape(name)}\s+\d+\.\d kB\s+gguf\s+just now", listed.stdout)
    as_json = json.loads(run("list", "--json").stdout)
    assert as_json[0]["name"] == name and Path(as_json[0]["path"]).exists()

    shown = run("show", name)
    assert shown.exit_code == 0
    for part in ("llama", "2 layers", "4 heads over 2 KV heads", "128 tokens", "F32 100.0%", as_json[0]["digest"]):
        assert part in shown.stdout
    assert "\x1b" not in shown.stdout and "Tiny" in shown.stdout
    facts = json.loads(run("show", name, "--json").stdout)
    assert (facts["architecture"], facts["parameters"], facts["source"]) == ("llama", 640, name)

    removed = run("rm", name)
    assert removed.exit_code == 0 and "freed" in removed.stderr
    assert run("list").stdout == "" and "No models yet" in run("list").stderr
    assert run("rm", name).exit_code == 1


def test_show_leaves_out_what_is_unknown_and_escapes_what_is_hostile():
    facts = {"model": "x", "path": "/p", "name": "a\x1b[2Jb", "types": {"Q4_0": 1, "F32": 3}, "tokenizer": None}
    pairs = dict(show.lines(facts))
    assert pairs["title"] == "a\\x1b[2Jb" and pairs["quantization"] == "F32 75.0%, Q4_0 25.0%"
    assert not {"tokenizer", "context", "digest", "parameters"} & set(pairs)


def test_show_a_path(home: Path, tmp_path: Path):
    a_model(tmp_path)
    shown = run("show", str(tmp_path / "made.gguf"))
    assert shown.exit_code == 0 and str(tmp_path / "made.gguf") in shown.stdout and not home.exists()


def test_pull_goes_on_after_one_that_fails(home: Path, origin: Origin):
    origin.files["/b.gguf"] = Body(FILLER)
    result = run("pull", origin.url + "/a.gguf", origin.url + "/b.gguf")
    assert result.exit_code == 1 and "404" in result.stderr
    assert [m.name for m in Store().list()] == [origin.url + "/b.gguf"]


def test_pull_of_one_that_fails_leaves_no_traceback(tmp_path: Path, origin: Origin):
    origin.always = Fault(status=403)
    done = quire("pull", origin.url + "/a.gguf", home=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("answer", "left", "code"), [("n", 1, 1), ("", 1, 1), ("y", 0, 0)])
def test_rm_asks_on_a_terminal(home: Path, origin: Origin, answer: str, left: int, code: int):
    origin.files["/m.gguf"] = Body(FILLER)
    name = origin.url + "/m.gguf"
    run("pull", name)
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "quire.cli.main", "rm", name]
    child = subprocess.Popen(
        command, cwd=ROOT, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    os.write(ours, f"{answer}\n".encode())
    out, _ = child.communicate(timeout=30)
    os.close(ours)
    os.close(theirs)
    assert child.returncode == code and f"Remove {name}?" in out
    assert len(Store().list()) == left


def test_rm_judges_every_name_before_it_removes_one(home: Path, origin: Origin):
    origin.files["/m.gguf"] = Body(FILLER)
    name = origin.url + "/m.gguf"
    run("pull", name)
    assert run("rm", "--yes", name, "hf:nonsense").exit_code == 1
    assert len(Store().list()) == 1


def test_list_warns_of_damage(home: Path, origin: Origin):
    origin.files["/m.gguf"] = Body(FILLER)
    path = Store().pull(origin.url + "/m.gguf")
    path.unlink()
    listed = run("list")
    assert listed.exit_code == 0 and "missing" in listed.stderr and "--force" in listed.stderr


def test_known_names():
    assert "smollm2:135m" in run("list", "--known").stdout
    assert json.loads(run("list", "--known", "--json").stdout)[0]["licence"] == "Apache-2.0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5, "just now"),
        (61, "1 minute ago"),
        (7300, "2 hours ago"),
        (86400 * 3, "3 days ago"),
        (86400 * 400, "1 year ago"),
    ],
)
def test_ago(seconds: int, text: str):
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert ui.ago((now - timedelta(seconds=seconds)).isoformat(), now) == text


def test_lines_speak_seldom(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    clock = [100.0]
    monkeypatch.setattr(ui.time, "monotonic", lambda: clock[0])
    lines = ui.Lines()
    lines.start(10_000_000, "x")
    for _ in range(100):
        clock[0] += 0.125
        lines.advance(100_000)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "x: 10.0 MB" and len(said) == 3  # 12.5 seconds in all
    assert said[1] == "x: 4.0 MB of 10.0 MB (40%), 800.0 kB/s, 8 s left"


def test_bar_survives_restarts_and_odd_labels(capsys: pytest.CaptureFixture[str]):
    bar = ui.Bar()
    bar.note("before")
    bar.start(100, "hf:[bold]x[/nope]")
    bar.advance(50)
    bar.note("[red]during[/oops]")
    bar.start(None, "again", 10)
    bar.advance(5)
    bar.finish()
    bar.finish()
    err = capsys.readouterr().err
    assert "before" in err and "[red]during[/oops]" in err


def test_what_is_no_model_says_what_it_is_and_what_to_do(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every wrong thing one can name, through `run`, as a person would meet it."""
    monkeypatch.chdir(tmp_path)
    for folder in ("bare", "config-only", "pickled"):
        Path(folder).mkdir()
    for folder in ("config-only", "pickled"):
        (Path(folder) / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for pickle in ("pickled/pytorch_model.bin", "model.pt"):
        Path(pickle).write_bytes(b"\x80\x02}q\x00.")
    Path("notes.gguf").write_text("hello")
    Path("empty.gguf").touch()
    Path("cut.gguf").write_bytes(a_model(tmp_path)[:60])
    for name, says in {
        "bare": "what lies here is written ./bare",
        "./bare": "a folder without a config.json",
        "./config-only": "no .safetensors file is there: fetch them too",
        "./pickled": "is a pickled checkpoint",  # and not that it has no tokenizer either
        "./model.pt": "is a pickled checkpoint",
        "./notes.gguf": "it starts with b'hell', not b'GGUF': a model is",
        "./empty.gguf": "empty.gguf is empty: fetch it again",
        "./cut.gguf": "may be cut short: fetch it again",
        "./none.gguf": "there is no file none.gguf: check the path",
        "nonsense": "no model is called 'nonsense': known: smollm2:135m",
    }.items():
        done = run("run", name, "hi")
        assert done.exit_code == 1 and done.stdout == "" and says in done.stderr, (name, done.stderr)
        assert len(done.stderr.splitlines()) == 1


def test_pulling_a_path_says_that_there_is_nothing_to_fetch(home: Path, tmp_path: Path):
    a_model(tmp_path)
    done = run("pull", str(tmp_path / "made.gguf"))
    assert done.exit_code == 0 and "nothing to fetch" in done.stderr
    assert run("pull", str(tmp_path / "none.gguf")).exit_code == 1


def test_latest_is_the_default_tag(home: Path):
    assert Store().look_up("smollm2:latest") == Store().look_up("smollm2") == Store().look_up("smollm2:135m")
    assert run("show", "smollm2:latest").stderr.startswith("error: smollm2:135m is not on this machine")
