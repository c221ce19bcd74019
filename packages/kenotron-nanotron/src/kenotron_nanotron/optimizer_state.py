"""Adam's state in a Nanotron checkpoint: pickles, opened only by torch's ``weights_only`` loader.

Each file has ``state`` by number, ``names`` of the numbers, and ``gradient_accumulator`` where fp32
masters were kept. Without ZeRO a (pp, tp) rank's tensors are cut as its weights are; with ZeRO-1 a
dp rank has a slice of the flattened part, the first ones longer by one where it does not divide.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron_nanotron.checkpoint import NanotronCheckpoint, NanotronTensor
from kenotron_nanotron.metadata import read_json
from kenotron_nanotron.shard_files import ShardFile

ZERO = "ZeroDistributedOptimizer"
PLAIN = ("NamedOptimizer", "OptimizerFromGradientAccumulator")
MOMENTS = ("exp_avg", "exp_avg_sq")
_NAME = re.compile(
    r"optimizer_pp-(\d+)-of-(\d+)(?:_dp-(\d+)-of-(\d+))?_tp-(\d+)-of-(\d+)_exp-0-of-1\.pt"
)
_WITHOUT = "; import the weights alone"

Rank = tuple[int, int, int]
"""(pp, dp, tp); dp is 0 without ZeRO."""


@dataclass(frozen=True, eq=False)
class _File:
    """Contents of one pickle, by name of the parameter; values are mapped, not read."""

    path: Path
    state: Mapping[str, Mapping[str, Any]]
    masters: Mapping[str, Tensor]

    def has(self, name: str) -> bool:
        """Return whether there is anything of a parameter."""
        return name in self.state or name in self.masters

    def get(self, kind: str, name: str) -> Tensor | None:
        """Its tensor of a kind, if there is one."""
        return self.masters.get(name) if kind == "master" else self.state.get(name, {}).get(kind)


@dataclass(frozen=True, eq=False)
class NanotronOptimizer:
    """Adam's state, as logical fp32 tensors, one at a time."""

    checkpoint: NanotronCheckpoint
    steps: int
    """Updates made; 0 before the first, when there are no moments."""
    dp: int
    """Ranks that shared the state; 1 without ZeRO."""
    has_masters: bool
    """True where fp32 masters were kept; else the weights were updated themselves."""
    files: Mapping[Rank, _File]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Values of every parameter: ``master``, and Adam's moments after an update."""
        return ("master", *MOMENTS) if self.steps else ("master",)

    def tensor(self, kind: str, name: str) -> Tensor:
        """A whole tensor of one of the kinds, in fp32, of the shape of its Nanotron parameter.

        Raises ValueError, naming the file, when it is not there or of another size, or when a
        master, rounded, is not the weight.
        """
        logical = self.checkpoint.tensors[name]
        if kind == "master" and not self.has_masters:
            return logical.read().float()
        found = logical.assemble(self._parts(kind, logical)).float()
        if kind == "master" and not torch.equal(found.to(logical.dtype), logical.read()):
            raise ValueError(
                f"{self.checkpoint.folder}: the fp32 master of {name}, rounded, is not the weight: "
                f"weights and optimizer are of different steps{_WITHOUT}"
            )
        return found

    def _parts(self, kind: str, logical: NanotronTensor) -> Iterator[Tensor]:
        for shard in logical.shards:
            stage = self._stage(logical.name, shard)
            yield self._part(kind, logical.name, shard, stage)

    def _stage(self, name: str, shard: ShardFile) -> int:
        """Pipeline stage of a parameter; the name of a file that has all of it does not say."""
        if shard.place.ranks:
            return shard.place.rank("pp")
        having = {pp for (pp, _, _), file in self.files.items() if file.has(name)}
        if len(having) != 1:
            raise ValueError(
                f"{self.checkpoint.folder / 'optimizer'}: {name} is in the files of "
                f"{len(having)} pipeline stages, not of one{_WITHOUT}"
            )
        return having.pop()

    def _part(self, kind: str, name: str, shard: ShardFile, stage: int) -> Tensor:
        numel = math.prod(shard.shape)
        slices = []
        for dp in range(self.dp):
            due = _share(numel, self.dp, dp) if self.dp > 1 else numel
            file = self.files[stage, dp, shard.place.rank("tp")]
            held = file.get(kind, name)
            if held is None and due:
                raise ValueError(f"{file.path}: there is no {kind} of {name}{_WITHOUT}")
            if held is not None and held.numel() != due:
                raise ValueError(
                    f"{file.path}: {kind} of {name} has {held.numel()} elements; it should have "
                    f"{due} of the {numel} of {shard.path.name}{_WITHOUT}"
                )
            if held is not None:
                slices.append(held.detach().reshape(-1).float())
        return shard.arrange(torch.cat(slices))


