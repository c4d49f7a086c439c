"""What a model is loaded for: to generate, to embed or to score, by what was asked and what the checkpoint says of itself.

Apart from pooled.py because every load asks, and most go on to generate.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quire.models import Encoder, Model
from quire.observe.errors import Unsupported
from quire.weights.gguf.file import GGUF

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened

TASKS = ("auto", "generate", "embed", "score")


def task_of(asked: str, model: Model, checkpoint: Opened | None) -> str:
    """generate, embed or score: what was asked, if the model can, else what it is made for."""
    encoder = isinstance(model, Encoder)
    reranker = not encoder and checkpoint is not None and reranks(checkpoint)
    own = "score" if reranker or (encoder and model.head is not None) else "embed"
    bare = not encoder and checkpoint is not None and headless(checkpoint)
    if asked == "auto":
        named = checkpoint is not None and (declared(checkpoint) or checkpoint.architecture.endswith("Model"))
        return own if encoder or bare or reranker or named else "generate"
    if asked == "score" and not encoder and checkpoint is not None and may_rerank(checkpoint):
        return asked
    if asked == "generate" and bare:
        raise Unsupported("the file has no output head: its model cannot generate text", cure="leave --task out")
    if asked == "generate" and encoder:
        raise Unsupported(
            f"a {model.config.architecture} cannot generate text: it is for {own}",
            cure="`quire embed` uses it, and so does `quire serve` without --task",
        )
    if asked != "generate" and asked != own:
        raise Unsupported(
            f"a {model.config.architecture} {'scores pairs of texts' if own == 'score' else 'has no score'}: "
            f"it cannot {asked}",
            cure="leave --task out",
        )
    return asked


def declared(checkpoint: Opened) -> bool:
    """Whether the checkpoint is made for embeddings, by its own word."""
    if isinstance(checkpoint, GGUF):
        return checkpoint.metadata.get_int(f"{checkpoint.architecture}.pooling_type", 0) != 0
    from quire.models.pooling import MODULES

    return os.path.exists(os.path.join(checkpoint.path, MODULES))


def reranks(checkpoint: Opened) -> bool:
    """Whether a decoder is a reranker, by its own word or name."""
    if not may_rerank(checkpoint):
        return False
    from quire.models import reranker

    return reranker.declared(checkpoint) is not None


def may_rerank(checkpoint: Opened) -> bool:
    """Whether a decoder scores pairs where it is asked to."""
    return checkpoint.architecture in ("qwen3", "Qwen3ForCausalLM", "Qwen3ForSequenceClassification")


def headless(checkpoint: Opened) -> bool:
    """Whether a decoder was saved without the matrix that makes logits."""
    if checkpoint.architecture.endswith("ForSequenceClassification"):
        return True
    if isinstance(checkpoint, GGUF) or "embed_tokens.weight" not in checkpoint.tensors:
        return False
    return "lm_head.weight" not in checkpoint.tensors and not checkpoint.config.flag("tie_word_embeddings", False)
