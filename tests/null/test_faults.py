"""Planted faults: each is one edit of the real code, and the harness must find it within a bounded number of seeds.

An edit names the text it replaces, which must be there exactly once: when the code changes, so must the fault.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

import quire.cache.pool
import quire.cache.prefix_tree
import quire.engine.scheduler
from tests.null.device import Caught
from tests.null.fuzz import Parts, fuzz

MODULES = {"pool": quire.cache.pool, "tree": quire.cache.prefix_tree, "scheduler": quire.engine.scheduler}


@dataclass
class Fault:
    """What is broken, where, and how."""

    name: str
    part: str
    old: str
    new: str
    seeds: int = 150
    depths: tuple[int, ...] = (0, 1, 2)
    also: tuple[str, str] | None = None  # a guard to take away, so that the fault is not stopped before it does harm


FAULTS = [
    Fault(
        "a freed duplicate whose row was not rewritten",
        "tree",
        "lease.pages[i] = kid.pages[0]",
        "pass",
    ),
    Fault(
        "publishing unverified tokens",
        "scheduler",
        "lease, verified = seq.held, seq.computed",
        "lease, verified = seq.held, seq.computed + work.n - row.accepted",
        seeds=400,
    ),
    Fault(
        "ignoring epochs",
        "scheduler",
        "if seq is None or seq.epoch != work.epoch:",
        "if seq is None or seq.status != RUNNING:",
        seeds=600,
        depths=(1, 2),
    ),
    Fault(
        "matching without a lock",
        "tree",
        "        self._pin(node)\n        return Lease",
        "        return Lease",
        also=("node.pins -= 1", "node.pins = max(0, node.pins - 1)"),
    ),
    Fault(
        "a lock that a match takes one node too high",
        "tree",
        "        self._pin(node)\n        return Lease",
        "        self._pin(node.parent or node)\n        return Lease",
    ),
    Fault("a rewritten row that the device is not told of", "tree", "lease.dirty = min(lease.dirty, i)", "pass"),
    Fault(
        "new pages that the device is not told of",
        "tree",
        "lease.dirty = min(lease.dirty, len(lease.pages))\n        lease.pages += pages",
        "lease.pages += pages\n        lease.dirty = max(lease.dirty, len(lease.pages) - 1)",
    ),
    Fault("a slot reused without being closed", "scheduler", "self._closed.append(seq.slot)", "pass"),
    Fault(
        "shared pages freed with the private ones",
        "tree",
        "self.pool.free(lease.pages[lease.shared :])",
        "self.pool.free(lease.pages)",
    ),
    Fault("private pages never freed", "tree", "self.pool.free(lease.pages[lease.shared :])", "pass"),
    Fault("a duplicate never freed", "tree", "self.pool.free(duplicates)", "pass"),
    Fault(
        "evicting a leaf that is in use",
        "tree",
        "if not node.pins and not node.kids:\n            self._leaves.pop(node, None)",
        "if False:\n            pass",
    ),
    Fault(
        "tenants that share a root",
        "tree",
        "node = self._roots.get(namespace)\n        if node is None:\n            node = self._roots[namespace] = Node(namespace, (), None)",
        'node = self._roots.setdefault("", Node("", (), None))',
    ),
    Fault(
        "a match that takes the last token too",
        "scheduler",
        "seq.reusable if self._prefix_cache else 0",
        "len(seq.tokens) if self._prefix_cache else 0",
    ),
    Fault(
        "a length that forgets what is in flight",
        "scheduler",
        "start = seq.computed + seq.in_flight  # an upper",
        "start = seq.computed  # an upper",
        depths=(1, 2),
    ),
    Fault(
        "work of a victim left in the plan",
        "scheduler",
        "work = [w for w in work if self._keys[w.key].epoch == w.epoch]",
        "pass",
        seeds=400,
    ),
    Fault(
        "tokens delivered past the end",
        "scheduler",
        "tokens, logprobs = tokens[:taken], logprobs[:taken]",
        "pass",
    ),
    Fault(
        "computing past the longest length",
        "scheduler",
        "n = min(1 + self._drafts, seq.max_len - 1 - start)",
        "n = 1 + self._drafts",
        seeds=600,
    ),
    Fault(
        "prompt logprobs counted twice after a preemption",
        "scheduler",
        "row.prompt_logprobs[len(have) - work.start :]",
        "row.prompt_logprobs",
        seeds=1200,
    ),
    Fault(
        "one random stream for every index",
        "scheduler",
        "seed=mix_seed(seq.seed, request.index)",
        "seed=mix_seed(seq.seed, 0)",
    ),
    Fault(
        "running out of order",
        "scheduler",
        "victim = self._running[-1]",
        "victim = self._running[0]",
        seeds=400,
    ),
    Fault("a page handed out twice", "pool", "del free[-count:]", "del free[-count:-1]"),
]


def planted(fault: Fault) -> ModuleType:
    """A copy of the module with the fault in it."""
    module = MODULES[fault.part]
    source = inspect.getsource(module)
    for old, new in [(fault.old, fault.new)] + ([fault.also] if fault.also else []):
        assert source.count(old) == 1, f"{fault.name}: the text to break is there {source.count(old)} times"
        source = source.replace(old, new)
    broken = ModuleType(f"{module.__name__}_broken")
    sys.modules[broken.__name__] = broken  # dataclasses look their module up
    try:
        exec(compile(source, f"<{fault.name}>", "exec"), broken.__dict__)
    finally:
        del sys.modules[broken.__name__]
    return broken


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_caught(fault: Fault) -> None:
    parts = replace(Parts(), **{fault.part: planted(fault)})
    with pytest.raises(Exception) as caught:
        fuzz(0, fault.seeds, fault.depths, parts)
    assert any("seed" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("fault", FAULTS[:4], ids=lambda fault: fault.name)
def test_the_device_alone_notices(fault: Fault) -> None:
    """Without the check of the tree's books: wrong KV is seen where it is read, or wrong news where it arrives."""
    with pytest.raises(Caught):
        fuzz(0, fault.seeds, fault.depths, replace(Parts(check=False), **{fault.part: planted(fault)}))


def test_unbroken_copies_pass() -> None:
    """The way a fault is planted is not itself a fault."""
    copies = {
        part: planted(Fault("none", part, '"""\n\nfrom __future__', '"""\n\nfrom __future__')) for part in MODULES
    }
    assert fuzz(0, 30, parts=replace(Parts(), **copies)).runs == 90
