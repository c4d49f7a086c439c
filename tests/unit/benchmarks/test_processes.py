"""Programs watched from outside: when an answer begins, what memory is held, and a neighbour that goes away."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import processes

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_answer_begins_after_the_banner_and_the_prompt(tmp_path: Path) -> None:
    code = f"""
import sys, time
def say(x): sys.stdout.write(x); sys.stdout.flush()
def told(when): print(time.perf_counter(), file=open({str(tmp_path)!r} + "/" + when, "w"))
say("banner\\n\\n> Why?\\n\\n"); time.sleep(0.5); say("Because"); time.sleep(2); told("ends"); say(" so.\\n")
"""
    begun = time.perf_counter()
    seconds = processes.first_output(python(code), b"> Why?")
    ends = float((tmp_path / "ends").read_text()) - begun
    assert 0.5 <= seconds < ends
    assert processes.first_output(python("print('x')")) > 0


def test_a_program_without_an_answer_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no answer"):
        processes.first_output(python("print('> Why?')"), b"> Why?")
    with pytest.raises(RuntimeError, match="ended with 3"):
        processes.first_output(python("print('x'); raise SystemExit(3)"))


@linux
def test_memory_peak_and_steady_are_told_apart() -> None:
    code = """
import time
time.sleep(0.2); big = bytearray(96 << 20); time.sleep(0.3); del big; kept = bytearray(32 << 20); time.sleep(1.2)
"""
    found = processes.memory(python(code))
    assert 96 << 20 < found.peak < 140 << 20
    assert 32 << 20 < found.steady < 70 << 20
    assert 32 << 20 < found.anonymous < found.steady


@linux
def test_memory_of_a_program_that_fails_is_an_error_with_its_words() -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        processes.memory(python("import sys; sys.exit('out of luck')"))


@linux
def test_the_neighbour_computes_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Spy(subprocess.Popen):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Spy)
    with processes.neighbour():
        ticks = Path(f"/proc/{started[0].pid}/stat").read_text().rpartition(")")[2].split()[11]
        assert int(ticks) > 0  # it has used processor time
    assert started[0].poll() is not None
