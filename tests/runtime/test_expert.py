"""Experts shared among ranks give what one device gives: losses and every gradient.

In float64. What the families of transformers compute in float32 whatever the type (norms, routers)
is rounded there, so they agree to float32's precision; a model of our own without that agrees to
float64's.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from paceline.errors import PlanError
from paceline.parallel.layout import Layout
from paceline.profile.ways import Ways
from paceline.runtime.strategy.data.shard import (
    even_placement,
    finish_gradients,
    set_gradient_sync,
    shard,
)
from paceline.runtime.strategy.expert.all_to_all import run_spread_experts
from paceline.runtime.strategy.expert.split import (
    check_expert,
    expert_modules,
    expert_parameters,
    split_experts,
    tensor_ways,
)
from paceline.runtime.strategy.mesh import Meshes, make_meshes
from paceline.runtime.strategy.tensor.split import split_tensors

VOCAB, SEQ_LEN, SAMPLES = 32, 8, 4

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 12,
    },
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "deepseek_v2": {**LATENT, "topk_group": 1, "n_group": 1},
    "deepseek_v3": {**LATENT, "topk_group": 1, "n_group": 2},
    "granitemoe": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}


def layout_of(**fields: Any) -> Layout:
    return Layout(**{"sharding": "none", "micro_batch": 1, "accumulation": 1, **fields})


def family(name: str, **changes: Any) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **FAMILIES[name], **changes})
    config.eos_token_id = config.pad_token_id = config.bos_token_id = None
    config._experts_implementation = "eager"  # grouped_mm of the CPU has no float64
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def grouped_float32() -> nn.Module:
    """Mixtral as it is built without our saying anything: grouped matmul, in float32."""
    model = family("mixtral").float()
    model.config._experts_implementation = "grouped_mm"
    return model


class OwnExperts(nn.Module):
    """A person's own: what `Experts` describes, in a few lines."""

    def __init__(self, num_experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, hidden, ffn) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, ffn, hidden) / ffn**0.5)

    def forward(self, tokens_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        mixed_TH = torch.zeros_like(tokens_TH)
        for expert in range(self.num_experts):
            token, choice = torch.where(expert_TK == expert)
            output = F.gelu(tokens_TH[token] @ self.up[expert]) @ self.down[expert]
            mixed_TH.index_add_(0, token, output * weight_TK[token, choice, None])
        return mixed_TH


class OwnBlock(nn.Module):
    def __init__(self, num_experts: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, num_experts)
        self.experts = OwnExperts(num_experts, hidden, 2 * hidden)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        tokens_TH = hidden_BSH.flatten(0, 1)
        weight_TK, expert_TK = self.router(tokens_TH).softmax(-1).topk(2)
        return hidden_BSH + self.experts(tokens_TH, expert_TK, weight_TK).view_as(hidden_BSH)


class OwnModel(nn.Module):
    def __init__(self, num_experts: int = 4, hidden: int = 16, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(OwnBlock(num_experts, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        self.recompute = recompute

    def forward(self, tokens_BS: Tensor) -> Tensor:
        hidden_BSH = self.embedding(tokens_BS)
        for block in self.blocks:
            if self.recompute:
                hidden_BSH = checkpoint(block, hidden_BSH, use_reentrant=False)
            else:
                hidden_BSH = block(hidden_BSH)
        return self.head(hidden_BSH)


OWN_WAYS = Ways(blocks="blocks", first=("embedding",), last=("head",), experts="experts")


def own(
    *, favoured: tuple[int, ...] = (), num_experts: int = 4, recompute: bool = False
) -> nn.Module:
    """The own model; every token goes to the favoured experts, if two are named."""
    torch.manual_seed(0)
    model = OwnModel(num_experts, recompute=recompute)
    for block in model.blocks:
        block.router.bias.data[list(favoured)] += 100.0
    return model.double()


def samples() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (SAMPLES, SEQ_LEN + 1), generator=generator)


def add_gradients(model: nn.Module, sequences_BS: Tensor) -> float:
    """Backward of these samples' part of the mean loss over all samples; that part."""
    output = model(sequences_BS[:, :-1])
    logits_BSV = output if isinstance(output, Tensor) else output.logits
    losses = F.cross_entropy(
        logits_BSV.flatten(0, 1), sequences_BS[:, 1:].flatten(), reduction="sum"
    )
    loss = losses / (SAMPLES * SEQ_LEN)
    loss.backward()
    return float(loss.detach())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def deviation(model: nn.Module, reference: nn.Module, loss: float, reference_loss: float) -> float:
    """The largest of loss and all gradients, each relative to the reference's norm."""
    found = {name: whole(each.grad) for name, each in model.named_parameters()}
    found_and_right = [(found.pop(name), each.grad) for name, each in reference.named_parameters()]
    assert not found
    errors = [abs(loss / reference_loss - 1)]
    for gradient, right in found_and_right:
        errors.append(float((gradient - right).norm() / right.norm().clamp_min(1e-30)))
    return max(errors)


def check_shares(model: nn.Module, reference: nn.Module, expert: int) -> None:
    """Every rank holds its share of the routed experts, and all else whole."""
    shared = expert_parameters(model)
    assert shared
    for (name, mine), right in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.shape == right.shape
        if name in shared:
            assert mine.to_local().shape[0] == right.shape[0] // expert
        else:
            assert not isinstance(mine, DTensor)


def shared_and_whole(
    build: Callable[[], nn.Module],
    rank: int,
    world: int,
    expert: int,
    *,
    accumulation: int = 1,
    ways: Ways | None = OWN_WAYS,
) -> float:
    """Deviation of a model shared over `expert` of the ranks, gradients reduced without FSDP2."""
    reference = build()
    right = add_gradients(reference, samples())
    layout = layout_of(data=world, expert=expert, accumulation=accumulation)
    meshes = make_meshes(layout, "cpu")
    model = split_experts(build(), layout, meshes, ways)
    check_shares(model, reference, expert)
    model = shard(model, layout, meshes, "fp32")
    loss = torch.zeros((), dtype=torch.float64)
    for turn, part in enumerate(samples().chunk(world)[rank].chunk(accumulation)):
        set_gradient_sync(model, layout, is_last=turn == accumulation - 1)
        loss += add_gradients(model, part)
    finish_gradients(model)
    dist.all_reduce(loss)
    return deviation(model, reference, float(loss), right)


OWN_CASES: dict[str, dict[str, Any]] = {
    "even": {},
    "one rank gets no token": {"favoured": (0, 1)},
    "experts without tokens on each rank": {"favoured": (0, 3)},
    "computed again in the backward pass": {"recompute": True},
    "one rank without tokens, computed again": {"favoured": (2, 3), "recompute": True},
    "eight experts": {"num_experts": 8},
}


def own_on_ranks(rank: int, world: int, expert: int, accumulation: int) -> dict[str, float]:
    return {
        case: shared_and_whole(
            partial(own, **changes), rank, world, expert, accumulation=accumulation
        )
        for case, changes in OWN_CASES.items()
    }


def sharded_on_ranks(
    rank: int, world: int, fields: dict[str, Any]
) -> tuple[float, set[tuple[int, ...]]]:
    """Deviation under FSDP2, experts on a mesh of their own; shapes of this rank's parts."""
    reference = own()
    right = add_gradients(reference, samples())
    layout = layout_of(data=world, **fields)
    meshes = make_meshes(layout, "cpu")
    model = split_experts(own(), layout, meshes, OWN_WAYS)
    shard_like_fsdp2(model, meshes, model.blocks)
    loss = torch.tensor(add_gradients(model, samples().chunk(world)[rank]), dtype=torch.float64)
    dist.all_reduce(loss)
    parts = {tuple(each.to_local().shape) for each in expert_parameters(model).values()}
    return deviation(model, reference, float(loss), right), parts


def shard_like_fsdp2(
    model: nn.Module, meshes: Meshes, blocks: nn.ModuleList, **options: Any
) -> None:
    """What the docstring of `expert` asks of the one who shards."""
    for experts in expert_modules(model):
        placement = even_placement(meshes.expert_fsdp)
        fully_shard(experts, mesh=meshes.expert_fsdp, shard_placement_fn=placement, **options)
        experts.set_gradient_divide_factor(1.0)
    for module in (*blocks, model):
        fully_shard(module, mesh=meshes.fsdp, **options)
        module.set_gradient_divide_factor(1.0)


MOE_WAYS = Ways(
    blocks="model.layers",
    first=("model.embed_tokens",),
    last=("model.norm", "lm_head"),
    tensor={
        "*.self_attn.q_proj": "column",
        "*.self_attn.k_proj": "column",
        "*.self_attn.v_proj": "column",
        "*.self_attn.o_proj": "row",
        "*.mlp": "sum",
        "*.mlp.experts": "experts",
        "*.mlp.shared_expert.gate_proj": "column",
        "*.mlp.shared_expert.up_proj": "column",
        "*.mlp.shared_expert.down_proj": "row",
    },
    experts="mlp.experts",
    attention="self_attn",
)


def with_tensor_ranks(name: str, *, sequence_parallel: bool) -> float:
    """Deviation with attention and shared experts split over two ranks, and routed experts over
    two others."""
    reference = family(name)
    right = add_gradients(reference, samples())
    layout = layout_of(data=2, tensor=2, expert=2, sequence_parallel=sequence_parallel)
    meshes = make_meshes(layout, "cpu")
    model = split_experts(family(name), layout, meshes, MOE_WAYS)
    model = split_tensors(model, layout, meshes, tensor_ways(MOE_WAYS, layout))
    model = shard(model, layout, meshes, "fp32")
    set_gradient_sync(model, layout, is_last=True)
    mine = samples().chunk(2)[meshes.place.data]
    loss = torch.tensor(add_gradients(model, mine), dtype=torch.float64)
    finish_gradients(model)
    dist.all_reduce(loss, group=meshes.dp_cp.get_group())
    return deviation(model, reference, float(loss), right)


WITH_TENSOR_RANKS = {
    "mixtral, tensor ranks": ("mixtral", False),
    "mixtral, tensor ranks and sequence parallelism": ("mixtral", True),
    "qwen2_moe, tensor ranks and sequence parallelism": ("qwen2_moe", True),
}


def families_on_ranks(rank: int, world: int, expert: int) -> dict[str, float]:
    builds = {name: partial(family, name) for name in FAMILIES}
    builds["mixtral, grouped matmul"] = grouped_float32
    found = {
        name: shared_and_whole(build, rank, world, expert, ways=None)
        for name, build in builds.items()
    }
    for case, (name, sequence_parallel) in WITH_TENSOR_RANKS.items():
        found[case] = with_tensor_ranks(name, sequence_parallel=sequence_parallel)
    return found


FLOAT32_SUMS = (4 * 48 + 32) * 2.0**-24
"""A float32 gradient's worst relative error here: up to four products of at most 48 terms each,
then a sum over 32 tokens, one rounding of 2**-24 a term."""

FLOAT64_SUMS = (8 * 48 + 32) * 2.0**-53
"""The same in float64, with twice the products: back through two blocks."""


@pytest.fixture(scope="module")
def family_deviations() -> dict[str, float]:
    """One start of the ranks for all families: importing transformers takes most of the time."""
    return run_ranks(families_on_ranks, 4, 2)[0]


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*FAMILIES, "mixtral, grouped matmul", *WITH_TENSOR_RANKS])
def test_a_family_of_transformers_gives_the_loss_and_gradients_of_one_device(
    family_deviations: dict[str, float], name: str
):
    assert family_deviations[name] < FLOAT32_SUMS


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "expert", "accumulation"),
    [
        # On four ranks there is one copy of each expert, or two, and two accumulate.
        *(pytest.param(2, 2, each, marks=pytest.mark.repeat) for each in (1, 2)),
        *((4, 2, 2), (4, 4, 1)),
    ],
)
def test_own_experts_give_one_devices_gradients_however_the_tokens_are_spread(
    world: int, expert: int, accumulation: int
):
    for case, worst in run_ranks(own_on_ranks, world, expert, accumulation)[0].items():
        assert worst < FLOAT64_SUMS, case


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "fields", "part"),
    [
        (4, {"expert": 2, "sharding": "full"}, 1),
        pytest.param(4, {"expert": 4, "sharding": "full"}, 1, marks=pytest.mark.repeat),
        pytest.param(2, {"expert": 2, "sharding": "full"}, 2, marks=pytest.mark.repeat),
        (4, {"expert": 2, "sharding": "hybrid", "shard": 2}, 2),
        (4, {"expert": 4, "sharding": "hybrid", "shard": 2}, 1),
    ],
)
def test_own_experts_give_one_devices_gradients_under_fsdp2(
    world: int, fields: dict[str, Any], part: int
):
    for worst, parts in run_ranks(sharded_on_ranks, world, fields):
        assert worst < FLOAT64_SUMS
        assert parts == {(part, 16, 32), (part, 32, 16)}


@contextmanager
def fake_rank(rank: int, layout: Layout) -> Iterator[Meshes]:
    dist.init_process_group("fake", rank=rank, world_size=layout.num_ranks, store=FakeStore())
    try:
        yield make_meshes(layout, "cpu")
    finally:
        dist.destroy_process_group()


def test_mixtral_8x7b_on_64_ranks_runs_without_memory_and_each_rank_holds_an_eighth_of_an_expert():
    """Eight experts by 8 ranks leave one a rank: its eight copies share the matrices' rows."""
    import transformers

    layout = layout_of(data=64, expert=8, sharding="full")
    config = transformers.MixtralConfig(num_hidden_layers=2, use_cache=False)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    with fake_rank(9, layout) as meshes:
        split_experts(model, layout, meshes)
        shard_like_fsdp2(model, meshes, model.model.layers, mp_policy=narrow)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            logits_BSV = model(torch.zeros(1, 4096, dtype=torch.long)).logits
            logits_BSV.float().logsumexp(-1).sum().backward()
        shapes = {
            name.split("experts.")[1]: (tuple(each.shape), tuple(each.grad.to_local().shape))
            for name, each in expert_parameters(model).items()
        }
    assert logits_BSV.shape == (1, 4096, 32000)
    assert shapes == {
        "gate_up_proj": ((8, 2 * 14336, 4096), (1, 2 * 14336 // 8, 4096)),
        "down_proj": ((8, 4096, 14336), (1, 4096 // 8, 14336)),
    }


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation gave."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return result


def test_a_dry_run_sends_as_many_rows_as_it_gets_and_holds_no_table_of_tokens_by_experts():
    num_tokens, hidden, chosen, num_local = 4096, 8, 3, 64
    layout = layout_of(data=8, expert=8)
    rows: list[int] = []

    def run_local(tokens_QH: Tensor, *_: Tensor) -> Tensor:
        rows.append(tokens_QH.shape[0])
        return tokens_QH * 2

    with fake_rank(0, layout) as meshes, FakeTensorMode(), Largest() as largest:
        tokens_TH = torch.randn(num_tokens, hidden, requires_grad=True)
        expert_TK = torch.zeros(num_tokens, chosen, dtype=torch.long)
        weight_TK = torch.rand(num_tokens, chosen, requires_grad=True)
        group = meshes.expert.get_group()
        run_spread_experts(
            run_local, tokens_TH, expert_TK, weight_TK, num_local, group
        ).sum().backward()
    assert rows == [num_tokens * chosen]
    assert largest.numel == num_tokens * chosen * hidden


@pytest.mark.parametrize("left", [0, -1, 7, 2**40])
def test_counts_of_rows_that_never_arrived_are_refused_before_any_kernel_reads_them(
    left: int, monkeypatch: pytest.MonkeyPatch
):
    """What an aborted collective of NCCL leaves in its buffer, without an error."""

    def aborted(received: Tensor, sent: Tensor, **_: Any) -> None:
        received.fill_(left)

    monkeypatch.setattr(dist, "all_to_all_single", aborted)
    with (
        fake_rank(0, layout_of(data=2, expert=2)) as meshes,
        pytest.raises(dist.DistBackendError, match="did not arrive"),
    ):
        run_spread_experts(
            lambda tokens_QH, *_: tokens_QH,
            torch.randn(6, 4),
            torch.zeros(6, 1, dtype=torch.long),
            torch.ones(6, 1),
            2,
            meshes.expert.get_group(),
        )


def on_meta(name: str, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return family(name, **changes)


def test_an_expert_degree_that_does_not_divide_is_named_with_its_numbers():
    with torch.device("meta"):
        model = own(num_experts=6)
    problems = list(check_expert(model, layout_of(data=6, expert=4), OWN_WAYS))
    assert [problem.code for problem in problems] == ["L010"] * 3
    assert "4 ranks, which does not divide the 6 data x context ranks" in problems[0].what
    assert "4 does not divide the 6 experts of `blocks.0.experts`" in problems[1].what
    assert problems[1].fix == "set layout.expert to a divisor of 6"


def test_a_model_without_routed_experts_cannot_share_them():
    (problem,) = check_expert(nn.Linear(2, 2), layout_of(data=2, expert=2))
    assert problem.code == "L010"
    assert "no routed experts are known in Linear" in problem.what


def test_every_proven_family_passes_the_check_and_one_expert_rank_needs_none():
    for name in FAMILIES:
        assert not list(check_expert(on_meta(name), layout_of(data=2, expert=2))), name
    assert not list(check_expert(nn.Linear(2, 2), layout_of(data=2)))


def test_a_family_that_was_never_compared_is_refused_by_name():
    import transformers

    config = transformers.AutoConfig.for_model("ernie4_5_moe", **SMALL, moe_num_experts=4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    problem = next(check_expert(model, layout_of(data=2, expert=2)))
    assert problem.code == "L025"
    assert "`model.layers.1.mlp.experts` (Ernie4_5_MoeExperts)" in problem.what
    assert "has not been compared with one device" in problem.what


class Scaled(OwnExperts):
    def __init__(self) -> None:
        super().__init__(4, 8, 8)
        self.scale = nn.Parameter(torch.ones(8))


class Counting(OwnExperts):
    def __init__(self) -> None:
        super().__init__(4, 8, 8)
        self.register_buffer("seen", torch.zeros(4))


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (Scaled, "`scale` is 8, without a row for each of 4 experts"),
        (Counting, "it has the buffer `seen`"),
        (lambda: nn.Linear(4, 4), "it does not say `num_experts`"),
        (lambda: nn.ModuleList([nn.Linear(4, 4)]), "it is a list of modules"),
    ],
)
def test_experts_that_cannot_be_cut_by_rows_are_refused_with_the_reason(
    experts: Callable[[], nn.Module], reason: str
):
    model = own()
    model.blocks[1].experts = experts()
    layout = layout_of(data=2, expert=2)
    (problem,) = check_expert(model, layout, OWN_WAYS)
    assert problem.code == "L025"
    assert problem.what.startswith("the routed experts `blocks.1.experts`")
    assert reason in problem.what
    with fake_rank(0, layout) as meshes, pytest.raises(PlanError, match=re.escape(reason)):
        split_experts(model, layout, meshes, OWN_WAYS)
    assert not expert_modules(model)


def test_the_tensor_split_keeps_its_ways_where_experts_are_not_shared():
    assert tensor_ways(MOE_WAYS, layout_of(data=1, tensor=2)) is MOE_WAYS
    left = tensor_ways(MOE_WAYS, layout_of(data=2, tensor=2, expert=2)).tensor
    assert MOE_WAYS.tensor.keys() - left.keys() == {"*.mlp", "*.mlp.experts"}


def test_a_frozen_expert_stays_frozen_and_a_stage_without_experts_is_left_alone():
    layout = layout_of(data=2, expert=2)
    model = own()
    model.blocks[0].experts.requires_grad_(False)
    with fake_rank(1, layout) as meshes:
        split_experts(model, layout, meshes, OWN_WAYS)
        plain = nn.Linear(2, 2)
        assert split_experts(plain, layout, meshes) is plain
    trained = {name: each.requires_grad for name, each in expert_parameters(model).items()}
    assert trained == {
        "blocks.0.experts.up": False,
        "blocks.0.experts.down": False,
        "blocks.1.experts.up": True,
        "blocks.1.experts.down": True,
    }
