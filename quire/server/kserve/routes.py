"""The KServe v2 (Open Inference) protocol as Triton's LLM backends speak it: metadata, health, infer, generate, generate_stream.

A model takes the tensor `text_input` and gives `text_output`; every other input, and every parameter, is a sampling field by the name
it has on /v1/completions. `sampling_parameters` is such fields as JSON text. There is one version, "1". `text_output` has the answer
alone unless `exclude_input_in_output` is false.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Generation
from quire.config import VERSION
from quire.observe.errors import BadRequest, NotFound, QuireError
from quire.server import errors, ignored
from quire.server.errors import UnsupportedMedia
from quire.server.feed import Feed, News
from quire.server.kserve import tensors
from quire.server.kserve.tensors import InferRequest, Value
from quire.server.reading import Reading
from quire.server.replies import EventStream, reply
from quire.server.served import Model, Served
from quire.server.server import Server
from quire.server.shared import bodies
from quire.server.shared.answers import collect
from quire.server.shared.bodies import checked_keys, read_body, read_json
from quire.server.shared.compat import SAMPLING, Absent, Endpoint
from quire.server.shared.compat import Fields as Table
from quire.server.shared.conversation import check_prompt, encode_text
from quire.server.shared.sampling import Sampling, generation

NAMED = "/v2/models/{name:path}"
ONE = "1"  # the version of every model
DEFAULT_MAX_TOKENS = 16
JSON_PART = "inference-header-content-length"
LISTS = frozenset(
    {"stop", "stop_token_ids"}
)  # inputs of which there may be several; of others the tensor has one element
# Fields whose results have no place in an answer here.
UNTOLD = ("prompt_logprobs", "return_token_ids", "receipts", "stream_options", "request_id")
INPUTS = (("text_input", "BYTES", -1), ("sampling_parameters", "BYTES", 1), ("exclude_input_in_output", "BOOL", 1))


class Fields(Sampling, kw_only=True):
    """The parameters and further inputs that are honoured."""

    exclude_input_in_output: bool | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The body of /generate and /generate_stream; fields that are not here are parameters too, as Triton maps them."""

    text_input: str
    id: str | None = None
    parameters: dict[str, Any] | None = None


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    for path in ("/v2/models", "/v2/health", "/v2/repository"):
        errors.SHAPES[path] = shape

    async def about(request: Request) -> Response:
        return reply({"name": "quire", "version": VERSION, "extensions": ["generate", "binary_tensor_data"]})

    async def live(request: Request) -> Response:
        return reply({"live": True})

    async def ready(request: Request) -> Response:
        up = server.takes_requests
        return reply({"ready": up}, 200 if up else 503)

    async def model(request: Request) -> Response:
        model, adapter = _choose(server, request)
        return reply(_metadata(adapter or model.name))

    async def model_ready(request: Request) -> Response:
        model, adapter = _choose(server, request)
        up = model.stage == "ready"
        return reply({"name": adapter or model.name, "ready": up}, 200 if up else 503)

    async def index(request: Request) -> Response:
        return reply([_indexed(m, name) for m in server.models for name in (*m.names, *m.adapters)])

    async def infer(request: Request) -> Response:
        arrived = time.monotonic()
        served = await _resolve(server, request)
        return await _infer(server, served, request, arrived)

    async def generate(request: Request) -> Response:
        served, feed, asked, fields = await _text(server, request, streams=False)
        choices, _ = await collect(feed)
        texts = ["".join(choice.text) for _, choice in sorted(choices.items())]
        before = asked.text_input if fields.exclude_input_in_output is False else ""
        return reply(_head(served, asked.id) | {"text_output": before + texts[0]})

    async def generate_stream(request: Request) -> Response:
        served, feed, asked, fields = await _text(server, request, streams=True)
        before = asked.text_input if fields.exclude_input_in_output is False else ""
        return _Events(feed, _Stream(_head(served, asked.id), before))

    for path, handler in (("/v2", about), ("/v2/health/live", live), ("/v2/health/ready", ready)):
        app.add_api_route(path, handler, methods=["GET"], response_model=None)
    app.add_api_route("/v2/repository/index", index, methods=["POST"], response_model=None)
    for base in (f"{NAMED}/versions/{{version}}", NAMED):
        app.add_api_route(f"{base}/ready", model_ready, methods=["GET"], response_model=None)
        for name, handler in (("infer", infer), ("generate", generate), ("generate_stream", generate_stream)):
            app.add_api_route(f"{base}/{name}", handler, methods=["POST"], response_model=None)
    for base in (f"{NAMED}/versions/{{version}}", NAMED):  # last: a name may hold slashes
        app.add_api_route(base, model, methods=["GET"], response_model=None)


