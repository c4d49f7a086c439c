"""Coding agents in a home and a project of their own, started by `quire launch` on a scripted model, and what the server saw of them.

The agents are in the folder that QUIRE_TEST_AGENTS names, which `make test-clients` and `make test-large` set: those from npm under node_modules,
those from PyPI under venv.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quire.cli.agents.known import AGENTS
from tests.e2e.conftest import ROOT

FOLDER = Path(os.environ.get("QUIRE_TEST_AGENTS", ROOT / "build" / "clients" / "agents")).resolve()
BINS = (FOLDER / "node_modules" / ".bin", FOLDER / "venv" / "bin")
SECONDS = 120.0  # that one run of an agent may take
MODEL = "scripted-coder"
BROKEN = 'def add(a, b):\n    return a - b\n\n\nprint(f"sum={add(2, 3)}")\n'
MENDED = BROKEN.replace("a - b", "a + b")
TASK = "MEND calc.py: add must add. Then run it."
AGAIN = "TELL ME AGAIN what the sum is."
COMMAND = "python3 calc.py | tee out.txt"
# llm has no tools of its own: these are given to it on its command line.
LLM_TOOLS = """
import pathlib, subprocess
def read_text(path: str) -> str:
    "Read a file."
    return pathlib.Path(path).read_text()
def replace(path: str, old: str, new: str) -> str:
    "Replace text in a file."
    file = pathlib.Path(path)
    file.write_text(file.read_text().replace(old, new))
    return "done"
def run(command: str) -> str:
    "Run a command in a shell."
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
"""


@dataclass(frozen=True)
class Case:
    """How an agent is given a task, how it goes on with it, and the calls that do the task with the agent's own tools."""

    name: str
    first: tuple[str, ...]  # the task comes last
    again: tuple[str, ...]
    calls: tuple[tuple[str, dict[str, Any]], ...]  # read, edit, run; {folder} is the project's
    routes: frozenset[str]
    variables: dict[str, str] = field(default_factory=dict)

    def rules(self, project: Path) -> list[dict[str, Any]]:
        """The model's part."""

        def filled(value: Any) -> Any:
            return value.replace("{folder}", str(project)) if isinstance(value, str) else value

        said = ("I read it.", "I mend it.", "I run it.")
        turns: list[dict[str, Any]] = [
            {"text": text, "calls": [[name, {key: filled(value) for key, value in arguments.items()}]]}
            for text, (name, arguments) in zip(said, self.calls, strict=True)
        ]
        turns.append({"text": "THE SUM IS {found}", "find": r"\bsum=(\d+)"})
        if self.name == "aider":  # it has no tools: an answer is the whole file, and it runs the command itself
            turns = [{"text": f"I mend it. THE SUM IS 5\n\ncalc.py\n```\n{MENDED}```\n"}]
        return [
            {"match": "TELL ME AGAIN", "turns": [{"text": "Again: {found}", "find": r"THE SUM IS (\d+)"}]},
            {"match": "MEND calc.py", "turns": turns},
            {"match": "", "turns": [{"text": "A title"}]},  # titles, summaries and other requests beside the task
        ]


def _file_tools(read: str, edit: str, run: str, path: str, old: str, new: str, **more: Any) -> Any:
    return (
        (read, {path: "{folder}/calc.py"}),
        (edit, {path: "{folder}/calc.py", old: "a - b", new: "a + b"}),
        (run, {"command": COMMAND, **more}),
    )


CASES = {
    case.name: case
    for case in (
        Case(
            "codex",
            ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "resume", "--last"),
            (
                ("exec_command", {"cmd": "cat calc.py"}),
                ("exec_command", {"cmd": "sed -i 's/a - b/a + b/' calc.py"}),
                ("exec_command", {"cmd": COMMAND}),
            ),
            frozenset({"POST /v1/responses"}),
        ),
        Case(
            "claude",
            ("--allowedTools=Bash,Edit,Read", "-p"),
            ("--allowedTools=Bash,Edit,Read", "--continue", "-p"),
            _file_tools("Read", "Edit", "Bash", "file_path", "old_string", "new_string", description="Run calc.py"),
            frozenset({"POST /v1/messages", "HEAD /"}),
        ),
        Case(
            "opencode",
            ("run",),
            ("run", "--continue"),
            _file_tools("read", "edit", "bash", "filePath", "oldString", "newString", description="Run calc.py"),
            frozenset({"POST /v1/chat/completions"}),
        ),
        Case(
            "qwen",
            ("--yolo", "-p"),
            ("--yolo", "--continue", "-p"),
            _file_tools(
                "read_file", "edit", "run_shell_command", "file_path", "old_string", "new_string", is_background=False
            ),
            frozenset({"POST /v1/chat/completions"}),
        ),
        Case(
            "aider",
            (
                *("--yes-always", "--no-check-update", "--no-analytics", "--no-gitignore"),
                *("--auto-test", "--test-cmd", COMMAND, "calc.py", "--message"),
            ),
            (
                *("--yes-always", "--no-check-update", "--no-analytics", "--no-gitignore"),
                *("--restore-chat-history", "calc.py", "--message"),
            ),
            (("", {}), ("", {}), ("", {})),
            frozenset({"POST /v1/chat/completions"}),
            {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # it would look for a newer list of models elsewhere
        ),
        Case(
            "llm",
            ("--functions", LLM_TOOLS),
            ("--functions", LLM_TOOLS, "-c"),
            (
                ("read_text", {"path": "{folder}/calc.py"}),
                ("replace", {"path": "{folder}/calc.py", "old": "a - b", "new": "a + b"}),
                ("run", {"command": COMMAND}),
            ),
            frozenset({"POST /v1/chat/completions"}),
        ),
    )
}


