"""Kernels and bytes of every phase of a training step, counted on the meta device.

Needs no GPU: ``python apps/train/benchmarks/bench_kernels.py [--by-name] [--freeze]``. With
``--freeze`` the numbers are written to ``kernels.json``, which a test compares: a phase that needs
more of them than frozen fails. Bytes over the memory bandwidth bound a phase's time from below.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kernel_cases import MODELS, TOKENS, costs, phases

FROZEN = Path(__file__).with_name("kernels.json")
COPIES_PER_SECOND = 4.3e12
"""Bytes a second that an H200 reads and writes in a copy."""

LEGEND = f"""
kernels       launches on a device; views and allocations are none
MB            10^6 bytes that they read and write
ms of copies  an H200 copies as many bytes in it ({COPIES_PER_SECOND / 1e12:g} TB/s): a lower bound
layer         one decoder layer and one sequence of {TOKENS} tokens
head          the last product and the loss
taken         backward and hooks where layers add weight gradients to the fp32 buffers themselves
other phases  those of the optimizer, for that layer's parameters, on one rank
"""


def frozen_text() -> str:
    """Return the content of ``kernels.json``: a line for each phase."""
    models = []
    for name, config in MODELS.items():
        lines = (f'    "{phase}": {json.dumps(cost)}' for phase, cost in costs(config).items())
        models.append(f'  "{name}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(models) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels and bytes of a training step.")
    parser.add_argument("--by-name", action="store_true", help="list the operations of each phase")
    parser.add_argument("--freeze", action="store_true", help=f"write them to {FROZEN.name}")
    options = parser.parse_args()
    for model, config in MODELS.items():
        print(f"{model:<24} {'kernels':>8} {'MB':>10} {'ms of copies':>13}")
        for name, counter, cost in phases(config):
            time = 1e3 * cost.nbytes / COPIES_PER_SECOND
            print(f"{name:<24} {cost.kernels:>8} {cost.nbytes / 1e6:>10.1f} {time:>13.3f}")
            if options.by_name:
                for operation, count in counter.names.most_common():
                    if count:
                        size = counter.nbytes[operation] / 1e6
                        print(f"    {operation:<44} {count:>6} {size:>10.1f}")
    print(LEGEND, end="")
    if options.freeze:
        FROZEN.write_text(frozen_text())


if __name__ == "__main__":
    main()
