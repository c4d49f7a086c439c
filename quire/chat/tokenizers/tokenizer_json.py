"""A tokenizer.json: byte-level BPE, SentencePiece BPE and unigram, WordPiece.

The file goes to the `tokenizers` library whole, so text is cut and merged as transformers would. Owned here: what the
library does not say (exact token bytes, which tokens are control, what ends a turn, which begin and end tokens are put
around a text) and what it would do without a word (drop characters that no token expresses). Files are hostile: every
complaint names its file. Kinds of tokenizer whose tokens have no bytes of their own are refused by name.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import tokenizers

from quire.chat.tokenizers import patterns
from quire.chat.tokenizers.bpe import ALPHABET, ids_of
from quire.chat.tokenizers.hub_names import MAX_BEYOND, Added, added_tokens, end_tokens, named_tokens, vocab_size
from quire.chat.tokenizers.isolated import IsolatedTokenizer
from quire.chat.tokenizers.spm_text import SPACE
from quire.chat.tokenizers.tokenizer import Splitter, Tokenizer, control_of
from quire.chat.tokenizers.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, end_ids, raw
from quire.chat.tokenizers.vocab import where as where_is
from quire.chat.tokenizers.wordpiece import spaced
from quire.observe.errors import BadModelFile, BadRequest, NotFound, QuireError, Unsupported

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

FILE = "tokenizer.json"
MAX_FILE = 128 << 20  # bytes; the largest public ones have 35 million
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})

Kind = Literal["bytes", "pieces", "words"]
MODELS = ("BPE", "Unigram", "WordPiece")


class Model(msgspec.Struct):
    """The fields of the merging model that are used; its vocabulary is read by the library."""

    type: str | None = None
    unk_token: str | None = None
    unk_id: int | None = None
    byte_fallback: bool | None = None
    fuse_unk: bool | None = None


class File(msgspec.Struct):
    """The fields of a tokenizer.json that are used."""

    model: Model
    added_tokens: list[Added] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def read(folder: Folder) -> Tokenizer:
    """The tokenizer. Raises BadModelFile, Unsupported or NotFound, naming the file."""
    where = os.path.join(folder.path, FILE)
    text = folder.text(FILE, MAX_FILE)
    if text is None:
        raise NotFound(f"there is no {where}")
    try:
        file = msgspec.json.decode(text, type=File)
    except (msgspec.DecodeError, RecursionError) as e:
        raise BadModelFile(f"{where}: {e}") from None
    model = file.model
    if model.type not in (None, *MODELS):
        raise Unsupported(
            f"{where}: a tokenizer of type {model.type!r} is not supported", cure=f"supported: {', '.join(MODELS)}"
        )
    decoding = _decoding(where, file.decoder)
    isolated = bool(patterns.unknown(where, {part: getattr(file, part) for part in patterns.PARTS}))
    library = _library(where, _without_patterns(where, text) if isolated else text)
    config = folder.values("tokenizer_config.json")
    added = _added(where, file.added_tokens, library, config)
    tokens, types = _tokens(where, library, added, model, vocab_size(folder))
    unk = model.unk_id if model.type == "Unigram" else None
    if model.unk_token is not None:
        unk = library.token_to_id(model.unk_token)
    ids = {name: library.token_to_id(text) for name, text in named_tokens(folder, config).items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    before, after = _around(where, library)
    vocab = Vocabulary(
        model="hub",
        pre="",
        tokens=tokens,
        types=types,
        scores=None,
        merges=(),
        bos_id=bos if before is None else before,
        eos_id=eos if after is None else after,
        unk_id=unk,
        eos_ids=end_ids(tokens, types, [eos, *end_tokens(folder, len(tokens))]),
        add_bos=before is not None,
        add_eos=after is not None,
        add_space_prefix=None,
        architecture=folder.architecture,
    )
    encoder = HubEncoder(where, library, vocab, decoding, model, added, file, IsolatedTokenizer if isolated else None)
    strips = decoding.kind == "words" or (decoding.kind == "pieces" and decoding.strips)
    return Tokenizer(vocab, encoder, add_bos=before is not None, add_eos=after is not None, space_prefix=strips)


@dataclass(frozen=True, slots=True)
class Decoding:
    """The way from tokens to text: what they are made of, and how they are joined."""

    kind: Kind
    strips: bool = False  # a text loses the space in front of it
    prefix: str = ""  # words: of a piece that goes on a word
    clean: bool = False  # words: no space before punctuation


class HubEncoder:
    """Text to ids by the library, ids to bytes by what the decoder of the file says tokens are."""

    def __init__(
        self,
        where: str,
        library: tokenizers.Tokenizer,
        vocab: Vocabulary,
        decoding: Decoding,
        model: Model,
        added: list[Added],
        file: File,
        isolated: type[IsolatedTokenizer] | None,
    ):
        self._where = where
        self._library = library
        self._vocab = vocab
        self._decoding = decoding
        self._file = file
        self._isolated = isolated
        self._control = control_of(vocab)
        self._flags = {a.id: a for a in added if a.content}
        self.loose = file.normalizer is not None and any(a.special and a.normalized for a in added)
        kind = decoding.kind
        if kind == "bytes":
            known = set(library.get_vocab(with_added_tokens=False))
            have = {byte for char, byte in ALPHABET.items() if char in known}
        else:
            have = {int(vocab.tokens[i][3:5], 16) for i in where_is(vocab.types == BYTE)}
        self._have = bytes(sorted(have))
        lacking = bool(set(range(256)) - have - _NEVER_IN_UTF8)
        if kind != "bytes" and lacking and vocab.unk_id is None:
            raise BadModelFile(
                f"{where} has {len(have)} of 256 byte tokens and no unknown token: some texts could not be expressed"
            )
        self._lacking = kind == "bytes" and lacking and vocab.unk_id is None
        strips = any(a.lstrip or a.rstrip for a in added)
        shrinks = patterns.shrinks(file.normalizer) or patterns.shrinks(file.pre_tokenizer)
        self.unbounded = strips or shrinks or (lacking and (model.type != "BPE" or bool(model.fuse_unk)))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        if parse_special:
            return self._run(text)
        return self._checked(self._run_plain(text), 0)

    def controls(self, text: str) -> list[str | int]:
        return list(self._splitter.split(text))

    def encode_parts(self, parts: list[str | int]) -> list[int]:
        """One call for all parts, so that each is cut as its place in the whole asks: control tokens under their hidden
        names, text as it is."""
        names = self._hidden
        text = "".join(names[part] if isinstance(part, int) else part for part in parts)
        return self._checked(self._run_plain(text), sum(isinstance(part, int) for part in parts))

    def _checked(self, ids: list[int], expected: int) -> list[int]:
        unknown = self._vocab.unk_id
        control = [i for i in ids if i in self._control and i != unknown]
        if len(control) > expected:
            raise BadRequest(f"the text would become the control token {min(control)}", param="prompt")
        return ids

    def missing(self, data: bytes) -> bytes:
        """The bytes of `data` that no token can express (the library would drop them without a word)."""
        return data.translate(None, self._have) if self._lacking else b""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text."""
        text, kind = self._vocab.tokens[token], self._vocab.types[token]
        if kind == BYTE:
            return bytes([int(text[3:5], 16)])
        if self._decoding.kind == "words":
            return raw(spaced(text, self._decoding.prefix, self._decoding.clean))
        if self._decoding.kind == "pieces":
            return raw(text.replace(SPACE, " "))
        if kind == NORMAL:
            try:
                return bytes(map(ALPHABET.__getitem__, text))
            except KeyError:
                pass  # added as it is, not in the byte alphabet
        return raw(text)

    # The two ways to run: with control tokens read out of the text, and with their names hidden. A file with unknown
    # expressions runs in a process of its own, and this process has a library without them, for what it says of tokens.

    @cached_property
    def _run(self) -> Callable[[str], list[int]]:
        if self._isolated is not None:
            data = json.loads(self._library.to_str())
            return self._isolated(self._where, json.dumps(self._whole(data))).encode
        library = self._library
        return lambda text: ids_of(library, text)

    @cached_property
    def _run_plain(self) -> Callable[[str], list[int]]:
        if (
            self._isolated is not None or self._file.model.type == "Unigram"
        ):  # whose pieces may be control tokens by name
            return self._run_rebuilt
        own = self._vocab.types
        listed = {**self._flags, **{i: Added(i, self._vocab.tokens[i]) for i in self._control if i not in self._flags}}
        library = tokenizers.Tokenizer(self._library.model)  # the same model, not a copy of it
        library.normalizer, library.pre_tokenizer = self._library.normalizer, self._library.pre_tokenizer
        texts = {i: self._hidden.get(i, a.content) for i, a in listed.items()}
        library.add_tokens(
            [
                tokenizers.AddedToken(
                    texts[i],
                    lstrip=a.lstrip,
                    rstrip=a.rstrip,
                    special=False,
                    normalized=a.normalized and i not in self._hidden,
                )
                for i, a in sorted(listed.items())
                if texts[i]
            ]
        )
        real = {library.token_to_id(text): i for i, text in texts.items() if text}

        def run(text: str) -> list[int]:
            made = ids_of(library, text)
            # A control token that the model itself knows comes out under its own id: then the slow way is the safe one.
            if any(i not in real and (i >= len(own) or i in self._control) for i in made):
                return self._run_rebuilt(text)
            return [real.get(i, i) for i in made]

        return run

    @cached_property
    def _run_rebuilt(self) -> Callable[[str], list[int]]:
        """Encode as `_run_plain` does, by a whole second tokenizer in which the model does not know control tokens either."""
        source = json.dumps(self._plain())
        if self._isolated is not None:
            return self._isolated(self._where, source).encode
        library = _library(self._where, source)
        return lambda text: ids_of(library, text)

    @cached_property
    def _splitter(self) -> Splitter:
        return Splitter((a.content, i) for i, a in self._flags.items() if i in self._control)

    @cached_property
    def _hidden(self) -> dict[int, str]:
        """Names for control tokens that nobody can write."""
        secret = secrets.token_hex(16)
        return {i: f"\0{secret}-{i}\0" for i in self._control if self._vocab.tokens[i]}

    def _whole(self, data: dict[str, Any]) -> dict[str, Any]:
        """A library's state with the steps that this process does not run."""
        return {**data, "normalizer": self._file.normalizer, "pre_tokenizer": self._file.pre_tokenizer}

    def _plain(self) -> dict[str, Any]:
        """The same tokenizer, with control tokens under hidden names. Ids stay what they are."""
        data = self._whole(json.loads(self._library.to_str()))
        names = {self._vocab.tokens[i]: name for i, name in self._hidden.items()}
        for token in data["added_tokens"]:
            if token["content"] in names:
                token.update(content=names[token["content"]], normalized=False)
        model = data["model"]
        if isinstance(model["vocab"], list):  # unigram: places are ids
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        else:
            model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
        if "merges" in model:
            pairs = ((m if isinstance(m, list) else m.split(" ", 1)) for m in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if not names.keys() & {a, b, a + b}]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        data["post_processor"] = data["decoder"] = None
        return data


