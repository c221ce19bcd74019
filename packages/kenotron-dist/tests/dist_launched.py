"""What the tests of `from_env` start under real launchers. Arguments: folder, fail|work."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

from kenotron_dist import Mesh, all_reduce, from_env, shutdown


def main() -> None:
    folder, first = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    world = from_env(timeout=timedelta(seconds=60))
    mesh = Mesh.connect(tp=world.world_size)
    total = int(all_reduce(torch.tensor(world.rank + 1), mesh["tp"]))
    if first == "fail" and world.restart_count == 0:
        if world.rank == 1:
            os._exit(3)  # no shutdown, no farewell
        all_reduce(torch.ones(100_000), mesh["tp"])
    name = f"{world.rank}-{world.restart_count}.txt"
    Path(folder, name).write_text(f"{world.launcher} {world.world_size} {total}")


if __name__ == "__main__":
    try:
        main()
    finally:
        shutdown()
