"""The memory that a model needs to run here, for `quire show`: computed from its header alone, as a load computes it before it allocates.

Nothing of the weights is read. The figures are those of the native backend with what `quire serve` would ask for; of a GPU,
which is measured with the model on it, a header tells no more than the weights. A model that is not served says why, with the error that a load would give.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.backends.choose import open_backend
from quire.backends.ops import Estimator, Needs
from quire.config import PAGE_SIZE, EngineConfig, Environment, available_cores, resolve_step
from quire.engine.construction.generating import EXTRA_ROWS
from quire.engine.construction.memory import OVERHEAD, Budget, alone, size
from quire.engine.construction.sizes import choose_kv, pool_of, resolve_sizes
from quire.engine.construction.tasks import task_of
from quire.machine import look_at_memory
from quire.models import Encoder, Grouped, Model, load
from quire.observe.errors import QuireError

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened


def gather(checkpoint: Opened) -> dict[str, Any]:
    """`task` and `memory` in bytes; `refused`, where it would not load here."""
    facts: dict[str, Any] = {}
    try:
        model = load(checkpoint)
        facts["task"] = task = task_of("auto", model, checkpoint)
        if task == "generate" and isinstance(model, Grouped):
            model.kv_layout.split()
        facts["memory"] = _memory(model, task, Environment.read(), facts)
        if facts["memory"]:  # and what a GPU holds unless --quantize says otherwise, whatever the file's own format is
            elements = sum(info.elements for info in checkpoint.tensors.values())
            facts["memory"]["weights_in_bfloat16"] = 2 * elements
    except QuireError as error:
        facts["refused"] = _words(error)
    except ImportError as error:  # the extension is not built: `quire doctor` has the cure
        facts["refused"] = f"the native backend cannot be loaded: {error}: `quire doctor` says how to cure that"
    return facts


def _memory(model: Model, task: str, env: Environment, facts: dict[str, Any]) -> dict[str, int]:
    """What it takes, for one sequence as long as the model was made for. Adds `refused` where that does not fit at all."""
    seqs, tokens = resolve_step(0, 0, gpu=False)
    config = EngineConfig(path="", backend="native", max_seqs=seqs, max_batch_tokens=tokens)
    threads = env.threads if isinstance(env.threads, int) else available_cores()
    backend = open_backend("native", threads=threads, isa=env.isa)
    if not isinstance(backend, Estimator):
        return {}
    config = choose_kv(config, model, backend)
    context, kv = model.config.context, pool_of(config, model)
    available = look_at_memory()
    if isinstance(model, Encoder):  # it keeps nothing, and sees a text at once
        rows = max(tokens, context)
        needs = backend.estimate(model.hidden, kv=kv, max_tokens=rows, max_rows=rows, inputs=model.inputs)
        return _summed(needs, 0, 0, available.available)
    forward = model.forward if task == "generate" else model.hidden
    needs = backend.estimate(forward, kv=kv, max_tokens=tokens, max_rows=seqs + EXTRA_ROWS)
    try:
        resolve_sizes(replace(config, max_seqs=1), env, model, Budget(available, needs))
    except QuireError as error:
        facts["refused"] = _words(error)
    kept = [k for k in kv.groups if not k.forgets]
    whole = -(-context // PAGE_SIZE) * sum(k.page_bytes for k in kept) + alone(kv, context, tokens)
    return _summed(needs, sum(k.token_bytes for k in kept), whole, available.available)


def _summed(needs: Needs, per_token: int, whole: int, available: int) -> dict[str, int]:
    return {
        "weights": needs.weights,
        "working": needs.working,
        "overhead": OVERHEAD,
        "kv_per_token": per_token,
        "kv_of_one_context": whole,
        "total": needs.weights + needs.working + OVERHEAD + whole,
        "available": available,
    }


def _words(error: QuireError) -> str:
    return error.message + (f": {error.cure}" if error.cure else "")


def told(memory: dict[str, int] | None) -> str | None:
    """The memory, for people."""
    if not memory:
        return None
    each = memory["kv_per_token"]
    kv = f"KV {size(memory['kv_of_one_context'])} for the whole context" if memory["kv_of_one_context"] else ""
    kv += f" ({each / 1024:.1f} KiB a token)" if each else ""
    parts = [f"weights {size(memory['weights'])}", kv, f"to work with {size(memory['working'] + memory['overhead'])}"]
    return (
        f"{size(memory['total'])} on a CPU: {', '.join(p for p in parts if p)}; "
        f"{size(memory['available'])} are available here; "
        f"on a GPU the weights take {size(memory['weights_in_bfloat16'])} (bfloat16)"
    )
