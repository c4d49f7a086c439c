"""Decoders that rerank: asked whether a document meets a query, the score is how likely they say yes rather than no.

Owns Qwen3-Reranker's published recipe: the prompt around the two texts, and which two rows of the head are compared, on the
host, at the last token. A checkpoint says that it is one by a LogitScore module of sentence-transformers, by a classifier of
one label in place of the head, by a GGUF's pooling type "rank", or by its name; others of the family rerank where they are
asked to. Whatever contradicts the recipe is refused: another prompt would give other numbers.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.layouts import Floats, Layout
from quire.models.pooling import MODULES, activation_of, config_of_module, modules_of
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf.file import GGUF

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened
    from quire.weights.folder import Folder

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
# Before everything; before the query; before the document; after everything. The first and the last are never cut.
PROMPT = (BEFORE, f"<Instruct>: {INSTRUCTION}\n<Query>: ", "\n<Document>: ", AFTER)

FAMILY = ("qwen3", "Qwen3ForCausalLM", "Qwen3ForSequenceClassification")
CLASSIFIER = "Qwen3ForSequenceClassification"
RANK = 4  # a GGUF's pooling_type
_NAMED = re.compile(r"qwen3[-_ ]?reranker", re.IGNORECASE)
_MODULE = "LogitScore"


@dataclass(frozen=True, slots=True)
class YesNoScore:
    """The score of the last token's row."""

    yes: Floats  # [d]
    no: Floats  # [d]
    sigmoid: bool
    line: str

    def __call__(self, row: Floats) -> Floats:
        """[d] -> [1]. In float64, so that the order of a sum does not show."""
        x = row.astype(np.float64)
        odds = self.yes.astype(np.float64) @ x - self.no.astype(np.float64) @ x
        return np.array([1.0 / (1.0 + np.exp(-odds)) if self.sigmoid else odds], np.float32)


def fits(checkpoint: Opened) -> bool:
    """Whether the recipe is for models of this architecture."""
    return checkpoint.architecture in FAMILY


def declared(checkpoint: Opened) -> str | None:
    """The words of the checkpoint by which it declares itself a reranker, or None."""
    if not fits(checkpoint):
        return None
    if isinstance(checkpoint, GGUF):
        if checkpoint.metadata.get_int(f"{checkpoint.architecture}.pooling_type", 0) == RANK:
            return "its pooling_type is rank"
        name = checkpoint.metadata.get_str("general.name", "")
    else:
        if checkpoint.architecture == CLASSIFIER:
            return "a classifier of one label"
        if _logit_score(checkpoint) is not None:
            return f"{_MODULE} in {MODULES}"
        name = checkpoint.name
    return f"by its name, {name[:60]}" if _NAMED.search(name) else None


def yes_no_score_of(checkpoint: Opened | None, model: Any) -> YesNoScore:
    """The score of the model in that checkpoint. model: what was loaded from it."""
    if checkpoint is None or not fits(checkpoint):
        raise Unsupported(
            f"a {model.config.architecture} has no score",
            cure="rerankers are cross-encoders and Qwen3-Reranker; embeddings are compared with --task embed",
        )
    why = declared(checkpoint) or "asked for"
    head: Layout = model.head if model.scores is None else model.scores
    if isinstance(checkpoint, GGUF):
        _check_gguf(checkpoint)
        yes, no = (0, 1) if model.scores is not None else _words(checkpoint)
    elif model.scores is not None:
        line = f"score: the classifier's at the last token, after Qwen3-Reranker's prompt ({why})"
        row = head.dequantize(slice(0, 1))[0]
        return YesNoScore(row, np.zeros_like(row), activation_of(checkpoint.config), line)
    else:
        if head is model.embedding and not checkpoint.config.flag("tie_word_embeddings", False):
            raise Unsupported(f"{checkpoint.path}: it was saved without its head, which says yes and no")
        yes, no = _words(checkpoint)
        _check_module(checkpoint, yes, no)
    line = f"score: yes against no at the last token, after Qwen3-Reranker's prompt ({why})"
    return YesNoScore(head.dequantize(slice(yes, yes + 1))[0], head.dequantize(slice(no, no + 1))[0], True, line)


def _words(checkpoint: Opened) -> tuple[int, int]:
    """The ids of "yes" and "no"."""
    if isinstance(checkpoint, GGUF):
        tokens = checkpoint.metadata.get_strings("tokenizer.ggml.tokens")
        where, ids = str(checkpoint.path), {text: i for i, text in enumerate(tokens) if text in ("yes", "no")}
    else:
        where = os.path.join(checkpoint.path, "tokenizer.json")
        ids = _vocabulary(checkpoint, where)
    found = [i for i in (ids.get("yes"), ids.get("no")) if type(i) is int]
    if len(found) < 2:
        raise Unsupported(f"{where}: 'yes' and 'no' are not both tokens there: this is no Qwen3-Reranker")
    rows = checkpoint.tensors[_embedding(checkpoint)].shape[0]
    yes, no = found
    if not (0 <= yes < rows and 0 <= no < rows):
        raise BadModelFile(f"{where}: the ids of 'yes' and 'no' are {yes} and {no}: the model has {rows} rows")
    return yes, no


def _embedding(checkpoint: Opened) -> str:
    names = ("token_embd.weight", "model.embed_tokens.weight", "embed_tokens.weight")
    return next(name for name in names if name in checkpoint.tensors)


def _vocabulary(folder: Folder, where: str) -> dict[str, Any]:
    kept = folder.values("tokenizer.json")
    inner = None if kept is None else kept.inside("model")
    vocab = None if inner is None else inner.get("vocab")
    if not isinstance(vocab, dict):
        raise Unsupported(f"{where}: a vocabulary with ids is needed, to know which tokens are yes and no")
    return vocab


def _check_gguf(gguf: GGUF) -> None:
    """Raises where the file says how it scores, and it is another way."""
    labels = gguf.metadata.get_strings(f"{gguf.architecture}.classifier.output_labels", None)
    if labels is not None and list(labels) != ["yes", "no"]:
        raise Unsupported(f"{gguf.path}: the labels {[t[:20] for t in labels][:4]} are not supported: yes and no are")
    template = gguf.metadata.get_str("tokenizer.chat_template.rerank", None)
    wanted = "{query}".join(("".join(PROMPT[:2]), PROMPT[2])) + "{document}" + PROMPT[3]
    if template is not None and template != wanted:
        raise Unsupported(
            f"{gguf.path}: its template for reranking is not Qwen3-Reranker's: that is the only one known"
        )


def _logit_score(folder: Folder) -> dict[str, str] | None:
    if folder.text(MODULES, 1 << 20) is None:
        return None
    return next((m for m in modules_of(folder) if m["type"].rsplit(".", 1)[-1] == _MODULE), None)


def _check_module(folder: Folder, yes: int, no: int) -> None:
    module = _logit_score(folder)
    if module is None:
        return
    config = config_of_module(folder, module)
    said = config.get("true_token_id"), config.get("false_token_id")
    if said != (yes, no):
        raise Unsupported(
            f"{config.where}: tokens {json.dumps(said[0])} and {json.dumps(said[1])} are compared: "
            f"only Qwen3-Reranker's yes and no ({yes} and {no}) are known, and its prompt"
        )
