"""Requests in Text Generation Inference's dialect: their fields, and the `Generation` made of them.

Owns the request structs, their defaults and TGI's rules: greedy unless `do_sample` or something that only matters when sampling is
set, 100 new tokens unless told, the stop sequence stays in the text. Knows nothing of answers or streams: those are `routes.py`.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from quire.chat.types import Generation
from quire.engine.constraints.grammar import JSON_SCHEMA, REGEX
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS, MAX_N, SamplingParams
from quire.server.reading import Reading
from quire.server.served import Served
from quire.server.shared import bodies
from quire.server.shared.conversation import check_prompt, encode_text
from quire.server.shared.sampling import sampling

DEFAULT_NEW_TOKENS = 100
MAX_STOPS = 16
OURS = {"max_tokens": "max_new_tokens", "n": "best_of", "logprobs": "top_n_tokens"}  # SamplingParams' names -> TGI's
NEUTRAL: dict[str, tuple[object, ...]] = {
    "watermark": (None, False),
}


class Grammar(msgspec.Struct, forbid_unknown_fields=True):
    """`parameters.grammar`."""

    type: str
    value: msgspec.Raw


class Parameters(msgspec.Struct, kw_only=True):
    """The `parameters` that are honoured."""

    best_of: int | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: int | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: int | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: int | None = None
    top_n_tokens: int | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: asked for, or implied by a field that means nothing else."""
        warped = self.temperature not in (None, 1.0) or self.top_k not in (None, 0)
        return bool(self.do_sample) or warped or any(p not in (None, 1.0) for p in (self.top_p, self.typical_p))

    def constraint(self, reading: Reading) -> Constraint | None:
        """What the answer must be."""
        if self.grammar is None:
            return None
        name, kind, value = "parameters.grammar", self.grammar.type, bytes(self.grammar.value)
        if kind == "regex":
            return Constraint(kind=REGEX, text=_string(value, f"{name}.value"), param=name)
        if kind == "json":
            text = _string(value, f"{name}.value") if value.startswith(b'"') else value.decode(errors="replace")
            return Constraint(kind=JSON_SCHEMA, text=text, param=name)
        if kind == "json_schema":
            named = bodies.parse(self.grammar.value, Named, (), {}, f"{name}.value", reading)
            return Constraint(kind=JSON_SCHEMA, text=bytes(named.schema).decode(errors="replace"), param=name)
        raise BadRequest(f"{name}.type must be json, regex or json_schema", param=f"{name}.type")


class Named(msgspec.Struct):
    """The value of a grammar of type json_schema."""

    schema: msgspec.Raw
    name: str | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """The body of /generate and /generate_stream."""

    inputs: str
    parameters: msgspec.Raw = msgspec.Raw(b"null")


class CompatRequest(GenerateRequest, kw_only=True):
    """The body of POST /."""

    stream: bool | None = None


def read_parameters(raw: msgspec.Raw, reading: Reading) -> Parameters:
    """`parameters`, every one accounted for."""
    if bytes(raw) == b"null":
        return Parameters()
    try:
        return bodies.parse(raw, Parameters, (), NEUTRAL, "parameters", reading)
    except BadRequest as error:
        where = f"parameters.{error.param}" if error.param else "parameters"
        message = error.message if error.param is None else f"parameters: {error.message}"
        raise BadRequest(message, cure=error.cure, param=where, code=error.code) from None


def check(asked: Parameters, stream: bool) -> None:
    """Rules between fields, and TGI's bounds."""
    if asked.temperature is not None and not asked.temperature > 0:
        raise _refused("temperature", asked.temperature, "it must be above 0; greedy is the default")
    if asked.top_k is not None and asked.top_k < 1:
        raise _refused("top_k", asked.top_k, "it must be at least 1")
    if asked.truncate is not None and asked.truncate < 1:
        raise _refused("truncate", asked.truncate, "it must be at least 1")
    best = asked.best_of
    if best is not None and not 1 <= best <= MAX_N:
        raise _refused("best_of", best, f"it must be from 1 to {MAX_N}")
    if best is not None and best > 1 and not asked.samples:
        raise _refused("best_of", best, "greedy answers are all the same: set do_sample")
    if best is not None and best > 1 and stream:
        raise _refused("best_of", best, "the best of several is known at their end, so it cannot be streamed")
    if asked.decoder_input_details and stream:
        raise _refused("decoder_input_details", True, "it is not told in a stream")
    if asked.decoder_input_details and not asked.details:
        raise _refused("decoder_input_details", True, "it is told in details: set details too")
    if len(asked.stop or ()) > MAX_STOPS:
        raise _refused("stop", len(asked.stop or ()), f"at most {MAX_STOPS} sequences are taken")
    if asked.top_n_tokens is not None and not 0 <= asked.top_n_tokens <= MAX_LOGPROBS:
        raise _refused("top_n_tokens", asked.top_n_tokens, f"it must be from 0 to {MAX_LOGPROBS}")


def params(asked: Parameters, vocab_size: int, wants_tokens: bool) -> SamplingParams:
    """SamplingParams, range-checked."""
    new = DEFAULT_NEW_TOKENS if asked.max_new_tokens is None else asked.max_new_tokens
    given: dict[str, Any] = {
        "temperature": (1.0 if asked.temperature is None else asked.temperature) if asked.samples else 0.0,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "typical_p": asked.typical_p,
        "repetition_penalty": asked.repetition_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "seed": asked.seed,
        "stop": tuple(asked.stop or ()),
        "include_stop": True,
        "max_tokens": new,
        "n": asked.best_of or 1,
        "logprobs": (asked.top_n_tokens or 0) if wants_tokens or (asked.best_of or 1) > 1 else None,
        "prompt_logprobs": 0 if asked.decoder_input_details else None,
    }
    return sampling(given, vocab_size, names=OURS, within="parameters")


async def generation(
    served: Served, inputs: str, asked: Parameters, sampling: SamplingParams
) -> tuple[Generation, int]:
    """The internal request, and how many tokens `truncate` cut off its beginning."""
    if not inputs:
        raise BadRequest("inputs is empty", param="inputs")
    prompt = await encode_text(served, inputs, "inputs")
    cut = 0
    if asked.truncate is not None and len(prompt) > asked.truncate:
        tokenizer = served.tokenizer
        begin = prompt[:1] if tokenizer.add_bos and prompt[:1] == [tokenizer.bos_id] else []
        keep = asked.truncate - len(begin)
        kept = [*begin, *prompt[len(prompt) - keep :]] if keep > 0 else prompt[-asked.truncate :]
        cut, prompt = len(prompt) - len(kept), kept
    given = asked.max_new_tokens is not None
    check_prompt(served, prompt, sampling.max_tokens if given else None, "inputs", "parameters.max_new_tokens")
    if not given:  # a default never refuses a prompt that leaves less room than itself
        room = served.info.context - len(prompt)
        sampling = msgspec.structs.replace(sampling, max_tokens=min(DEFAULT_NEW_TOKENS, room))
    return Generation(secrets.token_hex(12), prompt, sampling, constraint=asked.constraint(served.reading)), cut


def _refused(name: str, value: object, why: str) -> BadRequest:
    return BadRequest(f"parameters: {name} is {value}: {why}", param=f"parameters.{name}")


def _string(raw: bytes, where: str) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest(f"{where} must be a string", param=where) from None
