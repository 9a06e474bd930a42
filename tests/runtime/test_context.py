"""Attention over tokens that are split over ranks equals attention on one device.

float64 is compared to 1e-12. float32 and bfloat16 are compared to float64 within bounds that follow
from the inputs: see `bounds`.
"""

import pickle
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ranks import run_ranks
from tests.runtime.tiny import SEQ_LEN, SHAPE
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from paceline.errors import JobError
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_sample
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import build_hf
from paceline.runtime.strategy.context import kernels
from paceline.runtime.strategy.context import split as context
from paceline.runtime.strategy.context.attention import attention, positions
from paceline.runtime.strategy.context.tokens import local_positions, local_tokens
from paceline.runtime.strategy.mesh import make_meshes

EXACT = 1e-12
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
NAMES = ("output", "query gradient", "key gradient", "value gradient")
CASES = [
    (kind, is_causal, kv_heads)
    for kind in ("ring", "ulysses")
    for is_causal in (True, False)
    for kv_heads in (4, 2, 1)
]


def layout_of(degree, kind="ring", *, data=1, tensor=1, sharding="none"):
    return Layout(
        data=data,
        sharding=sharding,
        micro_batch=2,
        accumulation=1,
        context=degree,
        context_kind=kind,
        tensor=tensor,
    )


# --- which tokens a rank has


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_every_token_is_on_exactly_one_context_rank(kind):
    layout = layout_of(4, kind)
    found = torch.cat([local_positions(32, layout, rank) for rank in range(4)])
    assert sorted(found.tolist()) == list(range(32))


def test_every_rank_of_a_ring_sees_as_many_pairs_of_tokens():
    pairs = [int((local_positions(32, layout_of(4), rank) + 1).sum()) for rank in range(4)]
    assert pairs == [32 * 33 // 2 // 4] * 4


def test_tokens_and_targets_are_cut_alike():
    tokens = torch.arange(34).view(2, 17)
    layout = layout_of(2)
    inputs, targets = (local_tokens(part, layout, 1) for part in (tokens[:, :-1], tokens[:, 1:]))
    assert inputs[0].tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert torch.equal(targets, inputs + 1)


def test_without_context_ranks_the_tokens_are_handed_through():
    tokens = torch.arange(15).view(1, 15)
    assert local_tokens(tokens, layout_of(1), 0) is tokens


@pytest.mark.parametrize(
    ("seq_len", "heads", "kv_heads", "layout", "told"),
    [
        (18, 4, 2, layout_of(2), "2 x context 2 does not divide the 18 tokens of a sample"),
        (18, 4, 2, layout_of(2, "ulysses"), None),
        (17, 4, 2, layout_of(2, "ulysses"), "context 2 does not divide the 17 tokens"),
        (18, 4, 2, layout_of(3, "ulysses"), "tensor 1 x context 3 does not divide 4 heads"),
        (16, 4, 2, layout_of(2, "ulysses", tensor=4), "tensor 4 x context 2 does not divide 4"),
        (16, 4, 1, layout_of(4, "ulysses"), None),
        (None, 4, None, layout_of(3, "ulysses"), "tensor 1 x context 3 does not divide 4 heads"),
        (17, 4, 2, layout_of(1), None),
    ],
)
def test_what_does_not_divide_is_named_with_its_numbers(seq_len, heads, kv_heads, layout, told):
    problems = list(check_sample(seq_len, heads, kv_heads, layout))
    assert [problem.code for problem in problems] == (["L009"] if told else [])
    assert told is None or told in problems[0].what


# --- one block


@pytest.mark.parametrize("kernel", ["FLASH_CPU", "WRITTEN_OUT"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (6, 3), (3, 6)])
def test_blocks_of_keys_add_up_to_attention_over_all_of_them(kernel, kv_heads, queries, keys):
    kernel = getattr(kernels, kernel)
    query, key, value, grad = draw(4, kv_heads, torch.float64, queries=queries, keys=2 * keys)
    output = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, scale=0.3)
    expected = torch.autograd.grad(output, (query, key, value), grad)
    with torch.no_grad():
        halves = [slice(0, keys), slice(keys, None)]
        parts = [
            kernel.forward(query, key[:, :, half], value[:, :, half], False, 0.3) for half in halves
        ]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        whole = sum(part * (part_lse - lse).exp().unsqueeze(-1) for part, part_lse in parts)
        assert_close(whole, output, EXACT)
        grads = [
            kernel.backward(
                grad, (query, key[:, :, half], value[:, :, half], whole, lse), False, 0.3
            )
            for half in halves
        ]
    assert_close(grads[0][0] + grads[1][0], expected[0], EXACT)
    for index in (1, 2):
        joined = torch.cat([grads[0][index], grads[1][index]], dim=2)
        assert_close(joined, expected[index], EXACT)