def needs_agent(agent: str) -> None:
    """Skip where node or the agent is not there."""
    if "QUIRE_TEST_AGENTS" not in os.environ:
        pytest.skip("takes minutes: `make test-clients` runs it (QUIRE_TEST_AGENTS says where the agents are)")
    program = AGENTS[agent].program
    if shutil.which("node") is None and not (BINS[1] / program).exists():
        pytest.skip("needs node on the PATH (20 or newer)")
    if shutil.which(program, path=os.pathsep.join(map(str, BINS))) is None:
        pytest.skip(f"needs {AGENTS[agent].title} in {FOLDER}: `make test-clients` installs it")


@dataclass
class Place:
    """A home and a project."""

    home: Path
    project: Path

    def environment(self, **more: str) -> dict[str, str]:
        """What an agent sees of the world: nothing of this user's."""
        path = os.pathsep.join([*map(str, BINS), os.environ["PATH"]])
        return {"PATH": path, "HOME": str(self.home), "TERM": "dumb", "LANG": "C.UTF-8", **more}

    def run(
        self, words: list[str], variables: dict[str, str] | None = None, seconds: float = SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end, and see that nothing of it is left."""
        process = subprocess.Popen(
            words,
            cwd=self.project,
            env=self.environment(**(variables or {})),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            said, _ = process.communicate()
            raise AssertionError(f"{words[:6]} took more than {seconds} s and said:\n{said}") from None
        finally:
            _kill_group(process.pid)
            left = self.left_running()
        assert not left, f"{words[:6]} left running: {left}"
        return subprocess.CompletedProcess(words, process.returncode, said)

    def left_running(self) -> list[str]:
        """Processes with this home that do not end by themselves; they are killed."""
        end = time.monotonic() + 5
        while (found := self._processes()) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(found.values())

    def _processes(self) -> dict[int, str]:
        mark, found = f"HOME={self.home}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
        return found

    def launch(
        self, agent: str, url: str, arguments: tuple[str, ...], *more: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """`quire launch AGENT --url URL -- ARGUMENTS`."""
        own = [sys.executable, "-P", "-m", "quire.cli.main", "launch", agent, "--url", url, *more, "--", *arguments]
        return self.run(own, variables)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def place(folder: Path) -> Place:
    """A fresh one, with the broken file in a repository."""
    made = Place(folder / "home", folder / "project")
    for one in (made.home, made.project):
        one.mkdir(parents=True)
    (made.project / "calc.py").write_text(BROKEN)
    git = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.com"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "Begin"]):
        subprocess.run([*git, *words], cwd=made.project, env=made.environment(), check=True)
    return made


@dataclass
class Recorded:
    """One request that the server saw, and its answer."""

    route: str
    status: int
    body: Any
    answer: str
    headers: dict[str, str]

    @property
    def notes(self) -> list[str]:
        """What the answer says was without effect."""
        return sorted(
            {note for found in re.findall(r'"notes":(\[.*?\](?=[,}]))', self.answer) for note in json.loads(found)}
        )


def tokens(answer: str) -> int:
    """The tokens of a prompt, as its answer tells them: those from the cache and the others."""
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    last = {name: int(count) for name, count in re.findall(r'"(\w+_tokens)":\s*(\d+)', answer) if name in names}
    return sum(last.values())


@dataclass
class Scripted:
    """A scripted server."""

    url: str
    folder: Path

    def recorded(self) -> list[Recorded]:
        """All requests so far."""
        told = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]
        return [Recorded(f"{t['method']} {t['path']}", t["status"], t["body"], t["answer"], t["headers"]) for t in told]


@contextlib.contextmanager
def scripted(folder: Path, rules: list[dict[str, Any]], *options: str) -> Iterator[Scripted]:
    """A scripted server with these rules."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "script.json").write_text(json.dumps({"rules": rules}))
    records, log = folder / "records", (folder / "log.txt").open("w")
    words = [sys.executable, "-m", "tests.scripted.server", str(folder / "script.json"), "--name", MODEL]
    process = subprocess.Popen(
        [*words, "--record", str(records), "--home", str(folder), *options],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url and process.stdout.readline().strip() == "ready", (folder / "log.txt").read_text()
        yield Scripted(url, records)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()
