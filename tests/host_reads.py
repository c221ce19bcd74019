"""Where a library reads a number of a tensor on the host, and what stands for it without values."""

HOST_READS = {
    "cp/src/kenotron_cp/visibility.py": "rows' documents: they are on the host",
    "dist/src/kenotron_dist/fake_world.py": "host_numbers, which says what meta has",
    "dist/src/kenotron_dist/objects.py": "control messages: on the host, where all ranks are alike",
    "dist/src/kenotron_dist/statistics.py": "a checksum of values: not on meta",
    "dist/src/kenotron_dist/testing.py": "an example in a docstring",
    "dist/src/kenotron_dist/diagnosis/replica_check.py": "a check of values: not on meta",
    "dist/src/kenotron_dist/rng.py": "states of generators, on the host",
    "engine/src/kenotron_engine/device_read.py": "the numbers of a step: 1 on meta",
    "engine/src/kenotron_engine/gathered_tensors.py": "whole tensors for tests: not on meta",
    "engine/src/kenotron_engine/layer_metrics.py": "figures of layers: not on meta",
    "engine/src/kenotron_engine/row_scores.py": "evaluation: not on meta",
    "engine/src/kenotron_engine/token_scores.py": "evaluation: not on meta",
    "engine/src/kenotron_engine/sequence.py": "positions of documents, on the host",
    "ep/src/kenotron_ep/exchange.py": "rows of each expert: equally many on meta",
    "ep/src/kenotron_ep/shared_tokens.py": "distinct tokens: the most that can be",
    "models/src/kenotron_models/attention_mask.py": "blocks of documents: not on meta",
    "models/src/kenotron_models/embedding.py": "a constant of the config",
    "models/src/kenotron_models/generate.py": "generation: not on meta",
    "models/src/kenotron_models/hf_tensors.py": "a check of values: not on meta",
    "models/src/kenotron_models/stacked_by_source.py": "rows of each group: shapes alone on meta",
    "models/src/kenotron_models/stacked_linear.py": "rows of each expert: shapes alone on meta",
    "optim/src/kenotron_optim/clip.py": "norms of each gradient, for a replay: not on meta",
    "optim/src/kenotron_optim/nonfinite.py": "the cause of what is not finite: not on meta",
    "optim/src/kenotron_optim/sliced_optimizer.py": "whether a step is left out: no",
    "pp/src/kenotron_pp/p2p.py": "forms of activations: the layers before make them",
    "tp/src/kenotron_tp/embedding.py": "an error's message",
    "tp/src/kenotron_tp/softmax.py": "an error's message",
}
"""Files of packages with ``.item()``, ``.tolist()`` or ``.cpu()``, and what meta has there."""
IN_A_STEP = {
    "dist/src/kenotron_dist/fake_world.py": "losses that layers add, once at the end",
    "dist/src/kenotron_dist/weight_products.py": "a trial of a kernel, once in a process",
    "ep/src/kenotron_ep/exchange.py": "rows of each expert and rank, once for each exchange",
    "ep/src/kenotron_ep/shared_tokens.py": "distinct tokens, of ways that send each once",
    "models/src/kenotron_models/stacked_by_source.py": "rows of each group, in reproducible mode",
    "models/src/kenotron_models/stacked_linear.py": "rows of each expert, but in bf16",
    "models/src/kenotron_models/transformers_skeleton.py": "a check of masks, in the first step",
}
"""Files that may read a number of a device while a step runs, next to the numbers of the step."""
ELSEWHERE = {
    "engine/src/kenotron_engine/evaluation.py": "losses, at the end of an evaluation",
    "models/src/kenotron_models/generate.py": "new tokens, once for each place",
    "models/src/kenotron_models/transformers_model.py": "a check of buffers, before training",
    "tp/src/kenotron_tp/logits.py": "a check of scores, once for each new token",
}
"""Those that read one before or after."""