@contextmanager
def _heard(where: str) -> Iterator[None]:
    """The library's failures as ours; it panics at some files, which is outside Exception's tree."""
    try:
        yield
    except QuireError:
        raise
    except Exception as e:
        raise BadModelFile(f"{where} cannot be used: {str(e)[:300]}") from None
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise BadModelFile(f"{where} cannot be used: {str(e)[:300]}") from None


def _library(where: str, text: str) -> tokenizers.Tokenizer:
    with _heard(where):
        library = tokenizers.Tokenizer.from_str(text)
        library.no_truncation()
        library.no_padding()
        return library


def _without_patterns(where: str, text: str) -> str:
    """The file less the steps that may hold expressions: its vocabulary and what is put around a text."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadModelFile(f"{where}: {str(e)[:200]}") from None
    return json.dumps({**data, "normalizer": None, "pre_tokenizer": None, "decoder": None})


def _decoding(where: str, decoder: Any) -> Decoding:
    listed = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    parts = [d for d in listed if isinstance(d, dict)] if isinstance(listed, list) else []
    kinds = [str(d.get("type")) for d in parts]
    if kinds == ["ByteLevel"]:
        return Decoding("bytes")
    if kinds == ["WordPiece"] and isinstance(parts[0].get("prefix", "##"), str) and parts[0].get("prefix", "##"):
        return Decoding("words", prefix=parts[0].get("prefix", "##"), clean=bool(parts[0].get("cleanup", True)))
    if kinds == ["Metaspace"]:
        scheme = parts[0].get("prepend_scheme") or ("always" if parts[0].get("add_prefix_space", True) else "never")
        if parts[0].get("replacement") == SPACE:
            return Decoding("pieces", strips=scheme != "never")
    elif kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaced = [d for d in parts if d["type"] == "Replace"]
        stripped = [d for d in parts if d["type"] == "Strip"]
        spaces = all(d.get("pattern") == {"String": SPACE} and d.get("content") == " " for d in replaced)
        fronts = all(d.get("content") == " " and d.get("start") in (0, 1) and not d.get("stop") for d in stripped)
        if replaced and spaces and fronts:
            return Decoding("pieces", strips=any(d["start"] == 1 for d in stripped))
    told = " + ".join(kinds)[:80] or "none"
    raise Unsupported(
        f"{where}: its decoder is {told}: that kind of tokenizer is not supported",
        cure="supported: byte-level BPE, SentencePiece BPE and unigram, WordPiece",
    )


def _added(where: str, listed: list[Added], library: tokenizers.Tokenizer, config: Values | None) -> list[Added]:
    """Added tokens, with those that only tokenizer_config.json knows; each has the id that its file says."""
    known = {a.content for a in listed}
    more = [token for token in added_tokens(config) if token.content not in known]
    for token in more:
        with _heard(where):
            made = tokenizers.AddedToken(
                token.content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                special=token.special,
                normalized=token.normalized,
            )
            library.add_tokens([made])
    for token in listed + more:
        got = library.token_to_id(token.content) if token.content else token.id
        if got != token.id:
            raise BadModelFile(
                f"{where}: the added token {token.content[:80]!r} has the id {token.id}, but becomes {got}"
            )
    return listed + more


def _tokens(
    where: str, library: tokenizers.Tokenizer, added: list[Added], model: Model, size: int
) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int32]]]:
    """Every token's text by id, and its kind. Ids that the tokenizer leaves out, up to the model's size, have no text."""
    base = library.get_vocab(with_added_tokens=False)
    extra = {a.content for a in added}
    top = max((i for text, i in base.items() if text not in extra), default=0)
    if top >= size:
        raise BadModelFile(f"{where} has a token {top}, but config.json says a vocab_size of {size}")
    count = max([size, *(a.id + 1 for a in added)])
    if count > size + MAX_BEYOND:
        raise BadModelFile(f"{where} has an added token {count - 1}, but config.json says a vocab_size of {size}")
    tokens = [""] * count
    types = np.full(count, UNUSED, np.int32)
    for text, i in base.items():
        tokens[i] = text
        types[i] = NORMAL
        if model.byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            types[i] = BYTE if _is_hex(text[3:5]) else NORMAL
    unk = model.unk_id if model.unk_token is None else base.get(model.unk_token)
    if unk is not None and 0 <= unk < count:
        types[unk] = UNKNOWN
    for token in added:
        tokens[token.id] = token.content
        types[token.id] = CONTROL if token.special else USER_DEFINED
    types[types == UNUSED] = CONTROL  # a token without a text is nothing that anybody should see
    return tokens, types


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdefABCDEF" for c in text)


def _around(where: str, library: tokenizers.Tokenizer) -> tuple[int | None, int | None]:
    """The tokens that tokenizer.json puts before and after a text. Flags in tokenizer_config.json do not count, as in
    transformers: they were for tokenizers without that file."""
    with _heard(where):
        bare, dressed = (library.encode("a", add_special_tokens=special).ids for special in (False, True))
    at = next((k for k in range(len(dressed) + 1) if dressed[k : k + len(bare)] == bare), 0)
    before, after = dressed[:at], dressed[at + len(bare) :]
    if len(before) > 1 or len(after) > 1:
        raise Unsupported(
            f"{where} puts {len(before)} tokens before a text and {len(after)} after it: at most one is served"
        )
    return (before[0] if before else None), (after[0] if after else None)
