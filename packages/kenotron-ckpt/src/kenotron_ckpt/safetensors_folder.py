"""A folder of safetensors that another program wrote: whole tensors, in one file or several.

Its tensors become records like those of a checkpoint: blocks of rows of ours, each in some file.
So a rank reads its slices only, and nothing of the folder is ever copied first.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol

import torch

from kenotron_ckpt.blocks import OwnBlock, Tensors, blocks_of, dtype_name, problems_of
from kenotron_ckpt.collective_errors import on_all
from kenotron_ckpt.index import Piece, Record
from kenotron_ckpt.reader import fill, plan_reads, read_box
from kenotron_ckpt.records import Shape
from kenotron_ckpt.safetensors_file import Stored, read_header
from kenotron_dist import Mesh

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pth", "consolidated.*.pt")
_MOST = 20
"""So many tensors are named in one error."""
_WEIGHTS = ("bfloat16", "float16", "float32")
"""Dtypes that weights are saved in; others are quantised, or lose bits here without a word."""
_COMPARED = 1 << 26
"""Bytes that are compared at a time."""

Run = tuple[str, int, Shape, int]
"""(tensor of the folder, its first row, where it begins in the record, number of rows).

The record may have more dims, before those of the folder's tensors."""


class Assembled(Protocol):
    """A tensor that rows of a folder's tensors make."""

    @property
    def shape(self) -> Shape:
        """Its shape."""
        ...

    def sources(self) -> Mapping[str, Shape]:
        """Shapes of the tensors that it is made of, by name."""
        ...

    def runs(self) -> Iterable[Run]:
        """Return the sources of its rows; they cover it exactly once."""
        ...


