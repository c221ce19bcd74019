"""What the hard tests look at after a save, whatever happened to it."""

import torch
from ckpt_kills import state_of

from kenotron_ckpt import open_checkpoint, read_manifest
from kenotron_ckpt.folder import is_verified
from kenotron_dist import Mesh
from kenotron_dist.placement import TensorLayout

CPU = torch.device("cpu")


class View(Mesh):
    """A rank's view of a mesh, for arithmetic: nobody communicates."""

    def __init__(self, config, rank, device):
        super().__init__(config, rank, device)
        self._groups.of = self._groups.new = lambda ranks: None


def what_is_there(path):
    """(step, factor) of what a resume would read, compared bit for bit; None when nothing."""
    if not path.exists() or not any(child.is_dir() or child.is_file() for child in path.iterdir()):
        return None
    mesh = Mesh.connect()
    try:
        found = open_checkpoint(path, mesh)
    except ValueError as error:
        assert "half-written" in str(error) or "it has neither a manifest" in str(error), error
        return None
    wanted = state_of(mesh, 1, blank=True)
    loaded = found.load(wanted)
    factor = loaded.state["factor"]
    due = state_of(mesh, factor)
    for key, (tensor, _) in due.items():
        assert torch.equal(wanted[key][0].view(torch.uint8), tensor.view(torch.uint8)), key
    assert found.manifest.config in (f"factor: {factor}\n", None)
    assert found.manifest.step == loaded.step == int(found.folder.name)
    return loaded.step, factor


def names_due(step_folder):
    """What may lie in the folder of a checkpoint."""
    manifest = read_manifest(step_folder)
    due = set(manifest.files) | {"manifest.json"}
    due |= {"config.yaml"} if manifest.config is not None else set()
    return due | ({"verified.txt"} if is_verified(step_folder) else set())


def whole(folder, step, factor):
    assert what_is_there(folder) == (step, factor)
    names = {path.name for path in (folder / str(step)).iterdir()}
    assert names == names_due(folder / str(step))


def begin(saver, step, factor):
    """Save, and train on."""
    tensors = state_of(saver.mesh, factor)
    saver.save(step, tensors, {"factor": factor}, f"factor: {factor}\n")
    saver.wait()
    for tensor, _ in tensors.values():
        tensor.fill_(-1)


def flipped(path, place, bit):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def vectors(count, size=100):
    """``count`` float32 vectors of 4 * ``size`` bytes."""
    layouts = [TensorLayout(f"v{i}", (size,)) for i in range(count)]
    return {p.name: (torch.full((size,), float(i)), p) for i, p in enumerate(layouts)}
