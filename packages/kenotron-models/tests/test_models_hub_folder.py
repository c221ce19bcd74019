"""Models that are named as on the hub are found in the cache, and nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from kenotron_models.families import TransformersConfig
from kenotron_models.hf import hub_folder, read_hf_config


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of ``org/tiny``."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "hub/models--org--tiny"
    snapshot = model / "snapshots" / ("a" * 40)
    for folder in (snapshot, model / "refs"):
        folder.mkdir(parents=True)
    (model / "refs/main").write_text("a" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "cohere", "vocab_size": 99}))
    return snapshot


def test_a_name_is_the_folder_of_its_snapshot(cached: Path) -> None:
    assert hub_folder("org/tiny") == str(cached)
    assert TransformersConfig(path="org/tiny").path == str(cached)
    with pytest.raises(ValueError, match=f"^{cached}/config.json: model_type"):
        read_hf_config(hub_folder("org/tiny"))  # no family of ours


@pytest.mark.parametrize("path", ["org/other", "org/tiny/..", "/org/tiny", "tiny", "org/ti ny", ""])
def test_other_paths_are_returned_as_they_are(path: str, cached: Path) -> None:
    assert hub_folder(path) == path


def test_a_path_that_exists_is_no_name(cached: Path) -> None:
    Path("org/tiny").mkdir(parents=True)
    assert hub_folder("org/tiny") == "org/tiny"


def test_a_model_that_is_not_in_the_cache_is_named_with_the_command(cached: Path) -> None:
    words = "if it is a model of the hub: hf download org/other$"
    with pytest.raises(ValueError, match=words):
        read_hf_config("org/other")
    with pytest.raises(ValueError, match=words):
        TransformersConfig(path="org/other")
    with pytest.raises(ValueError, match="there is no such folder$"):
        read_hf_config("other")
