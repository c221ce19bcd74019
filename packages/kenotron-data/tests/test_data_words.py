"""Looking words up gives the ids that the tokenizer gives, whatever the text and the pattern."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from kenotron_data.tokenizer import wrap_tokenizer
from kenotron_data.word_cache import word_cache

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
TEXT = "the cat's 1234 _mats_ won't  sit\n\n  été naïve don't 12 I'LL, go... x=[1, 2]\r\n\t" * 3


def made(pattern=None, nfc=False, **more):
    tokenizer = Tokenizer(models.BPE(**more))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


TOKENIZERS = {
    "gpt2": made(),
    "llama3": made(LLAMA3),
    "qwen2": made(QWEN2, nfc=True),
}
WRAPPED = {name: wrap_tokenizer(t, end_of_document=False) for name, t in TOKENIZERS.items()}
PIECES = [*TEXT.split(), *"_ \n\t\x1c\x85\xa0²½٣Ⅷªſ🙂\u200d\ufeff", "  ", "\r\n", "<|end|>", "'S"]
PIECES += ["'ſ", "漢字", "e\u0301", "\u1112\u1161"]
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=12)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(parts=st.lists(TEXTS, min_size=1, max_size=4))
def test_ids_are_those_of_the_tokenizer(name, parts):
    tokenizer, texts = TOKENIZERS[name], list(map("".join, parts))
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    WRAPPED[name].words._resting = 0
    found = WRAPPED[name].encode(texts)
    assert [ids.tolist() for ids in found] == expected


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_character_is_cut_as_the_tokenizer_cuts_it(name):
    """Without the comparison of the first documents: the kinds of characters alone must do."""
    tokenizer = TOKENIZERS[name]
    cache = word_cache(tokenizer)
    assert cache is not None
    cache._to_compare = 0
    every = [chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000]
    texts = [f"a{c}b {c}{c} 1{c}1'{c} .{c}\n{c}  {c}" for c in every]
    covered = 0
    for text in texts:
        cache._resting = 0  # all words are new here
        ids = cache.encode([text])[0]
        if ids is not None:
            covered += 1
            assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids, text
    assert covered > 0.6 * len(every)


def test_what_is_common_is_looked_up_and_what_is_not_certain_is_not():
    for tokenizer in TOKENIZERS.values():
        cache = word_cache(tokenizer)
        texts = ["plain text", "été – “quoted”", "a <|end|> b", "x\x1cy", "x²"]
        assert [ids is not None for ids in cache.encode(texts)] == [True, True, False, False, False]
        again = pickle.loads(pickle.dumps(cache))
        assert again.encode(["plain"])[0].tolist() == tokenizer.encode("plain").ids


def test_text_without_words_is_left_to_the_tokenizer():
    cache = word_cache(TOKENIZERS["gpt2"])
    rest = ["".join(chr(0x4E00 + (i * 37 + n) % 9999) for i in range(50)) for n in range(10)]
    assert cache.encode(rest)[0] is not None
    assert cache.encode(rest) == [None] * 10


def test_a_difference_in_the_first_documents_ends_it():
    cache = word_cache(TOKENIZERS["gpt2"])
    cache._words["the"] = b""
    assert cache.encode(["a cat", "the cat"]) == [None, None]
    assert cache.encode(["a cat"]) == [None]


def other(change):
    tokenizer = made()
    change(tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(r"\p{Lu}?\p{L}+|\s+"),
        made(r"\p{L}+|\s+"),
        made(LLAMA3.replace(r"\s*[\r\n]+", r"(\s)*[\r\n]+")),
        made(dropout=0.5),
        other(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace())),
        other(lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel())),
        other(lambda t: setattr(t, "normalizer", normalizers.Lowercase())),
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_other_tokenizers_have_no_cache(tokenizer):
    assert word_cache(tokenizer) is None
    assert wrap_tokenizer(tokenizer, end_of_document=False).words is None
