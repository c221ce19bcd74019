"""Small trainings of which one step, in the reproducible mode, must have the bits of one process.

They cover the axes of a layout and the layers that the mode has. ``mutants_bits.py`` computes them
with planted bugs: the process that they are compared with has none.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import grid_bits
import grid_run
from grid import CUT_LENGTH, Row
from grid_check import unequal
from torch import Tensor, arange

from kenotron_config import Config
from kenotron_data import Batch, Cursor
from kenotron_dist import Mesh, RankError, spawn
from kenotron_engine import (
    DomainObjective,
    Piece,
    join_pieces,
    pieces_of,
    slice_pieces,
    training_step,
    weight_pieces,
)
from kenotron_models import AnyConfig, families
from kenotron_models.layers import RopeScaling
from kenotron_train.assemble import build_training
from kenotron_train.data.stage_dataset import open_corpus, open_loader

Numbers = tuple[float, float, float, float, str]
Lines = dict[str, list[int]]
"""Lines that were run, by file."""
SECONDS = 60.0
"""Limit of an operation: ranks that wait for one another without end stop there."""
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 150,
}  # fmt: skip
TYPES = ("sliding_attention", "full_attention", "sliding_attention")
ROUTED = {"num_experts_per_tok": 3, "router_aux_loss_coef": 0.02}
LINEAR = ("linear_attention", "linear_attention", "full_attention")


@dataclass(frozen=True)
class Case:
    """A layout of a small model."""

    row: Row
    model: AnyConfig | None = None
    """None: that of the row."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Further ones of its config."""
    domains: bool = False
    """True: the step is one of a run that learns weights of domains."""


