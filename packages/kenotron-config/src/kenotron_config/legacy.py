"""Older spellings of Nanotron's and Kénotron's files, rewritten to the ones of today."""

from __future__ import annotations

from typing import Any

from kenotron_config.yaml_build import Report
from kenotron_models import FAMILIES

_ADAM = ("adam_eps", "adam_beta1", "adam_beta2", "torch_adam_is_fused")
_AXES = {"context_parallel_size": "cp", "expert_parallel_size": "ep"}
_RENAMED = {"interleaved_rotary": "rope_interleaved"}
_DATASET = {
    "dataset_config_name": "hf_dataset_config_name",
    "dataset_path": "dataset_folder",
    "training_folder": "dataset_folder",
}
_BRRR = ("brrr_data", "model.n_layer", "model.n_head", "model.d_model", "model.n_embd")
"""Keys of files that are older than Nanotron's."""


def modernise(data: dict[str, Any], report: Report) -> dict[str, Any]:
    """The same config in the spelling of today; what is said twice is reported.

    - ``optimizer.adam_eps`` and its like go to ``optimizer.optimizer_factory``;
    - a top-level ``data`` is one stage that starts at step 1;
    - a top-level ``datastates`` goes to ``checkpoints`` and chooses its engine;
    - ``parallelism.context_parallel_size`` is ``parallelism.cp``, ``expert_parallel_size`` is
      ``ep``;
    - ``parallelism.recompute_granularity`` is ``recompute``;
    - a data set's ``dataset_config_name`` is ``hf_dataset_config_name``, and ``dataset_path`` and
      ``training_folder`` are ``dataset_folder``;
    - ``interleaved_rotary`` is ``rope_interleaved``;
    - the marker of another family is left out if false.
    """
    data = dict(data)
    for name, rewrite in (
        ("optimizer", _optimizer),
        ("parallelism", _parallelism),
        ("data", _data),
        ("datastates", _datastates),
    ):
        if data.get(name) is not None:
            rewrite(data, report)
    for name in ("data", "datastates"):
        if name in data and data[name] is None:
            del data[name]
    _datasets(data, report)
    # A file may have the markers of several families: next to a true one, false ones are left out.
    model = data.get("model")
    sizes = model.get("model_config") if isinstance(model, dict) else None
    if isinstance(sizes, dict):
        marked = any(_is_marker(name) and value is True for name, value in sizes.items())
        renamed = {
            _RENAMED.get(name, name): value
            for name, value in sizes.items()
            if not (marked and _is_marker(name) and value is False)
        }
        data["model"] = {**data["model"], "model_config": renamed}
    return data


def without_former(data: dict[str, Any]) -> dict[str, Any]:
    """Leave out the keys of the model that its family had once, and that nothing reads."""
    model = data.get("model")
    sizes = model.get("model_config") if isinstance(model, dict) else None
    if not isinstance(sizes, dict):
        return data
    former = [
        name
        for each in FAMILIES
        if sizes.get(each.marker) is True
        for name in getattr(each.config, "former", ())
        if name not in each.config.__dataclass_fields__
    ]
    kept = {name: value for name, value in sizes.items() if name not in former}
    return {**data, "model": {**data["model"], "model_config": kept}}


def before_nanotron(data: dict[str, Any]) -> str | None:
    """Return the key that marks a file as one of BRRR; None: there is no such key."""
    model = data.get("model")
    for path in _BRRR:
        section, _, name = path.rpartition(".")
        owner = model if section else data
        if isinstance(owner, dict) and name in owner and "model_config" not in owner:
            return path
    return None


def _is_marker(name: str) -> bool:
    return name.startswith("is_") and name.endswith("_config")


def modern_path(path: str) -> str:
    """The dotted path of today of one in an older spelling."""
    first, _, rest = path.partition(".")
    if first == "optimizer" and rest in _ADAM:
        return f"optimizer.optimizer_factory.{rest}"
    if first == "parallelism" and rest in _AXES:
        return f"parallelism.{_AXES[rest]}"
    if path == "parallelism.recompute_granularity":
        return "parallelism.recompute"
    if first == "data" and rest:
        return f"data_stages.0.{path}"
    if first == "datastates" and rest:
        return f"checkpoints.{path}"
    head, _, last = path.rpartition(".")
    renamed = _DATASET if head.endswith("data.dataset") else _RENAMED
    return f"{head}.{renamed[last]}" if last in renamed else path


def _optimizer(data: dict[str, Any], report: Report) -> None:
    section = data["optimizer"]
    flat = {name: section[name] for name in _ADAM if isinstance(section, dict) and name in section}
    if not flat:
        return
    factory = section.get("optimizer_factory")
    if factory is not None:
        for name in flat:
            report(f"optimizer.{name}", "optimizer.optimizer_factory is given, too; keep one")
    rest = {name: value for name, value in section.items() if name not in flat}
    data["optimizer"] = rest if factory is not None else {**rest, "optimizer_factory": flat}


def _parallelism(data: dict[str, Any], report: Report) -> None:
    section = data["parallelism"]
    if not isinstance(section, dict):
        return
    # Both spellings may be given where they agree.
    rest = {name: value for name, value in section.items() if name not in _AXES}
    for old, name in _AXES.items():
        if old in section and rest.setdefault(name, section[old]) != section[old]:
            report(f"parallelism.{old}", f"{name} is given, too, with another value; keep one")
    granularity = rest.pop("recompute_granularity", None)
    if granularity is not None and rest.setdefault("recompute", granularity) != granularity:
        report("parallelism.recompute_granularity", "recompute is given, too; keep one")
    data["parallelism"] = rest


def _datasets(data: dict[str, Any], report: Report) -> None:
    """Rename the keys of the data set of each stage."""
    stages = data.get("data_stages")
    if not isinstance(stages, list):
        return
    found = []
    for number, stage in enumerate(stages):
        inner = stage.get("data") if isinstance(stage, dict) else None
        if isinstance(inner, dict) and isinstance(section := inner.get("dataset"), dict):
            path = f"data_stages.{number}.data.dataset"
            renamed = _renamed_dataset(section, path, report)
            stage = {**stage, "data": {**inner, "dataset": renamed}}
        found.append(stage)
    data["data_stages"] = found


def _renamed_dataset(section: dict[str, Any], path: str, report: Report) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in section.items():
        now = _DATASET.get(name, name)
        if now != name and (now in renamed or now in section):
            report(f"{path}.{name}", f"{now} is given, too; keep one")
        renamed.setdefault(now, value)
    return renamed


def _data(data: dict[str, Any], report: Report) -> None:
    if data.get("data_stages") is not None:
        report("data", "data_stages is given, too; keep one")
    else:
        stage = {"name": "Training Stage", "start_training_step": 1, "data": data["data"]}
        data["data_stages"] = [stage]
    del data["data"]


def _datastates(data: dict[str, Any], report: Report) -> None:
    section = data.get("checkpoints")
    if isinstance(section, dict) and section.get("datastates") is not None:
        report("datastates", "checkpoints.datastates is given, too; keep one")
    elif isinstance(section, dict):
        chosen = section.get("checkpointing_engine") or "datastates"
        pool = {"datastates": data["datastates"], "checkpointing_engine": chosen}
        data["checkpoints"] = {**section, **pool}
    del data["datastates"]
