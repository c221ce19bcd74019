"""Keys of Nanotron's files that concern something other than a training, and are left out of it.

What is evaluated, logged or uploaded next to a training never keeps it from running: such a key is
named in one caution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kenotron_config.eval_sections import WITHOUT_EFFECT, LightEvalConfig
from kenotron_config.yaml_build import WRONG, build

LEFT_OUT = {
    "experiment_logger": "logging.trackers names trackers, and watching.md how they are set up",
    "general.entity": "the environment variable WANDB_ENTITY names a team",
    "general.kill_switch_path": "a signal ends a run with a checkpoint, for instance SIGTERM",
}
"""Keys that older files have, and what does their work here."""
OPTIONAL = ("lighteval", "s3_upload", "profiler")
"""Sections that ask for nothing where they are empty."""


def without_others(data: dict[str, Any], caution: Callable[[str], None]) -> dict[str, Any]:
    """Return a config without the keys that concern something other than the training.

    Args:
        data: the config; it is not changed.
        caution: called with a line for each key or section that is left out.
    """
    data = dict(data)
    for path, instead in LEFT_OUT.items():
        section, _, name = path.rpartition(".")
        owner = data.get(section) if section else data
        if not isinstance(owner, dict) or name not in owner:
            continue
        if owner[name] is not None:
            caution(f"{path}: is left out, for the training does not need it; {instead}")
        kept = {key: value for key, value in owner.items() if key != name}
        data = {**data, section: kept} if section else kept
    for name in OPTIONAL:
        if data.get(name) == {}:
            caution(f"{name}: is left out, because the section is empty; remove it")
            del data[name]
    if data.get("lighteval") is not None:
        data["lighteval"] = _without_results(data["lighteval"], caution)
        _without_wrong_evaluations(data, caution)
    return data


def _without_results(section: Any, caution: Callable[[str], None]) -> Any:
    """Return a section `lighteval` without the keys that have no effect, named in one caution."""
    if not isinstance(section, dict):
        return section
    found = []
    kept = dict(section)
    for part, names in WITHOUT_EFFECT.items():
        owner = kept.get(part) if part else kept
        if not isinstance(owner, dict):
            continue
        given = [name for name in names if name in owner]
        found += [f"{part}.{name}".strip(".") for name in given if owner[name] is not None]
        rest = {name: value for name, value in owner.items() if name not in given}
        kept = {**kept, part: rest} if part else rest
    if found:
        caution(
            f"lighteval: without effect: {', '.join(found)}; tasks are those of lm-eval, which say "
            "how text is generated; results go to metrics.jsonl, the run's trackers and its report"
        )
    return kept


def _without_wrong_evaluations(data: dict[str, Any], caution: Callable[[str], None]) -> None:
    """Remove a section `lighteval` that cannot be read."""
    found: list[str] = []

    def report(path: str, sentence: str) -> None:
        found.append(f"{path}: {sentence}")

    if build(LightEvalConfig | None, data["lighteval"], "lighteval", report) is WRONG:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        caution(
            "lighteval: is left out, so that nothing is evaluated during the training: "
            f"{found[0]}{more}"
        )
        del data["lighteval"]
