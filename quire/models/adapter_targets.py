"""Matching a LoRA adapter with a model: which weights its modules name, and which rows of its matrices each weight gets.

A target is a matrix that the model's forward multiplies by (`linear`) and that is rows of one named tensor. Adapters name modules
as Hugging Face does or as GGUF does, and so do models: names are brought to one form, through the families' own tables of roles,
so either kind of adapter fits either kind of model. A tensor that a model uses in parts (q, k and v in one) has a target for each part;
an adapter on it is cut likewise. Where a GGUF keeps the rows of queries and keys in another order than Hugging Face does,
the rows of b are put into the model's order.

Everything is checked: a module that is not there, shapes, ranks. Nothing here computes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quire.backends.adapters import Pair, Target
from quire.backends.adapting import adaptable
from quire.backends.ops import KV
from quire.backends.recorder import record
from quire.layouts import Dense
from quire.models import Model, mixture
from quire.observe.errors import BadModelFile, BadRequest, Unsupported
from quire.weights.adapters.lora import Adapter, Lora
from quire.weights.tensors import Origin, Tensors

# Architectures whose GGUF has the rows of queries and keys in neighbouring pairs, and whose folder has them in halves.
PERMUTED = frozenset({"llama", "smollm3", "granite", "granitemoe"})
HEAD = "lm_head"
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(.+)")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_EMBEDDINGS = ("token_embd", "embed_tokens")


class AdapterTargets:
    """The matrices of one model that adapters can add to: `by_weight` is what its forward is wrapped with."""

    def __init__(self, model: Model, architecture: str, gguf: bool, kv: KV, *, slots: int, rank: int):
        """`architecture` as the checkpoint names it, `gguf` whether that is a GGUF; kv: a pool that it could run with."""
        self._order = architecture if gguf else ""
        self._rank = rank
        self._model = model
        self._roles = _roles(model)
        self._parts: dict[str, list[tuple[Origin, Target]]] = {}
        self.by_weight: dict[int, Target] = {}
        tensors = getattr(model, "tensors", None)
        weights = dict(self._candidates(tensors, slots)) if isinstance(tensors, Tensors) else {}
        every = {at: target for at, (_, target) in weights.items()}
        recorded = record(adaptable(model.forward, every), kv, {})
        used = {target for i in recorded.instructions for target in i.targets}
        for at, (origin, target) in weights.items():
            if target in used:
                self.by_weight[at] = target
                self._parts.setdefault(target.name, []).append((origin, target))

    def __len__(self) -> int:
        return len(self.by_weight)

    def fit(self, adapter: Adapter) -> dict[Target, Pair]:
        """The adapter's pair for each target that it has one for. Raises BadModelFile, with the file, the tensor and the numbers."""
        if adapter.rank > self._rank:
            raise BadRequest(
                f"{adapter.path}: its rank is {adapter.rank}, and at most {self._rank} is served",
                cure=f"start with --max-lora-rank {adapter.rank}",
                param="lora",
            )
        made: dict[Target, Pair] = {}
        for lora in adapter.modules:
            parts = self._find(adapter, lora)
            rows, columns = parts[0][0].rows, parts[0][1].k
            (r, k), n = lora.a.shape, lora.b.shape[0]
            if k != columns:
                raise BadModelFile(
                    f"{adapter.path}: {lora.names[0]!r} has shape {r}x{k}, but {lora.module} of this model has "
                    f"{columns} columns: {r}x{columns} is needed"
                )
            if n != rows:
                raise BadModelFile(
                    f"{adapter.path}: {lora.names[1]!r} has shape {n}x{r}, but {lora.module} of this model has "
                    f"{rows} rows: {rows}x{r} is needed"
                )
            b = self._ordered(adapter, lora)
            for origin, target in parts:
                if target in made:
                    raise BadModelFile(f"{adapter.path}: two modules mean {target.name}: {lora.module} is the second")
                own = b if n == target.n else Dense(b.data[origin.first : origin.first + target.n], b.dtype)
                made[target] = Pair(lora.a, own, lora.scale)
        return made

    def _find(self, adapter: Adapter, lora: Lora) -> list[tuple[Origin, Target]]:
        for name in _names(lora.module, self._roles):
            if name in self._parts:
                return self._parts[name]
        known = sorted({_plain(name) for name in self._parts})
        raise BadModelFile(
            f"{adapter.path}: {lora.module!r} (tensor {lora.names[0]!r}) is no module of this model that an adapter can add to",
            cure=f"there are: {', '.join(known)}",
        )

    def _ordered(self, adapter: Adapter, lora: Lora) -> Dense:
        """b with its rows in the model's order."""
        theirs = adapter.architecture if adapter.kind == "gguf" else ""
        if (theirs in PERMUTED) == (self._order in PERMUTED):
            return lora.b
        name = next(iter(_names(lora.module, self._roles)))
        config: Any = self._model.config
        heads = config.heads if name.endswith(".q_proj") else config.kv_heads if name.endswith(".k_proj") else 0
        if not heads:
            return lora.b
        return Dense(
            np.ascontiguousarray(lora.b.data[reorder(lora.b.shape[0], heads, self._order in PERMUTED)]), lora.b.dtype
        )

    def _candidates(self, tensors: Tensors, slots: int) -> Iterator[tuple[int, tuple[Origin, Target]]]:
        """Matrices whose name is a projection's. Which of them are multiplied by is found by recording."""
        for layout, origin in tensors.origins():
            own = origin.name.removesuffix(".weight")
            names = _names(own, self._roles, split=origin.rows != layout.shape[0])
            name = HEAD if _plain(own) in _EMBEDDINGS else next(names, "")  # an embedding is multiplied by as the head
            if "_proj" in _plain(name) or name == HEAD:
                n, k = layout.shape
                yield id(layout), (origin, Target(name, n, k, slots=slots, rank=self._rank))


