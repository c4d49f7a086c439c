"""Planted faults: each is one edit of the real code, and the harness must find it within a bounded number of seeds.

An edit names the text it replaces, which must be there exactly once: when the code changes, so must the fault.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

import quire.cache.groups
import quire.cache.keys
import quire.cache.loading
import quire.cache.pages
import quire.cache.prefix_tree
import quire.cache.sealed
import quire.engine.admission
import quire.engine.limits
import quire.engine.loads
import quire.engine.policy
import quire.engine.scheduler
import quire.engine.spans
import quire.runner.spans
from tests.null.device import Caught
from tests.null.fuzz import Parts, fuzz

MODULES = {
    "keys": quire.cache.keys,
    "loading": quire.cache.loading,
    "loads": quire.engine.loads,
    "sealed": quire.cache.sealed,
    "groups": quire.cache.groups,
    "tree": quire.cache.prefix_tree,
    "pages": quire.cache.pages,
    "scheduler": quire.engine.scheduler,
    "admission": quire.engine.admission,
    "policy": quire.engine.policy,
    "limits": quire.engine.limits,
    "ids": quire.engine.spans,
    "spans": quire.runner.spans,
}


MADE_OF = {"pages": "tree", "admission": "scheduler"}  # parts whose names another one has imported
UNCHANGED = '"""\n\nfrom __future__'  # what is replaced by itself, in a copy without a fault


@dataclass
class Fault:
    """What is broken, where, and how."""

    name: str
    part: str
    old: str
    new: str
    seeds: int = 150
    depths: tuple[int, ...] = (0, 1, 2)
    tiers: bool = False  # every run has a tier and a listener
    also: tuple[tuple[str, str], ...] = ()  # guards to take away, so that the fault is not stopped before it does harm


