"""The host runner and the constraints under random workloads, and planted faults in them: each must be found."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

import quire.engine.constraints.enforce
import quire.engine.limits
import quire.runner.batch_builder
import quire.runner.host_state
import quire.runner.runner
import quire.runner.sampler
import quire.runner.slots
from tests.null.host import Parts, fuzz

MODULES = {
    "runner": quire.runner.runner,
    "host_state": quire.runner.host_state,
    "slots": quire.runner.slots,
    "batch_builder": quire.runner.batch_builder,
    "sampler": quire.runner.sampler,
    "enforce": quire.engine.constraints.enforce,
    "limits": quire.engine.limits,
}
USED = {  # where the module that uses a part has its name
    "host_state": (quire.runner.runner, "HostState"),
    "slots": (quire.runner.host_state, "Slots"),
    "batch_builder": (quire.runner.host_state, "BatchBuilder"),
    "sampler": (quire.runner.runner, "Sampler"),
    "limits": (quire.engine.constraints.enforce, "OneInFlight"),
}


@dataclass
class Fault:
    """One edit of one file; the text it replaces must be there exactly once."""

    name: str
    part: str
    old: str
    new: str
    seeds: int = 40


FAULTS = [
    Fault("a closed slot that is not closed", "host_state", "            slots.close(slot)\n", "            pass\n"),
    Fault(
        "pages that are not placed",
        "host_state",
        "                    slots.place(work)\n",
        "                    pass\n",
    ),
    Fault(
        "a step of many pages that places none of them",
        "host_state",
        "if len(placed) > FEW and slots.place_ones(placed):",
        "if len(placed) > FEW:",
        seeds=120,
    ),
    Fault("a last token that is not noted", "host_state", "slots.last[work.slot] = tokens[-1]", "pass"),
    Fault(
        "drafts that are all taken",
        "host_state",
        "row.accepted, row.drafted = len(tokens), drafted",
        "row.accepted, row.drafted = work.n, drafted",
    ),
    Fault(
        "wrong drafts that stay in the length",
        "host_state",
        "slots.length[work.slot] += len(tokens) - pending.rows_of(index)",
        "pass",
    ),
    Fault("a length that outlives its sequence", "slots", "        self.length[slot] = 0\n", "        pass\n"),
    Fault(
        "the page row of another slot",
        "slots",
        "table[work.slot, work.page_from : end] = row",
        "table[work.slot - 1, work.page_from : end] = row",
    ),
    Fault("a resumed sequence that begins to count again", "slots", "len(new.tokens) - prompt_len", "0", seeds=120),
    Fault("prompt logprobs of the token before", "slots", "[first + 1 : first + 1 + n]", "[first : first + n]"),
    Fault(
        "a position that is one too far",
        "batch_builder",
        "np.add(start, n, out=kv_len)",
        "np.add(start, n + 1, out=kv_len)",
    ),
    Fault(
        "a write into the first page",
        "batch_builder",
        "write[:] = table[slot[owner], page]",
        "write[:] = table[slot[owner], 0]",
    ),
    Fault(
        "logits of the row before the last",
        "batch_builder",
        "last = q_start[1:][sampled] - 1",
        "last = np.maximum(q_start[1:][sampled] - 2, 0)",
    ),
    Fault(
        "few rows that read the table of another slot",
        "batch_builder",
        "pages[i] = table[w.slot, :width]",
        "pages[i] = table[work[0].slot, :width]",
    ),
    Fault(
        "one place for all few rows",
        "batch_builder",
        "write[i] = table.item(w.slot, at // size) * size + at % size",
        "write[i] = table.item(w.slot, at // size) * size",
    ),
    Fault("a length that is not noted", "runner", "self._slots.length[slot] = batch.kv_len", "pass"),
    Fault(
        "prompt logits that are those of the first",
        "runner",
        "                row += w.prompt_logits\n",
        "                pass\n",
        seeds=120,
    ),
    Fault(
        "masks of the wrong rows",
        "runner",
        "own = {j: masks[i] for j, i in enumerate(indices) if i in masks}",
        "own = {j: masks[i] for j, i in enumerate(reversed(indices)) if i in masks}",
    ),
    Fault("masks that are not given to the sampler", "runner", "drafts=drafts, masks=own", "drafts=drafts, masks=None"),
    Fault("generated tokens that are not counted", "runner", "self._slots.position[slot] += 1", "pass"),
    Fault("last tokens of the first row", "runner", "[choice.tokens[-1] for choice in chosen]", "chosen[0].tokens[-1]"),
    Fault(
        "a draft that is taken though another token came",
        "sampler",
        "if j < len(drafts) and drafts[j] != token:",
        "if j < len(drafts) and drafts[j] != token and j:",
    ),
    Fault("one random number for all positions", "sampler", "stream, position + j,", "stream, position,"),
    Fault(
        "a history that is not told",
        "sampler",
        "                stream.history.add(token)\n            if j <",
        "                pass\n            if j <",
        seeds=120,
    ),
    Fault("a mask for the next step", "enforce", "matcher.consume_tokens(new)", "pass"),
    Fault("tokens that are consumed twice", "enforce", "state.taken += len(new)", "pass"),
    Fault("constrained rows that are left out", "enforce", "masks[i] = mask", "masks[len(masks)] = mask"),
    Fault(
        "two steps in flight under one mask",
        "limits",
        "        if seq.sampling:\n            return 0\n",
        "",
    ),
    Fault(
        "drafts that no mask was made for",
        "limits",
        "return min(n, max(1, len(seq.tokens) - start))",
        "return n",
        seeds=120,
    ),
    Fault("a grammar that two sequences share", "enforce", "made.deep_copy()", "made"),
    Fault(
        "a grammar that begins again after a preemption",
        "enforce",
        "constraint is None or seq.key in self._states:",
        "constraint is None:",
        seeds=120,
    ),
    Fault("an end that no grammar accepts", "enforce", "mask[self._ends] = False", "mask[self._ends] = True"),
    Fault("constrained rows that pass with the others", "limits", "return not self._keys", "return True"),
]


def planted(fault: Fault) -> ModuleType:
    """A copy of the module with the fault in it."""
    module = MODULES[fault.part]
    source = inspect.getsource(module)
    assert source.count(fault.old) == 1, f"{fault.name}: the text to break is there {source.count(fault.old)} times"
    broken = ModuleType(f"{module.__name__}_broken")
    sys.modules[broken.__name__] = broken  # dataclasses look their module up
    try:
        exec(compile(source.replace(fault.old, fault.new), f"<{fault.name}>", "exec"), broken.__dict__)
    finally:
        del sys.modules[broken.__name__]
    return broken


def test_random_runs_find_no_fault() -> None:
    report = fuzz(0, 100)
    assert report.runs == 300
    assert report.preemptions > 50 and report.hits > 1000 and report.masked > 1000
    assert report.drafted > 300 and 50 < report.right < report.drafted
    assert all(report.finishes.get(reason, 0) > 100 for reason in ("stop", "length"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = planted(fault)
    logging.disable(logging.CRITICAL)
    try:
        parts = Parts()
        if fault.part in USED:
            module, name = USED[fault.part]
            monkeypatch.setattr(module, name, getattr(broken, name))
        else:
            parts = replace(parts, **{fault.part: broken})
        with pytest.raises(Exception) as caught:
            fuzz(0, fault.seeds, (0, 1), parts)
    finally:
        logging.disable(logging.NOTSET)
    assert any("seed" in note for note in caught.value.__notes__)
