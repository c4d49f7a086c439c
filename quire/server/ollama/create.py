"""POST /api/create and /api/blobs, as Ollama has them: a new name for a model of the store, with defaults of its own.

A name is made of a model that is here, or of a GGUF file that was put here by its digest, with or without an adapter; nothing is converted
or quantized. A template is Jinja, as the models' own are; what cannot be honoured is refused by name: Go templates. Uploads are bounded by the disk.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.observe.errors import BadRequest, NotFound, QuireError
from quire.server.callers import caller_of
from quire.server.errors import ClientGone
from quire.server.middleware import UPLOADS
from quire.server.ollama import adapters, cards, modelfile, requests
from quire.server.ollama.names import Names
from quire.server.ollama.store import model_name, writable
from quire.server.reading import STRICT
from quire.server.replies import HEADERS, LineStream, line, reply
from quire.server.served import canonical
from quire.server.shared.compat import Endpoint, Fields
from quire.server.threads import in_thread
from quire.weights.store.manifest import Defaults
from quire.weights.store.store import Store

BLOBS = "/api/blobs/"
ROLES = frozenset({"system", "user", "assistant"})
MAX_TEXT = 1 << 20  # of a system text, a message or a licence
MAX_MESSAGES = 256
SPARE = 1 << 30  # bytes of the disk that uploads leave free
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_GO = re.compile(r"\{\{-?[^}]*\.(?:System|Prompt|Response|Messages|Tools|Suffix|Content|Role|First)\b")
_PROBE = "what a user says"
NEUTRAL: dict[str, tuple[object, ...]] = {
    "quantize": (None, ""),
    "quantization": (None, ""),
    "path": (None, ""),  # a file of the server's, by its path
    "renderer": (None, ""),
    "parser": (None, ""),
}


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a made name."""

    role: str
    content: str


class CreateRequest(msgspec.Struct, kw_only=True, rename={"source": "from"}):
    """The fields that are honoured. `name` is the older word for `model`; `modelfile` has all that follows it as text."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    modelfile: str | None = None
    source: str | None = None
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    template: str | None = None
    license: str | list[str] | None = None
    system: str | None = None
    parameters: dict[str, Any] | None = None
    messages: list[Message] | None = None


def register(app: FastAPI, names: Names) -> None:
    """Add the routes."""
    UPLOADS.add(BLOBS)

    async def create(request: Request) -> Response:
        asked = requests.parse(await requests.read(request), CreateRequest, neutral=NEUTRAL)
        store = writable(names.server, caller_of(request.scope))
        name = model_name(asked.model or asked.name)
        if asked.modelfile is not None:
            asked = _from_text(asked)
        made = await in_thread(lambda: _create(names, store, name, asked))
        note = await adapters.settle(names, made)
        done = ("using existing layer", "writing manifest", *([note] if note else []), "success")
        if asked.stream is False:
            return reply({"status": "success"} | ({"quire": {"notes": [note]}} if note else {}))
        body = b"".join(line({"status": status}) for status in done)
        return Response(body, headers=HEADERS, media_type=LineStream.media_type)

    async def has_blob(request: Request) -> Response:
        store = writable(names.server, caller_of(request.scope))
        if not await in_thread(store.place.blob(_sha256(request)).is_file):
            raise NotFound("that file is not here", param="digest")
        return Response()

    async def put_blob(request: Request) -> Response:
        store, sha256 = writable(names.server, caller_of(request.scope)), _sha256(request)
        await _upload(store, request, sha256)
        return Response(status_code=201)

    app.add_api_route("/api/create", create, methods=["POST"], response_model=None)
    app.add_api_route(BLOBS + "{digest}", has_blob, methods=["HEAD"], response_model=None)
    app.add_api_route(BLOBS + "{digest}", put_blob, methods=["POST"], response_model=None)


def _from_text(asked: CreateRequest) -> CreateRequest:
    """The request that a Modelfile means; beside it nothing else may say the same."""
    for name in ("source", "files", "adapters", "template", "license", "system", "parameters", "messages"):
        if getattr(asked, name) is not None:
            said = "from" if name == "source" else name
            raise BadRequest(f"modelfile and {said} both say what the model is: send one", param=said)
    given = {"model": asked.model or asked.name, "stream": asked.stream, **modelfile.parse(asked.modelfile or "")}
    return requests.parse(msgspec.json.encode(given), CreateRequest, neutral=NEUTRAL)


def _create(names: Names, store: Store, name: str, asked: CreateRequest) -> str:
    """The name as the store has it. In a thread: it reads files."""
    if any(name in model.loaded_adapters for model in names.server.models) and name not in names.made:
        raise BadRequest(f"{name[:128]} is the name of an adapter that is loaded", param="model")
    source, inherited = _source(store, asked)
    parameters = {**inherited.parameters, **(asked.parameters or {})}
    requests.read_options(
        msgspec.Raw(msgspec.json.encode(parameters)), STRICT
    )  # a bad one is told now, not with each request
    messages = tuple({"role": m.role, "content": m.content} for m in asked.messages or ())
    licence = "\n".join(asked.license) if isinstance(asked.license, list) else asked.license or ""
    _check_texts(asked, messages, licence)
    template = inherited.template if asked.template is None else _template(store, source, asked.template)
    adapter = inherited.adapter
    if asked.adapters:
        if adapter:
            raise BadRequest(f"from: {source} has an adapter already: there can be one", param="adapters")
        adapter, path = adapters.read(store, asked.adapters)
        try:
            adapters.check_fits(str(_content(store, source)), path)
        except BaseException:
            store.forget_adapter(path)
            raise
    defaults = Defaults(
        parent=inherited.parent or source,
        system=inherited.system if asked.system is None else asked.system,
        parameters=parameters,
        messages=messages or inherited.messages,
        template=template,
        adapter=adapter,
    )
    return store.create(name, source, defaults, licence).name


def _source(store: Store, asked: CreateRequest) -> tuple[str, Defaults]:
    """What the name is made of, and the defaults that come with it."""
    files = asked.files or {}
    if bool(files) == bool(asked.source):
        raise BadRequest("send from, the name of a model here, or files with one GGUF file", param="from")
    if files:
        if len(files) > 1:
            raise BadRequest(f"files has {len(files)}: one GGUF file is taken", param="files")
        digest = next(iter(files.values()))
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise BadRequest("files: the value must be a digest, sha256: and 64 hexadecimal digits", param="files")
        return f"sha256:{match[1]}", Defaults(parent="")
    name = canonical(model_name(asked.source))
    try:
        manifest = store.get(name)
    except QuireError:
        manifest = None
    if manifest is None:
        raise NotFound(
            f"from: model {name[:128]!r} is not here",
            cure=f"`quire pull {name[:64]}` fetches it, if it is known",
            param="from",
            code="model_not_found",
        )
    return name, manifest.defaults or Defaults(parent=name)


def _check_texts(asked: CreateRequest, messages: tuple[dict[str, str], ...], licence: str) -> None:
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"messages has {len(messages)}: at most {MAX_MESSAGES}", param="messages")
    for i, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise BadRequest(f"messages[{i}].role must be {', '.join(sorted(ROLES))}", param=f"messages[{i}].role")
    for name, text in (
        ("system", asked.system or ""),
        ("license", licence),
        *((f"messages[{i}]", m["content"]) for i, m in enumerate(messages)),
    ):
        if len(text) > MAX_TEXT:
            raise BadRequest(f"{name} has {len(text)} characters: at most {MAX_TEXT}", param=name)


def _template(store: Store, source: str, template: str) -> str:
    """A template of one's own, tried; empty where it is the model's. Ollama's are Go programs, which are not run."""
    if template.strip() in ("", cards.read(str(_content(store, source))).template.strip()):
        return ""
    if _GO.search(template) and "{%" not in template:
        raise BadRequest(
            "template is not supported: it is a Go template, and those are not run here",
            cure="leave it out, and the model's own is used; or write it in Jinja, over messages",
            param="template",
            code="unsupported_parameter",
        )
    from quire.chat.templates.template import ChatTemplate

    try:
        told = ChatTemplate(template, where="template").render([{"role": "user", "content": _PROBE}])
    except QuireError as error:
        raise BadRequest(f"template: {error.message}", param="template") from None
    if _PROBE not in told:
        raise BadRequest(
            "template does not write what the user says",
            cure="Jinja, over messages of a role and a content",
            param="template",
        )
    return template


