"""Training from a YAML file, or from a program: ``train(config, model=..., hooks=...)``.

Names are imported when they are asked for: the command line comes to ``start`` without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kenotron_train.data.own_data import OwnData
    from kenotron_train.library import replay_step, train
    from kenotron_train.life_cycle import LifeCycle
    from kenotron_train.run.loop import Outcome
    from kenotron_train.run.stopping import STOPPED

__all__ = ["STOPPED", "LifeCycle", "Outcome", "OwnData", "replay_step", "train"]
_ROOMS = {
    "STOPPED": "run.stopping",
    "LifeCycle": "life_cycle",
    "Outcome": "run.loop",
    "OwnData": "data.own_data",
    "replay_step": "library",
    "train": "library",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)
