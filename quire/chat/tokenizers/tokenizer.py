"""Text to token ids and back, for the vocabulary inside a GGUF file or a tokenizer.json.

Owns special tokens, the begin and end tokens, and exact token bytes; the merging itself is an Encoder's work: for a GGUF
`bpe.py`, `spm.py`, `unigram.py` or `wordpiece.py` behind a splitter, for a tokenizer.json `hub.py`. With
parse_special=False no text whatever becomes a control token. Immutable after construction and safe to use from several
threads; the heavy part of `encode` runs without the interpreter lock.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

from quire.chat import infill
from quire.chat.infill import Infill
from quire.chat.tokenizers import pretokenizers
from quire.chat.tokenizers.vocab import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary, raw, where
from quire.observe.errors import BadModelFile, BadRequest, QuireError, Unsupported


class Pieces(Protocol):
    """One kind of vocabulary: plain text without special tokens to ids, ids to bytes."""

    def encode(self, text: str, first: bool, last: bool) -> list[int]:
        """Ids; `first` and `last` say that the text begins or ends where a vocabulary treats its spaces so."""
        ...

    @property
    def unbounded(self) -> bool:
        """Whether one token may stand for any amount of text."""
        ...

    def missing(self, data: bytes) -> bytes: ...

    def token_bytes(self, token: int) -> bytes: ...


class Encoder(Protocol):
    """Text with or without special tokens to ids, ids to bytes."""

    def encode(self, text: str, parse_special: bool) -> list[int]: ...

    def missing(self, data: bytes) -> bytes:
        """Bytes of a text that no token can express."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to a text."""
        ...

    def controls(self, text: str) -> list[str | int]:
        """The text cut at its control tokens."""
        ...

    def encode_parts(self, parts: list[str | int]) -> list[int]:
        """Ids of such parts, where no text in them becomes a control token whatever it says."""
        ...

    @property
    def loose(self) -> bool:
        """Whether a control token may be found in text that `controls` does not see it in (in other letters, say)."""
        ...

    @property
    def unbounded(self) -> bool:
        """Whether one token may stand for any amount of text."""
        ...


