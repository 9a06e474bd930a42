"""Trained weights in every layout: the bits that `from_pretrained` gives, each read once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks
from tests.runtime import equality

from paceline.errors import JobError, Problem
from paceline.job import parse_job
from paceline.job.pretrained import find_pretrained
from paceline.parallel.layout import Layout
from paceline.profile.hf_names import to_hf_name
from paceline.profile.runnable import shape_of_config
from paceline.runtime import strategy
from paceline.runtime.decoder import Decoder
from paceline.runtime.huggingface import build_hf
from paceline.runtime.initial.blueprint import Blueprint
from paceline.runtime.initial.fill import Filler
from paceline.runtime.pretrained import FromPretrained
from paceline.runtime.state import MODEL, Stored, boxes_of, model_state

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402 - it comes with transformers

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", **SIZES, "tie_word_embeddings": True},
    "gpt2": {**equality.CONFIGS["gpt2"], "n_layer": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SIZES,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {**equality.CONFIGS["mixtral"], "num_hidden_layers": 2},
}
LAYOUTS = {
    "llama": ("DDP", "FSDP2", "HSDP", "TP x FSDP2", "CP ring x FSDP2", "PP 1F1B x FSDP2"),
    "qwen2": ("TP x DDP", "PP 1F1B x DDP"),
    "gpt2": ("FSDP2", "TP x FSDP2"),
    "qwen3_moe": ("FSDP2", "EP 4 x DDP"),
    "mixtral": ("DDP", "EP 2 x FSDP2"),
}
"""Each layout for some of the models: what lies on a rank does not ask which model it is."""


def write(folder: Path, name: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A folder as `save_pretrained` writes it, in several files; its model."""
    config = dict(CONFIGS[name])
    torch.manual_seed(5)
    read = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForCausalLM.from_config(read, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def factory(folder: Path) -> FromPretrained:
    text = (
        f"model: {{pretrained: {folder}}}\ndata: {{path: x, seq_len: 16}}\n"
        "train: {global_batch: 1, steps: 1}\n"
    )
    found = find_pretrained(parse_job(text, source="job.yaml", folder=Path("/")))
    assert found is not None
    config = found.config
    if config["model_type"] in ("llama", "qwen2"):
        return FromPretrained(lambda: Decoder(shape_of_config(config), 16), found)
    return FromPretrained(lambda: build_hf(config), found)


def loaded(folder: Path, layout: Layout) -> tuple[torch.nn.Module, strategy.Meshes, int]:
    """The model in a layout, and the bytes that this rank read."""
    meshes = strategy.make_meshes(layout, "cpu")
    make = factory(folder)
    blueprint = Blueprint(make, 1)
    whole = blueprint.take_model()
    weights = make.weights_of(whole)
    model = strategy.apply(
        whole,
        layout,
        meshes,
        precision="fp32",
        fill=Filler(blueprint, torch.device("cpu"), weights=weights),
    )
    return model, meshes, weights.bytes_read


def load_in_layouts(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layouts in LAYOUTS.items():
        for each in layouts:
            fields = (equality.LAYOUTS | equality.EXPERT_LAYOUTS)[each]
            model, _, read = loaded(Path(folder) / name, equality.layout_of(fields, {}))
            pieces = {
                (n.removeprefix(MODEL), box.offset): (stored.size, box.tensor.numpy().copy())
                for n, stored in model_state(model).items()
                if isinstance(stored, Stored)
                for box in boxes_of(stored)
            }
            found[f"{name}, {each}"] = name, read, pieces
    return found


def test_every_layout_begins_with_the_bits_of_the_files_and_reads_each_once(tmp_path: Path):
    models = {name: write(tmp_path / name, name) for name in CONFIGS}
    sizes = {
        name: sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors"))
        for name in CONFIGS
    }
    assert all(len(list((tmp_path / name).glob("*.safetensors"))) > 1 for name in CONFIGS)
    ranks = run_ranks(load_in_layouts, 4, str(tmp_path))
    for case, (name, _, _) in ranks[0].items():
        state = equality.whole_state([{"state": rank[case][2]} for rank in ranks])
        assert sum(rank[case][1] for rank in ranks) <= 1.05 * sizes[name], case
        assert_same(state, models[name], case)


def assert_same(state: dict[str, Any], model: Any, case: str) -> None:
    expected = {name: each.detach().numpy() for name, each in model.named_parameters()}
    state = {to_hf_name(name) or name: value for name, value in state.items()}
    assert state.keys() == expected.keys(), case
    for name, value in expected.items():
        assert np.array_equal(state[name], value), (case, name)


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def filled(folder: Path) -> torch.nn.Module:
    """The whole model on one rank."""
    make = factory(folder)
    blueprint = Blueprint(make, 1)
    model = blueprint.take_model()
    weights = make.weights_of(model)
    Filler(blueprint, torch.device("cpu"), weights=weights)(model)
    return model.eval()


def refusals(folder: Path) -> list[Problem]:
    with pytest.raises(JobError) as caught:
        filled(folder)
    return list(caught.value.problems)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write the tensors of a folder again, in one file, after a change."""
    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: each for file in files for name, each in load_file(file).items()}
    for file in (*files, folder / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_bf16_compute_what_from_pretrained_computes_in_float32(
    alone, tmp_path: Path, name: str
):
    write(tmp_path / "model", name, dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32
    ).eval()
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        found, expected = filled(tmp_path / "model")(tokens), theirs(tokens).logits
    # The built-in decoder sums in another order; a model of transformers is the same code.
    is_built_in = name in ("llama", "qwen2")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if is_built_in else 0.0)


def test_every_tensor_that_does_not_fit_is_listed_at_once(alone, tmp_path: Path):
    write(tmp_path, "llama")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(52, 32)
        tensors["model.embed_tokens.weight"] = torch.zeros(70, 32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # computed

    edit(tmp_path, change)
    missing, left_over, wrong = refusals(tmp_path)
    assert {each.code for each in (missing, left_over, wrong)} == {"M013"}
    assert "2 tensors" in missing.what
    assert "model.norm.weight" in missing.what
    assert "lm_head.weight" in missing.what
    assert "1 tensors" in left_over.what
    assert "model.layers.2.mlp.up_proj.weight" in left_over.what
    assert "model.embed_tokens.weight (70 x 32, not 67 x 32)" in wrong.what


def test_an_expert_that_is_missing_is_a_parameter_of_another_shape(alone, tmp_path: Path):
    write(tmp_path, "qwen3_moe")
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.experts.3.up_proj.weight"))
    (problem,) = refusals(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj (parts of different shapes" in problem.what


def test_values_that_are_not_finite_are_named_with_their_file(alone, tmp_path: Path):
    write(tmp_path, "gpt2")
    edit(tmp_path, lambda tensors: tensors["transformer.h.1.ln_1.bias"][3:4].fill_(torch.nan))
    (problem,) = refusals(tmp_path)
    assert problem.code == "M015"
    assert "transformer.h.1.ln_1.bias in model.safetensors" in problem.what


def test_a_tied_head_may_be_in_the_file_as_well_if_it_is_equal(alone, tmp_path: Path):
    write(tmp_path, "qwen2")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(tmp_path, add)
    model = filled(tmp_path)
    assert model.output.weight is model.embedding.weight
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"][5, 5].add_(1))
    (problem,) = refusals(tmp_path)
    assert problem.code == "M013"
    assert "differ in the files" in problem.what


def test_a_file_of_the_model_without_its_head_is_read_when_the_head_is_tied(alone, tmp_path: Path):
    for name in ("qwen2", "gpt2"):
        folder = tmp_path / name
        expected = write(folder, name)
        expected.base_model.save_pretrained(folder)
        state = {n: each.detach().numpy() for n, each in filled(folder).named_parameters()}
        assert_same(state, expected, name)


def test_quantised_and_damaged_files_are_named(alone, tmp_path: Path):
    write(tmp_path, "llama")

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    edit(tmp_path, quantise)
    (problem,) = refusals(tmp_path)
    assert (problem.code, "stored as I8: model.norm.weight" in problem.what) == ("M014", True)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-9], whole[:4], b"\xff" * 16, whole.replace(b"BF16", b"F33", 1)[:90]):
        path.write_bytes(content)
        (problem,) = refusals(tmp_path)
        assert (problem.code, "model.safetensors" in problem.what) == ("M012", True)
