"""A module that is there, cut by a plan of names, computes what it computed; or it is refused."""

import copy

import planned_experts
import pytest
import torch
import torch.nn.functional as F
from planned_model import PLAN, TIED, VOCAB, Model
from torch import nn
from torch.testing import assert_close

from kenotron_dist import Axis, Mesh, sum_gradients
from kenotron_dist.boxes import scatter
from kenotron_dist.placement import Chunk, Shard, Tie, named_parameters, parameter_layouts
from kenotron_dist.testing import on_ranks
from kenotron_tp import ColumnParallelLinear, VocabParallelEmbedding, parallelize

STEPS = 3


def losses(model, step):
    tokens = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(mesh, make, plan, tied):
    """Loss, every gradient by name and every weight, next to those of the uncut module."""
    torch.manual_seed(0)
    whole = make(tied)
    cut = copy.deepcopy(whole)
    cut.head.train(False)
    parallelize(cut, plan, mesh["tp"])
    assert not cut.head.training and cut.layers.training
    layouts = parameter_layouts(cut, mesh.sizes)
    twins = {tie: [n for n, each in layouts.items() if each.name == tie] for tie in {
        each.name for each in layouts.values()}}  # fmt: skip
    for step in range(STEPS):
        cut.zero_grad()
        whole.zero_grad()
        found, expected = losses(cut, step), losses(whole, step)
        assert_close(found, expected, rtol=1e-5, atol=0)
        found.backward()
        expected.backward()
        sum_gradients(cut, mesh)
        own = named_parameters(cut)
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                layout = layouts[name]
                grad = sum(own[twin].grad for twin in twins[layout.name])
                due = scatter(parameter.grad, layout, mesh.view(layout))
                assert_close(grad, due, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
                parameter -= 0.5 * parameter.grad
                own[name] -= 0.5 * grad
                due = scatter(parameter, layout, mesh.view(layout))
                assert_close(own[name], due, rtol=1e-5, atol=1e-6)
    return found.item(), {name: each.shape for name, each in layouts.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_cut_module_trains_as_the_whole_one(tp, tied):
    runs = on_ranks(train, Model, PLAN | (TIED if tied else {}), tied, tp=tp)
    check_runs(runs, Model(tied))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_cut_experts_and_latent_attention_train_as_whole_ones(tp, tied):
    runs = on_ranks(train, planned_experts.Model, planned_experts.PLAN, tied, tp=tp)
    check_runs(runs, planned_experts.Model(tied))


def check_runs(runs, model):
    """The same loss on all ranks, and the whole shapes of all parameters."""
    shapes = {name: p.shape for name, p in named_parameters(model).items()}
    for loss, found in runs:
        assert loss == pytest.approx(runs[0][0], abs=0)
        assert found == {name: tuple(shape) for name, shape in shapes.items()}


def cut_on(mesh, changes):
    parallelize(Model(False), PLAN | changes, mesh["tp"])


@pytest.mark.parametrize("overlap", [False, True])
def test_roles_placements_and_devices(overlap):
    mesh = Mesh.connect()
    with torch.device("meta"):
        model = Model(True)
    model.layers[0].up.weight.requires_grad_(False)
    parallelize(model, PLAN | TIED, mesh["tp"], overlap=overlap)
    layouts = parameter_layouts(model, mesh.sizes)
    assert model.layers[0].up.weight.is_meta and not model.layers[0].up.weight.requires_grad
    assert isinstance(model.layers[0].attention.q_proj, ColumnParallelLinear)
    assert model.layers[0].attention.q_proj.overlap == overlap
    assert isinstance(model.embedding, VocabParallelEmbedding)
    rows = Shard("tp", 0, (Chunk(VOCAB),))
    assert model.head.placements == {"weight": (rows, Tie("embedding.weight"))}
    assert layouts["head.weight"].role == "embedding"
    assert layouts["head.weight"].owners == ("embedding.weight", "head.weight")


REFUSALS = [
    ({"layers.*.q_proj": "colwise"}, r"layers.\*.q_proj: no such name in the module"),
    ({"layers.*.attention.q_prj": "colwise"}, r"is it layers.\*.attention.q_proj"),
    ({"head": "columns"}, "head: there is no style 'columns': it is one of colwise, packed_colw"),
    ({"head": ()}, r"head: there is no style \(\)"),
    ({"head": "grouped_gemm"}, "style grouped_gemm cannot be done here: it places whole experts"),
    ({"head": "sequence_parallel"}, "style sequence_parallel cannot be done here: the tokens of"),
    ({"norm": "colwise"}, "norm: it is a LayerNorm: only embeddings and what computes as nn"),
    ({"head": "embedding_rowwise"}, "head: it is a Linear: give embedding_rowwise to embeddings"),
    ({"embedding": "colwise"}, "embedding: it is a Embedding: give embedding_rowwise to embedd"),
    ({"layers.0.up": "colwise"}, r"layers.0.up: both layers.\*.up and layers.0.up match it"),
    ({"layers.*.attention.num_heads": "rowwise"}, "style rowwise does not fit a number"),
    ({"norm.weight": "divide"}, "norm.weight: style divide does not fit a parameter"),
    ({"head": [Chunk(50)]}, "head: its Chunks are 50, and out_features is 53"),
    ({"head": "colwise"}, "head: out_features 53 cannot be cut over 2 ranks: choose a tp that"),
    ({"head": "packed_colwise"}, "head: out_features 53 cannot be two pieces of the same size"),
    ({"layers.*.ffn.gate_up": "colwise"}, "0.ffn.gate_up: colwise does not say how its pieces lie"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), REFUSALS)
def test_a_plan_that_cannot_be_followed_is_refused_by_name(changes, words):
    def refuse(mesh):
        with pytest.raises(ValueError, match=words):
            cut_on(mesh, changes)

    on_axis(refuse, 2)


EXPERTS = "layers.*.experts"
REFUSED_EXPERTS = [
    (2, {}, [EXPERTS], "layers.0.experts.gate_up_proj: nothing adds up what ranks compute with"),
    (2, {}, [f"{EXPERTS}.middle_norm"], "middle_norm: this parameter is in layers.0.experts, whose "
     "outputs are summed over ranks: give it colwise, rowwise or one of their packed kinds"),
    (2, {f"{EXPERTS}.middle_norm": "replicate"}, [], "middle_norm: this parameter is in layers.0"),
    (2, {f"{EXPERTS}.middle_norm": "rowwise"}, [], r"rowwise cuts matrices, .* has shape \[3\]"),
    (2, {"layers.*.scale": "colwise"}, [], "layers.0.scale: style colwise cuts matrices"),
    (2, {"layers.*.router.bias": "colwise"}, [], "layers.0.router.bias: nothing adds up"),
    (2, {"layers.*.router": "mla_kv_a_proj"}, [], "router: mla_kv_a_proj is for a linear layer "
     "whose last qk_rope_head_dim features are a key of all heads, and Layer gives 0 for it"),
    (2, {f"{EXPERTS}.identity": "moe_tp_experts"}, [], "identity: it has no parameters: its"),
    (3, {}, [], "experts.gate_up_proj: 2 pieces of dim 1 of size 16 cannot be cut over 3 ranks"),
    (3, {}, [], "layers.1.experts.down_proj: dim 1 of size 8 cannot be cut over 3 ranks: choose"),
    (2, {"norm": "moe_identity_expert"}, [], "norm: it has parameters: moe_identity_expert is for"),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "changes", "left_out", "words"), REFUSED_EXPERTS)
def test_experts_that_would_compute_something_else_are_refused(ranks, changes, left_out, words):
    def refuse(mesh):
        plan = {n: s for n, s in (planned_experts.PLAN | changes).items() if n not in left_out}
        with pytest.raises(ValueError, match=words):
            parallelize(planned_experts.Model(False), plan, mesh["tp"])

    on_axis(refuse, ranks)


def test_what_is_not_named_stays_where_a_plan_is_not_strict():
    def follow(mesh):
        plan = {n: s for n, s in PLAN.items() if not n.endswith(("read_norm", "num_heads"))}
        parallelize(model := Model(False), plan, mesh["tp"], strict=False)
        assert model.layers[0].attention.num_heads == 8

    on_axis(follow, 2)


def on_axis(check, ranks):
    """No communication: this process as the first of so many ranks."""
    from kenotron_dist import Axis

    check({"tp": Axis("tp", 0, tuple(range(ranks)))})


UNSAID = [
    ("layers.*.attention.q_norm", "layers.0.attention.q_norm.weight: this parameter is next to "
     "layers.0.attention.q_proj, whose output is cut: give it .* replicate where it sees whole"),
    ("layers.*.attention.slopes", "layers.0.attention.slopes: this buffer is next to"),
    ("layers.*.attention.num_heads", r"layers.0.attention.num_heads: Attention reads this number "
     r"\(8\) next to layers.0.attention.q_proj, whose output is cut: give it divide"),
]  # fmt: skip


@pytest.mark.parametrize(("left_out", "words"), UNSAID)
def test_what_is_next_to_a_cut_layer_must_be_named(left_out, words):
    def refuse(mesh):
        plan = {name: style for name, style in PLAN.items() if name != left_out}
        model = Model(False)
        before = {name: id(each) for name, each in model.named_modules()}
        with pytest.raises(ValueError, match=words):
            parallelize(model, plan, mesh["tp"])
        assert {name: id(each) for name, each in model.named_modules()} == before

    on_axis(refuse, 2)


class ReadsConfig(nn.Module):
    """Counts heads by a config that all layers share."""

    class Config:
        """Sizes."""

        num_heads = 4

    def __init__(self):
        super().__init__()
        self.config, self.proj = self.Config(), nn.Linear(8, 8)

    def forward(self, x):
        return self.proj(x).view(len(x), self.config.num_heads, -1)


def test_one_line_stands_for_what_all_layers_have():
    layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(4)}) for _ in range(5))
    module, axis = nn.ModuleDict({"layers": layers}), Axis("tp", 0, (0, 1))
    with pytest.raises(ValueError, match=r"layers\.0\.norm: .*and 4 times more, with") as error:
        parallelize(module, {"layers.*.norm": "colwise"}, axis)
    assert len(str(error.value).splitlines()) == 2


