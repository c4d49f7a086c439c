"""Long prompts give bitwise the same tokens and logprobs over keys and values in int8 and int16; f16 is in test_determinism.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.engine.types import Request
from tests.e2e.test_determinism import long_pasts_agree, long_requests

assert long_requests  # a fixture


@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_long_pasts(model_path: Path, long_requests: list[Request], dtype: str):
    long_pasts_agree(model_path, long_requests, dtype)
