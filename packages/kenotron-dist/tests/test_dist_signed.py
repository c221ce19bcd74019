"""A stranger at the rendezvous store: what it writes is refused, and local runs do not admit it."""

import base64
import os
import socket
import subprocess
import sys
import time
import warnings
import zlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from test_dist_launch import start, variables

import kenotron_dist.signed_store as signed_store
import kenotron_dist.store_messages as notes_module
from kenotron_dist import Mesh, StoreMessages, all_reduce, from_env, spawn
from kenotron_dist.diagnosis.hang_diagnosis import Beat, Cause
from kenotron_dist.diagnosis.heartbeat import Heartbeat
from kenotron_dist.job_secret import SECRET, read_secret
from kenotron_dist.signed_store import MessageRefused, SignedStore
from kenotron_dist.testing import free_port

KEY = b"0123456789abcdef"


FORGED = base64.b85encode(zlib.compress(b'"forged"')).decode()
IGNORED = (
    "is not signed by a rank of this start of the job: it is ignored; see who can reach the "
    "store's port, and that no other job uses it"
)


def names_of(default, prefix):
    """The names in the whole store, as a stranger at its port sees them, with ``prefix``."""
    while hasattr(default, "underlying_store"):
        default = default.underlying_store
    return default, [name for name in default.list_keys() if prefix in name]


def hears_a_stranger(world):
    """Rank 1 overwrites or erases what rank 0 waits for, as a stranger, and posts it again."""
    mesh, found = Mesh.connect(dp=2), []
    signed_store.LOST_SECONDS = 0.3
    for number, attack in enumerate(("in advance", "overwritten", "erased", "lost"), 1):
        notes = StoreMessages(mesh, "save")
        default = dist.distributed_c10d._get_default_store()
        if world.rank == 1 and attack == "in advance":  # the name that it would have without a key
            dist.PrefixStore("kenotron-notes/save/1", default).set("share/1", FORGED)
        elif world.rank == 1:  # the name that a stranger finds in the store
            notes._store.set("share/1", "")
            store, [name] = names_of(default, f"save/{number}/")
            store.delete_key(name) if attack == "erased" else store.set(name, FORGED)
        all_reduce(torch.ones(1), mesh.world)
        if world.rank == 0:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                try:
                    found.append(notes.wait("share/1"))
                except MessageRefused as error:
                    found.append(str(error))
            found.append([str(each.message) for each in told])
        elif attack != "lost":
            time.sleep(0.1)
            notes.post("share/1", "own")
        all_reduce(torch.ones(1), mesh.world)
    return found


def test_a_forged_note_is_ignored_named_once_and_not_waited_for_without_end():
    port = free_port()
    secret = {SECRET: "a secret of this job"}
    answers, _ = start(
        *({**variables(rank, 2, port), **secret} for rank in range(2)), program=hears_a_stranger
    )
    assert isinstance(answers[0], list), answers[0]
    first, none, second, [named], third, nothing, lost, [again] = answers[0]
    assert first == second == third == "own" and none == nothing == []
    assert named == f"message kenotron-notes/save/2/share/1 in the store {IGNORED}"
    assert again == f"message kenotron-notes/save/4/share/1 in the store {IGNORED}"
    assert lost == f"{again}; no signed message came in its place within 0.3 s"


def repairs(world):
    """Rank 0's note is overwritten and erased while nobody waits; rank 1 reads it later."""
    notes_module._REPAIR_SECONDS = 0.05
    mesh = Mesh.connect(dp=2)
    notes, read = StoreMessages(mesh, "save"), []
    default = dist.distributed_c10d._get_default_store()
    if world.rank == 0:
        notes.post("outcome", "saved")
    for damage in ("overwritten", "erased"):
        notes.wait("outcome")
        all_reduce(torch.ones(1), mesh.world)
        if world.rank == 1:
            store, [name] = names_of(default, "outcome")
            store.delete_key(name) if damage == "erased" else store.set(name, "x")
            read.append(notes.wait("outcome"))
        all_reduce(torch.ones(1), mesh.world)
    return read


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_note_that_a_stranger_destroys_is_written_again():
    port = free_port()
    secret = {SECRET: "a secret of this job"}
    answers, _ = start(
        *({**variables(rank, 2, port), **secret} for rank in range(2)), program=repairs
    )
    assert answers == [[], ["saved", "saved"]]