def test_modules_that_cannot_be_cut_are_refused():
    def refuse(mesh):
        axis = mesh["tp"]
        words = r"a.config.num_heads: ReadsConfig reads this number \(4\) .* all layers share the"
        with pytest.raises(ValueError, match=words):
            parallelize(nn.ModuleDict({"a": ReadsConfig()}), {"a.proj": "colwise"}, axis)
        hooked = nn.Linear(4, 4)
        hooked.register_forward_hook(print)
        with pytest.raises(ValueError, match="0: it has hooks, which would be lost"):
            parallelize(nn.Sequential(hooked), {"0": "rowwise"}, axis)
        buffered = nn.Linear(4, 4)
        buffered.register_buffer("scale", torch.ones(4))
        with pytest.raises(ValueError, match=r"0: it has tensors that no Linear has \(scale\)"):
            parallelize(nn.Sequential(buffered), {"0": "rowwise"}, axis)
        one = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="0 and 1 are one module: it cannot be cut twice"):
            parallelize(nn.Sequential(one, one), {"*": "rowwise"}, axis)
        with pytest.raises(ValueError, match="0: in_features 3 cannot be cut over 2 ranks"):
            parallelize(nn.Sequential(nn.Linear(3, 4)), {"0": "rowwise"}, axis)

    on_axis(refuse, 2)