@dataclass(frozen=True)
class SafetensorsFolder:
    """A folder whose headers were read. Made by ``open_safetensors``."""

    path: Path
    tensors: Mapping[str, Stored]
    """By name."""

    @property
    def dtype(self) -> str:
        """Dtype of most tensors; float32 where weights cannot have it."""
        counts = Counter(dtype_name(stored.dtype) for stored in self.tensors.values())
        found = max(counts, key=lambda name: counts[name], default="")
        return found if found in _WEIGHTS else "float32"

    def records(
        self, ours: Mapping[str, Assembled], may_be: Callable[[str], bool] = lambda _: False
    ) -> dict[str, Record]:
        """Return our tensors as records: blocks of rows of the folder's. Nothing is read.

        Args:
            ours: our tensors by name.
            may_be: True for tensors that may be there though none of ours needs them.

        Raises:
            ValueError: naming each, for tensors that are missing, unknown or misshapen, and for
                one of ours that is made of several dtypes.
        """
        due = {name: shape for whole in ours.values() for name, shape in whole.sources().items()}
        if lines := self._problems(due, may_be):
            more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
            begin = f"{self.path}: its tensors are not those of its config.json:"
            raise ValueError("\n  ".join([begin, *lines[:_MOST], *more]))
        return {name: self._record(name, whole) for name, whole in ours.items()}

    def same(self, one: str, other: str) -> bool | None:
        """Return True where two tensors hold the same numbers; None: one is absent.

        They are read some rows at a time. Raises OSError.
        """
        if not {one, other} <= {*self.tensors}:
            return None
        a, b = (self._whole(name) for name in (one, other))
        if a.shape != b.shape:
            return False
        rows = max(1, _COMPARED // max(1, 4 * math.prod(a.shape[1:])))
        for first in range(0, a.shape[0], rows):
            start = (first, *(0 for _ in a.shape[1:]))
            shape = (min(rows, a.shape[0] - first), *a.shape[1:])
            if not torch.equal(*(read_box(self.path, x, start, shape).float() for x in (a, b))):
                return False
        return True

    def _whole(self, name: str) -> Record:
        """A tensor of the folder as a record."""
        stored = self.tensors[name]
        zeros = (0,) * len(stored.shape)
        size = math.prod(stored.shape) * stored.dtype.itemsize
        piece = Piece(stored.file, name, zeros, stored.shape, stored.offset, size)
        return Record(stored.shape, dtype_name(stored.dtype), (piece,))

    def _problems(self, due: Mapping[str, Shape], may_be: Callable[[str], bool]) -> list[str]:
        missing = [name for name in due if name not in self.tensors]
        unknown = [name for name in self.tensors if name not in due and not may_be(name)]
        lines = [f"{name} is missing" for name in missing]
        for name in unknown:
            near = get_close_matches(name, missing, n=1)
            lines.append(f"{name} is none of the model's" + (f"; is it {near[0]}?" if near else ""))
        for name, found in self.tensors.items():
            if name in due and found.shape != due[name]:
                shape, wanted = list(found.shape), list(due[name])
                lines.append(f"{name} has shape {shape}, but the model makes it {wanted}")
            if name in due and (dtype := dtype_name(found.dtype)) not in _WEIGHTS:
                lines.append(f"{name} is {dtype}; weights must be {', '.join(_WEIGHTS)}")
        return lines

    def _record(self, name: str, whole: Assembled) -> Record:
        pieces = []
        for theirs, row, start, rows in whole.runs():
            stored = self.tensors[theirs]
            columns = stored.shape[1:]
            size = math.prod(columns) * stored.dtype.itemsize  # of a row
            shape = (*(1 for _ in start[len(stored.shape) :]), rows, *columns)
            begin = stored.offset + row * size
            pieces.append(Piece(stored.file, theirs, start, shape, begin, rows * size))
        dtypes = {dtype_name(self.tensors[theirs].dtype): theirs for theirs in whole.sources()}
        if len(dtypes) > 1:
            said = ", ".join(f"{theirs} is {dtype}" for dtype, theirs in dtypes.items())
            raise ValueError(
                f"{self.path}: {name} is made of tensors of several dtypes ({said}): save the "
                "model in one dtype"
            )
        return Record(whole.shape, next(iter(dtypes)), tuple(pieces))

    def load(self, records: Mapping[str, Record], wanted: Tensors, mesh: Mesh) -> None:
        """Fill tensors in place from records of this folder; values are cast to their dtype.

        Collective over the mesh. Padding is left untouched. Raises ValueError on every rank, before
        any tensor is changed, when one contradicts its layout or its record; after it, naming each
        tensor with nan or inf in it; OSError.
        """
        on_all(mesh, lambda: self._check_wanted(records, wanted, mesh))
        blocks = blocks_of(wanted, mesh.view)
        reads = on_all(mesh, lambda: plan_reads(records, blocks))
        on_all(mesh, lambda: fill(self.path, reads))
        on_all(mesh, lambda: self._check_finite(blocks))

    def _check_finite(self, blocks: Sequence[OwnBlock]) -> None:
        if names := sorted({each.name for each in blocks if not bool(each.view.isfinite().all())}):
            raise ValueError(f"{self.path}: weights are nan or inf in {', '.join(names[:_MOST])}")

    def _check_wanted(self, records: Mapping[str, Record], wanted: Tensors, mesh: Mesh) -> None:
        problems = problems_of(wanted, mesh.view)
        for _, layout in wanted.values():
            record = records.get(layout.name)
            if record is None:
                problems.append(f"{layout.name}: nothing in the folder is made into it")
            elif record.shape != layout.shape:
                problems.append(
                    f"{layout.name}: the folder makes it {list(record.shape)}, the model "
                    f"{list(layout.shape)}"
                )
        if problems:
            raise ValueError("\n  ".join([f"cannot load {self.path}:", *problems]))


def open_safetensors(path: str | Path, single: str = SINGLE) -> SafetensorsFolder:
    """Read the headers of ``model.safetensors``, or of the files that its index names.

    ``single``: name of the file where there is no index.

    Raises ValueError, naming the file and the rule that it breaks: there is neither; pickles
    instead; an index that disagrees with its files; a file that is damaged. OSError.
    """
    folder = Path(path)
    if (folder / INDEX).is_file():
        return SafetensorsFolder(folder, _indexed(folder))
    if (folder / single).is_file():
        return SafetensorsFolder(folder, read_header(folder / single))
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} has its weights as pickles ({pickles[0]}), which can run any code when they "
            "are opened: save the model as safetensors (save_pretrained of transformers does)"
        )
    raise ValueError(f"{folder} has no weights: neither {INDEX} nor {single} is there")


def _indexed(folder: Path) -> dict[str, Stored]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        weight_map = dict(index["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX}: it has no weight_map: {error!r}") from None
    headers: dict[str, dict[str, Stored]] = {}
    for name in sorted({*weight_map.values()}):
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} names {name}, which is no file next to it")
        headers[name] = read_header(folder / name)
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise ValueError(f"{folder / INDEX} says that {name} is in {file}, but it is not")
    unknown = {n: f for f, header in headers.items() for n in header if weight_map.get(n) != f}
    for name, file in unknown.items():
        raise ValueError(
            f"{folder / file} has {name}, which {INDEX} does not say: two models are mixed"
        )
    return {name: headers[file][name] for name, file in weight_map.items()}
