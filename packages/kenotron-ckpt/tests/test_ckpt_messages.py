"""What is said of wrong arguments, on every rank; retention, the latest step."""

from dataclasses import replace

import pytest
import torch
from ckpt_cases import small

import kenotron_ckpt.saving
from kenotron_ckpt import (
    Saver,
    latest_step,
    load,
    prune,
    read_manifest,
    remove_steps,
    resolve_step,
    save,
)
from kenotron_ckpt.blocks import blocks_of
from kenotron_ckpt.collective_errors import on_all, on_first
from kenotron_ckpt.protocol import SaveMoment, listen
from kenotron_ckpt.reader import plan_reads
from kenotron_dist import Mesh, spawn
from kenotron_dist.placement import Shard, TensorLayout


def tensor(name, shape, dtype=torch.float32, **options):
    return {name: (torch.zeros(shape, dtype=dtype), TensorLayout(name, shape, **options))}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step": -1}, "step = -1: steps are counted from 0"),
        ({"file_bytes": 0}, "file_bytes = 0: a file holds at least 1 byte"),
        ({"step": "1"}, "step = '1': give a whole number, an int"),
        (
            {"state": {"a": [0, {1}]}},
            r"state is not made of .*: state\['a'\]\[1\] is a set",
        ),
        (
            {"state": {"a": {1: 2}}},
            r"state\['a'\]: key 1 would be read back as a string",
        ),
        (
            {"tensors": {"w": torch.zeros(2)}},
            r"w: a Tensor was given; it must be a pair \(local tensor, TensorLayout\); plain",
        ),
        (
            {"tensors": {"w": (torch.eye(2).to_sparse(), TensorLayout("w", (2, 2)))}},
            "w: a tensor of layout torch.sparse_coo cannot be stored; give tensor.to_dense",
        ),
        (
            {"tensors": tensor("w", (2,), placement=(Shard("tq", 0),))},
            "w: cut over axis 'tq'; its grid has pp, dp, cp, tp",
        ),
        (
            {"tensors": tensor("w", (2, 2), placement=(Shard("ep", 0), Shard("tp", 1)))},
            "w: w: placed on tp of the dense grid and on ep of the expert grid: a tensor lives in",
        ),
        (
            {"tensors": tensor("w", (2,), placement=(Shard("tp", 1),))},
            r"w: dimension 1 is cut; \[2\] has 1, counted from 0",
        ),
        (
            {"tensors": tensor("w", (2,), torch.complex64)},
            "w: dtype complex64 cannot be stored; choose one of float64, float32",
        ),
        (
            {"tensors": tensor("w", (2,), stages=(1, 2))},
            r"w: given on pipeline stage 0, but its layout says that w is on stages \[1, 2\]",
        ),
        (
            {"tensors": {"w": (torch.zeros(3), TensorLayout("v", (2, 2)))}},
            r"w: the local tensor has shape \[3\], its layout leaves \[2, 2\] of \[2, 2\] on a r",
        ),
        (
            {"tensors": {"w": (torch.zeros(3), TensorLayout("v", (2, 2)).sliced(1, 3))}},
            r"w: the local tensor has shape \[3\], its layout leaves \[2\] of \[2, 2\] on a rank",
        ),
        (
            {"tensors": {"w": (torch.zeros(3, device="meta"), TensorLayout("w", (3,)))}},
            "w: the tensor is on the meta device and has no values",
        ),
        (
            {"tensors": {"w": (torch.zeros(2), TensorLayout("w", (2, 2)).sliced(1, 3))}},
            r"w: 2 of the 4 elements of shape \[2, 2\] were given by no rank, first at index",
        ),
    ],
)
def test_a_save_that_cannot_be_is_refused(tmp_path, change, sentence):
    mesh = Mesh.connect()
    arguments = {"step": 0, "tensors": small(mesh), "state": {}} | change
    with pytest.raises(ValueError, match=sentence):
        save(tmp_path / "run", mesh=mesh, **arguments)
    assert latest_step(tmp_path / "run") is None if (tmp_path / "run").exists() else True
    assert not list(tmp_path.glob("run/*/*"))


