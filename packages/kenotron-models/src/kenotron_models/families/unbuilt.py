"""The arguments of models that are read and checked, and cannot be built yet: Mamba."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SSMConfig:
    """The selective state space of a Mamba block (Gu and Dao, arXiv 2312.00752)."""

    d_state: int = 16
    """Features of the state, for each channel."""
    d_conv: int = 4
    """Width of the convolution, in tokens."""
    expand: int = 2
    """Channels over width of the residual stream."""
    dt_rank: int | Literal["auto"] = "auto"
    """Rank of the step's projection; auto: a sixteenth of the width."""
    dt_min: float = 0.001
    """Smallest first step."""
    dt_max: float = 0.1
    """Largest first step."""
    dt_init: Literal["random", "constant"] = "random"
    """How the step's projection is drawn."""
    dt_scale: float = 1.0
    """Factor of those draws."""
    dt_init_floor: float = 1e-4
    """No first step is below this."""
    conv_bias: bool = True
    """True: the convolution has a bias."""
    bias: bool = False
    """True: the projections have one."""
    use_fast_path: bool = True
    """No effect: a choice of kernels."""


@dataclass(frozen=True, kw_only=True)
class MambaModelConfig:
    """Sizes and constants of a Mamba model, under the names that Nanotron gives them."""

    is_mamba_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    d_model: int = 2560
    """Width of the residual stream, in features."""
    num_hidden_layers: int = 64
    """Blocks."""
    vocab_size: int = 50277
    """Token numbers that exist, without padding."""
    ssm_cfg: SSMConfig = field(default_factory=SSMConfig)
    """The state space of each block."""
    rms_norm: bool = True
    """True: RMSNorm; False: LayerNorm."""
    fused_add_norm: bool = True
    """No effect: a choice of kernels."""
    residual_in_fp32: bool = True
    """True: the residual stream is float32."""
    pad_vocab_size_multiple: int = 8
    """The vocabulary is padded to a multiple of this."""
    pad_token_id: int | None = None
    """Token number of padding."""
    dtype: str = "float32"
    """Number format of parameters."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square inside every norm."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        names = ("d_model", "num_hidden_layers", "vocab_size", "pad_vocab_size_multiple")
        found = [
            f"{name}: {getattr(self, name)} was given; it must be at least 1"
            for name in names
            if getattr(self, name) < 1
        ]
        if not self.is_mamba_config:
            found.append("is_mamba_config: false was given; it must be true, or be left out")
        if found:
            raise ValueError("\n".join(found))