def test_a_value_width_of_its_own_is_written_out():
    query, key, value, _ = draw(4, 2, torch.float32)
    assert kernels.choose_kernel(query, key, value) is kernels.FLASH_CPU
    narrow = value[..., :4]
    assert kernels.choose_kernel(query, key, narrow) is kernels.WRITTEN_OUT


@pytest.mark.parametrize("kernel", ["FLASH_CUDA", "EFFICIENT"])
def test_the_kernels_of_cuda_are_called_as_torch_declares_them(kernel):
    kernel = getattr(kernels, kernel)
    kv_heads = 2 if kernel is kernels.EFFICIENT else 4
    with torch.device("meta"):
        query, key, value, grad = draw(4, kv_heads, torch.bfloat16, generator=None)
    with torch.no_grad():
        output, lse = kernel.forward(query, key, value, True, 0.3)
        grads = kernel.backward(grad, (query, key, value, output, lse), True, 0.3)
    assert output.shape == query.shape
    assert lse.shape == query.shape[:3]
    assert [each.shape for each in grads] == [query.shape, key.shape, value.shape]


# --- attention over ranks


def draw(heads, kv_heads, dtype, *, queries=16, keys=16, width=8, generator=True):
    """Query, key, value and the gradient of the output, as projections would give them."""
    generator = torch.Generator().manual_seed(0) if generator else None
    shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
    drawn = [
        torch.randn(2, tokens, each, width, generator=generator, dtype=torch.float64)
        for tokens, each in shapes
    ]
    query, key, value, grad = (each.to(dtype).transpose(1, 2) for each in drawn)
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad


def on_one_device(query, key, value, grad, is_causal):
    output = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), grad)]


def check_attention(rank, world):
    """Largest deviation over its bound of each result, and the deviation, for each case."""
    found = {}
    for (kind, is_causal, kv_heads), dtype in product(CASES, DTYPES):
        layout = layout_of(world, kind)
        here = context.Context(layout, rank, dist.group.WORLD)
        where = local_positions(16, layout, rank)
        whole = draw(4, kv_heads, dtype)
        wide = [each.detach().double().requires_grad_() for each in whole]
        expected = [each[:, :, where] for each in on_one_device(*wide, is_causal)]
        allowed = [each[:, :, where] for each in bounds(*wide, is_causal, world, dtype)]
        query, key, value, grad = (each.detach()[:, :, where] for each in whole)
        for each in (query, key, value):
            each.requires_grad_()
        output = here.attend(query, key, value, is_causal=is_causal)
        grads = torch.autograd.grad(output, (query, key, value), grad)
        assert {each.dtype for each in (output, *grads)} == {dtype}
        for name, ours, theirs, most in zip(
            NAMES, (output, *grads), expected, allowed, strict=True
        ):
            apart = (ours.detach().double() - theirs).abs()
            found[dtype, kind, is_causal, kv_heads, name] = (
                float((apart / most).max()),
                float(apart.max()),
            )
    return found


def bounds(query, key, value, grad, is_causal, world, dtype):
    """How far each result may be from its float64 value, element by element; float64 tensors.

    Rounding errors to first order, in units u of half the spacing of numbers at 1. A sum of n
    products is off by at most n u times the sum of their absolute values (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1). So a score is off by D u |q||k|, and a weight
    relatively by twice that (its own and those in its normaliser), S u of summing and 8 u for
    each merge of two blocks. From there the formulas of attention and its gradients, with absolute
    values, and the same again for the products they add up themselves. In bfloat16 products are
    float32, and weights, output and gradients are each rounded once more when stored.
    """
    if dtype == torch.float64:
        return [torch.full_like(each, EXACT) for each in (query, query, key, value)]
    tokens, width, heads = query.shape[2], query.shape[3], query.shape[1]
    times = heads // key.shape[1]
    query, key, value, grad = (each.detach() for each in (query, key, value, grad))
    key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    scale = width**-0.5
    scores = query @ key.mT * scale
    if is_causal:
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    largest = float((query.abs() @ key.abs().mT).max()) * scale
    unit = 2.0**-24
    of_weight = unit * (2 * (width + 2) * largest + tokens + 8 * world)
    of_sums = unit * (2 * width + times * tokens + 8 * world)
    stored = 6 * 2.0**-9 if dtype == torch.bfloat16 else 0.0
    relative = of_weight + of_sums + stored
    output = weights @ value.abs()
    along = grad.abs() @ value.abs().mT + (grad.abs() * output).sum(-1, keepdim=True)
    of_scores = weights * along * scale
    shared = (-1, times)
    return [
        relative * output,
        2 * relative * of_scores @ key.abs(),
        2 * relative * (of_scores.mT @ query.abs()).unflatten(1, shared).sum(2),
        relative * (weights.mT @ grad.abs()).unflatten(1, shared).sum(2),
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_attention_over_ranks_equals_attention_on_one_device(world):
    for found in run_ranks(check_attention, world):
        assert len(found) == len(CASES) * len(DTYPES) * len(NAMES)
        worst = {case: share for case, (share, _) in found.items() if not share <= 1}
        assert not worst


def check_saved(rank, world):
    """Numbers that a ring keeps for its backward pass: of its arguments, and besides them."""
    where = local_positions(16, layout_of(world), rank)
    query, key, value, _ = (each.detach()[:, :, where] for each in draw(4, 2, torch.float32))
    query.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda each: each):
        context.Context(layout_of(world), rank, dist.group.WORLD).attend(query, key, value)
    return sorted(tuple(each.shape) for each in saved)


def test_a_ring_keeps_no_scores_and_nobody_elses_keys():
    tokens = 16 // 2
    heads, kv_heads = (2, 4, tokens, 8), (2, 2, tokens, 8)
    for saved in run_ranks(check_saved, 2):
        assert saved == sorted([heads, kv_heads, kv_heads, heads, (2, 4, tokens)])


def check_windows(rank, world):
    """Ulysses with what a ring refuses, and its deviation from the same on one device."""
    layout = layout_of(world, "ulysses")
    here = context.Context(layout, rank, dist.group.WORLD)
    where = local_positions(16, layout, rank)
    worst = 0.0
    for options in ({"window": 5}, {"softcap": 2.0}, {"window": 3, "softcap": 2.0, "scale": 0.2}):
        query, key, value, grad = draw(4, 2, torch.float64)
        expected = by_definition(query, key, value, **options)
        expected_grads = torch.autograd.grad(expected, (query, key, value), grad)
        parts = [each.detach()[:, :, where].requires_grad_() for each in (query, key, value)]
        output = here.attend(*parts, **options)
        grads = torch.autograd.grad(output, parts, grad[:, :, where])
        for ours, theirs in zip((output, *grads), (expected, *expected_grads), strict=True):
            apart = (ours - theirs[:, :, where]).detach().abs()
            worst = max(worst, float(apart.max()))
    return worst


def by_definition(query, key, value, window=None, softcap=None, scale=8**-0.5):
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    hidden = [
        [j > i or (window is not None and j <= i - window) for j in range(16)] for i in range(16)
    ]
    scores = scores.masked_fill(torch.tensor(hidden), -torch.inf)
    return scores.softmax(-1) @ value


def test_ulysses_takes_windows_and_capped_scores():
    assert max(run_ranks(check_windows, 2)) <= EXACT


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dropout": 0.1}, "a ring with dropout 0.1 of attention weights"),
        ({"window": 8}, "a ring with a window of 8 of 16 tokens"),
        ({"softcap": 30.0}, "a ring with scores capped at 30"),
    ],
)
def test_a_ring_refuses_what_its_blocks_have_no_form_for(options, told):
    here = context.Context(layout_of(2), 0, None)
    query, key, value, _ = draw(4, 2, torch.float32, queries=8, keys=8)
    with pytest.raises(JobError, match=told):
        here.attend(query, key, value, **options)