def test_a_saver_refuses_the_same(tmp_path):
    with pytest.raises(ValueError, match="every: 2.5 was given; it must be a whole number"):
        Saver(tmp_path, Mesh.connect(), every=2.5)
    with Saver(tmp_path, Mesh.connect()) as saver:
        with pytest.raises(ValueError, match="weight: a Tensor was given; it must be a pair"):
            saver.save(1, torch.nn.Linear(2, 2).state_dict(), {})
        saver.save(2, small(saver.mesh), {})
    assert latest_step(tmp_path) == 2


def save_twice(mesh, folder):
    """Both data ranks claim that the same slice is their own."""
    layout = TensorLayout("w", (4,)).sliced(0, 4)
    try:
        save(folder, 0, {"w": (torch.zeros(4), layout)}, mesh, {})
    except ValueError as error:
        return str(error)


def test_ranks_that_hold_the_same_elements_are_told(tmp_path):
    said = spawn(save_twice, tmp_path, dp=2)
    assert said[0] == said[1]
    assert "w: pieces shard-00000-of-00002.safetensors:w@0 [4] and shard-00001" in said[0]


def test_a_folder_that_is_not_shared_is_suspected(tmp_path, monkeypatch):
    def write_elsewhere(folder, *arguments):
        share = original(folder, *arguments)
        next(folder.path.glob("shard-*")).unlink()
        return share

    original = kenotron_ckpt.saving.write_part
    monkeypatch.setattr(kenotron_ckpt.saving, "write_part", write_elsewhere)
    mesh = Mesh.connect()
    with pytest.raises(ValueError, match="but rank 0 does not see it whole: checkpoints need a fo"):
        save(tmp_path, 0, small(mesh), mesh, {})


def save_small(mesh, folder, step=0):
    save(folder, step, small(mesh), mesh, {})


def load_other(mesh, folder):
    name = f"layers.{mesh.rank}.weight"
    wanted = {
        "b": (torch.zeros(4), TensorLayout("bb", (4,))),
        "w": (torch.zeros(4, 4), TensorLayout("w", (8, 4), (Shard("tp", 0),))),
        "wide": (torch.zeros(4, 5), TensorLayout("w", (8, 5), (Shard("tp", 0),))),
        "own": (torch.zeros(1), TensorLayout(name, (1,))),
        "odd": (torch.zeros(1), TensorLayout("b", (4,))),
    }
    try:
        load(folder, wanted, mesh)
    except ValueError as error:
        return str(error)


def test_all_that_does_not_fit_is_listed_once_on_every_rank(tmp_path):
    mesh = Mesh.connect()
    save(tmp_path, 0, small(mesh), mesh, {})
    said = spawn(load_other, tmp_path, tp=2)
    assert said[0] == said[1]
    assert said[0].splitlines() == [
        f"cannot load {tmp_path}/0:",
        "  odd: the local tensor has shape [1], its layout leaves [4] of [4] on a rank",
        "  bb: no such record among 2; did you mean b?",
        "  w: the record has shape [8, 4], the model [8, 5]",
        "  layers.0.weight: no such record among 2",
        "  layers.1.weight: no such record among 2",
    ]


def test_pieces_that_do_not_cover_a_record_are_found_when_it_is_read(tmp_path):
    mesh = Mesh.connect()
    save(tmp_path, 0, small(mesh), mesh, {})
    file = tmp_path / "0" / "manifest.json"
    manifest = read_manifest(tmp_path)
    records = {**manifest.records, "w": replace(manifest.records["w"], pieces=())}
    forged = replace(manifest, records=records)
    with pytest.raises(ValueError, match="w: manifest.json is damaged: its pieces are not whole"):
        plan_reads(forged.records, blocks_of(small(mesh), mesh.view))
    file.write_text(forged.to_json())
    with pytest.raises(ValueError, match="manifest.json is damaged: w: 32 of the 32 elements"):
        load(tmp_path, small(mesh), mesh)


