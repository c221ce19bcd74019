"""Read checkpoints of Nanotron and Kénotron: their metadata, and whole tensors, one at a time.

``<run folder>/latest.txt`` names a step; ``<run folder>/<step>/model/<module path as folders>/``
has a file for every tensor, or one for every part that a tp rank had. Nothing is unpickled here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_nanotron.expert_shards import with_own_rows
from kenotron_nanotron.metadata import METADATA, MODEL_CONFIG, NanotronMetadata, read_json
from kenotron_nanotron.shard_files import SUFFIXES, Shape, ShardFile, open_shard, shared

LATEST = "latest.txt"


@dataclass(frozen=True)
class NanotronTensor:
    """One logical tensor and the files that hold it. The files' headers were read and agree."""

    name: str
    """Path of its module and its own name, with dots."""
    shape: Shape
    """Of the whole tensor."""
    dtype: torch.dtype
    shards: tuple[ShardFile, ...]
    """The files, which cover it exactly once."""

    def read(self) -> Tensor:
        """The whole tensor, of ``shape``, on the CPU. Raises OSError when a file is unreadable."""
        values = [shard.read() for shard in self.shards[:1]]
        if self.shards[0].shape == self.shape and len(self.shards[0].pairs) == 1:
            return values[0]
        return self.assemble(shard.read() for shard in self.shards)

    def assemble(self, parts: Any) -> Tensor:
        """The whole tensor, of ``shape``, from one tensor for each file, cut as the files' are.

        Args:
            parts: an iterable of them, in the order of ``shards``.
        """
        whole: Tensor | None = None
        for shard, part in zip(self.shards, parts, strict=True):
            if whole is None:
                whole = torch.empty(self.shape, dtype=part.dtype)
            for (start, extent), (far, _) in shard.pairs:
                here = tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))
                there = tuple(slice(s, s + n) for s, n in zip(far, extent, strict=True))
                whole[there] = part[here]
        assert whole is not None  # a tensor has a file
        return whole


