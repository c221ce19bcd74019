"""What any mesh saves, any mesh loads, bit for bit; what is stored is the logical tensors."""

import json

import pytest
import torch
from ckpt_cases import MESHES, local, model, name_of, parameters, small, whole, zero0
from safetensors.torch import load_file

from kenotron_ckpt import load, read_manifest, save
from kenotron_dist import Mesh, spawn
from kenotron_dist.placement import TensorLayout

ONE = {"pp": 1, "dp": 1, "cp": 1, "tp": 1}
STATE = {"consumed": 12, "seed": 42, "losses": [1.5, 0.1]}


def save_model(mesh, folder):
    limit = 400 if mesh.world.size <= 2 else 10**6
    return str(save(folder, 3, model(mesh), mesh, STATE, "model: tiny\n", file_bytes=limit))


def load_all(mesh, folders):
    """Load every checkpoint; returns what was not bit for bit as it should be."""
    wrong = []
    for folder in folders:
        replicated = [zero0(mesh)] if mesh["dp", "cp"].size > 1 else []
        for wanted in [model(mesh, blank=True), *replicated]:
            assert load(folder, wanted, mesh, verify=not replicated).state == STATE
            for key, (tensor, layout) in wanted.items():
                due = local(layout, tensor.dtype, mesh)
                if tensor.dtype != due.dtype or not torch.equal(tensor, due):
                    wrong.append((folder, mesh.rank, key))
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Mesh name -> run folder, saved on every mesh."""
    root = tmp_path_factory.mktemp("runs")
    for sizes in MESHES:
        paths = spawn(save_model, str(root / name_of(sizes)), **sizes)
        assert set(paths) == {str(root / name_of(sizes) / "3")}
    return {name_of(sizes): root / name_of(sizes) for sizes in MESHES}


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", MESHES, ids=name_of)
def test_a_mesh_reads_what_every_mesh_wrote(saved, sizes):
    wrong = spawn(load_all, [str(folder) for folder in saved.values()], **sizes)
    assert [each for rank in wrong for each in rank] == []


@pytest.mark.parametrize("sizes", MESHES, ids=name_of)
def test_the_files_hold_the_logical_tensors(saved, sizes):
    step_folder = saved[name_of(sizes)] / "3"
    data = json.loads((step_folder / "manifest.json").read_text())
    stored = {name: load_file(step_folder / name) for name in data["files"]}
    due = parameters(ONE)
    names = {f"optimizer.{kind}.{name}" for kind in ("exp_avg", "uneven") for name in due}
    names -= {"optimizer.exp_avg.scalar", "optimizer.uneven.scalar"}
    assert set(data["records"]) == {*due, *names}
    for name, record in data["records"].items():
        dtype = due[name][1] if name in due else torch.float32
        assert record["dtype"] == str(dtype).removeprefix("torch.")
        full = torch.zeros(record["shape"], dtype=dtype)
        for piece in record["pieces"]:
            values = stored[piece["file"]].pop(piece["key"])
            assert list(values.shape) == piece["shape"]
            place = zip(piece["start"], piece["shape"], strict=True)
            full[tuple(slice(a, a + n) for a, n in place)] = values
        assert torch.equal(full, whole(name, record["shape"], dtype)), name
    assert not any(stored.values())  # nothing in the files that is not in the manifest


def test_the_manifest_says_what_wrote_it(saved):
    manifest = read_manifest(saved["pp2-dp2-tp2"])
    assert manifest.mesh == {"pp": 2, "dp": 2, "cp": 1, "tp": 2}
    assert (manifest.step, manifest.state, manifest.config) == (3, STATE, "model: tiny\n")
    assert manifest.libraries["torch"].startswith(torch.__version__.split("+")[0])
    assert (saved["one"] / "3" / "config.yaml").read_text() == "model: tiny\n"
    assert (saved["one"] / "latest.txt").read_text() == "3"
    assert manifest.unused(["plain"]) == sorted(set(manifest.records) - {"plain"})


def test_every_rank_writes_a_share(saved):
    manifest = read_manifest(saved["dp3"])
    bytes_of = [
        sum(entry.bytes for name, entry in manifest.files.items() if f"-0000{rank}-of" in name)
        for rank in range(3)
    ]
    assert min(bytes_of) > max(bytes_of) / 4, bytes_of
    writers = {
        piece.file[:14] for name in parameters(ONE) for piece in manifest.records[name].pieces
    }
    assert len(writers) == 3  # of the replicated parameters, too


def test_files_are_split_at_the_limit(saved):
    manifest = read_manifest(saved["one"])
    assert "shard-00000-of-00001.part1.safetensors" in manifest.files
    step_folder = saved["one"] / "3"
    for name in manifest.files:
        tensors = load_file(step_folder / name)
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        assert size <= 400 or len(tensors) == 1


def test_values_are_cast_to_the_dtype_of_the_tensor_they_fill(tmp_path):
    mesh = Mesh.connect()
    save(tmp_path, 0, small(mesh), mesh, {})
    wanted = {k: (t.double().requires_grad_(), p) for k, (t, p) in small(mesh, blank=True).items()}
    load(tmp_path / "0", wanted, mesh)
    for tensor, layout in wanted.values():
        assert torch.equal(tensor.detach().float(), whole(layout.name, layout.shape, torch.float32))


def test_strided_and_offset_tensors_are_saved_and_filled(tmp_path):
    mesh = Mesh.connect()
    weight, layout = small(mesh)["w"]
    sliced = layout.renamed("flat").sliced(5, 32)
    held = weight.reshape(-1)
    spaced = torch.zeros(64)[::2]
    spaced.copy_(held)
    tensors = {
        "w": (weight.t().contiguous().t(), layout),
        "head": (held[:5].clone(), layout.renamed("flat").sliced(0, 5, ())),
        "flat": (spaced[5:], sliced),
    }
    save(tmp_path, 1, tensors, mesh, {})
    target = torch.full((64,), -1.0)
    load(tmp_path, {"a": (target[6::2][:27], sliced)}, mesh)
    assert torch.equal(target[6::2][:27], held[5:])
    assert (target[7::2] == -1).all()
    assert (target[:6] == -1).all()


def test_every_block_begins_at_a_multiple_of_its_element_size(tmp_path):
    mesh = Mesh.connect()
    dtypes = {"a": torch.bool, "b": torch.float64, "c": torch.bfloat16, "d": torch.float32}
    tensors = {k: (torch.ones(3, dtype=d), TensorLayout(k, (3,))) for k, d in dtypes.items()}
    data = next(save(tmp_path, 0, tensors, mesh, {}).path.glob("shard-*")).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    for name, dtype in dtypes.items():
        assert header[f"{name}@0"]["data_offsets"][0] % dtype.itemsize == 0
