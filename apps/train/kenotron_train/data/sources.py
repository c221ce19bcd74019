"""The data sets that a section of the config names, each in two: to train on, and held out."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kenotron_config import Config
from kenotron_data import (
    SAVED,
    Dataset,
    Nanoset,
    PackedTokens,
    Subset,
    TextFile,
    TextTokenizer,
    TokenFolder,
    builtin_documents,
    cached_tokens,
    chosen_splits,
    encode,
    file_pieces,
    hold_out_each,
    split,
    supervised,
    text_documents,
)
from kenotron_data.config import (
    EMBEDDED_CORPUS,
    HubDatasetsConfig,
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
)
from kenotron_train.data.vocabulary import answer_tokenizer, text_tokenizer

HELD_OUT = 0.1
"""Share of a corpus, its tail, that validation keeps when there is any and no split is named."""
FILE_ORDER = 42
"""Seed of the order of files, where it is asked for: Nanotron's."""


@dataclass
class Sources:
    """Data sets by name, and their line in the log."""

    training: dict[str, Dataset]
    held_out: dict[str, Dataset] = field(default_factory=dict)
    about: list[str] = field(default_factory=list)


def cache_folder() -> Path:
    """Where tokens of text are kept: below KENOTRON_CACHE, or ~/.cache/kenotron."""
    named = os.environ.get("KENOTRON_CACHE")
    return (Path(named) if named else Path.home() / ".cache" / "kenotron") / "tokens"


