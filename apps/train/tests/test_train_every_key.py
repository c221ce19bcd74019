"""Every key of the configuration reference does something: a changed one is seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import yaml
from evaluate_cases import task_file
from key_changes import BASE, CHANGES, DOMAINS, ELSEWHERE, HALF, OF_FORMS, PROXY, Change
from key_walk import Leaf, Seen, changed, get, leaves, other_values, see, without_absent
from model_key_changes import OF_MODELS
from test_train_nanoset import write_folder

from kenotron_convert.exporting import export_hf
from kenotron_train.cli import main

LEAVES = leaves()


def changes_of(leaf: Leaf) -> list[Change]:
    """The values that a key is changed to: those of the table, or others of its type."""
    given = CHANGES.get(str(leaf)) or CHANGES.get(leaf.key)
    if given is not None:
        return list(given) if isinstance(given, tuple) else [given]
    now = get(changed(BASE, **OF_FORMS.get(leaf.form, {})), leaf.key)
    if now is None:
        now = leaf.default
    if isinstance(now, dict | list):
        now = None
    return [Change(value) for value in other_values(leaf.hint, now)]


CASES = [
    pytest.param(leaf, change, id=f"{leaf}-{str(change.value).replace('::', '')[:40]}")
    for leaf in LEAVES
    for change in changes_of(leaf)
    if str(leaf) not in ELSEWHERE
] + [
    pytest.param(
        Leaf("model", f"model.model_config.{key}", None, None),
        Change(value, {"model.model_config": model} | (HALF if "fp32" in key else {})),
        id=f"model.{key}",
    )
    for key, (model, value) in OF_MODELS.items()
]
BRIER = {"metric": "brier_score"}
KNOWN: dict[str, Seen] = {}
"""Trainings that changed ones are compared with."""
Look = Callable[[str, Any], Seen]


def base_of(leaf: Leaf, change: Change) -> dict[str, Any]:
    """The training in which a key is changed."""
    return without_absent(changed(BASE, **(OF_FORMS.get(leaf.form, {}) | change.where)))


BASES = {json.dumps(base_of(*case.values)): str(case.values[0]) for case in CASES}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of data by the names that configs have for them."""
    root = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"{n} and {n}?", "completion": f"{2 * n}"} for n in range(60)]
    texts = [{"text": f"line {n} of {n * n % 89}", "other": f"{n} is {n % 7}"} for n in range(600)]
    folders = {"TEXT": runs.write_text(root), "TOKENS": write_folder(root / "tokens", 0)}
    folders |= {
        "MORE": write_folder(root / "more", 1),
        "TASKS": task_file(root / "tasks", num_fewshot=None, metric_list=[BRIER]),
    }
    for name, lines in (("CHATS", rows), ("ROWS", texts)):
        folders[name] = root / f"{name}.jsonl"
        folders[name].write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    folders["DOMAINS"] = root / "domains"
    for domain in ("first", "second"):
        (folders["DOMAINS"] / domain).mkdir(parents=True)
        runs.write_text(folders["DOMAINS"] / domain)
    found = {name: str(path) for name, path in folders.items()}
    found["LOSSES"] = str(root / "losses")
    made = {"CHECKPOINT": ([], {}), "REFERENCE": ([], DOMAINS)}
    made["LOSSES"] = (["doremi", "losses"], DOMAINS | PROXY)
    for name, (command, changes) in made.items():
        where = {"checkpoints.checkpoints_path": str(root / name)}
        file = root / f"{name}.yaml"
        file.write_text(yaml.safe_dump(filled(changed(BASE, **changes, **where), found)))
        given = [] if command else ["--threads", "1"]
        assert main([*command, "--config-file", str(file), *given], leaves=False) == 0
        found.setdefault(name, str(root / name))
    export_hf(root / "CHECKPOINT", root / "MODEL", check=False)
    return found | {"MODEL": str(root / "MODEL")}


def filled(config: Any, data: dict[str, str]) -> Any:
    """A config with folders instead of names."""
    text = json.dumps(config)
    for name, path in data.items():
        text = text.replace(f'"{name}"', f'"{path}"')
    return json.loads(text)


@pytest.fixture
def look(
    data: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Look:
    """Trains a config in a folder of this name."""

    def seen(name: str, config: Any) -> Seen:
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.chdir(folder)
        known = data | {"BUCKET": f"file://{folder}/store"}
        return see(folder, filled(config, known), capfd.readouterr)

    return seen


@pytest.mark.by_turns(16)
@pytest.mark.parametrize("leaf, change", CASES)
def test_a_changed_key_is_seen(leaf: Leaf, change: Change, look: Look) -> None:
    base = base_of(leaf, change)
    new = without_absent(changed(base, **{leaf.key: change.value}))
    assert new != base
    name = json.dumps(base)
    if name not in KNOWN:
        KNOWN[name] = look("as", base)
    assert look("is", new).differs(KNOWN[name])


@pytest.mark.parametrize("base", BASES, ids=BASES.values())
def test_the_same_training_is_seen_as_the_same(base: str, look: Look) -> None:
    assert look("once", json.loads(base)).differs(look("again", json.loads(base))) == []


def test_the_tables_name_keys_that_there_are() -> None:
    known = {str(leaf) for leaf in LEAVES} | {leaf.key for leaf in LEAVES}
    assert set(CHANGES) | set(ELSEWHERE) <= known
    assert set(OF_FORMS) <= {leaf.form for leaf in LEAVES}


@pytest.mark.parametrize("file, test", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_key_that_is_shown_elsewhere_has_its_test_there(file: str, test: str) -> None:
    assert f"def {test}(" in Path(__file__).with_name(file).read_text()
