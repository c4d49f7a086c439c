"""llama.cpp's programs, where they are: on the PATH, or in the folder that LLAMA_CPP names. Absent ones are said so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def find(program: str) -> str | None:
    """The path of a llama.cpp program, or None."""
    folder = os.environ.get("LLAMA_CPP")
    if folder and (Path(folder) / program).exists():
        return str(Path(folder) / program)
    return shutil.which(program)


def missing(program: str) -> str:
    return f"{program} is not on the PATH, and LLAMA_CPP does not name its folder: no peer was measured"
