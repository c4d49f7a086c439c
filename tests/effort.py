"""What something may cost, in seconds of CPU. A busy machine makes any work late, so a clock on the wall says little about ours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_most(seconds: float, about: object = "") -> Iterator[None]:
    """Every thread of this process counts; a wait does not."""
    began = time.process_time()
    yield
    used = time.process_time() - began
    assert used < seconds, f"{used:.2f} s of CPU where {seconds} are allowed {about}"