def read_optimizer(checkpoint: NanotronCheckpoint) -> NanotronOptimizer:
    """Open the optimizer files of a checkpoint. Schedules and random states are not read.

    Raises ValueError, naming the file and the rule: a file is missing or cannot be loaded without
    running code that it brings; another optimizer than Adam; parallelism whose files are not
    described well enough (experts, ZeRO with a cut sequence, the engine datastates). OSError.
    """
    folder = checkpoint.folder / "optimizer"
    if checkpoint.metadata.engine != "torch":
        raise ValueError(
            f"{folder}: the engine {checkpoint.metadata.engine} pickles names and counts in a way "
            f"that torch's weights_only loader does not open{_WITHOUT}"
        )
    # How the state was cut.
    config = folder / "optimizer_config.json"
    said = read_json(config)
    zero = _is_zero(config, said, checkpoint)
    sizes = _sizes(config, said, checkpoint)
    dp = sizes["dp_size"] if zero else 1
    # The files of all ranks; their offsets, masters and counts must agree.
    files = {
        rank: _load(path)
        for rank, path in _paths(folder, zero, sizes["pp_size"], dp, sizes["tp_size"]).items()
    }
    _check_offsets(config, said, dp)
    masters = {bool(file.masters) for file in files.values() if file.masters or file.state}
    if len(masters) > 1:
        raise ValueError(f"{folder}: some files have fp32 masters, some have not{_WITHOUT}")
    return NanotronOptimizer(checkpoint, _steps(checkpoint, files), dp, True in masters, files)


def _is_zero(config: Path, said: Mapping[str, Any], checkpoint: NanotronCheckpoint) -> bool:
    kind = said.get("type")
    if kind not in (ZERO, *PLAIN):
        raise ValueError(f"{config}: type is {kind!r}; known are {', '.join((ZERO, *PLAIN))}")
    if kind == ZERO and checkpoint.metadata.cp > 1:
        raise ValueError(
            f"{config}: ZeRO with a sequence cut over {checkpoint.metadata.cp} ranks: it is not "
            f"documented which rank has which slice{_WITHOUT}"
        )
    return kind == ZERO


def _sizes(config: Path, said: Mapping[str, Any], checkpoint: NanotronCheckpoint) -> dict[str, int]:
    names = ("tp_size", "dp_size", "pp_size", "expert_parallel_size")
    given = said.get("parallelism")
    given = given if isinstance(given, dict) else {}
    if not all(str(given.get(name, "")).isdecimal() for name in names):
        raise ValueError(f"{config}: parallelism is {given}; it must have {', '.join(names)}")
    found = {name: int(given[name]) for name in names}
    if found["expert_parallel_size"] > 1:
        raise ValueError(f"{config}: state of experts cut over ranks is not read{_WITHOUT}")
    meta = checkpoint.metadata
    for name, due in (("tp_size", meta.tp), ("dp_size", meta.dp), ("pp_size", checkpoint.pp)):
        if found[name] != due:
            raise ValueError(
                f"{config}: {name} is {found[name]}, but the rest of the checkpoint was written "
                f"with {due}{_WITHOUT}"
            )
    return found


