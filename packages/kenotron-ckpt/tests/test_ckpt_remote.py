"""Copies on a real S3 server, and on the other stores: whole, resumed, refused, replaced."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import threading
import time
import urllib.parse
import warnings
from collections import Counter
from itertools import count

import pytest
import torch
from ckpt_cases import PADDING, local, model, small
from moto import settings
from moto.core.responses import ActionAuthenticatorMixin
from s3_server import BUCKET, KEY, SECRET, S3Server, flip

from kenotron_ckpt import (
    Saver,
    latest_step,
    load,
    read_manifest,
    remote,
    save,
    verify_files,
)
from kenotron_ckpt.remote import FsspecStore, RemoteError, is_url
from kenotron_ckpt.uploader import Uploader, start_uploader
from kenotron_dist import Mesh, spawn

URL = f"s3://{BUCKET}/some/run"
CACHED = {"skip_instance_cache": False}  # a client takes 0.2 s
QUICK = {"tries": 2, "pause": 0.01, "options": CACHED}


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = S3Server()
    started.start()
    yield started
    started.stop()


@pytest.fixture
def s3(server, monkeypatch):
    server.reset()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setitem(remote._OPTIONS["s3"]["config_kwargs"], "retries", {"max_attempts": 0})
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)  # what is tried again, we do
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    return server


@pytest.fixture
def mesh():
    return Mesh.connect()


def scaled(mesh, factor):
    return {key: (tensor * factor, place) for key, (tensor, place) in small(mesh).items()}


def save_scaled(folder, step, factor, mesh):
    """Two shards and a config.yaml; the same factor gives the same bytes."""
    tensors = scaled(mesh, factor)
    return save(folder, step, tensors, mesh, {"factor": factor}, "seed: 1\n", file_bytes=1).path


def factor_in(step_folder, mesh):
    """By which factor the values of a local checkpoint are scaled; all by the same one."""
    wanted = small(mesh, blank=True)
    state = load(step_folder, wanted, mesh).state
    expected = scaled(mesh, state["factor"])
    assert all(torch.equal(wanted[key][0], expected[key][0]) for key in wanted)
    return state["factor"]


def upload(folder, url=URL, **arguments):
    uploader = Uploader(url, **(QUICK | arguments))
    uploader.submit(folder)
    (report,) = uploader.close(20)
    return report


def newest_step(url):
    return latest_step(FsspecStore(url, options=CACHED))


def listing(step):
    return FsspecStore(URL, options=CACHED).listing(step)


def files_of(step_folder):
    return {path.name: path.read_bytes() for path in step_folder.iterdir()}


def after(number, status, *, method="PUT", key=""):
    """Every request of a kind is refused, but the first ``number``."""
    seen = count()

    def fault(request):
        if request["REQUEST_METHOD"] == method and key in request["PATH_INFO"]:
            return status if next(seen) >= number else None

    return fault


FORBIDDEN = "403 Forbidden"  # is not tried again: the upload ends here


@pytest.mark.parametrize("kind", ["s3", "memory", "file"])
def test_a_checkpoint_comes_back_bit_by_bit(kind, tmp_path, mesh, request):
    if kind == "s3":
        request.getfixturevalue("s3")
    url = {"s3": URL, "memory": f"memory://{tmp_path.name}"}.get(kind, f"file://{tmp_path}/remote")
    folder = save(
        tmp_path / "a", 10, model(mesh), mesh, {"x": 1}, "seed: 1\n", file_bytes=1000
    ).path
    want = files_of(folder)
    report = upload(folder, url, read_back=True)
    size = sum(len(data) for name, data in want.items() if name.startswith("shard"))
    assert (report.error, report.step, report.bytes, report.sent_bytes) == (None, 10, size, size)
    again = upload(folder, url, read_back=True)
    assert (again.error, again.sent_bytes) == (None, 0)
    assert files_of(folder) == want
    assert newest_step(url) == 10

    remote = FsspecStore(f"{url}/10/", **QUICK)
    assert {name: remote.read(name) for name in remote.listing()} == want
    for where in (FsspecStore(url, **QUICK), remote):
        wanted = model(mesh, blank=True)
        loaded = load(where, wanted, mesh)
        assert (loaded.state, loaded.passed_over) == ({"x": 1}, [])
        assert all(torch.equal(t, local(p, t.dtype, mesh)) for t, p in wanted.values())


def test_the_remote_manifest_comes_last_and_nothing_else_is_left(s3, tmp_path, mesh):
    folder, order = save_scaled(tmp_path, 10, 1, mesh), []

    def note(request):
        if request["REQUEST_METHOD"] == "PUT":
            order.append(request["PATH_INFO"].rpartition("/")[2])

    s3.fault = note
    assert upload(folder).error is None
    assert order[0] == "uploading.txt"
    assert order[-3:] == ["config.yaml", "manifest.json", "latest.txt"]
    names = set(listing("10"))
    assert names == {path.name for path in folder.iterdir()}
    assert s3.get("some/run/latest.txt") == b"10"


def test_an_upload_that_ends_anywhere_is_taken_up_and_sends_nothing_twice(s3, tmp_path, mesh):
    old, new = (save_scaled(tmp_path / "a", step, step, mesh) for step in (10, 20))
    total = len(files_of(new)) + 2  # uploading.txt, latest.txt
    for number in range(total):
        s3.reset()
        assert upload(old).error is None
        s3.stored.clear()
        s3.fault = after(number, FORBIDDEN)
        cut = upload(new, remove_after_upload=True)
        assert f"{URL}/" in cut.error and "check the credentials" in cut.error
        assert verify_files(new) == []  # nothing is removed
        s3.fault = lambda request: None
        committed = number == total - 1  # only latest.txt was refused
        assert factor_in(FsspecStore(URL, **QUICK), mesh) == 10
        assert committed or s3.stored["some/run/20/manifest.json"] == 0
        done = upload(new)
        assert done.error is None and cut.sent_bytes + done.sent_bytes == done.bytes
        shards = [times for path, times in s3.stored.items() if "/shard" in path]
        assert shards == [1] * len(read_manifest(new).files) and len(s3.stored) == total
        assert factor_in(FsspecStore(URL, **QUICK), mesh) == 20


def stop_after(number, monkeypatch):
    """Every change of a store fails, but the first ``number``; returns how many were asked for."""
    seen = []

    def counted(change):
        def run(self, path, *arguments):
            seen.append(path)
            if len(seen) > number:
                raise RemoteError(f"{path}: the test says so")
            return change(self, path, *arguments)

        return run

    for name in ("send", "write_text", "remove"):
        monkeypatch.setattr(FsspecStore, name, counted(getattr(FsspecStore, name)))
    return seen


@pytest.mark.parametrize("fresh", [False, True], ids=["beside the old", "same names"])
def test_saving_a_step_again_replaces_its_copy_and_never_mixes_the_two(
    fresh, tmp_path, mesh, monkeypatch
):
    earlier = save_scaled(tmp_path / "a", 5, 5, mesh)
    old = shutil.copytree(save_scaled(tmp_path / "a", 10, 1, mesh), tmp_path / "old/10")
    # In an empty folder, as after a fresh start, the files have the names of the old ones.
    new = save_scaled(tmp_path / ("b" if fresh else "a"), 10, 2, mesh)
    assert set(read_manifest(new).files).isdisjoint(read_manifest(old).files) != fresh
    results = []
    for number in range(20):
        url = f"memory://{tmp_path.name}/{number}"
        assert upload(earlier, url).error is None and upload(old, url).error is None
        with monkeypatch.context() as patch:
            asked = stop_after(number, patch)
            error = upload(new, url, threads=1).error
        got = load(FsspecStore(url, **QUICK), small(mesh, blank=True), mesh)
        results.append(factor_in(got.store, mesh))
        assert not any("bytes of" in reason for reason in got.passed_over)  # old text, new bytes
        assert upload(new, url).error is None
        assert factor_in(FsspecStore(url, **QUICK), mesh) == 2
        shards = [name for name in FsspecStore(url).listing("10") if name.startswith("shard")]
        assert sorted(shards) == sorted(read_manifest(new).files)
        if len(asked) <= number:
            break
        assert error is None or "the test says so" in error
    between = 5 if fresh else 1  # the old copy stands until the new one replaces it, if it can
    assert results == sorted(results, key=[1, between, 2].index) and set(results) == {1, between, 2}
    assert number >= 8


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Slow Down"])
def test_errors_that_pass_are_outlasted(status, s3, tmp_path, mesh):
    """Every request fails when it is made first: several of them are a try of the store."""
    folder, seen = save_scaled(tmp_path / "a", 10, 3, mesh), Counter()

    def fault(request):
        key = ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING", "HTTP_RANGE")
        seen[asked := tuple(map(request.get, key))] += 1
        return status if seen[asked] == 1 else None

    s3.fault = fault
    assert upload(folder, tries=4).error is None
    assert factor_in(FsspecStore(URL, **(QUICK | {"tries": 4})), mesh) == 3
    assert len(seen) > 6
    s3.fault = lambda request: status
    began = time.monotonic()
    report = upload(save_scaled(tmp_path / "a", 20, 4, mesh), remove_after_upload=True)
    assert f"{URL}/20: " in report.error and "try again" in report.error
    assert time.monotonic() - began < 15
    with pytest.raises(OSError, match=f"{URL}: .*; see whether the store works"):
        factor_in(FsspecStore(URL, **QUICK), mesh)
    assert latest_step(tmp_path / "a") == 20


def test_a_slow_server_delays_nobody_and_the_order_is_kept(s3, tmp_path, mesh):
    first, second = (save_scaled(tmp_path / "a", step, step, mesh) for step in (10, 20))
    release = threading.Event()

    def wait(request):
        release.wait(10)

    s3.fault = wait
    uploader = Uploader(URL, **QUICK)
    began = time.monotonic()
    uploader.submit(first)
    uploader.submit(second)
    uploader.submit(second)  # once is enough
    assert time.monotonic() - began < 5
    assert uploader.pending() == [10, 20] and uploader.uploading(20)
    assert uploader.finished() == [] and not uploader.uploading(30)
    release.set()
    assert [(report.step, report.error) for report in uploader.close(20)] == [
        (10, None),
        (20, None),
    ]
    assert uploader.pending() == [] and newest_step(URL) == 20
    with pytest.raises(ValueError, match="a/20 is not uploaded: the uploader was closed"):
        uploader.submit(second)


def test_a_server_that_hangs_is_left_and_the_upload_taken_up_later(s3, tmp_path, mesh):
    first, second = (save_scaled(tmp_path / "a", step, step, mesh) for step in (10, 20))
    release = threading.Event()

    def hang(request):
        if request["PATH_INFO"].endswith("safetensors"):
            release.wait(10)

    s3.fault = hang
    uploader = Uploader(URL, **QUICK, remove_after_upload=True)
    uploader.submit(first)
    uploader.submit(second)
    began = time.monotonic()
    reports = uploader.close(0.3)
    assert 0.3 <= time.monotonic() - began < 3
    assert [report.step for report in reports] == [10, 20]
    assert f"given up after 0.3 s without progress; {first} is unt" in reports[0].error
    release.set()
    assert newest_step(URL) is None and verify_files(first) == []
    assert upload(first).error is None


def test_older_steps_can_follow_without_becoming_the_latest(s3, tmp_path, mesh):
    first, second = (save_scaled(tmp_path / "a", step, step, mesh) for step in (10, 20))
    uploader = Uploader(URL, **QUICK)
    uploader.submit(second)
    uploader.submit(first, latest=False)
    assert [report.error for report in uploader.close(20)] == [None, None]
    assert newest_step(URL) == 20
    assert factor_in(FsspecStore(f"{URL}/10", **QUICK), mesh) == 10
    s3.put("some/run/latest.txt", b"10\n")  # edited, to go back
    assert newest_step(URL) == 10
    with pytest.raises(ValueError, match=f"no checkpoint at {URL}/30: the path does not exist"):
        factor_in(FsspecStore(f"{URL}/30", **QUICK), mesh)


def test_local_files_go_only_after_their_copy_was_compared(s3, tmp_path, mesh):
    first, second = (save_scaled(tmp_path / "a", step, step, mesh) for step in (10, 20))
    seen = []

    def watch(request):
        seen.append((request["REQUEST_METHOD"], first.exists()))
        if request["REQUEST_METHOD"] == "PUT" and "/20/shard" in request["PATH_INFO"]:
            flip(request, unseen=True)  # on its way, each time

    s3.fault = watch
    uploader = Uploader(URL, **QUICK, remove_after_upload=True)
    uploader.submit(first)
    uploader.submit(second)
    good, bad = uploader.close(20)
    assert good.error is None and not first.exists()
    gets = [there for method, there in seen if method == "GET"]
    assert gets.count(True) >= 5 and verify_files(second) == []
    assert f"{URL}/20: what arrived is not what was sent: shard-" in bad.error
    assert "the bytes of " in bad.error and newest_step(URL) == 10
    s3.fault = lambda request: None
    assert upload(second, remove_after_upload=True).error is None
    assert list((tmp_path / "a").iterdir()) == [tmp_path / "a/latest.txt"]
    assert factor_in(FsspecStore(URL, **QUICK), mesh) == 20


def test_what_a_flipped_bit_spoiled_is_sent_once_more(s3, tmp_path, mesh):
    folder, seen = save_scaled(tmp_path / "a", 10, 7, mesh), count()

    def fault(request):
        if "shard" in request["PATH_INFO"] and request["REQUEST_METHOD"] == "PUT":
            flip(request, unseen=False) if next(seen) == 0 else None

    s3.fault = fault
    report = upload(folder, read_back=True)
    assert report.error is None and report.bytes < report.sent_bytes < 2 * report.bytes
    assert factor_in(FsspecStore(URL, **QUICK), mesh) == 7


def test_a_copy_that_is_not_whole_is_seen_without_reading_it(s3, tmp_path, mesh):
    folder, removed = save_scaled(tmp_path / "a", 10, 7, mesh), []

    def fault(request):  # a shard vanishes when the manifest comes
        if request["PATH_INFO"].endswith("10/manifest.json") and request["REQUEST_METHOD"] == "PUT":
            removed.append(sorted(read_manifest(folder).files)[0])
            s3.call("DELETE", f"{BUCKET}/some/run/10/{removed[-1]}")

    s3.fault = fault
    report = upload(folder, remove_after_upload=True, read_back=False)
    assert f"what arrived is not whole: {removed[0]} is missing" in report.error
    assert len(removed) == 3 and verify_files(folder) == [] and newest_step(URL) is None
    with pytest.raises(ValueError, match="can be read:\n  .*10: it is half-written: there"):
        factor_in(FsspecStore(URL, **QUICK), mesh)


def test_a_checkpoint_that_is_saved_again_while_it_is_sent(s3, tmp_path, mesh):
    folder, seen = save_scaled(tmp_path / "a", 10, 1, mesh), count()

    def fault(request):
        if request["REQUEST_METHOD"] == "PUT" and "shard" in request["PATH_INFO"]:
            if next(seen) == 1:
                save_scaled(tmp_path / "a", 10, 2, mesh)

    s3.fault = fault
    assert upload(folder, remove_after_upload=True, threads=1).error is None
    assert not folder.exists()
    assert factor_in(FsspecStore(URL, **QUICK), mesh) == 2


def test_a_checkpoint_that_is_saved_again_when_its_copy_is_complete_stays(s3, tmp_path, mesh):
    folder = save_scaled(tmp_path / "a", 10, 1, mesh)

    def fault(request):
        if request["REQUEST_METHOD"] == "PUT" and request["PATH_INFO"].endswith("latest.txt"):
            save_scaled(tmp_path / "a", 10, 2, mesh)

    s3.fault = fault
    assert upload(folder, remove_after_upload=True).error is None
    assert factor_in(folder, mesh) == 2


def test_what_an_upload_of_other_values_left_is_not_taken_for_ones_own(s3, tmp_path, mesh):
    first, second = (save_scaled(tmp_path / str(i), 10, i, mesh) for i in (1, 2))
    assert set(read_manifest(first).files) == set(read_manifest(second).files)
    s3.fault = after(4, FORBIDDEN)  # both shards of the first are there, no manifest
    assert upload(first).error is not None
    s3.fault = lambda request: None
    assert len([name for name in listing("10") if name.startswith("shard")]) == 2
    assert upload(second).error is None
    assert factor_in(FsspecStore(URL, **QUICK), mesh) == 2


def test_patience_begins_when_the_run_ends(s3, tmp_path, mesh):
    uploader = Uploader(URL, **QUICK)
    uploader._moved -= 1000  # nothing was uploaded for long
    uploader.submit(save_scaled(tmp_path / "a", 10, 1, mesh))
    assert [report.error for report in uploader.close(20)] == [None]


def test_what_is_no_whole_checkpoint_is_not_sent(s3, tmp_path, mesh):
    uploader = Uploader(URL)
    with pytest.raises(ValueError, match="a/30 is not uploaded: it is half-written"):
        uploader.submit(tmp_path / "a/30")
    folder = save_scaled(tmp_path / "a", 10, 1, mesh)
    with pytest.raises(ValueError, match="a is not uploaded: its name is not a step"):
        uploader.submit(folder.parent)
    flip_local(folder)
    report = upload(folder)
    assert f"{folder} is damaged and was not uploaded: shard-" in report.error
    assert s3.stored["some/run/10/manifest.json"] == 0


def flip_local(folder):
    path = sorted(folder.glob("shard-*"))[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def spoil(s3, what):
    name = sorted(n for n in listing("20") if n.startswith("shard"))[0]
    path = f"some/run/20/{name}"
    data = s3.get(path)
    if what == "cut":
        s3.put(path, data[:-1])
    elif what == "flip":
        s3.put(path, data[:-1] + bytes([data[-1] ^ 1]))
    elif what == "lost":
        s3.call("DELETE", f"{BUCKET}/{path}")
    elif what == "manifest":
        s3.put("some/run/20/manifest.json", b'{"a": 1}')
    elif what == "bytes":
        s3.put("some/run/20/manifest.json", b"\xff")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            "cut",
            r"shard-00000-of-00001.part1.safetensors is \d+ bytes long, but manifest.json says ",
        ),
        ("flip", "shard-00000-of-00001.part1.safetensors: the bytes of .@0.* are not those"),
        ("lost", "shard-00000-of-00001.part1.safetensors is missing"),
        ("manifest", "manifest.json is not a "),
        ("bytes", "manifest.json is damaged: it is not text"),
    ],
)
def test_a_spoiled_copy_is_named_and_passed_over(what, sentence, s3, tmp_path, mesh):
    for step in (10, 20):
        assert upload(save_scaled(tmp_path / "a", step, step, mesh)).error is None
    spoil(s3, what)
    got = load(FsspecStore(URL, **QUICK), small(mesh, blank=True), mesh)
    assert got.store.name == "10" and got.step == 10
    (reason,) = got.passed_over
    assert reason.startswith(f"{URL}/20: ")
    assert re.search(sentence, reason)
    with pytest.raises(ValueError, match=sentence):
        factor_in(FsspecStore(f"{URL}/20", **QUICK), mesh)
    assert upload(tmp_path / "a/20", read_back=True).error is None  # and it is made good
    assert factor_in(FsspecStore(URL, **QUICK), mesh) == 20


def test_s3_is_saved_to_without_a_local_copy(s3, tmp_path, mesh, monkeypatch):
    store = FsspecStore(URL, options=CACHED)
    save(store, 10, scaled(mesh, 1), mesh, {"factor": 1}, file_bytes=1)
    s3.put("some/run/20/manifest.json", b"of another release")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Saver(store, mesh, keep=1, file_bytes=1, verify=True, on_failure="raise") as saver:
        for step in (20, 30):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                saver.save(step, scaled(mesh, step), {"factor": step})
                saver.finish()
            assert [f"kept in {URL}/20.unreadable" in str(w.message) for w in said] == [True] * (
                step == 20
            )
    assert [report.removed for report in saver.reports()] == [[10], [20]]
    assert sorted(store.listing()) == ["20.unreadable", "30", "latest.txt"]
    assert s3.get("some/run/20.unreadable/manifest.json") == b"of another release"
    assert factor_in(store, mesh) == 30 and verify_files(store) == []
    assert not list(tmp_path.iterdir())  # files of a rank pass through here, one by one
    s3.fault = after(1, FORBIDDEN)
    with pytest.raises(OSError, match=f"{URL}/40/shard-.*; check the credentials"):
        save(store, 40, scaled(mesh, 40), mesh, {"factor": 40}, file_bytes=1)
    assert sorted(store.listing()) == ["20.unreadable", "30", "latest.txt"]
    assert factor_in(store, mesh) == 30


def test_a_load_reads_ranges_of_s3_in_place(s3, tmp_path, mesh):
    for step in (10, 20):
        assert upload(save_scaled(tmp_path / "a", step, step, mesh)).error is None
    seen = []

    def watch(request):
        if request["REQUEST_METHOD"] == "GET" and "shard" in request["PATH_INFO"]:
            seen.append(request.get("HTTP_RANGE"))

    s3.fault = watch
    store = FsspecStore(URL, options=CACHED)
    assert factor_in(store, mesh) == 20
    assert seen and all(seen)  # never a whole file
    seen.clear()
    wanted = small(mesh, blank=True)
    load(store, {"b": wanted["b"]}, mesh, verify=False)
    assert len(seen) == 1
    spoil(s3, "flip")
    loaded = load(store, wanted, mesh)
    assert loaded.step == 10 and "the bytes of " in loaded.passed_over[0]
    s3.fault = after(0, FORBIDDEN, method="GET")
    with pytest.raises(OSError, match=f"{URL}: .*; check the credentials"):
        load(store, wanted, mesh)


def test_bad_urls_and_stores_are_named_with_the_fix(s3, tmp_path, mesh, monkeypatch):
    with pytest.raises(ValueError, match="'/data/run' was given; it must be a URL such as s3://"):
        Uploader("/data/run")
    with pytest.raises(ValueError, match="'s3://' was given; it must be a URL"):
        Uploader("s3://")
    with pytest.raises(ValueError, match="ess3://a/b cannot be opened: Protocol not known"):
        Uploader("ess3://a/b")
    with pytest.raises(ValueError, match="no checkpoint at s3://runs/x: the path does not exist"):
        load("s3://runs/x", {}, mesh)
    for call in (lambda url: Uploader(url).check(), lambda url: load(url, {}, mesh)):
        with pytest.raises(OSError, match="s3://absent/run: .*bucket does not exist; make the"):
            call("s3://absent/run")
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    monkeypatch.setattr(ActionAuthenticatorMixin, "request_count", 0)
    with pytest.raises(RemoteError, match=f"{URL}: .*Key Id you provided.*; check the credent"):
        Uploader(URL).check()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(RemoteError, match="NoCredentialsError: .*; set AWS_ACCESS_KEY_ID and AWS"):
        Uploader(URL).check()
    options = {"endpoint_url": "http://127.0.0.1:9", "key": KEY, "secret": SECRET}
    with pytest.raises(RemoteError, match="the store cannot be reached: check the network, and"):
        Uploader(URL, tries=2, pause=0.01, options=options).check()


@pytest.mark.parametrize("module", ["fsspec.core", "s3fs"])
def test_a_missing_library_is_named_with_the_extra(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ValueError, match=r"not installed \(.*\): pip install fsspec s3fs"):
        Uploader(URL)


def test_what_is_a_url():
    assert is_url("s3://bucket/run") and is_url("file:///data/run")
    assert not is_url("checkpoints/10") and not is_url("/data:1/run")


def load_there(mesh, url):
    """Read a copy on the ranks of a mesh: where it was, what was passed over, who uploads."""
    wanted = small(mesh, blank=True)
    loaded = load(url, wanted, mesh)
    assert all(torch.equal(tensor, local(p, tensor.dtype, mesh)) for tensor, p in wanted.values())
    assert (wanted["w"][0] != PADDING).all()
    uploader = start_uploader(url, mesh)
    with pytest.raises(ValueError, match=f"no checkpoint at {url}/none: the path does not exist"):
        load(f"{url}/none", wanted, mesh)
    return str(loaded.store), loaded.passed_over, uploader is not None


def test_all_ranks_read_a_copy_and_the_first_one_uploads(tmp_path, mesh):
    folder = save_scaled(tmp_path / "a", 10, 1, mesh)
    url = f"file://{urllib.parse.quote(str(tmp_path))}/remote"
    assert upload(folder, url).error is None
    (tmp_path / "remote/20").mkdir()
    (tmp_path / "remote/latest.txt").unlink()
    found = spawn(load_there, url, tp=2)
    assert [uploads for _, _, uploads in found] == [True, False]
    for where, reasons, _ in found:
        assert where == f"{url}/10" and "20: it is half-written: there" in reasons[0]
