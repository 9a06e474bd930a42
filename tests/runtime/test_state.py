"""The state has one name, one shape and one digest in every layout, and goes from any to any."""

from dataclasses import replace

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from paceline.errors import CheckpointError
from paceline.job import CheckpointSpec, TrainSpec
from paceline.parallel.layout import Layout
from paceline.profile import DecoderShape
from paceline.runtime import strategy
from paceline.runtime.checkpoint import Checkpointer, load
from paceline.runtime.checkpoint._save_plan import SavePlanner
from paceline.runtime.decoder import Decoder
from paceline.runtime.digest import state_digest
from paceline.runtime.huggingface import build_hf
from paceline.runtime.optimizer import make_optimizer
from paceline.runtime.optimizer.adamw_8bit import AdamW8bit
from paceline.runtime.state import (
    boxes_of,
    model_state,
    named_parameters,
    named_state,
    set_other_model_state,
)

SHAPE = DecoderShape(
    layers=4,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=36,
    vocab=62,  # does not divide by 4: shards of different sizes
    tied_embeddings=True,
)
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS = {
    "gpt2": GPT2,
    "mixtral": {**SIZES, "model_type": "mixtral", "num_local_experts": 4},
    # Tensor ranks take their fused matrices apart: query, key and value; gate and up.
    "phi3": {**SIZES, "model_type": "phi3", "pad_token_id": 0},
    "glm": {**SIZES, "model_type": "glm", "head_dim": 4, "pad_token_id": 0},
}


def layout(**degrees):
    return Layout(**{"data": 1, "sharding": "none", "micro_batch": 1, "accumulation": 2, **degrees})


ON_FOUR = {
    "ddp": layout(data=4),
    "fsdp": layout(data=4, sharding="full"),
    "hsdp": layout(data=4, sharding="hybrid", shard=2),
    "tp-fsdp": layout(data=2, sharding="full", tensor=2),
    "tp-pp": layout(tensor=2, pipeline=2, schedule="1f1b"),
    "pp-fsdp": layout(data=2, sharding="zero1", pipeline=2, schedule="interleaved", chunks=2),
    "ep-fsdp": layout(data=4, sharding="full", expert=2),
}
MODELS = {
    "decoder": (["ddp", "fsdp", "hsdp", "tp-fsdp", "tp-pp", "pp-fsdp"], ["fsdp", "tp", "pp"]),
    "gpt2": (["fsdp", "tp-fsdp", "tp-pp"], ["tp", "pp"]),
    "mixtral": (["fsdp", "ep-fsdp"], ["tp"]),
    "phi3": (["fsdp", "tp-fsdp"], ["fsdp", "tp"]),
    "glm": (["fsdp", "tp-fsdp"], ["fsdp", "tp"]),
}
"""Kind of model -> layouts on four ranks, and on two."""

ON_TWO = {
    "fsdp": layout(data=2, sharding="full"),
    "tp": layout(tensor=2),
    "pp": layout(pipeline=2, schedule="gpipe"),
}


def whole_model(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "decoder":
        return Decoder(SHAPE, 8)
    return build_hf({"vocab_size": 62, **CONFIGS[kind]})


def built(kind, chosen, *, seed=0):
    """A model in a layout, and an optimizer without state."""
    meshes = strategy.make_meshes(chosen, "cpu")
    model = strategy.apply(whole_model(kind, seed), chosen, meshes, precision="fp32")
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def trained(kind, chosen):
    """The same with state that follows from each parameter's values, bit by bit."""
    model, optimizer = built(kind, chosen)
    give_state(model, optimizer)
    return model, optimizer


@torch.no_grad()
def give_state(model, optimizer):
    for parameter in model.parameters():
        values = parameter.detach()
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": values * 0.5,
            "exp_avg_sq": values * values,
        }


def save(path, model, optimizer):
    """One checkpoint folder; the bytes that this rank wrote."""
    plan = SavePlanner().plan_save(named_state(model, optimizer), None)
    Checkpointer(path, CheckpointSpec()).save(1, model, optimizer)
    return sum(record.num_bytes for record in plan.share.records)