def writes_and_reads(world):
    mesh = Mesh.connect(dp=world.world_size)
    notes = StoreMessages(mesh, "x")
    notes.post(str(mesh.rank), mesh.rank)
    return [notes.wait(str(rank)) for rank in range(world.world_size)], os.environ.get(
        "KENOTRON_MESSAGE_KEY", ""
    )


def test_ranks_share_a_secret_and_keys_differ_between_starts():
    keys = []
    for restart in (0, 0, 1):  # two jobs with one secret, and a restart
        port = free_port()
        more = {SECRET: "a secret of this job", "TORCHELASTIC_RESTART_COUNT": str(restart)}
        answers, _ = start(
            *({**variables(rank, 2, port), **more} for rank in range(2)), program=writes_and_reads
        )
        (values, key), other = answers
        assert values == [0, 1] and other == (values, key)
        keys.append(key)
    assert len({*keys, ""}) == 4 and not any("a secret" in key for key in keys)


def test_ranks_with_different_secrets_are_told():
    port = free_port()
    environs = [{**variables(0, 2, port), SECRET: "a" * 16}, {**variables(1, 2, port)}]
    answers, _ = start(*environs)
    told = [answer for answer in answers if "unlike the rank that came first" in answer]
    assert told and told[0].startswith("ValueError: rank ")
    assert f"set {SECRET} to the same value on all ranks" in told[0]


OWN_PROGRAM = """
from kenotron_dist import from_env, shutdown
try:
    from_env()
finally:
    shutdown()
"""


