"""Files of a plan: the config on a chosen layout, and the script that starts it."""

from __future__ import annotations

import shlex
from pathlib import Path

from kenotron_config import Config, dump_config
from kenotron_cost import PlannedLayout, with_layout


def check_new(target: Path) -> None:
    """Raise ValueError where a config or its script would replace a file."""
    for file in (target, script_of(target)):
        if file.exists():
            raise ValueError(f"--write {target}: there is such a file ({file}); name a new one")


def script_of(config: Path) -> Path:
    """Return the file of the script that starts a config."""
    return config.with_suffix(".sh")


def write_config(config: Config, layout: PlannedLayout, target: Path, devices: int) -> str:
    """Write a config on a layout and a script that starts it, whose line is returned.

    Args:
        config: the run.
        layout: the layout.
        target: a file that is not there yet.
        devices: of a node.

    Raises:
        ValueError: there is such a file.
        OSError: it cannot be written.
    """
    check_new(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(dump_config(with_layout(config, layout)), encoding="utf-8")
    line, script = launch_line(target.absolute(), layout.ranks, devices), script_of(target)
    script.write_text(f'#!/bin/sh\n# {layout.ranks} ranks\nexec {line} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return launch_line(target, layout.ranks, devices)


def launch_line(config: Path, ranks: int, devices: int) -> str:
    """Return the command that starts a config on so many ranks."""
    file = shlex.quote(str(config))
    if ranks <= devices:
        return f"kenotron train --config-file {file}"
    return f"kenotron slurm --config-file {file} --nodes {ranks // devices}"
