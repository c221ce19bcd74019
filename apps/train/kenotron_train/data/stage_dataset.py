"""Data of a stage of training: text, folders of tokens, one's own, or random tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron_data import (
    Corpus,
    Cursor,
    IterableLoader,
    Loader,
    SectionOptions,
    custom_corpus,
    has_index,
    open_section,
    random_corpus,
    tokenise_section,
)
from kenotron_data.config import (
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
)
from kenotron_dist import Mesh
from kenotron_train.data.own_data import Hook, own_data
from kenotron_train.data.vocabulary import answer_tokenizer, text_tokenizer
from kenotron_train.data_plan import DataPlan

MaskTargets = Callable[[Tensor, int], Any]
Section = PretrainDatasetsConfig | NanosetDatasetsConfig | SFTDatasetsConfig


def section_options(data: DataPlan) -> SectionOptions:
    """Return what data sets need to know of a run. Tokens are kept below KENOTRON_CACHE."""
    tokenizer, vocab_size = data.tokenizer, data.vocab_size
    named = os.environ.get("KENOTRON_CACHE")
    return SectionOptions(
        text_tokenizer=partial(text_tokenizer, tokenizer, vocab_size),
        answer_tokenizer=partial(answer_tokenizer, tokenizer, vocab_size),
        cache=(Path(named) if named else Path.home() / ".cache" / "kenotron") / "tokens",
        vocab_size=vocab_size,
        plain_bytes=not (tokenizer.tokenizer_name_or_path or tokenizer.tokenizer_max_length),
        longest=tokenizer.tokenizer_max_length,
        validates=data.tokens.limit_val_batches > 0,
        separate_documents=data.separate_documents,
        domains=None if data.doremi is None else data.doremi.shares,
    )


def prepare(data: DataPlan) -> None:
    """Make the tokens that stages keep in the cache, with as many processes as they ask for.

    For programs, before ranks are started; without it the first rank to read makes them, alone.
    Raises ValueError naming the key.
    """
    made: list[PretrainDatasetsConfig] = []
    for number, stage in enumerate(data.stages):
        section = stage.data.dataset
        if isinstance(section, PretrainDatasetsConfig) and section not in made:
            with _naming(number, section):
                tokenise_section(section, section_options(data))
            made.append(section)


def check_folders(data: DataPlan) -> None:
    """Find missing, damaged and too small folders of tokens, before there are ranks.

    Raises ValueError naming the key.
    """
    for number, stage in enumerate(data.stages):
        section = stage.data.dataset
        if isinstance(section, NanosetDatasetsConfig):
            with _naming(number, section):
                open_section(section, section_options(data), data.sequences[number])


def open_corpus(data: DataPlan, stage: int, hook: Hook | None = None) -> Corpus:
    """Open the data of a stage: files are mapped; bytes of text and examples are kept in memory.

    ``hook`` is what a stage without a data set reads.

    Raises ValueError that names the key when something is missing, is damaged, or holds too little.
    """
    section = data.stages[stage].data.dataset
    if section is None:
        return _without_section(data, stage, hook)
    with _naming(stage, section):
        return open_section(section, section_options(data), data.sequences[stage])


def open_loader(
    data: DataPlan,
    mesh: Mesh,
    corpus: Corpus,
    cursor: Cursor,
    target_mask: MaskTargets | None = None,
) -> Loader | IterableLoader:
    """This data rank's batches of a stage from ``cursor`` on."""
    stage = data.stages[cursor.stage]
    sizes = _rows(data, mesh, cursor.stage)
    sizes["microbatches"] = partial(data.batches.microbatches, cursor.stage)
    sizes["batch"] = partial(data.batches.at, cursor.stage)
    if has_index(corpus.training):
        return Loader(
            corpus.training,
            seed=stage.data.seed,
            cursor=cursor,
            target_mask=target_mask,
            workers=stage.data.num_loading_workers,
            **sizes,
        )
    stream: Any = corpus.training
    ahead = 2 if stage.data.num_loading_workers else 0
    return IterableLoader(
        stream, cursor=cursor, target_mask=target_mask, prefetch=ahead, name=stage.name, **sizes
    )


class _naming:
    """A context whose errors become ValueErrors that name the key of a stage's data sets."""

    def __init__(self, stage: int, section: Section) -> None:
        folders = isinstance(section, NanosetDatasetsConfig)
        key = "dataset_folder" if folders else "hf_dataset_or_datasets"
        self._path = f"data_stages.{stage}.data.dataset.{key}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError | ValueError | ImportError):
            text = str(error)
            named = text.startswith(("tokenizer.", "model.", "the cache "))
            raise ValueError(text if named else f"{self._path}: {text}") from error


def _rows(data: DataPlan, mesh: Mesh, stage: int) -> dict[str, Any]:
    """The rows of every step on this rank, and the ids that they may have."""
    return {
        "micro_batch_size": data.tokens.micro_batch_size,
        "microbatches": data.tokens.batch_accumulation_per_replica,
        "dp_rank": mesh["dp"].rank,
        "dp_size": mesh["dp"].size,
        "vocab_size": data.ids_of(stage),
    }


def _without_section(data: DataPlan, stage: int, hook: Hook | None) -> Corpus:
    """Data of one's own, or random tokens."""
    validates = data.tokens.limit_val_batches > 0
    name, seed = data.stages[stage].name, data.stages[stage].data.seed
    own = own_data(hook, name)
    if own is not None:
        return custom_corpus(own, name, validates=validates)
    return random_corpus(
        data.vocab_size,
        data.sequences[stage],
        seed,
        held_out=data.global_batch_size * validates,
    )
