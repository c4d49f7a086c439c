"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere: the same tests, small shapes."""

from __future__ import annotations

import os

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install quire[test]")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before its module is imported
pytest.importorskip("triton", reason="needs triton: pip install quire[test]")
if not torch.cuda.is_available():
    from tests.unit.backends.cuda.interpreter import hasten

    hasten()


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def half() -> torch.dtype:
    """bfloat16, which the interpreter multiplies as if it were integers: float16 stands in for it there."""
    return torch.bfloat16 if torch.cuda.is_available() else torch.float16


@pytest.fixture(autouse=True)
def _quiet_numpy():
    """A masked lane may divide by zero: the interpreter would warn of it, the device does not."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _nearest_fp8(monkeypatch: pytest.MonkeyPatch):
    """The interpreter drops a carry when it rounds to e4m3, and makes a number of what is none: torch does neither."""
    if torch.cuda.is_available():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def nearest(data, have, want, mode):
        if want == tl.float8e4nv and have in (tl.float32, tl.float16):
            return torch.tensor(data).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if have == tl.float8e4nv and want in (tl.float32, tl.float16):
            wide = torch.tensor(data).view(torch.float8_e4m3fn).float()
            return wide.numpy() if want == tl.float32 else wide.half().numpy()
        return convert(data, have, want, mode)

    monkeypatch.setattr(interpreter, "_convert_float", nearest)
