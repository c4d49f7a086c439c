"""OpenAI's published OpenAPI document as an oracle: does an answer have the shape that its own schema asks for?

    python -m tests.unit.server.openai.openai_schema OPENAPI.json      makes data/openai.json again, from openai/openai-openapi

Of the document only what answers here can be made of is kept: no prose, and of every union no alternative that is about tools, media and
models that run on OpenAI's side. Leaving alternatives out makes the schema stricter, never laxer. The document is MIT licensed, (c) OpenAI.
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parent / "data" / "openai.json"
ROOTS = (
    *("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "CreateCompletionResponse"),
    *("CreateEmbeddingResponse", "ListModelsResponse", "Model", "ErrorResponse"),
    *("OpenAIFile", "ListFilesResponse", "DeleteFileResponse", "Batch", "ListBatchesResponse"),
    *("Response", "ResponseStreamEvent", "ResponseItemList", "TokenCountsResource", "CompactResource"),
)
PROSE = ("description", "example", "examples", "title", "deprecated", "externalDocs", "default")
_ELSEWHERE = re.compile(
    r"FileSearch|WebSearch|Computer|M[Cc][Pp]|CodeInterpreter|ImageGen|Program|Container|Skill"
    r"|Audio|Transcript|Image|FileContent|InputFile|ToolChoiceTypes|Citation|FilePath"
    r"|Screenshot|Vector|SafetyCheck|Conversation"
)


def conforms(name: str, value: Any) -> None:
    """Fails with every place where a value is not what the schema of that name says."""
    faults = sorted(_validator(name).iter_errors(value), key=lambda fault: list(map(str, fault.absolute_path)))
    told = [f"{'.'.join(map(str, fault.absolute_path)) or name}: {_deepest(fault)}" for fault in faults]
    assert not told, "\n".join(told[:10])


def conforms_event(event: Any) -> None:
    """The same of one event of a streamed response, by its type."""
    assert event["type"] in _events(), f"no event of OpenAI's is called {event['type']}"
    conforms(_events()[event["type"]], event)


@cache
def _events() -> dict[str, str]:
    schemas = json.loads(KEPT.read_text())["schemas"]
    names = [way["$ref"].rpartition("/")[2] for way in schemas["ResponseStreamEvent"]["anyOf"]]
    return {schemas[name]["properties"]["type"]["enum"][0]: name for name in names}


def _deepest(fault: Any) -> str:
    """Why no alternative of a union fits, by the one that comes nearest."""
    from jsonschema.exceptions import best_match

    found = best_match([fault])
    return f"{'.'.join(map(str, found.absolute_path))}: {found.message[:300]}"


@cache
def _validator(name: str) -> Any:
    from jsonschema import Draft202012Validator

    document = json.loads(KEPT.read_text())
    return Draft202012Validator({"$ref": f"#/schemas/{name}", "schemas": document["schemas"]})


def make(path: str) -> None:
    """Keep what is needed of the document at `path`."""
    document = json.loads(Path(path).read_text())
    every, made = document["components"]["schemas"], {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in made:
            made[name] = _plain(every[name])
            waiting += _named(made[name])
    kept = {
        "source": "https://github.com/openai/openai-openapi, MIT License, Copyright (c) OpenAI",
        "version": document["info"]["version"],
        "schemas": dict(sorted(made.items())),
    }
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def _plain(value: Any, properties: bool = False) -> Any:
    """A schema without prose and without what is said to generators; in `properties` every key is a name."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, one in value.items():
        if properties:
            made[key] = _plain(one)
        elif key == "$ref":
            made[key] = one.replace("#/components/schemas/", "#/schemas/")
        elif key in ("anyOf", "oneOf"):
            made[key] = [_plain(way) for way in one if not _ELSEWHERE.search(way.get("$ref", ""))]
        elif key not in PROSE and not key.startswith("x-") and key not in ("discriminator", "nullable"):
            made[key] = _plain(one, key == "properties")
    if not properties and value.get("nullable"):  # of the older OpenAPI, still found here and there
        return {"anyOf": [made, {"type": "null"}]}
    return made


def _named(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for one in value for name in _named(one)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"].rpartition("/")[2]] if isinstance(value.get("$ref"), str) else []
    return own + [name for one in value.values() for name in _named(one)]


if __name__ == "__main__":
    make(sys.argv[1])