def test_ulysses_refuses_heads_that_its_ranks_do_not_divide():
    here = context.Context(layout_of(3, "ulysses"), 0, None)
    query, key, value, _ = draw(4, 2, torch.float32, queries=8, keys=8)
    with pytest.raises(JobError, match="tensor 1 x context 3 does not divide 4 heads"):
        here.attend(query, key, value)


def assert_close(ours, theirs, most):
    assert float((ours - theirs).detach().abs().max()) <= most


# --- whole models

FAMILIES = ("decoder", "llama", "gpt2", "own")
LAYOUTS = [
    layout_of(degree, kind, data=4 // degree) for degree in (4, 2) for kind in ("ring", "ulysses")
]
WIDTHS = {"vocab_size": 64, "max_position_embeddings": 16, "n_positions": 16}
CONFIGS = {
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **WIDTHS,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        **WIDTHS,
    },
}


class Own(nn.Module):
    """What a person may write: positions and attention asked of the strategy."""

    def __init__(self, ask=True):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.places = nn.Embedding(SEQ_LEN, 32)
        self.blocks = nn.ModuleList(OwnBlock(ask) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens_BS):
        hidden = self.tokens(tokens_BS) + self.places(positions(tokens_BS.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class OwnBlock(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.ask = ask
        self.qkv = nn.Linear(32, 96)

    def forward(self, hidden):
        heads = self.qkv(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.ask:
            mixed = attention(*heads)
        else:
            mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return hidden + mixed.transpose(1, 2).flatten(2)


def make(family):
    torch.manual_seed(0)
    if family == "own":
        return Own().double()
    model = Decoder(SHAPE, SEQ_LEN) if family == "decoder" else build_hf(CONFIGS[family])
    return model.double()


def whole_batch(samples):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (samples, SEQ_LEN + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_sum(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")


def check_models(rank, world):
    """Largest deviation of the loss and of any parameter's gradient, for each model and layout."""
    found = {}
    all_meshes = [make_meshes(layout, "cpu") for layout in LAYOUTS]
    for family in FAMILIES:
        alone = make(family)
        inputs, targets = whole_batch(4)
        for layout, meshes in zip(LAYOUTS, all_meshes, strict=True):
            place = meshes.place
            each = 4 // layout.data
            mine = slice(place.data * each, (place.data + 1) * each)
            model = make(family)
            context.split_context(model, layout, meshes)
            parts = [local_tokens(part[mine], layout, place.context) for part in (inputs, targets)]
            loss = loss_sum(model, *parts) / targets.numel()
            loss.backward()
            alone.zero_grad()
            expected = loss_sum(alone, inputs, targets) / targets.numel()
            expected.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            apart = {"loss": float((total - expected.detach()).abs())}
            for name, parameter in model.named_parameters():
                dist.all_reduce(parameter.grad)
                theirs = alone.get_parameter(name).grad
                assert float(theirs.abs().max()) > 0, name
                apart[name] = float((parameter.grad - theirs).abs().max())
            worst = max(apart, key=apart.__getitem__)
            found[family, layout.context, layout.context_kind] = worst, apart[worst]
    return found


def test_models_over_context_ranks_equal_the_single_device_one():
    pytest.importorskip("transformers")
    for found in run_ranks(check_models, 4):
        assert len(found) == len(FAMILIES) * len(LAYOUTS)
        assert not {case: worst for case, worst in found.items() if not worst[1] <= EXACT}


def check_recompute(rank, world):
    """Models whose blocks are recomputed, whole or but for attention's kernel."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def policy(ctx, op, *args, **kwargs):
        kept = op == kernel
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    selective = {"context_fn": lambda: create_selective_checkpoint_contexts(policy)}
    inputs, targets = whole_batch(2)
    worst = 0.0
    for family, kind, options in product(("decoder", "own"), ("ring", "ulysses"), ({}, selective)):
        alone, model, layout = make(family), make(family), layout_of(world, kind)
        loss_sum(alone, inputs, targets).backward()
        context.split_context(model, layout, make_meshes(layout, "cpu"))
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        parts = [local_tokens(part, layout, rank) for part in (inputs, targets)]
        loss_sum(model, *parts).backward()
        for name, parameter in model.named_parameters():
            dist.all_reduce(parameter.grad)
            apart = parameter.grad - alone.get_parameter(name).grad
            worst = max(worst, float(apart.abs().max()))
    return worst


def test_recomputed_blocks_give_the_same_gradients():
    assert max(run_ranks(check_recompute, 2)) <= 1e-10  # of a sum of 32 losses


def check_bfloat16(rank, world):
    """A decoder and a Llama under autocast; the loss of both layouts and of one device."""
    losses = []
    inputs, targets = whole_batch(2)
    for family in ("decoder", "llama"):
        for layout in (layout_of(2), layout_of(2, "ulysses"), layout_of(1)):
            model = make(family).float()
            parts = inputs, targets
            if layout.context > 1:
                context.split_context(model, layout, make_meshes(layout, "cpu"))
                parts = [local_tokens(part, layout, rank) for part in parts]
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_sum(model, *parts) / targets.numel()
            loss.backward()
            assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
            total = loss.detach()
            if layout.context > 1:
                dist.all_reduce(total)
            losses.append(float(total))
    return losses


def test_bfloat16_runs_under_autocast():
    pytest.importorskip("transformers")
    for losses in run_ranks(check_bfloat16, 2):
        for ring, ulysses, alone in (losses[:3], losses[3:]):
            # A loss near ln 64 = 4.16 of logits with 8 bits: half a unit in the last place of each.
            assert abs(ring - alone) < 4.2 * 2.0**-9
            assert abs(ulysses - alone) < 4.2 * 2.0**-9


def check_shared(rank, world):
    """FSDP2 over data x context ranks and tensor ranks within: the largest deviation."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    worst = {}
    inputs, targets = whole_batch(2)
    alone = make("decoder")
    (loss_sum(alone, inputs, targets) / targets.numel()).backward()
    for kind, tensor in (("ring", 1), ("ulysses", 1), ("ring", 2), ("ulysses", 2)):
        data = 2 // tensor
        layout = layout_of(2, kind, data=data, tensor=tensor, sharding="full")
        meshes = make_meshes(layout, "cpu")
        model = make("decoder")
        context.split_context(model, layout, meshes)
        for block in model.blocks:
            if tensor > 1:
                columns = {
                    f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")
                }
                plan = {**columns, "attention.output": RowwiseParallel()}
                parallelize_module(block, meshes.tensor, plan)
            fully_shard(block, mesh=meshes.fsdp)
        fully_shard(model, mesh=meshes.fsdp)
        each = 2 // data
        mine = slice(meshes.place.data * each, (meshes.place.data + 1) * each)
        parts = [
            local_tokens(part[mine], layout, meshes.place.context) for part in (inputs, targets)
        ]
        loss = loss_sum(model, *parts) / targets.numel() * layout.shard_degree  # FSDP2's mean
        loss.backward()
        for name, parameter in model.named_parameters():
            apart = parameter.grad.full_tensor() - alone.get_parameter(name).grad
            worst[kind, tensor, name] = float(apart.abs().max())
    return worst


def test_context_ranks_go_with_fsdp2_and_tensor_ranks():
    for worst in run_ranks(check_shared, 4):
        assert not {case: apart for case, apart in worst.items() if not apart <= EXACT}


def check_refusals(rank, world):
    """What each of these raises."""
    layout = layout_of(2)
    meshes = make_meshes(layout, "cpu")
    llama, own, decoder = make("llama"), Own(ask=False).double(), make("decoder")
    for model in (llama, own, decoder):
        context.split_context(model, layout, meshes)
    inputs = torch.zeros(1, 8, dtype=torch.int64)
    mixed = {**CONFIGS["llama"], "model_type": "mamba"}
    calls = [
        lambda: llama(input_ids=inputs, attention_mask=torch.ones(1, 8)),
        lambda: llama(input_ids=inputs, labels=inputs),
        lambda: llama(input_ids=inputs, position_ids=inputs),
        lambda: own(inputs),
        lambda: decoder(inputs[:, :6]),
        lambda: llama(inputs[:, :7]),
        lambda: context.split_context(build_hf(mixed), layout, meshes),
    ]
    told = []
    for call in calls:
        with pytest.raises(JobError) as raised:
            call()
        told.append(str(raised.value))
    return told


def test_what_context_ranks_cannot_do_is_refused_with_its_reason():
    pytest.importorskip("transformers")
    for told in run_ranks(check_refusals, 2):
        for line, part in zip(
            told,
            (
                "R030: context parallelism cannot do an attention mask",
                "labels given to the model",
                "position ids of the caller's",
                "Own: its forward pass did not call paceline.runtime.strategy.attention",
                "6 tokens on this rank; it was given the positions of 8",
                "2 x context 2 does not divide the 14 tokens",
                "a mamba model",
            ),
            strict=True,
        ):
            assert part in line


def check_windowed(rank, world):
    """A Mistral with a window narrower than its samples: ulysses' deviation, a ring's words."""
    config = {**CONFIGS["llama"], "model_type": "mistral", "sliding_window": 6, "head_dim": 8}
    inputs, targets = whole_batch(2)
    torch.manual_seed(0)
    alone = build_hf(config).double()
    loss_sum(alone, inputs, targets).backward()
    layout, ring = layout_of(2, "ulysses"), layout_of(2)
    torch.manual_seed(0)
    model = build_hf(config).double()
    context.split_context(model, layout, make_meshes(layout, "cpu"))
    loss_sum(model, *(local_tokens(part, layout, rank) for part in (inputs, targets))).backward()
    worst = 0.0
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)
        worst = max(worst, float((parameter.grad - alone.get_parameter(name).grad).abs().max()))
    refused = build_hf(config).double()
    context.split_context(refused, ring, make_meshes(ring, "cpu"))
    with pytest.raises(JobError) as raised:
        refused(local_tokens(inputs, ring, rank))
    return worst, str(raised.value)


def test_a_model_with_a_window_needs_ulysses():
    pytest.importorskip("transformers")
    for worst, told in run_ranks(check_windowed, 2):
        assert worst <= 1e-10  # gradients of a sum of 32 losses
        assert "a ring with a window of 6 of 16 tokens" in told


# --- on fake ranks


class Sent(TorchDispatchMode):
    """Bytes of each kind of communication."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            self.bytes.setdefault(name, []).append(tensor.numel() * tensor.element_size())
        return func(*args, **(kwargs or {}))


def check_fake(rank, world, out):
    """Bytes sent by a decoder's forward and backward pass on one of eight ranks that are not."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    found = {}
    for kind in ("ring", "ulysses"):
        layout = layout_of(4, kind, data=2)
        meshes = make_meshes(layout, "cpu")
        with torch.device("meta"):
            model = Decoder(SHAPE, SEQ_LEN)
        context.split_context(model, layout, meshes)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            model.reset_parameters()
            tokens = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
            parts = [local_tokens(tokens, layout, meshes.place.context)] * 2
            with Sent() as forward:
                loss = loss_sum(model, *parts)
            with Sent() as backward:
                loss.backward()
        found[kind] = forward.bytes, backward.bytes
    Path(out).write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def test_fake_ranks_show_every_byte_a_ring_and_ulysses_send(tmp_path):
    (_,) = run_ranks(check_fake, 1, str(tmp_path / "found"))
    found = pickle.loads((tmp_path / "found").read_bytes())
    tokens, layers = SEQ_LEN // 4, SHAPE.layers
    heads = 2 * tokens * SHAPE.kv_heads * SHAPE.head_dim * 4  # of a rank's keys, or values: bytes
    forward, backward = found["ring"]
    assert forward == {name: [2 * heads] * 3 * layers for name in ("c10d::send", "c10d::recv_")}
    assert backward == {
        name: [2 * heads] * (3 + 4) * layers for name in ("c10d::send", "c10d::recv_")
    }
    forward, backward = found["ulysses"]
    exchanged = "_c10d_functional::all_to_all_single"
    # Two key heads are made four, one for each rank.
    assert sorted(forward[exchanged]) == sorted([2 * heads] * 4 * layers)
    assert sorted(backward[exchanged]) == sorted([2 * heads] * 4 * layers)
