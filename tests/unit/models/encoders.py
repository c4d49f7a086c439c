"""Tiny random encoders as transformers saves them, and one as a GGUF, all from known weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
CLASSES = {
    "bert": ("BertConfig", "BertModel"),
    "bert-masked": ("BertConfig", "BertForMaskedLM"),
    "bert-score": ("BertConfig", "BertForSequenceClassification"),
    "roberta": ("RobertaConfig", "RobertaModel"),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaModel"),
    "camembert": ("CamembertConfig", "CamembertModel"),
    "distilbert": ("DistilBertConfig", "DistilBertModel"),
    "distilbert-masked": ("DistilBertConfig", "DistilBertForMaskedLM"),
    "distilbert-score": ("DistilBertConfig", "DistilBertForSequenceClassification"),
    "xlm-roberta-score": ("XLMRobertaConfig", "XLMRobertaForSequenceClassification"),
    "roberta-score": ("RobertaConfig", "RobertaForSequenceClassification"),
}
DISTIL = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers"}
DISTIL |= {"num_attention_heads": "n_heads"}
GGUF_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
GGUF_WHOLE = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers encoder with random weights, biases among them."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config, model = (getattr(transformers, name) for name in CLASSES[kind])
    sizes = dict(SIZES)
    if "distilbert" in kind:
        sizes = {DISTIL.get(name, name): n for name, n in sizes.items() if name != "type_vocab_size"}
    if "roberta" in kind or "camembert" in kind:
        sizes |= {"type_vocab_size": 1, "pad_token_id": 1}
    if kind.endswith("score"):
        sizes["num_labels"] = 1
    made = model(config(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
        # A padding token's row is zero in training; here it must be told from the others.
        for module in made.modules():
            if isinstance(module, torch.nn.Embedding):
                module.weight.copy_(torch.randn_like(module.weight) * 0.5)
    return made


def save(model: Any, path: Path, *, pooling: str | None = None, normalize: bool = True, **beside: Any) -> Path:
    """The model as a folder; `pooling` writes sentence-transformers' files, `beside` other JSON files by stem."""
    model.save_pretrained(path)
    if pooling is not None:
        kinds = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken", "max": "max_tokens"}
        names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
        paths = ["", "1_Pooling", "2_Normalize"]
        modules = [
            {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{name}"}
            for i, name in enumerate(names)
        ]
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        config = {f"pooling_mode_{name}": kind == pooling for kind, name in kinds.items()}
        (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **config}))
    for stem, values in beside.items():
        (path / f"{stem}.json").write_text(json.dumps(values))
    return path


def save_gguf(model: Any, path: Path, pooling: int | None) -> Path:
    """A BertModel as a GGUF, written with the gguf package."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_uint32("bert.pooling_type", pooling)
    for name, tensor in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("pooler"):
            continue
        if stem.startswith("encoder.layer."):
            _, _, layer, rest = stem.split(".", 3)
            written = f"blk.{layer}.{GGUF_LAYER[rest]}"
        else:
            written = GGUF_WHOLE[stem]
        writer.add_tensor(f"{written}.{kind}", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
