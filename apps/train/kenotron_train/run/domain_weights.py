"""``doremi_domain_weights_<step>.json``: the weights of a proxy run, for people and programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kenotron_engine import DomainWeights

NAMED = re.compile(r"doremi_domain_weights_(\d+)\.json")
"""Names of the files; the number is a step."""


def write_weights(folder: Path, step: int, weights: DomainWeights) -> str:
    """Write the weights after a step, and their average over all steps.

    Returns what went wrong, if anything did: the checkpoint has them as well.
    """
    found = {
        "step": step,
        "domain_names": list(weights.names),
        "weights": list(weights.weights),
        "average": list(weights.average),
    }
    target = folder / f"doremi_domain_weights_{step}.json"
    fresh = target.with_name(f"new.{target.name}")
    try:
        fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        fresh.replace(target)
    except OSError as error:
        return f"no {target.name} could be written: {error}"
    return ""


def read_average(folder: Path) -> tuple[int, dict[str, float]]:
    """Return the last step of a proxy run that was saved, and the average of each domain's weight.

    Raises:
        ValueError: the folder has no weights.
    """
    names = folder.iterdir() if folder.is_dir() else ()
    steps = {int(match[1]): path for path in names if (match := NAMED.fullmatch(path.name))}
    if not steps:
        raise ValueError(
            f"{folder} has no doremi_domain_weights_<step>.json: give the folder of a proxy run, "
            "which writes one with each checkpoint"
        )
    last = max(steps)
    found = json.loads(steps[last].read_text(encoding="utf-8"))
    return last, dict(zip(found["domain_names"], found["average"], strict=True))