def save_in_every_layout(rank, world, folder, kinds):
    """Digests by model and layout, after saving in each; and the bytes written."""
    digests, written = {}, {}
    for kind in kinds:
        for name in MODELS[kind][0]:
            model, optimizer = trained(kind, ON_FOUR[name])
            digests[kind, name] = state_digest(model, optimizer)
            written[kind, name] = save(folder / kind / name, model, optimizer)
    return digests, written


def load_in_other_layouts(rank, world, folder, layouts, index, kinds, turns):
    """Digests of every checkpoint, loaded into layouts of so many ranks."""
    digests = {}
    for kind in kinds:
        names = MODELS[kind][index]
        for turn, saved in enumerate(MODELS[kind][0]):
            for name in {names[(turn + each) % len(names)] for each in turns}:
                model, optimizer = built(kind, layouts[name], seed=9)
                load(folder / kind / saved / "step-00000001", model, optimizer)
                digests[kind, saved, name] = state_digest(model, optimizer)
    return digests


def load_on_one_rank(rank, world, folder, kinds):
    """Values of every checkpoint that differ from the model's own; the models' digests."""
    wrong, digests = [], {}
    for kind in kinds:
        expected, with_state = whole_model(kind), None
        with_state = torch.optim.AdamW(expected.parameters(), lr=1e-3)
        give_state(expected, with_state)
        digests[kind] = state_digest(expected, with_state)
        for saved in MODELS[kind][0]:
            model = whole_model(kind, seed=9)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            load(folder / kind / saved / "step-00000001", model, optimizer)
            for (name, ours), theirs in zip(
                model.named_parameters(), expected.parameters(), strict=True
            ):
                pairs = [(ours, theirs)] + [
                    (optimizer.state[ours][key], value)
                    for key, value in with_state.state[theirs].items()
                ]
                if not all(torch.equal(a, b) for a, b in pairs):
                    wrong.append((kind, saved, name))
    return wrong, digests


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kinds", "turns"),
    [
        # Plain matrices and experts, saved in every layout, each loaded into the next; the others,
        # and what is loaded into the one after the next, are slow.
        (("mixtral",), (1,)),
        pytest.param(("phi3",), (1,), marks=pytest.mark.slow),
        pytest.param(("decoder",), (1, 2), marks=pytest.mark.slow),
        pytest.param(("gpt2", "glm"), (1, 2), marks=pytest.mark.slow),
    ],
    ids=["experts", "fused", "decoder", "other models"],
)
def test_a_state_saved_in_any_layout_is_the_same_in_any_other(tmp_path, kinds, turns):
    saved = run_ranks(save_in_every_layout, 4, tmp_path, kinds)
    ((wrong, expected),) = run_ranks(load_on_one_rank, 1, tmp_path, kinds)
    assert wrong == []
    for digests, _ in saved:
        assert digests == {key: expected[key[0]] for key in digests}
    bytes_of = {
        kind: sum(p.numel() for p in whole_model(kind).parameters()) * 3 * 4 for kind in kinds
    }
    for key in saved[0][1]:
        numbers = sum(1 for _ in whole_model(key[0]).parameters()) * 4  # counts of steps
        assert sum(written[key] for _, written in saved) == bytes_of[key[0]] + numbers, key
    on_two = run_ranks(load_in_other_layouts, 2, tmp_path, ON_TWO, 1, kinds, turns)
    on_four = run_ranks(load_in_other_layouts, 4, tmp_path, ON_FOUR, 0, kinds, turns)
    for digests in (*on_two, *on_four):
        assert digests == {key: expected[key[0]] for key in digests}


class Coded(torch.optim.SGD):
    """Keeps codes of its part of each parameter: what nobody can cut anew."""

    def empty_state(self, parameter):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return {"codes": torch.zeros(local.numel(), dtype=torch.uint8)}


class Factored(torch.optim.SGD):
    """Keeps a number for each row, split as the rows are."""

    def empty_state(self, parameter):
        row = parameter.detach().sum(dim=-1)
        return {"row": row * 0}


