"""From the rows of a text to one embedding or score: what a checkpoint says about that, and what is assumed where it says nothing.

Sentence-transformers' files beside the weights are read (modules.json, the pooling's config.json, sentence_bert_config.json,
config_sentence_transformers.json), and a GGUF's pooling_type. A module that is not understood is refused by name: it would
change the numbers. Every decision is a line in `Pooling.lines`. All of it happens on the host, in fixed order.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.layouts import Floats
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf.file import GGUF

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened
    from quire.weights.folder import Folder
    from quire.weights.values import Values

MODULES = "modules.json"
KINDS = ("mean", "cls", "last")
UNSAID = ("the file does not say", f"there is no {MODULES} that says")  # of a GGUF, and of a folder
_GGUF_KINDS = {1: "mean", 2: "cls", 3: "last"}
_MODES = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
_FOLDER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SIGMOID, _IDENTITY = ("torch.nn.modules.activation.Sigmoid",), ("torch.nn.modules.linear.Identity",)


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden rows of a text become one embedding."""

    kind: str  # of KINDS: the mean of all rows, the first, the last
    normalize: bool  # to length 1
    context: int | None = None  # the longest text it is meant for, where the checkpoint says
    prompts: dict[str, str] = field(default_factory=dict)  # what goes before a text, by name; "" is the default
    cuts: list[int] | None = None  # how many numbers may be kept: None: all; an empty list: any; else these
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """A cross-encoder's last layers: tanh or relu (dense) of the first token's row, then one number."""

    dense: Floats  # [d, d]
    dense_bias: Floats
    weight: Floats  # [1, d]
    bias: Floats  # [1]
    sigmoid: bool
    relu: bool = False

    def __call__(self, row: Floats) -> Floats:
        """[d] -> [1]. In float64, so that the order of a sum does not show."""
        inner = self.dense.astype(np.float64) @ row + self.dense_bias
        inner = np.maximum(inner, 0.0) if self.relu else np.tanh(inner)
        score = self.weight @ inner + self.bias
        return (1.0 / (1.0 + np.exp(-score)) if self.sigmoid else score).astype(np.float32)


def pooling_of(checkpoint: Opened | None, encoder: bool) -> Pooling:
    """The pooling that the checkpoint declares; without one, the mean for an encoder and the last token for a decoder, normalized."""
    kind = "mean" if encoder else "last"
    if isinstance(checkpoint, GGUF):
        number = checkpoint.metadata.get_int(f"{checkpoint.architecture}.pooling_type", 0)
        if number not in (0, *_GGUF_KINDS):
            raise Unsupported(f"{checkpoint.path}: pooling_type {number} is not supported", cure="1 to 3 are")
        why = "as the file says" if number else UNSAID[0]
        kind = _GGUF_KINDS.get(number, kind)
        return Pooling(kind, True, lines=(f"pooling: {kind} ({why}), normalized (a GGUF cannot say)",))
    if checkpoint is None or checkpoint.text(MODULES, 1 << 20) is None:
        cuts = None if checkpoint is None else _cuts(checkpoint.config)
        lines = (f"pooling: {kind}, normalized ({UNSAID[1]})",)
        return Pooling(kind, True, cuts=cuts, lines=lines)
    return _read(checkpoint)


