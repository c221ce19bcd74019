"""``python apps/plan calibrate``: measure this machine into a machine file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

import torch

from kenotron_ckpt import replace_text
from kenotron_command import BAD_INPUT, OK, count, framed
from kenotron_cost import Machine, MachineNumber, known_machines, machine_named, probes
from kenotron_dist import (
    Mesh,
    MeshConfig,
    RankError,
    counted_mesh,
    gather_objects,
    resolve,
    start,
    visible_gpus,
)
from kenotron_plan.program import fail, program, say

SECONDS, PARTS = 60.0, 6
"""Default time for all measurements, and their number."""
DTYPES = ("float32", "bfloat16")


def calibrate_main(argv: Sequence[str]) -> int:
    """Measure all ranks at once and write a machine file; the exit status.

    0: it was written; 2: the flags cannot be used, or the ranks could not be measured.
    """
    given = calibrate_parser().parse_args(argv)
    known = (OSError, ValueError, RankError)
    return framed(lambda: _calibrate(given), *known, status=BAD_INPUT, report=fail)


def _calibrate(given: argparse.Namespace) -> int:
    world, target = resolve(os.environ), Path(given.write)
    if target.exists():
        raise ValueError(f"--write {target}: there is such a file; name a new one")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"--write {target}: its folder is not there; make it first")
    if given.ranks is not None and world.launcher != "none":
        raise ValueError(f"--ranks: {given.ranks} was given; a launcher has started the ranks")
    if not given.seconds > 0:
        raise ValueError(f"--seconds: {given.seconds} was given; it must be above 0")
    base = machine_named(given.machine) if given.machine else None
    own = given.ranks or visible_gpus() or 1
    config = MeshConfig(dp=own if world.launcher == "none" else world.world_size)
    what = target, base, given.dtype, given.width, given.sequence_length, given.seconds
    return start(_measure, *what, config=config)


def _measure(
    mesh: Mesh,
    target: Path,
    base: Machine | None,
    dtype: str | None,
    width: int,
    sequence: int,
    seconds: float,
) -> int:
    """Measure this rank, and write the file on the first one."""
    name = dtype or ("float32" if mesh.device.type == "cpu" else "bfloat16")
    given = getattr(torch, name), width, seconds / PARTS
    shapes, found = _measured(mesh, sequence, *given)
    sharing = probes.sharing(mesh, *given)
    # All ranks measure at once, as they train; the file has their means.
    ranks = gather_objects(found, mesh.world)
    if mesh.rank == 0:
        machine = base or machine_named(_kind(mesh.device))
        measured = {key: mean(rank[key] for rank in ranks) for key in ranks[0]}
        # Communicators of the measurement are no context: a plan counts those of a layout.
        groups = len(counted_mesh(mesh.config, mesh.rank)[1])
        buffers = groups * machine["channels"] * machine["channel_buffer"]
        measured["context"] = max(0.0, measured["context"] - buffers)
        new = replace(_machine(machine, measured, mesh, name), sharing=sharing)
        replace_text(target, json.dumps(asdict(new), indent=2) + "\n")
        for sizes, rates in shapes.items():
            forward, both = (f"{rate / 1e12:.3g}" for rate in rates)
            say(f"product of {sizes}: {forward} TFLOP/s, forward and backward {both}")
        say(f"a rank computes {sharing:.2f} times as long while all ranks compute")
        for line in new.sources():
            say(line)
        say(f"Written: {target}")
    return OK


def _measured(
    mesh: Mesh, sequence: int, dtype: torch.dtype, width: int, seconds: float
) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return rates of products by their sizes, and the numbers of this rank by their keys."""
    shapes = probes.products(mesh, dtype, width, sequence, seconds)
    peak = max(max(rates) for rates in shapes.values())
    attention = probes.attention_rate(mesh, dtype, sequence, seconds)
    memory, context = probes.own_memory(mesh)
    found = {
        "peak_flops": peak,
        "product_efficiency": len(shapes) / sum(peak / both for _, both in shapes.values()),
        "attention_efficiency": attention / peak,
        "memory": memory,
        "context": context,
        "memory_bandwidth": probes.memory_bandwidth(mesh, dtype, 4 * width * width, seconds),
        "kernel_seconds": probes.kernel_seconds(mesh, dtype, seconds),
    }
    if mesh.world.size > 1:
        key = "node_bandwidth" if _one_host(mesh) else "network_bandwidth"
        found[key], found["latency"] = probes.links(mesh, seconds)
    return shapes, found


def _one_host(mesh: Mesh) -> bool:
    return len({*gather_objects(os.uname().nodename, mesh.world)}) == 1


def _kind(device: torch.device) -> str:
    """Return the known machine whose numbers stand for what is not measured.

    Raises:
        ValueError: no known machine has such a device.
    """
    if device.type == "cpu":
        return "cpu"
    name = torch.get_device_module(device).get_device_name(device)
    for known in known_machines():
        if known.lower() in name.lower():
            return known
    raise ValueError(f"--machine: no file is known for {name}; give one, of a machine near to it")


def _machine(base: Machine, measured: dict[str, float], mesh: Mesh, dtype: str) -> Machine:
    """Return a machine with the measured numbers in place of its own."""
    day, ranks = datetime.now(tz=UTC).date().isoformat(), mesh.world.size
    host = os.uname().nodename
    many = f"{ranks} rank{'s' * (ranks > 1)} at once"
    source = f"plan calibrate on {host}, {day}: {many}, {torch.get_num_threads()} threads each"
    numbers = {
        key: MachineNumber(measured[key], source, measured=True) if key in measured else number
        for key, number in base.numbers.items()
    }
    devices = base.devices if mesh.device.type != "cpu" else ranks
    return replace(
        base, name=f"{host}, from {base.name}", date=day, devices=devices, dtype=dtype,
        numbers=numbers,
    )  # fmt: skip


def calibrate_parser() -> argparse.ArgumentParser:
    """Return the flags of ``plan calibrate``."""
    parser = argparse.ArgumentParser(
        prog=f"{program()} calibrate",
        description="Measure the ranks of this machine, all at once as in a training, and write a "
        "machine file for plan --machine: products, attention, memory, the start of kernels, and "
        "with several ranks the links between them. What cannot be measured (power, the host's "
        "links, memory that CUDA takes) is that of a known machine. Run it with the threads or the "
        "launcher of the training.",
    )
    add = parser.add_argument
    add("--write", required=True, metavar="FILE", help="the machine file, which must be new")
    what = "local processes (default: one for each GPU, or one); a launcher starts its own"
    add("--ranks", type=count, metavar="N", help=what)
    what = "of products (default: float32 on a CPU, bfloat16 on a GPU)"
    add("--dtype", choices=DTYPES, help=what)
    what = "features of the layers whose products are measured (default: 512)"
    add("--width", type=count, default=512, metavar="N", help=what)
    what = "tokens of a micro-batch, for products and attention (default: 1024)"
    add("--sequence-length", type=count, default=1024, metavar="N", help=what)
    what = "a machine file, or the name of a known one, for what is not measured"
    add("--machine", metavar="FILE", help=what)
    what = f"for all measurements together (default: {SECONDS:g})"
    add("--seconds", type=float, default=SECONDS, help=what)
    return parser
