"""The tokenizer and the chat template of a folder as Hugging Face lays it out.

tokenizer.json goes to the `tokenizers` library whole, so text is cut and merged as transformers would. Owned here: what the
library does not say (exact token bytes, which tokens are control, what ends a turn, which begin and end tokens are put
around a text) and what it would do without a word (drop characters that no token expresses). Files are hostile: every
complaint names its file. Kinds of tokenizer whose tokens have no bytes of their own are refused by name.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import tokenizers

from quire.chat.bpe import ALPHABET
from quire.chat.spm import SPACE
from quire.chat.template import MAX_SOURCE, ChatTemplate
from quire.chat.tokenizer import Tokenizer, control_of
from quire.chat.vocab import BYTE, CONTROL, MAX_TOKENS, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, end_ids, raw
from quire.chat.vocab import where as where_is
from quire.observe.errors import BadModelFile, BadRequest, NotFound, QuireError, Unsupported

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

FILE = "tokenizer.json"
MAX_FILE = 128 << 20  # bytes; the largest public ones have 35 million
MAX_BEYOND = 1 << 16  # added tokens beyond the model's vocabulary
MAX_TEMPLATES = 16
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})

Kind = Literal["bytes", "pieces"]


class Added(msgspec.Struct):
    """An entry of added_tokens."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class Model(msgspec.Struct):
    """What is looked at of the merging model; its vocabulary is the library's business."""

    type: str | None = None
    unk_token: str | None = None
    byte_fallback: bool | None = None
    fuse_unk: bool | None = None


class File(msgspec.Struct):
    """What is looked at of a tokenizer.json."""

    model: Model
    added_tokens: list[Added] = []
    decoder: Any = None


