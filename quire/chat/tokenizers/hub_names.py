"""The small files of a tokenizer's folder: the names of its tokens, the added ones, and which end generation.

Knows tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json and config.json, and no
tokenizer. Files are hostile: every complaint names its file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quire.chat.tokenizers.vocab import MAX_TOKENS
from quire.observe.errors import BadModelFile

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

MAX_BEYOND = 1 << 16  # added tokens beyond the model's vocabulary
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Added(msgspec.Struct):
    """An entry of added_tokens."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


def added_tokens(config: Values | None) -> list[Added]:
    """The added tokens that tokenizer_config.json lists, by id; the first of two with one text counts."""
    decoder = None if config is None else config.inside("added_tokens_decoder")
    found: list[Added] = []
    for key, entry in decoder.raw.items() if decoder else ():
        try:
            token = msgspec.convert({**entry, "id": int(key)}, Added)
        except (msgspec.ValidationError, TypeError, ValueError) as e:
            raise BadModelFile(f"{decoder and decoder.where}[{str(key)[:40]!r}]: {e}") from None
        checked(str(decoder and decoder.where), token.content)
        found.append(token)
    found.sort(key=lambda token: token.id)
    first = {token.content: token for token in reversed(found)}
    return [token for token in found if first[token.content] is token]


def checked(where: str, text: str) -> str:
    """The text of a token. JSON can write what is no text: half a surrogate pair."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadModelFile(f"{where}: the token {ascii(text)[:80]} is not text") from None
    return text


def named_tokens(folder: Folder, config: Values | None) -> dict[str, str]:
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
                found[name] = checked(values.where, value)
    return found


def end_tokens(folder: Folder, count: int) -> list[int]:
    """Ids that end generation, as generation_config.json and config.json list them; those that cannot come are left out."""
    generation = folder.values("generation_config.json")
    listed = [*(generation.ids("eos_token_id") if generation else []), *folder.config.ids("eos_token_id")]
    return [i for i in listed if i < count]


def vocab_size(folder: Folder) -> int:
    """The number of rows that the model has for tokens, as config.json says; of a model in parts, its text part."""
    config = folder.config
    inner = config.inside("text_config")
    if "vocab_size" not in config and inner is not None:
        config = inner
    return config.count("vocab_size", most=MAX_TOKENS)
