"""Adapters written for peft, and merged into weights."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.tensor_models import logits_of, tiny
from tests.runtime.test_adapters import ALL, asked_of
from torch import Tensor, nn

from paceline.errors import JobError, Problem
from paceline.job import Job, parse_job
from paceline.profile import check_runnable, resolve_decoder
from paceline.profile.hf_names import from_hf_name
from paceline.record.conversion import AdapterFacts, Conversion
from paceline.runtime.checkpoint import export
from paceline.runtime.checkpoint.adapter_files import adapter_files, adapters_of, merged
from paceline.runtime.checkpoint.state_files import write_state
from paceline.runtime.initial.blueprint import Blueprint
from paceline.runtime.initial.fill import Filler
from paceline.runtime.models import make_model
from paceline.runtime.state import MODEL
from paceline.runtime.strategy.adapter.place import add_adapters

TOKENS = torch.arange(32).view(2, 16) * 5 % 67


def facts_of(kind: str) -> AdapterFacts:
    return AdapterFacts(
        rank=4, alpha=8.0, dropout=0.0, rslora=False, model_type=kind, base="the base"
    )


def trained(kind: str, targets: tuple[str, ...] = ALL, *, dora: bool = False) -> nn.Module:
    """A model whose adapters are not zero any more."""
    torch.manual_seed(0)
    model = tiny(kind)
    add_adapters(model, asked_of(model, targets, has_magnitudes=dora))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1, generator=generator)
    return model.eval()


def loads(model: nn.Module) -> dict[str, Any]:
    return {name: partial(_same, value.detach()) for name, value in model.named_parameters()}


def _same(value: Tensor) -> Tensor:
    return value


def base_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return tiny(kind).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "targets", "dora"),
    [
        ("llama", ALL, False),
        ("gpt2", ALL, False),
        ("gpt2", ("query_key_value", "attention_output"), False),
        ("llama", ALL, True),
        ("gpt2", ALL, True),
    ],
)
def test_peft_loads_what_is_written(
    kind: str, targets: tuple[str, ...], dora: bool, tmp_path: Path
):
    peft = pytest.importorskip("peft")
    model = trained(kind, targets, dora=dora)
    adapter_files(loads(model), tmp_path, facts_of(kind))
    theirs = peft.PeftModel.from_pretrained(base_of(kind), tmp_path)
    found = {name: each for name, each in theirs.named_parameters() if "lora_" in name}
    wanted = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert len(found) == len(wanted)
    for name, parameter in wanted.items():
        assert torch.equal(found[f"base_model.model.{name}.default.weight"], parameter)
    torch.testing.assert_close(
        logits_of(theirs, TOKENS), logits_of(model, TOKENS), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_merged_weights_compute_what_the_adapters_do(kind: str, dora: bool):
    model, base = trained(kind, dora=dora), base_of(kind)
    values = merged(loads(base), adapters_of(loads(model)), facts_of(kind))
    before = logits_of(base, TOKENS)
    base.load_state_dict({name: load() for name, load in values.items()}, strict=False)
    after = logits_of(base, TOKENS)
    torch.testing.assert_close(after, logits_of(model, TOKENS), rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-2


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_adapters_is_converted_merged_or_for_peft(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    model, base = trained("llama"), base_of("llama")
    base.save_pretrained(tmp_path / "base")
    values = {MODEL + name: load for name, load in loads(model).items() if "lora_" in name}
    values[f"{MODEL}frozen"] = partial(str, "what they were trained beside")
    facts = replace(facts_of("llama"), weights=(str(tmp_path / "base" / "model.safetensors"),))
    asked = Conversion(
        source=str(write_state(tmp_path / "ours", values, 1)),
        out=str(tmp_path / "peft"),
        source_form="paceline",
        form="safetensors",
        config=base.config.to_dict(),
        adapters=facts,
    )
    wanted = logits_of(model, TOKENS)
    for merge in (False, True):
        done = export.convert(replace(asked, out=str(tmp_path / f"out{merge}"), merge=merge))
        assert done.before == done.after
    merged_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "outTrue")
    beside = peft.PeftModel.from_pretrained(base_of("llama"), tmp_path / "outFalse")
    for each in (merged_model, beside):
        torch.testing.assert_close(logits_of(each, TOKENS), wanted, rtol=0, atol=1e-5)


def test_a_merged_weight_is_summed_in_float32_and_rounded_once():
    facts = AdapterFacts(
        rank=1, alpha=1.0, dropout=0.0, rslora=False, model_type="llama", base=None
    )
    weight = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
    a, b = torch.tensor([[0.003, 1.0]]), torch.tensor([[1.0]])
    values = merged(
        {"q.weight": lambda: weight}, {"q.lora_A": lambda: a, "q.lora_B": lambda: b}, facts
    )
    assert torch.equal(values["q.weight"](), (weight.float() + b @ a).bfloat16())


def test_the_built_in_decoders_adapters_have_the_names_of_transformers():
    model = trained("own")
    found = adapters_of(loads(model))
    assert "model.layers.1.self_attn.o_proj.lora_B" in found
    assert {str(from_hf_name(name)) for name in found} == {
        name for name, each in model.named_parameters() if each.requires_grad
    }


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def start_job(folder: Path, **changes: Any) -> Job:
    """A job that continues from an adapter in `folder/start`, its weights in `folder/base`."""
    adapter = {"rank": 4, "targets": "all", "start": "start", **changes}
    text = json.dumps(
        {
            "model": {"pretrained": "base"},
            "data": {"path": "x", "seq_len": 16},
            "train": {"global_batch": 1, "steps": 1, "adapter": adapter},
        }
    )
    return parse_job(text, source="job.yaml", folder=folder)


def problems_of(job: Job) -> list[Problem]:
    """What keeps the job from being run; it has no tokenizer, which is none of ours."""
    return [each for each in check_runnable(job) if "adapter" in each.where]


def write_start(folder: Path, *, dora: bool) -> nn.Module:
    """Weights and an adapter beside them, as transformers and peft save them."""
    peft = pytest.importorskip("peft")
    base_of("llama").save_pretrained(folder / "base")
    kind = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=dora)
    torch.manual_seed(3)
    theirs = peft.get_peft_model(base_of("llama"), kind)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(folder / "start")
    return theirs.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_that_peft_saved_is_trained_on(dora: bool, tmp_path: Path, alone: None):
    theirs = write_start(tmp_path, dora=dora)
    job = start_job(tmp_path, kind="dora" if dora else "lora")
    assert problems_of(job) == []
    make = make_model(job, resolve_decoder(job))
    blueprint = Blueprint(make, 1)
    model = blueprint.take_model()
    Filler(blueprint, torch.device("cpu"), weights=make.weights_of(model))(model)
    torch.testing.assert_close(
        logits_of(model.eval(), TOKENS), logits_of(theirs, TOKENS), rtol=0, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rank": 8}, "asks for rank 8, and the adapter in"),
        ({"alpha": 4}, "asks for alpha 4"),
        ({"kind": "dora"}, "asks for kind dora"),
        ({"targets": "attention"}, "parameters, and the one asked for"),
    ],
)
def test_another_adapter_than_is_asked_for_is_refused(
    changes: dict[str, Any], what: str, tmp_path: Path
):
    write_start(tmp_path, dora=False)
    problems = problems_of(start_job(tmp_path, **changes))
    assert {each.code for each in problems} == {"M013"}
    assert what in problems[0].what


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_not_continued_from_beside_drawn_weights(tmp_path: Path):
    write_start(tmp_path, dora=False)
    job = start_job(tmp_path)
    model = replace(job.spec.model, weights="drawn")
    drawn = replace(job, spec=replace(job.spec, model=model))
    (problem,) = problems_of(drawn)
    assert "would be drawn" in problem.what


def test_a_folder_without_an_adapter_is_named(tmp_path: Path):
    base_of("llama").save_pretrained(tmp_path / "base")
    with pytest.raises(JobError, match="M012") as caught:
        list(check_runnable(start_job(tmp_path)))
    assert "is no adapter of peft" in str(caught.value)
