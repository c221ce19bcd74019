# Copyright of Kénotron's contributors; licence: Apache-2.0
"""Spack recipe of Kénotron: its three programs and the thirteen packages that they are made of.

spack repo add kenotron/.spack
spack install py-kenotron +nanosets +s3
"""

from pathlib import Path
from typing import Any

from spack.package import depends_on, license, variant, version, working_dir
from spack_repo.builtin.build_systems.python import PythonPackage, PythonPipBuilder

NEEDED = ("build", "run")
ORDER = (
    "command", "dist", "tp", "pp", "cp", "ep", "optim", "ckpt", "nanotron", "data", "models",
    "config", "engine", "cost",
)  # fmt: skip
"""Packages, each after those that it needs."""


class PyKenotron(PythonPackage):
    """Parallel pretraining of language models: the same numbers on every layout."""

    homepage = "https://github.com/korovod/kenotron"
    git = "https://github.com/korovod/kenotron.git"

    license("Apache-2.0")

    version("main", branch="main")

    variant("nanosets", default=False, description="Tokenise data sets of files and of the hub")
    variant("s3", default=False, description="Upload checkpoints to S3, and begin from there")
    variant("datastates", default=False, description="Save in the background (always built)")
    variant("transformers", default=False, description="Tokenizers, and checks of exports")
    variant("report", default=False, description="Draw curves of runs, and pipelines")
    variant("tensorboard", default=False, description="Log to TensorBoard")
    variant("evaluate", default=False, description="Tasks of lm-eval on checkpoints")
    variant("wandb", default=False, description="Log to Weights & Biases")
    variant("flash", default=False, description="Attention by flash-attn, on CUDA")
    variant("kernels", default=False, description="State-space scans by libraries, on CUDA")

    depends_on("python@3.11:", type=NEEDED)
    depends_on("py-pip", type="build")
    depends_on("py-hatchling@1.27:", type="build")

    depends_on("py-torch@2.11:+distributed+gloo", type=NEEDED)
    depends_on("py-numpy@2.0:", type=NEEDED)
    depends_on("py-xxhash@3.4:", type=NEEDED)
    depends_on("py-pydantic@2.7:", type=NEEDED)
    depends_on("py-pydantic-core@2.18:", type=NEEDED)
    depends_on("py-pyyaml@6:", type=NEEDED)
    depends_on("py-rich@13:", type=NEEDED)

    depends_on("py-datasets@4.0:", when="+nanosets", type=NEEDED)
    depends_on("py-huggingface-hub@0.30:", when="+nanosets", type=NEEDED)
    depends_on("py-pyarrow@18:", when="+nanosets", type=NEEDED)
    depends_on("py-tokenizers@0.21:", when="+nanosets", type=NEEDED)
    depends_on("py-transformers@4.51:", when="+nanosets", type=NEEDED)
    depends_on("py-zstandard@0.22:", when="+nanosets", type=NEEDED)
    depends_on("py-fsspec@2026.1:", when="+s3", type=NEEDED)
    depends_on("py-s3fs@2026.1:", when="+s3", type=NEEDED)
    depends_on("py-transformers@5:", when="+transformers", type=NEEDED)
    depends_on("py-matplotlib@3.9:", when="+report", type=NEEDED)
    depends_on("py-tensorboard@2.18:", when="+tensorboard", type=NEEDED)
    depends_on("py-lm-eval@0.4.13:", when="+evaluate", type=NEEDED)
    depends_on("py-tqdm@4.66:", when="+evaluate", type=NEEDED)
    depends_on("py-wandb@0.19:", when="+wandb", type=NEEDED)
    depends_on("py-flash-attn@2.3:", when="+flash", type=NEEDED)
    depends_on("py-mamba-ssm@2.2:", when="+kernels", type=NEEDED)
    depends_on("py-flash-linear-attention@0.4:", when="+kernels", type=NEEDED)

    def install(self, spec: Any, prefix: str) -> None:
        """Install one part after the other; none looks for another on an index."""
        options = [*PythonPipBuilder.std_args(self), f"--prefix={prefix}"]
        parts = [f"packages/kenotron-{name}" for name in ORDER]
        for part in [*parts, "apps/train", "apps/generate", "apps/convert", "apps/plan"]:
            with working_dir(Path(self.stage.source_path) / part):
                self.spec["python"].command("-m", "pip", *options, ".")