def unusual_states(rank, world, folder):
    """Codes go on in their own layout and are refused in another; rows go anywhere."""
    mesh = init_device_mesh("cpu", (world,))
    values = torch.arange(24.0).reshape(6, 4)

    def model_in(placements):
        model = nn.Linear(4, 6, bias=False)
        if placements:
            model.weight = nn.Parameter(distribute_tensor(values, mesh, placements))
        return model

    split, other, plain = model_in([Shard(0)]), model_in([Shard(1)]), model_in(None)
    coded = Coded(split.parameters(), lr=1.0)
    codes = torch.arange(12, dtype=torch.uint8) + 100 * rank
    coded.state[split.weight] = {"codes": codes}
    save(folder / "codes", split, coded)
    again = Coded(split.parameters(), lr=1.0)
    load(folder / "codes" / "step-00000001", split, again)
    same = torch.equal(again.state[split.weight]["codes"], codes)
    refused = [
        refusal(folder / "codes" / "step-00000001", model, Coded(model.parameters(), lr=1.0))
        for model in (other, plain)
    ]
    columns, whole = (nn.Linear(600, 16, bias=False) for _ in range(2))
    values = columns.weight.detach().clone()
    columns.weight = nn.Parameter(distribute_tensor(values, mesh, [Shard(1)]))
    optimizers = [
        AdamW8bit(each.parameters(), lr=1.0, betas=(0.9, 0.9)) for each in (columns, whole)
    ]
    step(columns, optimizers[0])
    save(folder / "blocks", columns, optimizers[0])
    blocks = refusal(folder / "blocks" / "step-00000001", whole, optimizers[1])
    rows = Factored(split.parameters(), lr=1.0)
    rows.state[split.weight] = {"row": split.weight.detach().sum(dim=-1)}
    save(folder / "rows", split, rows)
    into = Factored(plain.parameters(), lr=1.0)
    load(folder / "rows" / "step-00000001", plain, into)
    return same, refused, blocks, into.state[plain.weight]["row"].tolist()


@pytest.mark.ranks
def test_state_of_another_shape_goes_where_the_optimizer_has_it_or_is_refused(tmp_path):
    results = run_ranks(unusual_states, 2, tmp_path)
    for same, refused, blocks, rows in results:
        assert same
        assert len(refused) == 2
        for reason in refused:
            assert "C009" in reason
            assert "codes of weight was saved for parts of the parameter as they lay" in reason
        # Two ranks' 300 columns are two blocks of 256 each, and 600 are three.
        assert "scale of weight was saved as [16, 4] for a parameter of [16, 600]" in blocks
        assert "[16, 3] is needed here" in blocks
        assert rows == [sum(range(4 * row, 4 * row + 4)) for row in range(6)]


WIDE = replace(SHAPE, hidden=64, head_dim=16, ffn=128)
"""Its matrices are large enough for eight bits."""

MOVES = [
    *(("adafactor", "tp-fsdp", "pp-fsdp"), ("muon", "pp-fsdp", "tp-fsdp")),
    # Blocks of eight bits are cut otherwise where columns are split.
    ("adamw-8bit", "fsdp", "pp-fsdp"),
]
"""Optimizer, and the layouts from which and to which its state goes."""

OTHER_MOVES = [
    *(("adafactor", *pair) for pair in (("fsdp", "tp-fsdp"), ("pp-fsdp", "fsdp"))),
    *(("muon", *pair) for pair in (("fsdp", "pp-fsdp"), ("tp-fsdp", "fsdp"))),
    ("adamw-8bit", "pp-fsdp", "fsdp"),
]


def with_optimizer(make, chosen, optimizer):
    """A model in a layout, and one of our optimizers."""
    meshes = strategy.make_meshes(chosen, "cpu")
    model = strategy.apply(make(), chosen, meshes, precision="fp32")
    train = TrainSpec(global_batch=8, steps=10, learning_rate=1e-3, optimizer=optimizer)
    return model, make_optimizer(model, train)


