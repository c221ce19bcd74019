"""Training from a YAML file, or from a program: ``train(config, model=..., hooks=...)``."""

from kenotron_train.library import replay_step, train
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.loop import Outcome
from kenotron_train.own_data import OwnData
from kenotron_train.stopping import STOPPED

__all__ = ["STOPPED", "LifeCycle", "Outcome", "OwnData", "replay_step", "train"]
