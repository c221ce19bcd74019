"""The command line of the generation app."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from kenotron_ckpt import passed_over
from kenotron_command import OK, add_layout, called, fail, framed, layout_sizes
from kenotron_data import tokenizer_libraries
from kenotron_dist import MeshConfig, explained, first_to_say, start
from kenotron_dist.diagnosis import Diverged
from kenotron_dist.launch import launcher
from kenotron_generate.batch_generation import Request, continue_prompts, tokenizer_name
from kenotron_generate.load import Description, describe
from kenotron_generate.prompts import FROM_STDIN, read_prompts, with_stdin
from kenotron_models import Sampling, expert_count, expert_layers

COMMAND = "kenotron-generate"
"""Name of the installed program."""
USER_ERRORS = (ValueError, OSError, ImportError, Diverged)
"""Errors whose message is enough; others come with a traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a model adds to prompts; the exit status."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks fork, and share the cores
    arguments = generate_parser().parse_args(argv)
    return framed(
        lambda: _generate(arguments),
        explain=lambda error: explained(error, *USER_ERRORS),
        report=lambda text, status: fail(text if first_to_say(text) else "", status),
    )


def _generate(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    described = describe(arguments.ckpt_path)
    _say_which(described, arguments.ckpt_path)
    sizes = layout_sizes(arguments, described.sizes)
    _check_ep(described, sizes)
    start(
        continue_prompts,
        described,
        request,
        config=MeshConfig(**sizes),
        preload=tokenizer_libraries(tokenizer_name(described, request)),
        threads=_threads(arguments.threads),
    )
    return OK


def _request(arguments: argparse.Namespace) -> Request:
    """Return the request that the flags describe. Raises ValueError, OSError."""
    for name in ("max_new_tokens", "batch_size"):
        if (given := getattr(arguments, name)) < (least := int(name == "batch_size")):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {given}: give a number from {least} on")
    if "" in arguments.stop:
        raise ValueError("--stop '': an empty text ends every other; leave it out")
    _check_logprobs(arguments.logprobs, arguments.jsonl)
    _check_written(arguments.jsonl)
    prompts = read_prompts(arguments.prompt, arguments.prompt_file)
    if launcher() == "none":
        prompts[:] = with_stdin(prompts)  # the processes that are started have none
    return Request(
        prompts=prompts,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        sampling=Sampling(
            temperature=arguments.temperature,
            top_k=arguments.top_k or None,
            top_p=arguments.top_p,
            repetition_penalty=arguments.repetition_penalty,
            seed=arguments.seed,
        ),
        stop=arguments.stop,
        template=arguments.chat_template,
        special=arguments.special_tokens,
        cached=arguments.cache,
        tokenizer=arguments.tokenizer,
        check=arguments.check,
        logprobs=arguments.logprobs,
        threads=_threads(arguments.threads),
        jsonl=arguments.jsonl,
    )


def _check_logprobs(logprobs: int | None, jsonl: str | None) -> None:
    if logprobs is None:
        return
    if logprobs < 0:
        raise ValueError(f"--logprobs {logprobs}: give a number of likeliest tokens from 0 on")
    if jsonl is None:
        raise ValueError(
            f"--logprobs {logprobs}: log-probabilities are written as JSON lines: give --jsonl "
            "FILE, or --jsonl - for standard output"
        )


def _check_written(jsonl: str | None) -> None:
    """Results are written at the end: what would fail then is said now."""
    if jsonl is None or jsonl == "-":
        return
    if Path(jsonl).is_dir():
        raise ValueError(f"--jsonl {jsonl}: this is a folder; name a file in it")
    if not Path(jsonl).absolute().parent.is_dir():
        raise ValueError(f"--jsonl {jsonl}: there is no folder {Path(jsonl).parent}; make it first")


def _say_which(described: Description, given: str) -> None:
    if described.folder in (given, Path(given)):
        return
    newer = passed_over(described.folder)
    more = f"; newer steps {newer} are damaged or not what latest.txt names" if newer else ""
    print(f"reading {described.folder}{more}", file=sys.stderr)


def _check_ep(described: Description, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless ep divides the ranks of a stage and the experts of every layer."""
    if (ep := sizes["ep"]) == 1:
        return
    counts = {part.router.experts for part in expert_layers(described.model).values()}
    counts = counts or {expert_count(described.model)}  # of a model of transformers, its stacks
    if counts == {1}:
        raise ValueError(f"--ep {ep}: {described.folder} has no experts; leave --ep out")
    if (ranks := sizes["dp"] * sizes["cp"] * sizes["tp"]) % ep:
        raise ValueError(
            f"--ep {ep}: it must divide dp x cp x tp ({ranks}), the ranks of a pipeline stage; "
            "change --ep, --dp, --cp or --tp"
        )
    for count in sorted(counts):
        if count % ep:
            raise ValueError(f"--ep {ep}: it must divide the {count} experts of a layer; change it")


def _threads(given: int | None) -> int | None:
    if given is not None and given < 1:
        raise ValueError(f"--threads {given}: give a number from 1 on")
    return given


def _add_drawing(parser: argparse.ArgumentParser) -> None:
    """Add the flags of how tokens are drawn, and until when."""
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=128, help="(default: 128)")
    add(
        "--temperature",
        type=float,
        default=0.7,
        help="0: always the likeliest token (default: 0.7)",
    )
    add("--top-k", type=int, help="draw among the k likeliest tokens; 0: among all")
    add("--top-p", type=float, help="draw among the likeliest tokens of this share")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        help="above 1: less of what was there (default: 1)",
    )
    add("--seed", type=int, default=42, help="of the draws (default: 42)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end at this text, which is not printed; may be given several times",
    )


def generate_parser() -> argparse.ArgumentParser:
    """Return the flags of the program."""
    parser = argparse.ArgumentParser(
        prog=called("python apps/generate", name=COMMAND),
        description="Continue prompts from a checkpoint or a model folder of Hugging Face.",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"{COMMAND} {version(COMMAND)}")
    add(
        "--ckpt-path",
        required=True,
        help="a step folder or a run folder (a path or a URL), or an HF model folder",
    )
    add(
        "--prompt",
        action="append",
        default=[],
        help=f"text to continue; may be given several times; {FROM_STDIN}: standard input",
    )
    add("--prompt-file", metavar="FILE", help="a prompt a line, or JSON lines (.jsonl)")
    _add_drawing(parser)
    add("--batch-size", type=int, default=8, help="prompts continued together (default: 8)")
    add(
        "--logprobs", type=int, metavar="N",
        help="write log-probabilities of each token of prompt and text to --jsonl, and of the N "
        "likeliest at its place; those of a reproducible training have its bits",
    )  # fmt: skip
    add("--jsonl", metavar="FILE", help="write results as JSON lines; -: to standard output")
    add(
        "--tokenizer",
        metavar="NAME",
        help="instead of the checkpoint's: a folder, a "
        "tokenizer.json, a name that transformers loads, or bytes",
    )
    flag = argparse.BooleanOptionalAction
    add(
        "--chat-template",
        action=flag,
        default=True,
        help="texts are turns of a chat, where the tokenizer has a template (default: yes)",
    )
    add(
        "--special-tokens",
        action=flag,
        help="the tokenizer's special tokens around a prompt (default: as the model was trained)",
    )
    add(
        "--cache", action=flag, default=True,
        help="keep keys and values between tokens (default: yes)",
    )  # fmt: skip
    add(
        "--check",
        action=flag,
        default=True,
        help="compare an HF model folder with transformers first, up to 1e9 parameters "
        "(default: yes)",
    )
    add_layout(parser)
    add("--threads", type=int, help="CPU threads of each rank (default: a share of the cores)")
    return parser