CASES: dict[str, Case] = {
    "pp 2, dp 2": Case(
        Row(sizes=(2, 2, 1), engine="zb-h1", arch="starcoder2", tied=True, dropout=0.1,
            recompute="full")),
    "dp 3, ZeRO 3, bf16": Case(
        Row(sizes=(1, 3, 1), arch="mistral", dtype="bf16", zero=3, attention="blocked", micro=1)),
    "tp 2, Muon": Case(
        Row(sizes=(1, 1, 2), mode="sp+overlap", arch="qwen3", extra="muon", tied=True)),
    "pp 2, tp 2, µP": Case(Row(sizes=(2, 1, 2), engine="zb-v", extra="mup", zero=0)),
    "tp 4, bf16": Case(
        Row(sizes=(1, 1, 4), mode="sp", arch="qwen2", documents="separate", dtype="bf16")),
    "cp 4, bf16": Case(Row(cp=4, way="ulysses", dtype="bf16", sequence=CUT_LENGTH)),
    "dp 2, cp 2, domains": Case(
        Row(sizes=(1, 2, 1), cp=2, arch="mistral", zero=2, sequence=CUT_LENGTH), domains=True),
    "cp 2, tp 2": Case(
        Row(sizes=(1, 1, 2), cp=2, arch="starcoder2", dropout=0.1, mode="sp", tied=True,
            sequence=CUT_LENGTH)),
    "cp 2, ulysses": Case(
        Row(sizes=(1, 2, 1), cp=2, way="ulysses", order="contiguous", arch="qwen2", zero=2,
            documents="separate", sequence=CUT_LENGTH, recompute="mixer")),
    "dp 2, ep 2, capacity": Case(
        Row(sizes=(1, 2, 1), ep=2, arch="qwen2_moe_limited", zero=3, documents="separate")),
    "dp 2, tp 2, ep 4, bf16": Case(
        Row(sizes=(1, 2, 2), ep=4, arch="deepseek", dtype="bf16", mode="sp", zero=0,
            recompute="selective")),
    "cp 2, tp 2, ep 2": Case(
        Row(sizes=(1, 1, 2), cp=2, ep=2, arch="qwen2_moe_limited", mode="sp",
            sequence=CUT_LENGTH, documents="separate", recompute="full")),
    "cp 2, sinks": Case(
        Row(cp=2, ep=2, sequence=CUT_LENGTH),
        families.GptOssConfig(
            **SIZES, **ROUTED, head_dim=12, sliding_window=5, layer_types=TYPES,
            num_local_experts=6, router_aux_loss_type="micro_batch", rope_scaling=RopeScaling(
                factor=4.0, rope_type="yarn", original_max_position_embeddings=8))),
    "tp 2, Mamba": Case(
        Row(sizes=(1, 1, 2), mode="sp"),
        families.JambaConfig(
            **SIZES, **ROUTED, attn_layer_period=2, attn_layer_offset=0, num_experts=8,
            mamba_d_state=8, mamba_dt_rank=4)),
    "cp 2, Mamba": Case(
        Row(cp=2, arch="mamba", layers=5, documents="separate", sequence=CUT_LENGTH)),
    "cp 2, tp 2, Mamba-2": Case(
        Row(sizes=(1, 1, 2), cp=2, mode="sp", arch="hybrid", layers=5, documents="separate",
            sequence=CUT_LENGTH)),
    "dp 2, Mamba, bf16": Case(
        Row(sizes=(1, 2, 1), arch="mamba", layers=5, documents="separate", dtype="bf16")),
    "tp 4, Mamba-2": Case(
        Row(sizes=(1, 1, 4), mode="sp", arch="hybrid", layers=5, documents="separate")),
    "tp 2, delta rule": Case(
        Row(sizes=(1, 1, 2), mode="sp", sequence=150),
        families.Qwen3NextConfig(
            **SIZES, **ROUTED, head_dim=16, num_experts=8, moe_intermediate_size=24,
            router_aux_loss_type="all_layers", use_doc_masking=True,
            layer_types=LINEAR, linear_num_key_heads=4, linear_num_value_heads=8,
            linear_key_head_dim=6, linear_value_head_dim=10, shared_expert_intermediate_size=40)),
    "pp 2, tp 2, MTP": Case(
        Row(sizes=(2, 1, 2), extra="mtp", mode="sp", engine="interleaved", tied=True)),
    "cp 2, MTP": Case(
        Row(cp=2, extra="mtp", arch="qwen2", documents="separate", sequence=CUT_LENGTH)),
    "tp 2, caps": Case(
        Row(sizes=(1, 1, 2), attention="blocked"),
        families.Gemma2Config(
            **SIZES, head_dim=12, sliding_window=5, layer_types=TYPES, query_pre_attn_scalar=20,
            final_logit_softcapping=2.5, attn_logit_softcapping=1.5,
            attn_implementation="blocked")),
    "dp 2, 2,100 tokens, bf16": Case(
        Row(sizes=(1, 2, 1), arch="mistral", dtype="bf16", layers=1, sequence=2100, tied=True)),
    "cp 2, tp 2, norms over heads": Case(
        Row(sizes=(1, 1, 2), cp=2, sequence=CUT_LENGTH), families.OLMo2Config(**SIZES)),
    "dp 2, whole layers": Case(
        Row(sizes=(1, 2, 1)), families.OLMo2Config(**SIZES),
        keys={"general.reproducible_max_tp": "1"}),
    "dp 2, ep 2, factors": Case(
        Row(sizes=(1, 2, 1), ep=2, zero=3),
        families.GraniteHybridConfig(
            **SIZES, **ROUTED, layer_types=LINEAR, embedding_multiplier=3.0,
            attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=3.0,
            shared_intermediate_size=40, mamba_n_heads=8, mamba_n_groups=4, mamba_d_state=8,
            mamba_chunk_size=8)),
}  # fmt: skip


def configure(case: Case, folder: Path, run: str, alone: bool) -> tuple[Row, Config]:
    """Return the layout of a case, or that of one process, and its config."""
    row = grid_bits.alone(case.row) if alone else case.row
    keys = {**grid_bits.keys(row, case.row), **case.keys}
    plain = replace(row, ep=1) if case.model is not None else row
    config = grid_run.configure(plain, folder, run, 1, None, keys)
    if case.model is not None:
        config = replace(config, model=replace(config.model, model_config=case.model))
        config = replace(config, parallelism=replace(config.parallelism, ep=row.ep))
    return row, config


