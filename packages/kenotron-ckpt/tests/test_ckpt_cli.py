"""The command line: a tree to look at, every byte verified, checkpoints compared, bad input."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

from kenotron_ckpt import save
from kenotron_ckpt.__main__ import main
from kenotron_dist import Mesh, spawn
from kenotron_dist.boxes import local_shape
from kenotron_dist.placement import Shard, TensorLayout

STATE = {"step": 5, "cursor": {"stage": 0, "consumed": 40}}
ROWS = (Shard("tp", 0),)
SHAPES = {
    "embedding.weight": ((12, 4), ROWS),
    "layers.0.mlp.up.weight": ((8, 4), ROWS),
    "layers.0.norm.weight": ((4,), ()),
    "layers.1.mlp.up.weight": ((8, 4), ROWS),
    "layers.1.norm.weight": ((4,), ()),
    "layers.2.mlp.up.weight": ((8, 6), ROWS),
    "layers.2.norm.weight": ((4,), ()),
    "scale": ((), ()),
}


def tensors(mesh, change=None):
    """Weights in bf16, and masters in fp32; values say where an element is."""
    found = {}
    for name, (shape, cut) in SHAPES.items():
        for prefix, dtype in (("", torch.bfloat16), ("optimizer.master.", torch.float32)):
            layout = TensorLayout(prefix + name, shape, cut)
            number = 1.0 + (mesh["tp"].rank if cut else 0)
            value = torch.full(local_shape(layout, mesh.view(layout)), number, dtype=dtype)
            found[layout.name] = (value, layout)
    layout = TensorLayout("optimizer.momentum.scale", (2,))
    found[layout.name] = (torch.zeros(2), layout)
    return change(found) if change else found


def save_all(mesh, folder):
    for step in (5, 20):
        save(folder, step, tensors(mesh), mesh, STATE, "seed: 1\n", verify=step == 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder of two tp ranks: step 5 (latest.txt, verified), 20, and 30 half-written."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    spawn(save_all, str(folder), tp=2)
    (folder / "30").mkdir()
    (folder / "latest.txt").write_text("5")
    return folder


@pytest.fixture
def run(saved, tmp_path):
    """A copy of it to be changed, without the half-written step."""
    folder = shutil.copytree(saved, tmp_path / "run")
    (folder / "30").rmdir()
    return folder


LOOK = """\
RUN: 3 steps, latest.txt names 5
  30  it is half-written: there is no manifest.json, so the save did not finish
  20  complete
   5  complete, verified  <- shown below

RUN/5: step 5, kenotron-checkpoint 3
  written on pp=1 dp=1 cp=1 tp=2 by LIBRARIES
  weights: 8 records, 346 bytes
  optimizer: 9 records, 700 bytes
  on the disk: 2 files, DISK bytes
  state: cursor, step

weights            shape   dtype     bytes  stored as
  embedding.weight   12x4    bfloat16     96  2x1 by 2 ranks
  layers
    0 to 1, each
      mlp.up.weight  8x4     bfloat16     64  2x1 by 2 ranks
      norm.weight    4       bfloat16      8  whole
    2
      mlp.up.weight  8x6     bfloat16     96  2x1 by 2 ranks
      norm.weight    4       bfloat16      8  whole
  scale              scalar  bfloat16      2  whole

optimizer.master: float32 of every weight's shape, 692 bytes

optimizer.momentum  shape  dtype    bytes  stored as
  scale             2      float32      8  whole
