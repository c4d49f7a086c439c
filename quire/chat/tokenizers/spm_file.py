"""SentencePiece's own file, tokenizer.model: pieces with scores, and how a text is written before it is cut.

Reads the protocol buffer without its library: the few fields that matter, every length checked against the bytes that are
there, unknown fields passed over. The rest is the work of `spm.py` and `unigram.py`, which serve the same vocabularies out
of a GGUF. Added tokens and what is put around a text come from tokenizer_config.json and added_tokens.json.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from quire.chat.tokenizers.hub_names import (
    MAX_BEYOND,
    Added,
    added_tokens,
    checked,
    end_tokens,
    named_tokens,
    vocab_size,
)
from quire.chat.tokenizers.spm_text import MAX_CHARSMAP
from quire.chat.tokenizers.tokenizer import Cut, Pieces, Tokenizer
from quire.chat.tokenizers.vocab import (
    BYTE,
    CONTROL,
    MAX_TOKEN_LENGTH,
    MAX_TOKENS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    end_ids,
)
from quire.observe.errors import BadModelFile, Unsupported

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

MAX_FILE = 64 << 20  # bytes; the largest public ones have 5 million
UNIGRAM, BPE = 1, 2  # model_type
_KINDS = {UNIGRAM: "t5", BPE: "llama", 3: "word", 4: "char"}
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5  # wire types


@dataclass(slots=True)
class SentencePieceModel:
    """The fields of a ModelProto that are used, with the format's own defaults."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: int = UNIGRAM
    suffix_spaces: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    charsmap: bytes = b""
    add_prefix: bool = True
    collapse: bool = True
    escape: bool = True


def read(folder: Folder, name: str) -> Tokenizer:
    """The tokenizer. Raises BadModelFile or Unsupported, naming the file."""
    where = os.path.join(folder.path, name)
    model = parse(where, _file(where))
    kind = _KINDS.get(model.model_type, str(model.model_type))
    if kind not in ("llama", "t5") or model.suffix_spaces or not model.escape:
        odd = "spaces as suffixes or unescaped" if kind in ("llama", "t5") else f"the model type {kind!r}"
        raise Unsupported(f"{where} has {odd}: that is not supported", cure="supported: BPE and unigram")
    config = folder.values("tokenizer_config.json")
    size = vocab_size(folder)
    if len(model.texts) > size:
        raise BadModelFile(f"{where} has {len(model.texts)} pieces, but config.json says a vocab_size of {size}")
    pieces = len(model.texts)
    _add(where, model, size, _added(folder, config))
    names = named_tokens(folder, config)
    types = np.array(model.types, np.int32)
    ids = {text: i for i, text in enumerate(model.texts) if types[i] != NORMAL and text}
    bos = _named(ids, names.get("bos_token"), model.bos_id, pieces)
    eos = _named(ids, names.get("eos_token"), model.eos_id, pieces)
    vocab = Vocabulary(
        model=kind,
        pre="",
        tokens=model.texts,
        types=types,
        scores=np.array(model.scores, np.float32),
        merges=(),
        bos_id=bos,
        eos_id=eos,
        unk_id=_named(ids, None, model.unk_id, pieces),
        eos_ids=end_ids(model.texts, types, [eos, *end_tokens(folder, len(model.texts))]),
        add_bos=None,
        add_eos=None,
        add_space_prefix=model.add_prefix,
        architecture=folder.architecture,
        collapse_spaces=model.collapse,
        charsmap=model.charsmap,
    )
    try:
        made = _pieces(vocab)
    except BadModelFile as e:
        raise BadModelFile(f"{where}: {e.message}") from None
    # SentencePiece's own symbols lie inside a text; after added tokens one begins anew only in the old ("legacy") way.
    glued = frozenset(i for i in range(pieces) if types[i] == USER_DEFINED)
    legacy = config.flag("legacy", False) if config else False
    # The begin token is the rule for models that generate, the end token for T5's kind; a file may say otherwise.
    bos_asked = config.flag("add_bos_token", kind == "llama") if config else kind == "llama"
    eos_asked = config.flag("add_eos_token", kind == "t5") if config else kind == "t5"
    return Tokenizer(
        vocab,
        Cut(vocab, made, apart=legacy, glued=glued),
        add_bos=bos_asked and bos is not None,
        add_eos=eos_asked and eos is not None,
        space_prefix=model.add_prefix,
    )


def parse(where: str, data: bytes) -> SentencePieceModel:
    """The model in the file's bytes, checked: at least one piece, texts as long as texts may be, finite scores, known kinds."""
    model = SentencePieceModel()
    try:
        for number, wire, at, end, value in _fields(data, 0, len(data)):
            if number == 1 and wire == _BYTES:
                if len(model.texts) >= MAX_TOKENS:
                    raise BadModelFile(f"{where} has more than {MAX_TOKENS} pieces")
                _piece(model, data, at, end)
            elif number == 2 and wire == _BYTES:
                _trainer(model, data, at, end)
            elif number == 3 and wire == _BYTES:
                _normalizer(model, data, at, end)
            del value
    except (_Malformed, UnicodeDecodeError) as e:
        raise BadModelFile(f"{where} is not a SentencePiece model: {e}") from None
    if not model.texts:
        raise BadModelFile(f"{where} is not a SentencePiece model: it has no pieces")
    for i, (text, score, kind) in enumerate(zip(model.texts, model.scores, model.types, strict=True)):
        if len(text) > MAX_TOKEN_LENGTH or not NORMAL <= kind <= BYTE or not -1e30 < score < 1e30:
            raise BadModelFile(f"{where}: piece {i} is {text[:80]!r} with the score {score} and the kind {kind}")
    return model


