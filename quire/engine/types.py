"""The messages between a client and an engine: a Request in, Events out. Frozen, msgspec-encoded, never pickled.

The engine knows tokens, never text: stop strings, templates and detokenization belong to `chat/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.runner.params import SamplingParams
from quire.runner.plan import Logprob
from quire.runner.spans import Span

FINISH_STOP = "stop"  # an end-of-sequence or stop token
FINISH_LENGTH = "length"  # max_tokens or the context
FINISH_ABORT = "abort"  # the client let go
FINISH_ERROR = "error"  # Event.error says why


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an answer must be, whole: enforced on every token, or the request is refused. See `grammar.py`."""

    kind: str  # json_schema, json_object, regex, choice, lark, gbnf or structural_tag
    text: str = ""  # the schema as JSON, the pattern, a JSON list of strings, the grammar, or the tags as JSON
    param: str = "constraint"  # what the client called it, for messages
    blanks: str | None = None  # JSON: a pattern of what may stand between two parts; None: see `schemas.BLANKS`

    @classmethod
    def json_schema(cls, schema: Any) -> Constraint:
        """A JSON text that a schema describes: a dict, the schema's own text, or a pydantic model."""
        made = getattr(schema, "model_json_schema", None)
        if made is not None:
            schema = made()
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        return cls(kind="json_schema", text=text)

    @classmethod
    def json_object(cls) -> Constraint:
        """An answer that is some JSON object."""
        return cls(kind="json_object")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that the whole pattern matches."""
        return cls(kind="regex", text=pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Constraint:
        """An answer that is one of these texts."""
        return cls(kind="choice", text=msgspec.json.encode(list(choices)).decode())

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """A text of that grammar, in llguidance's Lark."""
        return cls(kind="lark", text=grammar)

    @classmethod
    def gbnf(cls, grammar: str) -> Constraint:
        """A text of that grammar, in llama.cpp's GBNF."""
        return cls(kind="gbnf", text=grammar)

    @classmethod
    def structural_tag(cls, tags: Any) -> Constraint:
        """Text with constrained stretches in it: xgrammar's structural tags, as a dict or as JSON."""
        return cls(kind="structural_tag", text=tags if isinstance(tags, str) else msgspec.json.encode(tags).decode())


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes of every token, by id: what an engine must know before it can enforce a constraint."""

    tokens: list[bytes]
    special: list[int]  # tokens that are no text: they satisfy nothing
    eos_ids: tuple[int, ...]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to compute. `n > 1` is several of these with one prompt; `follows` lets them share it."""

    id: str
    tokens: list[int]
    sampling: SamplingParams = SamplingParams()
    eos_ids: tuple[int, ...] = ()  # honoured unless sampling.ignore_eos
    index: int = 0  # which of n; part of the random stream
    priority: int = 0  # lower runs first
    deadline: float | None = None  # wall-clock seconds since the epoch; past it the request is aborted
    itl: float = 0.0  # seconds between its tokens that it can bear; 0: what the server is set to
    namespace: str = ""  # tenant salt: prefixes are shared within one namespace only
    second: int = 0  # where the second of two texts begins, for a model that scores pairs; 0: there is one
    follows: str | None = None  # wait until that request's prompt is computed, so that it can be shared
    constraint: Constraint | None = None
    adapter: str = ""  # the name of an adapter that is loaded; empty: the model as it is
    vector: bool = False  # its embedding or score is wanted, and no token
    fresh: bool = False  # all of its prompt is computed, whatever is cached of it
    spans: tuple[Span, ...] = ()  # stretches of the prompt that are no text, in order


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened to a request. Times are seconds; they add up to the whole."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix tree at the first admission
    loaded_tokens: int = 0  # tokens whose pages were brought from somewhere else while it waited
    chunks: int = 0  # steps that computed prompt tokens
    steps: int = 0  # all steps
    preemptions: int = 0
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # of these, the ones that are in the answer: so many steps fewer
    seed: int = 0
    shifted_tokens: int = 0  # of prompt and answer that were left out so that the answer could go on past the context
    enforced: str = ""  # the kind of constraint that every token was held to
    adapter: str = ""  # the adapter that computed it
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0  # admission to first token
    decode_seconds: float = 0.0


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """News of one request. The last one has `finish`, and a receipt."""

    id: str
    tokens: list[int] = []
    logprobs: Sequence[Logprob] = ()
    prompt_logprobs: Sequence[Logprob] = ()
    vector: bytes = b""  # float32, little-endian: the embedding or score, where the request wants one
    finish: str | None = None
    stop_id: int | None = None  # the token that ended it, when finish is "stop"
    error: str | None = None
    param: str | None = None  # the field of the request that the error is about, when it is about one
    busy: str = ""  # the error's code, of a request that was refused for the work there is, and may come again
    retry_after: float = 0.0  # ... in so many seconds
    receipt: Receipt | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A snapshot of the engine, for metrics, admission and `quire ps`. Counters never go down."""

    running: int = 0
    waiting: int = 0
    loading: int = 0  # of these, the ones whose cached pages are on their way from somewhere else
    pages_total: int = 0
    pages_used: int = 0  # leased or locked; cached but unlocked pages count as free
    page_size: int = 16
    steps: int = 0
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    loaded_tokens: int = 0  # tokens whose pages were brought from somewhere else
    preemptions: int = 0
    evictions: int = 0
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # ... and right
    step_bound: float = 0.0  # seconds that a step with prompts may take beside sequences that decode; 0: no bound


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A LoRA adapter that is loaded."""

    name: str
    path: str
    rank: int  # of its largest module
    modules: int
    nbytes: int
    digest: str  # of everything that it computes

    @property
    def line(self) -> str:
        """A line about the adapter for people."""
        return f"adapter {self.name}: rank {self.rank} on {self.modules} modules, {self.nbytes / 2**20:.1f} MiB"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine tells when it is ready: the decisions it took at start."""

    model: str
    architecture: str
    vocab_size: int
    context: int  # longest sequence: prompt and output together
    max_seqs: int
    max_batch_tokens: int
    pages: int
    page_size: int
    backend: str  # for instance "native (avx512, 2 threads)"
    weight_bytes: int
    kv_bytes: int
    load_seconds: float = 0.0
    task: str = (
        "generate"  # or "embed", or "score": what a request gets; of one that generates, unless it wants a vector
    )
    dimensions: int = 0  # numbers in an embedding; 0: there are no embeddings
    cuts: list[int] | None = None  # how many of them may be kept: none but all, or any (an empty list), or these
    prompts: dict[str, str] = {}  # what goes before a text to embed, by name; "" is the default
    separators: int = 1  # end tokens between the two texts of a pair to score
    pair: tuple[str, ...] = ()  # of a decoder that scores: what is before all, before each text, and after all
    adapters: list[AdapterInfo] = []  # loaded at start
    max_adapters: int = 0  # that can be loaded at once; 0: none, and none can be loaded later
    decisions: list[str] = []  # human-readable lines, printed at start

    @property
    def tasks(self) -> list[str]:
        """All that requests may ask for."""
        return [self.task, *(["embed"] if self.dimensions and self.task != "embed" else [])]