class Splitter:
    """Cuts text at the tokens that stand for themselves, before anything is merged.

    Leftmost first, longest first, as the `tokenizers` library matches added tokens. It works for thousands of them without a
    pattern of thousands of branches: a small expression finds where one may start (its first two characters), and a table lookup for
    each possible length decides. `swallow` holds the tokens that take the whitespace after them along.
    """

    def __init__(self, texts: Iterable[tuple[str, int]], swallow: frozenset[int] = frozenset()):
        self.ids = dict(texts)
        self._swallow = swallow
        lengths: dict[str, set[int]] = {}
        for text in self.ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        starts = sorted(self._lengths, key=len, reverse=True)
        self._start = re.compile("|".join(map(re.escape, starts))) if starts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of text and token ids, in order; no piece is empty."""
        if self._start is None:
            if text:
                yield text
            return
        done = at = 0
        while match := self._start.search(text, at):
            at = match.start()
            found = self._longest(text, at)
            if found is None:
                at += 1
                continue
            token, length = found
            if at > done:
                yield text[done:at]
            yield token
            at += length
            if token in self._swallow:
                while at < len(text) and text[at].isspace():
                    at += 1
            done = at
        if done < len(text):
            yield text[done:]

    def _longest(self, text: str, at: int) -> tuple[int, int] | None:
        for start in (text[at : at + 2], text[at : at + 1]):
            for length in self._lengths.get(start, ()):
                token = self.ids.get(text[at : at + length])
                if token is not None:
                    return token, min(length, len(text) - at)
        return None


class Cut:
    """An Encoder that cuts special tokens out of the text and leaves what is between to Pieces.

    `apart`: what follows a special token is a text of its own, that may get a space in front; except after the tokens in
    `glued`, which lie inside a text as words do.
    """

    def __init__(self, vocab: Vocabulary, pieces: Pieces, *, apart: bool = True, glued: frozenset[int] = frozenset()):
        self._vocab = vocab
        self._pieces = pieces
        self._apart = apart
        self._glued = glued
        self._control = control_of(vocab)
        self.missing, self.token_bytes = pieces.missing, pieces.token_bytes

    def encode(self, text: str, parse_special: bool) -> list[int]:
        return self._ids((self._all_specials if parse_special else self._user_defined).split(text))

    loose = False

    def controls(self, text: str) -> list[str | int]:
        return list(self._controls.split(text))

    def encode_parts(self, parts: list[str | int]) -> list[int]:
        cut = ([part] if isinstance(part, int) else self._user_defined.split(part) for part in parts)
        return self._ids(chain.from_iterable(cut))

    def _ids(self, parts: Iterable[str | int]) -> list[int]:
        listed = list(parts)
        ids: list[int] = []
        first = True
        for at, part in enumerate(listed):
            if isinstance(part, int):
                if first and part in self._glued:
                    ids += self._pieces.encode(
                        "", True, False
                    )  # what stands before a text stands before its first word
                ids.append(part)
                first = self._apart and part not in self._glued
            else:
                after = listed[at + 1] if at + 1 < len(listed) else None
                last = after is None or (self._apart and after not in self._glued)
                ids += self._pieces.encode(part, first, last)
                first = False
        return ids

    @property
    def unbounded(self) -> bool:
        return bool(self._swallow) or self._pieces.unbounded

    @cached_property
    def _swallow(self) -> frozenset[int]:
        # Phi-3's tokenizer strips the space after its special tokens. GGUF has no field for that; the architecture
        # with this kind of vocabulary is the sign (Phi-4 has the architecture with another kind).
        if self._vocab.model != "llama" or self._vocab.architecture != "phi3":
            return frozenset()
        kept = {"<unk>", "<s>", "<|endoftext|>"}
        return frozenset(i for i in self._control if self._vocab.tokens[i] not in kept)

    @cached_property
    def _user_defined(self) -> Splitter:
        return self._splitter(i for i in specials_of(self._vocab) if i not in self._control)

    @cached_property
    def _controls(self) -> Splitter:
        return self._splitter(self._control)

    @cached_property
    def _all_specials(self) -> Splitter:
        return self._splitter(specials_of(self._vocab))

    def _splitter(self, ids: Iterable[int]) -> Splitter:
        texts = ((self._vocab.tokens[i], i) for i in ids)
        return Splitter((pair for pair in texts if pair[0]), self._swallow)


def control_of(vocab: Vocabulary) -> frozenset[int]:
    """Control and unknown tokens. An end-of-turn token is control even where a file calls it user-defined: user text must
    not end a turn."""
    hidden = set(where((vocab.types == CONTROL) | (vocab.types == UNKNOWN)))
    hidden.update(i for i in vocab.eos_ids if vocab.types[i] == USER_DEFINED)
    return frozenset(hidden)


def specials_of(vocab: Vocabulary) -> list[int]:
    """Control and user-defined tokens: those whose text stands for them."""
    return sorted(control_of(vocab) | set(where(vocab.types == USER_DEFINED)))


class Tokenizer:
    """The tokenizer of one model. Build it with `from_gguf`, or `loading.tokenizer_of` for any checkpoint."""

    def __init__(self, vocab: Vocabulary, encoder: Encoder, *, add_bos: bool, add_eos: bool, space_prefix: bool):
        self._vocab = vocab
        self._encoder = encoder
        self.vocab_size = len(vocab.tokens)
        self.bos_id = vocab.bos_id
        self.eos_id = vocab.eos_id
        self.eos_ids = vocab.eos_ids
        self.add_bos = add_bos
        self.add_eos = add_eos
        self.space_prefix = space_prefix  # text gets a space in front, and a decoded text loses it again
        self._special = control_of(vocab)
        self._bytes: dict[int, bytes] = {}
        for wanted, token, key in ((add_bos, self.bos_id, "bos"), (add_eos, self.eos_id, "eos")):
            if wanted and token is None:
                raise BadModelFile(
                    f"tokenizer.ggml.add_{key}_token is set, but there is no tokenizer.ggml.{key}_token_id"
                )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, pre: str | None = None) -> Tokenizer:
        """Build from `tokenizer.ggml.*`. `pre` names the pre-tokenizer in place of the file's own word.

        Raises BadModelFile naming the broken key, or Unsupported for a kind or a pre-tokenizer that is not served.
        """
        vocab = Vocabulary.read(metadata)
        prefix, begins, ends = False, vocab.bos_id is not None, False  # byte-level words carry their spaces inside
        if vocab.model == "llama":
            from quire.chat.tokenizers.spm import ScoredPieces

            prefix = vocab.add_space_prefix is not False
            pieces: Pieces = ScoredPieces(vocab, prefix)
        elif vocab.model == "t5":
            from quire.chat.tokenizers.unigram import UnigramPieces

            prefix, begins, ends = vocab.add_space_prefix is not False, False, vocab.eos_id is not None
            pieces = UnigramPieces(vocab, prefix)
        elif vocab.model == "bert":
            from quire.chat.tokenizers.wordpiece import WordPieces

            prefix, ends = True, vocab.eos_id is not None
            pieces = WordPieces(vocab)
        else:
            from quire.chat.tokenizers.bpe import BytePieces

            name = pre or vocab.pre
            if not name:
                raise Unsupported(
                    "tokenizer.ggml.pre is missing: the file does not say how its vocabulary splits text",
                    cure="convert the model again with a current converter",
                )
            split = pretokenizers.find(name)
            begins = begins and split.add_bos
            pieces = BytePieces(vocab, split)
        return cls(
            vocab,
            Cut(vocab, pieces),
            add_bos=begins if vocab.add_bos is None else vocab.add_bos,
            add_eos=ends if vocab.add_eos is None else vocab.add_eos,
            space_prefix=prefix,
        )

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        add_special puts the begin and end tokens the file asks for around it. parse_special reads the text of a special
        token as that token; without it, "<|im_start|>" is twelve characters like any others.
        """
        self._check(text)
        ids = [self.bos_id] if add_special and self.add_bos and self.bos_id is not None else []
        ids += self._guarded(lambda: self._encoder.encode(text, parse_special))
        if add_special and self.add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def controls(self, text: str) -> list[str | int]:
        """The text cut at its control tokens: pieces of text, and ids."""
        return self._encoder.controls(text)

    def encode_parts(self, parts: list[str | int]) -> list[int]:
        """Ids of text and control tokens in turn. Unlike `encode`, it reads no control token out of the text."""
        self._check("".join(part for part in parts if isinstance(part, str)))
        return self._guarded(lambda: self._encoder.encode_parts(parts))

    @property
    def loose_controls(self) -> bool:
        """Whether `encode` may find a control token where `controls` does not."""
        return self._encoder.loose

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """The texts of the control tokens."""
        return frozenset(text for i in self._special if (text := self._vocab.tokens[i]))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, at_start: bool = True) -> str:
        """The text of some tokens; bytes that are not UTF-8 become U+FFFD.

        at_start=False keeps the space that a SentencePiece vocabulary puts before a text: right for a continuation.
        """
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self._special))
        if at_start and self.space_prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Exactly the bytes this token adds to a text (for a special token: its name)."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._encoder.token_bytes(self._known(token))
        return found

    def token_text(self, token: int) -> str:
        """The token's bytes as text, with U+FFFD where they are not whole characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The special or user-defined token whose text this is."""
        return self._special_ids.get(text)

    @cached_property
    def infill(self) -> Infill | None:
        """The tokens around a gap to be filled, for a model that knows them."""
        return infill.find(self._vocab)

    def is_special(self, token: int) -> bool:
        """A control or unknown token: one that decode(skip_special=True) leaves out."""
        return self._known(token) in self._special

    @cached_property
    def ordinary_size(self) -> int:
        """The id behind the last token that ordinary text may become; control and added tokens may have higher ones."""
        return max(where(self._vocab.types == NORMAL), default=-1) + 1

    @cached_property
    def max_token_bytes(self) -> int | None:
        """The most bytes of text one token can stand for; None when some token may stand for any amount."""
        return None if self._encoder.unbounded else max(len(raw(text)) for text in self._vocab.tokens)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        texts = ((self._vocab.tokens[i], i) for i in specials_of(self._vocab))
        return {text: i for text, i in texts if text}

    def _known(self, token: int) -> int:
        if not 0 <= token < self.vocab_size:
            raise BadRequest(f"token {token} is not in the vocabulary of {self.vocab_size}", param="tokens")
        return token

    def _check(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(f"the text has half a surrogate pair at character {error.start}", param="prompt") from None
        missing = self._encoder.missing(data)
        if missing:
            raise BadRequest(
                f"the model's vocabulary has no token for byte 0x{missing[0]:02x} of the text", param="prompt"
            )

    def _guarded(self, encode: Callable[[], list[int]]) -> list[int]:
        try:
            return encode()
        except QuireError:
            raise
        except Exception as error:
            raise BadRequest(f"the text cannot be tokenized: {error}", param="prompt") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's own failure, outside Exception's tree
                raise
            raise BadRequest(f"the text cannot be tokenized: {error}", param="prompt") from error
