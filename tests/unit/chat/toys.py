"""Vocabularies small enough to read, as the metadata of a GGUF file would give them."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.chat.tokenizers.bpe import ALPHABET

SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]


def byte_level(
    merges: tuple[str, ...] = (), *, pre: str = "gpt-2", user_defined: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Three control tokens, then all bytes, then what the merges make, then user-defined tokens."""
    tokens = [*SPECIALS, *sorted(ALPHABET, key=lambda c: ALPHABET[c])]
    tokens += dict.fromkeys(m.replace(" ", "") for m in merges)
    types = [3, 3, 3] + [1] * (len(tokens) - 3) + [4] * len(user_defined)
    tokens += user_defined
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece(pieces: dict[str, float], **keys: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, all byte tokens, then the pieces with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + list(pieces.values()), np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }
