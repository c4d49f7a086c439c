"""Texts to vectors through a tokenizer and an engine: special tokens, pairs, cuts, prompts, shorter embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM
from quire.observe.errors import BadRequest
from tests.unit.chat.embedder_kit import opened
from tests.unit.models import encoders

torch = pytest.importorskip("torch", reason="needs torch: the test extra")
transformers = pytest.importorskip("transformers", reason="needs transformers: the test extra")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{c}" for c in "abcdefghij")]
WORDS += ["cat", "dog", "sits", "runs", "the", "a1", ".", ","]
WORDS += [f"w{i}" for i in range(120 - len(WORDS))]


def folder(path: Path, kind: str = "bert", **beside: Any) -> tuple[Path, Any, Any]:
    """A tiny encoder with a WordPiece tokenizer: the folder, transformers' model and its tokenizer."""
    model = encoders.build(kind)
    encoders.save(model, path, pooling=None if kind.endswith("score") else "mean", **beside)
    (path / "vocab.txt").write_text("\n".join(WORDS))
    theirs = transformers.BertTokenizerFast(vocab_file=str(path / "vocab.txt"))
    theirs.save_pretrained(path)
    return path, model, theirs


def wanted(model: Any, theirs: Any, text: str, most: int | None = None) -> Any:
    with torch.no_grad():
        rows = model(
            **theirs(text, return_tensors="pt", truncation=most is not None, max_length=most)
        ).last_hidden_state
    one = rows[0].mean(dim=0).numpy()
    return one / np.linalg.norm(one)


async def test_texts_of_all_lengths_as_transformers_has_them(tmp_path: Path):
    path, model, theirs = folder(tmp_path / "m")
    texts = ["the cat sits.", "", "dog", "the dog runs, a cat sits " * 5, "zzz unknown", "Cat [SEP] dog"]
    async with opened(path) as embedder:
        made = await embedder.embed(texts)
        ids = await embedder.embed([theirs(text).input_ids for text in texts])
    for text, one, by_ids in zip(texts, made, ids, strict=True):
        np.testing.assert_allclose(one.vector, wanted(model, theirs, text), atol=2e-5)
        assert one.vector.tobytes() == by_ids.vector.tobytes()
        assert one.tokens == len(theirs(text).input_ids) and one.cut == 0


async def test_a_long_text_is_refused_or_cut_as_asked(tmp_path: Path):
    path, model, theirs = folder(tmp_path / "m", sentence_bert_config={"max_seq_length": 12})
    text = "the cat sits " * 10
    async with opened(path) as embedder:
        with pytest.raises(BadRequest, match=r"inputs\[1\] has 32 tokens.*12") as refused:
            await embedder.embed(["dog", text], param="inputs")
        assert refused.value.code == "context_length_exceeded"
        [one] = await embedder.embed([text], truncate=True)
        assert (one.tokens, one.cut) == (12, 20)
        np.testing.assert_allclose(one.vector, wanted(model, theirs, text, 12), atol=2e-5)
        for most, ends in ((8, False), (8, True), (3, True)):
            theirs.truncation_side = "left" if ends else "right"
            [one] = await embedder.embed([text], most=most, ends=ends)
            assert (one.tokens, one.cut) == (most, 32 - most)
            np.testing.assert_allclose(one.vector, wanted(model, theirs, text, most), atol=2e-5)
        ids = list(range(5, 12))
        for ends, kept in ((False, ids[:4]), (True, ids[-4:])):
            [one], [same] = await embedder.embed([ids], most=4, ends=ends), await embedder.embed([kept])
            assert one.vector.tobytes() == same.vector.tobytes() and one.cut == 3
        with pytest.raises(BadRequest, match="leave none for the text"):
            await embedder.embed([text], most=2)
        with pytest.raises(BadRequest, match="13"):
            await embedder.embed([[5] * 13])
        [one] = await embedder.embed([[5] * 13], truncate=True)
        assert (one.tokens, one.cut) == (12, 1)


async def test_scores_of_pairs_are_those_of_a_cross_encoder(tmp_path: Path):
    path, model, theirs = folder(tmp_path / "m", "bert-score")
    pairs = [("the cat", "sits"), ("dog", "the dog runs a lot " * 4), ("", "cat"), ("the dog runs " * 4, "cat.")]
    for most, truncate in ((80, False), (11, True), (10, True)):
        async with opened(path, context=most) as embedder:
            made = await embedder.score(pairs, truncate=truncate)
            with pytest.raises(BadRequest, match="no embeddings"):
                await embedder.embed(["x"])
        for (a, b), one in zip(pairs, made, strict=True):
            given = theirs(a, b, return_tensors="pt", truncation="longest_first", max_length=most)
            with torch.no_grad():
                score = float(torch.sigmoid(model(**given).logits[0, 0]))
            assert one.tokens == given.input_ids.shape[1]
            assert one.score == pytest.approx(score, abs=2e-5), (a, b, most)


