"""Run folders whose parts contradict one another: copies that were cut off are found."""

from pathlib import Path

import pytest
import torch

from kenotron_ckpt import contradiction, has_manifests, load, save, unfinished
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 and 2."""
    for step in (1, 2):
        tensors = {"x": (torch.ones(3), TensorLayout("x", (3,)))}
        save(tmp_path, step, tensors, Mesh.connect(), {})
    return tmp_path


def without(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"{step}/manifest.json").unlink()


def test_a_folder_whose_parts_agree(folder: Path) -> None:
    assert contradiction(folder) == "" == contradiction(folder / "none")
    assert unfinished(folder) == [] == unfinished(folder / "none")
    without(folder, 1)  # a removal that was cut off
    assert contradiction(folder) == "" and unfinished(folder) == [1]


def test_a_first_save_that_was_killed_is_no_contradiction(folder: Path) -> None:
    without(folder, 1, 2)
    (folder / "latest.txt").unlink()
    assert contradiction(folder) == (
        "steps 1, 2 have shards, but none of their folders has a manifest.json"
    )
    for path in (folder / "2").iterdir():
        path.unlink()
    assert contradiction(folder) == "" and unfinished(folder) == [1]


def test_a_latest_step_without_its_manifest(folder: Path) -> None:
    without(folder, 2)
    said = "latest.txt names step 2, whose folder has shards and no manifest.json"
    assert contradiction(folder) == said
    without(folder, 1)
    assert contradiction(folder) == said


@pytest.mark.parametrize(("text", "what"), [("7", "step 7"), ("x", "nothing that is a step")])
def test_a_latest_step_without_any(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "latest.txt").write_text(text)
    assert contradiction(tmp_path) == (
        f"latest.txt names {what}, but no step folder here has a manifest.json"
    )


def test_links_to_nothing(folder: Path, tmp_path: Path) -> None:
    without(folder, 1, 2)
    (folder / "latest.txt").unlink()
    (folder / "2/manifest.json").symlink_to(tmp_path / "gone")
    assert has_manifests(folder) and contradiction(folder) == ""  # a load says what is wrong
    with pytest.raises(ValueError, match="2: manifest.json is a link to nothing"):
        load(folder, {"x": (torch.ones(3), TensorLayout("x", (3,)))}, Mesh.connect())
    (folder / "2/manifest.json").unlink()
    (folder / "3").symlink_to(tmp_path / "gone")
    assert contradiction(folder) == "step folder 3 is a link to nothing"


def test_whole_numbers_are_not_loaded_as_weights(tmp_path: Path) -> None:
    mesh, layout = Mesh.connect(), TensorLayout("x", (3,))
    save(tmp_path, 1, {"x": (torch.ones(3, dtype=torch.int32), layout)}, mesh, {})
    with pytest.raises(ValueError, match="x: the record is of int32, the model of float32: "):
        load(tmp_path, {"x": (torch.ones(3), layout)}, mesh)
    own = torch.zeros(3, dtype=torch.int64)
    load(tmp_path, {"x": (own, layout)}, mesh)
    assert own.tolist() == [1, 1, 1]
