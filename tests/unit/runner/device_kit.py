"""Device runners for tests: over the row-exact tiny model of tiny_llama, dressed as a program whose tensors stay on a device."""

from __future__ import annotations

import numpy as np
import tiny_llama
import torch
from tiny_llama import CONTEXT, V

from quire.backends.batch import Batch
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.sampler import DeviceSampler, TorchSampler
from quire.runner.device_runner import DeviceRunner

NAMES = ("ids", "pos", "q_start", "kv_len", "pages", "write", "logit_rows")


class OnDevice:
    """A numpy program behind tensors. It has a page more than it tells, for rows that pad a batch."""

    graphs = False
    device = torch.device("cpu")
    sampler: DeviceSampler = TorchSampler()

    def __init__(self, pages: int):
        self.kv = tiny_llama.kv(pages)
        self.inner = tiny_llama.program(pages + 1)
        self.sizes: list[int] = []
        self.fault: Exception | None = None
        self.nan: list[int] = []

    def launch(self, batch: DeviceBatch) -> torch.Tensor:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.sizes.append(batch.sequences)
        logits = self.inner.run(Batch(**{name: np.ascontiguousarray(getattr(batch, name).numpy()) for name in NAMES}))
        logits[self.nan, 5] = np.nan
        found = torch.from_numpy(logits.copy())
        return found if batch.into is None else batch.into[: len(found)].copy_(found)


def make_device_runner(
    *,
    pages: int = 64,
    overlap: bool = False,
    run: OnDevice | None = None,
    max_rows: int = 40,
    max_seqs: int = 8,
    padded: bool = False,
) -> DeviceRunner:
    """`overlap` means nothing to it: what is launched is launched."""
    return DeviceRunner(
        run or OnDevice(pages),
        kv=tiny_llama.kv(pages),
        vocab_size=V,
        max_seqs=max_seqs,
        max_tokens=64,
        max_context=CONTEXT,
        max_rows=max_rows,
        padded=padded,
    )
