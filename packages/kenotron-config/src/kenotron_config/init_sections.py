"""How the weights of a model begin: the ways that `model.init_method` may name."""

from dataclasses import dataclass
from typing import Literal

INFINITY = float("inf")


@dataclass(frozen=True, kw_only=True)
class RandomInitConfig:
    """Normal draws for the initial weights."""

    std: float
    """Standard deviation of the draws."""
    scaling_method: Literal["NONE", "NUM_LAYERS", "LAYER_INDEX", "MODEL_SCALE"] = "NUM_LAYERS"
    """What the draws of layers that add to the residual stream are divided by: nothing, the root of
    twice the number of layers, or the root of twice the layer's own number."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if not 0 <= self.std < INFINITY:
            found.append(f"std: {self.std} was given; it must be finite and not negative")
        if self.scaling_method == "MODEL_SCALE":
            found.append(
                "scaling_method: MODEL_SCALE was given; Nanotron has the name but no rule for it; "
                "choose NONE or NUM_LAYERS"
            )
        if found:
            raise ValueError("\n".join(found))


@dataclass(frozen=True, kw_only=True)
class SpectralMupInitConfig:
    """Draws and learning rates by the spectral condition (Yang et al., arXiv 2310.17813)."""

    use_mup: bool
    """Marks a YAML mapping as this class; always true."""

    def __post_init__(self) -> None:
        """Check the field."""
        if not self.use_mup:
            raise ValueError("use_mup: false was given; give std instead for normal draws")


@dataclass(frozen=True, kw_only=True)
class ExistingCheckpointInitConfig:
    """Weights of a model that is there; nothing else of it counts, and the run begins at step 0."""

    path: str
    """A model folder of Hugging Face (config.json and safetensors), a step folder or a run folder;
    model_config must be what the weights were trained with."""

    def __post_init__(self) -> None:
        """Check the field."""
        if not self.path:
            raise ValueError("path: nothing was given; it must name a checkpoint")


@dataclass(frozen=True, kw_only=True)
class MambaInitConfig:
    """Draws of a Mamba model: matrices evenly between -1/sqrt(inputs) and 1/sqrt(inputs).

    Raises:
        ValueError: a field is out of its bounds.
    """

    initializer_range: float = 0.02
    """Standard deviation of the embedding's draws."""
    rescale_prenorm_residual: bool = True
    """True: draws of matrices that add to the residual stream are divided by the root of the number
    of its additions."""
    n_residuals_per_layer: int = 1
    """Additions of one layer to the residual stream."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        found = []
        if not 0 <= self.initializer_range < INFINITY:
            found.append(
                f"initializer_range: {self.initializer_range} was given; it must be finite and not "
                "negative"
            )
        if self.n_residuals_per_layer < 1:
            found.append(
                f"n_residuals_per_layer: {self.n_residuals_per_layer} was given; it must be at "
                "least 1"
            )
        if found:
            raise ValueError("\n".join(found))


InitMethod = (
    RandomInitConfig | SpectralMupInitConfig | ExistingCheckpointInitConfig | MambaInitConfig
)