def test_paths_that_are_no_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint at .*none: the path does not exist"):
        resolve_step(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: it is a file; give the folder it lies in"):
        resolve_step(tmp_path / "file")
    with pytest.raises(ValueError, match=r"it has neither a manifest.json \(a step folder\) nor "):
        resolve_step(tmp_path)
    assert latest_step(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="as models of transformers: `kenotron convert hf-to-ken"):
        resolve_step(tmp_path)


def fail_on(mesh, ranks, kinds):
    def step():
        if mesh.rank in ranks:
            raise kinds[mesh.rank % len(kinds)]("no")
        return mesh.rank

    try:
        return on_all(mesh, step)
    except Exception as error:
        return type(error).__name__, str(error)


def fail_in_turn(mesh):
    """Steps on all ranks, then steps on the first."""

    def missing():
        raise FileNotFoundError(f"gone on {mesh.rank}")

    found = [
        fail_on(mesh, [], []),
        fail_on(mesh, [0, 1, 2], [ValueError]),
        fail_on(mesh, [1, 2], [KeyError, ValueError]),
        fail_on(mesh, [1], [OSError]),
        fail_on(mesh, [1, 2], [OSError, ValueError]),
        on_first(mesh, lambda: mesh.rank),
    ]
    try:
        on_first(mesh, missing)
    except OSError as error:
        return [*found, str(error)]


def test_a_failure_is_raised_on_every_rank_with_its_kind():
    for rank, found in enumerate(spawn(fail_in_turn, dp=3)):
        assert found == [
            rank,
            ("ValueError", "no"),
            ("RuntimeError", "rank 1: no\nrank 2: KeyError: 'no'"),
            ("OSError", "rank 1: no"),
            ("ValueError", "rank 1, 2: no"),
            0,
            "gone on 0",
        ]


def test_the_latest_is_what_the_pointer_names_or_else_the_newest(tmp_path):
    mesh = Mesh.connect()
    for step in (5, 10, 100):
        save_small(mesh, tmp_path, step)
    assert latest_step(tmp_path) == 100
    (tmp_path / "latest.txt").write_text("10\n")  # somebody goes back
    assert latest_step(tmp_path) == 10
    assert read_manifest(tmp_path).step == 10
    for nonsense in ("", "7", "soon", "-1"):
        (tmp_path / "latest.txt").write_text(nonsense)
        assert latest_step(tmp_path) == 100
    (tmp_path / "latest.txt").unlink()
    assert latest_step(tmp_path) == 100


@pytest.mark.parametrize("text", ["999", "hello", ""])
def test_a_pointer_to_nothing_is_said(tmp_path, text):
    mesh = Mesh.connect()
    for step in (1, 2):
        save_small(mesh, tmp_path, step)
    (tmp_path / "latest.txt").write_text(text)
    loaded = load(tmp_path, small(mesh), mesh)
    assert loaded.step == 2
    assert loaded.passed_over == [f"{tmp_path}/latest.txt: it names no step that is here"]
    assert load(tmp_path / "1", small(mesh), mesh).passed_over == []


def test_old_checkpoints_are_removed_but_not_what_others_put_there(tmp_path):
    mesh = Mesh.connect()
    for step in range(5):
        save_small(mesh, tmp_path, step)
    (tmp_path / "1" / "notes.txt").write_text("mine")
    (tmp_path / "latest.txt").write_text("2")
    assert prune(tmp_path, keep=2) == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4", "latest.txt"]
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["notes.txt"]
    assert prune(tmp_path, keep=9) == []
    with pytest.raises(ValueError, match="keep = 0 would leave no checkpoint; it is at least 1"):
        prune(tmp_path, keep=0)


def test_all_checkpoints_are_removed_manifests_first_and_so_is_half_a_save(tmp_path):
    mesh, seen = Mesh.connect(), []
    for step in (1, 2):
        save_small(mesh, tmp_path, step)
    (tmp_path / "1" / "manifest.json").unlink()
    (tmp_path / "2" / "notes.txt").write_text("mine")
    left = {path.name for path in (tmp_path / "2").iterdir()}
    stop = listen(lambda moment: seen.append((moment, {p.name for p in tmp_path.rglob("2/*")})))
    remove_steps(tmp_path)
    stop()
    unmade = next(there for moment, there in seen if moment == SaveMoment.UNMADE)
    assert unmade == left - {"manifest.json"} | {"manifest.json.old.tmp"}
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["2", "latest.txt", "notes.txt"]
