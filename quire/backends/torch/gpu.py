"""The first GPU as torch sees it. Imports torch; creates nothing on the device."""

from __future__ import annotations

import torch


def look() -> tuple[str | None, tuple[int, int], str]:
    """The GPU's name, its compute capability, and, where there is no name, why it cannot be used."""
    if torch.version.cuda is None:
        return None, (0, 0), f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return None, (0, 0), "its driver does not answer, or is too old for this torch"
    return torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0), ""
