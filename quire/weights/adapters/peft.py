"""A PEFT folder: adapter_config.json says how the pairs count, adapter_model.safetensors holds them.

    base_model.model.<module>.lora_A.weight   [r, k]
    base_model.model.<module>.lora_B.weight   [n, r]

What the folder asks for beyond plain LoRA (DoRA, whole modules, biases, bases that were changed, …) is refused by its name: an
adapter that is honoured in part answers wrongly and says nothing.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from quire.observe.errors import BadModelFile, NotFound, Unsupported
from quire.weights.adapters.lora import Adapter, pair_up
from quire.weights.folder import PICKLES
from quire.weights.safetensors import Safetensors
from quire.weights.values import Values

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_CONFIG = 1 << 20  # bytes
MAX_PATTERNS = 4096
_SLOW = re.compile(r"\)\s*[*+?{]")  # a group that repeats: its matching may take for ever
_HALF = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")
# Settings that change what an adapter computes and that are not honoured, with what each of them is.
REFUSED = {
    "use_dora": "DoRA: magnitudes beside the pairs",
    "lora_bias": "biases of the pairs",
    "fan_in_fan_out": "matrices that lie transposed",
    "use_qalora": "QALoRA: pooled inputs",
    "modules_to_save": "whole modules beside the pairs",
    "target_parameters": "pairs on parameters that are no modules",
    "trainable_token_indices": "new rows of the embedding",
    "layer_replication": "layers that are there several times",
    "alora_invocation_tokens": "aLoRA: rows that switch it on",
}
COPIES = (".base_layer.weight", ".embed_tokens.weight", ".lm_head.weight")
# Ways to begin training that change the base as well: the pairs alone are not what was trained.
CHANGED_BASES = ("pissa", "olora", "corda", "loftq")


def read_peft(path: str) -> Adapter:
    """The adapter in a folder."""
    folder = Path(path)
    try:
        config = Values.read(folder / CONFIG, MAX_CONFIG)
    except FileNotFoundError:
        raise NotFound(
            f"{path} is no PEFT adapter: there is no {CONFIG} in it", cure="name a PEFT folder or a GGUF file"
        ) from None
    _refuse(config)
    file = folder / WEIGHTS
    if not file.is_file():
        pickled = [p.name for p in sorted(folder.glob("adapter_model.*")) if p.suffix in PICKLES]
        if pickled:
            raise Unsupported(
                f"{folder / pickled[0]} is a pickle, which can run code when it is opened: it is not",
                cure=f"save the adapter again as {WEIGHTS} (save_pretrained does by default)",
            )
        raise NotFound(f"there is no {WEIGHTS} in {path}")
    opened = Safetensors.open(file)
    halves: dict[str, dict[str, str]] = {}
    for name in opened.tensors:
        match = _HALF.fullmatch(name)
        if match is None:
            raise Unsupported(
                f"{file}: tensor {name!r} is no half of a pair ({PREFIX}MODULE.lora_A.weight or lora_B.weight)",
                cure="a copy of the base's weights: save it with save_embedding_layers=False"
                if name.endswith(COPIES)
                else "only plain LoRA on linear modules is supported",
            )
        module = match["module"].removeprefix(PREFIX)
        if match["half"].lower() in (own := halves.setdefault(module, {})):
            raise BadModelFile(f"{file}: {module} has lora_{match['half']} twice: {name!r} is the second")
        own[match["half"].lower()] = name
    scales = _Scales(config)
    made = {
        module: scales.of(module, opened.tensors[own["a"]].shape[0], own["a"], str(file))
        for module, own in halves.items()
        if "a" in own and opened.tensors[own["a"]].shape  # what lacks a half is told by pair_up
    }
    return pair_up(str(file), "peft", "", opened, halves, made)


def _refuse(config: Values) -> None:
    kind = config.text("peft_type", "LORA")
    if kind.upper() != "LORA":
        raise Unsupported(f"{config.where}: peft_type is {kind[:40]!r}: only LORA is supported")
    for key, what in REFUSED.items():
        if config.get(key):
            raise Unsupported(f"{config.where}: {key} is set ({what}), which is not supported")
    bias = config.text("bias", "none")
    if bias != "none":
        raise Unsupported(f"{config.where}: bias is {bias[:40]!r}: only adapters without biases are supported")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(CHANGED_BASES):
        raise Unsupported(
            f"{config.where}: init_lora_weights is {begun[:40]!r}: it was trained on a changed base model",
            cure="convert it to plain LoRA with PEFT (save_pretrained with path_initial_model_for_weight_conversion)",
        )


class _Scales:
    """alpha / r of each module, with the patterns that give some of them their own."""

    def __init__(self, config: Values):
        self._where = config.where
        self._rank = config.count("r", most=1 << 16)
        self._alpha = config.number("lora_alpha")
        self._root = config.flag("use_rslora", False)
        self._ranks = self._patterns(config, "rank_pattern")
        self._alphas = self._patterns(config, "alpha_pattern")

    def of(self, module: str, rank: int, name: str, file: str) -> float:
        asked = self._own(self._ranks, module, self._rank)
        if rank != asked:
            raise BadModelFile(f"{file}: {name!r} has rank {rank}, but {self._where} says {asked:g}")
        alpha = self._own(self._alphas, module, self._alpha)
        return alpha / math.sqrt(rank) if self._root else alpha / rank

    def _own(self, patterns: dict[str, float], module: str, default: float) -> float:
        """The first pattern that is the end of the module's name, as PEFT matches them."""
        for key, value in patterns.items():
            if module == key or module.endswith(f".{key}") or self._matches(key, module):
                return value
        return default

    def _matches(self, key: str, module: str) -> bool:
        """A pattern may be a regular expression: one that cannot take long."""
        if _SLOW.search(key) or sum(key.count(c) for c in "*+{") > 2:
            raise BadModelFile(f"{self._where}: the pattern {key[:80]!r} is too complicated: use names of modules")
        try:
            begins = key.startswith("^")
            return bool(re.match(key, module) if begins else re.fullmatch(rf"(?:.*\.)?(?:{key})", module))
        except re.error as e:
            raise BadModelFile(f"{self._where}: the pattern {key[:80]!r} is no regular expression: {e}") from None

    def _patterns(self, config: Values, key: str) -> dict[str, float]:
        values = config.inside(key)
        if values is None:
            return {}
        if len(values.raw) > MAX_PATTERNS or any(len(k) > 256 for k in values.raw):
            raise BadModelFile(
                f"{config.where}: {key} has {len(values.raw)} patterns: at most {MAX_PATTERNS} short ones"
            )
        found: dict[str, Any] = {k: values.number(k) for k in values.raw}
        return found
