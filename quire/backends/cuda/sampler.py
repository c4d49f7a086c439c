"""The device's sampler over Triton kernels: no sort, no copy of a history, the logits read a few times.

The meaning is that of backends/torch/sampler.py. Scores are float32 here (logits are exact; penalties and biases are
rounded once), and probabilities are weighed in float64. Rows with a typical_p, which is rare, take torch's path; nobody
else pays for them. Scratch memory is the allocator's: a call holds it until its kernels are launched.
"""

from __future__ import annotations

import torch

from quire.backends.cuda.kernels import candidates, sample
from quire.backends.cuda.kernels import logprobs as told
from quire.backends.cuda.kernels.rules import apply_rules, pieces
from quire.backends.torch.sampler import COLUMNS, SamplingMetadata, TorchSampler


class CudaSampler:
    """`alone` gives each row of torch's path a call of its own, so that no batch mate can change the order of a sum."""

    def __init__(self, device: torch.device, *, alone: bool = False):
        self._device = device
        self._typical = TorchSampler(1) if alone else TorchSampler()
        self._wanted: dict[int, told.Wanted] = {}

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=self._device)
        sample.greedy(logits, tokens)
        return tokens

    def choose(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        w, n, vocab = metadata, metadata.params.shape[0], logits.shape[1]
        scores, alive = logits[:n], None
        if any(x is not None for x in (w.rows, w.bias, w.stops, w.seen, w.allowed)):
            scores = torch.empty(n, vocab, dtype=torch.float32, device=self._device)
            alive = torch.empty(n, pieces(vocab), dtype=torch.int32, device=self._device)
            apply_rules(
                logits, scores, alive, w.params, rows=w.rows, bias=w.bias, history=w.history, seen=w.seen,
                counts=w.counts, mask=w.mask, allowed=w.allowed, stops=w.stops,
            )  # fmt: skip
        tokens = torch.empty(n, dtype=torch.int64, device=self._device)
        sample.choose(scores, w.params, w.narrow, tokens, candidates.scratch(n, vocab, self._device), alive=alive)
        if w.typical is not None:
            at = w.typical.long()
            tokens.index_copy_(0, at, self._typical.choose(logits, w.part(at)))
        return tokens

    def warm_up(self, logits: torch.Tensor) -> None:
        """Sample one row with every parameter, and one without: between them they launch every kernel there is."""
        logits, vocab = logits[:1], logits.shape[1]
        ints = torch.zeros(3, dtype=torch.int32, device=self._device)
        zero, doubles = ints[1:2], torch.ones(len(COLUMNS) + 1, dtype=torch.float64, device=self._device)
        metadata = SamplingMetadata(
            params=doubles[1:].view(1, -1), rows=zero, narrow=zero + 1, draws=True, most_k=1, top_p=True, min_p=True,
            bias=(zero, zero, doubles[:1]), stops=(zero, zero), history=zero,
            seen=torch.zeros(1, vocab, dtype=torch.bool, device=self._device),
            counts=torch.zeros(1, vocab, dtype=torch.int32, device=self._device), mask=zero,
            allowed=torch.zeros(1, -(-vocab // 32), dtype=torch.int32, device=self._device),
        )  # fmt: skip
        self.choose(logits, metadata)
        for top in (0, 5):
            self.logprobs(logits, self.greedy(logits), top)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
        if top not in self._wanted:
            self._wanted[top] = told.wanted(top, self._device)
        rows, vocab = logits.shape
        out = torch.empty(rows, 2 + 2 * top, dtype=torch.float64, device=self._device)
        found = candidates.scratch(rows, vocab, self._device)
        told.logprobs(logits, tokens, top, out, found, self._wanted[top])
        return out
