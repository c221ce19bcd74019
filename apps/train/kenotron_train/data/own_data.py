"""Data of one's own: what a program hands to ``train`` for stages with ``dataset: null``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kenotron_data import CustomSamples, Dataset, Source
from kenotron_data.config import DatasetStageConfig


@dataclass(frozen=True)
class OwnData:
    """A source and how long it is."""

    source: Source
    """A function of the sample's number, something indexable, or an iterable; a sample is S + 1 ids
    (an array, a tensor, a list, or a mapping with ``input_ids``), S the stage's sequence length."""
    samples: int | None = None
    """Samples of an epoch; None: ``len(source)``. An iterable needs none and is read once."""


Hook: TypeAlias = OwnData | Source | Mapping[str, OwnData | Source]
"""A source for all stages with dataset: null, or one for each by the stage's name. It must be
picklable where the program starts the processes."""


def check_hook(stages: Sequence[DatasetStageConfig], hook: Hook | None) -> None:
    """Refuse a hook that no stage would read with a ValueError naming the stages."""
    if hook is None:
        return
    free = [stage.name for stage in stages if stage.data.dataset is None]
    if not free:
        raise ValueError(
            "data of one's own was handed over, but no stage says data.dataset: null: set it there"
        )
    if unknown := [name for name in _by_stage(hook) if name not in free]:
        raise ValueError(
            f"data of one's own was handed over for {', '.join(map(repr, unknown))}; the stages "
            f"with data.dataset: null are {', '.join(map(repr, free))}"
        )


def own_data(hook: Hook | None, stage: str) -> Dataset | Iterable[Any] | None:
    """Return the hook's data of a stage: samples with an index, or an iterable; None: none.

    Raises ValueError where a source is neither, or its number of samples is unknown.
    """
    given: Any = _by_stage(hook).get(stage) if isinstance(hook, Mapping) else hook
    if given is None:
        return None
    own = given if isinstance(given, OwnData) else OwnData(given)
    source: Any = own.source
    if hasattr(source, "sample") and hasattr(source, "__len__"):
        return source
    indexed = hasattr(source, "__getitem__") and (own.samples or hasattr(source, "__len__"))
    if callable(source) or indexed:
        return CustomSamples(source, samples=own.samples, name=stage)
    if not hasattr(source, "__iter__"):
        raise ValueError(
            f"data of one's own for stage {stage!r}: {type(source).__name__} is no function of an "
            "index, not indexable and not iterable"
        )
    return source


def _by_stage(hook: Hook | None) -> Mapping[str, Any]:
    return hook if isinstance(hook, Mapping) else {}
