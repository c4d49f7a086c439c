"""The command `quire`: a table of verbs, each imported when it is invoked and not before.

Owns what all verbs share: help, `--debug`, exit codes (0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 nobody
reads), and the rule that a QuireError is one line with its cure and never a traceback. A verb is one file of this folder
with a typer function called `command`, and one row of VERBS.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

# name -> one line of help. `quire --help` reads this alone, so that it is instant.
VERBS: dict[str, str] = {
    "run": "Chat with a model, or ask it one thing.",
    "serve": "Serve a model over HTTP (OpenAI's API).",
    "pull": "Fetch models into the store.",
    "list": "The models on this machine.",
    "show": "What is inside a model.",
    "rm": "Remove models from the store.",
    "ps": "The servers running on this machine.",
    "bench": "Measure how fast a model runs here.",
    "doctor": "Check this machine, and say how to cure what is wrong.",
    "version": "Version, Python, platform and kernels.",
}
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Verbs(TyperGroup):
    """A group whose commands are loaded by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load(cmd_name) if cmd_name in VERBS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb = args[0] if args else ""
        if verb and verb not in VERBS and not verb.startswith("-"):
            import difflib

            near = difflib.get_close_matches(verb, VERBS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(VERBS)}."
            ctx.fail(f"There is no verb {verb!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            # Whoever read our output has gone: what is still buffered must not fail a second time at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as e:
            if ctx.params.get("debug") or _is_for_typer(e):
                raise
            from quire.cli import ui

            ui.fail(e)
            raise typer.Exit(1) from None


def _is_for_typer(e: Exception) -> bool:
    """Usage errors, Exit and Abort: typer prints them and picks their exit codes itself."""
    return isinstance(e, (typer.Exit, typer.Abort)) or hasattr(e, "exit_code")


def load(verb: str) -> Any:
    """The command of `verb`, its module imported now."""
    module = importlib.import_module(f"quire.cli.{verb}")
    if isinstance(module.command, typer.Typer):  # a verb with verbs of its own
        return typer.main.get_command(module.command)
    # An app with one command and no callback is that command.
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(verb, context_settings=SETTINGS)(module.command)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)


def _print_version(asked: bool) -> None:
    if asked:
        from quire.config import VERSION

        typer.echo(f"quire {VERSION}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Quire runs language models: the same tokens every time, told why, told the price."""


def main() -> None:
    """The console script."""
    app(prog_name="quire")


if __name__ == "__main__":
    main()
