"""The arguments of the data, as plain dataclasses (no torch, no YAML here).

Fields have Nanotron's names and the shape that was given; properties tell what it means. Classes
raise ValueError, a line for each problem: field, value given, what is needed."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kenotron_data.batch_ramp import BatchRampConfig

__all__ = [
    "EMBEDDED_CORPUS",
    "BatchRampConfig",
    "HUB_FIELD",
    "DataConfig",
    "DatasetStageConfig",
    "HubDatasetsConfig",
    "NanosetDatasetsConfig",
    "PretrainDatasetsConfig",
    "SFTDatasetsConfig",
    "domain_section",
]

EMBEDDED_CORPUS = "python-stdlib"
"""The dataset name of the corpus that needs no download: the standard library's sources."""
HUB_FIELD = "hf_dataset_or_datasets"
"""The field that names data sets of text."""


@dataclass(frozen=True, kw_only=True)
class HubDatasetsConfig:
    """Rows that are read, and their data sets: the fields that both kinds of text have."""

    hf_dataset_or_datasets: str | list[str] | dict[str, float]
    """Name or path of a data set, several, or the fraction that is used of each."""
    hf_dataset_splits: str | list[str] = "train"
    """Part of the data set, or several."""
    hf_dataset_config_name: str | None = None
    """Configuration of the data set; None: its default."""
    dataset_processing_num_proc_per_process: int = 1
    """Processes that tokenise."""
    dataset_overwrite_cache: bool = False
    """True: what is in the cache is tokenised again."""

    @property
    def fractions(self) -> dict[str, float]:
        """The fraction that is used of each data set, by name, in the order given."""
        return _fractions(self.hf_dataset_or_datasets)

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits, in the order given."""
        return _several(self.hf_dataset_splits)


@dataclass(frozen=True, kw_only=True)
class PretrainDatasetsConfig(HubDatasetsConfig):
    """Text to be tokenised: one data set, several, or fractions of several.

    A data set called `python-stdlib` is the embedded corpus.
    """

    text_column_name: str = "text"
    """Column of the text."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*_hub_problems(self)]
        if not _is_name(self.text_column_name):
            found.append(f"text_column_name: {self.text_column_name!r} was given; name a column")
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class SFTDatasetsConfig(HubDatasetsConfig):
    """Prompts and completions, or messages of a chat; only answers are learned."""

    sft_dataloader: bool = True
    """Marks the section as one of prompts and completions; must be true."""
    debug_max_samples: int | None = None
    """Use this many samples at most; None: all."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*_hub_problems(self)]
        if not self.sft_dataloader:
            found.append(
                "sft_dataloader: false was given; it must be true, or leave it out and give "
                "text_column_name for plain text"
            )
        if self.debug_max_samples is not None and self.debug_max_samples < 1:
            found.append(
                f"debug_max_samples: {self.debug_max_samples} was given; it must be at least 1, or "
                "null for all"
            )
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class NanosetDatasetsConfig:
    """Folders of token files, and how much of each is read."""

    dataset_folder: str | list[str] | dict[str, float]
    """A folder, several, or the weight of each."""
    dataset_weights: list[float] | None = None
    """One weight for each folder, in any unit; None: in proportion to their samples."""
    dataset_read_path: str | list[str] | None = None
    """Local copy of each folder, read instead of it if it is there."""
    tokenizer_name: str | None = None
    """The tokenizer of the files; None takes what their metadata say."""
    vocab_size: int | None = None
    """Ids of the tokenizer; None or -1 takes what the model has."""
    token_size_in_bytes: int | None = None
    """Bytes of a token, 2 or 4; None takes what the files' metadata say."""
    return_positions: bool = True
    """True: positions start again at 0 with each document."""
    skip_in_stream: bool = False
    """No effect: any sample is found at once."""
    pad_samples_to_global_batch_size: bool = False
    """No effect: epochs follow one another within a batch."""
    dataset_max_tokens: list[int] | None = None
    """Read this many tokens of each folder at most; None: all."""
    shuffle_files: bool = False
    """True: files are read in a shuffled order; samples always are."""
    use_old_brrr_dataloader: bool = False
    """No effect: there is one loader."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = [*_names("dataset_folder", self.dataset_folder, "folder", _weight)]
        if not found:  # lists are compared with the folders
            found += self._lists()
        if self.tokenizer_name is not None and not self.tokenizer_name:
            found.append("tokenizer_name: '' was given; name a tokenizer, or null")
        if self.vocab_size is not None and self.vocab_size < 1 and self.vocab_size != -1:
            found.append(
                f"vocab_size: {self.vocab_size} was given; it must be at least 1, or -1 or null to "
                "take the model's"
            )
        if self.token_size_in_bytes not in (None, 2, 4):
            found.append(f"token_size_in_bytes: {self.token_size_in_bytes} was given; it is 2 or 4")
        _raise(found)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders, in the order given."""
        return _several(self.dataset_folder)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The weight of each folder; None: in proportion to their samples."""
        if isinstance(self.dataset_folder, dict):
            return tuple(self.dataset_folder.values())
        return None if self.dataset_weights is None else tuple(self.dataset_weights)

    @property
    def read_paths(self) -> tuple[str, ...] | None:
        """Paths to read instead of each folder; None: the folders are read."""
        return None if self.dataset_read_path is None else _several(self.dataset_read_path)

    def _lists(self) -> Iterator[str]:
        """Find what is wrong with the fields that have one item for each folder."""
        count = len(self.folders)
        if self.dataset_weights is not None and isinstance(self.dataset_folder, dict):
            yield (
                f"dataset_weights: {self.dataset_weights} was given; dataset_folder gives the "
                "weights already: remove one of them"
            )
        for name in ("dataset_weights", "dataset_max_tokens", "dataset_read_path"):
            given = getattr(self, name)
            if given is not None and len(items := _several(given)) != count:
                yield f"{name}: {len(items)} were given; it needs one for each of {count} folders"
        for weight in self.dataset_weights or ():
            if rule := _weight(weight):
                yield f"dataset_weights: {weight} was given; {rule}"
        if self.weights and not any(self.weights):
            field = "dataset_folder" if isinstance(self.dataset_folder, dict) else "dataset_weights"
            yield f"{field}: all weights are 0; at least one must be above 0"
        for limit in self.dataset_max_tokens or ():
            if limit < 1:
                yield f"dataset_max_tokens: {limit} was given; it must be at least 1"


Section = TypeVar("Section", bound=HubDatasetsConfig | NanosetDatasetsConfig)


def domain_section(section: Section, names: Sequence[str]) -> Section:
    """Name the data set of each domain: one name alone is a folder, `<folder>/<domain>` are read.

    Args:
        section: several data sets, which stay as they are, or one name.
        names: the domains.
    """
    field = "dataset_folder" if isinstance(section, NanosetDatasetsConfig) else HUB_FIELD
    given = getattr(section, field)
    if not isinstance(given, str):
        return section
    named = [f"{given.rstrip('/')}/{name}" for name in names]
    return replace(section, **{field: named})


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data that one stage of training reads, and their order."""

    dataset: PretrainDatasetsConfig | NanosetDatasetsConfig | SFTDatasetsConfig | None
    """The data; None: random tokens, or a loader of one's own."""
    seed: int
    """Seed of the order of the samples."""
    num_loading_workers: int = 1
    """Threads that prepare batches; 0 prepares each when it is needed."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.seed < 0:
            found.append(f"seed: {self.seed} was given; it must not be negative")
        if (workers := self.num_loading_workers) < 0:
            found.append(f"num_loading_workers: {workers} was given; it must not be negative")
        _raise(found)


@dataclass(frozen=True, kw_only=True)
class DatasetStageConfig:
    """A stretch of training on one set of data; it lasts until the next one starts."""

    name: str
    """Name of the stage in the log."""
    start_training_step: int
    """First training step of the stage, from 1."""
    data: DataConfig
    """Data that the stage reads."""
    sequence_length: int | None = None
    """Tokens of a sample in this stage; None: that of the tokens' section."""
    batch_accumulation_per_replica: int | None = None
    """Micro-batches of an update on a dp rank in this stage; None: that of the tokens' section."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if (step := self.start_training_step) < 1:
            found.append(f"start_training_step: {step} was given; steps are counted from 1")
        for name in ("sequence_length", "batch_accumulation_per_replica"):
            given = getattr(self, name)
            if given is not None and given < 1:
                found.append(f"{name}: {given} was given; it must be at least 1")
        _raise(found)


def _raise(found: list[str]) -> None:
    if found:
        raise ValueError("\n".join(found))


def _hub_problems(section: HubDatasetsConfig) -> Iterator[str]:
    """Find what is wrong with the fields that both kinds of text have."""
    given = section.hf_dataset_or_datasets
    yield from _names("hf_dataset_or_datasets", given, "data set", _fraction)
    if isinstance(given, dict) and given and not any(given.values()):
        yield "hf_dataset_or_datasets: all fractions are 0; at least one must be above 0"
    yield from _names("hf_dataset_splits", section.hf_dataset_splits, "split", _weight)
    if section.hf_dataset_config_name is not None and not _is_name(section.hf_dataset_config_name):
        yield "hf_dataset_config_name: '' was given; name a configuration, or null"
    if (count := section.dataset_processing_num_proc_per_process) < 1:
        yield f"dataset_processing_num_proc_per_process: {count} was given; it must be at least 1"


def _names(field: str, given: Any, what: str, rule: Callable[[float], str]) -> Iterator[str]:
    """Find what is wrong with a name, a list of names, or a mapping from names to numbers."""
    names = _several(given) if isinstance(given, str | list | tuple | dict) else ()
    if not names or not all(map(_is_name, names)):
        yield f"{field}: {given!r} was given; it must name at least one {what}, and none is empty"
    elif len(set(names)) < len(names):
        yield f"{field}: {given!r} was given; each {what} is named once"
    elif isinstance(given, dict):
        for name, number in given.items():
            if problem := rule(number):
                yield f"{field}: {number} was given for {name!r}; {problem}"


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and bool(given.strip())


def _weight(number: float) -> str:
    return "" if math.isfinite(number) and number >= 0 else "a weight is a finite number from 0 on"


def _fraction(number: float) -> str:
    return "" if 0 <= number <= 1 else "a fraction is a number from 0 to 1"


def _several(given: Any) -> tuple[Any, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _fractions(given: str | list[str] | dict[str, float]) -> dict[str, float]:
    return dict(given) if isinstance(given, dict) else dict.fromkeys(_several(given), 1.0)
