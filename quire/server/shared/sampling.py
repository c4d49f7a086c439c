"""Sampling fields in OpenAI's, vLLM's and llama.cpp's names, and the fields by which a request demands structured output.

`sampling` makes SamplingParams of any dialect's fields; its errors use that dialect's names for them. `Sampling` is the struct of
OpenAI's fields, which other dialects take too; `Structured` those by which clients ask for structured output, of which a request has one at
most. A schema is passed on as the text that came, never read here; whether it can be enforced is the engine's answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.chat.types import Generation
from quire.engine.constraints.grammar import CHOICE, GBNF, JSON_OBJECT, JSON_SCHEMA, LARK, REGEX, STRUCTURAL_TAG
from quire.engine.constraints.schemas import blanks_of
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from quire.server.reading import Reading

MAX_PRIORITY = 2**31 - 1
MAX_ITL = 60_000  # milliseconds between two tokens
MAX_SALT = 256
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
Raw = msgspec.Raw
NOTHING = Raw()  # a field that did not come; null is one that did, and means the same


def sampling(
    given: Mapping[str, Any],
    vocab_size: int,
    *,
    defaults: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    within: str = "",
) -> SamplingParams:
    """SamplingParams, range-checked. `defaults` are the dialect's, and so are `names` of fields that are called otherwise there;
    `within` is the object that has them."""
    chosen = {**(defaults or {}), **{k: v for k, v in given.items() if v is not None}}
    try:
        return SamplingParams(**chosen).validate(vocab_size)
    except BadRequest as error:
        ours = error.param or ""
        name = (names or {}).get(ours, ours)
        said = name + error.message.removeprefix(ours) if error.message.startswith(f"{ours} ") else error.message
        error.message = f"{within}: {said}" if within else said
        error.param = f"{within}.{name}" if within else name
        raise


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`. A schema is always enforced, so `strict` changes nothing."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: Raw = NOTHING


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`; `schema` is llama.cpp's place for one, the last three are vLLM's structural tags."""

    type: str
    json_schema: SchemaFormat | None = None
    schema: Raw = NOTHING
    format: Raw = NOTHING
    structures: Raw = NOTHING
    triggers: Raw = NOTHING


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: Raw = NOTHING
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Raw = NOTHING
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # objects that list what they have are closed as it is


class Structured(msgspec.Struct, kw_only=True):
    """The fields of a request that constrain its answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = NOTHING
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: Raw = NOTHING  # llama.cpp
    grammar: str | None = None  # llama.cpp: GBNF

    def constraint(self) -> Constraint | None:
        """What the answer must be; BadRequest when two fields say it."""
        found = [*_format(self.response_format), *_outputs(self.structured_outputs)]
        found += _schema("guided_json", self.guided_json) + _schema("json_schema", self.json_schema)
        found += _text("guided_regex", REGEX, self.guided_regex) + _choice("guided_choice", self.guided_choice)
        found += _grammar("guided_grammar", self.guided_grammar) + _text("grammar", GBNF, self.grammar)
        if len(found) > 1:
            names = " and ".join(c.param for c in found)
            raise BadRequest(f"{names} both say what the answer must be: send one", param=found[1].param)
        made = found[0] if found else None
        if self.guided_whitespace_pattern is not None:
            made = _with_blanks(made, self.guided_whitespace_pattern, "guided_whitespace_pattern")
        return made


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: not done, so only false is taken
    continuous_usage_stats: bool | None = None


class Sampling(Structured, kw_only=True):
    """The fields that both dialects honour."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    receipts: bool | None = None
    itl_slo_ms: float | None = None  # Quire's
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    def params(self, vocab_size: int, **more: Any) -> SamplingParams:
        """SamplingParams, range-checked. `more` overrides what the request says."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        asked: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM writes "no limit" as -1
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            "stop": stop,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "include_stop": self.include_stop_str_in_output,
            "min_tokens": self.min_tokens,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "n": self.n,
            "prompt_logprobs": self.prompt_logprobs,
            "skip_special_tokens": self.skip_special_tokens,
        }
        return sampling(asked | more, vocab_size)

    def check(self, reading: Reading) -> None:
        """Rules between fields, and bounds that SamplingParams does not know."""
        options = self.stream_options
        if options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true", param="stream_options")
        if options is not None and options.include_obfuscation:
            refusal = BadRequest("include_obfuscation is not supported", param="stream_options.include_obfuscation")
            reading.excuse(refusal)
        if self.priority is not None and abs(self.priority) > MAX_PRIORITY:
            raise BadRequest(f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
        if self.itl_slo_ms is not None and not 1 <= self.itl_slo_ms <= MAX_ITL:
            raise BadRequest(f"itl_slo_ms must be between 1 and {MAX_ITL}", param="itl_slo_ms")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT:
            raise BadRequest(f"cache_salt must have 1 to {MAX_SALT} characters", param="cache_salt")
        if self.request_id is not None and not _ID.fullmatch(self.request_id):
            raise BadRequest(
                "request_id must be 1 to 128 letters, digits, dots, colons, dashes or underscores", param="request_id"
            )

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_chunks(self) -> bool:
        """Whether every chunk has the usage so far: vLLM's `continuous_usage_stats`, which load generators ask for."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def generation(request: Sampling, prompt: list[int], sampling: SamplingParams) -> Generation:
    """The internal request. Its id is ours alone: two clients may send the same request_id."""
    return Generation(
        id=secrets.token_hex(12),
        prompt=prompt,
        sampling=sampling,
        priority=request.priority or 0,
        itl=(request.itl_slo_ms or 0.0) / 1000,
        namespace=request.cache_salt or "",
        constraint=request.constraint(),
    )


