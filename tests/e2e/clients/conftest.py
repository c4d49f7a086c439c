"""One server for every client in this folder, started as a user starts it, with a key that each client must send.

Its template is the default model's turns plus tools and reasoning, so that a model of 98 MB calls a tool wherever it must.
Clients from npm live in build/clients (`make test-clients` puts them there, or QUIRE_TEST_NPM names another folder);
their scripts lie beside the tests and print one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import ROOT, Server, launch, wait_until

HERE = Path(__file__).resolve().parent
KEY = "a-key-of-the-tests"
LONG = 1500  # tokens nobody waits for
NPM = Path(os.environ.get("QUIRE_TEST_NPM", ROOT / "build" / "clients"))

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA},
}


def round_of(city: str) -> list[Any]:
    """A question, the call it led to, its result, and the answer."""
    call = {
        "id": f"call_{city}",
        "type": "function",
        "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
    }
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "18 degrees"},
        {"role": "assistant", "content": f"It is 18 degrees in {city}."},
    ]


# After two rounds before its eyes even this model calls by itself and then tells the result, and greedily always the same.
TALK: list[Any] = [*round_of("Rome"), *round_of("Oslo"), {"role": "user", "content": "What is the weather in Paris?"}]
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
FOUND = "21 degrees"
TOLD = "It is 21 degrees in Paris."


@dataclass
class Served:
    """The server as a client sees it."""

    server: Server
    model: str = DEFAULT_MODEL
    key: str = KEY

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def openai(self) -> str:
        return f"{self.server.url}/v1"

    def metric(self, name: str) -> float:
        """The value of the one series whose name starts so."""
        text = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {self.key}"}, timeout=10).text
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        return float(line.rpartition(" ")[2])

    @contextlib.contextmanager
    def stops_early(self) -> Iterator[None]:
        """What is given up inside is no longer computed afterwards, and was not computed to its end."""
        before = self.metric("vllm:generation_tokens_total{")
        yield

        def over() -> bool:  # what a scrape tells may be a moment old
            made = self.metric("vllm:generation_tokens_total{") > before
            return made and self.metric("vllm:num_requests_running{") == 0

        wait_until(over, 10)
        assert self.metric("vllm:generation_tokens_total{") - before < LONG - 100


@pytest.fixture(scope="session")
def served(model_path: Path) -> Iterator[Served]:
    """The default model with tools."""
    options = ("--chat-template", str(HERE / "tools.jinja"), "--context", "2048")
    started = launch(*options, env={"QUIRE_API_KEY": KEY})
    yield Served(started)
    assert started.stop() == 0, "\n".join(started.lines)


@pytest.fixture(scope="session")
def embedder(model_path: Path) -> Iterator[Served]:
    """The same model as one that embeds."""
    started = launch("--task", "embed", "--context", "256", env={"QUIRE_API_KEY": KEY})
    yield Served(started)
    assert started.stop() == 0, "\n".join(started.lines)


Script = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """Run a script of this folder in node, and give what it printed."""
    node = shutil.which("node")
    folder = tmp_path_factory.mktemp("node")

    def run(name: str, at: Served) -> dict[str, Any]:
        assert node is not None
        if not (folder / "node_modules").exists():
            (folder / "node_modules").symlink_to(NPM / "node_modules")  # imports are looked for beside the script
        copied = Path(shutil.copy(HERE / name, folder))
        env = {"QUIRE_URL": at.url, "QUIRE_KEY": at.key, "QUIRE_MODEL": at.model}
        done = subprocess.run(
            [node, str(copied)],
            env={"PATH": os.environ["PATH"], **env, "QUIRE_TALK": json.dumps(TALK)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def needs_npm(*packages: str) -> pytest.MarkDecorator:
    """Skip where node or a package is not there."""
    if shutil.which("node") is None:
        return pytest.mark.skip(reason="needs node on the PATH (20 or newer)")
    missing = [name for name in packages if not (NPM / "node_modules" / name / "package.json").is_file()]
    reason = f"needs the npm packages {', '.join(missing)} in {NPM}: `make test-clients` installs them"
    return pytest.mark.skipif(bool(missing), reason=reason)
