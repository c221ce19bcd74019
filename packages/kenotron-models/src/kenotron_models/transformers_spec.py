"""A decoder of transformers' own modules: what is known of it without building it."""

from __future__ import annotations

from dataclasses import dataclass

from kenotron_models.spec import DecoderSpec


@dataclass(frozen=True, kw_only=True)
class TransformersSpec(DecoderSpec):
    """A causal model that transformers builds; it has layers, and no ``BlockSpec``."""

    config_json: str
    """Contents of its config.json."""
    depth: int
    """Layers."""
    heads: int = 0
    """Query heads of a layer; 0: it has no attention, or does not say."""
    head_dim: int = 0
    """Features of a head."""
    attention: str | None = None
    """``attn_implementation`` of transformers; None: its own choice."""
    documents: bool = False
    """True where a token attends to its own document only."""
    tp_plan: tuple[tuple[str, str], ...] = ()
    """Styles of ``kenotron_tp.parallelize`` that replace those of the family's plan, by name."""
    balances: bool = False
    """True where config.json has ``output_router_logits``: the model's own balance loss is added.
    """

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return self.depth

    @property
    def routes(self) -> bool:
        """True where a balance loss is added, so that layers read which tokens are padding."""
        return self.balances

    @property
    def separate_documents(self) -> bool:
        """True where a token attends to its own document only."""
        return self.documents