def _paths(folder: Path, zero: bool, pp: int, dp: int, tp: int) -> dict[Rank, Path]:
    found: dict[Rank, Path] = {}
    for path in sorted(folder.glob("optimizer_*.pt")):
        match = _NAME.fullmatch(path.name)
        due = (pp, dp if zero else None, tp)
        if match is None or tuple(n and int(n) for n in match.groups()[1::2]) != due:
            raise ValueError(
                f"{path}: its name is not that of an optimizer file of pp {pp}, "
                f"{f'dp {dp}, ' if zero else ''}tp {tp}, exp 1"
            )
        a, b, c = (int(n or 0) for n in match.groups()[::2])
        found[a, b, c] = path
    for rank in ((a, b, c) for a in range(pp) for b in range(dp) for c in range(tp)):
        if rank not in found:
            raise ValueError(f"{folder} has no file of pp, dp, tp rank {rank}{_WITHOUT}")
    return found


def _load(path: Path) -> _File:
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} cannot be loaded as tensors and plain values alone ({reason}); whatever else "
            f"a pickle holds may run code, so it is not opened{_WITHOUT}"
        ) from None
    try:
        names = held["names"]
        state = {_bare(names[number]): dict(entry) for number, entry in held["state"].items()}
        masters = held.get("gradient_accumulator") or {}
        masters = {_bare(name): tensor for name, tensor in masters.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not an optimizer's state: state, names of its numbers ({error!r}){_WITHOUT}"
        ) from None
    for name, entry in state.items():
        if set(entry) != {"step", *MOMENTS}:
            raise ValueError(
                f"{path}: {name} has {', '.join(map(str, sorted(entry)))}; only Adam's step, "
                f"{' and '.join(MOMENTS)} are read{_WITHOUT}"
            )
    if not all(isinstance(tensor, Tensor) for tensor in masters.values()):
        raise ValueError(f"{path}: gradient_accumulator is not made of tensors{_WITHOUT}")
    return _File(path, state, masters)


def _bare(name: str) -> str:
    """A parameter's name without what torch's data parallelism puts before it."""
    return name.removeprefix("module.")


def _steps(checkpoint: NanotronCheckpoint, files: Mapping[Rank, _File]) -> int:
    """Updates made, the same for all parameters."""
    found = {int(e["step"]) for file in files.values() for e in file.state.values()}
    if len(found) > 1:
        raise ValueError(
            f"{checkpoint.folder / 'optimizer'}: parameters had {min(found)} to {max(found)} "
            f"updates; here all have as many{_WITHOUT}"
        )
    if not found and checkpoint.metadata.last_train_step:
        raise ValueError(
            f"{checkpoint.folder / 'optimizer'} has no state after "
            f"{checkpoint.metadata.last_train_step} steps: it was not Adam's{_WITHOUT}"
        )
    return found.pop() if found else 0


def _share(numel: int, dp: int, rank: int) -> int:
    """Elements of a part that a dp rank has: as even as can be, the first ones with one more."""
    return numel // dp + (rank < numel % dp)


def _check_offsets(config: Path, said: Mapping[str, Any], dp: int) -> None:
    """Compare what is said of ZeRO's slices (of the first stage only) with the rule."""
    offsets = (said.get("configs") or {}).get("param_name_to_dp_rank_offsets") or {}
    for name, ranges in offsets.items():
        try:
            found = {int(rank): tuple(map(int, range_)) for rank, range_ in ranges.items()}
            numel = max(stop for _, stop in found.values())
        except (ValueError, TypeError, AttributeError):
            raise ValueError(f"{config}: the offsets of {name} are {ranges!r}{_WITHOUT}") from None
        edges = [0]
        for rank in range(dp):
            edges.append(edges[-1] + _share(numel, dp, rank))
        due = {rank: (edges[rank], edges[rank + 1]) for rank in range(dp)}
        if found != {rank: range_ for rank, range_ in due.items() if range_[0] < range_[1]}:
            raise ValueError(
                f"{config}: dp ranks have {found} of {name}, not {due}: the slices are not cut as "
                f"Nanotron cuts them{_WITHOUT}"
            )
