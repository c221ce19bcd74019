"""Adam's state in checkpoints of Nanotron that is damaged, or not described well enough."""

import shutil

import nanotron_cases as cases
import pytest
import torch
from nanotron_cases import change_json, metadata_of

from kenotron_nanotron import import_nanotron


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of two tp ranks with the state of an optimizer."""
    return cases.write(tmp_path_factory.mktemp("good"), tp=2, optimizer=cases.STEPS)[0]


@pytest.fixture
def folder(good, tmp_path):
    """A copy of it to be damaged."""
    return shutil.copytree(good, tmp_path / "6")


class Bomb:
    """Unpickled the careless way, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


PICKLE = "optimizer/optimizer_pp-0-of-1_tp-{}-of-2_exp-0-of-1.pt"


def change_pickle(path, change):
    held = torch.load(path, weights_only=True)
    change(held)
    torch.save(held, path)


def optimizer_config(folder, change):
    change_json(folder / "optimizer/optimizer_config.json", change)


OPTIMIZER = {
    "a pickle with code": (
        lambda f: torch.save({"state": {}, "names": Bomb(f / "boom")}, f / PICKLE.format(1)),
        "tp-1-of-2_exp-0-of-1.pt cannot be loaded as tensors and plain values alone",
    ),
    "a file cut off": (
        lambda f: (f / PICKLE.format(0)).write_bytes((f / PICKLE.format(0)).read_bytes()[:900]),
        "tp-0-of-2_exp-0-of-1.pt cannot be loaded as tensors",
    ),
    "a file is missing": (
        lambda f: (f / PICKLE.format(1)).unlink(),
        r"optimizer has no file of pp, dp, tp rank \(0, 0, 1\); import the weights alone",
    ),
    "a file of another layout": (
        lambda f: (f / PICKLE.format(1)).rename(f / PICKLE.format(1).replace("of-2", "of-4")),
        "its name is not that of an optimizer file of pp 1, tp 2, exp 1",
    ),
    "no optimizer at all": (
        lambda f: shutil.rmtree(f / "optimizer"),
        "optimizer_config.json is missing",
    ),
    "an unknown kind": (
        lambda f: optimizer_config(f, lambda said: said.update(type="Lion")),
        "type is 'Lion'; known are ZeroDistributedOptimizer, NamedOptimizer, OptimizerFromG",
    ),
    "experts": (
        lambda f: optimizer_config(
            f, lambda said: said["parallelism"].update(expert_parallel_size="2")
        ),
        "state of experts cut over ranks is not read",
    ),
    "another layout": (
        lambda f: optimizer_config(f, lambda said: said["parallelism"].update(tp_size="4")),
        "tp_size is 4, but the rest of the checkpoint was written with 2",
    ),
    "no layout": (
        lambda f: optimizer_config(f, lambda said: said.pop("parallelism")),
        "parallelism is {}; it must have tp_size, dp_size, pp_size, expert_parallel_size",
    ),
    "another optimizer": (
        lambda f: change_pickle(
            f / PICKLE.format(0), lambda held: held["state"][0].update(momentum=torch.zeros(1))
        ),
        "has exp_avg, exp_avg_sq, momentum, step; only Adam's step",
    ),
    "no names": (
        lambda f: change_pickle(f / PICKLE.format(0), lambda held: held["names"].clear()),
        "is not an optimizer's state: state, names of its numbers .KeyError.0..",
    ),
    "a parameter without state": (
        lambda f: change_pickle(f / PICKLE.format(1), lambda held: held["state"].pop(0)),
        "tp-1-of-2_exp-0-of-1.pt: there is no exp_avg of model.token_position_embeddings",
    ),
    "state of another size": (
        lambda f: change_pickle(
            f / PICKLE.format(1), lambda held: held["state"][0].update(exp_avg=torch.zeros(7))
        ),
        "exp_avg of .*embedding.weight has 7 elements; it should have 320 of the 320 of model_we",
    ),
    "different counts of updates": (
        lambda f: change_pickle(
            f / PICKLE.format(1), lambda held: held["state"][0].update(step=torch.tensor(5.0))
        ),
        "parameters had 5 to 6 updates; here all have as many",
    ),
    "no state after some steps": (
        lambda f: [change_pickle(f / PICKLE.format(r), lambda held: held["state"].clear())
                   for r in (0, 1)],
        "optimizer has no state after 6 steps: it was not Adam's",
    ),
    "masters in some files only": (
        lambda f: change_pickle(f / PICKLE.format(1), lambda h: h.pop("gradient_accumulator")),
        "some files have fp32 masters, some have not",
    ),
    "masters of another step": (
        lambda f: change_pickle(
            f / PICKLE.format(1), lambda held: held["gradient_accumulator"][cases.EMBEDDING].add_(1)
        ),
        "the fp32 master of .*embedding.weight, rounded, is not the weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", OPTIMIZER)
def test_an_optimizer_that_is_not_understood_is_refused_and_the_weights_can_be_had(folder, damage):
    harm, sentence = OPTIMIZER[damage]
    harm(folder)
    with pytest.raises(ValueError, match=sentence):
        import_nanotron(folder, folder.parent / "ours", optimizer=True)
    assert not (folder.parent / "ours/6/manifest.json").exists()
    assert not (folder / "boom").exists()
    import_nanotron(folder, folder.parent / "ours")


def test_zero_over_a_cut_sequence_and_other_slices_are_refused(tmp_path):
    folder, _ = cases.write(tmp_path / "a", dp=2, version="1.5", zero=True, optimizer=1)
    metadata_of(folder, lambda said: said.update(cp=2))
    with pytest.raises(ValueError, match="ZeRO with a sequence cut over 2 ranks: it is not docum"):
        import_nanotron(folder, tmp_path / "ours", optimizer=True)
    metadata_of(folder, lambda said: said.update(cp=1))
    optimizer_config(folder, lambda said: said["configs"]["param_name_to_dp_rank_offsets"].update(
        {cases.EMBEDDING: {"0": ["0", "300"], "1": ["300", "640"]}}
    ))  # fmt: skip
    with pytest.raises(ValueError, match="the slices are not cut as Nanotron cuts them"):
        import_nanotron(folder, tmp_path / "ours", optimizer=True)


def test_the_pickles_of_datastates_are_left_alone(tmp_path):
    folder, _ = cases.write(tmp_path / "a", version="1.0", optimizer=1)
    with pytest.raises(ValueError, match="the engine datastates pickles names and counts"):
        import_nanotron(folder, tmp_path / "ours", optimizer=True)
