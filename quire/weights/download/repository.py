"""The files of a repository that make a model: its configuration, its tokenizer and its weights, and nothing else.

One rule for the hub and for folders inside packages. Weights are safetensors: the index names the shards, without one it is
model.safetensors or the only such file. A repository that has weights only as pickles is refused, with the reason and the way out; so is
one without config.json. Knows names and sizes, no network and no disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from quire.observe.errors import BadModelFile, Unsupported

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_SHARDS = 4096
# Beside the weights: the words, the chat templates, what a sentence embedder adds.
SIDE_FILES = frozenset(
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "tekken.json",
        "chat_template.jinja",
        "chat_template.json",
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "model.safetensors.index.json",
    ]
)
_SIDE_PATHS = re.compile(r"additional_chat_templates/[\w.-]+\.jinja|\d+_[A-Za-z]+/(config\.json|model\.safetensors)")
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")


def is_plain(path: str) -> bool:
    """Whether a relative path stays below where it is put, on any file system."""
    return len(path) < 1000 and all(_PLAIN.fullmatch(part) for part in path.split("/"))


def side_files(names: Collection[str]) -> list[str]:
    """All but the weights, the configuration first. Raises Unsupported where there can be no model."""
    if CONFIG not in names:
        files = sorted(n for n in names if n.lower().endswith(".gguf"))
        raise Unsupported(
            f"it has no {CONFIG}: it is not a model as Hugging Face lays it out",
            cure=f"name one of its files: {', '.join(files[:8])}" if files else "name another repository",
        )
    taken = [n for n in names if is_plain(n) and (n in SIDE_FILES or _SIDE_PATHS.fullmatch(n))]
    return sorted(taken, key=lambda n: (n != CONFIG, n))


def weight_files(names: Collection[str], index: bytes | None) -> list[str]:
    """The weights. `index` is the text of the index file, where there is one."""
    if index is not None:
        return _shards(names, index)
    if WEIGHTS in names:
        return [WEIGHTS]
    found = sorted(n for n in names if n.endswith(".safetensors") and "/" not in n)
    if len(found) == 1:
        return found
    if found:
        raise Unsupported(f"it has {len(found)} safetensors files and no {INDEX} that says what is in which")
    pickled = sorted(n for n in names if n.endswith(PICKLES) and "/" not in n)
    if pickled:
        raise Unsupported(
            f"it has its weights only as pickles ({', '.join(pickled[:3])}): reading one runs whatever code it holds, so none is "
            "read here",
            cure="use a repository with safetensors; transformers writes them: "
            "AutoModelForCausalLM.from_pretrained(REPO).save_pretrained(FOLDER)",
        )
    raise Unsupported("it has no safetensors file", cure="name another repository")


def choose(names: Collection[str]) -> list[str]:
    """Every file of a model whose weights are one file."""
    if INDEX in names:
        raise Unsupported(f"it has shards ({INDEX}), which are not taken out of packages")
    return sorted({*side_files(names), *weight_files(names, None)})


def _shards(names: Collection[str], index: bytes) -> list[str]:
    try:
        weight_map = json.loads(index)["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
        raise BadModelFile(f"its {INDEX} is no index: {type(e).__name__}: {str(e)[:100]}") from None
    if not 0 < len(shards) <= MAX_SHARDS:
        raise BadModelFile(f"its {INDEX} names {len(shards)} files: 1 to {MAX_SHARDS} are allowed")
    for name in shards:
        if not isinstance(name, str) or not is_plain(name) or not name.endswith(".safetensors"):
            raise BadModelFile(f"its {INDEX} names {str(name)[:80]!r}, which is no safetensors file here")
        if name not in names:
            raise BadModelFile(f"its {INDEX} names the shard {name}, which the repository does not have")
    return shards
