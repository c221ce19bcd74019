"""The words that this app adds to the command ``kenotron``: its own, and those of its packages."""

from kenotron_command import Word

_RUN = "kenotron_train.start:run"
_CKPT = "kenotron_ckpt.__main__"

TRAIN = Word(
    "train a model from a YAML file, or a small one without a file",
    "kenotron train --config-file my.yaml --set tokens.train_steps=20",
    _RUN,
    "kenotron_train.train_flags:train_parser",
)
VERIFY = Word(
    "compare a small copy of a config on its layout with one process",
    "kenotron verify --config-file my.yaml",
    _RUN,
    "kenotron_train.verify.cli:verify_parser",
    ("verify",),
)
EVALUATE = Word(
    "measure a checkpoint: perplexity, and tasks of lm-eval",
    "kenotron evaluate --ckpt-path checkpoints/150 --perplexity",
    _RUN,
    "kenotron_train.evaluate.cli:evaluate_parser",
    ("evaluate",),
)
REPORT = Word(
    "draw the curves of runs, and compare them",
    "kenotron report checkpoints",
    _RUN,
    "kenotron_train.report.cli:report_parser",
    ("report",),
)
SLURM = Word(
    "submit a training to Slurm, or write its script",
    "kenotron slurm --config-file my.yaml --nodes 2 --dry-run",
    _RUN,
    "kenotron_train.slurm.cli:slurm_parser",
    ("slurm",),
)
KUBERNETES = Word(
    "print the manifest of a training for Kubernetes: a JobSet or a TrainJob",
    "kenotron kubernetes --config-file my.yaml --nodes 2 --image kenotron:cuda --claim runs",
    _RUN,
    "kenotron_train.kubernetes.cli:kubernetes_parser",
    ("kubernetes",),
)
PREFLIGHT = Word(
    "measure every rank and link before a run, and name what is slow",
    "kenotron preflight --ranks 2 --seconds 4",
    _RUN,
    "kenotron_train.preflight.cli:preflight_parser",
    ("preflight",),
)
DOREMI = Word(
    "learn the weights of domains with a small model",
    "kenotron doremi --config-file my.yaml",
    _RUN,
    "kenotron_train.doremi.cli:doremi_parser",
    ("doremi",),
)
NEW = Word(
    "write a folder to begin with: a training, a config, a mixer, a loss",
    "kenotron new mine --template config",
    _RUN,
    "kenotron_train.new_folder:new_parser",
    ("new",),
)
INSPECT = Word(
    "show what is in a checkpoint",
    "kenotron inspect checkpoints/150",
    f"{_CKPT}:main",
    f"{_CKPT}:command_parser",
    ("inspect",),
)
DIFF = Word(
    "show what differs between two checkpoints",
    "kenotron diff checkpoints/100 checkpoints/150",
    f"{_CKPT}:main",
    f"{_CKPT}:command_parser",
    ("diff",),
)
CHECK_BYTES = Word(
    "read every byte of a checkpoint and compare checksums",
    "kenotron check-bytes checkpoints/150",
    f"{_CKPT}:main",
    f"{_CKPT}:command_parser",
    ("verify",),
)
TOKENIZE = Word(
    "turn text into files of tokens",
    "kenotron tokenize texts.jsonl --output-folder tokens --tokenizer-name-or-path bytes",
    "kenotron_data.__main__:main",
    "kenotron_data.__main__:command_parser",
    ("tokenize",),
)
IMPORT_NANOTRON = Word(
    "make a checkpoint of one of Nanotron",
    "kenotron import-nanotron their/checkpoints ours --optimizer",
    "kenotron_nanotron.__main__:main",
    "kenotron_nanotron.__main__:command_parser",
)
