"""doctor: every finding is true, a failure is exit code 1, and each one that is not a pass has a cure."""

from __future__ import annotations

import json
import socket
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import quire.cli.doctor as doctor
from quire.cli import app, version
from quire.config import Environment
from quire.machine import Memory
from quire.weights.store.store import Store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "kernels", lambda: ("avx2", ""))


def run(*args: str) -> Result:
    return CliRunner().invoke(app.app, ["doctor", *args])


def findings(*args: str) -> dict[str, dict[str, str]]:
    return {f["check"]: f for f in json.loads(run("--json", *args).stdout)["findings"]}


def test_a_healthy_machine(home: Path, healthy: None):
    result = run()
    assert result.exit_code == 0 and "fail" not in result.stdout
    for check in ("python", "native kernels", "cpu", "cores", "memory", "disk", "store", "port"):
        assert f"  {check}: " in result.stdout


def test_a_missing_extension_fails_with_a_cure(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "kernels", lambda: (None, "ImportError: no _native"))
    result = run()
    assert result.exit_code == 1 and "no _native" in result.stdout and "cure: `pip install .`" in result.stdout


def test_kernels_are_what_would_be_used(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire.backends.native.available", lambda: ["avx2", "scalar"])
    assert version.kernels() == ("avx2", "")
    monkeypatch.setenv("QUIRE_ISA", "scalar")
    assert version.kernels() == ("scalar", "")
    monkeypatch.setenv("QUIRE_ISA", "mmx")
    assert version.kernels() == (None, "QUIRE_ISA asks for 'mmx'; this CPU can run avx2, scalar")
    assert findings()["native kernels"]["cure"].startswith("unset QUIRE_ISA")


def test_scalar_kernels_warn(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "kernels", lambda: ("scalar", ""))
    assert findings()["native kernels"]["status"] == "warn"
    assert run().exit_code == 0


def test_a_taken_port_warns(home: Path, healthy: None):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        found = findings("--port", str(port))["port"]
        assert found["status"] == "warn" and "--port" in found["cure"]
    assert findings("--port", str(port))["port"]["status"] == "pass"


def test_a_damaged_store_fails(home: Path, healthy: None):
    (home / "manifests").mkdir(parents=True)
    (home / "manifests" / "x.json").write_text("{")
    found = findings()["store"]
    assert found["status"] == "fail" and "delete" in found["cure"]
    assert run().exit_code == 1


def test_deep_reads_digests(home: Path, healthy: None, tmp_path: Path):
    import hashlib

    from tests.unit.weights.origin import Body, Origin

    data = b"GGUF" + bytes(5000)
    origin = Origin()
    try:
        origin.files["/m.gguf"] = Body(data)
        blob = Store(Environment(home=home)).pull(origin.url + "/m.gguf")
    finally:
        origin.close()
    assert run("--deep").exit_code == 0
    blob.write_bytes(b"GGUF" + bytes(4999) + b"\x01")
    assert run().exit_code == 0  # the quick look cannot see it
    result = run("--deep")
    assert result.exit_code == 1 and hashlib.sha256(data).hexdigest() in result.stdout


def test_little_of_everything_warns(home: Path, healthy: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "look_at_memory", lambda: Memory(100 << 20, "this test"))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda p: types.SimpleNamespace(free=1 << 20))
    monkeypatch.setenv("QUIRE_THREADS", "4096")
    found = findings()
    for check in ("memory", "disk", "cores"):
        assert found[check]["status"] == "warn" and found[check]["cure"]


def test_tune_measures_keeps_and_shows(home: Path, monkeypatch: pytest.MonkeyPatch):
    from quire.backends.native import tune

    asked: list[str] = []

    def measure(ways: list[tune.Candidate], isa: str) -> list[tune.Speed]:
        asked.append(isa)
        return [tune.Speed(tune.Candidate(1), 9e9, 1e11), tune.Speed(tune.Candidate(2), 18e9, 2e11)]

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "_load_per_core", lambda: 0.0)
    result = run("--tune")
    assert result.exit_code == 0 and len(asked) == 1  # what follows reads what was kept
    assert "1 thread 9.0 GB/s, 2 threads 18.0 GB/s" in result.stdout
    table = result.stdout.split("THREADS")[1].splitlines()
    assert table[1].split()[:3] == ["1", "none", "9.0"] and "chosen" in table[2]
    assert [r["threads"] for r in json.loads(run("--json").stdout)["threads"]] == ["1", "2"]
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("flags\t\t: fpu avx2 avx512f\n", {"fpu", "avx2", "avx512f"}),
        ("Features : asimd asimddp\n", {"asimd", "asimddp"}),
        ("", set()),
    ],
)
def test_cpu_features(tmp_path: Path, text: str, has: set[str]):
    (tmp_path / "cpuinfo").write_text(text)
    assert doctor.cpu_features(tmp_path / "cpuinfo") == has


def test_network_is_asked_only_when_told(home: Path, healthy: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "network" not in findings()
    result = run("--network")
    assert result.exit_code == 1 and "cannot reach 127.0.0.1" in result.stdout


def test_ops_names_every_op_and_backend(home: Path, healthy: None):
    from quire.backends.ops import TABLE

    rows = json.loads(run("--ops", "--json").stdout)["ops"]
    assert {r["op"] for r in rows} == {op.name for op in TABLE}
    assert all(r["implementation"] == "numpy" for r in rows if r["backend"] == "reference")


def test_a_store_that_is_no_folder_fails(home: Path, healthy: None):
    home.write_text("a file")
    result = run()
    assert result.exit_code == 1 and f"the model store {home} is no folder" in result.stdout
    listed = CliRunner().invoke(app.app, ["list"])
    assert "is no folder: set QUIRE_HOME to one" in listed.stderr


def test_threads_that_are_no_number_are_refused_and_not_passed_over(
    home: Path, healthy: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QUIRE_THREADS", "many")
    found = findings()["cores"]
    assert found["status"] == "fail" and "'many'" in found["detail"] and found["cure"]


def test_a_home_may_begin_with_a_tilde(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_HOME", "~/models")
    assert Environment.read().home == Path.home() / "models"


def test_version_says_why_there_are_no_kernels(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_ISA", "abacus")
    shown = CliRunner().invoke(app.app, ["version"])
    assert "none: QUIRE_ISA asks for 'abacus'" in shown.stdout


def test_one_source_that_answers_is_enough(home: Path, healthy: None, monkeypatch: pytest.MonkeyPatch):
    from quire.observe.errors import DownloadFailed
    from quire.weights import sources

    real = sources.load

    def load(scheme: str) -> types.SimpleNamespace:
        def locate(*_: object) -> object:
            if scheme == "hf":
                raise DownloadFailed("cannot reach the hub")
            return sources.Local(home)

        return types.SimpleNamespace(parse=real(scheme).parse, locate=locate)

    monkeypatch.setattr(sources, "load", load)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    told = [(f.status, f.detail) for f in doctor.reach(Store())]
    assert told[0] == ("pass", "smollm2:135m can be had from this machine")
    assert {status for status, _ in told[1:]} == {"warn"}
