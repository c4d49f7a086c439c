"""A model as Hugging Face lays it out: a folder with config.json, safetensors files, tokenizer files.

`Folder.open` reads the configuration alone; the headers of the weights are read and checked when somebody first asks
for tensors, so an architecture that is not supported is refused before. With an index, its `weight_map` is the list of
tensors, and every one must be in the shard it names; without one, model.safetensors (or the only .safetensors file) is all
there is. Pickled weights are never opened. Nothing in the folder is executed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType

from quire.layouts import Bytes, Layout
from quire.observe.errors import BadModelFile, NotFound, Unsupported
from quire.weights.packed import OWN, Packed, PackedInfo, scheme_of, settings_of
from quire.weights.safetensors import Safetensors, TensorInfo
from quire.weights.values import Values, read_text

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GPTQ = "quantize_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MAX_SHARDS = 4096
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")  # a file name that stays in its folder
MODEL_TYPES = {
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
    "camembert": "CamembertModel",
    "distilbert": "DistilBertModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
}


class Folder:
    """One model folder. Read-only; layouts stay valid after `close()`."""

    def __init__(self, path: str, config: Values):
        self.path = path
        self.config = config
        self._shards: dict[str, Safetensors] = {}  # by file name

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Folder:
        """Read config.json. Opens no weights."""
        path = os.fspath(path)
        try:
            return cls(path, Values.read(Path(path) / CONFIG))
        except FileNotFoundError:
            why = f"{path} has no {CONFIG}" if os.path.isdir(path) else f"there is no folder {path}"
            raise NotFound(
                why, cure="name a folder with a model as Hugging Face lays it out, or a .gguf file"
            ) from None

    @property
    def architecture(self) -> str:
        """The class of the model, for instance "LlamaForCausalLM"."""
        return architecture_of(self.config)

    @property
    def name(self) -> str:
        """The name of the folder; of a snapshot in the hub's cache, that of its repository."""
        path = Path(os.path.abspath(self.path))
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return path.parent.parent.name.removeprefix("models--").replace("--", "/")
        return path.name

    @property
    def tensors(self) -> Mapping[str, TensorInfo | PackedInfo]:
        """Every tensor, by name; a matrix of several is one. The first look opens and checks all shards."""
        return self._tensors

    def notes(self, native: bool) -> list[str]:
        """Sentences for people about quantized weights, on the native backend or on another."""
        return self._packed.notes(native) if self._packed else []

    @cached_property
    def _tensors(self) -> Mapping[str, TensorInfo | PackedInfo]:
        return MappingProxyType(self._packed.tensors) if self._packed else self._stored

    @cached_property
    def _packed(self) -> Packed | None:
        config, found = self.config, settings_of(self.config)
        if found is None and (beside := self.values(GPTQ)) is not None:  # where older files have it
            config = Values(beside.where, {"quantization_config": {"quant_method": "gptq", **beside.raw}})
            found = settings_of(config)
        if found is None or found[0] in OWN:
            return None
        scheme, stored = scheme_of(config), self._stored
        return Packed(scheme, stored, lambda name: self._shards[self._where[name]], self.path) if scheme else None

    @cached_property
    def _stored(self) -> Mapping[str, TensorInfo]:
        index = self.values(INDEX)
        if index is not None:
            return MappingProxyType(self._indexed(index))
        name = self._only_file()
        return self._shard(name).tensors

    def tensor(self, name: str) -> Layout:
        """A tensor's bytes as a layout: a view of the mapped file, or what becomes one of a packed matrix where it is read."""
        if name not in self.tensors:
            raise BadModelFile(f"{self.path}: there is no tensor {name!r} among its {len(self.tensors)}")
        if self._packed and name in self._packed.matrices:
            return self._packed.read(name)
        return self._shards[self._where[name]].tensor(name)

    def octets(self, name: str) -> Bytes:
        """A tensor of unsigned bytes, in its shape: a view of the mapped file, no copy."""
        return self._shards[self._where[name]].octets(name)

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        names = self._names(name)
        return self._shards[self._where[names[0]]].path if names else self.path

    def release(self, name: str) -> None:
        """Give back the file pages of a tensor; a later read brings them back from the file."""
        for own in self._names(name):
            self._shards[self._where[own]].release(own)

    def values(self, name: str) -> Values | None:
        """A JSON object beside the weights, or None where there is no such file."""
        try:
            return Values.read(Path(self.path) / name)
        except FileNotFoundError:
            return None

    def text(self, name: str, most: int) -> str | None:
        """A text file beside the weights, or None where there is none."""
        try:
            return read_text(Path(self.path) / name, most)
        except FileNotFoundError:
            return None

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """The files that decide what the model computes, and which they were when they were opened (of configurations: now)."""
        beside = [Path(self.path) / name for name in (CONFIG, GPTQ, INDEX)]
        found = [(path, path.stat()) for path in beside if path.is_file()]
        return found + [(Path(self.path) / name, self._shards[name].found) for name in sorted(self._shards)]

    def close(self) -> None:
        """Give up the maps. Layouts that are in use keep theirs."""
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def __repr__(self) -> str:
        return f"<Folder {self.path}>"

    def _names(self, name: str) -> list[str]:
        """The stored tensors that one is made of; none where there is no such tensor."""
        info = self.tensors.get(name)
        if isinstance(info, PackedInfo):
            return [s.info.name for s in info.stored.values()]
        return [name] if info is not None else []

    @cached_property
    def _where(self) -> dict[str, str]:
        """Tensor -> name of its shard."""
        return {tensor: file for file, shard in self._shards.items() for tensor in shard.tensors}

    def _shard(self, name: str) -> Safetensors:
        if name not in self._shards:
            self._shards[name] = Safetensors.open(Path(self.path) / name)
        return self._shards[name]

    def _indexed(self, index: Values) -> dict[str, TensorInfo]:
        mapped = index.inside("weight_map")
        if mapped is None:
            raise BadModelFile(f"{index.where}: weight_map is missing")
        files: Counter[str] = Counter()
        for tensor, file in mapped.raw.items():
            if not isinstance(file, str) or not _PLAIN.fullmatch(file):
                raise BadModelFile(f"{mapped.where}: tensor {tensor!r} is in {repr(file)[:80]}, which is no file here")
            files[file] += 1
        if not 0 < len(files) <= MAX_SHARDS:
            raise BadModelFile(f"{mapped.where} names {len(files)} files: 1 to {MAX_SHARDS} are allowed")
        for n, file in enumerate(sorted(files)):
            try:
                self._shard(file)
            except NotFound:
                raise BadModelFile(
                    f"{self.path}: the shard {file} is missing: {INDEX} puts {files[file]} tensors in it "
                    f"({n} of {len(files)} shards were found before it)",
                    cure="fetch it; an interrupted download leaves such folders",
                ) from None
        found: dict[str, TensorInfo] = {}
        for tensor, file in mapped.raw.items():
            info = self._shards[file].tensors.get(tensor)
            if info is None:
                raise BadModelFile(f"{self._shards[file].path}: {INDEX} says it holds tensor {tensor!r}: it does not")
            found[tensor] = info
        for file in sorted(files):
            stray = next((t for t in self._shards[file].tensors if mapped.get(t) != file), None)
            if stray is not None:
                other = mapped.get(stray)
                why = f"puts that in {other}" if other else "does not name that"
                raise BadModelFile(f"{self._shards[file].path} holds tensor {stray!r}, but {INDEX} {why}")
        return found

    def _only_file(self) -> str:
        folder = Path(self.path)
        if (folder / WEIGHTS).exists():
            return WEIGHTS
        names = sorted(p.name for p in folder.iterdir())
        found = [n for n in names if n.endswith(".safetensors")]
        if len(found) == 1:
            return found[0]
        if found:
            raise BadModelFile(
                f"{self.path} has {len(found)} safetensors files and no {INDEX} that says what is in which",
                cure="fetch the index too",
            )
        pickled = [n for n in names if n.endswith(PICKLES)]
        if pickled:
            raise refuse_pickle(folder / pickled[0])
        raise NotFound(
            f"{self.path} has a {CONFIG} but no weights: no .safetensors file is there",
            cure="fetch them too, all of them",
        )


