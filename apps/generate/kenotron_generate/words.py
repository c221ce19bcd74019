"""The word that this app adds to the command ``kenotron``."""

from kenotron_command import Word

GENERATE = Word(
    "continue prompts from a checkpoint or a model folder of Hugging Face",
    "kenotron generate --ckpt-path checkpoints/150 --prompt 'def main('",
    "kenotron_generate.cli:main",
    "kenotron_generate.cli:generate_parser",
)
