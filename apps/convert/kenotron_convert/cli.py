"""The command line of the conversion app."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kenotron_command import OK, called, framed, printable
from kenotron_convert.adapters import adapter_to_peft, merge_adapter
from kenotron_convert.averaging import average
from kenotron_convert.exporting import export_hf
from kenotron_convert.importing import compare_hf, import_hf, model_config
from kenotron_convert.shards import parse_size
from kenotron_convert.tokenizer_files import tokenizer_files
from kenotron_convert.upcycling import upcycle
from kenotron_dist.launch import threads_of_rank
from kenotron_models.hf import hub_folder

COMMAND = "kenotron-convert"
"""Name of the installed program."""
CKPT = ("--ckpt", "--ckpt-path")
PLACE = "a step folder or a run folder; a path or URL"
"""The second as other programs have it."""
MODEL = "config.json and safetensors; a folder, or a name of the hub that is in the cache"
THREADS = "of the CPU (default: OMP_NUM_THREADS, else the cores)"
DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a model; the exit status."""
    arguments = convert_parser().parse_args(argv)
    return framed(lambda: _convert(arguments), ValueError, OSError)


def _convert(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(_threads(arguments.threads))
    print(arguments.run(arguments), flush=True)
    return OK


def _threads(given: int | None) -> int:
    """Return the number of CPU threads: ``--threads``, else that of a program with one rank."""
    if given is None:
        return threads_of_rank(1)
    if given < 1:
        raise ValueError(f"--threads {given}: give a number from 1 on")
    return given


def _import(arguments: argparse.Namespace) -> str:
    dtype = arguments.dtype and getattr(torch, arguments.dtype)
    done = import_hf(
        arguments.hf,
        arguments.out,
        dtype=dtype,
        check=arguments.check,
        overwrite=arguments.overwrite,
    )
    if not tokenizer_files(arguments.hf):
        print(f"no tokenizer: {arguments.hf} has none", file=sys.stderr)
    return f"wrote {done.folder}; {_said(done.deviation, asked=arguments.check)}"


def _compare(arguments: argparse.Namespace) -> str:
    found = compare_hf(arguments.hf)
    return f"{arguments.hf}: {_said(found, asked=True)}"


def _config(arguments: argparse.Namespace) -> str:
    text = json.dumps(model_config(arguments.hf), indent=2)
    return re.sub(r"\bInfinity\b", ".inf", text)  # as YAML has it


def _said(deviation: float | None, *, asked: bool) -> str:
    """Return a sentence about the comparison of an import."""
    if deviation is None:
        return "logits were not compared" + ": transformers is not installed" * asked
    return f"logits and a gradient are those of transformers to {deviation:.1e} of the largest"


def _export(arguments: argparse.Namespace) -> str:
    done = export_hf(
        arguments.ckpt,
        arguments.out,
        tokenizer=arguments.tokenizer,
        shard_bytes=parse_size(arguments.max_shard_size),
        dtype=arguments.dtype and getattr(torch, arguments.dtype),
        check=arguments.check,
        overwrite=arguments.overwrite,
    )
    for reason in done.passed_over:
        print(f"passed over {printable(reason)}", file=sys.stderr)
    if not done.tokenizer:
        print(
            "no tokenizer: the run read bytes, or its tokenizer is not here; give --tokenizer",
            file=sys.stderr,
        )
    if done.not_carried:
        fields = ", ".join(done.not_carried)
        print(f"only training reads, and config.json does not have: {fields}", file=sys.stderr)
    compared = (
        "logits were not compared"
        if done.deviation is None
        else f"its logits are ours to {done.deviation:.1e} of the largest"
    )
    return f"wrote {done.folder} from {done.source}; {compared}"


def _upcycle(arguments: argparse.Namespace) -> str:
    written = upcycle(
        arguments.ckpt,
        arguments.out,
        experts=arguments.experts,
        top_k=arguments.top_k,
        noise=arguments.noise,
        seed=arguments.seed,
        overwrite=arguments.overwrite,
    )
    return f"wrote {written}"


def _average(arguments: argparse.Namespace) -> str:
    written = average(
        arguments.ckpt, arguments.out, ema=arguments.ema, overwrite=arguments.overwrite
    )
    return f"wrote {written}"


def _adapter(arguments: argparse.Namespace) -> str:
    count = adapter_to_peft(arguments.ckpt, arguments.out, overwrite=arguments.overwrite)
    return f"wrote {arguments.out}: adapters of {count} layers"


def _merge(arguments: argparse.Namespace) -> str:
    count = merge_adapter(
        arguments.adapter, arguments.base, arguments.out, overwrite=arguments.overwrite
    )
    return f"wrote {arguments.out}: adapters are added to {count} weights of {arguments.base}"


def _adapter_parsers(commands: Any) -> list[argparse.ArgumentParser]:
    """Add the commands of adapters."""
    adapter = commands.add_parser("adapter-to-peft", help="a folder of peft from a checkpoint")
    adapter.add_argument(*CKPT, required=True, help=PLACE)
    adapter.set_defaults(run=_adapter)
    merger = commands.add_parser("merge-adapter", help="a model folder with an adapter in it")
    merger.add_argument("--adapter", type=Path, required=True, help="folder of peft")
    merger.add_argument("--base", type=_model, required=True, help=MODEL)
    merger.set_defaults(run=_merge)
    for command in (adapter, merger):
        command.add_argument("--out", type=Path, required=True, help="folder to make")
    return [adapter, merger]


def _model(path: str) -> Path:
    return Path(hub_folder(path))


def convert_parser() -> argparse.ArgumentParser:
    """Return the flags of the program."""
    parser = argparse.ArgumentParser(
        prog=called("python apps/convert", name=COMMAND),
        description="Models between Hugging Face's folders and training checkpoints.",
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND} {version(COMMAND)}")
    commands = parser.add_subparsers(required=True, metavar="command")

    importer = commands.add_parser("hf-to-kenotron", help="a checkpoint from a model folder")
    importer.add_argument("--hf", type=_model, required=True, help=MODEL)
    importer.add_argument("--out", type=Path, required=True, help="run folder to write step 0 to")
    importer.set_defaults(run=_import)

    exporter = commands.add_parser("kenotron-to-hf", help="a model folder from a checkpoint")
    exporter.add_argument(*CKPT, required=True, help=PLACE)
    exporter.add_argument("--out", type=Path, required=True, help="folder to make")
    exporter.add_argument("--tokenizer", type=Path, help="folder of one, or a tokenizer.json")
    exporter.add_argument("--max-shard-size", default="5GB", help="of a file, as 5GB or 500MB")
    exporter.set_defaults(run=_export)
    upcycler = commands.add_parser("upcycle", help="a checkpoint with experts from a dense one")
    upcycler.add_argument(*CKPT, required=True, help=PLACE)
    upcycler.add_argument("--out", type=Path, required=True, help="run folder to write step 0 to")
    upcycler.add_argument("--experts", type=int, required=True, help="copies of a feed-forward")
    upcycler.add_argument("--top-k", type=int, default=2, help="experts of a token (default: 2)")
    upcycler.add_argument(
        "--noise", type=float, default=0.0,
        help="added to all copies but the first, relative to the weights' deviation (default: 0)",
    )  # fmt: skip
    upcycler.add_argument("--seed", type=int, default=42, help="of noise and routers")
    upcycler.set_defaults(run=_upcycle)
    averager = commands.add_parser("average", help="a checkpoint of the mean of several weights")
    averager.add_argument(
        *CKPT, required=True, nargs="+", help="step folders or run folders; paths or URLs"
    )
    averager.add_argument("--out", type=Path, required=True, help="run folder to write step 0 to")
    averager.add_argument(
        "--ema", action="store_true",
        help="take the moving averages that optimizer.weight_average keeps",
    )  # fmt: skip
    averager.set_defaults(run=_average)
    comparer = commands.add_parser("compare", help="a model folder, here and in transformers")
    comparer.add_argument("--hf", type=_model, required=True, help=MODEL)
    comparer.set_defaults(run=_compare)
    teller = commands.add_parser("config", help="the model.model_config of a model folder")
    teller.add_argument("--hf", type=_model, required=True, help=MODEL)
    teller.set_defaults(run=_config)
    for command in (importer, exporter):
        command.add_argument(
            "--no-check", dest="check", action="store_false", help="do not compare logits"
        )
        command.add_argument("--dtype", choices=DTYPES, help="of all tensors; else as they are")
    makers = (importer, exporter, upcycler, averager, *_adapter_parsers(commands))
    for command in (*makers, comparer, teller):
        command.add_argument("--threads", type=int, help=THREADS)
    for command in makers:
        command.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser
