"""Nanotron's table of speeds: a line in a CSV file for each run.

With ``NANOTRON_BENCHMARK=1`` a run ends after a few steps.
"""

from __future__ import annotations

import csv
import fcntl
import io
import os
import socket
import statistics
from pathlib import Path
from typing import Any

from kenotron_command import short
from kenotron_dist import Mesh, broadcast_object, gather_objects
from kenotron_dist.placement import named_parameters
from kenotron_models import DecoderSpec, parameter_count
from kenotron_train.assemble import TrainingRun
from kenotron_train.log.figures import Meter, StepFigures
from kenotron_train.log.run_name import job_id, run_name

STEPS = 4
"""Steps of a run with NANOTRON_BENCHMARK=1."""
COLUMNS = (
    "job_id", "name", "nodes", "seq_len", "mbs", "batch_accum", "gbs", "mTFLOPs", "hTFLOPs",
    "tok/s/gpu", "Mem Alloc (GB)", "Mem Res (GB)", "dp", "pp", "tp", "cp", "ep", "pp_engine",
    "tp_mode", "tp_async_comm", "recompute_layer", "hidden_size", "hidden_act", "num_layers",
    "num_heads", "num_kv_heads", "max_pos", "vocab_size", "tie_word_embeddings", "dtype",
    "zero_stage", "ddp_bucket_cap_mb", "accumulate_grad_in_fp32", "Total Params", "Local Params",
)  # fmt: skip
LAYOUT = ("dp", "pp", "tp", "cp", "ep", "pp_engine", "tp_mode", "recompute_layer")
"""Columns that are keys of ``parallelism``."""
GIB = 1.024**3
"""Nanotron's GB (a GiB) in GB."""


def is_benchmark(mesh: Mesh) -> bool:
    """Return whether rank 0's environment asks to end after ``STEPS`` steps. Collective."""
    return bool(broadcast_object(os.environ.get("NANOTRON_BENCHMARK") == "1", mesh.world))


def check_table(path: str) -> None:
    """Raise ValueError unless lines can be added to the file; OSError when it cannot be read."""
    file = Path(path)
    if file.is_dir():
        raise ValueError(f"general.benchmark_csv_path: {path} is a folder; give a file's path")
    if file.exists() and (head := file.read_text(encoding="utf-8").split("\n", 1)[0]):
        columns = next(csv.reader([head]))
        if tuple(columns) != COLUMNS:
            raise ValueError(
                f"general.benchmark_csv_path: {path} has other columns ({', '.join(columns[:4])}, "
                "...); give the path of a new file"
            )


def table_row(training: TrainingRun, meter: Meter, steps: list[StepFigures]) -> dict[str, Any]:
    """The line of a run by column: speeds of its median step, the first one left out.

    The same on every rank but for memory. Collective over the mesh. ``meter`` works out speeds;
    ``steps`` are those of one stage at least; raises ValueError when there is none.
    """
    parallelism, mesh, tokens = training.cost.parallelism, training.mesh, training.data.tokens
    if not steps:
        raise ValueError("no step was made: there is no speed to write down")
    usual = steps[1:] or steps
    middle = statistics.median_low([figures.times.step for figures in usual])
    step = next(figures for figures in usual if figures.times.step == middle)
    peak = max(each.memory.peak for each in steps)
    reserved = max(each.memory.reserved or each.memory.peak for each in steps)
    hosts = len(set(gather_objects(socket.gethostname(), mesh.world)))
    tflops = f"{meter.tflops(step):.4g}"
    local = sum(p.numel() for p in named_parameters(training.model.stack).values())
    return {
        "job_id": job_id(),
        "name": run_name(training.log.general.run),
        "nodes": hosts,
        "seq_len": meter.sequence(step.step),
        "gbs": step.samples,
        "mTFLOPs": tflops,
        "hTFLOPs": tflops,
        "tok/s/gpu": f"{meter.tokens_per_second(step) / meter.ranks:.2f}",
        "Mem Alloc (GB)": f"{peak / GIB:.2f}",
        "Mem Res (GB)": f"{reserved / GIB:.2f}",
        "Total Params": short(parameter_count(training.plan.spec)),
        "Local Params": short(local),
        "mbs": tokens.micro_batch_size,
        "batch_accum": tokens.batch_accumulation_per_replica,
        "dtype": str(training.plan.dtype).removeprefix("torch."),
        "zero_stage": training.optim.zero_stage,
        "ddp_bucket_cap_mb": training.cost.bucket_mb,
        "accumulate_grad_in_fp32": training.optim.accumulate_grad_in_fp32,
        "tp_async_comm": parallelism.tp_linear_async_communication,
        **{key: getattr(parallelism, key) for key in LAYOUT},
        **_sizes(training.plan.spec),
    }


def add_row(path: str, row: dict[str, Any]) -> None:
    """Add a line, and the header to a new file, as one write under a lock. Raises OSError."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        if os.fstat(out.fileno()).st_size == 0:
            table.writeheader()
        table.writerow(row)
        out.write(text.getvalue().encode())


def _sizes(model: DecoderSpec) -> dict[str, Any]:
    first = model.blocks[0] if model.blocks else None  # of transformers: it has no blocks of ours
    mixer, feed_forward = getattr(first, "mixer", None), getattr(first, "feed_forward", None)
    return {
        "hidden_size": model.hidden_size,
        "hidden_act": getattr(feed_forward, "activation", ""),
        "num_layers": model.num_hidden_layers,
        "num_heads": getattr(mixer, "heads", ""),
        "num_kv_heads": getattr(mixer, "kv_heads", ""),
        "max_pos": model.max_position_embeddings,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