@contextlib.contextmanager
def _keeping() -> Iterator[None]:
    """Around what may write to the cache: ValueError with the remedy where it cannot."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise
        raise ValueError(
            f"tokens cannot be kept in {cache_folder()} ({error}): set KENOTRON_CACHE to a folder "
            "that can be written"
        ) from error


def make_cache(config: Config, section: PretrainDatasetsConfig) -> None:
    """Tokenise the data sets of a section that are kept in the cache, with all its processes.

    ``dataset_overwrite_cache`` is obeyed here alone: call it once for a training, before ranks
    start or on all of them together. Raises as ``cached_tokens`` does.
    """
    if _is_in_memory(config, section):
        return
    tokenizer = text_tokenizer(config)
    for name, fraction in section.fractions.items():
        if fraction:
            own = replace(section, hf_dataset_or_datasets={name: fraction})
            for validation in (False, True):
                if not validation or _has_validation(config, section):
                    with _keeping():
                        cached_tokens(own, tokenizer, cache_folder(), validation=validation)


def text_sources(config: Config, section: PretrainDatasetsConfig, sequence: int) -> Sources:
    """Plain text: bytes in memory, or tokens in the cache; samples of ``sequence`` + 1 tokens.

    Raises OSError or ValueError when something is missing, damaged, or too small.
    """
    if _is_in_memory(config, section):
        return _bytes_in_memory(config, section, sequence)
    tokenizer = text_tokenizer(config)
    about = []

    def read(own: PretrainDatasetsConfig, name: str, validation: bool) -> Dataset:
        tokens = _cached(own, tokenizer, validation)
        about.append(f"{name}: {len(tokens):,} tokens, kept in {tokens.path}")
        return PackedTokens(tokens, sequence)

    found = _each(config, section, read)
    found.about = about
    return found


def answer_sources(config: Config, section: SFTDatasetsConfig, sequence: int) -> Sources:
    """Prompts and chats, of which the answers alone are learned; raises as ``text_sources``.

    Several examples share a sample where the model keeps documents apart.
    """
    tokenizer, longest = answer_tokenizer(config), config.tokenizer.tokenizer_max_length
    pack = config.decoder.separate_documents
    left = {False: section.debug_max_samples, True: section.debug_max_samples}
    about = []

    def read(own: SFTDatasetsConfig, name: str, validation: bool) -> Dataset | None:
        most = left[validation]
        if most == 0:
            return None
        own = replace(own, debug_max_samples=most)
        found = supervised(
            own, tokenizer, sequence, pack=pack, validation=validation, longest=longest
        )
        if most is not None:
            left[validation] = most - found.examples - found.too_long - found.not_learned
        about.append(
            f"{name}: {found.examples:,} examples in {len(found):,} samples; left out: "
            f"{found.too_long:,} too long, {found.not_learned:,} without an answer"
        )
        return found

    sources = _each(config, section, read)
    sources.about = about
    return sources


def folder_sources(config: Config, section: NanosetDatasetsConfig, sequence: int) -> Sources:
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
    return _held_out(config, sources)


def _each(
    config: Config,
    section: HubDatasetsConfig,
    read: Callable[[Any, str, bool], Dataset | None],
) -> Sources:
    """Read every data set of a section by itself, and its split for validation where one is."""
    parts: dict[bool, dict[str, Dataset]] = {False: {}, True: {}}
    wanted = (False, True) if _has_validation(config, section) else (False,)
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
        return Sources(parts[False], parts[True])
    return _held_out(config, parts[False])


def _held_out(config: Config, sources: dict[str, Dataset]) -> Sources:
    if not config.tokens.limit_val_batches:
        return Sources(sources)
    return Sources(*hold_out_each(sources, HELD_OUT))


def _has_validation(config: Config, section: HubDatasetsConfig) -> bool:
    """Whether a split is named to validate on, and validation is asked for."""
    if not config.tokens.limit_val_batches or len(section.splits) == 1:
        return False
    training = chosen_splits(section.splits, validation=False)
    return len(training) < len(section.splits)


def _cached(
    section: PretrainDatasetsConfig, tokenizer: TextTokenizer, validation: bool
) -> TokenFolder:
    """Tokens of the cache; if missing, this process makes them (or waits for another)."""
    here = replace(
        section, dataset_overwrite_cache=False, dataset_processing_num_proc_per_process=1
    )
    with _keeping():
        return cached_tokens(here, tokenizer, cache_folder(), validation=validation)


def _is_in_memory(config: Config, section: PretrainDatasetsConfig) -> bool:
    """Whether a section is one corpus of plain text that is read as bytes."""
    name = section.hf_dataset_or_datasets
    tokenizer = config.tokenizer
    if tokenizer.tokenizer_name_or_path or tokenizer.tokenizer_max_length:
        return False
    if not isinstance(name, str):
        return False
    if section.splits != ("train",) or section.hf_dataset_config_name is not None:
        return False
    if name == EMBEDDED_CORPUS:
        return True
    path = Path(name)
    if not path.exists() or any((path / file).is_file() for file in SAVED):
        return False
    return all(isinstance(piece, TextFile) for piece in file_pieces(path))


def _bytes_in_memory(config: Config, section: PretrainDatasetsConfig, sequence: int) -> Sources:
    name = str(section.hf_dataset_or_datasets)
    documents = builtin_documents() if name == EMBEDDED_CORPUS else text_documents(Path(name))
    tokens = encode(documents, config.model.model_config.vocab_size)
    about = []
    if section.dataset_overwrite_cache or section.dataset_processing_num_proc_per_process > 1:
        about = [
            f"{name}: text is read as bytes in memory; dataset_overwrite_cache and "
            "dataset_processing_num_proc_per_process have no effect"
        ]
    if not config.tokens.limit_val_batches:
        return Sources({name: PackedTokens(tokens, sequence)}, {}, about)
    training, held = split(tokens, HELD_OUT)
    return Sources(
        {name: PackedTokens(training, sequence)}, {name: PackedTokens(held, sequence)}, about
    )


def _read_from(section: NanosetDatasetsConfig, folder: str) -> str:
    """The copy of a folder to read, where one is named and there."""
    if section.read_paths is None:
        return folder
    copy = section.read_paths[section.folders.index(folder)]
    return copy if Path(copy).is_dir() else folder