def _read(folder: Folder) -> Pooling:
    kind, normalize = None, False
    where = os.path.join(folder.path, MODULES)
    for module in modules_of(folder):
        name = module["type"].rsplit(".", 1)[-1]
        if name == "Transformer":
            continue
        if name == "Normalize":
            normalize = True
        elif name == "Pooling" and kind is None and not normalize:
            kind = _kind(config_of_module(folder, module))
        else:
            raise Unsupported(f"{where}: a module {name[:60]!r} there is not supported: it would change the numbers")
    if kind is None:
        raise Unsupported(f"{where}: there is no pooling: embeddings of each token are not served")
    limits, more = folder.values("sentence_bert_config.json"), folder.values("config_sentence_transformers.json")
    prompts = {} if more is None else _prompts(more)
    lines = [f"pooling: {kind}{', normalized' if normalize else ', not normalized'} ({MODULES})"]
    if prompts:
        named = ", ".join(repr(name) for name in prompts if name)
        before = f"; before every text: {prompts['']!r}" if prompts.get("") else ""
        lines.append(f"prompts: {named or 'none by name'}{before}")
    context = None if limits is None else limits.count("max_seq_length", None)
    return Pooling(kind, normalize, context, prompts, _cuts(folder.config), tuple(lines))


def config_of_module(folder: Folder, module: dict[str, str]) -> Values:
    """The config.json of a module that has a folder of its own."""
    where = os.path.join(folder.path, MODULES)
    if not _FOLDER.fullmatch(module["path"]):
        raise BadModelFile(f"{where}: {module['path'][:80]!r} is no folder here")
    config = folder.values(os.path.join(module["path"], "config.json"))
    if config is None:
        raise BadModelFile(f"{where} names {module['path']}, which has no config.json")
    return config


def modules_of(folder: Folder) -> list[dict[str, str]]:
    """The modules that sentence-transformers runs, in order: the type and the path of each."""
    where = os.path.join(folder.path, MODULES)
    text = folder.text(MODULES, 1 << 20) or ""
    try:
        listed: Any = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadModelFile(f"{where} is not JSON: {str(e)[:200]}") from None
    if not isinstance(listed, list) or not all(
        isinstance(m, dict) and isinstance(m.get("type"), str) and isinstance(m.get("path"), str) for m in listed
    ):
        raise BadModelFile(f"{where}: a list of modules with type and path is needed")
    return listed


def _kind(config: Values) -> str:
    modes = [
        key.removeprefix("pooling_mode_") for key, on in config.raw.items() if on is True and "pooling_mode_" in key
    ]
    if not modes and "pooling_mode" in config:
        modes = [config.text("pooling_mode")]
    known = {**_MODES, **{name: name for name in KINDS}}
    if len(modes) != 1 or modes[0] not in known:
        raise Unsupported(
            f"{config.where}: pooling by {' and '.join(modes)[:80] or 'nothing'} is not supported",
            cure=f"one of {', '.join(KINDS)} is",
        )
    if "include_prompt" in config and not config.flag("include_prompt", True):
        raise Unsupported(f"{config.where}: include_prompt is false: pooling around a prompt is not supported")
    return known[modes[0]]


def _cuts(config: Values) -> list[int] | None:
    """The shorter embeddings that a model was trained to have, by its config.json."""
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and all(type(n) is int and n > 0 for n in listed):
        return sorted(listed)
    return [] if config.get("is_matryoshka") is True else None


def _prompts(config: Values) -> dict[str, str]:
    listed = config.inside("prompts")
    texts = {} if listed is None else listed.raw
    if not all(isinstance(text, str) and name for name, text in texts.items()):
        raise BadModelFile(f"{config.where}: prompts must be texts by name")
    default = config.text("default_prompt_name", None)
    if default is not None and default not in texts:
        raise BadModelFile(f"{config.where}: default_prompt_name is {default[:60]!r}, which is not among the prompts")
    return {**texts, **({} if default is None else {"": texts[default]})}


def activation_of(config: Values) -> bool:
    """Whether a cross-encoder's score goes through a sigmoid: unless the file says otherwise, as in sentence-transformers."""
    inner = config.inside("sentence_transformers")
    named = config.text("sbert_ce_default_activation_function", None)
    if inner is not None:
        named = inner.text("activation_fn", named)
    if named is None or named in _SIGMOID:
        return True
    if named in _IDENTITY:
        return False
    raise Unsupported(f"{config.where}: the score's activation {named[:80]!r} is not supported")
