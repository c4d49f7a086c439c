"""Where the words go: streams that are closed, full or narrow-minded, terminals without colours, and nothing that ends in a traceback."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.terminal import answer, ui
from quire.llm import Thought
from quire.observe.errors import NotFound

from .test_main import ROOT


def shell(line: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A shell's line; $QUIRE is the command. stdout and stderr come back apart."""
    env = os.environ | {"QUIRE": f"{sys.executable} -m quire", "QUIRE_HOME": str(home)} | more
    env.pop("PYTHONUNBUFFERED", None)  # a buffer that cannot be emptied is a failure of its own, when Python ends
    return subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("verb", ["list --known", "--help"])
@pytest.mark.parametrize(
    ("where", "says"),
    [
        (">&-", "Bad file descriptor: standard output is closed"),
        (">/dev/full", "No space left on device: the disk is full"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, verb: str, where: str, says: str):
    if where.endswith("full") and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    done = shell(f"$QUIRE {verb} {where}", tmp_path)
    assert done.returncode == 1 and says in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", ["2>&-", "2</dev/null", "2>/dev/full"])  # gone, or there and not to be written
def test_without_a_stderr_notes_are_lost_and_nothing_else_is(tmp_path: Path, closed: str):
    if closed.endswith("full") and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    done = shell(f"$QUIRE list {closed}", tmp_path)  # "No models yet." is a note
    assert (done.returncode, done.stdout) == (0, "")
    failed = shell(f"$QUIRE show smollm2 {closed}", tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")


def test_an_answer_goes_on_where_nobody_hears_the_notes(monkeypatch: pytest.MonkeyPatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(sys, "stderr", Gone())
    answer.say("a note")
    ui.note("a note")


def test_a_locale_without_the_letters_is_no_failure(tmp_path: Path):
    folder = tmp_path / "é"
    folder.mkdir()
    done = shell("$QUIRE doctor --json", folder, PYTHONIOENCODING="ascii")
    assert "\\xe9" in done.stdout and "Encode" not in done.stderr


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Screen()


def test_colours_are_for_terminals_that_want_them(screen: Screen, monkeypatch: pytest.MonkeyPatch):
    assert ui.style("x", ui.RED, screen) == "\x1b[31mx\x1b[0m"
    assert ui.style("x", ui.RED, io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert ui.style("x", ui.RED, screen) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert ui.style("x", ui.RED, screen) == "x"


def test_nothing_moves_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch):
    err = Screen()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(ui.progress(), ui.Lines)
    spinner = answer.Spinner("loading")
    spinner.start()
    assert spinner._thread is None
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(ui.progress(), ui.Bar)


SAID = [Thought("hm"), Thought(" so"), "Yes", "."]


def test_thoughts_are_told_from_the_answer_with_and_without_colours(screen: Screen, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", screen)
    answer.show(SAID)
    assert screen.getvalue() == "\x1b[2mhm\x1b[22m\x1b[2m so\x1b[22m\n\nYes.\n"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Screen()
    monkeypatch.setattr(sys, "stdout", plain)
    answer.show(SAID)
    assert plain.getvalue() == "[thinking]\nhm so\n[answer]\nYes.\n"
    cut = Screen()
    monkeypatch.setattr(sys, "stdout", cut)
    answer.show(SAID[:1])
    assert cut.getvalue() == "[thinking]\nhm\n"
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    answer.show(SAID)
    assert pipe.getvalue() == "Yes.\n"


def test_the_machines_refusals_have_a_cure(capsys: pytest.CaptureFixture[str]):
    ui.fail(PermissionError(13, "Permission denied", "/there"))
    ui.fail(OSError(107, "Transport endpoint is not connected"))
    ui.fail(NotFound("gone", cure="look"))
    denied, odd, own = capsys.readouterr().err.splitlines()
    assert denied == "error: /there: Permission denied: this user may not; choose another place, or change who may"
    assert "internal error, OSError" in odd and own == "error: gone: look"