def reorder(rows: int, heads: int, to_pairs: bool) -> np.ndarray:
    """For each row of the new order its index in the old one: halves of a head become neighbouring pairs, or the reverse."""
    at = np.arange(rows).reshape(heads, 2, -1)
    if not to_pairs:
        at = np.arange(rows).reshape(heads, -1, 2)
    return at.swapaxes(1, 2).reshape(-1)


def _roles(model: Model) -> dict[str, list[str]]:
    """What a GGUF calls a tensor -> what Hugging Face may call it, by the model's family."""
    family = sys.modules[type(model).__module__]
    gguf: Mapping[str, str] = getattr(family, "GGUF_NAMES", mixture.GGUF_NAMES)
    hub: Mapping[str, str] = getattr(family, "NAMES", getattr(family, "HF_NAMES", mixture.HF_NAMES))
    found: dict[str, list[str]] = {}
    for role, name in gguf.items():
        if role in hub:
            found.setdefault(name, []).append(hub[role].removeprefix("model."))
    return found


def _names(name: str, roles: Mapping[str, list[str]], split: bool = False) -> Iterator[str]:
    """What a module or tensor may be called here: layers.N.REST, or lm_head. split: it is used in parts."""
    if _plain(name) in ("output", HEAD):
        yield HEAD
    elif block := _BLOCK.fullmatch(name):
        listed = roles.get(f"blk.{{}}.{block[2]}", [])
        for each in reversed(listed) if split else listed:  # gate_up comes after up
            if each.count("{}") == 1:  # two: experts
                yield each.format(block[1])
    elif (layer := _LAYER.fullmatch(name)) and "vision" not in name:
        yield f"layers.{layer[1]}.{layer[2]}"


def _plain(name: str) -> str:
    return name.split(".")[-1]


def check_supported(model: Model, targets: AdapterTargets) -> None:
    """Raises Unsupported where there is nothing that an adapter could add to."""
    if not len(targets):
        raise Unsupported(
            f"adapters cannot be used with this model ({model.config.architecture}): none of its matrices is one that they add to"
        )