def shape(error: QuireError) -> tuple[int, object]:
    """An error as the protocol has it."""
    return error.status, {"error": errors.text(error)}


def _choose(server: Server, request: Request) -> tuple[Model, str]:
    """The model that the path names, and the adapter of it."""
    name, version = request.path_params["name"], request.path_params.get("version", ONE)
    found = server.models.find(name) if version == ONE else None
    if found is None:
        raise NotFound(
            "that model, or that version of it, is not served here",
            cure=f"{server.models.names} is, in version {ONE}",
            param="model",
            code="model_not_found",
        )
    return found


async def _resolve(server: Server, request: Request) -> Served:
    _choose(server, request)  # refused in the protocol's own words
    return await server.resolve(request, request.path_params["name"])


def _indexed(model: Model, name: str) -> dict[str, str]:
    state = "READY" if model.stage == "ready" else "UNAVAILABLE"
    return {"name": name, "version": ONE, "state": state, "reason": ""}


def _metadata(name: str) -> dict[str, Any]:
    inputs = [{"name": name, "datatype": kind, "shape": [n]} for name, kind, n in INPUTS]
    return {
        "name": name,
        "versions": [ONE],
        "platform": "quire",
        "inputs": inputs,
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [-1]}],
    }


# Requests


async def _infer(server: Server, served: Served, request: Request, arrived: float) -> Response:
    header = request.headers.get(JSON_PART)
    if header is None:
        body = await read_json(request)
    else:
        if "origin" in request.headers:  # a page cannot send this header unasked, and is not asked for it here
            raise UnsupportedMedia("tensors in bytes are not taken from web pages")
        body = await read_body(request)
    head, tail = tensors.split(body, header)
    if header is not None:
        await checked_keys(head)
    asked = bodies.parse(head, InferRequest, (), {}, reading=served.reading)
    given = tensors.read(asked.inputs, tail)
    if "text_input" not in given or not all(isinstance(text, str) for text in given["text_input"]):
        raise BadRequest("the input text_input is missing, or is not BYTES", param="inputs")
    texts = [str(text) for text in given.pop("text_input")]
    if not 1 <= len(texts) <= server.config.max_prompts:
        raise BadRequest(
            f"text_input has {len(texts)} texts: 1 to {server.config.max_prompts} are taken", param="text_input"
        )
    wants, packed = _outputs(asked, served.reading)
    fields = _sampling(dict(asked.parameters or {}), given, served.reading)
    made = [await _generation(served, fields, t, f"text_input[{i}]") for i, t in enumerate(texts)]
    choices, _ = await collect(Feed(served, made, request.receive, arrived))
    answers = ["".join(choices[i, 0].text) for i in range(len(texts))]
    if fields.exclude_input_in_output is False:
        answers = [before + after for before, after in zip(texts, answers, strict=True)]
    output: dict[str, Any] = {"name": "text_output", "datatype": "BYTES", "shape": [len(answers)]}
    told: dict[str, Any] = _head(served, asked.id) | {"outputs": [output] if wants else []}
    if notes := ignored.take(request.scope):
        told["quire"] = {"notes": notes}
    if not packed:
        output["data"] = answers
        return reply(told)
    data = tensors.pack(answers)
    output["parameters"] = {"binary_data_size": len(data)}
    first = msgspec.json.encode(told)
    return Response(first + data, 200, {JSON_PART: str(len(first))}, "application/octet-stream")


