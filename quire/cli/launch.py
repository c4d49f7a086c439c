"""`quire launch`: a coding agent on a model that is served here, with everything set for it and none of its own settings changed.

Uses a server that runs already, or starts one of its own for as long as the agent runs. What each agent needs is in `agents/known.py`.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.arguments.options import Argument, Option
from quire.cli.terminal import ui
from quire.config import Environment, child_environment
from quire.observe.errors import BadRequest, NotFound, QuireError

if TYPE_CHECKING:
    from quire.cli.agents.background import Running
    from quire.cli.agents.settings import Agent, Settings, Target
    from quire.weights.store.store import Store

CODER = "qwen2.5-coder:1.5b"  # the model where none is named and no server runs: the best at code that has a short name
CONTEXT = 32_768  # in what is printed, where no server can be asked
URL = "http://127.0.0.1:8000"
PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def command(
    agent: Annotated[str, Argument(metavar="AGENT", help="codex, claude, opencode, qwen, aider or llm.")],
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="ARGUMENTS", help="What the agent itself is given; after `--` where that begins with a dash."),
    ] = None,
    model: Annotated[
        str | None, Option("--model", help=f"Model to serve. Default: that of the running server, or {CODER}.")
    ] = None,
    url: Annotated[str, Option("--url", help="Where a server may run already; it is used if it has the model.")] = URL,
    lean: Annotated[
        bool, Option("--lean", help="Only the tools that work on code: much less to read before the first answer.")
    ] = False,
    show: Annotated[bool, Option("--print", help="Show the settings and the command, as lines for a shell.")] = False,
) -> None:
    """Start a coding agent on a model served here.

    A server that runs at --url and has the model is used; otherwise one is started on a free port, and stopped when the agent ends.
    The agent's own configuration is not changed. Its exit code is the one of this command. docs/agents.md has the details.
    """
    import shutil

    from quire.cli.agents.known import AGENTS
    from quire.cli.agents.settings import as_shell

    if lean and agent in AGENTS and not AGENTS[agent].lean:
        raise BadRequest(f"{AGENTS[agent].title} has no tools to leave out: --lean does nothing for it", param="lean")
    if agent not in AGENTS:
        raise BadRequest(f"there is no agent {agent!r} here: there are {', '.join(AGENTS)}", param="agent")
    one = AGENTS[agent]
    env = Environment.read()
    given = tuple(arguments or ())
    if show:
        ui.echo(as_shell(one, _shown(one, model, url, env, lean), given))
        return
    program = shutil.which(one.program)
    if program is None:
        raise NotFound(f"{one.title} is not here: there is no program `{one.program}` on the PATH", cure=one.install)
    for number in (signal.SIGTERM, signal.SIGHUP):  # a server that was started is stopped whatever ends this process
        signal.signal(number, _leave)
    with _server(model, url, env) as running:
        target = _target(one, running, env, lean)
        _must_fit(one, target)
        settings = one.configure(target)
        _write(target.folder, settings)
        ui.note(f"{one.title} on {target.model} at {target.url}")
        code = _run([program, *settings.arguments, *given], settings)
    raise SystemExit(code)


@contextlib.contextmanager
def _server(model: str | None, url: str, env: Environment) -> Generator[Running]:
    """The server that has the model: one that is there, or one that is started."""
    from quire.cli.agents import background
    from quire.cli.pull import here, supported
    from quire.weights.store.store import Store

    store = Store(env, accepts=supported)
    url = url.rstrip("/").removesuffix("/v1")
    found = _running(store, model, url, env)
    if found is not None:
        name = found.model
        if found.context is None:
            ui.note(f"{name} is still loading at {url}")
            found = background.wait_until_ready(
                url, name, env.api_key, ui.note, lambda: background.find(url, name, env.api_key) is not None
            )
        yield found
        return
    wanted = model or CODER
    here(store, wanted)  # with a bar, before anything runs in the background
    with background.started(wanted, _name(store, wanted), env.home, child_environment({}), env.api_key, ui.note) as own:
        yield own


def _running(store: Store, model: str | None, url: str, env: Environment) -> Running | None:
    """The model on the server at that address, by the name it is served under or by what the store calls it."""
    from quire.cli.agents.background import find

    found = find(url, model, env.api_key)
    if found is None and model is not None:
        with contextlib.suppress(QuireError):  # a name that is no model's here: whoever serves it would have had it
            found = find(url, _name(store, model), env.api_key)
    return found


def _name(store: Store, model: str) -> str:
    """What a server calls that model unless told otherwise."""
    from quire.cli.arguments.served_models import read_models

    return read_models(store, [model], [])[0].name


def _target(agent: Agent, running: Running, env: Environment, lean: bool) -> Target:
    from quire.cli.agents.settings import Target

    folder = env.home / "agents" / agent.name
    return Target(running.url, running.model, running.context or CONTEXT, env.api_key, folder, lean)


def _shown(agent: Agent, model: str | None, url: str, env: Environment, lean: bool) -> Target:
    """What is printed: a server is asked if one runs, and none is started."""
    from quire.cli.agents.background import Running
    from quire.cli.pull import supported
    from quire.weights.store.store import Store

    url = url.rstrip("/").removesuffix("/v1")
    running = _running(Store(env, accepts=supported), model, url, env)
    if running is None:
        running = Running(url, model or CODER, CONTEXT)
        ui.note(f"nothing serves {running.model} at {url}: start it with `quire serve {running.model}`")
    return _target(agent, running, env, lean)


def _must_fit(agent: Agent, target: Target) -> None:
    """Refuse a context that the agent's own instructions fill: some agents would try for ever to make the conversation shorter."""
    if not target.lean and target.context - target.answer < agent.prompt:
        raise BadRequest(
            f"{target.model} has a context of {target.context} tokens at {target.url}; {agent.title} sends about {agent.prompt} of its own "
            f"before your first word, and an answer may have {target.answer}",
            cure="serve a model with a larger context (quire serve MODEL --context N)"
            + (", or try --lean" if agent.lean else ""),
            param="model",
        )


def _write(folder: Path, settings: Settings) -> None:
    if settings.files:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in settings.files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def _run(words: Sequence[str], settings: Settings) -> int:
    """Run the agent in this terminal; its exit code, or 128 and the signal that ended it. Ctrl-C reaches it from the terminal, as it
    reaches this process, which leaves it to the agent what that means; other signals are passed on."""
    process = subprocess.Popen(words, env=child_environment(settings.variables, settings.removed))

    def pass_on(number: int, frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