def _content(store: Store, source: str) -> Path:
    """Where the bytes of a name or a digest are."""
    if source.startswith("sha256:"):
        return store.place.blob(source.partition(":")[2])
    manifest = store.get(source)
    return store.blob(manifest) if manifest is not None else Path()


def _sha256(request: Request) -> str:
    match = _DIGEST.fullmatch(request.path_params["digest"])
    if match is None:
        raise BadRequest("the digest must be sha256: and 64 hexadecimal digits", param="digest")
    return match[1]


async def _upload(store: Store, request: Request, sha256: str) -> None:
    """The body as a file of the store, if it is what its digest says."""
    store.place.prepare()
    partial = store.home / "partial" / f"upload-{secrets.token_hex(8)}"
    hashed, size = hashlib.sha256(), 0
    try:
        with partial.open("wb") as f:
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                data = message.get("body", b"")
                if size % (64 << 20) < len(data) and shutil.disk_usage(store.home).free < SPARE:
                    raise QuireError("the disk is full", cure="`quire rm` frees room", code="disk_full")
                hashed.update(data)
                f.write(data)
                size += len(data)
                if not message.get("more_body"):
                    break
        if hashed.hexdigest() != sha256:
            raise BadRequest(f"the body has the digest sha256:{hashed.hexdigest()}", param="digest")
        await in_thread(lambda: store.put(sha256, partial))
    finally:
        partial.unlink(missing_ok=True)


COMPAT = (
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/create",
        what="A new name for a model of the store, with defaults that `/api/chat` and `/api/generate` use. Nothing is converted.",
        fields=(
            Fields(
                shape=CreateRequest,
                neutral=NEUTRAL,
                notes={
                    "modelfile": "the older form: `FROM`, `PARAMETER`, `SYSTEM`, `MESSAGE`, `LICENSE`, `TEMPLATE` (Jinja), `ADAPTER` (a digest, of a GGUF adapter)",
                    "from": "a model that is here",
                    "files": "one GGUF file, by the digest that `/api/blobs` took it under",
                    "adapters": "one LoRA adapter, by digests: a GGUF file, or `adapter_config.json` and `adapter_model.safetensors`; "
                    "one that does not fit the model is refused",
                    "template": "in Jinja, over `messages`, in place of the model's own; Go templates are refused",
                    "parameters": "options; those of the model it is made of are inherited",
                    "system": "stands where a conversation has no system text",
                    "messages": "come before those of a conversation",
                },
            ),
        ),
        example={"model": "mine", "from": "none-such"},
        surface="model from files adapters template license system parameters messages stream quantize",
        task="store",
    ),
    Endpoint(dialect="Ollama", method="HEAD", path="/api/blobs/{digest}", what="200 when the file is here, else 404."),
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/blobs/{digest}",
        what="The body is a file; it is kept if it has that digest. Bounded by the disk, not by `--max-body`.",
    ),
)
