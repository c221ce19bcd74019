"""One table of saves and loads over every store: local disk, tmpfs, and what fsspec opens."""

import errno
import os
import re
import shutil
import uuid
from pathlib import Path

import pytest
import torch
from ckpt_cases import PADDING, local, model
from ckpt_checks import flipped, vectors
from ckpt_kills import put, put_beside, state_of

from kenotron_ckpt import (
    DamagedCheckpoint,
    FsspecStore,
    LocalStore,
    NoCheckpoint,
    SaveFailed,
    Saver,
    Uploader,
    defect,
    latest_step,
    load,
    open_checkpoint,
    read_manifest,
    read_record,
    save,
    steps_in,
    store_at,
    verify_files,
)
from kenotron_ckpt.__main__ import main
from kenotron_ckpt.protocol import listen
from kenotron_ckpt.remote import RemoteError
from kenotron_dist import Mesh
from kenotron_dist.placement import Shard, TensorLayout
from kenotron_dist.testing import on_ranks

SHARD = "shard-00000-of-00001.safetensors"
STORES = ["disk", "tmpfs", "memory", "file"]
SHM = Path("/dev/shm")


def place(kind: str, folder: Path) -> str | Path:
    """Bring a folder, if there is one, to a store of this kind; returns where it is."""
    if kind == "memory":  # of this process alone
        import fsspec

        url = f"memory://{uuid.uuid4().hex}"
        if folder.exists():
            fsspec.filesystem("memory").put(str(folder), url, recursive=True)
        return url
    return f"file://{folder}" if kind == "file" else folder


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    """(kind, a local folder to prepare); on tmpfs it is in memory."""
    if request.param != "tmpfs":
        yield request.param, tmp_path / "run"
        return
    if not os.access(SHM, os.W_OK):
        pytest.skip("there is no /dev/shm")
    folder = SHM / uuid.uuid4().hex
    yield request.param, folder / "run"
    shutil.rmtree(folder, ignore_errors=True)


def factor_at(where) -> int:
    """Load all values; the factor that all of them, and the state, tell."""
    mesh = Mesh.connect()
    wanted = state_of(mesh, 1, blank=True)
    loaded = load(where, wanted, mesh)
    factor = loaded.state["factor"]
    assert all(torch.equal(wanted[k][0], t) for k, (t, _) in state_of(mesh, factor).items())
    return factor


def load_there(mesh: Mesh, kind: str, folder: Path) -> int:
    """Load everything on a rank of another mesh; how many values it compared."""
    wanted = model(mesh, blank=True)
    loaded = load(place(kind, folder), wanted, mesh)
    assert (loaded.step, loaded.state, loaded.missing) == (7, {"x": 1}, [])
    for key, (tensor, layout) in wanted.items():
        assert torch.equal(tensor, local(layout, tensor.dtype, mesh)), key
    return sum(tensor.numel() for tensor, _ in wanted.values())


def save_there(mesh: Mesh, where: str | Path, background: bool) -> None:
    """Save on the ranks of a mesh, each of which writes its own files to the store."""
    if not background:
        save(where, 7, model(mesh), mesh, {"x": 1}, file_bytes=1000, verify=True)
        return
    with Saver(where, mesh, file_bytes=1000, keep=1, on_failure="raise") as saver:
        for step in (6, 7):
            saver.save(step, model(mesh), {"x": 1})
            saver.wait()


@pytest.mark.parametrize(
    ("before", "after"), [({"tp": 2}, {"dp": 2, "tp": 2}), ({"pp": 2, "dp": 2}, {"tp": 2})]
)
def test_what_ranks_saved_other_ranks_load_from_any_store(store, before, after):
    kind, folder = store
    folder.mkdir(parents=True)
    where = f"file://{folder}" if kind == "file" else folder  # memory:// is of one process
    on_ranks(save_there, where, "pp" in before, preload=("kenotron_ckpt",), **before)
    assert steps_in(folder) == [7] and len(list(folder.glob("7/shard-*"))) > sum(before.values())
    assert min(on_ranks(load_there, kind, folder, preload=("kenotron_ckpt",), **after)) > 0


