"""Processes that report what their watchdog says: what the tests of the watchdog start."""

import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kenotron_dist import Mesh
from kenotron_dist.diagnosis import PeerLost, watch

LIMIT = timedelta(seconds=1)


class Job:
    """What a process of these tests is told."""

    def __init__(self, folder, world, port=0, **sizes):
        self.folder, self.world, self.port, self.sizes = str(folder), world, port, sizes

    def write(self, rank, **facts):
        part = Path(self.folder, f"{rank}.part")
        part.write_text(json.dumps({"rank": rank, "when": time.time(), **facts}))
        part.rename(Path(self.folder, f"{rank}.json"))


def body(rank, job, scenario):
    """One process: connect, watch, run the scenario, write what became of it."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{job.folder}/store", job.world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=job.world, timeout=timedelta(seconds=60)
    )
    mesh = Mesh.connect(**job.sizes)
    meeting = None
    if job.port:
        meeting = dist.TCPStore("127.0.0.1", job.port, is_master=rank == 0, wait_for_workers=False)

    def on_stall(report):
        cause = report.cause
        job.write(rank, kind=cause.kind, culprit=cause.rank, text=str(report))

    try:
        with watch(mesh, meeting, limit=LIMIT, on_stall=on_stall):
            scenario(mesh, job)
        job.write(rank, kind="done")
    except PeerLost as error:
        kind = error.report.cause.kind
        job.write(rank, kind=kind, culprit=error.rank, text=str(error), error=True)
    except Exception as error:
        job.write(rank, kind="error", text=f"{type(error).__name__}: {error}")
    time.sleep(30)  # its peers shall not see a closed connection
