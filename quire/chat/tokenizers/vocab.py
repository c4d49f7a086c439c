"""The vocabulary as a GGUF's metadata gives it, checked before anything is built on it.

Owns the meaning of `tokenizer.ggml.*`: arrays agree in length, ids lie inside the vocabulary, kinds are known, no text
stands for two tokens. It does not know how text is cut or merged. Metadata is hostile: every complaint names its key.
Token texts that are not UTF-8 arrive with escaped bytes (surrogates); `raw` gives their bytes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.observe.errors import BadModelFile, Unsupported

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# tokenizer.ggml.model: byte-level BPE, SentencePiece BPE with scores, WordPiece, SentencePiece unigram
MODELS = ("gpt2", "llama", "bert", "t5")
SCORED = ("llama", "t5")
MAX_TOKENS = 1 << 22
MAX_TOKEN_LENGTH = 4096  # characters; the longest in public vocabularies are a few hundred
_KEY = "tokenizer.ggml."

# Texts that end a turn in public chat models. A token with one of them ends generation even when the file's
# eos_token_id names another, because files name one end token where their models use two or three.
END_TEXTS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>"),
        *("<end_of_turn>", "<turn|>", "<|return|>", "<|call|>", "<|EOT|>", "<EOT>", "[EOT]", "[EOS]", "</s>", "<eos>"),
        *("<｜end▁of▁sentence｜>", "<end_of_utterance>", "[e~["),
    }
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Checked metadata. `types` holds the kinds above; `scores` is there for the models in SCORED alone."""

    model: str
    pre: str  # "" when the file does not name one
    tokens: Sequence[str]
    types: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32] | None
    merges: Sequence[str]
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None
    eos_ids: tuple[int, ...]
    add_bos: bool | None  # None: the file does not say
    add_eos: bool | None
    add_space_prefix: bool | None
    architecture: str
    collapse_spaces: bool = False  # runs of spaces become one, and those around a text go
    charsmap: bytes = b""  # how characters are normalized first, as SentencePiece compiles it
    lowercase: bool | None = None  # WordPiece; None: the file does not say
    infill: tuple[int, int, int] | None = None  # prefix, suffix and middle tokens, where the file names all three

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        """Check and collect; BadModelFile names the key that is wrong, Unsupported the kind that is not served."""
        model = _optional(metadata, "model", str)
        if model is None:
            raise BadModelFile(f"{_KEY}model is missing: the file has no tokenizer")
        if model not in MODELS:
            raise Unsupported(
                f"{_KEY}model is {model!r}: that kind of tokenizer is not supported",
                cure=f"supported: {', '.join(MODELS)}",
            )
        tokens = _strings(metadata, "tokens")
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise BadModelFile(
                f"{_KEY}tokens has {len(tokens)} entries: at least 1 and at most {MAX_TOKENS} are allowed"
            )
        _check_tokens(tokens)
        count = len(tokens)
        types = _types(metadata, count)
        scores = None
        if model in SCORED:
            scores = _numbers(metadata, "scores", count, np.float32)
            if scores is None:
                raise BadModelFile(f"{_KEY}scores is missing: a tokenizer of model {model!r} needs one for each token")
            if not np.isfinite(scores).all():
                raise BadModelFile(f"{_KEY}scores[{int(np.argmin(np.isfinite(scores)))}] is not a finite number")
        merges: Sequence[str] = ()
        if model == "gpt2":
            merges = _strings(metadata, "merges")
            if len(merges) > 4 * MAX_TOKENS:
                raise BadModelFile(f"{_KEY}merges has {len(merges)} entries: at most {4 * MAX_TOKENS} are allowed")
        ids = {name: _id(metadata, f"{name}_token_id", count) for name in ("bos", "eos", "eot", "eom", "unknown")}
        if model == "bert":  # its texts lie between these two; "seperator" is how the files spell it
            for name, keys in (("bos", ["cls"]), ("eos", ["seperator", "separator"])):
                for key in keys:
                    if ids[name] is None:
                        ids[name] = _id(metadata, f"{key}_token_id", count)
        if model == "llama":  # what SentencePiece assumes when a file is silent, if the tokens are what they should be
            for name, default, text in (("bos", 1, "<s>"), ("eos", 2, "</s>"), ("unknown", 0, "<unk>")):
                if ids[name] is None and count > default and tokens[default] == text:
                    ids[name] = default
        return cls(
            model=model,
            pre=_optional(metadata, "pre", str) or "",
            tokens=tokens,
            types=types,
            scores=scores,
            merges=merges,
            bos_id=ids["bos"],
            eos_id=ids["eos"],
            unk_id=ids["unknown"],
            eos_ids=end_ids(tokens, types, [ids["eos"], ids["eot"], ids["eom"]]),
            add_bos=_optional(metadata, "add_bos_token", bool),
            add_eos=_optional(metadata, "add_eos_token", bool),
            add_space_prefix=_optional(metadata, "add_space_prefix", bool),
            architecture=str(metadata.get("general.architecture", "")),
            collapse_spaces=bool(_optional(metadata, "remove_extra_whitespaces", bool)),
            charsmap=_bytes(metadata, "precompiled_charsmap"),
            lowercase=_optional(metadata, "normalizer.lowercase", bool),
            infill=_infill(metadata, count),
        )


