"""The engine's settings as options of a verb, derived from EngineConfig: a field there is an option here.

A verb asks for them with `@engine_options(...)` and gets one EngineConfig, whose `path` and `name` it fills in. So a
setting is spelled, parsed and explained the same way wherever it is offered.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from quire.config import EngineConfig, parse_size

HIDDEN = frozenset(
    {
        "path",
        "name",
        "task",
        "max_waiting",
        "ttft_slo",
        "depth",
        "loras",
        "runtime_lora",
        "max_loras",
        "max_lora_rank",
        "memory_share",
    }
)  # the verb's own options, or none on a command line
HELP: dict[str, str] = {
    "backend": "auto, native, cuda, torch, or reference (slow, for checking).",
    "device": "auto (a GPU if there is one), cpu, cuda or cuda:N.",
    "dtype": "With cuda and torch: float32, bfloat16 or float16.",
    "quantize": "With cuda and torch: fp8, fp8-block, int8, int4, or keep (a file's codes).",
    "load_format": "dummy: random weights, for a MODEL that is shape:NAME or a config.json.",
    "deterministic": "Bitwise the same results in any batch. Always so on a CPU; slower on a GPU.",
    "threads": "CPU threads. Default: as many as were measured to be fastest here.",
    "isa": "Force a kernel set, such as avx2.",
    "kv_memory": "Memory for the KV cache, such as 512MiB.",
    "kv_dtype": "Type of the KV cache: auto, f16, int16 (as exact, on a CPU), or with half the memory int8 or fp8 (fp8 with torch or cuda).",
    "context": "Longest prompt plus answer, in tokens.",
    "max_seqs": "Most sequences that run at once; 0: 64, on a GPU 256.",
    "max_batch_tokens": "Most tokens in one step of the engine; 0: 512, on a GPU 8192.",
    "itl_slo": "Milliseconds between two tokens of an answer that prompts of others may take; 0: no bound. Default: 50, or 2 steps of decoding.",
    "prefix_cache": "Keep the KV cache of prompts, for later requests that begin alike.",
    "speculate": "Speculative decoding: ngram (draft tokens copied from earlier in the text). The tokens stay the same.",
    "draft_tokens": "With --speculate: most draft tokens for a sequence in a step.",
}
SIZES = frozenset({"kv_memory"})  # bytes, written with a unit
LEAST = {"threads": 1, "context": 1, "max_seqs": 0, "max_batch_tokens": 0, "draft_tokens": 1, "itl_slo": 0}


def engine_options(*, without: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a verb's function the engine's options, in place of its parameter `engine: EngineConfig`."""
    types = get_type_hints(EngineConfig)
    shown = [f for f in dataclasses.fields(EngineConfig) if f.name not in HIDDEN and f.name not in without]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(function, eval_str=True)
        options = [_parameter(f, types[f.name]) for f in shown]
        names = [o.name for o in options]

        @functools.wraps(function)
        def gathering(**given: Any) -> Any:
            settings = {name: given.pop(name) for name in names}
            for name in SIZES & settings.keys():
                settings[name] = _bytes(name, settings[name])
            return function(**given, engine=EngineConfig(path="", **settings))

        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "engine"]
        vars(gathering)["__signature__"] = own.replace(parameters=[*kept, *options])
        gathering.__annotations__ = {p.name: p.annotation for p in [*kept, *options]}
        return gathering

    return decorate


def _parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    kind = str | None if field.name in SIZES else kind
    words = HELP.get(field.name) or f"The engine's {field.name.replace('_', ' ')}."
    flag = [f"--{field.name.replace('_', '-')}"] if field.default is False else []  # nothing to take back
    option = Annotated[kind, typer.Option(*flag, help=words, min=LEAST.get(field.name))]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=option)


def _bytes(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as e:
        raise typer.BadParameter(str(e), param_hint=f"--{name.replace('_', '-')}") from None
