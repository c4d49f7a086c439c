"""Two readers of one declaration: what the plain reader makes of a command line is what typer makes of it."""

from __future__ import annotations

import importlib
import random
from typing import Annotated, Any

import pytest
import typer

from quire.cli import app
from quire.cli.arguments.options import Argument, Option, for_typer, parameters, parse
from quire.cli.verbs import VERBS

PLAIN = ("run", "embed", "pull", "list", "show", "ps", "version")
WORDS = (
    "hello", "", " ", "a b", "7", "0", "1.5", "1e3", "nan", "-1", "-0.5", "-", "--", "-x", "--raw", "--raw=1", "--no-raw", "--json",
    "--known", "--force", "--seed", "--seed=3", "--seed=-1", "--top-p", "--top_p", "--top-p=0.5", "--temp", "--temperature", "--system",
    "--system=", "--system=--x", "--stats", "--threads", "--threads=2", "--help", "-h", "--max-tokens", "--max-tokens=x", "é", "\udce9",
    "--debug", "--kv-memory=1GiB", "１２",
)  # fmt: skip


def through_typer(function: Any, words: list[str]) -> dict[str, Any] | None:
    """What typer gives the function; None where it has something else to say."""
    got: dict[str, Any] = {}

    def catch(**given: Any) -> None:
        got.update(given)

    catch.__signature__ = function.__signature__
    catch.__annotations__ = function.__annotations__
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command("verb", context_settings=app.SETTINGS)(catch)
    try:
        typer.main.get_command(single).main(list(words), prog_name="verb", standalone_mode=False)
    except Exception:
        return None
    return got or None


def shown(given: dict[str, Any] | None) -> str:
    return "typer refuses" if given is None else repr(sorted(given.items()))  # as text: nan is not itself


@pytest.mark.parametrize("verb", PLAIN)
def test_what_the_plain_reader_reads_typer_reads_the_same(verb: str):
    command = importlib.import_module(f"quire.cli.{verb}").command
    typed = for_typer(command)
    rng = random.Random(verb)
    read = 0
    for _ in range(400):
        words = [rng.choice(WORDS) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6)))]
        given = parse(command, words)
        if given is not None:
            read += 1
            assert shown(through_typer(typed, words)) == shown(given), words
    assert read > 20  # else nothing was compared


def test_plain_verbs_are_read_without_typer():
    run = importlib.import_module("quire.cli.run").command
    given = parse(run, ["smollm2:135m", "Say", "--temperature", "0", "hello.", "--seed=5", "--raw"])
    assert given is not None
    assert (given["model"], given["prompt"], given["temperature"], given["seed"]) == (
        "smollm2:135m",
        ["Say", "hello."],
        0.0,
        5,
    )
    assert given["raw"] is True and given["stats"] is False and given["threads"] is None
    assert all(parameters(importlib.import_module(f"quire.cli.{v}").command) is not None for v in PLAIN)


LEFT = "--help|-h|--nonsense|--seed|--seed x|--seed -1|--raw=1|--|-x|--seed 1 --seed 2|--see 1"


@pytest.mark.parametrize("words", [line.split() for line in LEFT.split("|")])
def test_what_is_not_plain_is_left_to_typer(words: list[str]):
    assert parse(importlib.import_module("quire.cli.run").command, words) is None


def test_a_verb_declared_with_typer_is_left_to_typer():
    def command(port: Annotated[int, typer.Option(min=1)] = 1) -> None: ...

    globals()["typer"] = typer
    assert parameters(command) is None and parse(command, []) is None
    assert for_typer(command) is command
    assert parameters(typer.Typer()) is None


def test_too_few_or_too_many_arguments_are_left_to_typer():
    def one(
        name: Annotated[str, Argument(help="")], loud: Annotated[bool, Option("--loud", help="")] = False
    ) -> None: ...

    globals().update(Argument=Argument, Option=Option)
    assert parse(one, []) is None and parse(one, ["a", "b"]) is None
    assert parse(one, ["--loud", "a"]) == {"name": "a", "loud": True}


def test_every_verb_is_known():
    for verb in VERBS:
        assert hasattr(importlib.import_module(f"quire.cli.{verb}"), "command")