def _format(asked: ResponseFormat | None) -> list[Constraint]:
    name = "response_format"
    if asked is None:
        return []
    if asked.type == "structural_tag":
        return _tags(asked)
    if asked.type not in ("text", "json_object", "json_schema"):
        raise BadRequest(f"{name}.type must be text, json_object, json_schema or structural_tag", param=f"{name}.type")
    for field in ("format", "structures", "triggers"):
        if _given(getattr(asked, field)):
            raise BadRequest(f"{name}.{field} needs type to be structural_tag", param=f"{name}.{field}")
    if asked.json_schema is not None and asked.type != "json_schema":
        raise BadRequest(f"{name}.json_schema needs type to be json_schema", param=f"{name}.type")
    if asked.type == "text":
        if _given(asked.schema):
            raise BadRequest(f"{name}.schema needs type to be json_schema", param=f"{name}.type")
        return []
    schema = asked.schema
    if asked.json_schema is not None:
        if _given(schema):
            raise BadRequest(f"{name} has two schemas: send one", param=f"{name}.schema")
        schema = asked.json_schema.schema
    if _given(schema):
        return _schema(name, schema)
    if asked.type == "json_schema":
        raise BadRequest(f"{name}.json_schema.schema is missing", param=f"{name}.json_schema.schema")
    return [Constraint(kind=JSON_OBJECT, param=name)]


def _tags(asked: ResponseFormat) -> list[Constraint]:
    """Structural tags: the fields as they came, in one object."""
    name = "response_format"
    if asked.json_schema is not None or _given(asked.schema):
        raise BadRequest(f"{name} of type structural_tag has no schema of its own", param=f"{name}.json_schema")
    fields = {f: getattr(asked, f) for f in ("format", "structures", "triggers") if _given(getattr(asked, f))}
    if "format" in fields and len(fields) > 1:
        raise BadRequest(f"{name} has a format and structures: send one", param=f"{name}.structures")
    if "format" not in fields and len(fields) < 2:
        raise BadRequest(f"{name} needs a format, or structures and triggers", param=f"{name}.format")
    return [Constraint(kind=STRUCTURAL_TAG, text=msgspec.json.encode(fields).decode(), param=name)]


def _outputs(asked: StructuredOutputs | None) -> list[Constraint]:
    if asked is None:
        return []
    name = "structured_outputs"
    found = _schema(f"{name}.json", asked.json) + _text(f"{name}.regex", REGEX, asked.regex)
    found += _choice(f"{name}.choice", asked.choice) + _grammar(f"{name}.grammar", asked.grammar)
    if asked.json_object:
        found.append(Constraint(kind=JSON_OBJECT, param=f"{name}.json_object"))
    found += _schema(f"{name}.structural_tag", asked.structural_tag, STRUCTURAL_TAG)
    if not found:
        known = "json, regex, choice, grammar, json_object or structural_tag"
        raise BadRequest(f"{name} asks for nothing: it needs {known}", param=name)
    if asked.whitespace_pattern is not None and asked.disable_any_whitespace:
        where = f"{name}.disable_any_whitespace"
        raise BadRequest(f"{name} has a pattern for blanks and says that there are none", param=where)
    if asked.whitespace_pattern is not None:
        found[0] = _with_blanks(found[0], asked.whitespace_pattern, f"{name}.whitespace_pattern")
    elif asked.disable_any_whitespace:
        found[0] = _with_blanks(found[0], "", f"{name}.disable_any_whitespace")
    return found


def _with_blanks(made: Constraint | None, pattern: str, param: str) -> Constraint:
    """The constraint with its own blanks between the parts of a JSON text."""
    if made is None or made.kind not in (JSON_OBJECT, JSON_SCHEMA, STRUCTURAL_TAG):
        raise BadRequest(f"{param} is about the blanks of a JSON answer, and none is asked for", param=param)
    return msgspec.structs.replace(made, blanks=blanks_of(pattern, param))


def _given(raw: Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


def _schema(name: str, raw: Raw, kind: str = JSON_SCHEMA) -> list[Constraint]:
    """A schema as an object, or, as vLLM takes it too, as a string with one in it."""
    if not _given(raw):
        return []
    data = bytes(raw)
    try:
        text = msgspec.json.decode(data, type=str) if data.startswith(b'"') else data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest(f"{name} is not valid JSON", param=name) from None
    return [Constraint(kind=kind, text=text, param=name)]


def _text(name: str, kind: str, text: str | None) -> list[Constraint]:
    return [] if text is None else [Constraint(kind=kind, text=text, param=name)]


def _grammar(name: str, text: str | None) -> list[Constraint]:
    """vLLM takes two languages in one field. Only GBNF has this sign."""
    return _text(name, GBNF if text is not None and "::=" in text else LARK, text)


def _choice(name: str, choices: list[str] | None) -> list[Constraint]:
    if choices is None:
        return []
    return [Constraint(kind=CHOICE, text=msgspec.json.encode(choices).decode(), param=name)]
