"""The key names of a YAML mapping, held against the dataclass that it describes.

Values are only brought into shape here (null, upper and lower case); pydantic judges them later.
"""

import difflib
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Report = Callable[[str, str], None]
"""Takes the dotted path of a problem and a sentence about it."""

LATER = "is a key of Nanotron that is not available yet; "
LATER_KEYS = {
    "data": LATER + "write data_stages with one stage that starts at step 1",
    "datastates": LATER + "remove it",
    "doremi": LATER + "remove it",
    "data_stages.sequence_length": LATER + "all stages have tokens.sequence_length",
    "data_stages.data.dataset.dataset_folder": LATER + "use hf_dataset_or_datasets",
    "data_stages.data.dataset.sft_dataloader": LATER + "remove it",
    "model.init_method.path": LATER + "use init_method: {std: ...}",
    "model.init_method.use_mup": LATER + "use init_method: {std: ...}",
    "model.init_method.scaling_method": LATER + "remove it",
    **{
        f"model.model_config.{name}": LATER + "use the keys of a Llama model"
        for name in (
            "is_qwen2_config", "is_starcoder2_config", "is_mamba_config", "is_llamoe_config",
            "attention_bias", "z_loss_enabled", "z_loss_coefficient", "_attn_implementation",
        )
    },
    **{
        f"optimizer.{name}": LATER + f"write it as optimizer.optimizer_factory.{name}"
        for name in ("adam_eps", "adam_beta1", "adam_beta2", "torch_adam_is_fused")
    },
}  # fmt: skip


def match_keys(hint: Any, value: Any, path: str, report: Report) -> Any:
    """Bring a value into the shape of a type, and report every key name that is wrong.

    Args:
        hint: a type hint; dataclasses are followed to their fields, tuples to their items.
        value: what the YAML says: mappings, lists, scalars. Not changed.
        path: dotted path of the value, empty for the whole file.
        report: called for every unknown or missing key.

    Returns:
        The value without unknown keys, without nulls that mean "the default", and with choices
        (`reduce_scatter`) spelled as the type does (`REDUCE_SCATTER`).
    """
    kind = _without_none(hint)
    if isinstance(value, dict) and (named := _named(kind, value)):
        name, member = named
        return {"name": name} | _match_fields(member, value, path, report)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _match_fields(kind, value, path, report)
    if get_origin(kind) is tuple and isinstance(value, list):
        item = get_args(kind)[0]
        return [match_keys(item, each, _join(path, n), report) for n, each in enumerate(value)]
    if get_origin(kind) is Literal and isinstance(value, str):
        spelled = {str(choice).lower(): choice for choice in get_args(kind)}
        return spelled.get(value.lower(), value)
    return value


def _named(kind: Any, value: dict[str, Any]) -> tuple[str, type] | None:
    """Of a union of dataclasses, the one whose ``name`` the value has; without a name the first.

    None for another type, and for a name that none has, which pydantic reports.
    """
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    if not all(is_dataclass(member) for member in members):
        return None
    names = {get_args(get_type_hints(member)["name"])[0]: member for member in members}
    given = str(value.get("name") or next(iter(names), "")).lower()
    return next(((name, each) for name, each in names.items() if name.lower() == given), None)


def _match_fields(kind: type, value: dict[str, Any], path: str, report: Report) -> dict[str, Any]:
    hints = get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}
    foreign = _report_unknown(value, list(known), path, report)
    matched = {}
    for name, each in known.items():
        hint, here = hints[name], _join(path, name)
        optional = each.default is not MISSING or each.default_factory is not MISSING
        if value.get(name) is None and optional:
            continue
        if name not in value or (value[name] is None and is_dataclass(hint)):
            if not foreign:
                report(here, "is missing; it has no default, so add it")
            continue
        matched[name] = match_keys(hint, value[name], here, report)
    return matched


def _report_unknown(value: dict[str, Any], known: list[str], path: str, report: Report) -> bool:
    """Report unknown keys; true when a key of Nanotron's later sections explains them all."""
    general = ".".join(part for part in path.split(".") if not part.isdigit())
    later = {name: why for name in value if (why := LATER_KEYS.get(_join(general, name)))}
    asked = {name: why for name, why in later.items() if value[name] not in (None, False)}
    for name, why in asked.items():
        report(_join(path, name), why)
    for name in value:
        if name not in known and name not in later and not asked:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            report(_join(path, name), f"is not a known key; {advice}")
    return bool(asked)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 else hint


def _join(path: str, name: str | int) -> str:
    return f"{path}.{name}" if path else str(name)
