"""The data sets that a section of the config names, each in two: to train on, and held out."""

from __future__ import annotations

import contextlib
import errno
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kenotron_data.builtin import builtin_documents
from kenotron_data.config import (
    EMBEDDED_CORPUS,
    HubDatasetsConfig,
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
    domain_section,
)
from kenotron_data.hub import SAVED, cached_tokens, chosen_splits
from kenotron_data.pack import Nanoset, PackedTokens, split
from kenotron_data.row_samples import Dataset
from kenotron_data.sft import supervised
from kenotron_data.source_files import file_pieces
from kenotron_data.subsets import Subset
from kenotron_data.text import text_documents
from kenotron_data.text_pieces import TextFile
from kenotron_data.token_folder import TokenFolder
from kenotron_data.tokenizer import TextTokenizer
from kenotron_data.tokens import encode
from kenotron_data.validation import hold_out_each

HELD_OUT = 0.1
"""Share of a corpus, its tail, that validation keeps when there is any and no split is named."""
FILE_ORDER = 42
"""Seed of the order of files, where it is asked for: Nanotron's."""


@dataclass(frozen=True, kw_only=True)
class SectionOptions:
    """Properties of a run that the data sets it reads depend on."""

    text_tokenizer: Callable[[], TextTokenizer]
    """Opens what makes tokens of documents."""
    answer_tokenizer: Callable[[], Any]
    """Opens what makes tokens of prompts and chats."""
    cache: Path
    """Folder in which tokens of text are kept."""
    vocab_size: int
    """Ids of the model: bytes that it has no id for are left out."""
    plain_bytes: bool
    """True where text becomes bytes, without a limit of a document's length."""
    longest: int | None = None
    """Most tokens of a prompt or chat; None: those of a sample."""
    validates: bool = True
    """True where samples are held out."""
    separate_documents: bool = False
    """True where the model keeps documents apart; samples then tell them apart, and several
    examples may share one."""
    domains: Mapping[str, float] | None = None
    """Names of a section's data sets, in order, and the weights with which they are mixed."""


@dataclass
class SectionDatasets:
    """Data sets by name, and their line in the log."""

    training: dict[str, Dataset]
    held_out: dict[str, Dataset] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)


@contextlib.contextmanager
def _keeping(cache: Path) -> Iterator[None]:
    """Around what may write to the cache: ValueError with the remedy where it cannot."""
    made = False
    try:
        cache.mkdir(parents=True, exist_ok=True)
        made = True
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # for who starts this again
        refused = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)
        if full or (made and error.errno not in refused):
            raise
        raise ValueError(
            f"the cache {cache} cannot be written ({error}): choose another folder; for a program, "
            "set KENOTRON_CACHE to one that can be written"
        ) from error


def tokenise_section(section: PretrainDatasetsConfig, options: SectionOptions) -> None:
    """Tokenise the data sets of a section that are kept in the cache, with all its processes.

    ``dataset_overwrite_cache`` is obeyed here alone: call it once for a training, before ranks
    start or on all of them together. Raises as ``cached_tokens`` does.
    """
    section = domain_section(section, tuple(options.domains)) if options.domains else section
    if _is_in_memory(section, options):
        return
    tokenizer = options.text_tokenizer()
    for name, fraction in section.fractions.items():
        if fraction:
            own = replace(section, hf_dataset_or_datasets={name: fraction})
            for validation in (False, True):
                if not validation or _has_validation(section, options):
                    with _keeping(options.cache):
                        cached_tokens(own, tokenizer, options.cache, validation=validation)


def text_datasets(
    section: PretrainDatasetsConfig, options: SectionOptions, sequence: int
) -> SectionDatasets:
    """Plain text: bytes in memory, or tokens in the cache; samples of ``sequence`` + 1 tokens.

    Raises OSError or ValueError when something is missing, damaged, or too small.
    """
    if _is_in_memory(section, options):
        return _bytes_in_memory(section, options, sequence)
    tokenizer = options.text_tokenizer()
    about = _no_columns(section)

    def read(own: PretrainDatasetsConfig, name: str, validation: bool) -> Dataset:
        tokens = _cached(own, tokenizer, options.cache, validation)
        about.append(f"{name}: {len(tokens):,} tokens, kept in {tokens.path}")
        return PackedTokens(tokens, sequence, separate_documents=options.separate_documents)

    return _each(section, options, read, about)


def answer_datasets(
    section: SFTDatasetsConfig, options: SectionOptions, sequence: int
) -> SectionDatasets:
    """Prompts and chats, of which the answers alone are learned; raises as ``text_datasets``.

    Several examples share a sample where the model keeps documents apart.
    """
    tokenizer, pack = options.answer_tokenizer(), options.separate_documents
    left = {False: section.debug_max_samples, True: section.debug_max_samples}
    about = []

    def read(own: SFTDatasetsConfig, name: str, validation: bool) -> Dataset | None:
        most = left[validation]
        if most == 0:
            return None
        own = replace(own, debug_max_samples=most)
        found = supervised(
            own, tokenizer, sequence, pack=pack, validation=validation, longest=options.longest
        )
        if most is not None:
            left[validation] = most - found.rows_read
        about.append(
            f"{name}: {found.examples:,} examples in {len(found):,} samples; left out: "
            f"{found.too_long:,} too long, {found.not_learned:,} without an answer"
        )
        return found

    return _each(section, options, read, about)