class _Malformed(Exception):
    """Bytes that are not a ModelProto: what is wrong with them, and where."""


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, wire type, where the value begins and ends, and the value of a varint, of every field."""
    while at < stop:
        start = at
        key, at = _varint(data, at, stop)
        number, wire = key >> 3, key & 7
        value, begin = 0, at
        if wire == _VARINT:
            value, at = _varint(data, at, stop)
        elif wire == _BYTES:
            size, begin = _varint(data, at, stop)
            at = begin + size
        elif wire in (_DOUBLE, _FLOAT):
            at += 8 if wire == _DOUBLE else 4
        else:
            raise _Malformed(f"byte {start} begins a field of the unknown kind {wire}")
        if at > stop:
            raise _Malformed(f"the field at byte {start} goes on {at - stop} bytes beyond its end")
        yield number, wire, begin, at, value


def _varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    if at < stop and data[at] < 0x80:
        return data[at], at + 1
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            raise _Malformed(f"a number ends at byte {stop} before it is whole")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Malformed(f"the number before byte {at} has more than ten bytes")


def _piece(model: SentencePieceModel, data: bytes, at: int, end: int) -> None:
    text, score, kind = "", 0.0, NORMAL
    for number, wire, begin, stop, value in _fields(data, at, end):
        if number == 1 and wire == _BYTES:
            text = data[begin:stop].decode()
        elif number == 2 and wire == _FLOAT:
            score = struct.unpack_from("<f", data, begin)[0]
        elif number == 3 and wire == _VARINT:
            kind = value
    model.texts.append(text)
    model.scores.append(score)
    model.types.append(kind)


def _trainer(model: SentencePieceModel, data: bytes, at: int, end: int) -> None:
    for number, wire, _, _, value in _fields(data, at, end):
        if wire != _VARINT:
            continue
        signed = value - (1 << 64) if value >> 63 else value
        if number == 3:
            model.model_type = value
        elif number == 24:
            model.suffix_spaces = bool(value)
        elif number == 40:
            model.unk_id = signed
        elif number == 41:
            model.bos_id = signed
        elif number == 42:
            model.eos_id = signed


def _normalizer(model: SentencePieceModel, data: bytes, at: int, end: int) -> None:
    for number, wire, begin, stop, value in _fields(data, at, end):
        if number == 2 and wire == _BYTES:
            if stop - begin > MAX_CHARSMAP:
                raise _Malformed(f"its character map has {stop - begin} bytes: at most {MAX_CHARSMAP} are allowed")
            model.charsmap = data[begin:stop]
        elif wire == _VARINT and number == 3:
            model.add_prefix = bool(value)
        elif wire == _VARINT and number == 4:
            model.collapse = bool(value)
        elif wire == _VARINT and number == 5:
            model.escape = bool(value)


def _file(where: str) -> bytes:
    try:
        with open(where, "rb") as f:
            data = f.read(MAX_FILE + 1)
    except OSError as e:
        raise BadModelFile(f"{where} cannot be read: {e.strerror or e}") from None
    if len(data) > MAX_FILE:
        raise BadModelFile(f"{where} has more than {MAX_FILE} bytes: that is not what it should hold")
    return data


def _pieces(vocab: Vocabulary) -> Pieces:
    if vocab.model == "t5":
        from quire.chat.tokenizers.unigram import UnigramPieces

        return UnigramPieces(vocab, bool(vocab.add_space_prefix))
    from quire.chat.tokenizers.spm import ScoredPieces

    return ScoredPieces(vocab, bool(vocab.add_space_prefix))


def _added(folder: Folder, config: Values | None) -> list[Added]:
    """Added tokens of tokenizer_config.json, and those that added_tokens.json alone knows."""
    found = added_tokens(config)
    texts, ids = {a.content for a in found}, {a.id for a in found}
    listed = folder.values("added_tokens.json")
    for text, i in listed.raw.items() if listed else ():
        if type(i) is not int:
            raise BadModelFile(f"{listed and listed.where}: {text[:40]!a} is {repr(i)[:40]}: an id is needed")
        if text not in texts and i not in ids:
            found.append(Added(i, checked(str(listed and listed.where), text)))
    return found


def _add(where: str, model: SentencePieceModel, size: int, added: list[Added]) -> None:
    """Put added tokens into the vocabulary, and tokens without a text up to the model's size."""
    count = max([size, *(a.id + 1 for a in added)])
    if count > size + MAX_BEYOND or any(a.id < 0 for a in added):
        raise BadModelFile(
            f"{where}: an added token has the id {count - 1}, but config.json says a vocab_size of {size}"
        )
    more = count - len(model.texts)
    model.texts += [""] * more
    model.scores += [0.0] * more
    model.types += [CONTROL] * more  # a token without a text is nothing that anybody should see
    for token in added:
        old = model.texts[token.id]
        if old not in ("", token.content):
            raise BadModelFile(f"{where}: token {token.id} is {old[:40]!r}, but added as {token.content[:40]!r}")
        model.texts[token.id] = token.content
        if model.types[token.id] != UNKNOWN:
            model.types[token.id] = CONTROL if token.special else USER_DEFINED


def _named(ids: dict[str, int], text: str | None, default: int, count: int) -> int | None:
    if text is not None and text in ids:
        return ids[text]
    return default if 0 <= default < count else None
