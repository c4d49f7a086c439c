"""`quire service`: what it writes, what it runs, and that systemd, a shell and plistlib read back what was meant."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import serve, service
from quire.cli.app import app
from quire.cli.services import launchd, plan, systemd
from quire.cli.services.launchd import Launchd
from quire.cli.services.plan import Service
from quire.cli.services.systemd import Systemd

NASTY = [
    "two words",
    'a"quote',
    "back\\slash",
    "50%",
    "%h%n",
    "$HOME",
    "${HOME}",
    ";",
    "it's",
    "-",
    "",
    "#",
    "ä€",
    "a\\nb",
    "~",
]
assert serve  # imported before a test says that this is another system: its libraries ask, too
KEY = 's3"cret$`x\\y z'


class Machine:
    """A home of its own, and a PATH on which the supervisors' programs only note what they were asked."""

    def __init__(self, tmp: Path, monkeypatch: pytest.MonkeyPatch):
        self.home, self.bin, self.said = tmp / "home", tmp / "bin", tmp / "said"
        self.home.mkdir()
        self.bin.mkdir()
        self.answers(systemctl=0, journalctl=0, launchctl=0, tail=0)
        for name in [n for n in os.environ if n.startswith(("QUIRE_", "HF_", "PIP_", "NPM_CONFIG", "npm_config"))]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(self.home))
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        self.unit = self.home / ".config/systemd/user/quire.service"
        self.env = self.home / ".config/quire/quire.env"

    def answers(self, **status: int) -> None:
        for name, code in status.items():
            program = self.bin / name
            program.write_text(f'#!/bin/sh\necho "{name} $*" >> {shlex.quote(str(self.said))}\nexit {code}\n')
            program.chmod(0o755)

    def calls(self) -> list[str]:
        """What was asked since the last look."""
        lines = self.said.read_text().splitlines() if self.said.exists() else []
        self.said.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(sys, "platform", "linux")
    return Machine(tmp_path, monkeypatch)


def quire(*words: str) -> Any:
    return CliRunner().invoke(app, ["service", *words])


def made(*words: str, **more: Any) -> Service:
    settings: dict[str, Any] = {
        "name": "quire", "system": False, "run_as": None, "command": (sys.executable, *words), "variables": {},
        "home": Path("/h"), "drain": 30.0,
    }  # fmt: skip
    return Service(**{**settings, **more})


