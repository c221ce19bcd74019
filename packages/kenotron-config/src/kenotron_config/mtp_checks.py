"""Rules of `model.mtp` that need the rest of the model."""

from kenotron_config.doremi_section import DoReMiConfig
from kenotron_config.init_sections import ExistingCheckpointInitConfig, SpectralMupInitConfig
from kenotron_config.sections import ModelConfig
from kenotron_models import expert_layers
from kenotron_models.families import TransformersConfig


def mtp_problems(model: ModelConfig, doremi: DoReMiConfig | None = None) -> list[str]:
    """Name what a module that predicts a further token cannot be combined with.

    Args:
        model: the model.
        doremi: weights of domains, if there are some.

    Returns:
        One line for each problem: `key.path: value given; what is needed; what to change`.
    """
    if model.mtp is None:
        return []
    start = f"model.mtp.layers: {model.mtp.layers} was given; "
    sizes, method = model.model_config, model.init_method
    if isinstance(sizes, TransformersConfig):
        return [f"{start}layers of transformers have no such module: leave mtp out"]
    found = []
    if model.cuda_graph:
        found.append(f"{start}a CUDA graph does not hold it: set cuda_graph to false")
    if doremi is not None and doremi.is_proxy:
        found.append(
            f"{start}a proxy of doremi weighs the losses of next tokens alone: leave mtp out, or "
            "doremi.ref_model_resume_checkpoint_path"
        )
    if isinstance(method, SpectralMupInitConfig):
        found.append(
            f"{start}model.init_method.use_mup has no scales for its tensors: give std instead of "
            "use_mup, or leave mtp out"
        )
    if isinstance(method, ExistingCheckpointInitConfig):
        found.append(
            f"{start}model.init_method.path has no weights for it: give std instead of path, or "
            "leave mtp out"
        )
    experts = expert_layers(sizes.decoder).values()
    if any(each.router.balances_all_layers for each in experts):
        found.append(
            f"{start}router_aux_loss_type all_layers does not count its experts: choose "
            "micro_batch or sample, or leave mtp out"
        )
    return found