def test_the_same_is_found_in_any_store(store):
    kind, folder = store
    for step in (10, 20):
        put(folder, step, step)
    where = place(kind, folder)
    assert latest_step(where) == 20 and steps_in(where) == [10, 20] and factor_at(where) == 20
    assert read_manifest(where) == read_manifest(folder) and verify_files(where) == []
    step = store_at(where).at("10")
    assert step.name == "10" and defect(step) is None and factor_at(step) == 10
    assert torch.equal(
        read_record(step, read_manifest(step), "w"),
        read_record(folder / "10", read_manifest(step), "w"),
    )
    found = open_checkpoint(where, Mesh.connect())
    assert found.store.name == "20"
    if kind in ("memory", "file"):
        with pytest.raises(ValueError, match="20 is in a remote store; a local folder is needed"):
            assert found.folder
    else:
        assert found.folder == folder / "20"


class Copies:
    """Copies of a store before each change of it and at the end: what crashes would leave."""

    def __init__(self, where: str | Path, folder: Path) -> None:
        self.where, self.folder, self.all = where, folder, list[Path]()

    def add(self, _: object = None) -> None:
        self.all.append(self.folder / f"copy{len(self.all)}")
        where = str(self.where)
        if where.startswith("memory://"):
            import fsspec

            fsspec.filesystem("memory").get(where, str(self.all[-1]), recursive=True)
        else:
            shutil.copytree(where.removeprefix("file://"), self.all[-1])

    def __enter__(self) -> "Copies":
        self.patch, self.stop = pytest.MonkeyPatch(), listen(self.add)
        real = FsspecStore._call
        self.patch.setattr(FsspecStore, "_call", lambda *args: (self.add(), real(*args))[1])
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.patch.undo()
        self.add()


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_ends_anywhere_leaves_a_whole_checkpoint(store, background, tmp_path):
    kind, folder = store
    where = place(kind, folder)
    put(where, 10, 1)
    with Copies(where, tmp_path / "copies") as copies:
        for step, factor in ((20, 2), (20, 3)):  # the second in the place of the first
            if background:
                put_beside(where, [step], factor, keep=1, threads=1)
            else:
                put(where, step, factor, verify=True)
    found = [factor_at(place(kind, each)) for each in copies.all]
    assert found == sorted(found) and set(found) == {1, 2, 3} and len(found) > 20
    assert steps_in(where) == ([20] if background else [10, 20])
    names = set(store_at(where).at("20").listing())
    assert len(names) == (3 if background else 4) and not any("tmp" in name for name in names)


def test_an_upload_that_ends_anywhere_leaves_a_whole_checkpoint(tmp_path):
    url, earlier, later = f"memory://{uuid.uuid4().hex}", tmp_path / "a", tmp_path / "b"
    put(earlier, 10, 1)
    put(later, 20, 2)
    upload(url, earlier / "10")
    with Copies(url, tmp_path / "copies") as copies:
        upload(url, later / "20")
    found = [factor_at(each) for each in copies.all]
    assert found == sorted(found) and set(found) == {1, 2} and len(found) > 10


def upload(url: str, step_folder: Path) -> None:
    uploader = Uploader(url, threads=1)
    uploader.submit(step_folder)
    assert [report.error for report in uploader.close()] == [None]


def refused(*_: object, **__: object) -> None:
    raise PermissionError("Access Denied")


def unreachable(*_: object, **__: object) -> None:
    raise ConnectionError("gone")


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


MEMORY = "fsspec.implementations.memory.MemoryFileSystem"


