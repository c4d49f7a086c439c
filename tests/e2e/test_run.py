"""`quire run` as a user runs it: a process, a pipe, a terminal, the default model."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

QUIRE = [sys.executable, "-m", "quire.cli.main"]
PARIS = "What is the capital of France? Answer in one word."


def run(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*QUIRE, "run", *args, "--context", "512"]
    options = {"stdin": subprocess.DEVNULL, **options} if "input" not in options else options
    return subprocess.run(command, text=True, capture_output=True, timeout=120, **options)


def test_an_answer_on_a_pipe_is_text_and_nothing_else(model_path: Path) -> None:
    first = run(str(model_path), PARIS, "--temperature", "0", "--max-tokens", "24")
    assert first.returncode == 0
    assert "Paris" in first.stdout
    assert first.stdout.endswith("\n")
    assert "\x1b" not in first.stdout
    assert first.stderr == ""
    again = run(str(model_path), "--temperature", "0", "--max-tokens", "24", "--stats", input=PARIS)
    assert again.stdout == first.stdout
    for word in ("threads:", "KV pool:", "loaded in", "first token:", "decode:"):
        assert word in again.stderr


def test_errors_are_one_line(model_path: Path, tmp_path: Path) -> None:
    for args, text in (
        ((str(tmp_path / "none.gguf"), "hi"), "none.gguf"),
        ((str(model_path), "hi", "--top-p", "3"), "top_p is 3.0"),
        ((str(model_path), "word " * 600), "512"),
        ((str(model_path), "hi", "--backend", "abacus"), "no backend named 'abacus'"),
    ):
        done = run(*args)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert text in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_reader_that_goes_away_ends_it_quietly(model_path: Path) -> None:
    command = [*QUIRE, "run", str(model_path), "Tell a long story.", "--context", "512", "--max-tokens", "0"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.read(1)
    child.stdout.close()
    assert child.wait(60) == 141
    assert child.stderr.read() == b""
    child.stderr.close()


def test_ctrl_c_ends_one_answer_with_130(model_path: Path) -> None:
    command = [*QUIRE, "run", str(model_path), "Tell a long story.", "--context", "2048", "--max-tokens", "0"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out.endswith(b"\n")
    assert b"Traceback" not in err


class Terminal:
    """A process on a terminal of its own, and what it has shown."""

    def __init__(self, *args: str, home: Path):
        pid, self.fd = pty.fork()
        if pid == 0:
            os.environ.update(QUIRE_HOME=str(home), TERM="xterm")
            os.execv(sys.executable, [*QUIRE, "run", *args])
        self.pid, self.shown = pid, ""

    def until(self, text: str, seconds: float = 60) -> str:
        """Wait for text; returns everything up to and with it, and forgets that."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            left = end - time.monotonic()
            assert left > 0, f"{text!r} did not come; shown: {self.shown!r}"
            if select.select([self.fd], [], [], min(left, 1))[0]:
                try:
                    self.shown += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:  # the other end is gone
                    assert text in self.shown, f"ended without {text!r}; shown: {self.shown!r}"
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self, seconds: float = 30) -> int:
        end = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < end, "it did not end"
            time.sleep(0.02)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(model_path: Path, tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(str(model_path), "--context", "1024", "--temperature", "0", home=tmp_path)
    yield made
    made.close()


def test_a_conversation_on_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.until(">>> ")
    terminal.type(f"{PARIS}\r")
    assert "Paris" in terminal.until(">>> ")
    terminal.type("Write a very long story about a fox.\r")
    terminal.until("fox.")  # the echo
    terminal.until("\n")
    terminal.until(" ")  # the answer has begun, or the spinner turns
    time.sleep(0.5)
    terminal.type("\x03")
    assert "[stopped]" in terminal.until(">>> ")
    terminal.type("/stats\r")
    assert "prompt tokens computed" in terminal.until(">>> ")
    terminal.type(f"/save {tmp_path}/talk.md\r")
    assert "messages written" in terminal.until(">>> ")
    assert "Paris" in (tmp_path / "talk.md").read_text()
    terminal.type("/nonsense\r")
    assert "there is no command" in terminal.until(">>> ")
    time.sleep(0.5)  # readline shows its prompt a moment before it listens; what comes in between waits for a key
    terminal.type("\x03")
    assert "again" in terminal.until(">>> ")
    terminal.type("\x04")
    assert terminal.wait() == 0
    assert PARIS in (tmp_path / "history").read_text()
