"""Folders of safetensors that another program wrote: read by slices, written in a stream."""

import json
import weakref

import pytest
import torch

from kenotron_ckpt import TensorSize, open_safetensors, read_box, reader, write_safetensors
from kenotron_ckpt.safetensors_file import read_header
from kenotron_dist import Mesh, spawn
from kenotron_dist.placement import Shard, TensorLayout

VALUES = {
    "a": torch.arange(24, dtype=torch.float32).view(6, 4),
    "b": torch.arange(24, 40, dtype=torch.float32).view(4, 4),
    "c": torch.arange(5, dtype=torch.bfloat16),
}


class Whole:
    """Rows of several tensors, one after the other, the last first."""

    def __init__(self, *names):
        self.names = names

    @property
    def shape(self):
        rows = sum(len(VALUES[name]) for name in self.names)
        return (rows, *VALUES[self.names[0]].shape[1:])

    def sources(self):
        return {name: tuple(VALUES[name].shape) for name in self.names}

    def runs(self):
        first = 0
        for name in self.names:
            yield name, 0, (first, *(0 for _ in VALUES[name].shape[1:])), len(VALUES[name])
            first += len(VALUES[name])


OURS = {"fused": Whole("b", "a"), "own": Whole("c")}
FUSED = torch.cat([VALUES["b"], VALUES["a"]])


def write(path, *names):
    sizes = {n: TensorSize(tuple(VALUES[n].shape), VALUES[n].dtype) for n in names}
    write_safetensors(path, sizes, (VALUES[n] for n in names))


def single(folder):
    write(folder / "model.safetensors", *VALUES)
    return folder


def several(folder):
    files = {"model-00001-of-00002.safetensors": "ac", "model-00002-of-00002.safetensors": "b"}
    for file, names in files.items():
        write(folder / file, *names)
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_file_is_written_one_tensor_at_a_time(tmp_path):
    alive = []

    def values():
        for i in range(4):
            assert all(each() is None for each in alive)
            made = torch.full((64, 8), float(i))
            alive.append(weakref.ref(made))
            yield made
            del made

    sizes = {f"t{i}": TensorSize((64, 8), torch.float32) for i in range(4)}
    write_safetensors(tmp_path / "x.safetensors", sizes, values())
    header = read_header(tmp_path / "x.safetensors")
    assert [each.offset - header["t0"].offset for each in header.values()] == [0, 2048, 4096, 6144]
    assert len(alive) == 4


def test_a_value_of_another_shape_or_dtype_is_refused(tmp_path):
    sizes = {"t": TensorSize((2,), torch.float32)}
    with pytest.raises(ValueError, match=r"t is torch.float32 \[3\]; its header says"):
        write_safetensors(tmp_path / "x", sizes, [torch.ones(3)])


@pytest.mark.parametrize("write_folder", [single, several])
def test_rows_of_several_files_make_a_tensor(write_folder, tmp_path):
    folder = open_safetensors(write_folder(tmp_path))
    records = folder.records(OURS)
    assert torch.equal(read_box(tmp_path, records["fused"], (0, 0), (10, 4)), FUSED)
    assert torch.equal(read_box(tmp_path, records["fused"], (3, 1), (4, 2)), FUSED[3:7, 1:3])
    assert torch.equal(read_box(tmp_path, records["own"], (0,), (5,)), VALUES["c"])


def load_rows(mesh: Mesh, folder: str) -> tuple[torch.Tensor, int]:
    """A rank's rows, and how many bytes were read for them."""
    read, into = [], reader._into

    def counted(handle, target, begin, checksum):
        read.append(target.numel() * target.element_size())
        into(handle, target, begin, checksum)

    reader._into = counted
    layout = TensorLayout("fused", (10, 4), (Shard("tp", 0),))
    rows = torch.full((5, 4), -1.0, dtype=torch.bfloat16)
    opened = open_safetensors(folder)
    opened.load(opened.records(OURS), {"x": (rows, layout)}, mesh)
    return rows, sum(read)


def test_each_rank_reads_its_rows_only_and_gets_them_in_its_dtype(tmp_path):
    ranks = spawn(load_rows, str(several(tmp_path)), tp=2)
    assert torch.equal(torch.cat([rows for rows, _ in ranks]), FUSED.bfloat16())
    assert [read for _, read in ranks] == [5 * 4 * 4, 5 * 4 * 4]


def test_a_tensor_that_does_not_fit_is_refused_and_nothing_is_changed(tmp_path):
    folder = open_safetensors(single(tmp_path))
    mesh, target = Mesh.connect(), torch.full((9, 4), -1.0)
    for name in ("fused", "other"):
        wanted = {"x": (target, TensorLayout(name, (9, 4)))}
        with pytest.raises(ValueError, match=rf"{name}: .*folder"):
            folder.load(folder.records(OURS), wanted, mesh)
    assert (target == -1).all()


