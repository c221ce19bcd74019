"""Keys that ask for something and have no effect: a table, and what the model does not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kenotron_config.config import Config
from kenotron_data.config import SFTDatasetsConfig
from kenotron_models import DecoderSpec, expert_layers

WITHOUT_EFFECT = {
    "general.step": "a checkpoint has its own step",
    "general.consumed_train_samples": "a checkpoint has the number of samples it has seen",
    "checkpoints.checkpoints_path_is_shared_file_system": "every rank writes its own files",
    "s3_upload.s5cmd_numworkers": "the training process uploads, without s5cmd",
    "s3_upload.s5cmd_concurrency": "the training process uploads, without s5cmd",
    "s3_upload.s5cmd_path": "the training process uploads, without s5cmd",
    "logging.log_level_replica": "only the first rank prints",
    "profiler.export_chrome_trace": "every trace can be opened in a browser",
    "tokens.limit_test_batches": "there is no test next to the validation",
}
STAGE_WITHOUT_EFFECT = {
    "data.dataset.tokenizer_name": "the files hold ids already",
    "data.dataset.skip_in_stream": "any sample is found at once",
    "data.dataset.pad_samples_to_global_batch_size": "epochs follow one another within a batch",
    "data.dataset.use_old_brrr_dataloader": "there is one loader",
}
KERNEL, ALWAYS_FP32 = "it chose a kernel", "the softmax is always computed in float32"
FILE_READ = ("path",)
"""Key of a file that was read when the section was made: what it says is in another key."""
MODEL_REASONS = {
    "pad_token_id": "padded positions carry no label",
    "dtype": "model.dtype decides",
    "initializer_range": "model.init_method decides",
    "pad_vocab_size_multiple": "model.make_vocab_size_divisible_by decides",
    "pretraining_tp": "parallelism.tp decides",
    "use_cache": "training keeps no cache",
    "log_attn_probs": "probabilities of attention are not logged",
    "attention_softmax_in_fp32": ALWAYS_FP32,
    "scale_attention_softmax_in_fp32": ALWAYS_FP32,
    **dict.fromkeys(("fused_add_norm", "fused_rms_norm", "fused_rotary_emb"), KERNEL),
    **dict.fromkeys(("use_fast_path", "use_qkv_packed"), KERNEL),
}
"""Reason why a model does not read a key, where there is more to say than that."""
ORDERED = ("sdpa", "flash_attn", "blocked")
"""Values of `attn_implementation` that are orders on whole samples, and none over cp."""


def ignored_keys(config: Config) -> list[str]:
    """Name the keys that ask for something and have no effect.

    Args:
        config: the config of a training.

    Returns:
        One line for each key that is not at its default, `key.path: value has no effect: reason`.
    """
    found = [line for path, why in WITHOUT_EFFECT.items() for line in _ignored(config, path, why)]
    for number, stage in enumerate(config.data_stages):
        for path, why in STAGE_WITHOUT_EFFECT.items():
            found += [f"data_stages.{number}.{line}" for line in _ignored(stage, path, why)]
        if isinstance(stage.data.dataset, SFTDatasetsConfig):
            why = "every rank reads examples itself and keeps them in memory"
            for name in ("dataset_processing_num_proc_per_process", "dataset_overwrite_cache"):
                lines = _ignored(stage, f"data.dataset.{name}", why)
                found += [f"data_stages.{number}.{line}" for line in lines]
    attention = getattr(config.model.model_config, "attn_implementation", "auto")
    if config.parallelism.cp > 1 and attention in ORDERED:
        found.append(
            f"model.model_config.attn_implementation: {attention} has no effect: with "
            f"parallelism.cp {config.parallelism.cp} the kernels of kenotron-cp compute attention; "
            "of the orders they follow only plain"
        )
    for path, why in _without_effect_here(config):
        found += _ignored(config, path, why)
    return found + unread_model_keys(config.model.model_config)


def _without_effect_here(config: Config) -> Iterator[tuple[str, str]]:
    """Keys that another key of this config leaves without an effect, and the reason."""
    parallel = config.parallelism
    if config.doremi is not None and not config.doremi.is_proxy:
        for name in ("smoothing_param", "step_size", "reference_losses_path"):
            why = "without ref_model_resume_checkpoint_path no weights are learned"
            yield f"doremi.{name}", why
    if config.tokenizer.tokenizer_name_or_path is None:
        yield "tokenizer.tokenizer_revision", "without a tokenizer text is read as bytes"
    if parallel.recompute in (None, "none") and not parallel.recompute_layer:
        yield "parallelism.recompute_layers", "without parallelism.recompute nothing is kept less"
    chunks = config.general.reproducible and config.general.reproducible_max_cp > 1
    if parallel.cp == 1:
        for name in ("cp_attention", *(("cp_layout", "cp_block") if not chunks else ())):
            yield f"parallelism.{name}", "with parallelism.cp 1 samples are whole"
    if parallel.ep == 1:
        yield "parallelism.ep_chunks", "with parallelism.ep 1 no token is sent to experts"
    if not expert_layers(config.decoder):
        yield "parallelism.moe_layer_recompute", "the model has no experts"
    if config.optimizer.nonfinite != "rollback":
        yield "optimizer.max_rollbacks", "only optimizer.nonfinite: rollback counts them"
    if chunks and parallel.recompute == "selective":
        yield "parallelism.recompute", "samples in chunks keep all activations of a block, or none"
    if config.general.reproducible:
        if parallel.ep > 1:
            why = "with general.reproducible tokens are sent at once, for each choice"
            yield "parallelism.ep_chunks", why
            yield "model.model_config.moe_config.token_dispatcher_type", why
        yield "optimizer.reduce", "with general.reproducible gradients are added once a step"
        for name in ("tp_linear_async_communication", "tp_recompute_allgather"):
            yield f"parallelism.{name}", "with general.reproducible layers read whole activations"
    else:
        for name in ("max_tp", "max_cp", "threads"):
            name = f"general.reproducible_{name}"
            yield name, "without general.reproducible no bit is fixed by it"


def unread_model_keys(model: Any) -> list[str]:
    """Name the keys of a model that were changed and that no value of gives another model.

    Args:
        model: the config of a family.

    Returns:
        Lines as ``ignored_keys``.
    """
    now = _decoder(model)
    found = []
    for path, value, others in _changed(model) if now is not None else ():
        if path == FILE_READ:
            continue
        made = [_decoder(model, path, other) for other in others]
        accepted = [each for each in made if each is not None]
        if made[0] is None or len(accepted) < min(2, len(made)):
            continue  # what depends on it is refused without it
        if all(each == now for each in accepted):
            why = MODEL_REASONS.get(path[-1], "this model is the same with any value")
            name = ".".join(path)
            found.append(f"model.model_config.{name}: {_written(value)} has no effect: {why}")
    return found


def _changed(owner: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, list]]:
    """Keys that are not at their default: path, value, and the default and other values."""
    hints = get_type_hints(type(owner))
    for each in fields(owner):
        value, default = getattr(owner, each.name), _default(each)
        if is_dataclass(value):
            yield from _changed(value, (*path, each.name))
        elif default not in (MISSING, value) and isinstance(
            value, bool | int | float | str | tuple
        ):
            yield (*path, each.name), value, [default, *_others(value, hints[each.name])]


def _default(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _others(value: Any, hint: Any) -> list[Any]:
    """Values of the same type; none of a bool, whose default is the other one."""
    if isinstance(value, bool):
        return []
    if get_origin(hint) is Literal:
        return [*get_args(hint)]
    if isinstance(value, tuple):
        return [(), (0,), (1,)]
    if isinstance(value, int | float):
        return [value + 1, value * 2] if value else [1, 2]
    return [f"{value}x"]


def _decoder(model: Any, path: tuple[str, ...] = (), value: Any = None) -> DecoderSpec | None:
    """Return the model with another value of a key; None where that is refused."""
    try:
        return (_with(model, path, value) if path else model).decoder
    except (ValueError, TypeError, ImportError):
        return None


def _with(owner: Any, path: tuple[str, ...], value: Any) -> Any:
    name, *rest = path
    return replace(owner, **{name: _with(getattr(owner, name), (*rest,), value) if rest else value})


def _ignored(root: object, path: str, why: str) -> Iterator[str]:
    *parents, name = path.split(".")
    owner: Any = root
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None:  # a stage without dataset, a training without upload
        return
    defaults = {each.name: each.default for each in fields(owner)}
    if name not in defaults:  # another kind of dataset
        return
    if (value := getattr(owner, name)) != defaults[name]:
        yield f"{path}: {_written(value)} has no effect: {why}"


def _written(value: Any) -> str:
    return str(value).lower()
