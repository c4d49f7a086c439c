"""Every setting, in one place: frozen dataclasses, and the only file that reads the environment.

`Environment.read()` looks at the process environment once; `resolve_*` are pure and return the decisions they made, as
lines that the CLI prints. Nothing below mutates a config.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.machine import available_cores as available_cores
from quire.machine import available_memory as available_memory

VERSION = "0.1.0"
PAGE_SIZE = 16
DEFAULT_MODEL = "smollm2:135m"


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that mean something to Quire. There are no others."""

    home: Path  # QUIRE_HOME: the model store
    threads: int | str | None = None  # QUIRE_THREADS; a text where it is no number, which asked_threads refuses
    kv_memory: str | None = None  # QUIRE_KV_MEMORY, for instance "2GiB"
    api_key: str | None = None  # QUIRE_API_KEY
    isa: str | None = None  # QUIRE_ISA: force a kernel set: scalar, neon(dot), avx2, avxvnni, avx512(bw), amx
    hf_endpoint: str = "https://huggingface.co"  # HF_ENDPOINT
    hf_token: str | None = None  # HF_TOKEN
    hf_cache: Path | None = None  # HF_HUB_CACHE, or under HF_HOME: where the hub's own tools keep what they downloaded
    pypi_index: str | None = None  # PIP_INDEX_URL
    npm_registry: str | None = None  # NPM_CONFIG_REGISTRY

    @classmethod
    def read(cls) -> Environment:
        """The environment as it is now."""
        get = os.environ.get
        threads = get("QUIRE_THREADS", "")
        return cls(
            home=Path(get("QUIRE_HOME") or "~/.cache/quire").expanduser(),
            threads=int(threads) if threads.isascii() and threads.isdigit() and int(threads) > 0 else threads or None,
            kv_memory=get("QUIRE_KV_MEMORY") or None,
            api_key=get("QUIRE_API_KEY") or None,
            isa=get("QUIRE_ISA") or None,
            hf_endpoint=(get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
            hf_token=get("HF_TOKEN") or None,
            hf_cache=_hub_cache(get),
            pypi_index=get("PIP_INDEX_URL") or None,
            npm_registry=get("NPM_CONFIG_REGISTRY") or get("npm_config_registry") or None,
        )


@dataclass(frozen=True, slots=True)
class Terminal:
    """What a terminal may be given beside text, by the words that every program is told it with."""

    colours: bool  # not where NO_COLOR is set
    moves: bool  # whether a line can be written again: not where TERM is dumb

    @classmethod
    def read(cls) -> Terminal:
        dumb = os.environ.get("TERM") == "dumb"
        return cls(colours=not dumb and not os.environ.get("NO_COLOR"), moves=not dumb)


def child_environment(changes: Mapping[str, str], removed: Iterable[str] = ()) -> dict[str, str]:
    """The environment as it is now, for a process of another program: with these variables, and without those."""
    without = set(removed)
    return {name: value for name, value in os.environ.items() if name not in without} | dict(changes)


def _hub_cache(get: Callable[[str], str | None]) -> Path:
    """Where huggingface_hub looks, by the same variables in the same order."""
    named = get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    home = get("HF_HOME") or Path(get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: one model on one backend."""

    path: str  # the model file or folder, already found
    name: str = ""  # what clients call it
    task: str = "auto"  # "generate", "embed", "score"; auto: what the model is made for
    backend: str = "auto"  # "native", "cuda", "torch", "reference"; auto: cuda with a GPU, else native
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: a GPU if there is one that can be used
    dtype: str = "auto"  # of the torch backends: "float32", "bfloat16", "float16"; auto: by device
    quantize: str = "none"  # of the torch backends, matrices as they load: "fp8", "fp8-block", "int8", "int4"; "keep": a file's codes
    load_format: str = "auto"  # "dummy": random weights; path is then shape:NAME or a config.json
    deterministic: bool = False  # bitwise the same in any batch: always so on the CPU, a mode with a price on a GPU
    threads: int | None = None  # None: what was measured to be fastest here
    isa: str | None = None
    kv_memory: int | None = None  # bytes for the KV pool; None: see resolve_pool
    kv_dtype: str = "auto"  # how K and V are kept: "f16", "int16", "int8", "fp8"; auto: what is best there, or what a torch device computes in
    context: int | None = None  # None: what the model was trained for
    max_seqs: int = 0  # sequences in a batch; 0: see resolve_step
    max_batch_tokens: int = 0  # tokens in a step; 0: see resolve_step
    max_waiting: int = 1024  # requests in the queue
    itl_slo: int | None = (
        None  # milliseconds between tokens that prompts may take from others; 0: no bound; None: see engine/pacing.py
    )
    ttft_slo: int = 0  # milliseconds to a first token: a request that cannot have it by then is refused; 0: none is
    depth: int | None = None  # steps in flight beyond the one being planned; None: 1 on a GPU, else 0
    prefix_cache: bool = True
    speculate: str = "none"  # speculative decoding: the proposer whose draft tokens a step verifies: "ngram" (what the text said before)
    draft_tokens: int = 4  # draft tokens for a sequence in a step at most
    memory_share: float = 1.0  # of what the weights leave, where several models are served together
    loras: tuple[tuple[str, str], ...] = ()  # adapters to load at start: names and paths
    runtime_lora: bool = False  # adapters may be loaded later too
    max_loras: int = 8  # adapters at once, where there are any
    max_lora_rank: int = 64


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP process."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # the server's own
    api_keys: tuple[tuple[str, str], ...] = ()  # of others, by name: what they keep is seen by them alone
    max_body: int = 8 * 1024 * 1024
    max_prompts: int = 64  # prompts in one completions request
    chat_template: str | None = None  # a file whose template takes the place of the model's own
    drain_seconds: float = 30.0
    restarts: int = 5  # engine restarts within a minute before giving up
    hang_seconds: float = 60.0  # silence after which an engine process is killed and restarted; 0: never
    log_requests: bool = True
    allowed_hosts: tuple[str, ...] = ()  # names to answer to, besides local ones on a loopback bind
    cors_origins: tuple[str, ...] = ()  # web origins that may call; none by default
    any_model_name: bool = False  # requests may name any model: the first answers where no model has the name
    state_dir: Path | None = None  # files, batches and stored responses; None: no files, responses in memory
    max_file: int = 512 * 1024 * 1024
    batch_lines: int = 0  # lines of batches that run together; 0: a quarter of the engine's sequences
    runtime_lora: bool = False  # adapters may be loaded and unloaded by whoever may call
    fields: Literal["strict", "tell", "lenient"] = "tell"  # unknown ones in bodies: refused, or ignored and told
    canonicalize: tuple[
        str, ...
    ] = ()  # what of a conversation is rewritten, so that prompts begin alike: names in chat/canonical


def within_openmp(threads: int) -> int:
    """The number of threads, cut to what OpenMP's own variable lets a process have."""
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    return min(threads, int(limit)) if limit.isdigit() and int(limit) else threads


def parse_size(text: str) -> int:
    """'512MiB', '2GB', '1.5g' or plain bytes, as bytes. Raises ValueError with the accepted forms."""
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
    number = text.strip().lower()
    unit = ""
    for suffix in ("kib", "mib", "gib", "tib", "kb", "mb", "gb", "tb", "k", "m", "g", "t", "b"):
        if number.endswith(suffix):
            number, unit = number[: -len(suffix)].strip(), suffix[0]
            break
    try:
        size = int(float(number) * units[unit])
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a size: write for instance 512MiB, 2GiB or 1500000000") from None
    if size <= 0:
        raise ValueError(f"{text!r} is not a positive size")
    return size


def asked_threads(asked: int | None, env: Environment, cores: int) -> tuple[int, str] | None:
    """The thread count that somebody asked for, and the sentence that says who; None when nobody did.

    Raises ValueError where what was asked for is no count.
    """
    if asked:
        return asked, f"threads: {asked} (asked for; {cores} cores available)"
    if isinstance(env.threads, str):
        raise ValueError(f"QUIRE_THREADS is {env.threads!r}: it must be a number, at least 1")
    if env.threads:
        return env.threads, f"threads: {env.threads} (QUIRE_THREADS; {cores} cores available)"
    return None


def resolve_step(max_seqs: int, max_batch_tokens: int, gpu: bool) -> tuple[int, int]:
    """Sequences and tokens of a step. Unasked: 64 and 512, or on a GPU, which more of them keep busy, 256 and 8192."""
    seqs = max_seqs or (256 if gpu else 64)
    tokens = max_batch_tokens or max(8192 if gpu else 512, seqs)
    return (seqs if max_seqs else min(seqs, tokens)), tokens


def resolve_pool(
    asked: int | None,
    available: int,
    page_bytes: int,
    context: int,
    max_seqs: int,
    page_size: int = PAGE_SIZE,
    own: bool = False,
) -> tuple[int, str]:
    """Pages of the KV pool, and the sentence that says why.

    Unasked, the pool holds four full contexts, or 512 tokens of every sequence if that is more; never more than every
    sequence could use, never more than half of the memory available beside the weights, and never less than one page. Memory that is
    nobody else's (`own`: a GPU's, measured with the model loaded) is taken up to every sequence's full context.
    """
    if asked is not None:
        pages = max(1, asked // page_bytes)
        return pages, f"KV pool: {pages} pages of {page_size} tokens, {pages * page_bytes / 2**20:.0f} MiB (asked for)"
    per_context = -(-context // page_size)
    if own:
        pages = max(1, min(max_seqs * per_context, available // page_bytes))
        why = f"of {available / 2**20:.0f} MiB free beside the weights and the largest step"
        return pages, f"KV pool: {pages} pages of {page_size} tokens, {pages * page_bytes / 2**20:.0f} MiB ({why})"
    contexts, each = min(4, max_seqs), min(per_context, 512 // page_size)
    wanted = max(contexts * per_context, max_seqs * each)
    most = max(1, available // 2 // page_bytes)
    pages = min(wanted, most)
    if pages < wanted:
        why = f"half of the {available / 2**20:.0f} MiB left beside the weights"
    elif pages > contexts * per_context:
        why = f"{each * page_size} tokens of each of {max_seqs} sequences"
    else:
        why = f"{contexts} full context{'s' if contexts > 1 else ''}"
    return pages, f"KV pool: {pages} pages of {page_size} tokens, {pages * page_bytes / 2**20:.0f} MiB ({why})"
