"""Documents cut after a number of tokens, tokenizers without an end, the embedded corpus."""

import json

import pytest

from kenotron_data import ShortenedTokens, builtin_documents, cached_tokens, open_tokenizer
from kenotron_data.config import PretrainDatasetsConfig, SFTDatasetsConfig
from kenotron_data.sft import supervised


@pytest.mark.parametrize(("longest", "ids"), [(9, [97, 98, 99, 256]), (3, [97, 98, 256])])
def test_a_document_is_cut_and_keeps_its_end(longest, ids):
    short = ShortenedTokens(tokenizer=open_tokenizer("bytes"), longest=longest)
    found, other = short.encode(["abc", ""])
    assert (found.tolist(), other.tolist()) == (ids, [256])
    assert (short.name, short.vocab_size, short.end) == ("bytes", 257, 256)


def test_without_an_end_the_first_ids_are_kept():
    plain = open_tokenizer("bytes", end_of_document=False)
    (found,) = ShortenedTokens(tokenizer=plain, longest=2).encode(["abc"])
    assert found.tolist() == [97, 98]
    with pytest.raises(ValueError, match="at least 1 token, but 0"):
        ShortenedTokens(tokenizer=plain, longest=0)


def test_another_length_is_another_entry_of_the_cache(tmp_path, jsonl):
    path = jsonl([{"text": "abcdef"}, {"text": "gh"}])
    config = PretrainDatasetsConfig(hf_dataset_or_datasets=str(path))
    sizes = {}
    for longest in (3, 4, 100):
        short = ShortenedTokens(tokenizer=open_tokenizer("bytes"), longest=longest)
        sizes[longest] = len(cached_tokens(config, short, tmp_path / "cache"))
    assert sizes == {3: 3 + 3, 4: 4 + 3, 100: 7 + 3}


def test_an_end_is_taken_where_a_tokenizer_names_one(tmp_path, bpe_file, chat_folder):
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_file=str(bpe_file)).save_pretrained(tmp_path)
    assert open_tokenizer(str(tmp_path), end_of_document=None).end is None
    assert open_tokenizer(str(chat_folder), end_of_document=None).end is not None
    with pytest.raises(ValueError, match="names no token that ends a document"):
        open_tokenizer(str(tmp_path))


def test_what_has_no_revisions_says_so(bpe_file, chat_folder):
    for name in ("bytes", str(bpe_file)):
        with pytest.raises(ValueError, match="has no revisions, but 'v1' was given"):
            open_tokenizer(name, revision="v1")
    with pytest.raises(ValueError, match="none', revision 'v1': transformers cannot open it"):
        open_tokenizer(str(chat_folder / "none"), revision="v1")


def test_the_embedded_corpus_is_one_of_several(tmp_path, jsonl, monkeypatch):
    texts = builtin_documents(limit=50_000)
    monkeypatch.setattr("kenotron_data.builtin_text.builtin_documents", lambda: texts)
    path = jsonl([{"text": "ab"}])
    config = PretrainDatasetsConfig(hf_dataset_or_datasets={"python-stdlib": 0.5, str(path): 1})
    tokens = cached_tokens(config, open_tokenizer("bytes"), tmp_path / "cache")
    half = texts[: len(texts) // 2]
    assert tokens.documents == len(half) + 1
    assert len(tokens) == sum(len(text.encode()) + 1 for text in half) + 3


def test_examples_that_are_too_long_for_the_tokenizer_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": "ab", "completion": "c" * n} for n in (1, 5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDatasetsConfig(hf_dataset_or_datasets=str(path))
    found = supervised(config, open_tokenizer("bytes"), 20, longest=6)
    assert (found.examples, found.too_long) == (1, 1)
