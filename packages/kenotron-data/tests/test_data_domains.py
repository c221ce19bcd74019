"""Domains of a section: data sets that are mixed by given weights, under names of their own."""

import dataclasses

import numpy as np
import pytest

from kenotron_data import (
    Mixture,
    SectionOptions,
    TokenWriter,
    open_section,
    open_tokenizer,
    tokenise_section,
)
from kenotron_data.builtin_domains import BUILTIN_DOMAINS
from kenotron_data.config import (
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    domain_section,
)

S = 7
DOMAINS = {"first": 0.75, "second": 0.25}


@pytest.fixture
def options(tmp_path):
    return SectionOptions(
        text_tokenizer=lambda: open_tokenizer("bytes"),
        answer_tokenizer=lambda: open_tokenizer("bytes"),
        cache=tmp_path / "cache",
        vocab_size=257,
        plain_bytes=True,
        domains=DOMAINS,
    )


@pytest.fixture
def texts(tmp_path):
    for name, letter in (("first", "a"), ("second", "b")):
        (tmp_path / "texts" / name).mkdir(parents=True)
        (tmp_path / "texts" / name / "text.txt").write_text(letter * 400)
    return tmp_path / "texts"


def check(corpus):
    assert isinstance(corpus.training, Mixture) and corpus.training.shares == DOMAINS
    assert list(corpus.validation) == list(DOMAINS)
    assert corpus.about.endswith("mixture of first 0.75, second 0.25")
    indices = corpus.training.order(np.arange(64), seed=1, stage=0)
    sources = corpus.training.source_of(indices)
    assert (sources == 0).sum() == 48
    for index, source in zip(indices, sources, strict=True):
        assert corpus.training.sample(int(index))[0] == ord("ab"[source])


def test_one_name_is_a_folder_of_domains(options, texts):
    section = PretrainDatasetsConfig(hf_dataset_or_datasets=f"{texts}/")
    tokenise_section(section, options)
    check(open_section(section, options, S))


def test_data_sets_of_a_list_are_the_domains_in_order(options, texts):
    names = [str(texts / name) for name in DOMAINS]
    section = PretrainDatasetsConfig(hf_dataset_or_datasets=names)
    assert domain_section(section, tuple(DOMAINS)) is section
    check(open_section(section, options, S))


def test_folders_of_tokens_are_domains_too(options, tmp_path):
    for name, letter in (("first", "a"), ("second", "b")):
        (tmp_path / "tokens" / name).mkdir(parents=True)
        with TokenWriter(tmp_path / "tokens" / name / "0.ds", 2) as writer:
            writer.add([np.full(400, ord(letter))])
    section = NanosetDatasetsConfig(dataset_folder=str(tmp_path / "tokens"))
    check(open_section(section, options, S))


def test_each_domain_needs_a_data_set(options, texts):
    three = dataclasses.replace(options, domains={**DOMAINS, "third": 1.0})
    names = [str(texts / name) for name in DOMAINS]
    section = PretrainDatasetsConfig(hf_dataset_or_datasets=names)
    sentence = r"2 data sets have samples, but there are 3 domains \(first, second, third\): give"
    with pytest.raises(ValueError, match=sentence):
        open_section(section, three, S)


def test_the_embedded_corpus_has_four_domains_that_differ(options):
    domains = dict.fromkeys(BUILTIN_DOMAINS, 1.0)
    section = PretrainDatasetsConfig(hf_dataset_or_datasets="python-stdlib")
    wanted = dataclasses.replace(options, domains=domains)
    mixture = open_section(section, wanted, S).training
    assert isinstance(mixture, Mixture) and mixture.sources == ("prose", "code", "names", "sums")
    assert (mixture.sizes > 10_000).all()
    last = bytes(mixture.sample(int(mixture.offsets[3])).tolist())
    assert last == b"0 + 0 = "
    with pytest.raises(ValueError, match="'python-stdlib/verse' was given; the domains of python-"):
        verse = dataclasses.replace(options, domains={"prose": 1.0, "verse": 1.0})
        open_section(section, verse, S)
