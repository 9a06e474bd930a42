"""What an accelerator leaves an engine, the same in all of them."""

import subprocess

import pytest
from tests.render.plans import rendered

from paceline.render import RenderError

MACS = {"accelerator": "M3-Ultra", "nodes": 4, "per_node": 1, "network": "auto"}
ONE_MAC = {"accelerator": "M4-Max", "nodes": 1, "per_node": 1, "network": "auto"}
OTHERS = ("TPU-v5p", "Trainium2", "Gaudi2")
ENGINES = ("accelerate", "deepspeed", "megatron", "megatron-bridge", "torchtitan", "tensorflow")


@pytest.mark.parametrize("cluster", [MACS, ONE_MAC], ids=["four", "one"])
@pytest.mark.parametrize("engine", [*ENGINES, "torchrun", "kubernetes", "ray"])
def test_macs_are_refused_and_sent_to_mlx(engine, cluster):
    with pytest.raises(RenderError, match=f"ranks on {cluster['accelerator']}") as refused:
        rendered(engine, cluster=cluster)
    fixes = [problem.fix for problem in refused.value.problems]
    assert [fix for fix in fixes if "--for mlx" in fix]


@pytest.mark.parametrize("accelerator", OTHERS)
@pytest.mark.parametrize("engine", ENGINES)
def test_accelerators_that_an_engine_was_not_tried_on_are_refused(engine, accelerator):
    with pytest.raises(RenderError, match=f"ranks on {accelerator}") as refused:
        rendered(engine, cluster={"accelerator": accelerator})
    (problem,) = (each for each in refused.value.problems if "ranks on" in each.what)
    assert f"trains on {accelerator}: bring your own script" in problem.fix


@pytest.mark.parametrize("accelerator", OTHERS)
@pytest.mark.parametrize(("engine", "start"), [("torchrun", "launch.sh"), ("slurm", "job.sbatch")])
def test_where_no_example_program_trains_none_is_written_and_ones_own_is_asked_for(
    engine, start, accelerator
):
    found = rendered(engine, cluster={"accelerator": accelerator})
    (gap,) = found.gaps
    assert gap.what.startswith(f"{accelerator} through ")
    assert set(found.files) == {start, "train.json"}
    (line,) = (line for line in found.files[start].splitlines() if "TRAIN_SCRIPT:?" in line)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"set it to your own program for {accelerator}" in done.stderr


@pytest.mark.parametrize("layout", [{"sharding": "none"}, {"sharding": "full"}])
def test_accelerate_refuses_them_whichever_way_it_shards(layout):
    with pytest.raises(RenderError, match="ranks on M3-Ultra"):
        rendered("accelerate", cluster=MACS, layout=layout)


@pytest.mark.parametrize("engine", ["torchtitan", "tensorflow"])
@pytest.mark.parametrize(("accelerator", "wider"), [("V100-32", "fp32"), ("H100-SXM", "bf16")])
def test_the_fix_of_a_precision_is_one_that_the_accelerator_has(engine, accelerator, wider):
    cluster = {"accelerator": accelerator}
    narrow = {"precision": "fp16"}
    with pytest.raises(RenderError, match="precision fp16") as refused:
        rendered(engine, cluster=cluster, train=narrow, layout={"sharding": "none"})
    assert f"train.precision: {wider}" in [problem.fix for problem in refused.value.problems]


@pytest.mark.parametrize(("accelerator", "wider"), [("V100-32", "fp32"), ("H100-SXM", "bf16")])
def test_torchruns_fix_is_one_too(accelerator, wider):
    found = rendered("torchrun", cluster={"accelerator": accelerator}, train={"precision": "fp16"})
    assert f"train.precision: {wider}" in [gap.fix for gap in found.gaps]
