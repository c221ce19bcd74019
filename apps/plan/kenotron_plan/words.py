"""The word that this app adds to the command ``kenotron``."""

from kenotron_command import Word

PLAN = Word(
    "say whether a training fits, which layout is best, and what limits it",
    "kenotron plan --config-file my.yaml --gpus 16x8xH100",
    "kenotron_plan.cli:main",
    "kenotron_plan.cli:plan_parser",
)
