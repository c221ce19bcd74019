"""Data of a stage of training: the data sets of a section, one after the other or mixed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from kenotron_data.config import (
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
    domain_section,
)
from kenotron_data.mixture import Mixture
from kenotron_data.pack import RandomTokens
from kenotron_data.row_samples import Dataset
from kenotron_data.section_datasets import (
    HELD_OUT,
    SectionDatasets,
    SectionOptions,
    answer_datasets,
    folder_datasets,
    text_datasets,
)
from kenotron_data.subsets import Concatenated
from kenotron_data.validation import hold_out


@dataclass(frozen=True)
class Corpus:
    """The data sets of one stage of training."""

    training: Dataset | Iterable[Any]
    """An iterable has no index: it is read once, in its order."""
    validation: Mapping[str, Dataset] = field(default_factory=dict)
    """Held-out samples, by the name of their source."""
    about: str = ""
    """Its line in the log."""


def has_index(data: Dataset | Iterable[Any]) -> TypeGuard[Dataset]:
    """Return whether samples are found by their number."""
    return hasattr(data, "sample")


def open_section(
    section: PretrainDatasetsConfig | NanosetDatasetsConfig | SFTDatasetsConfig,
    options: SectionOptions,
    sequence: int,
) -> Corpus:
    """Open the data sets of a section: files are mapped; bytes of text and examples are in memory.

    Domains, and several folders of tokens, are mixed by their weights; other data sets follow one
    another.

    Args:
        section: which data sets.
        options: what they need to know of the run.
        sequence: tokens of a sample, without the last target.

    Raises:
        OSError, ValueError: something is missing, is damaged, or holds too little.
        ImportError: a library that reads it is not installed.
    """
    if options.domains is not None:
        section = domain_section(section, tuple(options.domains))
    if isinstance(section, NanosetDatasetsConfig):
        found = folder_datasets(section, options, sequence)
    elif isinstance(section, SFTDatasetsConfig):
        found = answer_datasets(section, options, sequence)
    else:
        found = text_datasets(section, options, sequence)
    if options.domains is not None:
        return _of_domains(found, options.domains)
    if isinstance(section, NanosetDatasetsConfig):
        return _mixed(section, found)
    return _one_after_the_other(found)


def random_corpus(vocab_size: int, sequence: int, seed: int, *, held_out: int) -> Corpus:
    """Random tokens, and as many samples of others as are ``held_out``, if any."""
    held = RandomTokens(vocab_size, sequence, seed + 1, samples=held_out) if held_out else None
    return Corpus(RandomTokens(vocab_size, sequence, seed), {"random": held} if held else {})


def custom_corpus(data: Dataset | Iterable[Any], name: str, *, validates: bool) -> Corpus:
    """Data that a program brings, of which a share is held out where samples have an index.

    Args:
        data: samples by their number, or in an order of their own.
        name: what validation calls them.
        validates: whether samples are held out.
    """
    if not has_index(data):
        about = "data of one's own without an index: read once, in its order"
        return Corpus(data, about=about + "; nothing is held out" * validates)
    if not validates:
        return Corpus(data, about=f"data of one's own: {len(data):,} samples")
    training, held = hold_out(data, HELD_OUT)
    about = f"data of one's own: {len(training):,} samples, {len(held or ()):,} held out"
    return Corpus(training, {name: held} if held else {}, about)


def _one_after_the_other(found: SectionDatasets) -> Corpus:
    parts = list(found.training.values())
    training = parts[0] if len(parts) == 1 else Concatenated(found.training)
    return Corpus(training, found.held_out, "\n".join(found.about))


def _mixed(section: NanosetDatasetsConfig, found: SectionDatasets) -> Corpus:
    """One folder, or a mixture of several."""
    names = list(found.training)
    if len(names) == 1:
        return Corpus(found.training[names[0]], found.held_out)
    weights = section.weights
    shares = None if weights is None else dict(zip(names, weights, strict=True))
    mixture = Mixture(found.training, shares)
    return Corpus(mixture, found.held_out, _described(mixture))


def _of_domains(found: SectionDatasets, domains: Mapping[str, float]) -> Corpus:
    """A mixture whose sources have the names of the domains."""
    if len(found.training) != len(domains):
        raise ValueError(
            f"{len(found.training)} data sets have samples, but there are {len(domains)} domains "
            f"({', '.join(domains)}): give one data set for each"
        )
    name_of = dict(zip(found.training, domains, strict=True))
    training = {name_of[name]: data for name, data in found.training.items()}
    held_out = {name_of[name]: data for name, data in found.held_out.items()}
    mixture = Mixture(training, domains)
    return Corpus(mixture, held_out, "\n".join([*found.about, _described(mixture)]))


def _described(mixture: Mixture) -> str:
    shares = ", ".join(f"{name} {share:.4g}" for name, share in mixture.shares.items())
    return f"mixture of {shares}"
