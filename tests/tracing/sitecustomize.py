"""Counts, in every process that imports this at its start, how often each file of the package is entered.

`tests.trace_request` puts this folder on PYTHONPATH, so the server and its engine process both load it. A file named `mark-N` in
the folder QUIRE_TRACE asks for the counts so far; each process answers with `counts-N-PID.json` beside it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = Path(os.environ["QUIRE_TRACE"])
PACKAGE = os.environ["QUIRE_TRACE_PACKAGE"] + os.sep

_calls: dict[CodeType, int] = {}


def _profile(frame: FrameType, event: str, arg: Any) -> None:
    if event == "call":
        code = frame.f_code
        _calls[code] = _calls.get(code, 0) + 1


def _counts() -> dict[str, int]:
    """Calls by file of the package, what is on some thread's stack at this moment included."""
    counts: dict[str, int] = {}
    for code, n in list(_calls.items()):
        if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            name = code.co_filename.removeprefix(PACKAGE)
            counts[name] = counts.get(name, 0) + n
    return counts


def _answer() -> None:
    """Wait for marks, and write the counts at each."""
    mark = 0
    while True:
        if (FOLDER / f"mark-{mark}").exists():
            path = FOLDER / f"counts-{mark}-{os.getpid()}.json"
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(_counts()))
            partial.rename(path)
            mark += 1
        time.sleep(0.01)


threading.Thread(target=_answer, daemon=True, name="trace").start()
threading.setprofile(_profile)
sys.setprofile(_profile)