"""


def test_inspect_shows_the_steps_the_totals_and_a_tree(saved, capsys):
    assert main(["inspect", str(saved)]) == 0
    shown = capsys.readouterr().out.replace(str(saved), "RUN").splitlines()
    for line, due in zip(shown, LOOK.splitlines(), strict=True):
        if "LIBRARIES" in due:
            assert line.startswith(due.replace("LIBRARIES", "kenotron-ckpt="))
        elif "DISK" in due:
            size = sum(path.stat().st_size for path in saved.glob("5/shard-*"))
            assert line == due.replace("DISK", f"{size:,}")
        else:
            assert line.split() == due.split()
            assert len(line) - len(line.lstrip()) == len(due) - len(due.lstrip())


def test_inspect_gives_every_record_as_json(saved, capsys):
    assert main(["inspect", str(saved / "20"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["path"] == str(saved / "20") and data["run"] is None
    assert data["state"] == STATE and data["mesh"]["tp"] == 2
    assert data["totals"]["weights"] == {"records": 8, "bytes": 346}
    rows = {row["name"]: row for row in data["records"]}
    assert len(rows) == 17
    assert rows["optimizer.master.layers.2.mlp.up.weight"] == {
        "name": "optimizer.master.layers.2.mlp.up.weight", "kind": "optimizer.master",
        "module": "layers.2.mlp.up.weight", "shape": [8, 6], "dtype": "float32", "bytes": 192,
        "pieces": 2, "cut": "2x1", "ranks": 2,
    }  # fmt: skip
    assert main(["inspect", str(saved), "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    assert [each["step"] for each in run["steps"]] == [30, 20, 5]
    assert (run["latest"], run["named"]) == (5, 5)


def test_verify_reads_every_step_and_says_each_damage(run, capsys):
    assert main(["verify", str(run)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        f"{run / step}: every byte is as it was written" for step in ("5", "20")
    ]
    assert shown.err == ""
    first, second = sorted((run / "20").glob("shard-*"))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1  # the last byte of data
    content[9] ^= 1  # and one of the header
    first.write_bytes(content)
    second.unlink()
    (run / "30").mkdir()
    (run / "latest.txt").write_text("99")
    assert main(["verify", str(run)]) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{run / '5'}: every byte is as it was written\n"
    errors = shown.err.splitlines()
    assert f"{run / '20'}: {first.name}: its header is not what was written" in errors
    assert f"{run / '20'}: {second.name} is missing" in errors
    assert any("30: it is half-written" in line for line in errors)
    assert f"{run}: latest.txt does not name one of the steps here" in errors
    assert main(["verify", str(run / "5")]) == 0


@pytest.mark.parametrize(("place", "sentence"), [
    (-1, "the bytes of .* are not those that were written"),
    (9, "its header is not what was written"),
    (None, "bytes long, but"),
])  # fmt: skip
def test_verify_names_what_is_damaged_in_a_step(run, capsys, place, sentence):
    file = next((run / "5").glob("shard-*"))
    content = bytearray(file.read_bytes())
    if place is None:
        content.append(0)
    else:
        content[place] ^= 16
    file.write_bytes(content)
    assert main(["verify", str(run / "5")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{run / '5'}: {file.name}")
    assert re.search(sentence, line)


def test_verify_names_an_edited_manifest(run, capsys):
    path = run / "5/manifest.json"
    path.write_text(path.read_text().replace('"consumed": 40', '"consumed": 41'))
    assert main(["verify", str(run / "5")]) == 1
    assert "manifest.json is damaged or was edited" in capsys.readouterr().err


def test_checkpoints_of_two_meshes_with_the_same_content_are_equal(saved, tmp_path, capsys):
    mesh = Mesh.connect()

    def as_tp2(found):
        for value, layout in found.values():
            if layout.shards:
                value[len(value) // 2 :] = 2.0
        return found

    save(tmp_path, 5, tensors(mesh, as_tp2), mesh, STATE, "seed: 1\n")
    assert main(["diff", str(saved), str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"A: {saved / '5'}", f"B: {tmp_path / '5'}",
                     "equal: 17 records, state and config"]  # fmt: skip


def test_diff_names_every_difference(tmp_path, capsys):
    mesh = Mesh.connect()

    def other(found):
        found.pop("scale")
        found["new"] = (torch.zeros(1), TensorLayout("new", (1,)))
        value, layout = found["layers.0.mlp.up.weight"]
        value[3, 1:3] += 0.5
        found["layers.0.norm.weight"] = (
            torch.ones(2), TensorLayout("layers.0.norm.weight", (2,))
        )  # fmt: skip
        value, layout = found["layers.1.norm.weight"]
        found["layers.1.norm.weight"] = (value.float(), layout)
        found["optimizer.momentum.scale"][0][1] = -0.0
        found["optimizer.master.scale"][0].fill_(float("nan"))
        return found

    save(tmp_path / "a", 5, tensors(mesh), mesh, STATE, "seed: 1\nlr: 2\n")
    state = {"cursor": {"stage": 0, "consumed": 48}, "more": [1]}
    save(tmp_path / "b", 6, tensors(mesh, other), mesh, state, "seed: 1\nlr: 3\n")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b/6")]) == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        "step: 5 in A, 6 in B",
        "layers.0.mlp.up.weight: 2 of 32 elements differ, max |A - B| = 0.5",
        "layers.0.norm.weight: shape [4] in A, [2] in B",
        "layers.0.norm.weight: bfloat16 in A, float32 in B",
        "layers.1.norm.weight: bfloat16 in A, float32 in B",
        "new: only in B",
        "optimizer.master.scale: 1 of 1 elements differ, max |A - B| = nan",
        "optimizer.momentum.scale: equal in value, not bit for bit (signs of zeros, or kinds of "
        "NaN)",
        "scale: only in A",
        "state.cursor.consumed: 40 in A, 48 in B",
        "state.more: [1], only in B",
        "state.step: 5, only in A",
        "config: A has: lr: 2",
        "config: B has: lr: 3",
    ]


def test_bad_input_is_one_sentence_and_status_2(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    shutil.rmtree(run / "20")
    next((run / "5").glob("shard-*")).unlink()
    for arguments, sentence in [
        (["inspect", tmp_path / "none"], "error: no checkpoint at .*none: the path does not ex"),
        (["inspect", tmp_path / "file"], "error: no checkpoint at .*file: it is a file"),
        (["verify", tmp_path / "empty"], "error: no checkpoint at .*empty: it has neither a mani"),
        (["inspect", run / "5"], "error: the checkpoint at .* cannot be read: shard"),
        (["diff", run / "5", run], "error: the checkpoint at .* cannot be read"),
    ]:  # fmt: skip
        assert main(list(map(str, arguments))) == 2
        shown = capsys.readouterr()
        assert re.match(sentence, shown.err), shown.err
        assert len(shown.err.splitlines()) == 1
    with pytest.raises(SystemExit) as stopped:
        main(["compare"])
    assert stopped.value.code == 2


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    many = {f"w{i}": (torch.zeros(1), TensorLayout(f"w{i}", (1,))) for i in range(3000)}
    save(tmp_path, 1, many, Mesh.connect(), state={})
    command = [sys.executable, "-m", "kenotron_ckpt", "inspect", "--json", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        job.stdout.read(1)
        job.stdout.close()
        assert job.stderr.read() == b""
    assert job.returncode == 0


def test_what_a_terminal_would_obey_is_not_printed(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "a\x1b[31m")]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said and "a\ufffd[31m" in said
