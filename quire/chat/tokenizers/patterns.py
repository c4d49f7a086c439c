"""Which regular expressions and replacements of a tokenizer.json may run in this process: they are checked before use.

The library's expressions backtrack, so one that somebody made for it can run for hours on a short text, and compiling one
can take all memory. Expressions that public models use are known to be linear and listed here. A file with any other runs
in a process of its own (`isolated.py`). Replacements that could blow a text up are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.chat.tokenizers.pretokenizers import PRE_TOKENIZERS
from quire.chat.tokenizers.spm_text import CharacterMap
from quire.observe.errors import BadModelFile, Unsupported

MAX_NODES = 1000  # steps of normalizing, cutting and so on in one file
MAX_GROWTH = 64  # times that all replacements together may make a text longer
_DROPPING = frozenset(
    [
        *("Strip", "StripAccents", "Nmt", "Precompiled", "BertNormalizer"),
        *("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "CharDelimiterSplit"),
    ]
)
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def _plain(pattern: str) -> str:
    """One spelling for expressions that differ in how they write line ends and quotes."""
    return pattern.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t").replace('\\"', '"')


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT4 = r"(?i:[sdmt]|ll|ve|re)"
_TAIL = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# As the models' own files write them, where the table for GGUF has them otherwise or not at all.
_PUBLIC = (
    rf"'{_GPT4}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    rf"'{_GPT4}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    rf"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_TAIL}",
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{_TAIL}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}{1,2}",
    r"\p{N}",
    r"\d{1,3}",
    r"\d",
    r"[0-9]",
    r"[0-9][0-9][0-9]",
    "[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r" ?[^(\s|[.,!?…。，、।۔،])]+",
    " {2,}",
    r"\s+",
)
KNOWN = frozenset(_plain(p) for p in _PUBLIC) | {_plain(p) for pre in PRE_TOKENIZERS.values() for p in pre.splits}


def is_known(pattern: str) -> bool:
    """Whether the expression is one that public models use, which are linear in the text."""
    return _plain(pattern) in KNOWN


def unknown(where: str, data: dict[str, Any]) -> list[str]:
    """The expressions in a tokenizer.json that are not known. Raises BadModelFile or Unsupported for what cannot be run at all."""
    found: list[str] = []
    growth = 1.0
    for node in _nodes(where, data):
        pattern = node.get("pattern")
        wanted = pattern.get("Regex") if isinstance(pattern, dict) else None
        if isinstance(wanted, str) and not is_known(wanted):
            found.append(wanted)
        kind = node.get("type")
        content = node.get("content")
        if kind in ("Replace", "Prepend") and isinstance(content, str):
            literal = pattern.get("String") if isinstance(pattern, dict) else None
            growth *= max(1.0, len(content) / max(1, len(literal)) if isinstance(literal, str) else len(content))
        if kind == "Precompiled":
            _check_map(where, node.get("precompiled_charsmap"))
    if growth > MAX_GROWTH:
        raise Unsupported(f"{where}: its replacements may make a text {growth:.0f} times longer: at most {MAX_GROWTH}")
    return found


def shrinks(node: Any) -> bool:
    """Whether a step may drop characters or make one of many, so that a text's length says nothing of its tokens."""
    for found in _nodes("", {"normalizer": node}):
        kind, pattern, content = found.get("type"), found.get("pattern"), found.get("content")
        if kind in _DROPPING or (kind == "Split" and found.get("behavior") == "Removed"):
            return True
        if kind == "Replace" and isinstance(pattern, dict) and isinstance(content, str):
            literal = pattern.get("String")
            if not isinstance(literal, str) or len(content) < len(literal):
                return True
    return False


def _nodes(where: str, data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stack: list[Any] = [data.get(part) for part in PARTS]
    seen = 0
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            seen += 1
            if seen > MAX_NODES:
                raise BadModelFile(f"{where} has more than {MAX_NODES} steps")
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _check_map(where: str, given: Any) -> None:
    """A compiled character map: base64 in the file, or a list of bytes in old ones."""
    import base64

    try:
        blob = base64.b64decode(given, validate=True) if isinstance(given, str) else bytes(given or [])
    except (ValueError, TypeError) as e:
        raise BadModelFile(f"{where}: its precompiled_charsmap is not base64: {str(e)[:100]}") from None
    if blob:
        try:
            CharacterMap(blob)
        except BadModelFile as e:
            raise BadModelFile(f"{where}: {e.message}") from None
