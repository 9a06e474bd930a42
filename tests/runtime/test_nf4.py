"""NF4: the bytes of bitsandbytes, in every layout, and a product that keeps no restored matrix."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime import equality
from tests.runtime.test_adapters import TRIED, asked_of, check
from tests.runtime.tiny import fake_rank
from torch.distributed.tensor import DTensor

from paceline.errors import PlanError
from paceline.job import parse_job
from paceline.job.pretrained import find_pretrained
from paceline.parallel.layout import Layout
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import build_hf
from paceline.runtime.initial.blueprint import Blueprint
from paceline.runtime.initial.fill import Filler
from paceline.runtime.pretrained import FromPretrained
from paceline.runtime.state import named_parameters
from paceline.runtime.strategy.adapter.linear import frozen_parameters
from paceline.runtime.strategy.adapter.nf4 import multiply_packed, quantise, restore
from paceline.runtime.strategy.adapter.place import add_adapters

QUICK = tuple(name for name in TRIED if name not in ("ZeRO-2", "TP without SP"))
TARGETS = ("query", "down")


def a_matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers that need no generator, which another torch may have otherwise."""
    whole = torch.arange(96 * 192, dtype=torch.float64) * 7919 % 10007 - 5003
    return (whole / 40_000).to(dtype).view(96, 192)


@pytest.mark.parametrize(
    ("dtype", "codes", "scales", "values"),
    [
        (torch.float32, "2d8ca715a5bca358", "8456a3dd248c95b7", "26bb9f171eac5e49"),
        (torch.bfloat16, "962d09712c2058ef", "9103554d06a41b0a", "ea1b9fff83c14ce5"),
    ],
)
def test_bytes_and_values_are_those_of_bitsandbytes(
    dtype: torch.dtype, codes: str, scales: str, values: str
):
    """Its own, taken with bitsandbytes 0.50.2 on a CPU: `quantize_4bit(a_matrix(dtype),
    blocksize=64, quant_type="nf4", compress_statistics=False)`, then `dequantize_4bit`."""
    packed = quantise(a_matrix(dtype))
    blocks = packed.view(96, 3, 36)
    found = (blocks[..., :32], blocks[..., 32:], restore(packed, dtype))
    assert [digest(each) for each in found] == [codes, scales, values]


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def test_rows_and_whole_blocks_of_columns_have_the_bytes_they_have_in_the_whole():
    weight = a_matrix()
    whole = quantise(weight)
    assert torch.equal(torch.cat([quantise(part) for part in weight.chunk(3)]), whole)
    assert torch.equal(torch.cat([quantise(part) for part in weight.split(64, 1)], 1), whole)