@pytest.mark.parametrize(
    ("ranks_per_host", "secret", "warned"),
    [(1, {}, True), (1, {SECRET: "a secret of this job"}, False), (2, {}, False)],
    ids=["none", "variable", "one host"],
)
def test_ranks_of_several_hosts_without_a_secret_are_warned_once(
    ranks_per_host, secret, warned, tmp_path
):
    (tmp_path / "own.py").write_text(OWN_PROGRAM)
    port, ranks = free_port(), []
    for rank in range(2):
        local = {"LOCAL_WORLD_SIZE": ranks_per_host, "LOCAL_RANK": rank % ranks_per_host}
        environ = os.environ | variables(rank, 2, port) | secret
        environ |= {name: str(value) for name, value in local.items()}
        ranks.append(
            subprocess.Popen(
                [sys.executable, tmp_path / "own.py"],
                env=environ,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    first, second = (rank.communicate(timeout=60)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0] and second == ""
    words = (
        f"own.py:4: RuntimeWarning: the ranks are on several hosts and the job has no secret: "
        f"anyone who can reach 127.0.0.1, port {port}, can forge messages between them; set "
        f"{SECRET} to the output of 'openssl rand -hex 32', the same on all ranks, or give "
        "secret_file, a path that all hosts share\n"
    )
    assert (words in first and first.count("Warning") == 1) if warned else first == ""


def test_a_short_secret_is_refused():
    port = free_port()
    short = {**variables(0, 2, port), SECRET: "1234"}
    words = "KENOTRON_JOB_SECRET has 4 characters, a secret has at least 16: set it to the output"
    with pytest.raises(ValueError, match=words):
        from_env(short, timeout=timedelta(seconds=2))


def joins_by_file(mesh, port, path):
    """A rank of a launched world inside a local one: only the meeting at the store is tried."""
    from kenotron_dist import resolve
    from kenotron_dist.launch import _share_secret, signing_key
    from kenotron_dist.launch_store import open_store

    world = resolve(variables(mesh.rank, 3, port))
    store = open_store(world, timedelta(seconds=10), timedelta(seconds=10))
    _share_secret(world, store, "", path)
    all_reduce(torch.ones(1), mesh.world)  # the host of the store leaves last
    return signing_key()


def test_ranks_get_a_secret_through_a_file_that_is_gone_afterwards(tmp_path):
    path = tmp_path / "run" / ".job-secret"
    keys = spawn(joins_by_file, free_port(), path, dp=3)
    assert len({*keys}) == 1 and len(keys[0]) == 64
    assert not path.exists()


def test_a_secret_is_in_a_file_of_mode_0600(tmp_path):
    path = tmp_path / "secret"
    secret = read_secret(path)
    assert len(secret) == 64 and read_secret(path) == secret
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a" * 64)
    path.chmod(0o644)
    with pytest.raises(ValueError, match=r"mode 0644\) is no secret of user .*: it must be a file"):
        read_secret(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError):
        read_secret(link)


def test_a_file_that_was_left_half_written_is_named(tmp_path, monkeypatch):
    path = tmp_path / "secret"
    path.touch(0o600)
    monkeypatch.setattr("kenotron_dist.job_secret._SECONDS", 0.05)
    with pytest.raises(ValueError, match="holds no secret of 64 digits: remove it, a start that"):
        read_secret(path)


def raw(signed):
    """Its part of the store, as a stranger who has listed the keys writes there."""
    return signed._store


@pytest.fixture
def pair():
    store = dist.HashStore()
    return SignedStore(store, "a", KEY), store


def test_a_message_cannot_be_changed_or_moved(pair):
    signed, store = pair
    signed.set("x", "élan")
    assert signed.find("x").decode() == "élan"
    found = raw(signed).get("x")
    for other, key, value in (
        (signed, "y", found),
        (SignedStore(store, "a", KEY), "z", found[:-1] + b"m"),
        (SignedStore(store, "b", KEY), "x", found),
        (SignedStore(store, "a", b"another key"), "x", found),
    ):
        raw(other).set(key, value)
        with pytest.warns(RuntimeWarning, match="is not signed by a rank of this start of the job"):
            assert other.find(key) is None
        assert not other.has(key)  # it is named once


def test_a_first_message_stands_until_it_is_erased(pair):
    signed, store = pair
    assert signed.compare_set("x", "", "one") == signed.compare_set("x", "", "two") == b"one"
    assert signed.compare_set("x", "one", "") == b""
    assert signed.find("x") is None
    assert signed.compare_set("x", "", "two") == b"two"
    raw(signed).set("x", b"forged \xff")
    with pytest.warns(RuntimeWarning, match="is not signed"):
        assert signed.compare_set("x", "", "three") == b"three"  # in the place of the forged one
    assert signed.compare_set("x", "", "four") == b"three"
    assert signed.delete_key("x") and not signed.has("x")


class Erased:
    """A store that a stranger erases a message from as soon as it was asked for."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        def call(key, *more):
            found = getattr(self.store, name)(key, *more)
            self.store.delete_key(key if isinstance(key, str) else key[0])
            return found

        return call


def test_a_message_that_is_erased_while_it_is_read_is_not_waited_for():
    """A look and then a read made the reader wait for minutes, and what else it had to send."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    signed = SignedStore(store, "a", KEY)
    signed.set("x", "here")
    signed._store, began = Erased(raw(signed)), time.monotonic()
    assert signed.find("x") == b"here" and signed.find("x") is None
    assert time.monotonic() - began < 1


class Hasty:
    """A store whose every comparison comes too late: a stranger writes more often."""

    def __init__(self, store):
        self.store = store

    def compare_set(self, *_):
        return b"forged"

    def set(self, key, value):
        self.store.set(key, value)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_first_message_is_written_in_the_end_whoever_writes_there(pair):
    signed, _ = pair
    own, signed._store = signed._store, Hasty(signed._store)
    assert signed.compare_set("x", "", "one") == b"one"
    signed._store = own
    assert signed.find("x") == b"one"


def test_a_message_has_a_size(pair, monkeypatch):
    signed, store = pair
    signed.set("x", "a" * 100)
    monkeypatch.setattr(signed_store, "LARGEST_MESSAGE", 99)
    with pytest.raises(ValueError, match="message a/x has 100 bytes; ranks read at most 99: split"):
        signed.set("x", "a" * 100)
    words = "has 164 bytes, more than the 99 that a rank writes: it is ignored"
    with pytest.warns(RuntimeWarning, match=words):
        assert signed.find("x") is None


def test_a_note_that_would_grow_too_large_is_refused(monkeypatch):
    notes = StoreMessages(Mesh.connect(), "x")
    notes.post("x", "a" * 1000)
    monkeypatch.setattr(notes_module, "_LARGEST_NOTE", 100)
    with pytest.raises(ValueError, match="note x has 1002 bytes of JSON; ranks read at most 100"):
        notes.post("x", "a" * 1000)
    with pytest.raises(MessageRefused, match=r"note x .* is malformed \(it has more than 100 byt"):
        notes.read("x")


@pytest.mark.parametrize("text", [b"{", b"[" * 100_000, None])
def test_a_malformed_note_is_refused(text):
    notes = StoreMessages(Mesh.connect(), "x")
    data = "not zlib" if text is None else zlib.compress(text)
    notes._own["x"] = data if text is None else base64.b85encode(data)
    with pytest.raises(MessageRefused, match="note x in the store is malformed"):
        notes.read("x")


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_watchdog_ignores_a_forged_cause_and_forged_beats():
    signed = SignedStore(dist.HashStore(), "w", KEY)
    raw(signed).set("cause", '{"rank": 1, "kind": "failed", "reason": "forged"}')
    raw(signed).set("beat/1", "forged")
    beat, own = Beat(1, {}, (), None, 0.0), Cause(0, "failed", "own")
    heartbeat = Heartbeat(signed, 0, 0.01, lambda number: beat, torch.device("cpu"))
    heartbeat.ask([1])
    end = time.monotonic() + 10
    while not signed.refused and time.monotonic() < end:
        time.sleep(0.01)
    assert heartbeat.cause is None and not heartbeat.broken
    heartbeat.claim(own)
    while heartbeat.cause is None and time.monotonic() < end:
        time.sleep(0.01)
    heartbeat.close(1)
    assert heartbeat.cause == own and not heartbeat.broken and heartbeat.seen[1].beat is None


def listens(_):
    """Addresses at which this process listens, as the kernel writes them."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    found = set()
    for kind in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{kind}") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        found |= {r[1].split(":")[0] for r in rows if r[3] == "0A" and f"socket:[{r[9]}]" in own}
    return sorted(found), os.environ.get("GLOO_SOCKET_IFNAME")


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="Linux's table of sockets")
@pytest.mark.parametrize("address", ["127.0.0.1", "hostname"])
def test_local_ranks_listen_on_the_loopback_interface_only(address):
    port = free_port()
    host = socket.gethostname() if address == "hostname" else address
    local = {"MASTER_ADDR": host, "LOCAL_WORLD_SIZE": "2"}
    environs = [{**variables(rank, 2, port), **local, "LOCAL_RANK": str(rank)} for rank in range(2)]
    answers, _ = start(*environs, program=listens)
    assert answers[0] == (["0100007F"], "lo") and answers[1] == (["0100007F"], "lo")


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="Linux's table of sockets")
def test_spawned_ranks_listen_on_the_loopback_interface_only():
    assert spawn(listens, dp=2) == [(["0100007F"], "lo")] * 2