def folder_datasets(
    section: NanosetDatasetsConfig, options: SectionOptions, sequence: int
) -> SectionDatasets:
    """Folders of token files; positions start again at 0 with each document if asked."""
    sources: dict[str, Dataset] = {}
    limits = section.dataset_max_tokens or [0] * len(section.folders)
    order = FILE_ORDER if section.shuffle_files else None
    for name, limit in zip(section.folders, limits, strict=True):
        folder = _read_from(section, name)
        tokens = TokenFolder(folder, section.token_size_in_bytes, shuffle_files=order)
        samples = Nanoset(tokens, sequence, separate_documents=section.return_positions)
        wanted = limit // (sequence + 1)
        sources[name] = Subset(samples, 0, wanted) if 0 < wanted < len(samples) else samples
    return _held_out(options, sources)


def _each(
    section: HubDatasetsConfig,
    options: SectionOptions,
    read: Callable[[Any, str, bool], Dataset | None],
    about: list[str],
) -> SectionDatasets:
    """Read every data set of a section by itself, and its split for validation where one is."""
    parts: dict[bool, dict[str, Dataset]] = {False: {}, True: {}}
    wanted = (False, True) if _has_validation(section, options) else (False,)
    named = [(name, share) for name, share in section.fractions.items() if share]
    for validation, (name, share) in itertools.product(wanted, named):
        own = replace(section, hf_dataset_or_datasets={name: share})
        try:
            found = read(own, name, validation)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name}: {error}" if len(named) > 1 else str(error)) from error
        if found is not None:
            parts[validation][name] = found
    if len(wanted) > 1:
        return SectionDatasets(parts[False], parts[True], about)
    return replace(_held_out(options, parts[False]), about=about)


def _held_out(options: SectionOptions, sources: dict[str, Dataset]) -> SectionDatasets:
    if not options.validates:
        return SectionDatasets(sources)
    return SectionDatasets(*hold_out_each(sources, HELD_OUT))


def _has_validation(section: HubDatasetsConfig, options: SectionOptions) -> bool:
    """Return whether a split is named to validate on, and validation is asked for."""
    if not options.validates or len(section.splits) == 1:
        return False
    training = chosen_splits(section.splits, validation=False)
    return len(training) < len(section.splits)


def _cached(
    section: PretrainDatasetsConfig, tokenizer: TextTokenizer, cache: Path, validation: bool
) -> TokenFolder:
    """Tokens of the cache; if missing, this process makes them (or waits for another)."""
    here = replace(
        section, dataset_overwrite_cache=False, dataset_processing_num_proc_per_process=1
    )
    with _keeping(cache):
        return cached_tokens(here, tokenizer, cache, validation=validation)


def _is_in_memory(section: PretrainDatasetsConfig, options: SectionOptions) -> bool:
    """Return whether a section is one corpus of plain text that is read as bytes.

    Files of tokens know where documents begin, bytes in memory do not.
    """
    name = section.hf_dataset_or_datasets
    if not options.plain_bytes or options.separate_documents or not isinstance(name, str):
        return False
    if section.splits != ("train",) or section.hf_dataset_config_name is not None:
        return False
    return name == EMBEDDED_CORPUS or _is_text(Path(name))


def _is_text(path: Path) -> bool:
    """Return whether there are files of text, which have no columns."""
    if not path.exists() or any((path / file).is_file() for file in SAVED):
        return False
    return all(isinstance(piece, TextFile) for piece in file_pieces(path))


def _no_columns(section: PretrainDatasetsConfig) -> list[str]:
    """A line for each data set without columns, where one is named."""
    column = section.text_column_name
    return [
        f"{name}: this is text without columns; text_column_name {column!r} has no effect"
        for name in section.fractions
        if column != "text"
        if name.partition("/")[0] == EMBEDDED_CORPUS or _is_text(Path(name))
    ]


def _bytes_in_memory(
    section: PretrainDatasetsConfig, options: SectionOptions, sequence: int
) -> SectionDatasets:
    name = str(section.hf_dataset_or_datasets)
    documents = builtin_documents() if name == EMBEDDED_CORPUS else text_documents(Path(name))
    tokens = encode(documents, options.vocab_size)
    about = _no_columns(section)
    if section.dataset_overwrite_cache or section.dataset_processing_num_proc_per_process > 1:
        about += [
            f"{name}: text is read as bytes in memory; dataset_overwrite_cache and "
            "dataset_processing_num_proc_per_process have no effect"
        ]
    if not options.validates:
        return SectionDatasets({name: PackedTokens(tokens, sequence)}, {}, about)
    training, held = split(tokens, HELD_OUT)
    return SectionDatasets(
        {name: PackedTokens(training, sequence)}, {name: PackedTokens(held, sequence)}, about
    )


def _read_from(section: NanosetDatasetsConfig, folder: str) -> str:
    """The copy of a folder to read, where one is named and there."""
    if section.read_paths is None:
        return folder
    copy = section.read_paths[section.folders.index(folder)]
    return copy if Path(copy).is_dir() else folder
