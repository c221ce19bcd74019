"""``checkpoint_metadata.json`` of Nanotron and of Kénotron: how far a run had come.

Nanotron adds ``cp``, token counts and a sequence length per stage; Kénotron says with which engine
the files were written. What neither needs may be left out, and what neither knows is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METADATA = "checkpoint_metadata.json"
MODEL_CONFIG = "model_config.json"
ENGINES = {
    "torch": (("1.4", "1.5"), ".safetensors"),
    "datastates": (("1.0",), ".datastates"),
}
"""By engine: the format versions that are read, and how names of tensor files end."""


@dataclass(frozen=True, kw_only=True)
class NanotronStage:
    """A stage of the data, and what was read of it."""

    name: str
    start_training_step: int
    """Step that reads it first, from 1."""
    consumed_train_samples: int
    """Samples read of this stage, over all ranks."""
    sequence_length: int | None = None
    """Tokens of a sample; None where the dialect does not say."""


@dataclass(frozen=True, kw_only=True)
class NanotronMetadata:
    """Contents of ``checkpoint_metadata.json``."""

    version: str
    """Version of the format: 1.4, 1.5, or 1.0 of the engine datastates."""
    engine: str
    """``torch`` or ``datastates``."""
    tp: int
    """Ranks that shared every layer."""
    dp: int
    """Ranks that shared the samples."""
    cp: int
    """Ranks that shared the sequence."""
    consumed_train_samples: int
    """Samples read in all."""
    last_train_step: int
    """Training steps done."""
    consumed_tokens_total: int | None
    """Tokens read in all; None where the dialect does not say."""
    last_stage: int
    """Number of the stage that was read last."""
    stages: tuple[NanotronStage, ...]
    custom: Mapping[str, Any]
    """``custom_metas``: what the program added."""
    raw: Mapping[str, Any]
    """The whole file."""

    @property
    def suffix(self) -> str:
        """Suffix of the names of tensor files."""
        return ENGINES[self.engine][1]

    @classmethod
    def read(cls, step_folder: Path) -> NanotronMetadata:
        """Read and check the file of a step folder.

        Raises ValueError, naming the file, the field and what it should be, when it is missing, is
        not JSON, is of an unknown version, or contradicts itself.
        """
        path = step_folder / METADATA
        raw = read_json(path)
        fields = _Fields(raw, str(path))
        version, engine = fields.text("version"), str(raw.get("checkpointing_engine_type", "torch"))
        _check_version(path, version, engine)
        metas = _Fields(fields.mapping("metas"), f"{path}: metas")
        stages = _stages(metas)
        found = cls(
            version=version,
            engine=engine.lower(),
            tp=fields.number("tp", least=1),
            dp=fields.number("dp", least=1),
            cp=fields.number("cp", least=1, default=1),
            consumed_train_samples=metas.number("consumed_train_samples"),
            last_train_step=metas.number("last_train_step"),
            consumed_tokens_total=metas.optional("consumed_tokens_total"),
            last_stage=metas.optional("last_stage_idx") or 0,
            stages=stages,
            custom=raw.get("custom_metas") or {},
            raw=raw,
        )
        total = sum(stage.consumed_train_samples for stage in stages)
        if stages and total != found.consumed_train_samples:
            raise ValueError(
                f"{path}: metas.consumed_train_samples is {found.consumed_train_samples}, but the "
                f"stages' counts add up to {total}: the file was edited, or the run had gone wrong"
            )
        if stages and found.last_stage >= len(stages):
            raise ValueError(
                f"{path}: metas.last_stage_idx is {found.last_stage}, but there are {len(stages)} "
                "data_stages, counted from 0"
            )
        return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError, naming the file, when it is missing or is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: a checkpoint of Nanotron has one") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {type(found).__name__}, not an object of names and values")
    return found


class _Fields:
    """Values of an object, with errors that name the file and the field."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def text(self, name: str) -> str:
        value = self._values.get(name)
        return value if isinstance(value, str) else self._fail(name, "a text")

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self._values.get(name)
        return value if isinstance(value, dict) else self._fail(name, "an object")

    def number(self, name: str, least: int = 0, default: int | None = None) -> int:
        value = self._values.get(name, default)
        if type(value) is not int or value < least:
            return self._fail(name, f"a whole number of at least {least}")
        return value

    def optional(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self.number(name)

    def objects(self, name: str) -> list[_Fields]:
        value = self._values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            self._fail(name, "a list of objects")
        return [_Fields(v, f"{self._where}.{name}.{i}") for i, v in enumerate(value)]

    def _fail(self, name: str, due: str) -> Any:
        given = repr(self._values[name]) if name in self._values else "missing"
        raise ValueError(f"{self._where}: {name} is {given}; it must be {due}")


def _stages(metas: _Fields) -> tuple[NanotronStage, ...]:
    return tuple(
        NanotronStage(
            name=stage.text("name"),
            start_training_step=stage.number("start_training_step"),
            consumed_train_samples=stage.number("consumed_train_samples"),
            sequence_length=stage.optional("sequence_length"),
        )
        for stage in metas.objects("data_stages")
    )


def _check_version(path: Path, version: str, engine: str) -> None:
    if engine.lower() not in ENGINES:
        raise ValueError(
            f"{path}: checkpointing_engine_type is {engine!r}; known are {', '.join(ENGINES)}"
        )
    known = ENGINES[engine.lower()][0]
    if version not in known:
        raise ValueError(
            f"{path}: format version {version} of the engine {engine.lower()} is not known, only "
            f"{' and '.join(known)}: load the checkpoint with a release of Nanotron that writes "
            "one of those, and save it there"
        )


def is_nanotron(step_folder: Path) -> bool:
    """Return True where a folder holds a checkpoint in Nanotron's layout."""
    return (step_folder / METADATA).exists()
