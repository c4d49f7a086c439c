"""A model on this machine, a .gguf file or a folder as Hugging Face lays it out, used in place: never copied into the store,
never deleted by it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.observe.errors import BadModelFile, BadRequest, NotFound, Unsupported
from quire.weights.sources import Local

if TYPE_CHECKING:
    from quire.config import Environment
    from quire.weights.download.web import Http

MAGIC = b"GGUF"
CONFIG = "config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A path as the user wrote it, with ~ expanded."""

    path: Path

    def __str__(self) -> str:
        text = str(self.path)
        return text if text.startswith(("/", ".")) else f"./{text}"


def parse(rest: str, part: bool = False) -> FileTarget:
    """`rest` as a path."""
    if not rest:
        raise BadRequest("file: needs a path", cure="for instance ./model.gguf", param="model")
    try:
        return FileTarget(Path(rest).expanduser())
    except RuntimeError as e:  # ~nobody/x.gguf
        raise BadRequest(f"{rest!r}: {e}", param="model") from None


def locate(target: FileTarget, env: Environment, http: Http) -> Local:
    """The file or folder itself, if it is one that can be used."""
    path = target.path
    try:
        if path.is_dir():
            if (path / CONFIG).is_file():
                return Local(path)
            raise Unsupported(
                f"{path} is a folder without a {CONFIG}: it is not a model as Hugging Face lays it out",
                cure=f"name a folder that has one, or a .gguf file{_inside(path)}",
            )
        if not path.exists():
            raise NotFound(
                f"there is no file {path}",
                cure=f"check the path; `quire list` shows the models in the store, and one of Hugging Face is written {_hub(path)}",
            )
        with path.open("rb") as f:
            head = f.read(len(MAGIC))
    except OSError as e:
        raise NotFound(f"cannot read {path}: {e.strerror or e}") from e
    if head == MAGIC:
        return Local(path)
    if path.suffix in PICKLES:
        from quire.weights.folder import refuse_pickle

        raise refuse_pickle(path)
    if path.suffix in (".safetensors", ".json"):
        raise Unsupported(f"{path} is a part of a model", cure=f"name its folder: {path.parent}")
    if not head:
        raise BadModelFile(f"{path} is empty", cure="fetch it again")
    raise BadModelFile(
        f"{path} is not a GGUF file: it starts with {head!r}, not {MAGIC!r}",
        cure="a model is a .gguf file, or a folder as Hugging Face lays it out",
    )


def _hub(path: Path) -> str:
    """The name of a hub file as it should be written; the name itself, where it could be one."""
    parts = path.parts
    deep_enough = (
        len(parts) > 2 if path.suffix == ".gguf" else len(parts) == 2
    )  # a file of a repository, or a repository
    return f"hf:{path}" if deep_enough and not path.is_absolute() and ".." not in parts else "hf:org/repo/file.gguf"


def _inside(path: Path) -> str:
    found = sorted(p.name for p in path.glob("*.gguf"))[:3]
    return f", for instance {path / found[0]}" if found else ""
