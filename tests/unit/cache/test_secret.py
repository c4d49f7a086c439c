"""The secret that salts namespaces: one for all processes of a home, and readable by its owner alone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quire.cache.secret import FILE, Secret

CODE = "import sys; from pathlib import Path; from quire.cache.secret import Secret\nprint(Secret(Path(sys.argv[1])).salt('t').hex())"


def test_it_survives_a_restart_and_is_its_owners_alone(tmp_path: Path) -> None:
    home = tmp_path / "not" / "there"
    old = os.umask(0)
    try:
        first = Secret(home)
        value = first.value
    finally:
        os.umask(old)
    assert (home / FILE).stat().st_mode & 0o777 == 0o600
    assert len(value) == 32 and Secret(home).value == value == first.value
    assert [p.name for p in home.iterdir()] == [FILE]


def test_salts_differ_by_namespace_purpose_and_home(tmp_path: Path) -> None:
    one, two = Secret(tmp_path / "1"), Secret(tmp_path / "2")
    made = [f(name) for secret in (one, two) for f in (secret.salt, secret.key) for name in ("a", "b", "\ud800")]
    assert len(set(made)) == len(made) and one.value not in made
    assert Secret(tmp_path / "1").salt("a") == one.salt("a")


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    Secret(tmp_path)
    assert not list(tmp_path.iterdir())


def test_processes_that_start_at_once_have_one_secret(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", CODE, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    assert len({p.communicate()[0] for p in started}) == 1 and all(p.returncode == 0 for p in started)
    assert [p.name for p in tmp_path.iterdir()] == [FILE]


def test_threads_that_start_at_once_have_one_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them find no file, and then all of them make one."""
    import quire.cache.secret as module

    barrier, real, found = threading.Barrier(8), module._read, list[bytes]()

    def read(path: Path) -> bytes | None:
        value = real(path)
        if value is None:
            barrier.wait()
        return value

    monkeypatch.setattr(module, "_read", read)
    threads = [threading.Thread(target=lambda: found.append(Secret(tmp_path).value)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("content", [b"", b"00" * 16, b"zz" * 32, b"00" * 32 + b"\nmore"])
def test_a_file_that_is_something_else_is_not_used_and_not_touched(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE).write_bytes(content)
    secret = Secret(tmp_path)
    assert len(secret.value) == 32 and secret.value == secret.value != Secret(tmp_path).value
    assert (tmp_path / FILE).read_bytes() == content
    assert len(told(caplog)) == 2 and "delete it" in told(caplog)[0] and str(tmp_path / FILE) in told(caplog)[0]


def test_a_home_that_cannot_be_written_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    secret = Secret(tmp_path / "file" / "home")
    assert secret.salt("a") == secret.salt("a") != secret.salt("b")
    assert len(told(caplog)) == 1 and "until this process ends" in told(caplog)[0]


def test_a_pipe_or_a_folder_in_its_place_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / FILE)
    assert len(Secret(tmp_path).value) == 32
    (tmp_path / "2" / FILE).mkdir(parents=True)
    assert len(Secret(tmp_path / "2").value) == 32
    assert len(told(caplog)) == 2


def test_one_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    value = Secret(tmp_path).value
    (tmp_path / FILE).chmod(0o644)
    assert Secret(tmp_path).value == value
    assert len(told(caplog)) == 1 and "chmod 600" in told(caplog)[0]


def test_without_a_home_it_is_this_processs_own() -> None:
    assert Secret(None).value != Secret(None).value
