"""The data sets of a section of the config, opened without a program around them."""

import dataclasses

import numpy as np
import pytest

from kenotron_data import (
    Concatenated,
    Mixture,
    SectionOptions,
    TokenWriter,
    custom_corpus,
    has_index,
    open_section,
    open_tokenizer,
    random_corpus,
    tokenise_section,
)
from kenotron_data.config import (
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
)

S = 7


@pytest.fixture
def options(tmp_path):
    return SectionOptions(
        text_tokenizer=lambda: open_tokenizer("bytes"),
        answer_tokenizer=lambda: open_tokenizer("bytes"),
        cache=tmp_path / "cache",
        vocab_size=257,
        plain_bytes=True,
    )


@pytest.fixture
def texts(tmp_path):
    for name, text in (("a", "one two three " * 20), ("b", "four five " * 30)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(text)
    return [str(tmp_path / name) for name in "ab"]


def samples(data):
    return np.stack([data.sample(i) for i in range(len(data))])


def folder(tmp_path, name, first, tokens):
    path = tmp_path / name
    path.mkdir()
    with TokenWriter(path / "0.ds", 2) as writer:
        writer.add([np.arange(first, first + tokens)])
    return str(path)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_column_of_text_without_columns_is_said_to_do_nothing(in_memory, options, texts):
    section = PretrainDatasetsConfig(hf_dataset_or_datasets=texts[0], text_column_name="content")
    options = dataclasses.replace(options, plain_bytes=in_memory)
    assert "text_column_name 'content' has no effect" in open_section(section, options, S).about
    section = dataclasses.replace(section, text_column_name="text")
    assert "text_column_name" not in open_section(section, options, S).about


def test_text_is_bytes_in_memory_and_its_tail_is_held_out(options, texts):
    corpus = open_section(PretrainDatasetsConfig(hf_dataset_or_datasets=texts[0]), options, S)
    read = bytes(samples(corpus.training)[:, :-1].flatten().tolist()).decode()
    assert ("one two three " * 20).startswith(read) and len(read) > 200
    (held,) = corpus.validation.values()
    assert 0 < len(held) < len(corpus.training) / 5 and not options.cache.exists()
    alone = dataclasses.replace(options, validates=False)
    whole = open_section(PretrainDatasetsConfig(hf_dataset_or_datasets=texts[0]), alone, S)
    assert len(whole.training) > len(corpus.training) and not whole.validation


def test_several_texts_are_kept_in_the_cache_and_follow_one_another(options, texts):
    section = PretrainDatasetsConfig(hf_dataset_or_datasets=texts)
    tokenise_section(section, options)
    kept = sorted(options.cache.rglob("*.ds"))
    assert kept
    corpus = open_section(section, options, S)
    assert isinstance(corpus.training, Concatenated) and list(corpus.validation) == texts
    assert corpus.about.count("kept in") == 2 and sorted(options.cache.rglob("*.ds")) == kept


def test_a_cache_that_cannot_be_written_is_an_error_with_the_remedy(options, texts, tmp_path):
    (tmp_path / "file").write_text("")
    options = dataclasses.replace(options, cache=tmp_path / "file" / "tokens")
    with pytest.raises(ValueError, match="choose another folder; .* set KENOTRON_CACHE"):
        open_section(PretrainDatasetsConfig(hf_dataset_or_datasets=texts), options, S)


def test_folders_of_tokens_are_mixed_by_their_weights(options, tmp_path):
    names = [folder(tmp_path, "x", 0, 800), folder(tmp_path, "y", 10_000, 800)]
    section = NanosetDatasetsConfig(dataset_folder=dict(zip(names, (0.75, 0.25), strict=True)))
    corpus = open_section(section, options, S)
    assert isinstance(corpus.training, Mixture) and list(corpus.validation) == names
    assert [*corpus.training.shares.values()] == [0.75, 0.25]
    one = NanosetDatasetsConfig(dataset_folder=names[0], dataset_max_tokens=[80])
    assert len(open_section(one, options, S).training) == 9  # of 10 samples one is held out


def test_answers_are_read_by_the_tokenizer_of_answers(options, jsonl):
    rows = [{"prompt": f"{n}?", "completion": "yes"} for n in range(20)]
    section = SFTDatasetsConfig(hf_dataset_or_datasets=str(jsonl(rows)))
    corpus = open_section(section, options, 31)
    assert (
        "examples in" in corpus.about
        and len(corpus.training) + sum(map(len, corpus.validation.values())) == 20
    )


def test_data_of_a_program_and_random_tokens():
    random = random_corpus(50, S, 3, held_out=4)
    assert (
        len(random.validation["random"]) == 4 and not random_corpus(50, S, 3, held_out=0).validation
    )
    own = custom_corpus(random.validation["random"], "mine", validates=False)
    assert own.about == "data of one's own: 4 samples" and not own.validation
    stream = custom_corpus(iter([[1, 2, 3]]), "mine", validates=True)
    assert not has_index(stream.training) and "nothing is held out" in stream.about
    many = random_corpus(50, S, 3, held_out=40).validation["random"]
    numbered = custom_corpus(many, "mine", validates=True)
    assert len(numbered.training) == 36 and len(numbered.validation["mine"]) == 4


@pytest.mark.parametrize("plain", [True, False])
def test_documents_of_text_are_kept_apart_where_the_model_does(options, tmp_path, plain):
    (tmp_path / "c").mkdir()
    for name, text in (("1.txt", "abcde"), ("2.txt", "fgh"), ("3.txt", "ijklmnopq")):
        (tmp_path / "c" / name).write_text(text)
    section = PretrainDatasetsConfig(hf_dataset_or_datasets=str(tmp_path / "c"))
    apart = dataclasses.replace(
        options, plain_bytes=plain, validates=False, separate_documents=True
    )
    rows = open_section(section, apart, S).training.rows(np.arange(2))
    ids = [*b"abcde", 256, *b"fgh", 256, *b"ijklmnopq", 256]
    assert rows.tokens.tolist() == [ids[:8], ids[7:15]]
    assert rows.documents.tolist() == [[0] * 6 + [1] * 2, [0] * 3 + [1] * 5]
    assert rows.positions().tolist() == [[0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 0, 1, 2, 3]]
    assert rows.kept_labels().tolist() == [
        [True] * 5 + [False, True],
        [True] * 2 + [False] + [True] * 4,
    ]
    together = dataclasses.replace(options, plain_bytes=plain, validates=False)
    assert open_section(section, together, S).training.rows(np.arange(2)).documents is None
