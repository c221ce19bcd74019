"""The command line of the generation app."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron_ckpt import passed_over
from kenotron_data import decode, encode, printable
from kenotron_dist import (
    STALLED,
    Mesh,
    MeshConfig,
    PeerLost,
    RankError,
    first_to_say,
    start,
)
from kenotron_generate.load import Description, describe, load_model
from kenotron_models import generate

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


@dataclass(frozen=True)
class Request:
    """What to generate."""

    prompt: str
    max_new_tokens: int
    temperature: float
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the continuation of a prompt; the exit status."""
    arguments = _parser().parse_args(argv)
    request = Request(
        arguments.prompt, arguments.max_new_tokens, arguments.temperature, arguments.seed
    )
    if not request.prompt or request.max_new_tokens < 0:
        given = f"--prompt {request.prompt!r} --max-new-tokens {request.max_new_tokens}"
        return _fail(f"{given}: give a text to continue and a number of tokens from 0")
    try:
        described = describe(arguments.ckpt_path)
        if described.folder != Path(arguments.ckpt_path):
            newer = passed_over(described.folder)
            more = (
                f"; newer steps {newer} are damaged or not what latest.txt names" if newer else ""
            )
            print(f"reading {described.folder}{more}", file=sys.stderr)
        pp, tp = (_size(name, getattr(arguments, name), described) for name in ("pp", "tp"))
        start(continue_text, described, request, config=MeshConfig(pp=pp, tp=tp))
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except PeerLost as error:
        return _fail(str(error), STALLED)
    except RankError as error:
        known = error.is_any(ValueError, OSError, PeerLost) or not error.trace
        return _fail(str(error) if known else error.trace, error.code)
    except (ValueError, OSError) as error:
        return _fail(str(error))
    return 0


def _fail(text: str, code: int = 1) -> int:
    if first_to_say(text):
        print(f"error: {text}", file=sys.stderr, flush=True)
    return code


def continue_text(mesh: Mesh, described: Description, request: Request) -> None:
    """Print the prompt and what the model adds to it. Collective over the mesh.

    Raises ValueError for an empty prompt.
    """
    pipeline = load_model(described, mesh)

    def forward(tokens: Tensor, context: Any) -> Tensor | None:
        logits = pipeline.forward([tokens], [context])
        return logits[0] if logits else None

    vocab_size = described.model.vocab_size
    prompt = encode([request.prompt], 256).tolist()
    stop = described.model.eos_token_id
    new = generate(
        forward,
        prompt,
        mesh,
        window=described.sequence_length,
        vocab_size=vocab_size,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
        stop=stop if stop >= 256 else None,  # below, it is a byte of text
    )
    text = decode([*prompt, *new])
    if mesh.rank == 0:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        print(printable(text) if sys.stdout.isatty() else text, flush=True)


def _size(name: str, given: int, described: Description) -> int:
    if given < 0:
        raise ValueError(f"--{name} {given}: give a number of ranks, or 0 for the checkpoint's")
    return given or described.sizes.get(name, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python apps/generate", description="Continue a prompt from a checkpoint."
    )
    parser.add_argument("--ckpt-path", required=True, help="a step folder or a run folder")
    parser.add_argument("--prompt", default="def ", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.7, help="0: likeliest token")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; 0: as trained")
    parser.add_argument("--pp", type=int, default=1, help="pipeline ranks; 0: as trained")
    parser.add_argument("--dp", type=int, default=1, choices=[1], help="must be 1")
    return parser