def _outputs(asked: InferRequest, reading: Reading) -> tuple[bool, bool]:
    """Whether text_output is wanted, and as bytes."""
    packed = (asked.parameters or {}).pop("binary_data_output", False)
    wanted = False
    for i, output in enumerate(asked.outputs or ()):
        if output.name != "text_output":
            raise BadRequest(
                f"outputs[{i}].name is {output.name[:64]!r}: there is text_output", param=f"outputs[{i}].name"
            )
        more = dict(output.parameters or {})
        packed, wanted = more.pop("binary_data", packed), True
        for name in more:
            _unknown(f"outputs[{i}].parameters", name, ("binary_data",), reading)
    if not isinstance(packed, bool):
        raise BadRequest("binary_data must be true or false", param="parameters")
    return wanted or not asked.outputs, packed


def _unknown(where: str, name: str, known: Collection[str], reading: Reading) -> None:
    """A parameter that is not known: refused by its place, or ignored and told."""
    try:
        reading.unknown(name, known, where)
    except BadRequest as error:
        raise BadRequest(f"{where}.{name[:64]} is not supported", cure=error.cure, param=where) from None


def _sampling(parameters: dict[str, Any], inputs: dict[str, list[Value]], reading: Reading) -> Fields:
    """Parameters and inputs as one set of fields. One that comes twice is refused: which was meant is not ours to guess."""
    given: dict[str, Any] = {}

    def take(name: str, value: Any) -> None:
        if name in given:
            raise BadRequest(f"{name[:64]} comes twice", param=name[:64])
        given[name] = value

    for name, value in parameters.items():
        take(name, value)
    for name, values in inputs.items():
        if name not in LISTS and len(values) != 1:
            raise BadRequest(f"the input {name[:64]} has {len(values)} elements: one is taken", param=name[:64])
        take(name, values if name in LISTS else values[0])
    nested = given.pop("sampling_parameters", None)
    if nested is not None:
        if not isinstance(nested, str):
            raise BadRequest("sampling_parameters must be JSON text", param="sampling_parameters")
        for name, raw in bodies.top_level(nested.encode()).items():
            take(name, raw)
    try:
        body = msgspec.json.encode(given)
    except (UnicodeEncodeError, RecursionError):
        raise BadRequest("parameters cannot be read", param="parameters") from None
    fields = bodies.parse(body, Fields, reading=reading)
    if fields.n not in (None, 1):
        reading.excuse(BadRequest("n is not supported here: one answer for each text", param="n"))
        fields.n = None
    for name in UNTOLD:
        if getattr(fields, name) not in (None, False):
            refusal = BadRequest(f"{name} is not supported here: the answer has no place for it", param=name)
            reading.excuse(refusal)
            setattr(fields, name, None)
    return fields


async def _generation(served: Served, fields: Fields, text: str, param: str) -> Generation:
    served.generates()
    if fields.model not in (None, served.name, *(() if served.adapter else served.model.names)):
        raise BadRequest("model is not the one that the path names", param="model")
    fields.check(served.reading)
    limit = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    sampling = fields.params(served.info.vocab_size, max_tokens=limit)
    prompt = await encode_text(served, text, param)
    check_prompt(served, prompt, fields.max_tokens, param, "max_tokens")
    room = served.info.context - len(prompt)
    return generation(fields, prompt, msgspec.structs.replace(sampling, max_tokens=min(limit, room)))


async def _text(server: Server, request: Request, streams: bool) -> tuple[Served, Feed, GenerateRequest, Fields]:
    """A request of the generate extension, ready to run."""
    arrived = time.monotonic()
    served = await _resolve(server, request)
    body = await read_json(request)
    asked = bodies.decode(body, GenerateRequest)
    own = {"text_input", "id", "parameters"}
    more = {k: bodies.decode(raw, object) for k, raw in bodies.top_level(body).items() if k not in own}
    parameters = dict(asked.parameters or {})
    twice = next((name for name in more if name in parameters), None)
    if twice is not None:
        raise BadRequest(f"{twice[:64]} comes twice", param=twice[:64])
    fields = _sampling(parameters | more, {}, served.reading)
    if fields.stream is not None and fields.stream != streams:
        other = "generate_stream" if fields.stream else "generate"
        raise BadRequest(f"stream is {fields.stream}: that is POST …/{other}", param="stream")
    fields.stream = streams or None
    made = await _generation(served, fields, asked.text_input, "text_input")
    return served, Feed(served, [made], request.receive, arrived), asked, fields


