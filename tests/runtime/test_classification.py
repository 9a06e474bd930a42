"""Classification gives transformers' own loss, also of texts that are packed into one sample."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.runtime.dpo_golden import CONFIG, fill, save_tokenizer
from tests.runtime.tensor_models import compute_in_float64

from paceline.job import Job, parse_job
from paceline.parallel.layout import Layout
from paceline.prepare import prepared
from paceline.profile.resolve import resolve_config
from paceline.runtime import strategy
from paceline.runtime.data import load_prepared
from paceline.runtime.huggingface import build_hf

LABELS = ["bad", "good", "fair"]
ROWS = [
    {"text": "a fine day", "label": "good"},
    {"text": "it rained and rained", "label": "bad"},
    {"text": "neither here nor there", "label": 2},
    {"text": "no", "label": 0},
]
FAMILIES = {
    "llama": CONFIG,
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": 264,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
}


def job_in(folder: Path, config: dict[str, Any]) -> Job:
    save_tokenizer(folder / "tokenizer")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "config.json").write_text(json.dumps(config))
    text = f"""
model: {{hf_config: config.json, tokenizer: tokenizer}}
train: {{global_batch: 2, steps: 1}}
data: {{kind: classification, labels: {LABELS}, path: rows.jsonl, seq_len: 48, held_out: 0}}
"""
    return parse_job(text, source="job.yaml", folder=folder)


def build(job: Job) -> torch.nn.Module:
    asked = resolve_config(job)
    assert asked is not None
    model = build_hf(asked.config, classifies=True)
    fill(model, 1)
    return model


def step_of(
    rank: int, world: int, folder: Path, prepared_at: Path, name: str, weights: list[float] | None
) -> tuple[float, ...]:
    compute_in_float64()
    layout = Layout(data=world, sharding="none", micro_batch=1, accumulation=2 // world)
    meshes = strategy.make_meshes(layout, "cpu")
    model = strategy.apply(
        build(job_in(folder, FAMILIES[name])).double(), layout, meshes, precision="fp32"
    )
    data, _ = load_prepared(prepared_at)
    assert data.num_samples == 2  # four texts, packed
    losses = strategy.forward_backward(
        model,
        meshes,
        [data.samples([n]) for n in range(rank, 2, world)],
        precision="fp32",
        loss_of=strategy.LabelLoss(weights),
        targets_per_sample=data.targets_per_sample,
    )
    norm = float(strategy.gradient_norm(model, meshes))
    sums = torch.stack(losses.sums)
    if world > 1:
        torch.distributed.all_reduce(sums)
    loss_sum, total, num_right, num_judged = sums.tolist()
    assert num_judged == 4
    return loss_sum / total, norm * losses.expected_targets / total, num_right


def theirs(job: Job, weights: list[float] | None = None) -> tuple[float, ...]:
    """transformers' own loss of the padded batch, or torch's weighted one of its logits."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    asked = resolve_config(job)
    assert asked is not None
    fields = {key: value for key, value in asked.config.items() if key != "model_type"}
    config = AutoConfig.for_model(str(asked.config["model_type"]), **fields)
    model = AutoModelForSequenceClassification.from_config(config)
    fill(model, 1)
    model.double()
    tokenizer = AutoTokenizer.from_pretrained(str(job.folder / "tokenizer"))
    model.config.pad_token_id = tokenizer.pad_token_id
    batch = tokenizer([row["text"] for row in ROWS], return_tensors="pt", padding=True)
    labels = torch.tensor([1, 0, 2, 0])
    found = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
    )
    loss = found.loss
    if weights is not None:
        loss = torch.nn.CrossEntropyLoss(torch.tensor(weights).double())(found.logits, labels)
    loss.backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    right = (found.logits.argmax(-1) == labels).sum()
    return float(loss.detach()), float(torch.stack(norms).norm()), float(right)


@pytest.mark.ranks
@pytest.mark.parametrize("name", list(FAMILIES))
def test_loss_gradient_and_accuracy_are_those_of_transformers(tmp_path, name):
    job = job_in(tmp_path, FAMILIES[name])
    (ours,) = run_ranks(step_of, 1, tmp_path, prepared(job), name, None)
    assert ours == pytest.approx(theirs(job), rel=5e-6)  # their norms are in float32


@pytest.mark.ranks
def test_s0_24_weighted_classes_give_torchs_loss_of_the_global_batch_on_any_number_of_ranks(
    tmp_path,
):
    job, weights = job_in(tmp_path, CONFIG), [1.0, 1.5, 4.0]  # 2 and 6.5 with a text of each sample
    (one,) = run_ranks(step_of, 1, tmp_path, prepared(job), "llama", weights)
    for each in run_ranks(step_of, 2, tmp_path, prepared(job), "llama", weights):
        assert each == pytest.approx(one, rel=1e-12)
    assert one == pytest.approx(theirs(job, weights), rel=5e-6)
    assert one[0] != pytest.approx(theirs(job)[0], rel=1e-3)
