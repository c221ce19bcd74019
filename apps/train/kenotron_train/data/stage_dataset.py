"""What a stage of training reads: text, folders of tokens, data of one's own, or made-up tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch import Tensor

from kenotron_config import Config
from kenotron_data import (
    Batch,
    Concatenated,
    Cursor,
    Dataset,
    IterableLoader,
    Loader,
    Mixture,
    RandomTokens,
    hold_out,
    validation_batches,
)
from kenotron_data.config import (
    NanosetDatasetsConfig,
    PretrainDatasetsConfig,
    SFTDatasetsConfig,
)
from kenotron_dist import Mesh
from kenotron_train.data.own_data import Hook, own_data
from kenotron_train.data.sources import (
    HELD_OUT,
    Sources,
    answer_sources,
    folder_sources,
    make_cache,
    text_sources,
)

MaskTargets = Callable[[Tensor, int], Any]


@dataclass(frozen=True)
class Corpus:
    """The data sets of one stage of training."""

    training: Dataset | Iterable[Any]
    """An iterable has no index: it is read once, in its order."""
    validation: Mapping[str, Dataset] = field(default_factory=dict)
    """What is held out, by the name of its source."""
    about: str = ""
    """Its line in the log."""


def prepare(config: Config) -> None:
    """Make the tokens that stages keep in the cache, with as many processes as they ask for.

    For programs, before ranks are started; without it the first rank to read makes them, alone.
    Raises ValueError naming the key.
    """
    made: list[PretrainDatasetsConfig] = []
    for number, stage in enumerate(config.data_stages):
        section = stage.data.dataset
        if isinstance(section, PretrainDatasetsConfig) and section not in made:
            with _naming(number, "hf_dataset_or_datasets"):
                make_cache(config, section)
            made.append(section)


def check_folders(config: Config) -> None:
    """Find missing, damaged and too small folders of tokens, before there are ranks.

    Raises ValueError naming the key.
    """
    for number, stage in enumerate(config.data_stages):
        section = stage.data.dataset
        if isinstance(section, NanosetDatasetsConfig):
            with _naming(number, "dataset_folder"):
                folder_sources(config, section, config.sequence_of(number))


def open_corpus(config: Config, stage: int, hook: Hook | None = None) -> Corpus:
    """Open the data of a stage: files are mapped; bytes of text and examples are kept in memory.

    ``hook`` is what a stage without a data set reads.

    Raises ValueError that names the key when something is missing, is damaged, or holds too little.
    """
    section = config.data_stages[stage].data.dataset
    sequence = config.sequence_of(stage)
    if section is None:
        return _without_section(config, stage, hook)
    if isinstance(section, NanosetDatasetsConfig):
        with _naming(stage, "dataset_folder"):
            return _of_folders(section, folder_sources(config, section, sequence))
    with _naming(stage, "hf_dataset_or_datasets"):
        if isinstance(section, SFTDatasetsConfig):
            return _one_after_the_other(answer_sources(config, section, sequence))
        return _one_after_the_other(text_sources(config, section, sequence))


def open_loader(
    config: Config,
    mesh: Mesh,
    corpus: Corpus,
    cursor: Cursor,
    target_mask: MaskTargets | None = None,
) -> Loader | IterableLoader:
    """This data rank's batches of a stage from ``cursor`` on."""
    data = config.data_stages[cursor.stage].data
    sizes = _rows(config, mesh)
    if has_index(corpus.training):
        return Loader(
            corpus.training,
            seed=data.seed,
            cursor=cursor,
            target_mask=target_mask,
            workers=data.num_loading_workers,
            **sizes,
        )
    stream: Any = corpus.training
    ahead = 2 if data.num_loading_workers else 0
    name = config.data_stages[cursor.stage].name
    return IterableLoader(
        stream, cursor=cursor, target_mask=target_mask, prefetch=ahead, name=name, **sizes
    )


def open_validation(config: Config, mesh: Mesh, dataset: Dataset) -> Iterator[Batch]:
    """This data rank's part of held-out samples, in order."""
    return validation_batches(dataset, **_rows(config, mesh))


def has_index(data: Dataset | Iterable[Any]) -> TypeGuard[Dataset]:
    """Whether samples are found by their number."""
    return hasattr(data, "sample")


class _naming:
    """A context whose errors become ValueErrors that name a stage's key."""

    def __init__(self, stage: int, key: str) -> None:
        self._path = f"data_stages.{stage}.data.dataset.{key}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError | ValueError | ImportError):
            text = str(error)
            named = text.startswith(("tokenizer.", "model."))
            raise ValueError(text if named else f"{self._path}: {text}") from error


def _rows(config: Config, mesh: Mesh) -> dict[str, Any]:
    """The rows of every step on this rank, and the ids that they may have."""
    return {
        "micro_batch_size": config.tokens.micro_batch_size,
        "microbatches": config.tokens.batch_accumulation_per_replica,
        "dp_rank": mesh["dp"].rank,
        "dp_size": mesh["dp"].size,
        "vocab_size": config.model.model_config.vocab_size,
    }


def _without_section(config: Config, stage: int, hook: Hook | None) -> Corpus:
    """Data of one's own, or made-up tokens."""
    validates = config.tokens.limit_val_batches > 0
    name, seed = config.data_stages[stage].name, config.data_stages[stage].data.seed
    own = own_data(hook, name)
    if own is None:
        vocab, sequence = config.model.model_config.vocab_size, config.sequence_of(stage)
        held = RandomTokens(vocab, sequence, seed + 1, samples=config.global_batch_size)
        return Corpus(RandomTokens(vocab, sequence, seed), {"random": held} if validates else {})
    if not has_index(own):
        about = "data of one's own without an index: read once, in its order"
        return Corpus(own, about=about + "; nothing is held out" * validates)
    if not validates:
        return Corpus(own, about=f"data of one's own: {len(own):,} samples")
    training, held = hold_out(own, HELD_OUT)
    about = f"data of one's own: {len(training):,} samples, {len(held or ()):,} held out"
    return Corpus(training, {name: held} if held else {}, about)


def _one_after_the_other(sources: Sources) -> Corpus:
    parts = list(sources.training.values())
    training = parts[0] if len(parts) == 1 else Concatenated(sources.training)
    return Corpus(training, sources.held_out, "\n".join(sources.about))


def _of_folders(section: NanosetDatasetsConfig, sources: Sources) -> Corpus:
    """One folder, or a mixture of several."""
    names = list(sources.training)
    if len(names) == 1:
        return Corpus(sources.training[names[0]], sources.held_out)
    weights = section.weights
    shares = None if weights is None else dict(zip(names, weights, strict=True))
    mixture = Mixture(sources.training, shares)
    said = ", ".join(f"{name} {share:.4g}" for name, share in mixture.shares.items())
    return Corpus(mixture, sources.held_out, f"mixture of {said}")