# Answers


def _head(served: Served, asked: str | None) -> dict[str, Any]:
    return {"model_name": served.name, "model_version": ONE, **({} if asked is None else {"id": asked})}


class _Stream:
    """One object for each piece of text."""

    def __init__(self, head: dict[str, Any], before: str):
        self.head = head
        self.before = before

    def opening(self) -> Iterable[object]:
        return ({**self.head, "text_output": self.before},) if self.before else ()

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            if chunk.text:
                yield {**self.head, "text_output": chunk.text}

    def closing(self) -> Iterable[object]:
        return ()


class _Events(EventStream):
    """Triton's events end when the body does."""

    done = b""


_REFUSED = {
    "n": (2, "one answer for each text; 1 is fine"),
    "prompt_logprobs": (1, "the answer has no place for it"),
    "return_token_ids": (True, "the answer has no place for it"),
    "receipts": (True, "the answer has no place for it"),
    "stream_options": ({"include_usage": True}, "the answer has no place for it"),
    "request_id": ("a", "`id` is the protocol's own"),
}
_FIELDS = Table(
    shape=Fields,
    inside="parameters",
    ignored=bodies.IGNORED,
    neutral=bodies.NEUTRAL,
    refused=_REFUSED,
    notes=SAMPLING
    | {
        "exclude_input_in_output": "true by default",
        "max_tokens": "16 by default",
        "stream": "as the route has it",
    },
)
COMPAT = (
    Endpoint(
        dialect="KServe v2",
        method="POST",
        path="/v2/models/{name}/infer",
        what="Also under `/versions/1`. Tensors as JSON, or as bytes after it (`Inference-Header-Content-Length`). `text_input` is BYTES, one text or several; "
        "what stands under `parameters` here may also come as an input of that name, or in `sampling_parameters` as JSON text.",
        fields=(Table(shape=InferRequest, notes={"outputs": "`text_output`; `binary_data` gives its bytes"}), _FIELDS),
        example={"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]},
        surface="id parameters inputs outputs",
    ),
    *(
        Endpoint(
            dialect="KServe v2",
            method="POST",
            path=f"/v2/models/{{name}}/{name}",
            what=what + " What stands under `parameters` may also stand beside it, as Triton maps it.",
            fields=(Table(shape=GenerateRequest), _FIELDS),
            example={"text_input": "hi"},
            surface="text_input id parameters",
        )
        for name, what in (
            ("generate", "Also under `/versions/1`."),
            ("generate_stream", "The same as server-sent events."),
        )
    ),
    *(
        Endpoint(dialect="KServe v2", method=method, path=path, what=what)
        for method, path, what in (
            ("GET", "/v2", "Name, version, extensions."),
            ("GET", "/v2/health/live", "200 while the process lives."),
            ("GET", "/v2/health/ready", "200 when a request would be taken, else 503."),
            ("GET", "/v2/models/{name}", "The tensors of a model. Also under `/versions/1`."),
            ("GET", "/v2/models/{name}/ready", "200 when a request would be taken, else 503."),
            ("POST", "/v2/repository/index", "The models and their adapters; the body is not read."),
        )
    ),
)
ABSENT = (
    Absent("KServe v2", "/v2/models/{name}/config", "not built"),
    Absent("KServe v2", "/v2/models/{name}/stats", "`/metrics` tells it"),
    Absent("KServe v2", "/v2/repository/models/{name}/load", "models are loaded when the server starts"),
    Absent("KServe v2", "gRPC", "not built"),
)
