"""From a dense checkpoint to one with experts: copies of each feed-forward behind a new router."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kenotron_ckpt import Checkpoint, Location, Record, StreamedTensor, open_checkpoint, read_box
from kenotron_convert.importing import TOKENIZER, check_free, fresh_state, write_or_remove
from kenotron_dist import Mesh
from kenotron_dist.init import Normal, fill_
from kenotron_dist.placement import TensorLayout
from kenotron_models import config_from_json
from kenotron_models.families import router_shapes, upcycled_config, upcycled_name


def upcycle(
    ckpt: Location,
    folder: Path,
    *,
    experts: int,
    top_k: int,
    noise: float = 0.0,
    std: float = 0.02,
    seed: int = 42,
    overwrite: bool = False,
) -> Path:
    """Write ``<folder>/0/``, a checkpoint of the same model with experts; returns its path.

    Without noise it computes what the dense model does, up to rounding: experts are equal and the
    weights of those of a token add up to 1. No optimizer state is kept.

    Args:
        ckpt: a step folder or a run folder of a dense Llama, Mistral, Qwen2 or Qwen3.
        folder: the run folder to write to.
        experts: experts of a layer.
        top_k: experts that each token is sent to.
        noise: standard deviation of what is added to the weights of every expert but the first,
            relative to that of the matrix.
        std: standard deviation of the router's first weights.
        seed: of noise and routers.
        overwrite: whether a checkpoint of step 0 may be replaced.

    Raises:
        ValueError: the checkpoint is of no such model, sizes do not fit, a number is out of range,
            or there is a run. OSError. Nothing is written then.
    """
    for name, value in (("noise", noise), ("std", std)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} {value} was given; it must be a finite number from 0 on")
    checkpoint = open_checkpoint(ckpt, Mesh.connect(), select=_is_weight)
    state = checkpoint.manifest.state
    if "model_config" not in state:
        raise ValueError(f"{checkpoint.store} does not describe a model: model_config is missing")
    dense = config_from_json(state["model_config"])
    config = upcycled_config(dense, experts, top_k)
    check_free(folder, overwrite, checkpoint.store)
    records = {n: r for n, r in checkpoint.manifest.records.items() if _is_weight(n)}
    made = _UpcycledTensors(checkpoint, experts, noise, std, seed)
    sources = dict(made.source(name, record) for name, record in records.items())
    dtype = getattr(torch, next(iter(records.values())).dtype)
    for name, shape in router_shapes(config).items():
        sources[name] = StreamedTensor(shape, dtype, partial(made.drawn, name, shape, dtype))
    kept = {key: state[key] for key in ("tokenizer",) if key in state}
    said = {"from": str(checkpoint.store), "noise": noise, "seed": seed}
    whole = {**fresh_state(config, dtype, {}), **kept, "upcycled": said}
    del whole["imported"]
    written = write_or_remove(folder, sources, whole)
    if (words := Path(str(checkpoint.store)).parent / TOKENIZER).is_dir():
        shutil.copytree(words, folder / TOKENIZER, dirs_exist_ok=True)
    return written


class _UpcycledTensors:
    """Tensors of the new checkpoint, each made when it is written."""

    def __init__(
        self, checkpoint: Checkpoint, experts: int, noise: float, std: float, seed: int
    ) -> None:
        self.store, self.view = checkpoint.store, Mesh.connect().view
        self.experts, self.noise, self.std, self.seed = experts, noise, std, seed

    def source(self, name: str, record: Record) -> tuple[str, StreamedTensor]:
        """The new name of a tensor, and how it is made."""
        dtype, (new, copied) = getattr(torch, record.dtype), upcycled_name(name)
        if not copied:
            return new, StreamedTensor(record.shape, dtype, partial(self._read, record))
        shape = (self.experts, *record.shape)
        return new, StreamedTensor(shape, dtype, partial(self._copies, new, record))

    def drawn(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """First values of a router: a function of seed, name and place."""
        return self._normal(name, shape, self.std).to(dtype)

    def _normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        values, layout = torch.empty(shape), TensorLayout(name, shape)
        fill_(values, layout, self.view(layout), Normal(std), seed=self.seed)
        return values

    def _read(self, record: Record) -> Tensor:
        return read_box(self.store, record, (0,) * len(record.shape), record.shape)

    def _copies(self, name: str, record: Record) -> Tensor:
        whole = self._read(record)
        copies = whole.expand(self.experts, *whole.shape).clone()
        if self.noise:
            shape = (self.experts - 1, *whole.shape)
            copies[1:] += self._normal(name, shape, self.noise * whole.float().std().item())
        return copies


def _is_weight(name: str) -> bool:
    return not name.startswith("optimizer.")