def test_install_writes_starts_and_is_the_same_a_second_time(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    words = ("install", "--model", "smollm2:135m", "--", "--port", "9000", "--drain-seconds", "50")
    done = quire(*words)
    assert done.exit_code == 0, done.output
    user = "systemctl --user"
    assert machine.calls() == [f"{user} daemon-reload", f"{user} enable quire.service", f"{user} restart quire.service"]
    unit = machine.unit.read_text()
    assert f"ExecStart={sys.executable} -P -m quire serve smollm2:135m --port 9000 --drain-seconds 50\n" in unit
    assert f"EnvironmentFile={machine.env}\n" in unit
    assert "TimeoutStopSec=80\n" in unit and "KillMode=mixed\n" in unit
    assert machine.env.stat().st_mode & 0o777 == 0o600 and machine.unit.stat().st_mode & 0o777 == 0o644
    assert systemd.read_assignments(machine.env.read_text()) == {
        "QUIRE_HOME": str(machine.home / ".cache/quire"),
        "QUIRE_API_KEY": KEY,
    }
    assert KEY not in unit and "cret" not in unit + done.output
    assert quire(*words).exit_code == 0
    assert machine.calls()[-1] == f"{user} start quire.service"  # nothing differs, so what runs goes on
    machine.env.chmod(0o644)
    assert quire(*words).exit_code == 0 and machine.env.stat().st_mode & 0o777 == 0o600
    assert not list(machine.unit.parent.glob(".quire-*")), "a partial file was left"


def test_variables_of_an_earlier_installation_stay_until_they_are_set_anew(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QUIRE_API_KEY", "first-key")
    monkeypatch.setenv("QUIRE_HOME", "/data/quire")
    assert quire("install").exit_code == 0
    with machine.env.open("a") as file:
        file.write("# by hand\nHTTPS_PROXY='http://proxy:3128'\nPLAIN=yes\n")
    monkeypatch.delenv("QUIRE_API_KEY")
    monkeypatch.delenv("QUIRE_HOME")
    assert quire("install").exit_code == 0
    kept = systemd.read_assignments(machine.env.read_text())
    assert kept == {
        "QUIRE_HOME": "/data/quire",
        "QUIRE_API_KEY": "first-key",
        "HTTPS_PROXY": "http://proxy:3128",
        "PLAIN": "yes",
    }
    monkeypatch.setenv("QUIRE_API_KEY", "second-key")
    assert quire("install").exit_code == 0
    assert systemd.read_assignments(machine.env.read_text())["QUIRE_API_KEY"] == "second-key"


def test_print_writes_nothing_and_shows_no_key(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:password@index/simple")
    done = quire("install", "--print", "--", "--port", "9000")
    assert done.exit_code == 0 and f"# {machine.unit} (mode 0644)" in done.output and "(mode 0600)" in done.output
    assert 'QUIRE_API_KEY="(not shown)"' in done.output
    assert not re.search("cret|password", done.output)
    assert machine.calls() == [] and not machine.unit.exists() and not machine.env.exists()


def test_uninstall_status_and_logs(machine: Machine):
    for verb in ("status", "logs"):
        done = quire(verb)
        assert done.exit_code == 1 and "quire service install" in done.output
    assert "not installed" in quire("uninstall").output and machine.calls() == []
    quire("install")
    machine.calls()
    machine.answers(systemctl=3)
    assert quire("status").exit_code == 3  # systemd's own: it does not run
    assert quire("logs", "-n", "7", "-f").exit_code == 0
    assert machine.calls() == [
        "systemctl --user --no-pager status quire.service",
        "journalctl --user --no-pager --unit=quire.service --lines=7 --follow",
    ]
    assert quire("uninstall").exit_code == 1 and machine.unit.exists(), "it could not be stopped: its files stay"
    machine.calls()
    machine.answers(systemctl=0)
    assert quire("uninstall").exit_code == 0
    assert machine.calls() == ["systemctl --user disable --now quire.service", "systemctl --user daemon-reload"]
    assert not machine.unit.exists() and not machine.env.exists()


def test_units_of_others_are_left_alone(machine: Machine):
    machine.unit.parent.mkdir(parents=True)
    machine.unit.write_text("[Service]\nExecStart=/bin/mine\n")
    for verb in ("install", "uninstall"):
        done = quire(verb)
        assert done.exit_code == 1 and "not one that Quire wrote" in done.output, done.output
    assert machine.unit.read_text() == "[Service]\nExecStart=/bin/mine\n"
    assert not machine.env.exists() and machine.calls() == []
    assert quire("install", "--name", "second").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--", "--portt", "1"), "No such option: --portt"),
        (("--", "--port", "x"), "--port"),
        (("--", "--api-key", "secret"), "QUIRE_API_KEY"),
        (("--", "--api-keys", "keys.txt"), "whole path"),
        (("--", "--lora", "a=b"), "whole path"),
        (("--", "--state-dir", "here"), "whole path"),
        (("--", "--help"), "help"),
        (("--", "model.gguf"), "--model"),
        (("--model", "--port"), "behind --"),
        (("--name", "../x"), "cannot be a service's name"),
        (("--run-as", "me"), "--system"),
        (("--model", "a\nb"), "control characters"),
    ],
)
def test_what_a_service_cannot_run_is_refused_before_anything_is_written(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").touch()
    done = quire("install", *words)
    assert done.exit_code in (1, 2) and said in done.output, done.output
    assert not machine.unit.exists() and not machine.env.exists() and machine.calls() == []


def test_a_model_of_here_is_found_from_elsewhere(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model.gguf").touch()
    assert quire("install", "--model", "m=my model.gguf", "--model", "smollm2").exit_code == 0
    assert f'serve "m={tmp_path}/my model.gguf" smollm2\n' in machine.unit.read_text()


def test_an_open_server_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    assert "whoever can reach 0.0.0.0" in quire("install", "--print", "--", "--host", "0.0.0.0").output
    monkeypatch.setenv("QUIRE_API_KEY", "k")
    assert "whoever" not in quire("install", "--print", "--", "--host", "0.0.0.0").output


def test_without_systemd_and_elsewhere(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    done = quire("install")
    assert done.exit_code == 1 and "systemctl is not on this machine" in done.output and "--print" in done.output
    monkeypatch.setattr(sys, "platform", "win32")
    done = quire("install")
    assert done.exit_code == 1 and "docs/deploying.md" in done.output


def test_a_unit_of_the_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    done = quire("install", "--system", "--print")
    assert done.exit_code == 0, done.output
    for line in ("DynamicUser=yes", "StateDirectory=quire", "ProtectSystem=strict", "WantedBy=multi-user.target"):
        assert f"{line}\n" in done.output
    assert 'QUIRE_HOME="/var/lib/quire"' in done.output and "Environment=HOME=/var/lib/quire\n" in done.output
    named = quire("install", "--system", "--run-as", "llm", "--print").output
    assert "User=llm\n" in named and "DynamicUser" not in named
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "installed by root" in quire("install", "--system").output


def test_an_account_of_its_own_must_reach_quire(tmp_path: Path):
    program = tmp_path / "shut" / "python"
    program.parent.mkdir(mode=0o700)
    program.touch()
    with pytest.raises(plan.BadRequest, match="cannot enter"):
        service._check_reachable(program)


def analyzed(unit: Path, tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """What systemd says of a unit, with the words that it reads from it."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not here (Debian: systemd)")
    runtime = tmp_path / "runtime"
    runtime.mkdir(exist_ok=True)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "SYSTEMD_LOG_LEVEL": "debug"}
    return subprocess.run([program, "verify", *more, str(unit)], env=env, capture_output=True, text=True)


@pytest.mark.parametrize("system", [False, True])
def test_systemd_reads_the_words_that_were_meant(tmp_path: Path, system: bool):
    settings = Systemd(system)
    settings.units = settings.settings = tmp_path
    home = Path("/var/lib/quire")
    unit, variables = settings.files(made(*NASTY, system=system, home=home))
    for file in (unit, variables):
        file.path.write_text(file.text)
    done = analyzed(unit.path, tmp_path, *([] if system else ["--user"]))
    assert done.returncode == 0, done.stderr
    complaints = [
        line for line in (done.stdout + done.stderr).splitlines() if re.match(rf"{re.escape(str(unit.path))}:", line)
    ]
    assert not complaints
    (line,) = re.findall(r"Command Line: (.*)", done.stdout + done.stderr)
    # systemd shows words as a shell would want them, and before it takes $$ for $: a single one would be a variable.
    words = shlex.split(re.sub(r"\\([$`])", r"\1", line))
    assert words == [sys.executable, *(word.replace("$", "$$") for word in NASTY)]


def test_a_shell_reads_the_variables_that_were_meant(tmp_path: Path):
    values = {"QUIRE_API_KEY": KEY, "A": "it's 50% #;", "B": "", "C": 'x\\"', "D": "$HOME ${HOME} $(id)"}
    text = "\n".join(systemd.assignment(*pair) for pair in values.items())
    assert systemd.read_assignments(text) == values
    (tmp_path / "env").write_text(text)
    script = f". {shlex.quote(str(tmp_path / 'env'))}; printf '%s\\n' " + " ".join(f'"${name}"' for name in values)
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == list(values.values())


def test_a_program_that_systemd_cannot_name():
    with pytest.raises(plan.BadRequest, match="dollar"):
        systemd.program("/opt/$x/python")
    assert systemd.program("/opt/a b/python") == '"/opt/a b/python"'


def test_launchd(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launchd, "UNLOAD_SECONDS", 1.0)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    machine.answers(launchctl=1)  # `print`: no such job yet; and what follows fails, too
    words = ("install", "--model", "smollm2", "--", "--port", "9000")
    assert quire(*words).exit_code == 1
    path = machine.home / "Library/LaunchAgents/dev.quire.quire.plist"
    job = plistlib.loads(path.read_bytes())
    assert job["ProgramArguments"] == [sys.executable, "-P", "-m", "quire", "serve", "smollm2", "--port", "9000"]
    assert job["EnvironmentVariables"]["QUIRE_API_KEY"] == KEY and job["ExitTimeOut"] == 60
    assert path.stat().st_mode & 0o777 == 0o600
    target = f"gui/{os.getuid()}/dev.quire.quire"
    assert machine.calls() == [f"launchctl print {target}", f"launchctl enable {target}"]
    monkeypatch.delenv("QUIRE_API_KEY")
    assert Launchd(False).kept("quire")["QUIRE_API_KEY"] == KEY
    machine.answers(launchctl=0)
    assert quire(*words).exit_code == 0  # the same, and loaded
    assert machine.calls() == [f"launchctl print {target}"]
    assert quire("logs", "-n", "3").exit_code == 0
    assert machine.calls() == [f"tail -n 3 {machine.home}/Library/Logs/dev.quire.quire.log"]
    assert "--run-as" in quire("install", "--system").output
    # Stopping: `print` says that the job is there once, then that it is gone.
    (machine.bin / "launchctl").write_text(
        f'#!/bin/sh\necho "launchctl $*" >> {machine.said}\n[ "$1" = bootout ] && touch {machine.bin}/gone\n'
        f'[ "$1" = print ] && [ -e {machine.bin}/gone ] && exit 113\nexit 0\n'
    )
    assert quire("uninstall").exit_code == 0
    assert machine.calls() == [f"launchctl print {target}", f"launchctl bootout {target}", f"launchctl print {target}"]
    assert not path.exists()
