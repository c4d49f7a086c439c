"""Mistral's tekken.json: byte-level BPE whose tokens are listed by rank, with an expression that cuts words.

A pair of tokens may be joined when the result is a token, and the result of the lowest rank goes first; so every way to cut a
token in two is a merge, as in SentencePiece (`spm.py` derives them). Special tokens take the first ids, ranks follow.
The file is hostile: sizes, ranks and bytes are checked, and its expression must be one that is known to be linear.
"""

from __future__ import annotations

import base64
import binascii
import os
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from quire.chat.tokenizers.bpe import ALPHABET, BytePieces
from quire.chat.tokenizers.hub_names import end_tokens, vocab_size
from quire.chat.tokenizers.patterns import is_known
from quire.chat.tokenizers.pretokenizers import PreTokenizer
from quire.chat.tokenizers.spm import merges_of
from quire.chat.tokenizers.tokenizer import Cut, Tokenizer
from quire.chat.tokenizers.vocab import CONTROL, MAX_TOKEN_LENGTH, MAX_TOKENS, NORMAL, USER_DEFINED, Vocabulary, end_ids
from quire.observe.errors import BadModelFile, NotFound, Unsupported

if TYPE_CHECKING:
    from quire.weights.folder import Folder

FILE = "tekken.json"
MAX_FILE = 128 << 20
_WRITTEN = {byte: char for char, byte in ALPHABET.items()}
# The special tokens of files that list none, in order; the rest of their number have no text of their own.
_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class Config(msgspec.Struct):
    """The settings by which the file is read."""

    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class Special(msgspec.Struct):
    """A special token. Those that are not control stand for themselves in any text."""

    rank: int
    token_str: str
    is_control: bool = True


class Entry(msgspec.Struct):
    """An ordinary token."""

    rank: int
    token_bytes: str


class File(msgspec.Struct):
    """The fields of a tekken.json that are used."""

    config: Config
    vocab: list[Entry]
    special_tokens: list[Special] | None = None


def read(folder: Folder) -> Tokenizer:
    """The tokenizer. Raises BadModelFile or Unsupported, naming the file."""
    where = os.path.join(folder.path, FILE)
    text = folder.text(FILE, MAX_FILE)
    if text is None:
        raise NotFound(f"there is no {where}")
    try:
        file = msgspec.json.decode(text, type=File)
    except (msgspec.DecodeError, RecursionError) as e:
        raise BadModelFile(f"{where}: {e}") from None
    config = file.config
    if not is_known(config.pattern):
        raise Unsupported(f"{where}: its pattern is not one that is known: {config.pattern[:200]!r}")
    size, specials = config.default_vocab_size, config.default_num_special_tokens
    if not 0 <= specials < size <= MAX_TOKENS:
        raise BadModelFile(f"{where} says {specials} special tokens in a vocabulary of {size}")
    most = vocab_size(folder)
    if size > most:
        raise BadModelFile(f"{where} has {size} tokens, but config.json says a vocab_size of {most}")
    tokens = [""] * most
    types = np.full(most, CONTROL, np.int32)
    listed = file.special_tokens
    if listed is None:
        listed = [Special(i, text) for i, text in enumerate(_SPECIAL[:specials])]
    for token in listed:
        if not 0 <= token.rank < specials or tokens[token.rank] or len(token.token_str) > MAX_TOKEN_LENGTH:
            raise BadModelFile(f"{where}: the special token {token.token_str[:80]!r} has the rank {token.rank}")
        tokens[token.rank] = token.token_str
        types[token.rank] = CONTROL if token.is_control else USER_DEFINED
    if len({t for t in tokens if t}) != sum(map(bool, tokens)):
        raise BadModelFile(f"{where} has one text for two special tokens")
    for entry in file.vocab:
        at = entry.rank + specials
        if at >= size and entry.rank >= 0:
            continue  # the file may hold more than the model has
        if entry.rank < 0 or tokens[at]:
            raise BadModelFile(f"{where}: the rank {entry.rank} is there twice, or is none")
        tokens[at] = _written(where, entry)
        types[at] = NORMAL
    lacking = next((i for i in range(specials, size) if not tokens[i]), None)
    if lacking is not None:
        raise BadModelFile(f"{where} has no token of the rank {lacking - specials}, but a vocabulary of {size}")
    ranks = np.zeros(most, np.float32)
    ranks[specials:size] = -np.arange(size - specials, dtype=np.float32)
    merges = merges_of([(tokens[i], i) for i in range(specials, size)], ranks)
    ids = {text: i for i, text in enumerate(tokens[:specials]) if text}
    bos, eos = ids.get("<s>"), ids.get("</s>")
    vocab = Vocabulary(
        model="gpt2",
        pre="tekken",
        tokens=tokens,
        types=types,
        scores=None,
        merges=[f"{a} {b}" for a, b in merges],
        bos_id=bos,
        eos_id=eos,
        unk_id=None,
        eos_ids=end_ids(tokens, types, [eos, *end_tokens(folder, most)]),
        add_bos=bos is not None,
        add_eos=False,
        add_space_prefix=None,
        architecture=folder.architecture,
    )
    try:
        pieces = BytePieces(vocab, PreTokenizer((config.pattern,), ignore_merges=True))
    except BadModelFile as e:
        raise BadModelFile(f"{where}: {e.message}") from None
    return Tokenizer(vocab, Cut(vocab, pieces), add_bos=bos is not None, add_eos=False, space_prefix=False)


def _written(where: str, entry: Entry) -> str:
    """A token's bytes in the byte alphabet."""
    try:
        data = base64.b64decode(entry.token_bytes, validate=True)
    except (binascii.Error, ValueError) as e:
        raise BadModelFile(f"{where}: the token of rank {entry.rank} is not base64: {e}") from None
    if not 0 < len(data) <= MAX_TOKEN_LENGTH:
        raise BadModelFile(f"{where}: the token of rank {entry.rank} has {len(data)} bytes")
    return "".join(map(_WRITTEN.__getitem__, data))