@pytest.mark.parametrize(
    ("target", "failing", "sentence"),
    [
        (f"{MEMORY}.put_file", refused, r"20/shard-\S+: PermissionError: Access Denied; check the"),
        (f"{MEMORY}.put_file", unreachable, r"20/shard-\S+: ConnectionError: gone; the store can"),
        (f"{MEMORY}.pipe_file", refused, "20/config.yaml: PermissionError: Access Denied; check"),
        ("os.write", full, r"20/shard-\S+: .*No space left on device; .* make room, or set TMPDIR"),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_a_save_to_a_store_that_fails_names_the_url_and_changes_nothing(
    target, failing, sentence, background, monkeypatch
):
    where = FsspecStore(f"memory://{uuid.uuid4().hex}", tries=2, pause=0.0)
    put(where, 10, 1)
    with (
        monkeypatch.context() as patch,
        pytest.raises((OSError, SaveFailed), match=f"{where}/{sentence}"),
    ):
        patch.setattr(target, failing)
        if background:
            put_beside(where, [20], 2, on_failure="raise")
        else:
            put(where, 20, 2)
    assert factor_at(where) == 1 and where.read("latest.txt") == b"10"
    assert "20" not in where.listing() or where.listing("20") == {}
    put(where, 20, 3)
    assert factor_at(where) == 3


def test_what_a_store_has_and_cannot_be_read_is_kept(store):
    kind, folder = store
    put(folder, 10, 1)
    put(folder, 20, 2)
    (folder / "20/manifest.json").write_text('{"format": "another"}')
    where, kept = place(kind, folder), set(os.listdir(folder / "20"))
    with pytest.warns(UserWarning, match=r"cannot be read \(.*\): it is kept in .*/20.unreadable"):
        put(where, 20, 3)
    assert factor_at(where) == 3 and kept == set(store_at(where).at("20.unreadable").listing())


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("lost", f"20: {SHARD} is missing"),
        ("cut", rf"20: {SHARD} is \d+ bytes long, but manifest.json says \d+"),
        ("flipped", f"20: {SHARD}: the bytes of half@0,0 are not those that were written"),
        ("header", f"20: {SHARD}: its header is not what was written"),
        ("no manifest", "20: it is half-written: there is no manifest.json"),
        ("manifest", "20: manifest.json is damaged or was edited"),
        ("no text", "20: manifest.json is damaged: it is not text"),
    ],
)
def test_what_is_spoiled_is_named_and_passed_over_in_any_store(store, what, sentence):
    kind, folder = store
    put(folder, 10, 1)
    put(folder, 20, 2)
    shard, manifest = folder / "20" / SHARD, folder / "20/manifest.json"
    if what == "lost":
        shard.unlink()
    elif what == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif what in ("flipped", "header"):
        flipped(shard, -1 if what == "flipped" else 12, 0)
    elif what == "no manifest":
        manifest.unlink()
    elif what == "manifest":
        manifest.write_text(manifest.read_text().replace('"factor": 2', '"factor": 3'))
    else:
        manifest.write_bytes(b"\xff" + manifest.read_bytes())
    where = place(kind, folder)
    mesh = Mesh.connect()
    wanted = state_of(mesh, 1, blank=True)
    loaded = load(where, wanted, mesh)
    assert loaded.step == 10 and loaded.store.name == "10"
    (reason,) = loaded.passed_over
    assert re.search(sentence, reason)
    with pytest.raises(NoCheckpoint, match=sentence):
        load(store_at(where).at("20"), wanted, mesh)
    if what == "flipped":
        assert all(bool(tensor.isnan().all()) for tensor, _ in wanted.values())


def test_a_file_that_goes_away_after_the_listing_is_damage_in_any_store(store):
    kind, folder = store
    put(folder, 10, 1)
    where = place(kind, folder)
    found = open_checkpoint(where, Mesh.connect(), verify=False)
    if kind == "memory":
        found.store.remove(SHARD)
    else:
        (folder / "10" / SHARD).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{SHARD} is missing"):
        found.load(state_of(Mesh.connect(), 1, blank=True))