async def test_two_end_tokens_lie_between_the_texts_of_a_roberta(tmp_path: Path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(["<s>", "<pad>", "</s>", "<unk>", *alphabet])}
    bpe = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    marks = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, unk_token="<unk>", **marks)
    model = encoders.build("roberta-score", vocab_size=len(vocab))
    path = encoders.save(model, tmp_path / "m")
    theirs.save_pretrained(path)
    given = theirs("the cat", "sits", return_tensors="pt", return_token_type_ids=False)
    assert given.input_ids[0, 8:10].tolist() == [2, 2]
    with torch.no_grad():
        score = float(torch.sigmoid(model(**given).logits[0, 0]))
    async with opened(path) as embedder:
        [one] = await embedder.score([("the cat", "sits")])
    assert (one.tokens, one.score) == (given.input_ids.shape[1], pytest.approx(score, abs=2e-5))


async def test_an_embedding_model_scores_by_cosine_and_counts_a_text_once(tmp_path: Path):
    path, model, theirs = folder(tmp_path / "m")
    async with opened(path) as embedder:
        made = await embedder.score([("the cat", "dog"), ("the cat", "cat"), ("the cat", "the cat")])
    u = wanted(model, theirs, "the cat")
    for text, one in zip(("dog", "cat", "the cat"), made, strict=True):
        assert one.score == pytest.approx(float(u @ wanted(model, theirs, text)), abs=2e-5)
    assert [one.tokens for one in made] == [4 + 3, 3, 0]


async def test_prompts_go_before_a_text(tmp_path: Path):
    prompts = {"prompts": {"query": "the cat: ", "document": ""}, "default_prompt_name": "query"}
    path, model, theirs = folder(tmp_path / "m", config_sentence_transformers=prompts)
    async with opened(path) as embedder:
        [default] = await embedder.embed(["dog"])
        [query] = await embedder.embed(["dog"], prompt="query")
        [document] = await embedder.embed(["dog"], prompt="document")
        with pytest.raises(BadRequest, match=r"no prompt called 'x'.*document, query"):
            await embedder.embed(["dog"], prompt="x")
    assert default.vector.tobytes() == query.vector.tobytes()
    np.testing.assert_allclose(query.vector, wanted(model, theirs, "the cat: dog"), atol=2e-5)
    np.testing.assert_allclose(document.vector, wanted(model, theirs, "dog"), atol=2e-5)


async def test_shorter_embeddings_only_where_the_model_allows_them(tmp_path: Path):
    path, _, _ = folder(tmp_path / "m")
    async with opened(path) as embedder:
        [whole] = await embedder.embed(["dog"], dimensions=64)
        with pytest.raises(BadRequest, match="64 numbers"):
            await embedder.embed(["dog"], dimensions=32)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace("{", '{"matryoshka_dimensions": [16, 32],', 1))
    async with opened(path) as embedder:
        [short] = await embedder.embed(["dog"], dimensions=32)
        for wrong in (0, 31, 65, -1):
            with pytest.raises(BadRequest, match="16, 32"):
                await embedder.embed(["dog"], dimensions=wrong)
    cut = whole.vector[:32]
    np.testing.assert_allclose(short.vector, cut / np.linalg.norm(cut), atol=1e-6)


def test_the_library(tmp_path: Path):
    path, model, theirs = folder(tmp_path / "m")
    with LLM(str(path), threads=1, backend="native") as llm:
        made = llm.embed(["the cat", "dog"])
        assert made.shape == (2, 64) and made.dtype == np.float32
        np.testing.assert_allclose(made[1], wanted(model, theirs, "dog"), atol=2e-5)
        assert llm.embed("dog").tobytes() == made[1:].tobytes()
        assert llm.score("dog", ["dog", "cat"])[0] == pytest.approx(1.0, abs=1e-6)
        for ask in (llm.generate, lambda text: llm.chat([{"role": "user", "content": text}])):
            with pytest.raises(BadRequest, match="cannot generate"):
                ask("hello")
