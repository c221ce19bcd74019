"""The flags of every word that reads the config of a training."""

from __future__ import annotations

import argparse


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the config of a training and change keys of it."""
    add = parser.add_argument
    add("--config-file", metavar="YAML", help="as for a training; default: the embedded one")
    add("--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="as for a training")
