"""What ``warm.Worker`` starts: it calls the programs that it is told to.

They find more loaded than they load themselves, and do not leave by ``shutdown``: tests of
launching start them as users do.

Standard input has a JSON line for each: folder, program, arguments; the exit status goes to the
file descriptor in the first argument, what it prints where standard output goes.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable

PRELOAD = (
    "torch._dynamo",
    "torch.utils.tensorboard",
    "kenotron_train.run.loop",
    "kenotron_generate.batch_generation",
    "transformers.models.auto.tokenization_auto",
)


def nothing(mesh: object) -> None:
    """Warm the process up that ranks are forked from."""


def programs() -> dict[str, Callable[[list[str]], int]]:
    """What ``python <name>`` calls."""
    from kenotron_convert import cli as convert
    from kenotron_generate import cli as generate
    from kenotron_plan import cli as plan
    from kenotron_pp import __main__ as pp
    from kenotron_train import cli as train

    return {
        "apps/train": train.main,
        "apps/generate": generate.main,
        "apps/convert": convert.main,
        "apps/plan": plan.main,
        "kenotron_pp": pp.main,
    }


def main() -> None:
    """Work until standard input ends."""
    from kenotron_dist import spawn

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the program has it before it starts ranks
    known = programs()
    spawn(nothing, preload=PRELOAD)
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        replies.write("0\n")  # ready
        replies.flush()
        for line in sys.stdin:
            folder, program, arguments = json.loads(line)
            os.chdir(folder)
            try:
                status = known[program](arguments)
            except SystemExit as end:  # of argparse
                status = end.code
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            replies.write(f"{json.dumps(status)}\n")
            replies.flush()


if __name__ == "__main__":
    main()
