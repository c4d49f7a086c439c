"""Each coding agent does a task with its own tools and goes on with it afterwards, on a scripted model behind the real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.cli.agents.known import AGENTS
from tests.e2e.clients.agents import kit

# Characters of tools that lean instructions stay below; in full they are 17,000, 64,000, 21,000 and 39,000.
LEAN = {"codex": 6_000, "claude": 10_000, "opencode": 14_000, "qwen": 20_000}


@dataclass
class Done:
    """What one agent did."""

    case: kit.Case
    place: kit.Place
    code: int
    said: str
    code_again: int
    said_again: str
    first: list[kit.Recorded]
    second: list[kit.Recorded]


@pytest.fixture(scope="module", params=list(kit.CASES))
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Done]:
    kit.needs_agent(request.param)
    case = kit.CASES[request.param]
    folder = tmp_path_factory.mktemp(case.name)
    place = kit.place(folder)
    with kit.scripted(folder / "server", case.rules(place.project)) as server:
        one = place.launch(case.name, server.url, (*case.first, kit.TASK), **case.variables)
        first = server.recorded()
        two = place.launch(case.name, server.url, (*case.again, kit.AGAIN), **case.variables)
        seen = server.recorded()
    yield Done(case, place, one.returncode, one.stdout, two.returncode, two.stdout, first, seen[len(first) :])


def test_the_task_is_done(done: Done):
    assert done.code == 0, done.said
    assert (done.place.project / "calc.py").read_text() == kit.MENDED, done.said
    assert (done.place.project / "out.txt").read_text() == "sum=5\n", done.said
    assert "THE SUM IS 5" in done.said


def test_the_conversation_goes_on(done: Done):
    """The model can only know the sum from the turns that the agent sends again."""
    assert done.code_again == 0, done.said_again
    assert "Again: 5" in done.said_again


def test_the_server_refuses_nothing(done: Done):
    for seen in (*done.first, *done.second):
        assert seen.status == 200, (seen.route, seen.answer)
    asked = "GET /v1/models"  # by `quire launch`
    assert {seen.route for seen in (*done.first, *done.second)} == done.case.routes | {asked}
    tools = [call for call in done.case.calls if call[0]]
    assert len(done.first) >= len(tools) + 1 and done.second


# Claude Code's line about itself is left out of every prompt, and told.
BILLING = "system: Claude Code's line x-anthropic-billing-header is no part of the prompt"


def test_nothing_that_was_sent_is_without_effect(done: Done):
    assert {note for seen in (*done.first, *done.second) for note in seen.notes} <= {BILLING}


@pytest.mark.parametrize("agent", [name for name, one in AGENTS.items() if one.lean])
def test_lean_instructions_do_the_task_too(agent: str, tmp_path: Path, model_path: Path):
    """The tools that are left do it, and the prompt is a good part shorter."""
    kit.needs_agent(agent)
    case, place = kit.CASES[agent], kit.place(tmp_path)
    with kit.scripted(tmp_path / "server", case.rules(place.project)) as server:
        done = place.launch(agent, server.url, (*case.first, kit.TASK), "--lean", **case.variables)
        seen = [one for one in server.recorded() if one.route.startswith("POST")]
    assert done.returncode == 0 and "THE SUM IS 5" in done.stdout, done.stdout
    assert (place.project / "out.txt").read_text() == "sum=5\n"
    assert {one.status for one in seen} == {200}
    assert {note for one in seen for note in one.notes} <= {BILLING}
    first = next(one for one in seen if one.body.get("tools"))
    length = len(json.dumps(first.body["tools"]))
    print(f"{agent}: {length} characters of tools, {kit.tokens(first.answer)} tokens before the first answer")
    assert 0 < length < LEAN[agent]
