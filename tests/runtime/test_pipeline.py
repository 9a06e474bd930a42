"""Pipelines of every schedule against the whole model on one device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.ranks import run_ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.errors import JobError
from paceline.parallel.layout import Layout
from paceline.parallel.layout_laws import check_schedule
from paceline.parallel.stages import is_v_shaped
from paceline.profile import DecoderShape
from paceline.profile.runnable import SPLIT
from paceline.profile.ways import Ways
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import build_hf
from paceline.runtime.state import named_parameters
from paceline.runtime.strategy import train
from paceline.runtime.strategy.apply import apply
from paceline.runtime.strategy.data.shard import shard
from paceline.runtime.strategy.expert.split import split_experts
from paceline.runtime.strategy.mesh import Meshes, make_meshes
from paceline.runtime.strategy.pipeline.pipeline import (
    Pipeline,
    evaluate,
    forward_backward,
    split_stages,
)
from paceline.runtime.strategy.pipeline.schedules import Stage
from paceline.runtime.strategy.pipeline.stages import blocks_of, check_stages, take_stage
from paceline.runtime.strategy.recompute import recompute_blocks
from paceline.runtime.strategy.tensor.split import loss_context, split_tensors
from paceline.runtime.strategy.ways.find import ways_of

SHAPE = DecoderShape(
    layers=5,
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ffn=24,
    vocab=32,
    tied_embeddings=False,
)
SEQ_LEN, SAMPLES = 6, 2


def layout_of(pipeline: int, schedule: str, accumulation: int, **others: Any) -> Layout:
    others = {"data": 1, "sharding": "none", "micro_batch": SAMPLES} | others
    return Layout(pipeline=pipeline, schedule=schedule, accumulation=accumulation, **others)


def decoder(layers: int, tied: bool) -> nn.Module:
    torch.manual_seed(0)
    shape = replace(SHAPE, layers=layers, tied_embeddings=tied)
    return Decoder(shape, SEQ_LEN).double()


def micro_batches(count: int, data: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(data)
    shape = (count, SAMPLES, SEQ_LEN + 1)
    tokens = torch.randint(0, SHAPE.vocab, shape, generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, targets.numel()


def whole(
    model: nn.Module, batches: list[tuple[Tensor, Tensor]], scale: float
) -> tuple[float, dict[str, Tensor]]:
    """Sum of the losses and gradients of a model on one device."""
    total = 0.0
    for inputs, targets in batches:
        loss, _ = loss_of(model(inputs), targets)
        (loss * scale).backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst(pipeline: Pipeline, expected: dict[str, Tensor]) -> float:
    """Largest deviation of a gradient on this rank, relative to the largest gradient."""
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    found = 0.0
    for name, parameter in pipeline.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        found = max(found, float((gradient - expected[name]).abs().max()))
    return found / largest


def split(
    model: nn.Module, layout: Layout, meshes: Meshes, ways: Ways, precision: Any = "fp32"
) -> Pipeline:
    """Everything that `apply` does to a pipeline, in its order."""
    pipeline = split_stages(model, layout, meshes, ways)
    for part in pipeline.parts:
        split_experts(part, layout, meshes, ways)
        split_tensors(part, layout, meshes, ways)
    recompute_blocks(pipeline, layout, ways)
    shard(pipeline, layout, meshes, precision, ways=ways)
    return pipeline


def run_one(
    rank: int, world: int, layout: Layout, make: Callable[..., nn.Module], *args: Any
) -> dict[str, Any]:
    """Two steps and an evaluation of a pipeline, and how far they are from the whole model."""
    meshes = make_meshes(layout, "cpu")
    scale = 1 / 7
    of_all = [micro_batches(layout.accumulation, data) for data in range(layout.data)]
    batches = of_all[meshes.place.data]
    model = make(*args)
    ways = ways_of(model)
    loss, expected = whole(model, [each for batches in of_all for each in batches], scale)
    pipeline = split(make(*args), layout, meshes, ways)
    deviations = []
    for _ in range(2):
        with loss_context(layout):
            loss_sum, num, *_ = forward_backward(pipeline, batches, loss_of, loss_scale=scale)
        deviations.append(worst(pipeline, expected))
        for parameter in pipeline.parameters():
            parameter.grad = None
        with loss_context(layout):
            evaluated, *_ = evaluate(pipeline, batches, loss_of)
    state = pipeline.state_dict()
    return {
        "loss": float(loss_sum),
        "evaluated": float(evaluated),
        "expected": loss,
        "num": int(num),
        "worst": max(deviations),
        "names": sorted(name for name, _ in pipeline.named_parameters()),
        "all names": sorted(expected),
        "state": sorted(state),
        "elsewhere": len(pipeline.counted_elsewhere()),
        "tensor": meshes.place.tensor,
    }


def check(layout: Layout, results: list[dict[str, Any]]) -> None:
    """All ranks together give what the whole model gives."""
    told = [result for result in results if result["tensor"] == 0]
    samples = layout.data * layout.accumulation * SAMPLES
    deviation = max(result["worst"] for result in results)
    loss = sum(result["loss"] for result in told)
    print(f"{layout.name}: gradients {deviation:.1e}, loss {loss - told[0]['expected']:.1e}")
    assert sum(result["num"] for result in told) == samples * SEQ_LEN
    assert loss == pytest.approx(told[0]["expected"], rel=1e-13)
    assert sum(result["evaluated"] for result in told) == pytest.approx(loss, rel=1e-13)
    assert deviation < 1e-12
    names = {name for result in results for name in result["names"]}
    assert names == set(results[0]["all names"])


SCHEDULES = {
    "gpipe": (layout_of(2, "gpipe", 3), 5),
    "1f1b": (layout_of(2, "1f1b", 5), 5),
    "interleaved": (layout_of(2, "interleaved", 4, chunks=2), 5),
    "zero-bubble": (layout_of(2, "zero-bubble", 4), 5),
    "zero-bubble v": (layout_of(2, "zero-bubble", 3, chunks=2), 5),
    "zero-bubble loop": (layout_of(2, "zero-bubble", 4, chunks=3), 7),
    "dualpipe-v": (layout_of(2, "dualpipe-v", 5), 5),
}
"""Of two ranks, with a number of blocks that they cannot share evenly."""

Case = tuple[Layout, Callable[..., nn.Module], tuple[Any, ...]]


def run_cases(rank: int, world: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [run_one(rank, world, layout, make, *args) for layout, make, args in cases]


def check_cases(cases: list[Case]) -> list[list[dict[str, Any]]]:
    world = cases[0][0].num_ranks
    results = list(zip(*run_ranks(run_cases, world, cases), strict=True))
    for (layout, *_), each in zip(cases, results, strict=True):
        check(layout, list(each))
    return [list(each) for each in results]


def of_all_schedules(*words: str, tied: bool, **others: Any) -> list[Case]:
    chosen = {word: SCHEDULES[word] for word in words or SCHEDULES}
    return [
        (replace(layout, **others), decoder, (layers, tied)) for layout, layers in chosen.values()
    ]


def test_every_schedule_on_two_ranks_gives_the_whole_models_gradients_bit_by_bit():
    for results in check_cases(of_all_schedules(tied=False)):
        assert max(result["worst"] for result in results) == 0


def test_a_tied_matrix_on_two_stages_is_one_parameter_with_the_sum_of_its_gradients():
    cases = of_all_schedules(tied=True)
    for (layout, *_), results in zip(cases, check_cases(cases), strict=True):
        holders = [rank for rank, each in enumerate(results) if "embedding.weight" in each["names"]]
        assert holders == ([0] if is_v_shaped(layout) else [0, 1])
        assert [each["elsewhere"] for each in results] == [0, len(holders) - 1]
        assert "output.weight" not in results[0]["state"] + results[1]["state"]


def test_stages_of_data_ranks_that_share_or_shard_their_parameters():
    check_cases(
        [
            *of_all_schedules("1f1b", "zero-bubble v", tied=True, data=2),
            *of_all_schedules("interleaved", tied=True, data=2, sharding="full"),
            *of_all_schedules("dualpipe-v", tied=False, data=2, sharding="full", recompute="full"),
        ]
    )


@pytest.mark.repeat  # each schedule and each sharding is above, with another
def test_other_stages_of_data_ranks_that_shard_their_parameters():
    check_cases(
        [
            *of_all_schedules("zero-bubble v", tied=True, data=2, sharding="full"),
            *of_all_schedules("zero-bubble", tied=True, data=2, sharding="zero1"),
            *of_all_schedules("1f1b", tied=True, data=2, sharding="zero2"),
        ]
    )


def test_stages_whose_matrices_are_split_over_tensor_ranks():
    check_cases(
        [
            *of_all_schedules("1f1b", "dualpipe-v", tied=True, tensor=2),
            *of_all_schedules("interleaved", tied=False, tensor=2, sequence_parallel=False),
        ]
    )


def top_heavy_decoder(layers: int, tied: bool) -> nn.Module:
    """One whose head takes longer than its blocks, so that the last stage has the head alone."""
    torch.manual_seed(0)
    return Decoder(
        replace(SHAPE, layers=layers, tied_embeddings=tied, vocab=1024), SEQ_LEN
    ).double()


@pytest.mark.repeat  # stages that are split over tensor ranks are above
def test_a_last_stage_of_the_head_alone_is_split_over_tensor_ranks():
    found = [
        *of_all_schedules("1f1b", "interleaved", "zero-bubble v", tied=False, tensor=2),
        *of_all_schedules("1f1b", "dualpipe-v", tied=True, tensor=2),
        *of_all_schedules("1f1b", tied=True, tensor=2, sequence_parallel=False),
    ]
    cases: list[Case] = [(layout, top_heavy_decoder, args) for layout, _, args in found]
    for layout, make, args in cases:
        model = make(*args)
        assert not blocks_of(model, ways_of(model), layout)[-1]
    check_cases(cases)


def test_blocks_computed_again_in_every_kind_of_backward_pass():
    check_cases(
        [
            *of_all_schedules(
                "1f1b", "zero-bubble", "zero-bubble v", "dualpipe-v", tied=False, recompute="full"
            ),
            *of_all_schedules("1f1b", "interleaved", tied=False, recompute="selective"),
        ]
    )


def test_four_ranks_in_a_row_and_in_a_v():
    check_cases(
        [
            (layout_of(4, "1f1b", 4), decoder, (5, True)),
            (layout_of(4, "interleaved", 8, chunks=2), decoder, (9, True)),
            (layout_of(4, "dualpipe-v", 8), decoder, (9, True)),
        ]
    )


HIDDEN = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
HF = {
    "llama": HIDDEN | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mixtral": HIDDEN
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    "gpt2": {"vocab_size": 32, "n_embd": 16, "n_head": 4, "n_layer": 4, "n_positions": 8},
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def hugging_face(kind: str) -> nn.Module:
    torch.manual_seed(0)
    extra = NO_DROPOUT if kind == "gpt2" else {}
    return build_hf({"model_type": kind, **HF[kind], **extra}).double()


def test_hugging_face_models_on_two_ranks_give_the_whole_models_gradients():
    check_cases(
        [
            (SCHEDULES[word][0], hugging_face, (kind,))
            for kind in HF
            for word in ("1f1b", "zero-bubble v")
        ]
    )


SIZES: dict[str, Any] = HIDDEN | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "n_embd": 16,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 16,
    "rotary_dim": 4,
    "num_layers": 4,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 2]],
    "ffn_dim": 24,
    "word_embed_proj_dim": 8,
}
FIELDS_OF_SOME = {
    "gpt_neo": ("num_layers", "num_heads", "attention_types"),
    "opt": ("ffn_dim", "word_embed_proj_dim"),
    "gptj": ("n_embd", "n_head", "n_layer", "n_positions", "rotary_dim"),
    "gpt2": ("n_embd", "n_head", "n_layer", "n_positions"),
}


def family(kind: str) -> nn.Module:
    taken = {name for names in FIELDS_OF_SOME.values() for name in names}
    own = FIELDS_OF_SOME.get(kind, ())
    if kind in ("gpt2", "gptj"):
        fields = {name: SIZES[name] for name in (*own, "vocab_size")}
    else:
        fields = {name: value for name, value in SIZES.items() if name not in taken or name in own}
    if kind == "falcon":
        del fields["head_dim"]
    torch.manual_seed(0)
    return build_hf({"model_type": kind, **fields}).double().eval()


def test_an_opt_without_projections_around_its_blocks_can_be_cut_into_stages():
    pytest.importorskip("transformers")
    fields = {name: SIZES[name] for name in ("hidden_size", "vocab_size", "ffn_dim")}
    fields |= {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 16}
    model = build_hf({"model_type": "opt", **fields, "word_embed_proj_dim": fields["hidden_size"]})
    ways = ways_of(model)
    assert ways is not None
    assert ways.last == ("model.decoder.final_layer_norm", "lm_head")
    assert list(check_stages(model, ways)) == []


@pytest.mark.parametrize("kind", sorted(SPLIT))
def test_stages_of_a_family_one_after_the_other_give_the_same_bits_as_the_model(kind: str):
    model = family(kind)
    ways = ways_of(model)
    assert ways is not None
    assert list(check_stages(model, ways)) == []
    tokens_BS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    logits_BSV = model(tokens_BS)
    logits_BSV.square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    cuts = (range(1), range(1, 4), range(4, 4))
    passed = tokens_BS
    for index, blocks in enumerate(cuts):
        stage = take_stage(model, ways, blocks, is_first=index == 0, is_last=index == 2)
        passed = stage(passed)
    assert torch.equal(passed, logits_BSV)
    passed.square().sum().backward()
    for name, parameter in model.named_parameters():
        gradient = expected[name]
        assert (gradient is None) == (parameter.grad is None), name
        assert gradient is None or torch.equal(parameter.grad, gradient), name


def test_a_family_that_was_never_compared_is_refused_by_name():
    model = family("llama")
    model.config.model_type = "llama9"
    ways = ways_of(family("llama"))
    assert ways is not None
    (problem,) = check_stages(model, ways)
    assert "stages of llama9 have not been compared" in problem.what


def test_a_parameter_without_a_stage_is_refused_by_name():
    ways = Ways(blocks="blocks", first=("embedding",), last=("output",))
    (problem,) = check_stages(decoder(2, False), ways)
    assert problem.code == "L030"
    assert problem.what.endswith("no stage is named for 1 parameters: norm.weight")


@pytest.mark.parametrize(
    ("layout", "num_blocks", "says"),
    [
        (layout_of(4, "1f1b", 3), 8, "needs at least 4 micro-batches, and there are 3"),
        (layout_of(4, "dualpipe-v", 7), 8, "needs at least 8 micro-batches, and there are 7"),
        (layout_of(4, "interleaved", 9, chunks=2), 8, "takes 9 micro-batches in 2 equal rounds"),
        (layout_of(4, "zero-bubble", 9), 8, "takes 9 micro-batches in 2 equal rounds"),
        (
            layout_of(4, "zero-bubble", 4, chunks=2),
            7,
            "4 x 2 virtual stages is 8 stages, and the model",
        ),
        (layout_of(4, "1f1b", 4, chunks=2), 8, "layout.chunks is 2, and schedule 1f1b has 1"),
        (layout_of(4, "interleaved", 4), 8, "chunks is 1, and schedule interleaved has 2 or more"),
        (layout_of(2, "zero-bubble", 4, recompute="selective"), 8, "selective recompute"),
    ],
    ids=lambda value: None if isinstance(value, int) else str(getattr(value, "schedule", ""))[:40],
)
def test_what_a_schedule_cannot_run_is_refused_in_numbers(layout, num_blocks, says):
    (problem,) = check_schedule(layout, num_blocks)
    assert says in problem.what


def gradients_in_bf16(rank: int, world: int, sharding: str, pipeline: int) -> dict[str, Any]:
    """The loss and the gradients, whole, of what this rank has."""
    layout = layout_of(pipeline, "1f1b", 4, data=2, sharding=sharding)
    meshes = make_meshes(layout, "cpu")
    model = apply(decoder(4, False).float(), layout, meshes, precision="bf16")
    batches = micro_batches(4, meshes.place.data)
    seen = train.forward_backward(model, meshes, batches, precision="bf16")
    found: dict[str, Any] = {"loss": float(seen.loss_sum)} if float(seen.num_targets) else {}
    for name, parameter in named_parameters(model).items():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {name: torch.as_tensor(value).numpy() for name, value in found.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("sharding", [pytest.param("none", marks=pytest.mark.repeat), "full"])
def test_a_pipeline_in_bf16_gives_the_same_bits_as_without_stages(sharding: str):
    """What goes from stage to stage is in the type that it has inside the model."""
    first_stage, _, last_stage, _ = run_ranks(gradients_in_bf16, 4, sharding, 2)
    alone = run_ranks(gradients_in_bf16, 2, sharding, 1)[0]
    assert not first_stage.keys() & last_stage.keys()
    staged = {**first_stage, **last_stage}
    assert staged.keys() == alone.keys()
    assert [name for name in alone if not (staged[name] == alone[name]).all()] == []


@pytest.mark.parametrize(
    ("word", "tensor", "ranks"),
    [
        ("zero-bubble v", 2, (0, 24)),
        pytest.param("zero-bubble v", 2, (8, 16), marks=pytest.mark.slow),
        *(
            pytest.param(word, 1, (0, 24), marks=pytest.mark.slow)
            for word in ("gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipe-v")
        ),
    ],
)
def test_every_schedule_runs_on_pretended_ranks_of_a_world_of_32(word, tensor, ranks):
    layout = replace(
        SCHEDULES[word][0], pipeline=4, accumulation=8, data=8 // tensor, tensor=tensor
    )
    for rank in ranks:
        run_pretended(layout, rank)


def run_pretended(layout: Layout, rank: int) -> None:
    """One step of one rank, without values."""
    dist.init_process_group("fake", rank=rank, world_size=32, store=FakeStore())
    try:
        meshes = make_meshes(layout, "cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = Decoder(replace(SHAPE, layers=9, tied_embeddings=True), SEQ_LEN)
            ways = ways_of(model)
            assert ways is not None
            pipeline = split(model, layout, meshes, ways)
            empty = torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.long)
            with loss_context(layout):
                forward_backward(pipeline, [(empty, empty)] * layout.accumulation, loss_of)
        missing = [name for name, each in pipeline.named_parameters() if each.grad is None]
        assert missing == []
    finally:
        dist.destroy_process_group()


def test_a_torch_whose_stages_allocate_otherwise_is_refused(monkeypatch):
    monkeypatch.delattr(PipelineStage, "_setup_forward_recv_info")  # torch 2.11 has none
    meta: Any = torch.empty(0, device="meta")
    layout: Any = None
    with pytest.raises(JobError, match=r"needs torch 2\.12 or newer"):
        Stage(nn.Identity(), 0, layout, layout, meta, meta, torch.device("cpu"))
