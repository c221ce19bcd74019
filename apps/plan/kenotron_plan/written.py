"""Files of a plan: the config on a chosen layout, and the line that starts it."""

from __future__ import annotations

import shlex
from pathlib import Path

from kenotron_config import Config, dump_config
from kenotron_cost import PlannedLayout, with_layout


def write_config(config: Config, layout: PlannedLayout, target: Path, devices: int) -> str:
    """Write a config on a layout, and return the line that starts it.

    Args:
        config: the run.
        layout: the layout.
        target: a file that is not there yet.
        devices: of a node.

    Raises:
        ValueError: there is such a file.
        OSError: it cannot be written.
    """
    if target.exists():
        raise ValueError(f"--write {target}: there is such a file; name a new one")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(dump_config(with_layout(config, layout)), encoding="utf-8")
    return launch_line(target, layout.ranks, devices)


def launch_line(config: Path, ranks: int, devices: int) -> str:
    """Return the command that starts a config on so many ranks."""
    file = shlex.quote(str(config))
    if ranks <= devices:
        return f"kenotron train --config-file {file}"
    return f"kenotron slurm --config-file {file} --nodes {ranks // devices}"
