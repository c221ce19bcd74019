"""The word that this app adds to the command ``kenotron``."""

from kenotron_command import Word

CONVERT = Word(
    "convert models between Hugging Face's folders and checkpoints",
    "kenotron convert kenotron-to-hf --ckpt checkpoints/150 --out my-model",
    "kenotron_convert.cli:main",
    "kenotron_convert.cli:convert_parser",
)
