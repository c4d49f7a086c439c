"""Small tokenizers as folders, trained here and saved by transformers: byte-level BPE, and SentencePiece BPE both ways it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.weights.folder import Folder

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It isn't 1234 years old, it's 42!",
    "Ω ≈ 3.14 — naïve café, déjà vu 🎉 こんにちは世界",
    "def f(x):\n    return x + 1  # twice\n\n\tif x: pass",
    "<|im_start|>user says hello<|im_end|>",
] * 3
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_level(path: Path, size: int = 500, **settings: Any) -> Any:
    """The transformers tokenizer that was saved: Qwen's kind, with added tokens special and not, stripping and not."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    made.add_special_tokens([AddedToken("<|wide|>", special=True, rstrip=True, lstrip=True)])
    return save(made, path, eos_token="<|im_end|>", pad_token="<|endoftext|>", **settings)


def sentencepiece(path: Path, *, old: bool = False, **settings: Any) -> Any:
    """Llama 2's kind: spaces as U+2581, bytes as a last resort, <s> in front. `old`: by a normalizer, as files of then."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    space = "\u2581"
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="first", split=True)
    learner.train_from_iterator(CORPUS[:1] + CORPUS[2:3], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    state = json.loads(learner.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    vocab = {t: i for i, t in enumerate([*first, *sorted(state["vocab"], key=state["vocab"].__getitem__)])}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in state["merges"]]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if old:
        made.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return save(made, path, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings)


def unigram(path: Path, *, byte_fallback: bool = False, **settings: Any) -> Any:
    """T5's kind: pieces with scores, </s> after a text. With byte fallback, no character is unknown."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    learner = Tokenizer(models.Unigram())
    learner.normalizer = normalizers.NFKC()
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    learner.train_from_iterator(CORPUS, trainer)
    pieces = [tuple(p) for p in json.loads(learner.to_str())["model"]["vocab"]]
    if byte_fallback:
        pieces += [(f"<0x{b:02X}>", -30.0) for b in range(256)]
    made = Tokenizer(models.Unigram(pieces, 2, byte_fallback))
    made.normalizer, made.pre_tokenizer = learner.normalizer, learner.pre_tokenizer
    space = "\u2581"
    made.decoder = decoders.Metaspace()
    if byte_fallback:
        made.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Replace(space, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<pad>", "</s>", "<unk>")])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A $B </s>", special_tokens=[("</s>", 1)]
    )
    return save(made, path, eos_token="</s>", unk_token="<unk>", pad_token="<pad>", **settings)


def wordpiece(path: Path, **settings: Any) -> Any:
    """BERT's kind: lower case, words cut at punctuation, [CLS] and [SEP] around a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    return save(made, path, **named, **settings)


def save(made: Any, path: Path, **settings: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False, **settings)
    tokenizer.save_pretrained(path)
    if not (path / "config.json").exists():
        size = max(tokenizer.get_vocab().values()) + 1
        (path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": size}))
    return tokenizer


def edit(path: Path, **changes: Any) -> None:
    """Other values in a JSON file; None takes a key out."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def folder(path: Path) -> Folder:
    return Folder.open(path)
