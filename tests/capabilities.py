"""What the repository can do, each with the tests that hold it: the table in the root README.

``python tests/capabilities.py`` writes the table anew. A test that is not there, or that only a GPU
runs, is seen: a row of GPU tests says so.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- made by tests/capabilities.py -->\n", "<!-- end -->"
TRAIN, CKPT = "apps/train/tests/test_train", "packages/kenotron-ckpt/tests/test_ckpt"
HELD: dict[str, list[str]] = {  # capability: files, and tests in them
    "one loss curve on every pp x dp x cp x tp, ZeRO 0 to 3, tied or not": [
        "tests/test_parity.py::test_a_row_has_the_numbers_of_one_process",
        "tests/test_parity.py::test_the_table_has_these_rows_and_all_of_them_passed",
        "tests/test_parity.py::test_twenty_steps_cut_over_pp_cp_and_tp_have_the_losses_of_one_process",
        f"{TRAIN}_context.py::test_nanotrons_yaml_trains_as_one_process",
        "packages/kenotron-engine/tests/test_engine_mamba.py::test_it_trains_on_every_layout_as_on_one_process",
    ],
    "AFAB, 1F1B, interleaved, ZB-H1, ZB-V; in a mode one process's bits, on all axes": [
        "tests/test_parity.py::test_a_row_has_the_numbers_of_one_process",
        "tests/test_parity.py::test_a_row_has_the_bits_of_one_process",
    ],
    "mixtures of experts on every ep: one process's numbers, loads and biases included": [
        "tests/test_parity.py::test_a_row_has_the_numbers_of_one_process",
        "packages/kenotron-engine/tests/test_engine_experts.py::test_every_layout_has_the_numbers_of_one_process",
        "packages/kenotron-engine/tests/test_engine_near_ties.py::test_choices_differ_only_at_near_ties",
        f"{TRAIN}_experts.py::test_a_run_continues_with_other_ranks_for_its_experts",
    ],
    "Llama to Gemma-3, gpt-oss, Mamba-1/2, Qwen3-Next: 24 architectures, transformers' numbers": [
        "tests/test_hf.py::test_logits_equal_transformers",
        "tests/test_hf.py::test_training_begins_with_the_loss_and_gradients_of_transformers",
        "packages/kenotron-engine/tests/test_engine_variants.py::test_a_family_trains_on_every_layout_as_on_one_process",
        "packages/kenotron-engine/tests/test_engine_hybrid.py::test_it_trains_on_every_layout_as_on_one_process",
    ],
    "any causal model of transformers by its own plans: plain torch's losses on every layout": [
        f"{TRAIN}_transformers.py::test_one_process_trains_as_transformers_does_in_plain_torch",
        f"{TRAIN}_transformers.py::test_every_layout_trains_as_one_process",
        f"{TRAIN}_transformers_cp.py::test_rows_cut_over_cp_train_as_plain_transformers",
        f"{TRAIN}_transformers_ep.py::test_experts_over_ep_tp_and_pp_train_as_plain_transformers",
        "packages/kenotron-tp/tests/test_tp_parallelize.py::test_a_cut_module_trains_as_the_whole_one",
        "packages/kenotron-tp/tests/test_tp_parallelize.py::test_cut_experts_and_latent_attention_train_as_whole_ones",
        "tests/test_any_model.py::test_a_family_over_tp_is_its_plain_model_and_the_page_says_so",
        "tests/test_any_model.py::test_a_plan_found_by_names_is_the_plain_model",
        "tests/test_transformers_sequence.py::test_logits_and_gradients_are_those_of_the_plain_model",
    ],
    "those models from Hugging Face and back, bit for bit": [
        "tests/test_hf.py::test_every_bit_and_every_key_come_back",
        "apps/convert/tests/test_convert_cli.py::test_the_program_goes_both_ways",
    ],
    "generation on any layout: transformers' greedy text": [
        "apps/generate/tests/test_generate_families.py::test_greedy_texts_are_those_of_transformers",
        "apps/generate/tests/test_generate_experts.py::test_greedy_texts_are_those_of_transformers",
        "tests/test_transformers_cache.py::test_texts_are_those_of_transformers_generate",
    ],
    "bfloat16, float16 with loss scaling, recompute, torch.compile": [
        f"{TRAIN}_float16.py::test_float16_follows_float32",
        "tests/test_parity.py::test_a_row_has_the_numbers_of_one_process",
        "tests/test_variations.py::test_computing_activations_again_changes_no_bit",
        "tests/test_variations.py::test_compiled_layers_compute_the_same",
        "tests/test_transformers_compiled.py::test_compiled_layers_compute_the_same_in_few_programs",
    ],
    "AdamW, SGD, Muon; µP for each: one process's numbers, exports that fold its multipliers": [
        "packages/kenotron-engine/tests/test_engine_mup.py::test_every_layout_trains_as_one_process",
        f"{TRAIN}_mup.py::test_an_export_is_the_same_model_without_multipliers",
        "packages/kenotron-optim/tests/test_optim_muon.py::test_it_is_torchs_muon_and_adamw",
        f"{TRAIN}_groups.py::test_training_resumes_on_another_layout_as_if_never_stopped",
    ],
    "text, answers (SFT), token files, data of one's own": [
        f"{TRAIN}_answers.py::test_answers_are_the_same_on_several_ranks",
        f"{TRAIN}_nanoset.py::test_a_mixture_is_the_same_on_two_data_ranks",
        f"{TRAIN}_own_data.py::test_all_kinds_train_alike_on_every_layout",
    ],
    "DoReMi: weights of domains from a proxy, those of one process on every layout": [
        f"{TRAIN}_doremi.py::test_every_layout_learns_the_weights_of_one_process",
        "packages/kenotron-engine/tests/test_engine_domains.py::test_two_domains_have_the_weights_of_the_paper",
    ],
    "batches that grow, averages of weights, spikes left out, longer contexts: on every layout": [
        f"{TRAIN}_batch_sizes.py::test_a_ramp_is_one_of_samples_on_every_layout",
        f"{TRAIN}_weight_average.py::test_averages_are_saved_and_resumed_on_another_layout",
        f"{TRAIN}_spikes.py::test_a_spike_is_left_out_on_every_layout",
        f"{TRAIN}_long_context.py::test_a_run_resumes_with_a_longer_context_on_every_layout",
    ],
    "checkpoints that any layout resumes, and that a kill leaves whole; copies in S3": [
        "tests/test_parity.py::test_a_row_has_the_numbers_of_one_process",
        f"{CKPT}_layouts.py::test_any_layout_loads_the_bits_that_any_layout_saved",
        f"{CKPT}_crash.py::test_at_every_moment_there_is_the_old_checkpoint_or_the_new",
        f"{TRAIN}_upload.py::test_a_run_goes_on_from_its_copy_as_if_never_stopped",
    ],
    "a check of one's own config: a small copy of it on its layout, against one process": [
        f"{TRAIN}_verify.py::test_a_planted_fault_is_found_and_named",
    ],
    "planted bugs, each of them seen by numbers": [
        "tests/test_mutants.py::test_the_table_has_every_bug_and_who_caught_it",
    ],
    "Nanotron's files and checkpoints": [
        "packages/kenotron-config/tests/test_config_nanotron.py::test_models_are_told_apart_by_their_marker",
        "packages/kenotron-nanotron/tests/test_nanotron_checkpoints.py::test_every_tensor_is_read_whole_whatever_it_was_cut_into",
    ],
    "torchrun, Slurm with requeue, mpirun; two hosts": [
        f"{TRAIN}_slurm.py::test_a_job_is_stopped_put_back_and_goes_on",
        f"{TRAIN}_slurm.py::test_srun_over_two_nodes_trains_as_one_process_does",
        f"{TRAIN}_hosts.py::test_torchrun_on_two_hosts_trains_as_one_process_does",
    ],
    "signals, time limits, rollback, hangs and who is to blame; runs that outlive processes": [
        f"{TRAIN}_elastic.py::test_ranks_are_killed_one_after_another",
        f"{TRAIN}_stopping.py::test_a_stopped_run_goes_on_as_if_nothing_had_been",
        f"{TRAIN}_rollback.py::test_a_rollback_is_as_if_the_batch_had_never_been",
        "packages/kenotron-dist/tests/test_dist_watchdog.py::test_a_stopped_peer_is_named_by_all",
    ],
    "perplexity and tasks of lm-eval during training, or of a checkpoint: transformers' results": [
        "tests/test_evaluate.py::test_every_layout_answers_as_transformers_does_in_lm_eval",
        "tests/test_evaluate.py::test_tasks_have_the_metrics_that_lm_eval_has_of_the_exported_model",
        f"{TRAIN}_evaluate.py::test_a_run_with_evaluations_has_the_losses_of_one_without",
        f"{TRAIN}_evaluate_cli.py::test_another_layout_finds_what_the_run_found_and_the_report_shows_it",
    ],
    "TensorBoard, Weights & Biases, reports": [
        f"{TRAIN}_trackers.py::test_tensorboard_has_every_figure_and_steps_done_again_once",
        f"{TRAIN}_report.py::test_a_report_of_a_real_run",
    ],
}


def table(root: Path = ROOT, held: dict[str, list[str]] = HELD) -> str:
    """The table in Markdown. Raises ValueError for a test that does not exist."""
    lines = ["| what it does | tested by |", "|---|---|"]
    for capability, names in held.items():
        files: dict[str, bool] = {}
        for name in names:
            file, _, test = name.partition("::")
            files[file] = _needs_gpu(root, file, test) and files.get(file, True)
        links = ", ".join(f"[{Path(file).stem.removeprefix('test_')}]({file})" for file in files)
        note = " (skipped without a GPU)" if all(files.values()) else ""
        lines.append(f"| {capability} | {links}{note} |")
    return "\n".join([*lines, ""])


def _needs_gpu(root: Path, file: str, test: str) -> bool:
    """Whether a test, or all of its file, is marked ``gpu``."""
    source = (root / file).read_text(encoding="utf-8") if (root / file).is_file() else ""
    tree = ast.parse(source)
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == test]
    if not found:
        raise ValueError(f"{file} has no {test}: correct the name in tests/capabilities.py")
    marks = [ast.unparse(each) for each in found[0].decorator_list]
    marks += [ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign)]
    return any(re.search(r"\bmark\.gpu\b", each) for each in marks)


def written(readme: str) -> str:
    """The README with the table of now."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
    print(table())