FAULTS = [
    Fault(
        "a freed duplicate whose row was not rewritten",
        "tree",
        "row[i] = node.pages[g]",
        "pass",
    ),
    Fault(
        "publishing unverified tokens",
        "scheduler",
        "lease, verified = seq.lease, seq.computed",
        "lease, verified = seq.lease, seq.computed + work.n - row.accepted",
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
        "                self._hold(path[i], g)\n        lease =",
        "                pass\n        lease =",
        also=(
            ("node.refs[g] -= 1\n        if", "node.refs[g] = max(0, node.refs[g] - 1)\n        if"),
            ("if whole and (node.kids or node.pins):", "if False:"),
            ("del self._idle[g][node]", "self._idle[g].pop(node, None)"),
            ("del parent.kids[node.key]", "parent.kids.pop(node.key, None)"),
        ),
    ),
    Fault(
        "a lock that a match does not take on the last page",
        "tree",
        "for i in range(first, count):\n                self._hold(path[i], g)",
        "for i in range(first, count - 1):\n                self._hold(path[i], g)",
        also=(("node.refs[g] -= 1\n        if", "node.refs[g] = max(0, node.refs[g] - 1)\n        if"),),
    ),
    Fault("a rewritten row that the device is not told of", "tree", "lease.dirty = min(lease.dirty, i)", "pass"),
    Fault(
        "new pages that the device is not told of",
        "tree",
        "lease.dirty = min(lease.dirty, held)",
        "lease.dirty = max(lease.dirty, held)",
    ),
    Fault("a slot reused without being closed", "admission", "self.closed.append(seq.slot)", "pass"),
    Fault(
        "shared pages freed with the private ones",
        "tree",
        "self.pools[g].free([page for page in row[len(path) :] if page >= 0])",
        "self.pools[g].free([page for page in row if page >= 0])",
    ),
    Fault(
        "private pages never freed",
        "tree",
        "self.pools[g].free([page for page in row[len(path) :] if page >= 0])",
        "pass",
    ),
    Fault(
        "a duplicate never freed",
        "tree",
        "            pool.free([page])\n            self.returned += 1",
        "            self.returned += 1",
    ),
    Fault(
        "evicting a page that is in use",
        "tree",
        "if not node.refs[g]:\n            del self._idle[g][node]",
        "if False:\n            pass",
        also=(("if node.refs[g]:\n            raise", "if False:\n            raise"),),
    ),
    Fault(
        "letting go from the front",
        "tree",
        "for i in range(len(path) - 1, lease.low[g] - 1, -1):",
        "for i in range(lease.low[g], len(path)):",
    ),
    Fault(
        "pages of other groups that stay where a prefix is whole no more",
        "tree",
        "for other in self._all if whole else (g,):",
        "for other in (g,):",
    ),
    Fault(
        "a window that sees one token less when it forgets",
        "groups",
        "return max(0, length - self.width + 1), length",
        "return max(0, length - self.width + 2), length",
    ),
    Fault(
        "a window that is resumed with its first page missing",
        "groups",
        "while at * size > max(0, end * size - self.width + 1):",
        "while at * size > max(0, end * size - self.width + 1 + size):",
    ),
    Fault("a window that is resumed without a look", "groups", "if row[at] < 0:", "if False:"),
    Fault(
        "a state that is not there taken for one that is",
        "groups",
        "while pages and row[pages - 1] < 0:",
        "while False:",
    ),
    Fault(
        "a state of an earlier page restored",
        "groups",
        "return max(0, length - 1), length",
        "return max(0, length - 1 - size_of_page), length",
        also=(("STATE_EVERY = 512", "size_of_page = 4\nSTATE_EVERY = 512"),),
    ),
    Fault(
        "the checkpoint of another prefix restored",
        "tree",
        "            del row[count:]\n",
        "            del row[count:]\n            if self.groups[g].sparse and self._owned[g] > 1 and count:\n"
        "                row[-1] = next(n.pages[g] for n in self._walk() if n.parent and n.pages[g] >= 0)\n",
    ),
    Fault(
        "a sequence that gives its last state away",
        "tree",
        "for i in range(lease.low[g], len(row) - 1):",
        "for i in range(lease.low[g], len(row)):",
    ),
    Fault("a row without a place for its last state", "tree", "row[-1:] = self._take(g, 1)", "pass"),
    Fault(
        "pages behind the window that are kept",
        "tree",
        "for g in self._partial:",
        "for g in ():",
    ),
    Fault(
        "pages behind the window that are lost",
        "tree",
        "                    self.pools[g].free([page])\n                elif",
        "                    pass\n                elif",
    ),
    Fault(
        "shared pages freed behind the window",
        "tree",
        "                if i >= len(lease.path):\n",
        "                if i >= lease.matched:\n",
    ),
    Fault(
        "forgetting what is not yet verified",
        "scheduler",
        "self.tree.forget(lease, verified)",
        "self.tree.forget(lease, verified + seq.in_flight + self._drafts)",
        seeds=400,
    ),
    Fault(
        "a row that is only in the first group",
        "pages",
        "[row[dirty:] for row in self.rows[1:]]",
        "[row[dirty:][:-1] + [0] for row in self.rows[1:]]",
    ),
    Fault(
        "room in the first group taken for room in all",
        "tree",
        "            if need > self.available(g):\n                return False",
        "            if not g and need > self.available(g):\n                return False",
    ),
    Fault(
        "a duplicate that is one in the first group alone",
        "tree",
        "if node.pages[g] < 0:\n                node.pages[g] = page\n                node.refs[g] = 1",
        "if node.pages[g] < 0 or g:\n                node.pages[g] = page\n                node.refs[g] = 1",
    ),
    Fault(
        "tenants that share a root",
        "tree",
        "node = root = self._roots.get(namespace)\n",
        'namespace = ""\n        node = root = self._roots.get(namespace)\n',
    ),
    Fault(
        "a match that takes the last token too",
        "admission",
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
        "the same work again where a page is new",
        "scheduler",
        "lease and at < lease.dirty * size and at < seq.max_len - 1:",
        "lease and at < seq.max_len - 1:",
        depths=(1, 2),
    ),
    Fault(
        "the same work again past the longest length",
        "scheduler",
        "lease and at < lease.dirty * size and at < seq.max_len - 1:",
        "lease and at < lease.dirty * size:",
        seeds=600,
        depths=(1, 2),
    ),
    Fault(
        "the same work again in another slot",
        "admission",
        "seq.lease, seq.slot, seq.again = None, -1, None",
        "seq.lease, seq.slot = None, -1",
        depths=(1, 2),
    ),
    Fault(
        "limits that are not told of the same work",
        "scheduler",
        "limit.passed(again)",
        "pass",
        depths=(1, 2),
    ),
    Fault(
        "the same work again whatever a limit says",
        "scheduler",
        "free = not self._drafts and all(limit.passes(len(running)) for limit in self._step_limits)",
        "free = not self._drafts",
        seeds=600,
        depths=(1, 2),
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
        "admission",
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
    Fault(
        "two pictures with the same ids",
        "ids",
        "span.kind.encode(), span.digest, span.positions)",
        "span.kind.encode(), span.positions)",
    ),
    Fault(
        "pictures that have the ids of their text",
        "ids",
        "tokens[span.start : span.end] = ids_of(span, request.namespace)",
        "pass",
    ),
    Fault("a picture of one id", "ids", "(numbers % FIRST + FIRST).tolist()", "[FIRST] * span.length"),
    Fault(
        "spans that are forgotten when a sequence comes back",
        "admission",
        "spans=request.spans",
        "spans=() if seq.preemptions else request.spans",
    ),
    Fault(
        "a chunk whose rows begin with the picture's first",
        "spans",
        "self._rows[i][first - self._starts[i] : last - self._starts[i]]",
        "self._rows[i][: last - first]",
    ),
    Fault(
        "rows in the place of the token before",
        "spans",
        "yield first - start, self._rows",
        "yield max(0, first - start - 1), self._rows",
    ),
    Fault(
        "a span that ends with its chunk",
        "spans",
        "bisect_right(self._ends, start)",
        "bisect_right(self._starts, start - 1)",
    ),
    Fault(
        "the second of two pictures in a chunk left out",
        "spans",
        "range(bisect_right(self._ends, start), len(self._starts))",
        "range(bisect_right(self._ends, start), len(self._starts))[:1]",
    ),
    Fault("a page handed out twice", "pages", "del free[-count:]", "del free[-count:-1]"),
    Fault(
        "a key of a page's own tokens alone",
        "keys",
        "blake2b(parent + self._pack(*tokens)",
        "blake2b(self._pack(*tokens)",
    ),
    Fault("namespaces with one chain of keys", "keys", "if namespace:", "if False:"),
    Fault(
        "a removal that no listener is told of",
        "tree",
        "            self._tell_removed(node, g, page)",
        "            pass",
    ),
    Fault(
        "pages of further groups that no listener is told of",
        "tree",
        "                if self._listeners:\n                    self._tell_stored(node, g)",
        "                if self._listeners and not g:\n                    self._tell_stored(node, g)",
    ),
    Fault(
        "a listener that is not told what was there before",
        "tree",
        "            self._tell_all(listener)",
        "            pass",
        tiers=True,
    ),
    Fault(
        "a duplicate that a listener is told of",
        "tree",
        "            duplicates.append((self.pools[g], page))\n",
        "            duplicates.append((self.pools[g], page))\n            self._tell_stored(node, g)\n",
    ),
    Fault(
        "the pages of a late load given away while they are written",
        "loads",
        "            if load.ended:\n                self._end",
        "            if True:\n                self._end",
        tiers=True,
        also=(("if not flight.load.ended]", "if not (flight.load.ended or flight.load.late)]"),),
    ),
    Fault(
        "the pages of a load given away when who waits for it goes",
        "loads",
        "        del self._by_sequence.pop(seq.key).waiting[seq.key]",
        "        flight = self._by_sequence.pop(seq.key)\n        del flight.waiting[seq.key]\n"
        "        if not flight.waiting:\n            self._flights.remove(flight)\n            self._end(flight, flight.lease, False)",
        tiers=True,
    ),
    Fault(
        "a load that failed taken for one that did not",
        "loads",
        "well = load.ended and load.well",
        "well = load.ended",
        tiers=True,
    ),
    Fault(
        "a load that has ended before its copies have",
        "loading",
        "self.ended = not self._copies",
        "self.ended = True",
        tiers=True,
    ),
    Fault(
        "a copy that failed taken for one that did not",
        "loading",
        "            self.well = False\n            return True",
        "            return True",
        tiers=True,
    ),
    Fault(
        "pages loaded into each other's places",
        "loading",
        "zip(found.keys, row[lease.shared :], strict=True)",
        "zip(found.keys, row[lease.shared :][::-1], strict=True)",
        tiers=True,
    ),
    Fault(
        "what one group has taken for what all have",
        "loading",
        "[[0 if there else -1 for there in each] for each in has]",
        "[[0 if there else -1 for there in has[0]] for _ in has]",
        tiers=True,
    ),
    Fault(
        "a prefix with a hole taken for a whole one", "tree", "if group.whole and -1 in row]", "if False]", tiers=True
    ),
    Fault(
        "a seal that nobody looks at", "sealed", "self._fits = well and all(", "self._fits = well and bool(", tiers=True
    ),
    Fault(
        "a seal that is the same for every key",
        "sealed",
        'made.update(group.to_bytes(4, "little") + key)',
        "pass",
        tiers=True,
    ),
    Fault(
        "sequences that are forgotten when another's load ends",
        "loads",
        "            flight.waiting = {}",
        "            flight.waiting = {}\n            del back[1:]",
        tiers=True,
    ),
    Fault(
        "a window staged with its first page missing",
        "tree",
        "group.resident(upto)[0] // size) for low, group in zip(lease.low",
        "group.resident(upto)[0] // size + (not group.whole)) for low, group in zip(lease.low",
        tiers=True,
    ),
    Fault(
        "a waiting sequence that is looked up in every plan",
        "admission",
        "if running and memo is not None and memo.returned == tree.returned:",
        "if False:",
    ),
    Fault(
        "a waiting sequence that is never tried again",
        "admission",
        "if running and memo is not None and memo.returned == tree.returned:",
        "if memo is not None:",
    ),
    Fault(
        "a long prompt that takes all tokens",
        "scheduler",
        "done = self._later(first, running, work, opened, share, admits)",
        "done = set[int]()",
    ),
    Fault("a long prompt that gets what is left of a share alone", "scheduler", "budget.left = left - used", "pass"),
    Fault("a share that is rounded to nothing", "policy", "(tokens + self._owed) // PARTS", "tokens // 50"),
    Fault("a quarter that is lent at once", "policy", "left // AHEAD - first.lent", "left - first.lent"),
    Fault(
        "a slot that was never opened is closed",
        "scheduler",
        "                admission.closed.remove(new.slot)\n",
        "",
        seeds=400,
        depths=(1, 2),
    ),
    Fault(
        "overtaking who waits for pages",
        "admission",
        "if head is None or head.no_room is not None or head.order < first.order:",
        "if head is None or head.order < first.order:",
        seeds=600,
    ),
    Fault("a prompt that is computed, and nobody is told", "scheduler", "self._queue.come(seq, seq.computed)", "pass"),
    Fault(
        "waiting for a sequence that is gone",
        "scheduler",
        "        self._queue.come(seq)\n        for limit",
        "        for limit",
    ),
    Fault(
        "waiting for a sequence that was preempted",
        "admission",
        "        self.queue.come(seq)\n        self.queue.add(seq)\n\n    def _remove",
        "        self.queue.add(seq)\n\n    def _remove",
        seeds=600,
    ),
    Fault("a sequence that is lost in the queue", "admission", "self._list(seq)\n        of_rank", "of_rank"),
    Fault(
        "a sequence that steps aside for good", "admission", "while self._aside and most:", "while False:", seeds=600
    ),
    Fault("a follower that does not wait", "limits", "leader.prompt_done or leader.key >= seq.key", "leader.computed"),
    Fault(
        "drafts beyond what is left of a step",
        "limits",
        "if start < seq.prompt_rows or start >= len(seq.tokens) - 1:",
        "if start < seq.prompt_rows:",
    ),
]


def planted(fault: Fault) -> dict[str, ModuleType]:
    """A copy of the module with the fault in it, and of the one that is made of it."""
    broken, made = replaced(fault), MADE_OF.get(fault.part)
    if made is None:
        return {fault.part: broken}
    name = MODULES[fault.part].__name__
    kept, sys.modules[name] = sys.modules[name], broken
    try:
        whole = replaced(Fault("none", made, UNCHANGED, UNCHANGED))
    finally:
        sys.modules[name] = kept
    return {made: whole} if fault.part == "admission" else {fault.part: broken, made: whole}


def replaced(fault: Fault) -> ModuleType:
    """The module of a fault, made from the source with the fault in it."""
    module = MODULES[fault.part]
    source = inspect.getsource(module)
    for old, new in [(fault.old, fault.new), *fault.also]:
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
    parts = replace(Parts(tiers=fault.tiers), **planted(fault))
    with pytest.raises(Exception) as caught:
        fuzz(0, fault.seeds, fault.depths, parts)
    assert any("seed" in note for note in caught.value.__notes__)


ALONE = [*FAULTS[:4], *(fault for fault in FAULTS if fault.name == "the checkpoint of another prefix restored")]


@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.name)
def test_the_device_alone_notices(fault: Fault) -> None:
    """Without the check of the tree's books: wrong KV is seen where it is read, or wrong news where it arrives."""
    with pytest.raises(Caught):
        fuzz(0, fault.seeds, fault.depths, replace(Parts(check=False), **planted(fault)))


def test_unbroken_copies_pass() -> None:
    """The way a fault is planted is not itself a fault."""
    copies: dict[str, ModuleType] = {}
    for part in MODULES:
        copies |= planted(Fault("none", part, UNCHANGED, UNCHANGED))
    assert fuzz(0, 30, parts=replace(Parts(), **copies)).runs == 90
