"""`quire launch` with stand-ins: a program in an agent's place that tells how it was started, and a server that says what it serves."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from quire.cli.agents.known import AGENTS
from quire.cli.agents.page import written
from quire.cli.agents.settings import PATIENCE_MS, Target, as_shell

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """#!{python}
import json, os, sys, time
files = {{}}
for name in ("QWEN_CODE_SYSTEM_SETTINGS_PATH", "LLM_USER_PATH"):
    at = os.environ.get(name)
    for path in [at] if at and os.path.isfile(at) else [os.path.join(at, n) for n in os.listdir(at)] if at else []:
        files[os.path.basename(path)] = open(path).read()
json.dump({{"arguments": sys.argv[1:], "environment": dict(os.environ), "files": files}}, open({out!r}, "w"))
{then}
"""


class Served(BaseHTTPRequestHandler):
    """Says that it serves some models."""

    models: list[dict[str, Any]] = []
    key: str | None = None

    def do_GET(self) -> None:
        allowed = self.key is None or self.headers["authorization"] == f"Bearer {self.key}"
        body = json.dumps({"data": self.models} if allowed else {}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def card(name: str, context: int | None = 40_000, tasks: tuple[str, ...] = ("generate",)) -> dict[str, Any]:
    return {"id": name, "owned_by": "quire", "max_model_len": context, "quire": {"tasks": list(tasks)}}


@pytest.fixture
def server() -> Iterator[tuple[str, type[Served]]]:
    class Own(Served):
        models = [card("embedder", tasks=("embed",)), card("coder:1b")]

    http = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}", Own
    http.shutdown()
    http.server_close()


class Machine:
    """A PATH with one stand-in on it, and a store of its own."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.home = folder, folder / "bin", folder / "home"
        self.bin.mkdir()

    def install(self, program: str, then: str = "sys.exit(7)") -> None:
        path = self.bin / program
        path.write_text(PROGRAM.format(python=sys.executable, out=str(self.folder / "told.json"), then=then))
        path.chmod(0o755)

    @property
    def told(self) -> dict[str, Any]:
        return json.loads((self.folder / "told.json").read_text())

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "ANTHROPIC_", "OPENAI_"))}
        env |= {"PATH": str(self.bin), "QUIRE_HOME": str(self.home), **more}
        command = [sys.executable, "-m", "quire.cli.main", "launch", *words]
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def launch(self, *words: str, **more: str) -> tuple[int, str, str]:
        process = self.start(*words, **more)
        out, said = process.communicate(timeout=60)
        return process.returncode, out, said


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("agent", list(AGENTS))
def test_an_agent_is_given_the_server_that_runs(agent: str, machine: Machine, server: tuple[str, type[Served]]):
    url, _ = server
    machine.install(AGENTS[agent].program)
    code, out, said = machine.launch(agent, "--url", f"{url}/v1/", "--", "--flag", "two words", ANTHROPIC_API_KEY="own")
    assert (code, out) == (7, ""), said
    assert said == f"{AGENTS[agent].title} on coder:1b at {url}\n"
    told = machine.told
    expected = AGENTS[agent].configure(Target(url, "coder:1b", 40_000, None, machine.home / "agents" / agent))
    assert told["arguments"] == [*expected.arguments, "--flag", "two words"]
    for name, value in expected.variables.items():
        assert told["environment"][name] == value
    assert url in json.dumps(told) and "coder:1b" in json.dumps(told), "neither is only in our own settings"
    assert not set(expected.removed) & told["environment"].keys()
    assert {name: (machine.home / "agents" / agent / name).read_text() for name in expected.files} == expected.files
    assert told["files"].items() <= expected.files.items()


@pytest.mark.parametrize("agent", list(AGENTS))
def test_what_is_printed_does_the_same(agent: str, machine: Machine, server: tuple[str, type[Served]]):
    """The lines, run by a shell, start the program as the command itself does."""
    url, _ = server
    machine.install(AGENTS[agent].program)
    words = (agent, "--url", url, "--model", "coder:1b")
    assert machine.launch(*words, "--", "a b")[0] == 7
    launched = machine.told
    for path in (machine.home / "agents").rglob("*"):
        if path.is_file():
            path.unlink()
    code, lines, said = machine.launch(*words, "--print", "--", "a b")
    assert (code, said) == (0, "")
    env = {"PATH": f"{machine.bin}:{os.environ['PATH']}", "ANTHROPIC_API_KEY": "own", "QUIRE_HOME": str(machine.home)}
    assert subprocess.run(["sh", "-c", lines], env=env, timeout=60).returncode == 7
    printed = machine.told
    assert (printed["arguments"], printed["files"]) == (launched["arguments"], launched["files"])
    names = AGENTS[agent].configure(Target(url, "m", 1, None, machine.home)).variables
    assert all(printed["environment"][name] == launched["environment"][name] for name in names)
    assert "ANTHROPIC_API_KEY" not in printed["environment"] or agent != "claude"


