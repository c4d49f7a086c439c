"""The verbs through typer: help, `--debug`, `--version`, error messages, and every spelling that `arguments/options.py` leaves to it.

A verb is imported when it is invoked and not before: `quire --help` reads the table in verbs.py alone.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quire.cli.verbs import VERBS, outcome

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

            from quire.cli.arguments.other_engines import VERBS as THEIRS

            near = THEIRS.get(verb) or next(iter(difflib.get_close_matches(verb, VERBS, n=1)), None)
            hint = f" Did you mean {near!r}?" if near else f" There are {', '.join(VERBS)}."
            ctx.fail(f"There is no verb {verb!r}.{hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        words = list(ctx.args)
        try:
            code = outcome(lambda: super(Verbs, self).invoke(ctx), debug=ctx.params.get("debug", False))
        except Exception as e:
            if hasattr(e, "possibilities"):  # an option that the verb does not have
                point_out(e, words)
            raise
        if code:
            raise typer.Exit(code) from None


def point_out(error: Any, words: list[str]) -> None:
    """What an option that is not there is called here, where it is one that other engines have."""
    from quire.cli.arguments.other_engines import hint

    known = [name for p in error.ctx.command.params for name in (*p.opts, *p.secondary_opts)] if error.ctx else []
    said = hint(error.option_name, words, known)
    if said is not None:
        error.message, error.possibilities = f"No such option: {error.option_name}: {said}.", []


def load(verb: str) -> Any:
    """The command of `verb`, its module imported now."""
    from quire.cli.arguments.options import for_typer

    module = importlib.import_module(f"quire.cli.{verb}")
    if isinstance(module.command, typer.Typer):  # a verb with verbs of its own
        return typer.main.get_command(module.command)
    # An app with one command and no callback is that command.
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(verb, context_settings=SETTINGS)(for_typer(module.command))
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
    """Quire runs language models: in the terminal, as a server, or from Python."""
