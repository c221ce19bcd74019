"""The arguments of the data, as plain dataclasses (no torch, no YAML here)."""

from dataclasses import dataclass

EMBEDDED_CORPUS = "python-stdlib"
"""The dataset name of the corpus that needs no download: the standard library's sources."""


@dataclass(frozen=True, kw_only=True)
class PretrainDatasetsConfig:
    """One corpus of text, under the names that Nanotron gives its arguments.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    hf_dataset_or_datasets: str
    """Path of a local corpus, or `python-stdlib` for the embedded one."""
    hf_dataset_splits: str = "train"
    """Part of the dataset; only `train` is available yet."""
    hf_dataset_config_name: str | None = None
    """Configuration of the dataset; must be None, not available yet."""
    dataset_processing_num_proc_per_process: int = 1
    """No effect: processes that would tokenize; tokens are made while reading."""
    dataset_overwrite_cache: bool = False
    """No effect: no cache is kept."""
    text_column_name: str = "text"
    """Column of the text; only `text` is available yet."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if not isinstance(self.hf_dataset_or_datasets, str) or not self.hf_dataset_or_datasets:
            found.append(
                f"hf_dataset_or_datasets: {self.hf_dataset_or_datasets!r} was given; it must be "
                f"one local path or '{EMBEDDED_CORPUS}'; mixtures of several are not available yet"
            )
        choices = (
            ("hf_dataset_splits", self.hf_dataset_splits, "train"),
            ("hf_dataset_config_name", self.hf_dataset_config_name, None),
            ("text_column_name", self.text_column_name, "text"),
        )
        for name, given, known in choices:
            if given != known:
                found.append(
                    f"{name}: {given!r} was given; choosing one is not available yet; "
                    f"set it to {'null' if known is None else known} or leave it out"
                )
        if found:
            raise ValueError("\n".join(found))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What one stage of training reads, and in which order.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    dataset: PretrainDatasetsConfig | None
    """The corpus; None: random tokens."""
    seed: int
    """Seed of the order of the samples."""
    num_loading_workers: int = 1
    """No effect: samples are cut from memory-mapped tokens in the training process."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if self.seed < 0:
            found.append(f"seed: {self.seed} was given; it must not be negative")
        if (workers := self.num_loading_workers) < 0:
            found.append(f"num_loading_workers: {workers} was given; it must not be negative")
        if found:
            raise ValueError("\n".join(found))


@dataclass(frozen=True, kw_only=True)
class DatasetStageConfig:
    """A stretch of training on one set of data; it lasts until the next one starts.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    name: str
    """What the log calls the stage."""
    start_training_step: int
    """First training step of the stage, from 1."""
    data: DataConfig
    """What the stage reads."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        if self.start_training_step < 1:
            raise ValueError(
                f"start_training_step: {self.start_training_step} was given; steps are counted "
                "from 1"
            )
