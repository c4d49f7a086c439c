"""The part of building an engine that is about adapters: which weights they may add to, and those to load at start.

Where nobody asked for adapters nothing of it is done, and nothing of it is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.config import PAGE_SIZE, EngineConfig, available_memory
from quire.observe.errors import BadRequest, Unsupported
from quire.weights.gguf.file import GGUF

if TYPE_CHECKING:
    from quire.backends.ops import Forward, Program
    from quire.cache.secret import Secret
    from quire.engine.adapters import Adapters, Ordered
    from quire.engine.types import AdapterInfo
    from quire.models import Model
    from quire.models.adapter_targets import AdapterTargets
    from quire.weights.checkpoint import Opened

HEAD = "lm_head"  # as models/adapter_targets.py names it
MOST = 1024  # adapters at once, and their rank


def check_loras(config: EngineConfig) -> None:
    """Raises BadRequest for numbers that could never work."""
    for name in ("max_loras", "max_lora_rank"):
        if not 1 <= getattr(config, name) <= MOST:
            raise BadRequest(f"{name} is {getattr(config, name)}: it must be from 1 to {MOST}", param=name)
    if len(config.loras) > config.max_loras:
        raise BadRequest(
            f"{len(config.loras)} adapters, and room for {config.max_loras}", cure="raise --max-loras", param="loras"
        )


@dataclass(frozen=True, slots=True)
class Adapted:
    """A model whose forward has places for adapters."""

    config: EngineConfig
    targets: AdapterTargets
    forward: Forward

    @property
    def room(self) -> int:
        """Bytes that all its places take on a device when they are full. Only the CUDA backend takes the head's at once."""
        c, whole = self.config, self.config.backend == "cuda"
        sizes = [target.n + target.k for target in self.targets.by_weight.values() if whole or target.name != HEAD]
        return (4 if c.dtype == "float32" else 2) * c.max_loras * -(-c.max_lora_rank // 16) * 16 * sum(sizes)

    def hooks(self, program: Program, runner: Ordered, secret: Secret) -> Adapters:
        """The adapters of the configuration, loaded."""
        from quire.backends.adapters import Adapts
        from quire.engine.adapters import Adapters

        if not isinstance(program, Adapts):
            raise Unsupported(
                f"the {self.config.backend} backend has no adapters", cure="leave --lora and --runtime-lora out"
            )
        memory = None if self.config.backend == "cuda" else available_memory
        made = Adapters(self.targets, program, runner, self.config.max_loras, memory, secret)
        for name, path in self.config.loras:
            made.load(name, path)
        return made

    def lines(self, loaded: list[AdapterInfo]) -> list[str]:
        """Lines for people about the adapters."""
        c = self.config
        later = "more can be loaded" if c.runtime_lora else "none can be loaded later"
        room = f"adapters: {len(loaded)} of at most {c.max_loras}, up to rank {c.max_lora_rank}; {later}"
        return [room, *(f"  {info.line}" for info in loaded)]


def open_adapted(config: EngineConfig, model: Model, checkpoint: Opened | None) -> Adapted | None:
    """The model made ready for adapters, or None where none were asked for. Called before the model is compiled, and after its
    layers have their groups."""
    if not (config.loras or config.runtime_lora):
        return None
    from quire.backends.adapting import adaptable
    from quire.models.adapter_targets import AdapterTargets, check_supported
    from quire.weights.adapters.read import open_adapter

    if checkpoint is None:
        raise Unsupported("random weights have no names that an adapter could mean")
    targets = AdapterTargets(
        model,
        checkpoint.architecture,
        isinstance(checkpoint, GGUF),
        model.kv(1, PAGE_SIZE),
        slots=config.max_loras,
        rank=config.max_lora_rank,
    )
    check_supported(model, targets)
    for _, path in config.loras:  # what does not fit is told before weights are brought anywhere
        targets.fit(open_adapter(path))
    return Adapted(config, targets, adaptable(model.forward, targets.by_weight))
