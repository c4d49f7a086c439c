"""Two agents on a model that writes code: `quire launch` starts the server, the agent works, and the server is gone afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.launch import CODER
from quire.config import Environment
from quire.observe.errors import QuireError
from quire.weights.store.store import Store
from tests.e2e.clients.agents import kit

pytestmark = pytest.mark.large
SECONDS = 900.0


@pytest.fixture
def launched(tmp_path: Path) -> kit.Place:
    try:
        Store().resolve(CODER)
    except QuireError:
        pytest.skip(f"needs {CODER}: `quire pull {CODER}`")
    return kit.place(tmp_path)


def launch(place: kit.Place, agent: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """With a server of its own: nothing listens at port 9."""
    kit.needs_agent(agent)
    own = [
        sys.executable,
        "-P",
        "-m",
        "quire.cli.main",
        "launch",
        agent,
        "--model",
        CODER,
        "--url",
        "http://127.0.0.1:9",
    ]
    store = str(Environment.read().home)
    return place.run([*own, "--", *arguments], {"QUIRE_HOME": store, **variables}, SECONDS)


def test_aider_mends_a_file(launched: kit.Place):
    flags = ("--yes-always", "--no-check-update", "--no-analytics", "--no-gitignore", "--map-tokens", "0", "calc.py")
    asked = "The function add subtracts. Change it so that it adds. Change nothing else."
    done = launch(launched, "aider", *flags, "--message", asked, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert done.returncode == 0, done.stdout
    ran = subprocess.run([sys.executable, "calc.py"], cwd=launched.project, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "sum=5\n", done.stdout


def test_codex_works_to_the_end(launched: kit.Place):
    """What a model of this size makes of Codex's prompt is its own affair: the agent gets its answers and ends well."""
    flags = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    done = launch(launched, "codex", *flags, "Run `python3 calc.py` and tell what it prints.")
    assert done.returncode == 0, done.stdout
    assert "stream disconnected" not in done.stdout and "ERROR" not in done.stdout, done.stdout
    assert "tokens used" in done.stdout, done.stdout