def test_heads_that_ranks_cannot_share_and_a_tie_that_would_break_are_refused():
    def refuse(mesh):
        words = "layers.0.attention.k_proj: its 4 heads of 4 features cannot be shared by 8 ranks"
        with pytest.raises(ValueError, match=words):
            cut_on(mesh, {})

    on_axis(refuse, 8)

    def untied(mesh):
        words = "embedding and head: they have one parameter, embedding.weight: cut all of them"
        with pytest.raises(ValueError, match=words):
            parallelize(Model(True), {"head": "colwise_gather_output"}, mesh["tp"])

    on_axis(untied, 2)


def replicated_heads(mesh):
    """Two kv heads on four ranks: their Chunks say that each lives on two ranks."""
    torch.manual_seed(0)
    whole = nn.ModuleDict({"kv": nn.Linear(6, 8, bias=False)})
    cut = copy.deepcopy(whole)
    parallelize(cut, {"kv": [Chunk(8, parts=2)]}, mesh["tp"])
    x = torch.randn(5, 6)
    y, due = cut["kv"](x), whole["kv"](x)
    half = mesh["tp"].rank // 2
    assert_close(y, due.chunk(2, -1)[half])
    y.sum().backward()
    (2 * due.sum()).backward()  # each head is read on two ranks
    sum_gradients(cut, mesh)
    assert_close(cut["kv"].weight.grad, whole["kv"].weight.grad.chunk(2)[half])


def test_chunks_replicate_heads():
    on_ranks(replicated_heads, tp=4)
