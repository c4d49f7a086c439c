"""Warm-up: steps of every kind that is not captured are launched before the first request, on the spare pages.

So no request waits while a kernel is compiled. Nothing that these steps write is ever read.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.backends.batch import Batch, Table
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch
from quire.runner.device.staging import Staging
from quire.runner.device.state import DeviceState

# Decode rows, prompt rows and reach: few rows, many, split contexts, and not.
KINDS = (
    (0, 3, 64),
    (3, 20, 64),
    (1, 3, 256),
    (1, 20, 1024),
    (1, 40, 4096),
    (1, 300, 256),
    (7, 200, 2048),
    (159, 300, 512),
)


@torch.inference_mode()
def warm_up(
    program: DeviceProgram,
    state: DeviceState,
    staging: Staging,
    max_seqs: int,
    max_tokens: int,
    max_context: int,
    *,
    sampling: bool = True,
) -> None:
    """Launch them, as far as the engine is large enough for them to come; and choose tokens, unless that is left out."""
    for ones, rows, reach in KINDS:
        if ones >= max_seqs or ones + rows > max_tokens or rows > max_context:
            continue
        n = np.array([1] * ones + [rows], np.int32)
        q_start = np.concatenate(([0], np.cumsum(n))).astype(np.int32)
        pos = np.concatenate([np.arange(k, dtype=np.int32) for k in n])
        offset = pos % program.kv.page_size
        writes = [(first + offset).astype(np.int32) for first in state.spare_writes]
        ids, last = np.zeros_like(pos), q_start[1:] - 1
        arrays = [ids, pos, q_start, n, last.astype(np.int32), np.full(n.size, state.spare, np.int32)]
        on_device = staging.send([*arrays, *writes])
        tables = state.page_tables(on_device[5], on_device[6:])
        blank = np.zeros((n.size, 1), np.int32)
        others = tuple(Table(blank, write) for write in writes[1:])
        batch = DeviceBatch(
            ids=on_device[0],
            pos=on_device[1],
            q_start=on_device[2],
            kv_len=on_device[3],
            pages=tables[0].pages,
            write=tables[0].write,
            more=tuple(tables[1:]),
            logit_rows=on_device[4],
            longest=rows,
            reach=min(reach, max_context),
            host=Batch(ids, pos, q_start, n, blank, writes[0], arrays[4], others),
        )
        logits = program.launch(batch)
        if sampling:
            program.sampler.warm_up(logits)
    torch.cuda.synchronize(program.device)
