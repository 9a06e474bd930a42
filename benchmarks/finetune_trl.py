"""The fine-tuning example beside TRL's SFTTrainer: evaluation losses before and after, by seed.

    ./run finetune                                   # makes the model's folder, once
    .venv/bin/python benchmarks/finetune_trl.py --python FOLDER/bin/python [--seeds 3] [--steps 30]

FOLDER is a virtual environment with trl, peft and datasets. Both train the same model on the same
packed conversations in the same order: our samples are given to SFTTrainer as tokens and labels,
with the documents' lengths, which its padding-free collator keeps apart. Same adapter (rank 16
beside every linear of the blocks; A drawn from peft's distribution, by each side's own generator),
learning rates step by step, AdamW, clipping and float32. Ours: 2 ranks of one sample. TRL: one
process, batches of 2.

The evaluation losses of both are computed by one function here, over the same held-out samples,
with peft's model: ours is exported first. Prints each seed's losses, and the difference of the
means after training with its 95 % interval (Welch). About 6 minutes a seed on 2 cores with 30
steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import util
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "finetune"
IGNORED = -100
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Train both, and print the comparison."""
    if sys.argv[1:2] == ["--theirs"]:
        theirs(json.loads(Path(sys.argv[2]).read_text()))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", type=Path, required=True, help="that has trl, peft, datasets")
    parser.add_argument("--model", type=Path, default=EXAMPLE / "work" / "model")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--held-out", type=int, default=32, help="samples of the evaluation")
    asked = parser.parse_args()
    from figures import machine

    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_scene(folder, asked.model.resolve(), asked.steps)
        runs = [train_ours(folder, seed) for seed in range(asked.seeds)]
        request = make_request(folder, asked, runs)
        (folder / "request.json").write_text(json.dumps(request))
        command = [asked.python.absolute(), __file__, "--theirs", folder / "request.json"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run(command, check=True, env=environment)
        show(json.loads((folder / "answer.json").read_text()), request)


def write_scene(folder: Path, model: Path, steps: int) -> None:
    """The example's conversations and job, with another number of steps and no kill."""
    import yaml

    spec = util.spec_from_file_location("prepare", EXAMPLE / "prepare.py")
    assert spec is not None
    assert spec.loader is not None
    prepare = util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    prepare.FOLDER = folder / "work"
    prepare.model_file = lambda: model
    prepare.main()
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["model"]["pretrained"] = str(model)
    job["train"] |= {"steps": steps, "precision": "fp32"}
    job["checkpoint"]["every"] = job["evaluate"]["every"] = steps
    del job["drill"]
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


def train_ours(folder: Path, seed: int) -> dict[str, Any]:
    """Curve and exported adapter of a run."""
    from paceline.record.metrics import read_metrics

    out = f"run-{seed}"
    paceline = [sys.executable, "-m", "paceline"]
    run = [*paceline, "run", "job.yaml", "--out", out, "--no-report", "--set", f"train.seed={seed}"]
    subprocess.run(run, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    convert = [*paceline, "checkpoint", "convert", out, f"adapter-{seed}", "--to", "safetensors"]
    subprocess.run(convert, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = read_metrics(folder / out / "metrics.jsonl")
    print(f"ours, seed {seed}: trained", flush=True)
    return {
        "seed": seed,
        "adapter": str(folder / f"adapter-{seed}"),
        "losses": [line.loss for line in lines],
        "rates": [line.learning_rate for line in lines],
    }


def make_request(
    folder: Path, asked: argparse.Namespace, runs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Everything that TRL's side needs: tokens, labels and lengths of the samples in order."""
    from paceline.job import load_job
    from paceline.prepare import Prepared, find_data
    from paceline.runtime.data import load_prepared
    from paceline.runtime.sampling import sample_ids

    job = load_job(folder / "job.yaml")
    data = find_data(job)
    assert isinstance(data, Prepared)
    train, held_out = load_prepared(data.folder)
    assert held_out is not None
    batch = job.spec.train.global_batch
    ids = {
        run["seed"]: [
            int(sample)
            for step in range(asked.steps)
            for sample in sample_ids(
                step, range(batch), seed=run["seed"], global_batch=batch, num_samples=train.order
            )
        ]
        for run in runs
    }
    num_held = min(asked.held_out, held_out.num_samples)
    return {
        "folder": str(folder),
        "model": str(asked.model.resolve()),
        "batch": batch,
        "steps": asked.steps,
        "samples": {seed: rows_of(train, own) for seed, own in ids.items()},
        "held_out": rows_of(held_out, range(num_held)),
        "runs": runs,
        "rank": job.spec.train.adapter.rank,  # type: ignore[union-attr]
        "train": {
            "betas": job.spec.train.betas,
            "eps": job.spec.train.eps,
            "weight_decay": job.spec.train.weight_decay,
            "clip": job.spec.train.clip_norm,
        },
    }


def rows_of(data: Any, ids: Any) -> list[dict[str, list[int]]]:
    """Samples as transformers takes them: labels at the token itself, which the model shifts."""
    rows = []
    for inputs, targets, ends in zip(
        *(each.tolist() for each in data.samples(list(ids))), strict=True
    ):
        tokens: list[int] = []
        labels: list[int] = []
        lengths: list[int] = []
        for start, stop in pairwise([0, *sorted(set(ends))]):
            own = targets[start:stop]
            if all(target == IGNORED for target in own):
                continue  # what fills a sample up
            last = [own[-1]] if own[-1] != IGNORED else []
            tokens += inputs[start:stop] + last
            labels += [IGNORED, *(own if last else own[:-1])]
            lengths.append(stop - start + len(last))
        rows.append({"input_ids": tokens, "labels": labels, "seq_lengths": lengths})
    return rows


def theirs(request: dict[str, Any]) -> None:
    """TRL's runs, and both sides' evaluation losses."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)

    answer: dict[str, Any] = {"before": loss_of(base(), request["held_out"]), "sides": {}}
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "TRL": []}
    for run in request["runs"]:
        model = PeftModel.from_pretrained(base(), run["adapter"])
        after = loss_of(model, request["held_out"])
        sides["ours"].append({"losses": run["losses"], "after": after})
    for run in request["runs"]:
        torch.manual_seed(run["seed"])
        rank = request["rank"]
        wanted = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=TARGETS, task_type="CAUSAL_LM"
        )
        model = get_peft_model(base(), wanted)
        losses = train_theirs(model, request, run)
        after = loss_of(model, request["held_out"])
        sides["TRL"].append({"losses": losses, "after": after})
        print(f"TRL, seed {run['seed']}: trained", flush=True)
    answer["sides"] = sides
    (Path(request["folder"]) / "answer.json").write_text(json.dumps(answer))


def train_theirs(model: Any, request: dict[str, Any], run: dict[str, Any]) -> list[float]:
    """SFTTrainer's training losses, step by step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    wanted, rates = request["train"], run["rates"]
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=1.0,
        betas=tuple(wanted["betas"]),
        eps=wanted["eps"],
        weight_decay=wanted["weight_decay"],
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: rates[min(done, len(rates) - 1)]
    )
    config = SFTConfig(
        output_dir=str(Path(request["folder"]) / "trl"),
        max_steps=request["steps"],
        per_device_train_batch_size=request["batch"],
        max_grad_norm=wanted["clip"],
        padding_free=True,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=run["seed"],
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(request["samples"][str(run["seed"])]),
        processing_class=AutoTokenizer.from_pretrained(request["model"]),
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def loss_of(model: Any, rows: list[dict[str, list[int]]]) -> float:
    """Mean over all targets of the samples, documents apart."""
    import torch
    import torch.nn.functional as F

    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            positions = [place for length in row["seq_lengths"] for place in range(length)]
            tokens = torch.tensor([row["input_ids"]])
            logits = model(
                input_ids=tokens, position_ids=torch.tensor([positions]), use_cache=False
            ).logits
            targets = torch.tensor(row["labels"])[1:]
            total += float(F.cross_entropy(logits[0, :-1].double(), targets, reduction="sum"))
            count += int((targets != IGNORED).sum())
    model.train()
    return total / count


def show(answer: dict[str, Any], request: dict[str, Any]) -> None:
    """Print both sides."""
    from scipy import stats

    held = len(request["held_out"])
    print(
        f"\nbefore: {answer['before']:.4f} over {held} held-out samples, {request['steps']} steps"
    )
    after = {name: [each["after"] for each in side] for name, side in answer["sides"].items()}
    for name, values in after.items():
        each = ", ".join(f"{value:.4f}" for value in values)
        print(f"{name:5} after: mean {statistics.mean(values):.4f}; by seed {each}")
    for name, side in answer["sides"].items():
        for run, each in zip(request["runs"], side, strict=True):
            losses = each["losses"]
            shown = " ".join(f"{loss:.3f}" for loss in losses[:: max(1, len(losses) // 10)])
            print(f"{name:5} seed {run['seed']} training losses: {shown}")
    if len(request["runs"]) < 2:
        print("one seed: its noise is not known")
        return
    ours, trl = after["ours"], after["TRL"]
    found = stats.ttest_ind(ours, trl, equal_var=False).confidence_interval(0.95)
    agrees = found.low <= 0 <= found.high
    difference = statistics.mean(ours) - statistics.mean(trl)
    print(
        f"ours - TRL: {difference:+.4f} ({found.low:+.4f} to {found.high:+.4f}, 95 %, n = "
        f"{len(ours)} seeds each): {'the same' if agrees else 'NOT the same'} to the seeds' noise"
    )


if __name__ == "__main__":
    main()
