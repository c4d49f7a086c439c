"""`quire serve`: one model or several behind OpenAI's, Anthropic's and Ollama's APIs, until Ctrl-C or SIGTERM.

Takes the port first, then answers /health while the models are fetched and loaded, one after the other, and says the address when each is ready.
`arguments/served_models.py` reads from the command line which models those are and what clients call them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from quire.cli.arguments.engine_options import engine_options
from quire.cli.arguments.served_models import Wanted, read_loras, read_models
from quire.cli.pull import here, supported
from quire.cli.terminal import ui
from quire.config import DEFAULT_MODEL, EngineConfig, Environment, ServerConfig, parse_size
from quire.observe.errors import NotFound
from quire.weights.store.store import Store

if TYPE_CHECKING:
    from quire.chat.completer import Completer
    from quire.engine.transport.client import EngineClient
    from quire.server.served import Model
    from quire.server.server import Server

DEFAULTS = ServerConfig()
ENGINE = EngineConfig(path="")
MODELS = f"Names, .gguf files, folders, URLs, hf:… or pypi:…; several are served together. ALIAS=MODEL: what clients call it. Default: {DEFAULT_MODEL}."
HOST = "Address to listen on; 0.0.0.0 is every address of the machine."
NAMES = "Name that clients send, or several with commas between them. Repeat it for each further model. Default: the model's own name."

CANONICALIZE = "Rewrite what makes prompts differ for nothing, so that the prefix cache finds them: auto, or some of billing, dates, git, ids, keys, tools."


@engine_options(without=("load_format", "isa"))
def command(
    models: Annotated[list[str] | None, typer.Argument(help=MODELS, show_default=False)] = None,
    host: Annotated[str, typer.Option(help=HOST)] = DEFAULTS.host,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = DEFAULTS.port,
    name: Annotated[list[str] | None, typer.Option(help=NAMES)] = None,
    any_model_name: Annotated[
        bool,
        typer.Option(
            "--any-model-name", help="Answer requests for unknown models with the first one, which the answer names."
        ),
    ] = DEFAULTS.any_model_name,
    task: Annotated[
        str, typer.Option(help="auto (what the model is made for), generate, embed or score.")
    ] = ENGINE.task,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with the chat template to use in place of the model's own.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must send. Better: QUIRE_API_KEY.")] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="A file of further keys, a line NAME KEY for each; files, batches and responses are visible to the key that made them."
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Most requests that wait; further ones get 429.")
    ] = ENGINE.max_waiting,
    ttft_slo: Annotated[
        int,
        typer.Option(
            min=0, help="Milliseconds to a first token: who cannot have it by then gets 429 at once; 0: nobody."
        ),
    ] = ENGINE.ttft_slo,
    lora: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA adapter, NAME=PATH (PEFT folder or GGUF), or NAME@MODEL=PATH; may be repeated."),
    ] = None,
    runtime_lora: Annotated[
        bool, typer.Option("--runtime-lora", help="Let clients load and unload adapters by path.")
    ] = ENGINE.runtime_lora,
    max_loras: Annotated[int, typer.Option(min=1, help="Most adapters loaded at once.")] = ENGINE.max_loras,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = ENGINE.max_lora_rank,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that running answers may take after SIGTERM.")
    ] = DEFAULTS.drain_seconds,
    hang_seconds: Annotated[
        float,
        typer.Option(
            min=0, help="Seconds after which an engine process that neither answers nor works is restarted; 0: never."
        ),
    ] = DEFAULTS.hang_seconds,
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = f"{DEFAULTS.max_body >> 20}MiB",
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="A further Host header to accept; may be repeated.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web origin whose pages may call the server; may be repeated.")
    ] = None,
    canonicalize: Annotated[str, typer.Option(help=CANONICALIZE)] = "none",
    log_requests: Annotated[bool, typer.Option(help="Log a line for every request.")] = True,
    state_dir: Annotated[
        str | None,
        typer.Option(
            help="Folder for files, batches and stored responses; none: store nothing. Default: under QUIRE_HOME."
        ),
    ] = None,
    max_file: Annotated[str, typer.Option(help="Largest file that may be uploaded.")] = f"{DEFAULTS.max_file >> 20}MiB",
    batch_lines: Annotated[
        int, typer.Option(min=0, help="Most lines of batches that run at once; 0: a quarter of --max-seqs.")
    ] = DEFAULTS.batch_lines,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Refuse requests with fields that are not known, instead of telling that they are ignored."
        ),
    ] = False,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Ignore and tell known fields, too, where they cannot be honoured.")
    ] = False,
    *,
    engine: EngineConfig,
) -> None:
    """Serve models over HTTP.

    OpenAI's, Anthropic's and Ollama's API for a model that chats or continues text, embeddings among it; rerank and score for one that
    is for those; /tokenize, /health, /ready and /metrics. docs/server.md has the details. Fetches a model if it is not here.
    Several models share the memory; options of the engine apply to each. SIGTERM or Ctrl-C lets running answers finish; a second one stops at
    once.
    """
    env = Environment.read()
    store = Store(env, accepts=supported)
    wanted = read_models(store, models or [DEFAULT_MODEL], name or [])
    server = ServerConfig(
        host=host,
        port=port,
        api_key=_key(api_key) or env.api_key,
        api_keys=() if api_keys is None else _read_keys(api_keys, _key(api_key) or env.api_key),
        max_body=_size("--max-body", max_body),
        chat_template=_template(chat_template),
        drain_seconds=drain_seconds,
        hang_seconds=hang_seconds,
        log_requests=log_requests,
        allowed_hosts=tuple(allowed_host or ()),
        cors_origins=tuple(cors_origin or ()),
        runtime_lora=runtime_lora,
        any_model_name=any_model_name,
        state_dir=_state_dir(store.home, state_dir, wanted[0].name),
        max_file=_size("--max-file", max_file),
        batch_lines=batch_lines,
        fields=_fields(strict, lenient),
        canonicalize=_canonical(canonicalize),
    )
    adapters = {"runtime_lora": runtime_lora, "max_loras": max_loras, "max_lora_rank": max_lora_rank}
    engine = replace(
        engine,
        task=task,
        isa=env.isa,
        max_waiting=max_waiting,
        ttft_slo=ttft_slo,
        memory_share=1 / len(wanted),
        **adapters,
    )
    loras = read_loras(lora or [], wanted)
    engines = [replace(engine, name=one.name, loras=loras.get(one.name, ())) for one in wanted]
    raise typer.Exit(_serve(store, wanted, server, engines))


def _canonical(text: str) -> tuple[str, ...]:
    if text.strip() == "none":
        return ()
    from quire.chat.canonical import names

    return names(text, "--canonicalize")


def _key(given: str | None) -> str | None:
    """An empty one is a variable that was not set, and would ask nobody for a key."""
    if given is not None and not given.strip():
        raise typer.BadParameter("the key is empty: leave the option out to ask for none", param_hint="--api-key")
    return given


def _fields(strict: bool, lenient: bool) -> Literal["strict", "tell", "lenient"]:
    if strict and lenient:
        raise typer.BadParameter("a server cannot be strict and lenient: send one", param_hint="--lenient")
    return "strict" if strict else "lenient" if lenient else "tell"


def _template(path: Path | None) -> str | None:
    if path is not None and not path.is_file():
        raise NotFound(f"there is no chat template at {path}", cure="--chat-template takes a file")
    if path is not None and not path.stat().st_size:
        raise typer.BadParameter(
            f"{path} is empty: every conversation would be lost in it", param_hint="--chat-template"
        )
    return None if path is None else str(path)


def _serve(store: Store, wanted: list[Wanted], server: ServerConfig, engines: list[EngineConfig]) -> int:
    from quire.server import lifecycle
    from quire.server.middleware import is_loopback
    from quire.server.served import Model
    from quire.server.server import Server

    _log_to_stderr()
    sock = lifecycle.bind(server.host, server.port)
    url = lifecycle.url_of(sock)
    if not is_loopback(server.host) and not (server.api_key or server.api_keys):
        ui.note(f"warning: whoever can reach {server.host} can use this server; set QUIRE_API_KEY to ask for a key")
    names = ", ".join(one.name for one in wanted)
    settings = {one.name: (one, engine) for one, engine in zip(wanted, engines, strict=True)}

    async def opener(serving: Server, model: Model) -> tuple[EngineClient, Completer]:
        from quire.server.loading import open_model
        from quire.server.threads import in_thread

        one, engine = settings[model.name]
        model.note = "fetching the model"
        path = await in_thread(lambda: here(store, one.model))
        say = ui.note if len(wanted) == 1 else lambda line: ui.note(f"{one.name}: {line}")
        return await open_model(serving, model, replace(engine, path=str(path)), say)

    def ready(model: Model) -> None:
        for line in model.info.decisions:
            ui.note(f"  {line}")
        ui.note(f"{model.name} is ready at {url}/v1 (loaded in {model.info.load_seconds:.1f} s)")

    async def run() -> int:
        models = [
            Model(one.names, source=one.source, expected=(name for name, _ in settings[one.name][1].loras))
            for one in wanted
        ]
        serving = Server(server, models)
        serving.store = store
        ui.note(serving.state.line())
        ui.note(f"listening on {url}; loading {names}")
        code = await lifecycle.serve(server, sock, serving, opener, on_ready=ready)
        ui.note(f"{names} {'is' if len(wanted) == 1 else 'are'} no longer served at {url}")
        return code

    with (
        lifecycle.run_file(store.home, sock, *(one.name for one in wanted)),
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        return runner.run(run())


def _read_keys(path: Path, own: str | None) -> tuple[tuple[str, str], ...]:
    """The further keys; the server's own is none of them."""
    from quire.server.callers import read_keys

    found = read_keys(path)
    if own is not None and own in dict(found).values():
        raise typer.BadParameter("the server's own key is in it too", param_hint="--api-keys")
    return found


def _state_dir(home: Path, asked: str | None, model: str) -> Path | None:
    """The server's own folder: as asked, none at all, or one of this model's under the store's."""
    from quire.server.state import default_folder

    if asked == "none":
        return None
    return Path(asked).expanduser().absolute() if asked else default_folder(home, model)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logging.getLogger("quire").addHandler(handler)
    logging.getLogger("quire").setLevel(logging.INFO)
    logging.getLogger("uvicorn").addHandler(handler)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint=option) from None
