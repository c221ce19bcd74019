"""A process group for CPU tensors with NCCL's semantics, to test without a GPU.

What it imitates of NCCL as torch drives it:

- An operation runs later, on the queue of its communicator, in the order of the calls. Until then
  its outputs are poisoned (NaN, or the lowest integer) and its inputs are not read: a result used
  before ``wait``, or an input changed too early, gives wrong numbers.
- A communicator is made at its first use, and the call blocks until all its ranks are there. Sends
  and receives outside a batch have one for each pair of ranks; everything else has the group's.
- A send ends when its receive runs. Tags are ignored: the k-th send meets the k-th receive.
- ``Work`` keeps its outputs alive, and ``is_completed`` is true only some time after the end.

``wait`` blocks the process, which is the computing stream of CPU tensors. Use it by
``spawn(..., backend="fake_nccl")``.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame

from kenotron_dist.fake_world import FAKE_NCCL
from kenotron_dist.proof.fake_work import FakeWork, execute

_ProcessGroup: Any = dist.ProcessGroup  # stubs have the C++ signatures, which Python's do not fit
_BATCH = 2
"""Added to the tags of transfers in a batch: they are not those of single transfers."""


def register_fake_nccl() -> None:
    """Make the backend known to torch.distributed. May be called again."""
    if not hasattr(dist.Backend, FAKE_NCCL.upper()):
        dist.Backend.register_backend(FAKE_NCCL, _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> FakeNccl:
    return FakeNccl(store, rank, size, timeout)


def _as_in_c(cls: type) -> type:
    """Let ``torch.compile`` call the methods of ``cls`` without a look inside, as those in C++."""
    skip = eval_frame._FrameAction.SKIP
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            setattr(method, "_torchdynamo_disable", True)  # noqa: B010 - functions declare it not
            strategy = eval_frame._FrameExecStrategy(skip, skip)
            eval_frame.set_code_exec_strategy(method.__code__, strategy)
    return cls


@_as_in_c
class FakeNccl(_ProcessGroup):
    """The process group; data travel over a gloo group of its own."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._me, self._n, self._name, self.timeout = rank, size, "", timeout
        self._store = store
        inner = dist.PrefixStore("gloo", store)
        self._gloo: Any = dist.ProcessGroupGloo(inner, rank, size, timeout)  # stubs lack its verbs
        self.aborted = threading.Event()
        self._queues: dict[str, SimpleQueue[FakeWork | None]] = {}
        self._passed: Counter[tuple[str, int, int]] = Counter()
        self._batch: list[tuple[bool, Tensor, int]] | None = None

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> FakeWork:
        """See ``torch.distributed.all_reduce``; in place."""
        (x,) = tensors
        given = _wide(_taken(x))
        return self._collective(lambda: self._gloo.allreduce([given], opts), [x], [given])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> FakeWork:
        """See ``torch.distributed.broadcast``; in place."""
        (x,) = tensors
        given = x.clone() if opts.rootRank == self._me else _taken(x)
        return self._collective(lambda: self._gloo.broadcast([given], opts), [x], [given])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> FakeWork:
        """See ``torch.distributed.all_gather_single``."""
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> FakeWork:
        """Several gathers in one launch; outputs have n times the elements of their inputs."""
        pairs = list(zip(outputs, inputs, strict=True))
        given = [x.clone() if _overlap(out, x) else x for out, x in pairs]
        found = [torch.empty_like(out) for out in outputs]
        for out in outputs:
            _poison(out)

        def run() -> None:
            for out, x in zip(found, given, strict=True):
                self._gloo.allgather([list(out.view(self._n, -1).unbind())], [x.view(-1)]).wait()

        return self._collective(run, outputs, found)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> FakeWork:
        """See ``torch.distributed.reduce_scatter_single``."""
        given = input.clone() if _overlap(input, output) else input
        found = torch.empty_like(output)
        _poison(output)

        def run() -> None:
            whole = _wide(given).clone()
            self._gloo.allreduce([whole]).wait()
            found.copy_(whole.view(self._n, -1)[self._me].view_as(found))

        return self._collective(run, [output], [found])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> FakeWork:
        """See ``torch.distributed.all_to_all_single``."""
        found = torch.empty_like(output)
        _poison(output)

        def run() -> dist.Work:
            return self._gloo.alltoall_base(found, input, output_splits, input_splits)

        return self._collective(run, [output], [found])

    # The names of torch 2.11 and 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> FakeWork | None:
        """See ``torch.distributed.isend``; None within a batch."""
        return self._transfer(True, tensors[0], to)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> FakeWork | None:
        """See ``torch.distributed.irecv``; None within a batch."""
        _poison(tensors[0])
        return self._transfer(False, tensors[0], source)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        assert self._batch is not None  # a batch was begun
        batch, self._batch = self._batch, None
        calls = [(sends, x, peer, self._tag("batch", sends, peer)) for sends, x, peer in batch]

        def run() -> None:
            works = []
            for sends, x, peer, tag in calls:
                start = self._gloo.send if sends else self._gloo.recv
                works.append(start([x], peer, tag + _BATCH))
            for work in works:
                work.wait()

        return self._collective(run, [x for sends, x, _ in batch if not sends], [])

    def abort(self) -> None:
        """End all operations: waits return, and outputs mean nothing.

        Later calls raise RuntimeError, as those of NCCL do.
        """
        self.aborted.set()

    def shutdown(self) -> None:
        """End the threads."""
        for queue in self._queues.values():
            queue.put(None)

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return FAKE_NCCL

    def setGroupName(self, name: str) -> None:
        """Set the name of the group, which torch keeps in a backend of C++ otherwise."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name of the group; ``torch.compile`` asks for it."""
        return self._name

    def _transfer(self, sends: bool, x: Tensor, peer: int) -> FakeWork | None:
        """A send or receive by itself: on the communicator of the two ranks."""
        if self._batch is not None:
            self._check_alive("all")
            self._batch.append((sends, x, peer))
            return None
        low, high = sorted((self._me, peer))
        tag, ack = self._tag("pair", sends, peer), torch.zeros(1)

        def run() -> None:
            if sends:
                self._gloo.send([x], peer, tag).wait()
                self._gloo.recv([ack], peer, tag + 1).wait()
            else:
                self._gloo.recv([x], peer, tag).wait()
                self._gloo.send([ack], peer, tag + 1).wait()

        return self._enqueue(f"{low}-{high}", 2, FakeWork(self, run, [] if sends else [x]))

    def _collective(
        self,
        start: Callable[[], dist.Work | None],
        outputs: Sequence[Tensor],
        found: Sequence[Tensor],
    ) -> FakeWork:
        """An operation of all ranks: ``start`` fills ``found``, which goes to ``outputs`` then."""

        def run() -> None:
            work = start()
            if work is not None:
                work.wait()
            for out, value in zip(outputs, found or outputs, strict=True):
                if out is not value:
                    _write(out, value)

        return self._enqueue("all", self._n, FakeWork(self, run, outputs))

    def _enqueue(self, communicator: str, ranks: int, work: FakeWork) -> FakeWork:
        self._check_alive(communicator)
        if communicator not in self._queues:
            self._meet(communicator, ranks)
            queue: SimpleQueue[FakeWork | None] = SimpleQueue()
            self._queues[communicator] = queue
            threading.Thread(target=execute, args=(queue,), daemon=True).start()
        self._queues[communicator].put(work)
        return work

    def _check_alive(self, communicator: str) -> None:
        if self.aborted.is_set():
            raise RuntimeError(f"fake_nccl: communicator {communicator} was aborted")

    def _meet(self, communicator: str, ranks: int) -> None:
        """Block until all ranks of the communicator are there, as its making does."""
        key, end = f"communicator/{communicator}", time.monotonic() + self.timeout.total_seconds()
        there = self._store.add(key, 1)
        while there < ranks and not self.aborted.is_set():
            if time.monotonic() > end:
                raise RuntimeError(
                    f"fake_nccl: communicator {communicator}: {there} of {ranks} ranks came "
                    f"within {self.timeout}"
                )
            time.sleep(0.001)
            there = self._store.add(key, 0)

    def _tag(self, kind: str, sends: bool, peer: int) -> int:
        """The tag of the next transfer in this direction; the odd one after it acknowledges it."""
        way = (kind, self._me, peer) if sends else (kind, peer, self._me)
        self._passed[way] += 1
        return 4 * self._passed[way]


def _overlap(whole: Tensor, part: Tensor) -> bool:
    """Return whether ``part`` lies in the memory of ``whole``."""
    start = whole.data_ptr()
    return start <= part.data_ptr() < start + whole.nbytes


def _wide(x: Tensor) -> Tensor:
    """Half precision is added in fp32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _taken(x: Tensor) -> Tensor:
    """A copy of ``x``, whose own memory is poisoned."""
    given = x.detach().clone()
    _poison(x)
    return given


def _poison(x: Tensor) -> None:
    if x.is_floating_point():
        _write(x, torch.tensor(float("nan")))
    elif x.dtype != torch.bool:
        _write(x, torch.tensor(torch.iinfo(x.dtype).min, dtype=x.dtype))


def _write(out: Tensor, value: Tensor) -> None:
    """Overwrite ``out`` unseen by autograd, as a device does."""
    with torch.inference_mode():
        out.data.copy_(value)