def read_tokenizer(folder: Folder) -> Tokenizer:
    """The folder's tokenizer. Raises BadModelFile, Unsupported or NotFound, naming the file."""
    where = os.path.join(folder.path, FILE)
    text = folder.text(FILE, MAX_FILE)
    if text is None:
        raise _absent(folder)
    try:
        file = msgspec.json.decode(text, type=File)
    except (msgspec.DecodeError, RecursionError) as e:
        raise BadModelFile(f"{where}: {e}") from None
    if file.model.type not in (None, "BPE"):
        raise Unsupported(f"{where}: a tokenizer of type {file.model.type!r} is not supported", cure="supported: BPE")
    kind, strips = _decoding(where, file.decoder)
    library = _library(where, text)
    config = folder.values("tokenizer_config.json")
    added = _added(where, file.added_tokens, library, config)
    tokens, types = _tokens(where, library, added, file.model, folder.config.count("vocab_size", most=MAX_TOKENS))
    ids = {name: library.token_to_id(text) for name, text in _names(folder, config).items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    before, after = _around(where, library)
    named = [eos, *_ends(folder, len(tokens))]
    vocab = Vocabulary(
        model="hub",
        pre="",
        tokens=tokens,
        types=types,
        scores=None,
        merges=(),
        bos_id=bos if before is None else before,
        eos_id=eos if after is None else after,
        unk_id=None if file.model.unk_token is None else library.token_to_id(file.model.unk_token),
        eos_ids=end_ids(tokens, types, named),
        add_bos=before is not None,
        add_eos=after is not None,
        add_space_prefix=None,
        architecture=folder.architecture,
    )
    encoder = HubEncoder(where, library, vocab, kind, file.model, any(a.lstrip or a.rstrip for a in added))
    prefix = kind == "pieces" and strips
    return Tokenizer(vocab, encoder, add_bos=before is not None, add_eos=after is not None, space_prefix=prefix)


class HubEncoder:
    """Text to ids by the library, ids to bytes by what the decoder of the file says tokens are."""

    def __init__(
        self, where: str, library: tokenizers.Tokenizer, vocab: Vocabulary, kind: Kind, model: Model, strips: bool
    ):
        self._where = where
        self._library = library
        self._vocab = vocab
        self._kind = kind
        self._control = control_of(vocab)
        if kind == "bytes":
            known = set(library.get_vocab(with_added_tokens=False))
            have = {byte for char, byte in ALPHABET.items() if char in known}
        else:
            have = {int(vocab.tokens[i][3:5], 16) for i in where_is(vocab.types == BYTE)}
        self._have = bytes(sorted(have))
        lacking = bool(set(range(256)) - have - _NEVER_IN_UTF8)
        if kind == "pieces" and lacking and model.unk_token is None:
            raise BadModelFile(
                f"{where} has {len(have)} of 256 byte tokens and no unknown token: some texts could not be expressed"
            )
        self._lacking = kind == "bytes" and lacking and model.unk_token is None
        self.unbounded = strips or (lacking and bool(model.fuse_unk))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        if parse_special:
            return self._library.encode(text, add_special_tokens=False).ids
        ids = self._plain.encode(text, add_special_tokens=False).ids
        control = self._control.intersection(ids) - {self._vocab.unk_id}
        if control:
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
        if kind == NORMAL:
            if self._kind == "pieces":
                return raw(text.replace(SPACE, " "))
            try:
                return bytes(map(ALPHABET.__getitem__, text))
            except KeyError:
                pass  # added as it is, not in the byte alphabet
        return raw(text)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer, with control tokens under names that nobody can write. Ids stay what they are."""
        data = json.loads(self._library.to_str())
        secret = secrets.token_hex(16)
        names = {self._vocab.tokens[i]: f"\0{secret}-{i}" for i in self._control if self._vocab.tokens[i]}
        for token in data["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = data["model"]
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
        pairs = ((m if isinstance(m, list) else m.split(" ", 1)) for m in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if not names.keys() & {a, b, a + b}]
        model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
        data["post_processor"] = None
        return _library(self._where, json.dumps(data))


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


def _absent(folder: Folder) -> Exception:
    for other in ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt"):
        if os.path.exists(os.path.join(folder.path, other)):
            return Unsupported(
                f"{folder.path} has {other} and no {FILE}: that kind of tokenizer file is not read yet",
                cure="transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
    return NotFound(f"{folder.path} has no {FILE}: the model has no tokenizer", cure="fetch it too")


def _decoding(where: str, decoder: Any) -> tuple[Kind, bool]:
    """What tokens are made of, and whether a text loses the space in front of it."""
    listed = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    parts = [d for d in listed if isinstance(d, dict)] if isinstance(listed, list) else []
    kinds = [str(d.get("type")) for d in parts]
    if kinds == ["ByteLevel"]:
        return "bytes", False
    if kinds == ["Metaspace"]:
        scheme = parts[0].get("prepend_scheme") or ("always" if parts[0].get("add_prefix_space", True) else "never")
        if parts[0].get("replacement") == SPACE:
            return "pieces", scheme != "never"
    elif kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaced = [d for d in parts if d["type"] == "Replace"]
        stripped = [d for d in parts if d["type"] == "Strip"]
        spaces = all(d.get("pattern") == {"String": SPACE} and d.get("content") == " " for d in replaced)
        fronts = all(d.get("content") == " " and d.get("start") in (0, 1) and not d.get("stop") for d in stripped)
        if replaced and spaces and fronts:
            return "pieces", any(d["start"] == 1 for d in stripped)
    told = " + ".join(kinds)[:80] or "none"
    raise Unsupported(
        f"{where}: its decoder is {told}: that kind of tokenizer is not supported",
        cure="supported: byte-level BPE, and SentencePiece BPE with byte fallback",
    )


def _added(where: str, listed: list[Added], library: tokenizers.Tokenizer, config: Values | None) -> list[Added]:
    """Added tokens, with those that only tokenizer_config.json knows; each has the id that its file says."""
    known = {a.content for a in listed}
    more: list[Added] = []
    for key, entry in ((config and config.get("added_tokens_decoder")) or {}).items():
        try:
            token = msgspec.convert({**entry, "id": int(key)}, Added)
        except (msgspec.ValidationError, TypeError, ValueError) as e:
            raise BadModelFile(f"{config and config.where}: added_tokens_decoder[{str(key)[:40]!r}]: {e}") from None
        if token.content not in known:
            more.append(token)
    for token in sorted(more, key=lambda t: t.id):
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
    unk = None if model.unk_token is None else base.get(model.unk_token)
    if unk is not None:
        types[unk] = UNKNOWN
    for token in added:
        tokens[token.id] = token.content
        types[token.id] = CONTROL if token.special else USER_DEFINED
    types[types == UNUSED] = CONTROL  # a token without a text is nothing that anybody should see
    return tokens, types


def _is_hex(text: str) -> bool:
    return all(c in "0123456789abcdefABCDEF" for c in text)


def _names(folder: Folder, config: Values | None) -> dict[str, str]:
    """bos_token and the like -> its text."""
    found: dict[str, str] = {}
    for values in (folder.values("special_tokens_map.json"), config):  # the later one wins
        if values is None:
            continue
        for name in _NAMED:
            value = values.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if value is not None and not isinstance(value, str):
                raise BadModelFile(f"{values.where}: {name} is {repr(value)[:60]}: a string is needed")
            if value is not None:
                found[name] = value
    return found


def _ends(folder: Folder, count: int) -> list[int]:
    """Ids that end generation, as generation_config.json and config.json list them; those that cannot come are left out."""
    generation = folder.values("generation_config.json")
    listed = [*(generation.ids("eos_token_id") if generation else []), *folder.config.ids("eos_token_id")]
    return [i for i in listed if i < count]


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


def read_template(folder: Folder, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The folder's chat template, or None: such a model takes completions, not chat."""
    config = folder.values("tokenizer_config.json")
    where, named = _templates(folder, config)
    if not named:
        return None
    default = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    if default is None:
        raise BadModelFile(f"{where} has the chat templates {', '.join(sorted(named))} and no default")
    names = _names(folder, config)
    bos, eos = names.pop("bos_token", ""), names.pop("eos_token", "")
    tools = named.get("tool_use")
    with_tools = ChatTemplate(tools, bos, eos, where=where, more=names) if tools else None
    return ChatTemplate(default, bos, eos, where=where, more=names, with_tools=with_tools)


def _templates(folder: Folder, config: Values | None) -> tuple[str, dict[str, str]]:
    """Where they were found, and the templates by name. Files of their own come before tokenizer_config.json."""
    path = Path(folder.path)
    found: dict[str, str] = {}
    for name, file in [("default", "chat_template.jinja"), *_more_templates(path)]:
        text = folder.text(file, 4 * MAX_SOURCE)
        if text is not None:
            found[name] = text
    if found:
        return str(path / "chat_template.jinja"), found
    for values in (folder.values("chat_template.json"), config):
        given = None if values is None else values.get("chat_template")
        if given is None:
            continue
        where = f"{values.where}, chat_template" if values else ""
        if isinstance(given, str):
            return where, {"default": given}
        pairs = [(k, v) for k, v in given.items()] if isinstance(given, dict) else _pairs(given)
        if pairs is None or not all(isinstance(k, str) and isinstance(v, str) for k, v in pairs):
            raise BadModelFile(f"{where} is neither a template nor a list of named ones")
        return where, dict(pairs)
    return "", {}


def _pairs(given: Any) -> list[tuple[Any, Any]] | None:
    if not isinstance(given, list) or len(given) > MAX_TEMPLATES or not all(isinstance(t, dict) for t in given):
        return None
    return [(t.get("name"), t.get("template")) for t in given]


def _more_templates(path: Path) -> list[tuple[str, str]]:
    folder = path / "additional_chat_templates"
    if not folder.is_dir():
        return []
    return [(p.stem, f"{folder.name}/{p.name}") for p in sorted(folder.glob("*.jinja"))[:MAX_TEMPLATES]]
