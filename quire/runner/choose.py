"""The choice of a runner for a program: the one on the host, or the one whose state lives on the program's device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.backends.ops import KV, Program
from quire.runner.runner import Runner

if TYPE_CHECKING:
    from quire.runner.device.runner import DeviceRunner


def on_device(program: Program) -> bool:
    """Whether the program gives its logits on a device."""
    return hasattr(program, "launch")


def open_runner(
    program: Any,
    *,
    kv: KV,
    vocab_size: int,
    max_seqs: int,
    max_tokens: int,
    max_context: int,
    max_rows: int,
    overlap: bool,
    speculate: str = "none",
    drafts: int = 0,
) -> Runner | DeviceRunner:
    """A runner for that program. `overlap` gives the host's runner a thread; a device overlaps by itself.

    `speculate` names the proposer of up to `drafts` tokens, or is none.
    """
    proposer = None
    if speculate != "none":
        from quire.runner.speculate import open_proposer

        proposer = open_proposer(speculate, max_seqs=max_seqs, max_context=max_context)
    sizes: dict[str, Any] = {
        "kv": kv,
        "vocab_size": vocab_size,
        "max_seqs": max_seqs,
        "max_tokens": max_tokens,
        "max_context": max_context,
        "max_rows": max_rows,
        "proposer": proposer,
    }
    if on_device(program):
        from quire.runner.device.runner import DeviceRunner

        return DeviceRunner(program, **sizes, drafts=drafts)
    return Runner(program, **sizes, overlap=overlap)
