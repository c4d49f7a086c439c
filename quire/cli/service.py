"""`quire service`: `quire serve` in the background, started with the machine or the login, and started again when it fails.

What a service runs is a command line of `quire serve`, which is checked here as `quire serve` itself would check it. No key is ever in
it: every user of the machine sees command lines. Keys and the other variables go into a file that its owner alone can read.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.services import plan
from quire.cli.services.plan import Service, Supervisor
from quire.cli.terminal import ui
from quire.config import Environment
from quire.observe.errors import BadRequest, NotFound, QuireError

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

Name = Annotated[str, typer.Option(help="Name of the service, for several on one machine.")]
System = Annotated[bool, typer.Option("--system", help="Of the machine; takes root. Default: of your user.")]
Words = Annotated[list[str] | None, typer.Argument(metavar="[-- SERVE OPTIONS]", show_default=False)]

command = typer.Typer(
    name="service",
    help="Run `quire serve` in the background: systemd on Linux, launchd on macOS.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings=SETTINGS,
)


@command.command(context_settings=SETTINGS, short_help="Write the service, enable it and start it.")
def install(
    options: Words = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model to serve, as `quire serve` takes it; may be repeated.")
    ] = None,
    name: Name = "quire",
    system: System = False,
    run_as: Annotated[
        str | None,
        typer.Option(help="With --system: the account it runs as. Default on Linux: one of its own, made by systemd."),
    ] = None,
    show: Annotated[bool, typer.Option("--print", help="Show the files and where they go; write nothing.")] = False,
) -> None:
    """Write the service, enable it and start it.

    What stands behind -- are options of `quire serve`. QUIRE_API_KEY and the other variables that Quire knows are taken from here into a
    file that only its owner can read; those of an earlier installation stay unless they are set anew. Installing again changes what differs,
    and restarts the service only then.
    """
    plan.check_name(name)
    supervisor = supervisor_of(system)
    service = describe(supervisor, name, system, run_as, [*(model or []), *(options or [])], model or [])
    if show:
        for file in supervisor.files(_covered(service)):
            ui.echo(f"# {file.path} (mode {file.mode:04o})\n{file.text}")
        return
    if system and os.geteuid() != 0:
        raise BadRequest("a service of the machine is installed by root", cure="use sudo, or leave --system out")
    if system and not run_as:
        _check_reachable(Path(sys.executable))
    files = supervisor.files(service)
    written = plan.write(files)
    for file in files:
        ui.note(f"{file.path}: {'written' if file in written else 'as it was'}")
    supervisor.start(name, changed=bool(written))
    for hint in supervisor.hints(name):
        ui.note(hint)
    where = f"{' --system' if system else ''}{'' if name == 'quire' else f' --name {name}'}"
    ui.note(f"{name} is started; `quire service status{where}` and `quire service logs{where}` say how it is")


@command.command(context_settings=SETTINGS, short_help="Stop the service and remove its files; models stay.")
def uninstall(name: Name = "quire", system: System = False) -> None:
    """Stop the service and remove its files. Models, and what the server kept, stay."""
    plan.check_name(name)
    supervisor = supervisor_of(system)
    there = [path for path in supervisor.paths(name) if path.exists()]
    foreign = [path for path in there if not plan.ours(path)]
    if foreign:
        raise BadRequest(f"{foreign[0]} is not one that Quire wrote", cure="remove it by hand, if it is yours")
    if not there:
        ui.note(f"{name} is not installed")
        return
    if supervisor.paths(name)[0].exists():
        supervisor.stop(name)
    for path in there:
        path.unlink()
        ui.note(f"{path}: removed")
    supervisor.reload()


@command.command(context_settings=SETTINGS, short_help="Show whether the service runs.")
def status(name: Name = "quire", system: System = False) -> None:
    """Show whether the service runs, in the words of systemd or launchd. Exits as they do: 0 when it runs."""
    raise typer.Exit(_installed(name, system).status(name))


@command.command(context_settings=SETTINGS, short_help="Show what the service said.")
def logs(
    name: Name = "quire",
    system: System = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="The last so many lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on showing what it says.")] = False,
) -> None:
    """Show what the service said."""
    raise typer.Exit(_installed(name, system).logs(name, lines, follow))


def supervisor_of(system: bool) -> Supervisor:
    """What starts services here."""
    if sys.platform.startswith("linux"):
        from quire.cli.services.systemd import Systemd

        return Systemd(system)
    if sys.platform == "darwin":
        from quire.cli.services.launchd import Launchd

        return Launchd(system)
    raise QuireError(
        f"services are for Linux (systemd) and macOS (launchd), and this is {sys.platform}",
        cure="let your own supervisor start `quire serve`: docs/deploying.md says what it needs to know",
    )


def describe(
    supervisor: Supervisor, name: str, system: bool, run_as: str | None, words: list[str], models: list[str]
) -> Service:
    """The service that was asked for. Nothing is written yet."""
    if run_as is not None and not system:
        raise BadRequest("--run-as is for --system: a service of yours runs as you", cure="leave it out")
    plan.check_words([*words, run_as or ""])
    asked = _parsed(words, len(models))
    kept = supervisor.kept(name)
    env = Environment.read()
    home = supervisor.home(name, run_as)
    if home is not None and home != env.home:
        ui.note(f"QUIRE_HOME of the service is {home}; models that you have pulled elsewhere are not found there")
    if home is None:
        home = Path(kept["QUIRE_HOME"]) if env.home == _usual_home() and "QUIRE_HOME" in kept else env.home.absolute()
    values = plan.variables(env, kept, home)
    given = str(asked["host"])
    if not given.startswith(("127.", "localhost", "::1")) and not (values.get("QUIRE_API_KEY") or asked["api_keys"]):
        ui.note(f"warning: whoever can reach {given} can use this server; set QUIRE_API_KEY to ask for a key")
    return Service(
        name=name,
        system=system,
        run_as=run_as,
        command=(
            sys.executable,
            "-P",
            "-m",
            "quire",
            "serve",
            *map(_absolute, words[: len(models)]),
            *words[len(models) :],
        ),
        variables=values,
        home=home,
        drain=float(asked["drain_seconds"]),
    )


def _parsed(words: list[str], models: int) -> dict[str, Any]:
    """What `quire serve` reads from these words, of which the first are models. Its own error where it would refuse them, and ours for
    what a service cannot have."""
    from quire.cli.app import load

    if any(word in ("-h", "--help") for word in words):
        raise BadRequest("help is nothing that a service can run", cure="`quire serve --help` shows the options")
    option = next((word for word in words[:models] if word.startswith("-")), None)
    if option is not None:
        raise BadRequest(f"{option} is no model", cure="options of `quire serve` stand behind --")
    params = load("serve").make_context("quire serve", list(words)).params
    if params["api_key"] is not None:
        raise BadRequest(
            "a key on a command line is seen by every user of the machine",
            cure="set QUIRE_API_KEY when you install: it goes into a file that only its owner can read",
        )
    state = params["state_dir"]
    paths = [
        ("--api-keys", params["api_keys"]),
        ("--chat-template", params["chat_template"]),
        ("--state-dir", None if state == "none" else state),
        *(("--lora", lora.partition("=")[2]) for lora in params["lora"] or ()),
    ]
    for name, path in paths:
        if path is not None and not Path(path).is_absolute():
            raise BadRequest(f"{name} {path} is relative, and the service starts elsewhere", cure="give the whole path")
    for model in (params["models"] or ())[models:]:
        if _absolute(model) != model:
            raise BadRequest(f"{model} is relative, and the service starts elsewhere", cure="give it with --model")
    return params


def _usual_home() -> Path:
    return Path("~/.cache/quire").expanduser()


def _absolute(model: str) -> str:
    """A model's name, or the whole path where it is a file or folder of here."""
    alias, equals, name = model.rpartition("=")
    path = Path(name).expanduser()
    return f"{alias}{equals}{path.absolute()}" if path.exists() and not path.is_absolute() else model


