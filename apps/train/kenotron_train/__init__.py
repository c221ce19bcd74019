"""Training from a YAML file, or from a program: ``train(config, model=..., hooks=...)``."""

from kenotron_train.library import train
from kenotron_train.life_cycle import LifeCycle
from kenotron_train.own_data import OwnData

__all__ = ["LifeCycle", "OwnData", "train"]
