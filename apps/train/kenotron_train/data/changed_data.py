"""Comparison of a stage's data with those that a checkpoint was trained with.

Checkpoints hold a fingerprint of each stage that was read. Other data under the same keys of the
config are an error, which ``checkpoints.accept_changed_data`` accepts; where the keys changed, the
log says so and nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kenotron_ckpt import on_first
from kenotron_data import Corpus, Fingerprint, fingerprint, has_index
from kenotron_dist import Mesh
from kenotron_train.data.data_settings import order_of
from kenotron_train.progress import Progress

WHAT_SAMPLES_ARE = ("sequence_length", "held_out", "tokenizer", "domains")
"""Keys of a reading, next to those of the stage, that the samples of a data set follow from."""


def fingerprint_of(corpus: Corpus, mesh: Mesh) -> Fingerprint | None:
    """Fingerprint of what a stage trains on; None without an index. Rank 0 reads.

    Collective over the mesh.
    """
    data = corpus.training
    if not has_index(data):
        return None
    with mesh.pulse.busy("hashing the corpus"):
        return Fingerprint.from_dict(on_first(mesh, lambda: fingerprint(data).to_dict()))


def check_data(stage: str, known: Fingerprint | None, now: Fingerprint, *, accepted: bool) -> str:
    """Compare the data of a stage with those of the checkpoint; a warning about accepted ones.

    Args:
        stage: key and name of the stage.
        known: fingerprint in the checkpoint; None: it has none.
        now: fingerprint of the data.
        accepted: ``checkpoints.accept_changed_data``.

    Raises:
        ValueError: they differ, and that is not accepted.
    """
    changed = known.difference(now) if known is not None else ""
    if not changed:
        return ""
    said = f"{stage}: the data are not those that the checkpoint was trained with: {changed}"
    if accepted:
        return f"{said}; samples may come twice or not at all"
    raise ValueError(
        f"{said}: give the former data, or accept the change with --set "
        "checkpoints.accept_changed_data=true (samples may then come twice or not at all)"
    )


def comparable(progress: Progress, saved: Mapping[str, Any], given: Mapping[str, Any]) -> Progress:
    """Forget fingerprints of stages whose keys in the config changed since a checkpoint.

    Args:
        progress: that of a checkpoint.
        saved: what the checkpoint has read, see ``reading_of``.
        given: what the run that resumes it reads.
    """
    then, now = order_of(dict(saved)), order_of(dict(given))
    if any(then.get(key) != now.get(key) for key in WHAT_SAMPLES_ARE):
        return replace(progress, data={})
    same = {
        number: found
        for number, found in progress.data.items()
        if _keys(then, number) == _keys(now, number)
    }
    return replace(progress, data=same)


def _keys(reading: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """Keys of a stage, without the seed of its order; None where there is no such stage."""
    stages = reading.get("data_stages") or []
    if number >= len(stages):
        return None
    return {key: value for key, value in stages[number].items() if key != "seed"}
