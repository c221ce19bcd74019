"""The arguments of the models, as plain dataclasses (no torch, no YAML here)."""

from dataclasses import dataclass

ROTARY_PARTS = 2  # a rotary embedding turns pairs of features


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a Llama decoder, under the names that Nanotron gives them.

    Building one checks it.

    Raises:
        ValueError: one line for each problem: field, value given, what is needed.
    """

    bos_token_id: int = 1
    """Token number of the beginning of a text; recorded for export, no layer reads it."""
    eos_token_id: int = 2
    """Token number of the end of a text; generation stops on it, no layer reads it."""
    hidden_act: str = "silu"
    """Activation of the gated feed-forward; only `silu` is known."""
    hidden_size: int = 4096
    """Width of the residual stream, in features."""
    initializer_range: float = 0.02
    """Standard deviation that Hugging Face would draw with; recorded for export only."""
    intermediate_size: int = 11008
    """Width of the feed-forward, in features."""
    is_llama_config: bool = True
    """Marks a YAML mapping as this class; always true."""
    max_position_embeddings: int = 2048
    """Longest sequence the model is meant for, in tokens; recorded for export only."""
    num_attention_heads: int = 32
    """Query heads of each layer."""
    num_hidden_layers: int = 32
    """Decoder layers."""
    num_key_value_heads: int | None = None
    """Key and value heads of each layer; None: as many as query heads."""
    pad_token_id: int | None = None
    """Token number of padding; no effect: padded positions carry no label."""
    pretraining_tp: int = 1
    """No effect: parallelism is chosen when the model is built, not by the model's sizes."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square inside every RMSNorm."""
    rope_scaling: dict[str, object] | None = None
    """Stretching of rotary positions; must be None, not available yet."""
    rope_theta: float = 10000.0
    """Base of the rotary wave lengths."""
    rope_interleaved: bool = False
    """True: rotate neighbouring features (0, 1), (2, 3); False: feature i with i + half."""
    tie_word_embeddings: bool = False
    """True: the head is the embedding's own matrix."""
    use_cache: bool = True
    """No effect: generation decides by itself whether it keeps keys and values."""
    vocab_size: int = 32000
    """Token numbers that exist, without padding."""

    def __post_init__(self) -> None:
        """Check all fields at once."""
        if problems := check(self):
            raise ValueError("\n".join(problems))

    @property
    def kv_heads(self) -> int:
        """Key and value heads of each layer, with None filled in."""
        given = self.num_key_value_heads
        return self.num_attention_heads if given is None else given

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden_size // self.num_attention_heads


def check(config: LlamaConfig) -> list[str]:
    """Name everything that is wrong with a model's sizes.

    Args:
        config: the sizes; not changed.

    Returns:
        One line for each problem, `field: value given; what is needed`; empty when all is well.
    """
    sizes = _size_problems(config)
    return [*sizes, *([] if sizes else _head_problems(config)), *_choice_problems(config)]


def _size_problems(config: LlamaConfig) -> list[str]:
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.kv_heads,
        "vocab_size": config.vocab_size,
    }
    found = [f"{name}: {n} was given; it must be at least 1" for name, n in sizes.items() if n < 1]
    constants = {"rms_norm_eps": config.rms_norm_eps, "rope_theta": config.rope_theta}
    return found + [
        f"{name}: {value} was given; it must be a finite number above 0"
        for name, value in constants.items()
        if not 0 < value < float("inf")
    ]


def _head_problems(config: LlamaConfig) -> list[str]:
    heads, kv_heads, hidden = config.num_attention_heads, config.kv_heads, config.hidden_size
    found = []
    if heads % kv_heads:
        found.append(
            f"num_key_value_heads: {kv_heads} was given; it must divide num_attention_heads "
            f"({heads}); change one of the two"
        )
    if hidden % heads:
        found.append(
            f"hidden_size: {hidden} was given; it must be a multiple of num_attention_heads "
            f"({heads}); {hidden // heads * heads + heads} would do"
        )
    elif config.head_dim % ROTARY_PARTS:
        found.append(
            f"hidden_size: {hidden} was given; over {heads} heads each has {config.head_dim} "
            f"features, and rotary positions need an even number; {hidden + heads} would do"
        )
    return found


def _choice_problems(config: LlamaConfig) -> list[str]:
    found = []
    if config.hidden_act != "silu":
        found.append(f"hidden_act: {config.hidden_act!r} was given; it must be 'silu'")
    if config.rope_scaling is not None:
        found.append(
            f"rope_scaling: {config.rope_scaling} was given; scaling of rotary positions is not "
            "available yet; set it to null"
        )
    if not config.is_llama_config:
        found.append("is_llama_config: false was given; it must be true, or be left out")
    return found
