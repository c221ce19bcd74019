"""What a stage of training reads: text made into tokens, folders of tokens, or made-up tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron_data import (
    Batch,
    Concatenated,
    Cursor,
    Dataset,
    Loader,
    Mixture,
    Nanoset,
    PackedTokens,
    RandomTokens,
    Subset,
    TokenFolder,
    builtin_documents,
    encode,
    hold_out_each,
    split,
    text_documents,
    validation_batches,
)
from kenotron_data.config import EMBEDDED_CORPUS, NanosetDatasetsConfig
from kenotron_dist import Mesh
from kenotron_train.config import Config

HELD_OUT = 0.1
"""Share of a corpus, its tail, that validation keeps when there is any."""
FILE_ORDER = 42
"""Seed of the order of files, where it is asked for: Nanotron's."""
MaskTargets = Callable[[Tensor, int], Any]


@dataclass(frozen=True)
class Corpus:
    """The data sets of one stage of training."""

    training: Dataset
    validation: Dataset | None
    about: str = ""
    """What the log says of it."""


def open_corpus(config: Config, stage: int) -> Corpus:
    """Open the data of a stage; text is read whole, folders of tokens are mapped.

    Raises ValueError that names the key when a path is missing, is damaged, or holds too little.
    """
    source = config.data_stages[stage].data
    path = f"data_stages.{stage}.data.dataset"
    if source.dataset is None:
        return _made_up(config, source.seed)
    if isinstance(source.dataset, NanosetDatasetsConfig):
        try:
            return _folders(config, source.dataset)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}.dataset_folder: {error}") from error
    name = getattr(source.dataset, "hf_dataset_or_datasets", None)
    try:
        return _text(config, name if isinstance(name, str) else "")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}.hf_dataset_or_datasets: {error}; give a local text file, a folder of them, or "
            f"{EMBEDDED_CORPUS} (data sets are not downloaded)"
        ) from error


def open_loader(
    config: Config,
    mesh: Mesh,
    corpus: Corpus,
    cursor: Cursor,
    target_mask: MaskTargets | None = None,
) -> Loader:
    """This data rank's batches of a stage from ``cursor`` on."""
    return Loader(
        corpus.training,
        **_rows(config, mesh),
        seed=config.data_stages[cursor.stage].data.seed,
        cursor=cursor,
        target_mask=target_mask,
    )


def open_validation(config: Config, mesh: Mesh, dataset: Dataset) -> Iterator[Batch]:
    """This data rank's part of the held-out samples, in order."""
    return validation_batches(dataset, **_rows(config, mesh))


def _rows(config: Config, mesh: Mesh) -> dict[str, Any]:
    """The rows of every step on this rank, and the ids that they may have."""
    return {
        "micro_batch_size": config.tokens.micro_batch_size,
        "microbatches": config.tokens.batch_accumulation_per_replica,
        "dp_rank": mesh["dp"].rank,
        "dp_size": mesh["dp"].size,
        "vocab_size": config.decoder.vocab_size,
    }


def _made_up(config: Config, seed: int) -> Corpus:
    vocab, sequence = config.decoder.vocab_size, config.tokens.sequence_length
    held = RandomTokens(vocab, sequence, seed + 1, samples=config.global_batch_size)
    training = RandomTokens(vocab, sequence, seed)
    return Corpus(training, held if config.tokens.limit_val_batches else None)


def _text(config: Config, name: str) -> Corpus:
    documents = builtin_documents() if name == EMBEDDED_CORPUS else text_documents(Path(name))
    tokens = encode(documents, config.decoder.vocab_size)
    sequence = config.tokens.sequence_length
    if not config.tokens.limit_val_batches:
        return Corpus(PackedTokens(tokens, sequence), None)
    training, held_out = split(tokens, HELD_OUT)
    return Corpus(PackedTokens(training, sequence), PackedTokens(held_out, sequence))


def _folders(config: Config, section: NanosetDatasetsConfig) -> Corpus:
    """One folder, or a mixture of several; positions start anew with each document if asked."""
    sources: dict[str, Dataset] = {}
    limits = section.dataset_max_tokens or [0] * len(section.folders)
    for name, limit in zip(section.folders, limits, strict=True):
        sources[name] = _folder(config, section, _read_from(section, name), limit)
    held: dict[str, Dataset] = {}
    if config.tokens.limit_val_batches:
        sources, held = hold_out_each(sources, HELD_OUT)
    names = list(sources)
    if len(names) == 1:
        return Corpus(sources[names[0]], held.get(names[0]))
    weights = section.weights
    mixture = Mixture(sources, None if weights is None else dict(zip(names, weights, strict=True)))
    shares = ", ".join(f"{name} {share:.4g}" for name, share in mixture.shares.items())
    return Corpus(mixture, Concatenated(held) if held else None, f"mixture of {shares}")


def _folder(
    config: Config, section: NanosetDatasetsConfig, folder: str, most_tokens: int
) -> Dataset:
    order = FILE_ORDER if section.shuffle_files else None
    tokens = TokenFolder(folder, section.token_size_in_bytes, shuffle_files=order)
    sequence = config.tokens.sequence_length
    samples = Nanoset(tokens, sequence, separate_documents=section.return_positions)
    wanted = most_tokens // (sequence + 1)
    return Subset(samples, 0, wanted) if 0 < wanted < len(samples) else samples


def _read_from(section: NanosetDatasetsConfig, folder: str) -> str:
    """The copy of a folder to read, where one is named and there."""
    if section.read_paths is None:
        return folder
    copy = section.read_paths[section.folders.index(folder)]
    return copy if Path(copy).is_dir() else folder