def test_a_block_of_zeros_stays_zeros():
    assert not restore(quantise(torch.zeros(2, 64)), torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_has_the_gradient_of_the_restored_matrix(dtype: torch.dtype):
    packed = quantise(a_matrix())
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, 5, 192, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(96, generator=generator)
    output = multiply_packed(inputs, packed, bias)
    output.square().sum().backward()
    found, inputs.grad = inputs.grad, None
    wanted = torch.nn.functional.linear(inputs, restore(packed, dtype), bias.to(dtype))
    wanted.square().sum().backward()
    assert torch.equal(output, wanted)
    assert torch.equal(found, inputs.grad)


def test_a_product_is_in_the_type_of_autocast():
    packed, inputs = quantise(a_matrix()), torch.ones(3, 192, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = multiply_packed(inputs, packed, None)
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert inputs.grad is not None
    assert inputs.grad.dtype == torch.float32


def test_only_matrices_of_the_blocks_are_quantised():
    model = equality.make_model("wide qlora adapters")
    with fake_rank(equality.alone_layout(), 0):
        layout = equality.alone_layout()
        made = strategy.apply(model, layout, strategy.make_meshes(layout, "cpu"), precision="fp32")
    packed = {name for name, each in made.named_parameters() if each.dtype == torch.uint8}
    assert packed == {
        f"blocks.{block}.{name}.weight"
        for block in range(4)
        for name in (
            *(f"attention.{each}" for each in ("query", "key", "value", "output")),
            *(f"ffn.{each}" for each in ("gate", "up", "down")),
        )
    }
    num_bytes = sum(each.nbytes for each in frozen_parameters(made) if each.dtype == torch.uint8)
    assert num_bytes == equality.num_in_blocks(equality.make_model("wide")) * 36 // 64


def test_a_row_that_is_no_whole_blocks_on_a_rank_is_refused_with_its_numbers():
    layout = Layout(data=1, sharding="none", micro_batch=1, accumulation=1, tensor=4)
    model = equality.make_model("wide qlora adapters")
    with fake_rank(layout, 0), pytest.raises(PlanError, match="L005") as caught:
        strategy.apply(model, layout, strategy.make_meshes(layout, "cpu"), precision="fp32")
    assert "attention.output has 128 inputs in blocks of 64 (NF4)" in str(caught.value)


def test_the_digest_says_that_matrices_were_quantised():
    layout, digests = equality.alone_layout(), []
    for kind in ("lora", "qlora"):
        blueprint = Blueprint(lambda kind=kind: equality.make_model(f"wide {kind} adapters"), 0)
        with fake_rank(layout, 0):
            meshes, fill = strategy.make_meshes(layout, "cpu"), Filler(blueprint, CPU)
            model = strategy.apply(
                blueprint.take_model(), layout, meshes, precision="fp32", fill=fill
            )
        digests.append(model.paceline_frozen_digest)
    assert digests[1] == digests[0] + ":nf4"


CPU = torch.device("cpu")


@pytest.mark.ranks
def test_quantised_models_train_in_each_layout_as_on_one_device():
    check(list(QUICK), "wide qlora adapters")


@pytest.mark.ranks
@pytest.mark.slow
def test_quantised_models_train_in_every_layout_as_on_one_device():
    others = (name for name in equality.LAYOUTS if name not in (*QUICK, "TP 4"))
    check(list(others), "wide qlora adapters")


CONFIG: dict[str, Any] = {
    **equality.CONFIGS["llama"],
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}


def fill_in_layouts(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Weights read from files, and drawn ones: each rank quantises what it has."""
    text = f"model: {{pretrained: {folder}}}\ndata: {{path: x}}\n"
    text += "train: {global_batch: 1, steps: 1}"
    found = find_pretrained(parse_job(text, source="job.yaml", folder=Path("/")))
    assert found is not None

    def read() -> torch.nn.Module:
        return with_adapters(build_hf(CONFIG))

    def drawn() -> torch.nn.Module:
        return with_adapters(Decoder(WIDE, 16))

    result: dict[str, Any] = {}
    for name in ("TP x FSDP2", "HSDP", "PP 1F1B x FSDP2"):
        layout = equality.layout_of(equality.LAYOUTS[name], {})
        meshes = strategy.make_meshes(layout, "cpu")
        for make in (FromPretrained(read, found), drawn):
            blueprint = Blueprint(make, 3)
            whole = blueprint.take_model()
            weights = make.weights_of(whole) if isinstance(make, FromPretrained) else None
            fill = Filler(blueprint, CPU, weights=weights)
            model = strategy.apply(whole, layout, meshes, precision="bf16", fill=fill)
            result[f"{name} {'drawn' if weights is None else 'read'}"] = {
                name: digest(each.full_tensor() if isinstance(each, DTensor) else each)
                for name, each in named_parameters(model).items()
                if each.dtype == torch.uint8
            }
    return result


WIDE = replace(equality.SHAPE, layers=2, hidden=128, head_dim=32, ffn=128)


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    asked = asked_of(model, TARGETS, num_quantised=2 * 7 * 128 * 128, frozen_type="bfloat16")
    return add_adapters(model, asked)


@pytest.mark.ranks
def test_each_rank_quantises_what_it_reads_or_draws(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("llama", **fields)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    ranks = run_ranks(fill_in_layouts, 4, str(tmp_path))
    torch.manual_seed(3)
    wanted = {
        "read": {name: digest(quantise(each)) for name, each in matrices_of(theirs)},
        "drawn": {name: digest(quantise(each)) for name, each in matrices_of(Decoder(WIDE, 16))},
    }
    for case in ranks[0]:
        found = {name: each for rank in ranks for name, each in rank[case].items()}
        assert found == wanted[case.rpartition(" ")[2]], case


def matrices_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    blocks = ("blocks.", "model.layers.")
    named = model.named_parameters()
    return [(n, each.detach()) for n, each in named if each.dim() == 2 and n.startswith(blocks)]
