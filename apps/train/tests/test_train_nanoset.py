"""Training on folders of token files: one, several, in shares; on every layout the same samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import runs

from kenotron_data import TokenWriter


def write_folder(folder: Path, seed: int, documents: int = 60) -> Path:
    """Two files of documents that a small model can learn something from."""
    rng = np.random.default_rng(seed)
    for number in range(2):
        with TokenWriter(folder / f"{number:03}.ds", 2, "made-up") as writer:
            for _ in range(documents):
                start, step = rng.integers(0, 200), 1 + seed
                length = int(rng.integers(20, 90))
                ids = (start + step * np.arange(length)) % 256
                writer.add([np.append(ids, 256).astype(np.uint16)])
    return folder


def flags(folder: Path, dataset: str, **changes: object) -> list[str]:
    """A tiny run on a Nanoset."""
    values = {"data_stages.0.data.dataset": dataset}
    found = runs.arguments(folder, **changes)
    given = "data_stages.0.data.dataset.hf_dataset_or_datasets="
    at = next(i for i, part in enumerate(found) if part.startswith(given))
    del found[at - 1 : at + 1]
    return found + [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tokens")
    return write_folder(root / "a", 0), write_folder(root / "b", 1)


def losses(folder: Path, dataset: str, **changes: object) -> list[float]:
    folder.mkdir()
    done = runs.train(folder, *flags(folder, dataset, **changes))
    assert done.returncode == 0, done.stderr
    return [step["lm_loss"] for step in runs.metrics(folder)]


def test_a_folder_trains_and_is_the_same_as_text_or_list(
    data: tuple[Path, Path], tmp_path: Path
) -> None:
    one = losses(tmp_path / "1", f"{{dataset_folder: {data[0]}}}")
    assert one[-1] < one[0]
    assert losses(tmp_path / "2", f"{{dataset_folder: [{data[0]}]}}") == one


def test_a_mixture_is_the_same_on_two_data_ranks(data: tuple[Path, Path], tmp_path: Path) -> None:
    mixture = f"{{dataset_folder: {{{data[0]}: 0.8, {data[1]}: 0.2}}}}"
    one = losses(tmp_path / "1", mixture)
    two = losses(tmp_path / "2", mixture, parallelism__dp=2, tokens__micro_batch_size=1)
    assert two == pytest.approx(one, rel=1e-5)
    weights = f"{{dataset_folder: [{data[0]}, {data[1]}], dataset_weights: [4, 1]}}"
    assert losses(tmp_path / "3", weights) == one


def test_what_is_wrong_with_a_folder_names_key_and_file(
    data: tuple[Path, Path], tmp_path: Path
) -> None:
    done = runs.train(tmp_path, *flags(tmp_path, "{dataset_folder: none}"))
    assert done.returncode == 1
    assert (
        "data_stages.0.data.dataset.dataset_folder: 'none': there is no such folder" in done.stderr
    )
    assert "Traceback" not in done.stderr and "rank 0" not in done.stderr


def test_ids_beyond_the_vocabulary_are_refused(data: tuple[Path, Path], tmp_path: Path) -> None:
    small = {"model__model_config__vocab_size": 256}
    done = runs.train(tmp_path, *flags(tmp_path, f"{{dataset_folder: {data[0]}}}", **small))
    assert done.returncode == 1
    assert "256" in done.stderr
    assert ".ds" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("given", [100, -1])
def test_ids_that_a_folder_is_said_not_to_have_are_refused(
    given: int, data: tuple[Path, Path], tmp_path: Path
) -> None:
    dataset = f"{{dataset_folder: {data[0]}, vocab_size: {given}}}"
    done = runs.train(tmp_path, *flags(tmp_path, dataset))
    assert done.returncode == (given > 0)
    assert ("not in the vocabulary of 100 ids" in done.stderr) == (given > 0)
