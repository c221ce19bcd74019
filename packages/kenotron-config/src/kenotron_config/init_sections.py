"""Initial weights of a model: the ways that `model.init_method` may name."""

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

from kenotron_models import AttentionScale, DepthRule
from kenotron_models.hf import hub_folder

INFINITY = float("inf")
DEPTH = "num_hidden_layers"


@dataclass(frozen=True, kw_only=True)
class RandomInitConfig:
    """Normal draws for the initial weights."""

    std: float
    """Standard deviation of the draws."""
    scaling_method: Literal["NONE", "NUM_LAYERS", "LAYER_INDEX", "MODEL_SCALE"] = "NUM_LAYERS"
    """Divisor of the draws of layers that add to the residual stream: nothing, the root of twice
    the number of layers, or the root of twice the layer's own number."""

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
    """Maximal update parametrisation (µP): draws, learning rates and multipliers by widths.

    Hyperparameters that are good at the widths of `base` stay good at others (Yang et al., arXiv
    2203.03466 and 2310.17813). With the widths of `base` itself it is the run that `std` gives.

    Raises:
        ValueError: a field is out of its bounds, or is one that the rule does not read.
    """

    use_mup: bool
    """Marks a YAML mapping as this class; always true."""
    rule: Literal["spectral", "nanotron"] | None = None
    """`spectral`: factors relative to `base`, by the optimizer; `nanotron`: the table of Nanotron's
    own runs, which gives AdamW the learning rates of SGD, the head too, and reads no other key.
    None: spectral; nanotron where no other key is given, as in Nanotron's files."""
    base: dict[str, int] = field(default_factory=dict)
    """Keys of `model_config` and their values in the base model: widths, such as `hidden_size`, and
    `num_hidden_layers`, which `depth_rule` reads."""
    std: float = 0.02
    """Standard deviation of the draws at base width."""
    scaling_method: Literal["NONE", "NUM_LAYERS", "LAYER_INDEX"] = "NUM_LAYERS"
    """As with `std` alone."""
    embedding_multiplier: float = 1.0
    """Factor of embedded tokens, at every width."""
    output_multiplier: float = 1.0
    """Factor of logits at base width; at others they are divided by the growth of the width,
    too."""
    attention_scale: AttentionScale = "inverse"
    """`inverse`: scores are divided by the features of a head, such that base width has the usual
    root; `inverse_sqrt`: by the root at every width."""
    depth_rule: DepthRule = "none"
    """Divisor of what a block adds: the growth of the depth (`inverse`), its root (`inverse_sqrt`),
    or nothing."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        if not self.use_mup:
            raise ValueError("use_mup: false was given; give std instead for normal draws")
        found = []
        for name in ("std", "embedding_multiplier", "output_multiplier"):
            if not 0 < (value := getattr(self, name)) < INFINITY:
                found.append(f"{name}: {value} was given; it must be finite and above 0")
        found += [
            f"base: {key}: {size} was given; it must be at least 1"
            for key, size in self.base.items()
            if size < 1
        ]
        if self.rule == "nanotron":
            found += self._unread()
        elif not self.is_nanotron and not {*self.base} - {DEPTH}:
            found.append(
                f"base: {self.base or 'nothing'} was given; µP needs the widths of a base model: "
                "add them, such as base: {hidden_size: 256, intermediate_size: 1024, "
                "num_attention_heads: 4}, or set rule to nanotron for Nanotron's own table"
            )
        if self.depth_rule != "none" and DEPTH not in self.base:
            found.append(
                f"depth_rule: {self.depth_rule} was given; it is relative to the depth of the base "
                f"model: add {DEPTH} to base, or set it to none"
            )
        if found:
            raise ValueError("\n".join(found))

    @property
    def is_nanotron(self) -> bool:
        """True where the factors are those of Nanotron's table."""
        return self.rule == "nanotron" or (self.rule is None and not self._unread())

    def _unread(self) -> list[str]:
        read = ("use_mup", "rule")
        return [
            f"{each.name}: {getattr(self, each.name)} was given; rule nanotron has none: leave it "
            "out, or set rule to spectral"
            for each in fields(self)
            if each.name not in read and getattr(self, each.name) != _default(each)
        ]


def _default(of: Field[Any]) -> Any:
    return {} if of.default is MISSING else of.default


@dataclass(frozen=True, kw_only=True)
class ExistingCheckpointInitConfig:
    """Weights of a model that is there; nothing else of it counts, and the run begins at step 0."""

    path: str
    """A model folder of Hugging Face (config.json and safetensors) or its name on the hub, if it is
    in this machine's cache, a step folder or a run folder, or a URL of one of the last two;
    model_config must be what the weights were trained with."""
    accept_changed_rope: bool = False
    """True: rope_theta and rope_scaling may differ from those of the weights, to extend the context
    (theta of a longer base, or YaRN)."""
    check: bool = True
    """Compare a model folder of Hugging Face with transformers, where it is installed, if it has no
    more than 1e9 parameters: logits and a gradient, on rank 0."""

    def __post_init__(self) -> None:
        """Check the field."""
        if not self.path:
            raise ValueError("path: nothing was given; it must name a checkpoint")
        object.__setattr__(self, "path", hub_folder(self.path))


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