def step(model, optimizer):
    """One step whose gradients follow from the weights."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()


def refusal(path, model, optimizer):
    try:
        load(path, model, optimizer)
    except CheckpointError as error:
        return str(error)
    return None


def our_optimizers(rank, world, folder, moves):
    """Moves that changed the state."""
    changed = []
    for move in moves:
        optimizer, name, other = move
        model, trained_by = with_optimizer(lambda: Decoder(WIDE, 8), ON_FOUR[name], optimizer)
        step(model, trained_by)
        save(folder / optimizer / name, model, trained_by)
        again, fresh = with_optimizer(lambda: Decoder(WIDE, 8), ON_FOUR[other], optimizer)
        load(folder / optimizer / name / "step-00000001", again, fresh)
        if state_digest(model, trained_by) != state_digest(again, fresh):
            changed.append(move)
        step(again, fresh)  # it is usable
    return changed


@pytest.mark.ranks
@pytest.mark.parametrize(
    "moves", [MOVES, pytest.param(OTHER_MOVES, marks=pytest.mark.repeat)], ids=["some", "others"]
)
def test_state_of_our_optimizers_goes_from_layout_to_layout(tmp_path, moves):
    assert run_ranks(our_optimizers, 4, tmp_path, moves) == [[]] * 4


def refusals_of_gpt2(rank, world, folder):
    """Why its factored state goes neither into matrices that are split apart nor back."""
    refused = []
    for name, other in (("fsdp", "tp-fsdp"), ("tp-fsdp", "fsdp")):
        first, second = (
            with_optimizer(lambda: whole_model("gpt2"), ON_FOUR[each], "adafactor")
            for each in (name, other)
        )
        step(*first)
        save(folder / "gpt2" / name, *first)
        refused.append(refusal(folder / "gpt2" / name / "step-00000001", *second))
    return refused


@pytest.mark.ranks
def test_a_factored_state_of_several_matrices_is_refused_where_they_are_apart(tmp_path):
    for refused in run_ranks(refusals_of_gpt2, 4, tmp_path):
        assert "row_var of transformer.h.0.attn.c_attn.weight was saved as [16, 1]" in refused[0]
        assert "it is of several matrices that are apart here" in refused[0]
        assert "var of transformer.h.0.attn.c_attn.key.weight was saved for a matrix" in refused[1]


def part_of_two(rank, world, folder):
    """A hand-made pipeline: each rank has one module of two, and both the tied one."""
    torch.manual_seed(0)
    whole = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "tied": nn.Linear(2, 2)})
    mine = nn.ModuleDict({name: whole[name] for name in (("a", "tied"), ("b", "tied"))[rank]})
    optimizer = torch.optim.AdamW(mine.parameters())
    give_state(mine, optimizer)
    digest = state_digest(mine, optimizer)
    save(folder, mine, optimizer)
    for parameter in mine.parameters():
        parameter.data.zero_()
    fresh = torch.optim.AdamW(mine.parameters())
    load(folder / "step-00000001", mine, fresh)
    is_equal = state_digest(mine, fresh) == digest
    mine["tied"].bias.data += rank  # the copies differ
    apart = state_digest(mine, fresh)
    del mine["tied"]
    fresh = torch.optim.AdamW(mine.parameters())
    return digest, is_equal, apart, refusal(folder / "step-00000001", mine, fresh)


@pytest.mark.ranks
def test_stages_have_one_digest_unless_copies_differ_and_a_missing_parameter_is_named(tmp_path):
    first, second = run_ranks(part_of_two, 2, tmp_path)
    assert first[:2] == second[:2]
    assert first[1]
    assert first[2] != second[2]
    assert "the checkpoint has tied." in first[3]
    assert first[3] == second[3]


def test_names_are_the_plain_models_behind_wrappers_and_tied_parameters_are_there_once():
    model = whole_model("decoder")
    wrapped = nn.ModuleDict({"_orig_mod": model})
    assert named_parameters(wrapped).keys() == named_parameters(model).keys()
    state = model_state(model)
    assert "model/embedding.weight" in state
    assert "model/output.weight" not in state
    (box,) = boxes_of(state["model/norm.weight"])
    assert box.tensor.data_ptr() == model.norm.weight.data_ptr()


class Counting(nn.Linear):
    """Has extra state, of which equal values may be one object."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 1

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


def test_equal_extra_states_of_two_modules_are_both_kept_and_given_back():
    model = nn.Sequential(Counting(), Counting())
    state = model_state(model)
    for module in model:
        module.count = 5
    set_other_model_state(model, state)
    assert [module.count for module in model] == [1, 1]