@dataclass(frozen=True)
class NanotronCheckpoint:
    """A checkpoint of Nanotron or Kénotron, whose headers were read and agree."""

    folder: Path
    """The step folder."""
    metadata: NanotronMetadata
    model_config: Mapping[str, Any]
    """Contents of ``model_config.json``."""
    config_text: str
    """Text of ``config.yaml``; empty when there is none."""
    tensors: Mapping[str, NanotronTensor]
    """By name, sorted."""

    @property
    def pp(self) -> int:
        """Pipeline stages of the run, as the names of its files say."""
        sizes = [s.place.size("pp") for t in self.tensors.values() for s in t.shards]
        return max(sizes, default=1)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, of its own ``shape``, on the CPU, put together from its files.

        Raises KeyError when there is none of that name, OSError when a file cannot be read.
        """
        return self.tensors[name].read()


def read_nanotron(path: str | Path) -> NanotronCheckpoint:
    """Read what a checkpoint of Nanotron or Kénotron says, without its values.

    Args:
        path: a step folder, or a run folder (``latest.txt`` names the step).

    Raises:
        ValueError: names the file and the rule it breaks: no checkpoint there; metadata missing,
            malformed or of an unknown version; a part of a tensor missing; parts that disagree on
            dtype, shape or version, that overlap or leave something out.
        OSError: a file cannot be read.
    """
    folder = _step_folder(Path(path))
    metadata = NanotronMetadata.read(folder)
    model_config, config = read_json(folder / MODEL_CONFIG), folder / "config.yaml"
    groups: dict[str, list[ShardFile]] = {}
    for file in _tensor_files(folder / "model", metadata):
        shard = open_shard(file)
        name = ".".join((*file.parent.relative_to(folder / "model").parts, shard.place.name))
        groups.setdefault(name, []).append(with_own_rows(name, shard, model_config))
    return NanotronCheckpoint(
        folder,
        metadata,
        model_config,
        config.read_text(encoding="utf-8") if config.exists() else "",
        {name: _tensor(name, group, metadata) for name, group in sorted(groups.items())},
    )


def _step_folder(path: Path) -> Path:
    if not path.is_dir():
        raise ValueError(f"no checkpoint of Nanotron at {path}: there is no such folder")
    if (path / METADATA).exists() or (path / MODEL_CONFIG).exists() or (path / "model").exists():
        return path
    try:
        text = (path / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise ValueError(
            f"no checkpoint of Nanotron at {path}: it has neither {METADATA} (a step folder) nor "
            f"{LATEST} (a run folder)"
        ) from None
    if not text.isdecimal() or not (path / text).is_dir():
        raise ValueError(f"{path / LATEST} says {text!r}: there is no such step folder next to it")
    return path / text


def _tensor_files(folder: Path, metadata: NanotronMetadata) -> list[Path]:
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not files:
        raise ValueError(f"{folder} has no tensors: no files that end in {metadata.suffix}")
    other = next((file for file in files if file.suffix != metadata.suffix), None)
    if other:
        raise ValueError(
            f"{other}: the engine {metadata.engine} writes files that end in {metadata.suffix}: "
            "two checkpoints lie in one folder, or checkpointing_engine_type is wrong"
        )
    return files


def _tensor(name: str, shards: Sequence[ShardFile], metadata: NanotronMetadata) -> NanotronTensor:
    """Put the files of a tensor together, tp ranks in order; see ``read_nanotron`` for errors."""
    first = shards[0]
    for shard in shards:
        for what, mine, other in (
            ("dtype", shard.dtype, first.dtype),
            ("unsharded_shape", list(shard.whole), list(first.whole)),
        ):
            if mine != other:
                raise ValueError(
                    f"{shard.path}: {what} is {mine}, but {other} in {first.path.name}: all parts "
                    f"of {name} have the same"
                )
        if shard.version not in (None, metadata.version):
            raise ValueError(
                f"{shard.path}: it is of format version {shard.version}, but {METADATA} says "
                f"{metadata.version}: files of two checkpoints are mixed"
            )
    _check_ranks(name, shards, metadata)
    ordered = sorted(shards, key=lambda s: (s.place.rank("exp"), s.place.rank("tp")))
    _check_cover(name, ordered)
    return NanotronTensor(name, first.whole, first.dtype, tuple(ordered))


def _check_ranks(name: str, shards: Sequence[ShardFile], metadata: NanotronMetadata) -> None:
    """Every tp (and expert) rank of one pipeline stage has a part, or one file has it all."""
    first = shards[0].place
    folder = shards[0].path.parent
    if not first.ranks:
        if len(shards) > 1:
            raise ValueError(
                f"{shards[0].path} has all of {name}, but {shards[1].path.name} lies next to it: "
                "files of two checkpoints are mixed"
            )
        return
    sizes = {tuple((axis, size) for axis, _, size in shard.place.ranks) for shard in shards}
    stages = {shard.place.rank("pp") for shard in shards}
    if len(sizes) > 1 or len(stages) > 1:
        raise ValueError(
            f"{folder}: the files of {name} are of several layouts or pipeline stages "
            f"({', '.join(sorted(s.path.name for s in shards))}): a tensor is on one stage"
        )
    if first.size("tp") != metadata.tp:
        raise ValueError(
            f"{shards[0].path}: its name says {first.size('tp')} tp ranks, but {METADATA} says "
            f"{metadata.tp}"
        )
    there = {(shard.place.rank("exp"), shard.place.rank("tp")) for shard in shards}
    for exp in range(first.size("exp")):
        for tp in range(first.size("tp")):
            if (exp, tp) not in there:
                expert = f" of expert rank {exp}" if first.size("exp") > 1 else ""
                raise ValueError(
                    f"{folder}: {name} has no file of tp rank {tp}{expert}: a tensor that is cut "
                    f"has one for each of {first.size('tp')} ranks; the copy is incomplete"
                )


def _check_cover(name: str, shards: Sequence[ShardFile]) -> None:
    blocks = [(shard, far) for shard in shards for _, far in shard.pairs]
    twice = shared([far for _, far in blocks])
    if twice:
        first, second = (blocks[i][0].path for i in twice)
        raise ValueError(
            f"{second}: it holds elements of {name} that {first.name} holds too: parts do not "
            "overlap"
        )
    # Blocks are disjoint and within the tensor: their sizes tell whether anything is left out.
    held = sum(torch.Size(extent).numel() for _, (_, extent) in blocks)
    due = torch.Size(shards[0].whole).numel()
    if held != due:
        raise ValueError(
            f"{shards[0].path.parent}: the files of {name} hold {held} of the {due} elements of "
            f"{list(shards[0].whole)}: their {len(shards)} parts do not cover it"
        )