def test_tensors_that_are_missing_strange_or_misshapen_are_all_named(tmp_path, monkeypatch):
    folder = open_safetensors(single(tmp_path))
    monkeypatch.setitem(VALUES, "d", torch.ones(3))
    monkeypatch.setitem(VALUES, "c", torch.ones(6))
    with pytest.raises(ValueError) as error:
        folder.records({"x": Whole("b"), "y": Whole("d"), "z": Whole("c")})
    text = str(error.value)
    assert "d is missing" in text
    assert "a is none of the model's; is it" not in text
    assert "a is none of the model's" in text
    assert "c has shape [5], but the model makes it [6]" in text
    monkeypatch.setitem(VALUES, "c", torch.ones(5))
    folder.records({"x": Whole("b"), "z": Whole("c")}, lambda name: name == "a")


def test_rows_of_several_dtypes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(VALUES, "b", VALUES["b"].bfloat16())
    folder = open_safetensors(single(tmp_path))
    with pytest.raises(ValueError, match="b is bfloat16, a is float32"):
        folder.records(OURS)


def index_of(folder, **weight_map):
    several(folder)
    path = folder / "model.safetensors.index.json"
    values = json.loads(path.read_text())
    values["weight_map"] |= weight_map
    path.write_text(json.dumps(values))


def cut_off(folder):
    single(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def eight_bits(folder):
    text = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    data = len(text).to_bytes(8, "little") + text + b"0"
    (folder / "model.safetensors").write_bytes(data)


def nested(folder):
    text = b"[" * 10**5
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def nested_index(folder):
    (folder / "model.safetensors.index.json").write_text("[" * 10**5)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (nested, "model.safetensors: its header cannot be read as JSON .*recursion"),
        (nested_index, "index.json: it has no weight_map: RecursionError"),
        (lambda folder: None, "has no weights: neither model.safetensors.index.json nor"),
        (lambda folder: (folder / "pytorch_model.bin").touch(), "weights as pickles"),
        (lambda folder: index_of(folder, d="model-00001-of-00002.safetensors"), "says that d is"),
        (lambda folder: index_of(folder, a="other.safetensors"), "names other.safetensors, which"),
        (lambda folder: index_of(folder, a="../a.safetensors"), "names ../a.safetensors, which"),
        (lambda folder: (folder / "model.safetensors").write_text("hello"), "cannot be read"),
        (cut_off, "c, BF16 .*does not fit: the file was cut off"),
        (eight_bits, "w has dtype F4; only float64"),
    ],
)
def test_a_folder_that_cannot_be_read_says_why(spoil, sentence, tmp_path):
    spoil(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        open_safetensors(tmp_path)


def test_a_tensor_that_the_index_does_not_name_is_an_error(tmp_path):
    several(tmp_path)
    write(tmp_path / "model-00002-of-00002.safetensors", "b", "a")
    with pytest.raises(ValueError, match="has a, which model.safetensors.index.json does not say"):
        open_safetensors(tmp_path)


def test_two_tensors_are_compared_some_rows_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("kenotron_ckpt.safetensors_folder._COMPARED", 2 * 4 * 4)
    values = {"a": torch.randn(5, 4), "short": torch.randn(4, 4), "c": torch.randn(5, 4)}
    values |= {"b": values["a"].clone(), "d": values["a"].clone()}
    values["d"][4, 3] += 1
    sizes = {name: TensorSize(tuple(x.shape), x.dtype) for name, x in values.items()}
    write_safetensors(tmp_path / "model.safetensors", sizes, values.values())
    same = open_safetensors(tmp_path).same
    assert same("a", "b") is True and same("a", "a") is True
    assert same("a", "c") is same("a", "d") is same("a", "short") is False
    assert same("a", "none") is same("none", "a") is None


def loaded_with_nan(mesh: Mesh, folder: str) -> str:
    opened = open_safetensors(folder)
    layout = TensorLayout("fused", (10, 4), (Shard("tp", 0),))
    with pytest.raises(ValueError) as error:
        opened.load(opened.records(OURS), {"x": (torch.zeros(5, 4), layout)}, mesh)
    return str(error.value)


def test_numbers_that_are_none_are_named_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setitem(VALUES, "b", torch.full((4, 4), torch.nan))  # on the first rank
    folder = single(tmp_path)
    for said in spawn(loaded_with_nan, str(folder), tp=2):
        assert f"{folder}: weights are nan or inf in fused" in said


def test_the_dtype_of_a_folder_is_that_of_most_tensors(tmp_path):
    assert open_safetensors(single(tmp_path)).dtype == "float32"
    write(tmp_path / "model.safetensors", "c")
    assert open_safetensors(tmp_path).dtype == "bfloat16"
    whole = {"i": torch.ones(2, dtype=torch.int8)}
    sizes = {"i": TensorSize((2,), torch.int8)}
    write_safetensors(tmp_path / "model.safetensors", sizes, whole.values())
    assert open_safetensors(tmp_path).dtype == "float32"
