"""The backend that `auto` means on this machine, and why: cuda where a GPU and what drives it are there, else native.

The cheap questions come first: without a GPU's device file nothing of torch is looked at, so a CPU user pays nothing. Only
where torch and triton are installed is torch imported, and asked whether the GPU can be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from quire.machine import gpu_devices

OLDEST = (8, 0)  # compute capability: bfloat16 products


@dataclass(frozen=True, slots=True)
class Detected:
    """The backend, and the reason in words."""

    backend: str
    why: str


def detect(root: Path = Path("/")) -> Detected:
    """The backend that `auto` means here, and why."""
    devices = gpu_devices(root)
    if not devices:
        return Detected("native", "no NVIDIA GPU is here")
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        cure = "pip install 'quire[cuda]'"
        return Detected("native", f"a GPU is here, but {' and '.join(missing)} cannot be imported: {cure}")
    try:
        from quire.backends.torch.gpu import look  # imports torch

        name, capability, why = look()
    except Exception as e:  # a broken installation can fail in any way, and must not take the CPU with it
        return Detected("native", f"a GPU is here, but torch cannot be used: {type(e).__name__}: {str(e)[:200]}")
    if name is None:
        return Detected("native", f"a GPU is here, but torch cannot use it: {why}")
    if capability < OLDEST:
        older, need = ".".join(map(str, capability)), ".".join(map(str, OLDEST))
        return Detected("native", f"the {name} has compute capability {older}: the cuda backend needs {need}")
    return Detected("cuda", f"{name} found; --device cpu uses the CPU")
