"""Choosing tokens on a device: what a step's sampled rows need beside logits, and the kernels that choose from them.

What a row needs is known on the host when the step is launched, and goes to the device with everything else of the step; only masks
come later. The choice itself is a launch like any other: tokens, and log probabilities where they are owed, come back in one copy.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.backends.torch.sampler import DeviceSampler
from quire.runner.device.drafting import Drafting
from quire.runner.device.launched import Launched, Shape
from quire.runner.device.slot_sampling import RowSampling, SlotSampling
from quire.runner.device.staging import Arrival, Staging
from quire.runner.device.state import DeviceState
from quire.runner.host_state import HostState
from quire.runner.sampler import Masks


class Choosing:
    """The sampler of one runner, and how each of its slots samples. Used from the runner's thread."""

    def __init__(
        self,
        sampler: DeviceSampler,
        host: HostState,
        state: DeviceState,
        drafting: Drafting | None,
        *,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._sampler = sampler
        self._host = host
        self._slots = host.slots
        self._state = state
        self._device = device
        self._vocab = vocab_size
        self._drafting = drafting
        self._late = Staging(device)
        self.sampling = SlotSampling(host.slots.count, vocab_size, device)

    def gather(self, pending: Launched, masks: Masks | None = None) -> RowSampling | None:
        """How the sampled rows of a step choose their tokens."""
        made = pending.verification
        if made is None:
            return self.sampling.gather(pending.slots, pending.positions, masks)
        owner = np.repeat(made.owners(pending.sampled), [pending.rows_of(i) for i in pending.sampled])
        meant = pending.ahead <= np.array([*made.most, 0])[owner]
        return self.sampling.gather(pending.slots, pending.positions, masks, meant=meant, owner=owner, span=made.span)

    def shape(self, pending: Launched) -> Shape:
        """Which log probabilities this step owes. A sequence whose prompt tokens are not known is failed."""
        tops = self.sampling.logprobs[pending.slots]
        wanted = [(j, int(tops[j])) for j in np.flatnonzero(tops >= 0).tolist()]
        prompt: list[tuple[int, list[int], int]] = []
        for i, w in pending.works.items():
            if w.prompt_logits:
                try:
                    tokens = self._slots.after(w.slot, w.start, w.prompt_logits)
                except ValueError as error:
                    self._host.fail(pending, [i], str(error))
                    tokens = [0] * w.prompt_logits
                prompt.append((i, tokens, self._slots.stream(w.slot).params.prompt_logprobs or 0))
        if not wanted and not prompt:
            return Shape(0, [], [])
        top = max((*(top for _, top in wanted), *(top for _, _, top in prompt)))
        return Shape(min(top, self._vocab), wanted, prompt)

    def more(self, pending: Launched) -> list[np.ndarray]:
        """The arrays that sampling needs on the device besides logits."""
        shape, sampling = pending.shape, pending.sampling
        follow = [token for _, tokens, _ in shape.prompt for token in tokens]
        whole = [pending.slots, np.array(follow, np.int32), np.array([j for j, _ in shape.wanted], np.int32)]
        return [*(x.astype(np.int32) for x in whole), *(sampling.arrays() if sampling is not None else [])]

    def launch(self, pending: Launched, masks: Masks) -> Arrival:
        """Launch the choice of tokens and the copy back."""
        count, logits, tokens, shape = pending.slots.size, pending.logits, pending.best, pending.shape
        own = {j: masks[i] for i, j in pending.firsts().items() if i in masks} if masks else None
        if own:  # only now is it known what they want: this costs copies of its own
            pending.sampling = self.gather(pending, own)
            pending.sent = self._late.send(self.more(pending))
        drafting = self._drafting
        noted = drafting is not None and (pending.verification is not None or drafting.remembers)
        if not pending.sent and not noted:  # decoded, and nobody wants more than the best token
            assert tokens is not None
            return Arrival(tokens)
        sent = pending.sent or self._late.send(self.more(pending))
        slots, follow, wanted = (x.long() for x in sent[:3])
        tokens = self._choose(pending, logits[:count])
        parts = [tokens]
        if pending.verification is not None and drafting is not None:
            parts += drafting.accept(pending, tokens, [pending.works[i] for i in pending.sampled])
        else:
            self._state.set_last(slots, tokens)
            if drafting is not None:
                drafting.remember(pending, slots, torch.arange(count, device=self._device))
        if shape.wanted or shape.prompt:
            parts = [part.double() for part in parts]
        if shape.wanted:
            every = len(shape.wanted) == count
            of, to = (logits[:count], tokens) if every else (logits[wanted], tokens[wanted])
            parts.append(self._sampler.logprobs(of, to, shape.top).ravel())
        if shape.prompt:
            parts.append(self._sampler.logprobs(logits[count:], follow, shape.top).ravel())
        return Arrival(torch.cat(parts) if len(parts) > 1 else tokens)

    def _choose(self, pending: Launched, logits: torch.Tensor) -> torch.Tensor:
        """A token, or a code, for each sampled row."""
        best = pending.best
        if best is None and (pending.sampling is None or not pending.sampling.every):
            best = self._sampler.greedy(logits)
        if pending.sampling is None:
            assert best is not None
            return best
        made = pending.verification
        metadata = self.sampling.metadata(pending.sampling, pending.sent[3:], None if made is None else made.shift)
        chosen = self._sampler.choose(logits, metadata)
        self.sampling.add(metadata, chosen)
        return chosen if best is None or metadata.rows is None else best.index_copy(0, metadata.rows.long(), chosen)
