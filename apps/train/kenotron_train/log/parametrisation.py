"""Effect of a parametrisation by widths on each parameter, as text."""

from __future__ import annotations

from kenotron_models import Multipliers, ParameterScale, mup_table


def parametrisation(given: Multipliers, scales: dict[str, ParameterScale] | None) -> list[str]:
    """Return a paragraph with all multipliers and factors; nothing of the standard one.

    Args:
        given: constants of the model.
        scales: of each parameter; None: the standard parametrisation.
    """
    if scales is None:
        return []
    scores = ", ".join(dict.fromkeys(f"{each:.6g}" for each in given.attention)) or "1"
    lines = [
        "Parametrisation by widths (model.init_method.use_mup): "
        f"embedding x {given.embedding:.6g}, logits x {given.logits:.6g}, attention's scores x "
        f"{scores}, what blocks add x {given.residual:.6g}",
        mup_table(scales),
    ]
    return ["\n".join(lines)]
