"""Device runners for tests: over the row-exact tiny model of tiny_llama, dressed as a program whose tensors stay on a device."""

from __future__ import annotations

import numpy as np
import torch

from quire.backends.batch import Batch, Given, Table
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.sampler import DeviceSampler, TorchSampler
from quire.runner.device.runner import DeviceRunner
from quire.runner.speculate import Proposer
from tests.unit.runner import tiny_llama
from tests.unit.runner.tiny_llama import CONTEXT, V

SHARED = ("start", "length", "table", "own_from")
NAMES = ("ids", "pos", "q_start", "kv_len", "pages", "write", "logit_rows")


class OnDevice:
    """A numpy program behind tensors. It has a page more than it tells, for rows that pad a batch."""

    graphs = False
    shares = True
    sparse = False
    adapts = False
    keep = ()
    device = torch.device("cpu")
    sampler: DeviceSampler = TorchSampler()

    def __init__(self, pages: int | tuple[int, ...], model: tiny_llama.TinyLlama = tiny_llama.MODEL):
        self.kv = tiny_llama.kv(pages, model)
        self.inner = tiny_llama.program(tuple(k.pages + 1 for k in self.kv.groups), model)
        self.sizes: list[int] = []
        self.fault: Exception | None = None
        self.nan: list[int] = []
        self.shared = 0  # rows that were told of a common beginning

    def hidden_buffers(self, rows: int) -> None:
        """It keeps nothing."""

    def launch(self, batch: DeviceBatch) -> torch.Tensor:
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        self.sizes.append(batch.sequences)
        self.shared += check_shared(batch, self.kv.page_size)
        own = {name: np.ascontiguousarray(getattr(batch, name).numpy()) for name in NAMES}
        more = tuple(Table(t.pages.numpy(), t.write.numpy()) for t in batch.more)
        beside = {}
        if batch.given is not None:
            beside["given"] = Given(batch.given.at.numpy().astype(np.int32), batch.given.rows.numpy())
        if batch.coords is not None:
            beside["coords"] = batch.coords.numpy()
        logits = self.inner.run(Batch(**own, more=more, **beside))
        logits[self.nan, 5] = np.nan
        found = torch.from_numpy(logits.copy())
        return found if batch.into is None else batch.into[: len(found)].copy_(found)


def check_shared(batch: DeviceBatch, page_size: int) -> int:
    """What a batch says about common beginnings is true. How many rows it says it of."""
    if batch.shared is None:
        return 0
    start, length, table, own = (x.numpy() for x in (getattr(batch.shared, n) for n in SHARED))
    assert start[0] == 0 and start[-1] == batch.sequences and (np.diff(start) >= 0).all()
    for group, tokens in enumerate(length.tolist()):
        rows, pages = slice(start[group], start[group + 1]), tokens // page_size
        assert tokens % page_size == 0 and (own[rows] == tokens).all()
        assert (batch.kv_len.numpy()[rows] > tokens).all()
        assert (batch.pages.numpy()[rows, :pages] == table[group, :pages]).all()
    return int((own > 0).sum())


def make_device_runner(
    *,
    pages: int | tuple[int, ...] = 64,
    overlap: bool = False,
    run: OnDevice | None = None,
    max_rows: int = 40,
    max_seqs: int = 8,
    padded: bool = False,
    model: tiny_llama.TinyLlama = tiny_llama.MODEL,
    proposer: Proposer | None = None,
    drafts: int = 0,
) -> DeviceRunner:
    """`overlap` means nothing to it: what is launched is launched."""
    return DeviceRunner(
        run or OnDevice(pages, model),
        kv=tiny_llama.kv(pages, model),
        vocab_size=V,
        max_seqs=max_seqs,
        max_tokens=64,
        max_context=CONTEXT,
        max_rows=max_rows,
        padded=padded,
        proposer=proposer,
        drafts=drafts,
    )
