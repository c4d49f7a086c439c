"""WordPiece ("bert" vocabularies): words cut at spaces and punctuation, each covered greedily from its front.

Owns how a GGUF writes such a vocabulary: a piece that begins a word has U+2581 in front, one that goes on a word has
nothing (the models' own files mark the second kind with ##). A text is not kept as it was: letters lose their case and
accents where the vocabulary has none, spaces are one or none. Decoded, words have a space between and punctuation none
before, as the `tokenizers` library writes them.
"""

from __future__ import annotations

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from quire.chat.tokenizers.bpe import ids_of
from quire.chat.tokenizers.spm_text import SPACE
from quire.chat.tokenizers.vocab import CONTROL, UNKNOWN, Vocabulary, not_text, raw, where
from quire.observe.errors import BadModelFile

GOES_ON = "##"
MAX_WORD = 100  # characters; a longer word is the unknown token, as in the models' own tokenizers
# What becomes of a space before such a word, in this order.
_CLEAN = [(f" {c}", c) for c in ".?!,"] + [(" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" do not", " don't")]
_CLEAN += [(f" '{c}", f"'{c}") for c in ("s", "ve", "re")]


class WordPieces:
    """Plain text to ids, and ids to bytes, for one WordPiece vocabulary."""

    unbounded = True  # the unknown token stands for a word of any length

    def __init__(self, vocab: Vocabulary):
        self._vocab = vocab
        if vocab.unk_id is None:
            raise BadModelFile("tokenizer.ggml.unknown_token_id is missing: WordPiece needs an unknown token")
        marked = any(text.startswith(SPACE) for text in vocab.tokens)
        self._pieces = [_piece(text, marked) for text in vocab.tokens]
        for i in where((vocab.types == CONTROL) | (vocab.types == UNKNOWN)):
            self._pieces[i] = vocab.tokens[i]
        hidden = {*where((vocab.types == CONTROL) | (vocab.types == UNKNOWN)), *not_text(vocab.tokens)}
        known: dict[str, int] = {}
        for i, text in enumerate(self._pieces):
            if i in hidden or not text:
                continue
            if text in known:
                raise BadModelFile(
                    f"tokenizer.ggml.tokens[{i}] is {vocab.tokens[i][:80]!r}: token {known[text]} says the same"
                )
            known[text] = i
        lower = vocab.lowercase
        if lower is None:  # a vocabulary with no capital letter is for text without
            lower = not any(text != text.lower() for text in known)
        unknown = vocab.tokens[vocab.unk_id]
        known[unknown] = vocab.unk_id
        self._tokenizer = Tokenizer(models.WordPiece(known, unk_token=unknown, max_input_chars_per_word=MAX_WORD))
        self._tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower)  # type: ignore[assignment]
        self._tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]

    def encode(self, text: str, first: bool, last: bool) -> list[int]:
        """Ids of plain text."""
        return ids_of(self._tokenizer, text)

    def missing(self, data: bytes) -> bytes:
        """Bytes that cannot be expressed: none, the unknown token stands for every word."""
        return b""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text, with the space that stands before a word."""
        return raw(spaced(self._pieces[token]))


def spaced(piece: str, prefix: str = GOES_ON, clean: bool = True) -> str:
    """A piece as it stands in a text."""
    if piece.startswith(prefix):
        return piece[len(prefix) :]
    text = f" {piece}"
    for before, after in _CLEAN if clean else ():
        text = text.replace(before, after)
    return text


def _piece(text: str, marked: bool) -> str:
    if not marked:
        return text  # written as the model's own file has it
    return text[1:] if text.startswith(SPACE) else GOES_ON + text
