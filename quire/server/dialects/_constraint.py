"""The fields by which clients ask for structured output, as one Constraint: OpenAI's, vLLM's and llama.cpp's.

Owns their shapes and the rule that a request has at most one of them. A schema is passed on as the text that came, never
read here; whether it can be enforced is the engine's answer.
"""

from __future__ import annotations

import msgspec

from quire.engine.grammar import CHOICE, GBNF, JSON_OBJECT, JSON_SCHEMA, LARK, REGEX
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

Raw = msgspec.Raw
NOTHING = Raw()  # a field that did not come; null is one that did, and means the same


class SchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`. A schema is always enforced, so `strict` changes nothing."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema: Raw = NOTHING


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`; `schema` is llama.cpp's place for one."""

    type: str
    json_schema: SchemaFormat | None = None
    schema: Raw = NOTHING


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`."""

    json: Raw = NOTHING
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Structured(msgspec.Struct, kw_only=True):
    """The fields of a request that constrain its answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = NOTHING
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
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
        return found[0] if found else None


def _format(asked: ResponseFormat | None) -> list[Constraint]:
    name = "response_format"
    if asked is None:
        return []
    if asked.type not in ("text", "json_object", "json_schema"):
        raise BadRequest(f"{name}.type must be text, json_object or json_schema", param=f"{name}.type")
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


def _outputs(asked: StructuredOutputs | None) -> list[Constraint]:
    if asked is None:
        return []
    name = "structured_outputs"
    found = _schema(f"{name}.json", asked.json) + _text(f"{name}.regex", REGEX, asked.regex)
    found += _choice(f"{name}.choice", asked.choice) + _grammar(f"{name}.grammar", asked.grammar)
    if asked.json_object:
        found.append(Constraint(kind=JSON_OBJECT, param=f"{name}.json_object"))
    if not found:
        raise BadRequest(f"{name} asks for nothing: it needs json, regex, choice, grammar or json_object", param=name)
    return found


def _given(raw: Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


def _schema(name: str, raw: Raw) -> list[Constraint]:
    """A schema as an object, or, as vLLM takes it too, as a string with one in it."""
    if not _given(raw):
        return []
    data = bytes(raw)
    try:
        text = msgspec.json.decode(data, type=str) if data.startswith(b'"') else data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest(f"{name} is not valid JSON", param=name) from None
    return [Constraint(kind=JSON_SCHEMA, text=text, param=name)]


def _text(name: str, kind: str, text: str | None) -> list[Constraint]:
    return [] if text is None else [Constraint(kind=kind, text=text, param=name)]


def _grammar(name: str, text: str | None) -> list[Constraint]:
    """vLLM takes two languages in one field. Only GBNF has this sign."""
    return _text(name, GBNF if text is not None and "::=" in text else LARK, text)


def _choice(name: str, choices: list[str] | None) -> list[Constraint]:
    if choices is None:
        return []
    return [Constraint(kind=CHOICE, text=msgspec.json.encode(choices).decode(), param=name)]
