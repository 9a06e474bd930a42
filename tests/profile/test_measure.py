"""A module of one's own, measured in the helper process's way: on pretend tensors."""

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import JobError
from paceline.job import Job, parse_job
from paceline.launch.factory import measure_factory
from paceline.profile import (
    DecoderShape,
    profile_decoder,
    profile_module,
    resolve_profile,
    runtime_kernels,
    saved_bytes,
)

torch = pytest.importorskip("torch")
nn = torch.nn

SHAPE = DecoderShape(
    layers=3,
    hidden=64,
    heads=4,
    kv_heads=4,
    head_dim=16,
    ffn=176,
    vocab=640,
    tied_embeddings=False,
)
SEQ_LEN = 40


def facts_of(model: Any) -> Any:
    from paceline.runtime.measure_module import measure

    return measure(model, SEQ_LEN)


def built_in() -> Any:
    from paceline.runtime.decoder import Decoder

    with torch.device("meta"):
        return Decoder(SHAPE, SEQ_LEN)


def test_flops_and_saved_bytes_equal_the_counts_of_the_built_in_decoder():
    facts = facts_of(built_in())
    counted = profile_decoder(SHAPE, SEQ_LEN)
    measured = profile_module(facts)
    assert measured.num_parameters == counted.num_parameters
    assert measured.forward_flops_per_sample == counted.forward_flops_per_sample
    (block,) = facts.blocks
    saved = saved_bytes(counted.blocks[0], runtime_kernels("fp32", fused_norm=False), SEQ_LEN)
    assert block.count == 3
    assert block.saved_bytes == pytest.approx(SEQ_LEN * (saved.tensor + saved.sequence), rel=0.05)


class Stack(nn.Module):
    """Blocks of two widths, over an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (32, 32, 32, 96)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, size), nn.GELU(), nn.Linear(size, 16)) for size in sizes
        )

    def example_inputs(self, batch: int) -> Any:
        return torch.zeros(batch, 5, 16)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_of_different_sizes_are_kinds_of_their_own():
    with torch.device("meta"):
        model = Stack()
    facts = facts_of(model)
    assert facts.unknown_because is None
    assert [(each.count, each.forward_flops) for each in facts.blocks] == [
        (3, 2.0 * 5 * 2 * 16 * 32),
        (1, 2.0 * 5 * 2 * 16 * 96),
    ]
    # Input of the first linear, input of GELU and its output.
    assert facts.blocks[0].saved_bytes == 4 * 5 * (16 + 2 * 32)


class Peeking(nn.Module):
    """Looks at a value, which a pretend tensor has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, ids: Any) -> Any:
        return self.inner(ids.float()[:, :4]) if ids.sum().item() > 0 else ids


def test_a_module_that_looks_at_values_keeps_its_parameters_and_says_why():
    with torch.device("meta"):
        facts = facts_of(Peeking())
    assert facts.num_parameters == 20
    assert facts.unknown_because is not None
    assert facts.unknown_because.startswith("the model could not be run on example token ids (")
    assert "give it a method example_inputs(batch)" in facts.unknown_because
    profile = profile_module(facts)
    assert profile.forward_flops_per_sample is None
    assert "FLOPs and activations are not known" in profile.assumed[0]


def test_a_block_used_twice_counts_its_parameters_once():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            one = nn.Linear(8, 8)
            self.blocks = nn.ModuleList([one, nn.Linear(8, 8)])
            self.again = nn.ModuleList([one, one])

        def forward(self, ids: Any) -> Any:
            return ids

    with torch.device("meta"):
        facts = facts_of(Shared())
    assert facts.num_parameters == 144
    assert sum(each.count * each.num_parameters for each in facts.blocks) <= 144


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_model_of_a_known_family_needs_no_run():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4)
    with torch.device("meta"):
        facts = facts_of(transformers.GPT2LMHeadModel(config))
    assert facts.blocks == ()
    profile = profile_module(facts, SEQ_LEN)
    assert profile.num_parameters == facts.num_parameters
    assert profile.blocks[0].heads == 4


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_model_with_another_head_is_measured_and_says_so():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4, num_labels=5)
    with torch.device("meta"):
        facts = facts_of(transformers.GPT2ForTokenClassification(config))
    assert facts.unknown_because is None
    profile = profile_module(facts, SEQ_LEN)
    assert profile.num_parameters == facts.num_parameters
    assert profile.num_blocks == 3
    assert "parameters, the module has" in profile.assumed[0]


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_model_of_an_unknown_family_is_measured():
    transformers = pytest.importorskip("transformers")
    config = transformers.StableLmConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    with torch.device("meta"):
        facts = facts_of(transformers.StableLmForCausalLM(config))
    assert facts.unknown_because is None
    profile = profile_module(facts, SEQ_LEN)
    assert profile.num_parameters == facts.num_parameters
    flops = profile.forward_flops_per_sample
    matrices = 3 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 99
    assert flops is not None
    assert flops >= 2 * matrices * SEQ_LEN
    assert "known are" in profile.assumed[0]


