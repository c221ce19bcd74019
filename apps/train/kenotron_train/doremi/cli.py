"""``python apps/train doremi``: reference, its losses, proxy, averaged weights, final run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from kenotron_command import framed
from kenotron_config import Config, Mask
from kenotron_dist import explained
from kenotron_dist.launch import launcher
from kenotron_train.called import parser_of
from kenotron_train.config_file import load_config
from kenotron_train.doremi.reference_pass import write_reference_losses
from kenotron_train.log.printing import fail, say
from kenotron_train.run.domain_weights import read_average
from kenotron_train.run.start_ranks import start_ranks
from kenotron_train.run.upload import upload_url

EXAMPLE = Path(__file__).with_name("doremi.yaml")
"""The config of the walk through all commands: four domains of the embedded corpus."""
COMMANDS = ("reference", "losses", "proxy", "weights", "final")
"""The commands in their order; `all` does one after the other."""
LIMIT = timedelta(minutes=5)
"""Time that a rank may keep others waiting while losses are written."""
Train = Callable[[Sequence[str], bool], int]
"""The command line of a training, and whether the process ends afterwards, to its exit status."""


@dataclass(frozen=True)
class _Walk:
    """Folders of the runs of a config, and the flags with which each is trained."""

    file: str
    overrides: tuple[str, ...]
    folder: Path
    """`checkpoints_path` of the config, below which each run has its own."""
    given: str | None
    """The reference's checkpoint that the config names; None: the run of `doremi reference`."""
    upload: str | None
    """The store of the config, in which each run has its own place."""

    @property
    def reference(self) -> str:
        """The reference's checkpoint."""
        return str(self.folder / "reference") if self.given is None else self.given

    def changes(self, command: str) -> list[str]:
        """List what differs from the config in the run of a command."""
        run = "proxy" if command == "losses" else command
        found = [f"checkpoints.checkpoints_path={json.dumps(str(self.folder / run))}"]
        named = json.dumps(self.reference) if run == "proxy" else "null"
        found.append(f"doremi.ref_model_resume_checkpoint_path={named}")
        if self.upload is not None:
            found.append(f"s3_upload.upload_s3_path={json.dumps(f'{self.upload}/{run}')}")
        if command == "final":
            _, average = read_average(self.folder / "proxy")
            found.append(f"doremi.domain_weights={json.dumps(list(average.values()))}")
        return found

    def flags(self, command: str) -> list[str]:
        """The command line of a training."""
        every = [*self.overrides, *self.changes(command)]
        return ["--config-file", self.file, *(part for each in every for part in ("--set", each))]


def doremi_main(argv: Sequence[str], train: Train) -> int:
    """Do one command of DoReMi, or all; ``train`` trains. Returns the exit status."""
    given = doremi_parser().parse_args(argv)
    file, overrides = given.config_file or str(EXAMPLE), tuple(given.set)
    known: list[Config] = []

    def work() -> int:
        config = load_config(file, overrides)
        known.append(config)
        if (doremi := config.doremi) is None:
            raise ValueError(f"{file}: doremi: is missing; add it with domain_names")
        walk = _Walk(
            file,
            overrides,
            folder=Path(config.checkpoints.checkpoints_path),
            given=doremi.ref_model_resume_checkpoint_path,
            upload=upload_url(config.s3_upload),
        )
        if given.command != "all":
            return _do(walk, given.command, train, leaves=True)
        if launcher() != "none":
            raise ValueError(
                "doremi all starts ranks several times: under a launcher give its commands one by "
                f"one ({', '.join(COMMANDS)})"
            )
        return _all(walk, train)

    return framed(
        work,
        explain=lambda error: explained(error, OSError, ValueError),
        report=lambda text, status: fail(text, status, Mask(*known)),
    )


def _all(walk: _Walk, train: Train) -> int:
    """All commands, up to the first that does not end well; those that are done do nothing."""
    for command in COMMANDS[0 if walk.given is None else 1 :]:
        say(f"doremi {command}")
        if status := _do(walk, command, train, leaves=command == COMMANDS[-1]):
            return status
    return 0


def _do(walk: _Walk, command: str, train: Train, *, leaves: bool) -> int:
    if command == "weights":
        return _weights(walk)
    if command != "losses":
        return train(walk.flags(command), leaves)
    config = load_config(walk.file, [*walk.overrides, *walk.changes(command)])
    start_ranks(write_reference_losses, config, LIMIT, leaves=leaves)
    return 0


def _weights(walk: _Walk) -> int:
    """Print the averaged weights of the proxy run, as a config has them."""
    step, average = read_average(walk.folder / "proxy")
    say(f"# averaged over {step} steps of {walk.folder / 'proxy'}")
    say("doremi:")
    say(f"  domain_names: {json.dumps(list(average))}")
    say(f"  domain_weights: {json.dumps(list(average.values()))}")
    return 0


def doremi_parser() -> argparse.ArgumentParser:
    """The flags of ``doremi``."""
    parser = parser_of(
        "doremi",
        "Learn the weights of domains with a small proxy model, then train with them. "
        "`reference` trains a reference model, `losses` stores its loss of every token that the "
        "proxy will read, `proxy` learns the weights, `weights` prints their average, `final` "
        "trains with it; `all` does one after the other, and continues where it was stopped. Each "
        "run has a folder of its name in checkpoints_path.",
    )
    add = parser.add_argument
    add("command", nargs="?", choices=("all", *COMMANDS), default="all", help="default: `all`")
    add(
        "--config-file", metavar="YAML",
        help="a config with a section `doremi`; default: four domains of the embedded corpus",
    )  # fmt: skip
    add("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="as for a training")
    return parser
