"""Training from a YAML file, or from a program: ``train(config, model=..., hooks=...)``."""

from kenotron_train.data.own_data import OwnData
from kenotron_train.library import replay_step, train
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.run.loop import Outcome
from kenotron_train.run.stopping import STOPPED

__all__ = ["STOPPED", "LifeCycle", "Outcome", "OwnData", "replay_step", "train"]