def architecture_of(config: Values) -> str:
    """The class that a config.json names; where it names none, the one that transformers makes of its model_type."""
    listed = config.get("architectures")
    if listed is None:
        kind = config.text("model_type")
        return MODEL_TYPES.get(kind, kind)
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
        raise BadModelFile(f"{config.where}: architectures is {repr(listed)[:60]}: a list of names is needed")
    return listed[0]


def refuse_pickle(path: Path) -> Unsupported:
    """Why a pickled checkpoint is not read, and what to do."""
    return Unsupported(
        f"{path} is a pickled checkpoint: reading one runs whatever code it holds, so it is not read here",
        cure="use a safetensors version of the model; transformers writes one: "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)",
    )


def describe(folder: Folder) -> dict[str, object]:
    """The facts that `quire show` tells, by the same names as for a GGUF. What the folder does not say is None."""
    config = folder.config

    def number(key: str) -> int | None:
        value = config.get(key)
        return value if type(value) is int else None

    by_type: Counter[str] = Counter()
    for info in folder.tensors.values():
        by_type[info.type] += info.nbytes
    nbytes = sum(by_type.values())
    parameters = sum(info.elements for info in folder.tensors.values())
    words = folder.values("tokenizer_config.json")
    kind = words.get("tokenizer_class") if words else None
    has = os.path.exists(os.path.join(folder.path, "tokenizer.json"))
    template = any(folder.text(n, 1 << 24) for n in ("chat_template.jinja", "chat_template.json"))
    return {
        "name": folder.name,
        "architecture": folder.architecture,
        "parameters": parameters,
        "size": nbytes,
        "weights": nbytes,
        "bits_per_weight": round(8 * nbytes / parameters, 2) if parameters else None,
        "types": dict(by_type.most_common()),
        "tensors": len(folder.tensors),
        "context_length": number("max_position_embeddings"),
        "layers": number("num_hidden_layers"),
        "embedding_length": number("hidden_size"),
        "feed_forward_length": number("intermediate_size"),
        "heads": number("num_attention_heads"),
        "kv_heads": number("num_key_value_heads") or number("num_attention_heads"),
        "experts": number("num_local_experts"),
        "vocabulary": number("vocab_size"),
        "tokenizer": (kind if isinstance(kind, str) else "tokenizer.json") if has else None,
        "pre_tokenizer": None,
        "chat_template": template or bool(words and "chat_template" in words),
        "license": None,
        "shards": len({folder.file_of(name) for name in folder.tensors}),
    }