class Ranges:
    """Counts the bytes that ``FsspecStore.ranges`` brings, by file."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[str, int] = {}
        real = FsspecStore.ranges

        def counted(store, path, begin, end):
            for data in real(store, path, begin, end):
                self.bytes[path] = self.bytes.get(path, 0) + len(data)
                yield data

        patch.setattr(FsspecStore, "ranges", counted)


def test_only_the_ranges_that_are_wanted_are_read_and_each_once(tmp_path, monkeypatch):
    tensors, mesh = vectors(8, size=1 << 16), Mesh.connect()
    save(tmp_path / "run", 1, tensors, mesh, {})
    where, ranges = place("memory", tmp_path / "run"), Ranges(monkeypatch)
    monkeypatch.setattr("kenotron_ckpt.remote.RANGE_BYTES", 1 << 16)
    wanted = {key: (torch.full_like(t, PADDING), p) for key, (t, p) in tensors.items()}
    load(where, wanted, mesh)
    header = (tmp_path / "run/1" / SHARD).stat().st_size - (8 << 18)
    assert ranges.bytes == {SHARD: header + (8 << 18)}  # the whole file, once
    ranges.bytes.clear()
    one = {"v3": wanted["v3"]}
    one["v3"][0].fill_(PADDING)
    load(where, one, mesh, verify=False)
    assert ranges.bytes == {SHARD: 1 << 18} and torch.equal(one["v3"][0], tensors["v3"][0])
    rows = TensorLayout("v5", (1 << 16,), (Shard("tp", 0),))
    ranges.bytes.clear()
    whole, own = on_ranks(read_half, rows, tmp_path / "run", tp=2, preload=("kenotron_ckpt",))
    assert whole == own == 1 << 17


def read_half(mesh: Mesh, layout: TensorLayout, folder: Path) -> int:
    """Read a rank's half of a record; how many bytes its store sent for it."""
    with pytest.MonkeyPatch.context() as patch:
        ranges = Ranges(patch)
        tensor = torch.full((1 << 15,), PADDING)
        load(place("memory", folder), {"v5": (tensor, layout)}, mesh, verify=False)
    assert torch.equal(tensor, torch.full((1 << 15,), 5.0))
    return ranges.bytes[SHARD]


def test_a_store_that_fails_is_an_error_and_not_an_older_checkpoint(tmp_path, monkeypatch):
    put(tmp_path, 10, 1)
    where = FsspecStore(f"file://{tmp_path}", tries=2, pause=0.0)

    def fail(*_, **__):
        raise ConnectionError("gone")

    for name in ("ls", "cat_file"):
        with monkeypatch.context() as patch:
            patch.setattr(f"fsspec.implementations.local.LocalFileSystem.{name}", fail)
            for call in (latest_step, lambda place: load(place, vectors(1), Mesh.connect())):
                with pytest.raises((RemoteError, OSError), match="the store cannot be reached"):
                    call(where)
    assert factor_at(where) == 1


def test_bad_places_are_named(tmp_path):
    mesh, wanted = Mesh.connect(), vectors(1)
    with pytest.raises(ValueError, match="ess3://a/b cannot be opened: Protocol not known"):
        load("ess3://a/b", wanted, mesh)
    with pytest.raises(ValueError, match="'s3://' was given; it must be a URL"):
        latest_step("s3://")
    for where in (tmp_path / "none", f"memory://{uuid.uuid4().hex}", f"file://{tmp_path}/none"):
        with pytest.raises(NoCheckpoint, match=f"no checkpoint at {where}: the path does not exi"):
            load(where, wanted, mesh)
        assert latest_step(where) is None
    assert store_at(tmp_path) == store_at(str(tmp_path)) == LocalStore(tmp_path)


def test_the_command_line_reads_urls(tmp_path, capsys):
    put(tmp_path / "run", 10, 1)
    url = f"file://{tmp_path}/run"
    assert main(["verify", url]) == 0
    assert capsys.readouterr().out == f"{url}/10: every byte is as it was written\n"
    assert main(["diff", url, str(tmp_path / "run")]) == 0
    assert f"A: {url}/10\nB: {tmp_path}/run/10\nequal: 3 records" in capsys.readouterr().out
    assert main(["inspect", url]) == 0
    assert f"{url}: 1 steps, latest.txt names 10" in capsys.readouterr().out