@pytest.mark.filterwarnings("ignore")
def test_experts_whose_kernel_is_there_in_bfloat16_only_are_measured_all_the_same():
    transformers = pytest.importorskip("transformers")
    config = transformers.OlmoeConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    with torch.device("meta"):
        facts = facts_of(transformers.OlmoeForCausalLM(config))
    profile = profile_module(facts, SEQ_LEN)
    assert profile.num_parameters == facts.num_parameters
    (block,) = facts.blocks
    used = 4 * 32 * 32 + 32 * 8 + 2 * 3 * 32 * 16
    assert block.forward_flops == pytest.approx(2 * SEQ_LEN * used, rel=0.5)
    assert block.forward_flops >= 2 * SEQ_LEN * used
    assert block.saved_bytes is not None
    assert block.saved_bytes > 4 * SEQ_LEN * 2 * (32 + 3 * 16)  # inputs and products of experts


def job(folder: Path, source: str) -> Job:
    (folder / "mine.py").write_text(source)
    text = "model: {factory: 'mine:build'}\nprogram: 'mine:train'\ndata: {seq_len: 40}\n"
    text += "train: {global_batch: 1, steps: 1}\n"
    return parse_job(text, source="job.yaml", folder=folder)


def test_the_helper_process_measures_a_factory(tmp_path: Path):
    asked = job(
        tmp_path,
        "import torch\n"
        "print('noise')\n"
        "def build():\n"
        "    return torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))\n",
    )
    profile = resolve_profile(asked, measure_factory(asked))
    assert profile.num_parameters == 50 * 8 + 8 * 50 + 50
    assert profile.forward_flops_per_sample == 2 * 40 * 8 * 50


@pytest.mark.slow  # a factory that raises is told of too, in `tests/bench/test_bench.py`
def test_a_factory_that_ends_the_program_is_told_of(tmp_path: Path):
    (tmp_path / "quits.py").write_text("import sys\ndef make():\n    sys.exit(0)\n")
    with pytest.raises(JobError, match="ended the program before it returned a module"):
        measure_factory(job_in(tmp_path, "quits:make"))


def test_a_module_without_parameters_is_refused(tmp_path: Path):
    (tmp_path / "empty.py").write_text("from torch import nn\nmake = nn.Sequential\n")
    with pytest.raises(JobError, match="no parameters"):
        measure_factory(job_in(tmp_path, "empty:make"))


def job_in(folder: Path, factory: str) -> Job:
    text = (
        f"model: {{factory: '{factory}'}}\nprogram: own:train\n"
        "data: {path: x}\ntrain: {global_batch: 8, steps: 9}\n"
    )
    return parse_job(text, source="job.yaml", folder=folder)


class Vectors(nn.Linear):
    """Takes vectors, which token ids are none of, and says so at length."""

    def forward(self, x: Any) -> Any:
        if x.dtype == torch.int64:
            raise RuntimeError("a and b must have same reduction dim, but got " + "[1, 2] " * 50)
        return super().forward(x)


def test_a_module_that_takes_no_tokens_is_told_how_to_say_its_input_and_the_exception_is_short():
    with torch.device("meta"):
        facts = facts_of(Vectors(4, 4))
    because = facts.unknown_because
    assert because is not None
    assert "(RuntimeError: a and b must have same reduction dim, but got [1, 2]" in because
    assert "...); if it takes another input, give it a method example_inputs(batch)" in because
    assert len(because) < 300


def test_example_inputs_that_do_not_fit_are_named():
    with torch.device("meta"):
        model = Vectors(4, 4)
    model.example_inputs = lambda batch: torch.zeros(batch, 5)  # type: ignore[assignment]
    because = facts_of(model).unknown_because
    assert because is not None
    assert because.startswith("the model could not be run on what its example_inputs(batch) ret")