def _installed(name: str, system: bool) -> Supervisor:
    plan.check_name(name)
    supervisor = supervisor_of(system)
    if not supervisor.paths(name)[0].exists():
        where = "this machine" if system else "you"
        raise NotFound(
            f"there is no service {name!r} of {where}",
            cure="`quire service install` makes one"
            if system
            else "`quire service install` makes one; --system looks among the machine's",
        )
    return supervisor


def _check_reachable(program: Path) -> None:
    """An account that systemd makes up can start only what everybody can."""
    for one in (program.absolute(), program.resolve(), Path(__file__).resolve()):
        shut = next((p for p in reversed(one.parents) if not p.stat().st_mode & 0o001), None)
        if shut is not None:
            raise BadRequest(
                f"the service runs as an account of its own, which cannot enter {shut}, and Quire is below it",
                cure="install Quire where everybody can read it, such as /opt/quire, or say --run-as",
            )


def _covered(service: Service) -> Service:
    """The service with its variables covered, but for what is plainly no secret: what is printed ends up in other people's terminals."""
    plain = ("QUIRE_HOME", "QUIRE_THREADS", "QUIRE_KV_MEMORY", "QUIRE_ISA")
    shown = {name: value if name in plain else "(not shown)" for name, value in service.variables.items()}
    return replace(service, variables=shown)