def test_a_key_reaches_the_agent_and_is_not_shown(machine: Machine, server: tuple[str, type[Served]]):
    url, served = server
    served.key = "secret$word"
    machine.install("claude")
    code, _, said = machine.launch("claude", "--url", url)
    assert code == 1 and "asks for a key" in said and "QUIRE_API_KEY" in said
    assert machine.launch("claude", "--url", url, QUIRE_API_KEY=served.key)[0] == 7
    assert machine.told["environment"]["ANTHROPIC_AUTH_TOKEN"] == served.key
    for agent in AGENTS:
        code, lines, _ = machine.launch(agent, "--url", url, "--print", QUIRE_API_KEY=served.key)
        assert code == 0 and served.key not in lines and "QUIRE_API_KEY" in lines, agent
    _, lines, _ = machine.launch("claude", "--url", url, "--print", QUIRE_API_KEY=served.key)
    env = {"PATH": f"{machine.bin}:{os.environ['PATH']}", "QUIRE_API_KEY": served.key}
    subprocess.run(["sh", "-c", lines], env=env, timeout=60)
    assert machine.told["environment"]["ANTHROPIC_AUTH_TOKEN"] == served.key


def test_what_cannot_be_is_told_before_anything_starts(machine: Machine, server: tuple[str, type[Served]]):
    url, served = server
    code, _, said = machine.launch("codex", "--url", url)
    assert code == 1 and "`codex` on the PATH: npm install -g @openai/codex" in said
    code, _, said = machine.launch("cursor")
    assert code == 1 and "no agent 'cursor'" in said and "codex, claude, opencode, qwen, aider, llm" in said
    machine.install("claude")
    served.models = [card("coder:1b", context=16_384)]
    code, _, said = machine.launch("claude", "--url", url)
    assert code == 1 and "context of 16384" in said and "--context" in said
    assert not (machine.folder / "told.json").exists()
    machine.install("llm")  # which sends nothing of its own
    assert machine.launch("llm", "--url", url)[0] == 7


def test_lean_is_for_those_who_can_be(machine: Machine, server: tuple[str, type[Served]]):
    url, _ = server
    for agent in AGENTS.values():
        machine.install(agent.program)
        code, _, said = machine.launch(agent.name, "--url", url, "--lean")
        assert code == (7 if agent.lean else 1), said
        assert agent.lean or "--lean does nothing for it" in said
        target = Target(url, "m", 32_768, None, machine.home)
        assert (agent.configure(target) == agent.configure(replace(target, lean=True))) is not agent.lean


def test_signals_are_passed_on(machine: Machine, server: tuple[str, type[Served]]):
    url, _ = server
    catches = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(9)); print('up', flush=True); time.sleep(60)"
    )
    machine.install("llm", catches)
    process = machine.start("llm", "--url", url)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)  # at a terminal it reaches the agent, too: here it does nothing
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 9
    machine.install("llm", "import signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert machine.launch("llm", "--url", url)[0] == 137


def test_a_server_that_still_loads_is_waited_for(machine: Machine, server: tuple[str, type[Served]]):
    url, served = server
    served.models = [card("coder:1b", context=None) | {"quire": {"tasks": None}}]
    machine.install("llm")
    process = machine.start("llm", "--url", url)
    assert process.stderr is not None and "still loading" in process.stderr.readline()
    served.models = [card("coder:1b")]
    assert process.wait(30) == 7
    process.communicate()


def test_nothing_but_a_server_of_ours_is_used(machine: Machine, server: tuple[str, type[Served]]):
    """What else listens there is left alone. A server of one's own would then be started: here its model is not to be had."""
    url, served = server
    served.models = [card("coder:1b") | {"owned_by": "somebody"}]
    machine.install("llm")
    code, _, said = machine.launch("llm", "--url", url, "--model", "./nowhere.gguf")
    assert code == 1 and "nowhere.gguf" in said and not (machine.folder / "told.json").exists()
    code, lines, said = machine.launch("llm", "--url", url, "--print")
    assert code == 0 and "quire serve qwen2.5-coder:1.5b" in said and "qwen2.5-coder:1.5b" in lines


def test_agents_wait_for_slow_answers():
    """Each has a limit of its own on how long an answer may take, and none is left at its default."""
    target = Target("http://h:1", "m", 32_768, None, Path("/x"))
    for agent in AGENTS.values():
        settings = agent.configure(target)
        text = " ".join([*settings.arguments, *settings.variables.values(), *settings.files.values()])
        waits = (str(PATIENCE_MS), f"--timeout {PATIENCE_MS // 1000}", '"timeout":false')
        assert any(wait in text for wait in waits) or agent.name == "llm", agent.name  # llm cannot be told


def test_words_are_quoted_for_a_shell():
    target = Target("http://h:1", "it's a `model`", 32_768, "k", Path("/a b"))
    for agent in AGENTS.values():
        lines = as_shell(agent, target, ("say $HOME",))
        assert shlex.split(lines.splitlines()[-1])[-1] == "say $HOME"


def test_the_page_shows_these_settings():
    page = (ROOT / "docs" / "agents.md").read_text()
    assert written(page) == page, "python -m quire.cli.agents.page docs/agents.md"
    for agent in AGENTS.values():
        assert f"<!-- settings: {agent.name} -->" in page and f"| {agent.title} | `{agent.name}` |" in page
