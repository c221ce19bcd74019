"""The stored losses of a reference model: which file, what they are of, and how steps read them.

R: rows of a rank in one batch, M * B; S: sequence length; k: domains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kenotron_ckpt import MANIFEST, on_first, steps_in
from kenotron_config import DoReMiConfig
from kenotron_data import Corpus, Cursor, Fingerprint, Mixture, StoredLosses
from kenotron_dist import Mesh, to_device
from kenotron_engine import DomainObjective, DomainWeights
from kenotron_train.data_plan import DataPlan

KEY = "doremi.reference_losses_path"
COMMAND = "python apps/train doremi losses"


@dataclass(frozen=True)
class Reference:
    """The reference's losses on the samples of a stage, and the shares of domains in it."""

    stored: StoredLosses
    shares: tuple[float, ...]
    """(k,) share of each domain in the samples."""
    mesh: Mesh
    shape: tuple[int, int]
    """(B, S) of a micro-batch."""
    microbatches: Callable[[int], int]
    """M of a rank's batch after so many samples of the stage."""
    z_loss: float
    """Weight of the model's z-loss."""

    def objective(self, place: Cursor, weights: DomainWeights) -> DomainObjective:
        """The objective of the step whose batch begins at ``place``, on this rank's device.

        Raises:
            ValueError: there are no losses of its samples.
        """
        micro, (rows, _) = self.microbatches(place.consumed), self.shape
        first = place.consumed + self.mesh["dp"].rank * micro * rows
        try:
            losses = torch.from_numpy(self.stored.rows(first, micro * rows)).view(-1, *self.shape)
        except ValueError as error:
            raise ValueError(
                f"{KEY}: {error} with `{COMMAND}` and the config of this run"
            ) from error
        pairs = zip(weights.weights, self.shares, strict=True)
        factors = tuple(weight / share for weight, share in pairs)
        return DomainObjective(
            names=weights.names,
            factors=factors,
            reference_MBS=to_device(losses, self.mesh.device),
            z_loss=self.z_loss,
        )


def losses_path(data: DataPlan, stage: int) -> Path:
    """The file of a stage's losses."""
    return data.losses / f"stage-{stage}.losses"


def read_by(data: DataPlan, stage: int, found: Fingerprint) -> dict[str, Any]:
    """Return what fixes samples of a stage and their order, as the file describes it."""
    assert data.doremi is not None
    return {
        "data": found.to_dict(),
        "domains": list(data.doremi.names),  # keys of the orders of their samples
        "seed": data.stages[stage].data.seed,
        "stage": stage,
        "separate_documents": data.separate_documents,
    }


def reference_identity(folder: Path) -> dict[str, Any]:
    """The step folder of a reference, and a hash of its manifest, which has all checksums."""
    manifest = (folder / MANIFEST).read_bytes()
    return {
        "path": str(folder.resolve()),
        "checksum": hashlib.blake2b(manifest, digest_size=8).hexdigest(),
    }


def open_reference(
    data: DataPlan,
    mesh: Mesh,
    stage: int,
    corpus: Corpus,
    found: Fingerprint | None,
    z_loss: float,
) -> Reference | None:
    """Open the losses that a proxy run reads in a stage; None for other runs.

    ``z_loss`` is the weight of the model's z-loss.

    Collective over the mesh. Raises ValueError where there are none, or they are of other samples
    or of another checkpoint than the config names.
    """
    doremi = data.doremi
    if doremi is None or not doremi.is_proxy:
        return None
    assert found is not None and isinstance(corpus.training, Mixture)
    path, expected = losses_path(data, stage), read_by(data, stage, found)
    sequence = data.sequences[stage]
    on_first(mesh, lambda: _check(doremi, path, expected, sequence))
    shape, microbatches = (
        (data.tokens.micro_batch_size, sequence),
        partial(data.batches.microbatches, stage),
    )
    shares = tuple(corpus.training.shares[name] for name in doremi.names)
    return Reference(StoredLosses(path), shares, mesh, shape, microbatches, z_loss)


def _check(doremi: DoReMiConfig, path: Path, expected: Mapping[str, Any], sequence: int) -> None:
    """Refuse losses of other samples, or of another reference."""
    try:
        stored = StoredLosses(path)
    except FileNotFoundError as error:
        raise ValueError(
            f"{KEY}: there are no losses of the reference in {path}: write them with `{COMMAND}` "
            "and the config of this run"
        ) from error
    except ValueError as error:
        raise ValueError(f"{KEY}: {error}") from error
    changed = difference(stored, expected, sequence)
    changed = changed or _other_reference(doremi, stored.about.get("reference", {}))
    if changed:
        raise ValueError(f"{KEY}: {path} {changed}: write it again with `{COMMAND}`")


def difference(stored: StoredLosses, expected: Mapping[str, Any], sequence: int) -> str:
    """Say in what stored losses differ from those that are needed; empty where they do not."""
    if stored.sequence != sequence:
        return f"is of samples of {stored.sequence} tokens, and the run has {sequence}"
    for name, needed in expected.items():
        given = stored.about.get(name)
        if given == needed:
            continue
        if name == "data":
            what = Fingerprint.from_dict(given or {}).difference(Fingerprint.from_dict(needed))
            return f"is of other data: {what}"
        return f"was written with {name} {given}, and the run has {needed}"
    return ""


def _other_reference(doremi: DoReMiConfig, known: Mapping[str, Any]) -> str:
    """Say that the config names another checkpoint, where that one is there to look at."""
    folder = Path(str(doremi.ref_model_resume_checkpoint_path))
    steps = steps_in(folder) if folder.is_dir() else []
    places = [place for place in (folder, *(folder / str(n) for n in steps)) if _is_whole(place)]
    if not places:  # gone: the losses are enough
        return ""
    if known.get("checksum") in (reference_identity(place)["checksum"] for place in places):
        return ""
    return f"is of {known.get('path')}, and ref_model_resume_checkpoint_path names {folder}"


def _is_whole(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()