def _infill(metadata: Mapping[str, Any], count: int) -> tuple[int, int, int] | None:
    """The infill tokens by the newer keys, then the older."""
    for keys in (("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")):
        before, after, middle = (_id(metadata, f"{key}_token_id", count) for key in keys)
        if before is not None and after is not None and middle is not None:
            return before, after, middle
    return None


def where(mask: npt.NDArray[np.bool_]) -> list[int]:
    """Ids at which the mask holds."""
    return np.flatnonzero(mask).tolist()


def raw(text: str) -> bytes:
    """The bytes of a token's text as the file has them."""
    return text.encode("utf-8", "surrogateescape")


def not_text(tokens: Sequence[str]) -> list[int]:
    """Ids of tokens whose bytes are not UTF-8: no text can contain them as they are written."""
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        return [i for i, text in enumerate(tokens) if any("\ud800" <= c <= "\udfff" for c in text)]
    return []


def end_ids(tokens: Sequence[str], types: npt.NDArray[np.int32], named: list[int | None]) -> tuple[int, ...]:
    """The ids that end generation: those the file names, then the known end-of-turn texts that are not ordinary tokens."""
    ends = [i for i in named if i is not None]
    special = where(types != NORMAL)
    texts = {tokens[i]: i for i in special if tokens[i] in END_TEXTS}
    if "<|return|>" in texts and "<|call|>" in texts:
        texts.pop("<|end|>", None)  # in the harmony format <|end|> ends a message, and the answer goes on
    return tuple(dict.fromkeys(ends + sorted(texts.values())))


def _check_tokens(tokens: Sequence[str]) -> None:
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_LENGTH:
        at = next(i for i, t in enumerate(tokens) if len(t) == longest)
        raise BadModelFile(f"{_KEY}tokens[{at}] has {longest} characters: at most {MAX_TOKEN_LENGTH} are allowed")


def _types(metadata: Mapping[str, Any], count: int) -> npt.NDArray[np.int32]:
    types = _numbers(metadata, "token_type", count, np.int32)
    if types is None:
        return np.full(count, NORMAL, np.int32)
    wrong = (types < 0) | (types > BYTE)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise BadModelFile(f"{_KEY}token_type[{at}] is {types[at]}: known types are 0 to {BYTE}")
    return np.where(types == 0, NORMAL, types).astype(np.int32)  # 0 is "undefined"


def _optional(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    value = metadata.get(_KEY + name)
    if value is None:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, kind):
        raise BadModelFile(f"{_KEY}{name} is a {type(value).__name__}: a {kind.__name__} is needed")
    return value


def _strings(metadata: Mapping[str, Any], name: str) -> Sequence[str]:
    value = metadata.get(_KEY + name)
    if value is None:
        raise BadModelFile(f"{_KEY}{name} is missing")
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise BadModelFile(f"{_KEY}{name} is a {type(value).__name__}: an array of strings is needed")
    value = list(value)
    if set(map(type, value)) - {str}:
        at = next(i for i, v in enumerate(value) if type(v) is not str)
        raise BadModelFile(f"{_KEY}{name}[{at}] is a {type(value[at]).__name__}: a string is needed")
    return value


def _numbers(metadata: Mapping[str, Any], name: str, count: int, dtype: type) -> npt.NDArray[Any] | None:
    value = metadata.get(_KEY + name)
    if value is None:
        return None
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf" or (dtype is np.int32 and array.dtype.kind == "f"):
        raise BadModelFile(f"{_KEY}{name} is not an array of {'integers' if dtype is np.int32 else 'numbers'}")
    if array.size != count:
        raise BadModelFile(f"{_KEY}{name} has {array.size} entries, but {_KEY}tokens has {count}")
    if dtype is np.int32 and array.size and (int(array.max()) > 2**31 - 1 or int(array.min()) < -(2**31)):
        raise BadModelFile(f"{_KEY}{name} has a value that does not fit 32 bits")
    return array.astype(dtype)


def _bytes(metadata: Mapping[str, Any], name: str) -> bytes:
    value = metadata.get(_KEY + name)
    if value is None:
        return b""
    array = np.asarray(value)
    if (
        array.ndim != 1
        or array.dtype.kind not in "iu"
        or (array.size and not -128 <= int(array.min()) <= int(array.max()) <= 255)
    ):
        raise BadModelFile(f"{_KEY}{name} is not an array of bytes")
    return array.astype(np.uint8).tobytes()


def _id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    value = _optional(metadata, name, int)
    if value is None:
        return None
    if isinstance(value, bool) or not 0 <= value < count:
        raise BadModelFile(f"{_KEY}{name} is {value}: the vocabulary has {count} tokens")
    return value