def target_mask(samples: Tensor, sequence: int) -> Tensor:
    """Rows (R,) have targets (R, sequence): at least the first half, no two of a step as many."""
    count = sequence - (samples * 7 + samples // 3) % (sequence // 2)
    return arange(sequence)[None] < count[:, None]


def with_domains(batch: Batch) -> tuple[Batch, DomainObjective]:
    """Give rows two domains by turns, and losses of a reference that follow from the samples."""
    samples = batch.samples_MB
    reference = (5.0 + samples[..., None] % 7 / 10).expand(batch.labels_MBS.shape)
    objective = DomainObjective(
        names=("one", "other"), factors=(0.7, 1.3), reference_MBS=reference.contiguous()
    )
    return replace(batch, sources_MB=samples % 2), objective


def watch_lines(files: Mapping[str, str]) -> dict[str, set[int]]:
    """Begin to watch which lines of files are run, in this thread and new ones.

    Args:
        files: names by path; none: nothing is watched.

    Returns:
        For each name the numbers of the lines, which is filled from now on.
    """
    seen: dict[str, set[int]] = {name: set() for name in files.values()}

    def watch(frame: FrameType, event: str, _: object) -> Any:
        name = files.get(frame.f_code.co_filename)
        if name is None:
            return None
        seen[name].add(frame.f_lineno)
        return watch

    if files:
        threading.settrace(watch)
        sys.settrace(watch)
    return seen


def one_step(
    mesh: Mesh, config: Config, domains: bool, files: Mapping[str, str]
) -> tuple[Numbers, list[Piece], list[Piece], Lines]:
    """Compute a step on a rank.

    Args:
        mesh: of all ranks.
        config: of the training.
        domains: as in ``Case``.
        files: whose lines are watched: names by path.

    Returns:
        Loss, norm, learning rate, what was minimised, and further figures; pieces of gradients, and
        of weights, moments and averages after the step; the lines of those files that were run.
    """
    seen = watch_lines(files)
    training = build_training(config, mesh)
    corpus, gradients = open_corpus(training.data, 0), list[Piece]()
    with open_loader(training.data, mesh, corpus, Cursor(), target_mask) as loader:
        batch = next(loader)
    batch, objective = with_domains(batch) if domains else (batch, None)
    found = training_step(
        training, batch, 1, objective=objective,
        look=lambda own: gradients.extend(slice_pieces(training, own)),
    )  # fmt: skip
    averages = training.averages.state() if training.averages else {}
    state = pieces_of({**training.optimizer.state(), **averages}, mesh)
    figures = json.dumps(found.figures, default=str)
    numbers = found.loss, found.grad_norm, found.lr, found.minimised, figures
    after = weight_pieces(training) + state
    sys.settrace(None)
    return numbers, gradients, after, {name: sorted(lines) for name, lines in seen.items()}


def measure(case: Case, folder: Path, alone: bool, files: Mapping[str, str]) -> tuple[Any, Lines]:
    """Return the step of a case, whole, and the lines that any rank ran."""
    seen = watch_lines(files)
    row, config = configure(case, folder, "run", alone)
    sys.settrace(None)
    threading.settrace(None)  # pyrefly: ignore[bad-argument-type]
    fork = multiprocessing.get_context("fork")
    with (
        mock.patch.object(multiprocessing, "get_context", lambda _: fork),
        mock.patch("kenotron_dist.spawn._PATIENCE", 0.05),  # forks have one another's pipes
    ):
        ranks = spawn(
            one_step, config, case.domains, files, **row.axes, timeout=timedelta(seconds=SECONDS)
        )
    lines = {
        name: sorted(own.union(*(rank[3][name] for rank in ranks))) for name, own in seen.items()
    }
    numbers = [rank[0] for rank in ranks]
    whole = [join_pieces(rank[part] for rank in ranks) for part in (1, 2)]
    return (numbers, *whole), lines


def differing(got: Any, want: Any) -> list[str]:
    """Name what is not the same bits as one process's."""
    names = ("loss", "norm", "rate", "what is minimised", "figures")
    ranks, [right] = got[0], want[0]
    found = [n for i, n in enumerate(names) if any(rank[i] != right[i] for rank in ranks)]
    found += [f"gradient of {name}" for name in unequal(got[1], want[1])]
    return found + unequal(got[2], want[2])


def answer(
    out: Path, folder: str, cases: Sequence[str], files: Mapping[str, str], reference: bool
) -> None:
    """Write a list of what came of each case: its name with ``differs``, or with ``error``.

    Args:
        out: the file.
        folder: documents and references are there.
        cases: names of ``CASES``. Nothing is computed after one that differs.
        files: whose lines are watched.
        reference: one process is measured first, and all cases are computed.
    """
    home, found = Path(folder), list[dict[str, Any]]()
    for name in cases:
        file = home / f"{list(CASES).index(name)}.pickle"
        try:
            if reference:
                file.write_bytes(pickle.dumps(measure(CASES[name], home, True, {})[0]))
            got, lines = measure(CASES[name], home, False, files)
            faults = differing(got, pickle.loads(file.read_bytes()))
            found.append({"case": name, "differs": faults, "lines": lines})
        except RankError as error:
            found.append({"case": name, "error": str(error).strip().splitlines()[-1][:200]})
        except ValueError as error:
            if "do not agree" not in str(error):
                raise
            found.append({"case": name, "differs": [f"replicas: {error}"[:200]]})
        out.write_text(json.dumps(found))
        if found[-1].get("differs") and not reference:
            break
