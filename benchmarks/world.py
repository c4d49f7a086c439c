"""What a run was asked for, as the sections see it: which files, threads, rounds, and what the machine can do."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import files, floors
from benchmarks.figures import Figure

SMALL, LARGE = files.SMALL, files.LARGE
SHAPES = {"small": SMALL, "1b": LARGE}
FORMATS = ("q4_0", "q4_1", "q4_k_m", "q8_0", "f16", "f16_bf16")
DEFAULT_FORMAT = "q4_1"  # of the default model


@dataclass(slots=True)
class World:
    """One run's settings. `peaks` is None where they could not be measured."""

    folder: Path
    threads: int
    shapes: tuple[str, ...] = (SMALL, LARGE)
    formats: tuple[str, ...] = FORMATS
    rounds: int | None = None  # None: each section's own number
    peaks: floors.Peaks | None = None
    onnx: Path | None = None  # a folder with an int4 model, and the Python that can run it
    onnx_python: str = ""
    plots: Path | None = None
    make: bool = True  # write files that are not there
    costs: dict[Path, floors.Cost] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)  # files that could not be had, and why

    def path(self, shape: str, name: str) -> Path:
        """The file, made if it is not there."""
        return files.prepare(self.folder, shape, name.upper()) if self.make else files.path_of(self.folder, shape, name)

    def _have(self, shape: str, name: str) -> bool:
        try:
            return bool(self.path(shape, name))
        except RuntimeError as e:
            self.without[f"{shape} {name}"] = str(e)
            return False

    def cost(self, path: Path) -> floors.Cost:
        if path not in self.costs:
            self.costs[path] = floors.cost(path)
        return self.costs[path]

    def pairs(
        self, formats: tuple[str, ...] = FORMATS, shapes: tuple[str, ...] = (SMALL, LARGE)
    ) -> list[tuple[str, str]]:
        """(shape, format) of those asked for, among these; those that cannot be had are remembered in `without`."""
        asked = [(s, f) for s in self.shapes if s in shapes for f in self.formats if f in formats]
        return [(s, f) for s, f in asked if self._have(s, f)]

    def turns(self, default: int = 5) -> int:
        return self.rounds or default


def figure(section: str, shape: str, name: str, what: str, **more: object) -> Figure:
    return Figure(section=section, what=what, shape=shape, format=name, **more)  # type: ignore[arg-type]


@functools.cache
def text_of(path: Path, tokens: int) -> str:
    """English that is this many tokens in the file's vocabulary: a sentence over and over, cut."""
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.weights.gguf.file import GGUF

    sentence = "The river runs past the mill, under the stone bridge, and on to the sea. "
    with GGUF.open(path) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf.metadata)
        ids = tokenizer.encode(sentence * (tokens // 8 + 1), add_special=False, parse_special=False)
        return tokenizer.decode(ids[:tokens])
