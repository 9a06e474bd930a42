"""What is rented, how it stops, and that no file holds a secret."""

import ast
import json
import pathlib
import shutil
from typing import Any

import pytest
import yaml
from tests.render.plans import planned, rendered

from paceline.errors import JobError
from paceline.render import Rendered, RenderError
from paceline.render.cloud import has_region, limits_of
from paceline.render.modal import GPUS as MODAL_GPUS
from paceline.render.runpod import GPUS as RUNPOD_GPUS
from paceline.render.vertex import GPUS as VERTEX_GPUS
from paceline.render.vertex import MACHINES

CLOUDS = ("sky", "modal", "runpod", "lambda", "vertex")
PLAIN: dict[str, Any] = {"pipeline": 1, "tensor": 1, "context": 1, "sharding": "full"}
BUCKET = {"storage": "gs://bucket/runs"}


def cloud_files(engine: str, nodes: int = 1, **changes: Any) -> Rendered:
    given: dict[str, Any] = {"cluster": {"nodes": nodes}, "layout": PLAIN, "cloud": BUCKET}
    for name, section in changes.items():
        given[name] = given.get(name, {}) | section
    return rendered(engine, **given)


@pytest.mark.parametrize("engine", CLOUDS)
def test_s0_16_each_cloud_has_its_files(engine, check_golden):
    nodes = 2 if engine in ("sky", "vertex") else 1
    found = cloud_files(engine, nodes, cloud={"secrets": ["HF_TOKEN"]}, plan={"budget": 100})
    check_golden(f"{engine}/{nodes}-nodes", found)


@pytest.mark.parametrize("engine", CLOUDS)
def test_s0_16_every_rented_machine_has_a_guard_with_time_idleness_and_money(engine):
    changes = {"cloud": {"idle_stop": "7m", "max_run": "2h"}, "plan": {"budget": 1000}}
    text = "\n".join(cloud_files(engine, **changes).files.values())
    text = text.replace("'", "").replace(",", "")  # Modal has the words as a list
    assert "--max-run-s 7200 --idle-s 420 --per-hour-usd" in text
    assert "--budget-usd 1000" in text
    assert "Expected: $" in text
    assert "at the most" in text


@pytest.mark.parametrize("engine", CLOUDS)
def test_s0_16_secrets_are_names_alone(engine, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "do-not-write-this-down")
    found = cloud_files(engine, cloud={"secrets": ["MY_TOKEN"]})
    assert "MY_TOKEN=\n" in found.files[".env.example"]
    assert found.files[".gitignore"].splitlines()[:3] == [".env", ".env.*", "!.env.example"]
    assert not [name for name, text in found.files.items() if "do-not-write" in text]
    if engine == "sky":
        assert yaml.safe_load(found.files["task.yaml"])["secrets"] == {"MY_TOKEN": None}


@pytest.mark.parametrize("engine", CLOUDS)
def test_files_of_this_machine_are_said_to_be_missing(engine):
    found = cloud_files(engine, data={"path": "corpus/*.txt", "corpus": None})
    assert "the files of data.path, corpus/*.txt" in [gap.what for gap in found.gaps]


def test_a_budget_shortens_the_longest_run_to_what_it_pays_for():
    plan, job = planned(cluster={"nodes": 1}, layout=PLAIN, plan={"budget": 5})
    limits = limits_of(plan, job, ("lambda",))
    assert limits.per_hour_usd == 31.92  # gpu_8x_h100_sxm5 in the price list
    assert limits.max_run_s == pytest.approx(5 / 31.92 * 3600)


def test_more_than_the_budget_is_refused_before_anything_is_written():
    long = {"steps": 2_000_000, "global_batch": 64}
    with pytest.raises(JobError, match="H041: the run is expected to cost"):
        cloud_files("lambda", train=long, plan={"budget": 5, "provider": "lambda"})


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        ("modal", "H040: Modal has no MI300X"),
        ("runpod", "H040: RunPod has no TPU|H040: RunPod has no MI325X"),
        ("lambda", "H040: Lambda has no machine with 8 x MI325X"),
        ("vertex", "H040: Vertex AI has no MI300X"),
        ("sky", "H040: no cloud of SkyPilot whose prices are known here has machine with"),
    ],
)
def test_an_accelerator_that_a_cloud_lacks_is_refused_with_what_it_has(engine, what):
    kind = "MI300X" if engine in ("modal", "vertex") else "MI325X"
    with pytest.raises(JobError, match=what) as error:
        cloud_files(engine, cluster={"accelerator": kind})
    assert "fix:" in str(error.value)


def test_a_tpu_is_no_machine_that_skypilots_task_sets_up():
    changes = {"cluster": {"accelerator": "TPU-v5p", "nodes": 1, "per_node": 4}}
    with pytest.raises(RenderError, match="H002: sky cannot express ranks on TPU-v5p") as error:
        rendered("sky", layout=PLAIN, **changes)
    assert "--for torchrun" in str(error.value)


def test_a_count_that_no_machine_has_is_refused_with_those_it_has():
    with pytest.raises(JobError, match="Vertex AI rents no machine with 2 H200") as error:
        cloud_files("vertex", cluster={"accelerator": "H200", "per_node": 2})
    assert "set cluster.per_node to 8" in str(error.value)


@pytest.mark.parametrize("engine", ["modal", "runpod", "lambda"])
def test_several_nodes_are_refused_where_nothing_joins_them(engine):
    with pytest.raises(RenderError, match="2 nodes"):
        cloud_files(engine, nodes=2)


def test_spot_takes_only_clouds_with_a_spot_price_and_recovers():
    found = cloud_files("sky", plan={"spot": True}, cloud={"storage": "s3://bucket"})
    resources = yaml.safe_load(found.files["task.yaml"])["resources"]
    assert resources["use_spot"] is True
    assert resources["job_recovery"]["strategy"] == "EAGER_NEXT_REGION"
    assert "lambda" not in [each["infra"] for each in resources["any_of"]]
    assert "sky jobs launch" in found.files["submit.sh"]


def test_checkpoints_without_a_bucket_are_said_to_go_with_the_machines():
    for spot in (False, True):
        (gap,) = rendered("sky", layout=PLAIN, plan={"spot": spot}).gaps
        assert gap.what == "checkpoints that outlive the machines"
        assert ("from its beginning" in (gap.nearest or "")) == spot


def test_a_provider_that_is_asked_for_is_the_only_one():
    found = cloud_files("sky", plan={"provider": "lambda"})
    resources = yaml.safe_load(found.files["task.yaml"])["resources"]
    assert resources["infra"] == "lambda"
    assert resources["accelerators"] == "H100:8"


def test_vertex_needs_a_bucket_and_joins_its_pools():
    with pytest.raises(RenderError, match="where the job's files and checkpoints are"):
        rendered("vertex", layout=PLAIN)
    spec = yaml.safe_load(
        cloud_files("vertex", nodes=3, train={"global_batch": 96}).files["job.yaml"]
    )
    assert [pool["replicaCount"] for pool in spec["workerPoolSpecs"]] == [1, 2]
    assert "CLUSTER_SPEC" in spec["workerPoolSpecs"][1]["containerSpec"]["command"][2]


def test_modals_app_is_python_with_the_limits(monkeypatch):
    text = cloud_files("modal", cloud={"secrets": ["HF_TOKEN"], "max_run": "3d"}).files["app.py"]
    ast.parse(text)
    assert "timeout=86400," in text
    assert 'gpu="H100!:8"' in text
    assert "modal.Secret.from_local_environ(['HF_TOKEN'])" in text


def test_a_retry_in_the_same_container_of_modal_unpacks_again(tmp_path):
    tree = ast.parse(cloud_files("modal").files["app.py"])
    wanted = [each for each in tree.body if getattr(each, "name", None) == "unpack"]
    scope: dict[str, Any] = {"pathlib": pathlib, "shutil": shutil}
    exec(compile(ast.Module(wanted, []), "app.py", "exec"), scope)
    job, work, kept = (tmp_path / name for name in ("job", "work", "kept"))
    for folder in (job, job / "checkpoints", kept):
        folder.mkdir()
    (job / "train.py").write_text("new")
    for _ in range(2):
        scope["unpack"](job, work, kept)
        (work / "checkpoints" / "step-1").write_text("kept")
        (work / "left").write_text("by the attempt before")
    scope["unpack"](job, work, kept)
    assert (kept / "step-1").exists()
    assert sorted(each.name for each in work.iterdir()) == ["checkpoints", "train.py"]


def test_a_budget_without_a_price_is_refused():
    with pytest.raises(JobError) as caught:
        cloud_files(
            "vertex",
            cluster={"accelerator": "V100-16"},
            train={"precision": "fp16"},
            plan={"budget": 3},
        )
    assert caught.value.problems[0].code == "H044"


REGIONS = {
    # github.com/skypilot-org/skypilot-catalog, catalogs/v8: aws/images.csv of commit 0e45ae8,
    # lambda/vms.csv of 0f40703, nebius/vms.csv of 0082b04, the first two of oci/vms.csv of 0588751.
    "aws": (
        "af-south-1 ap-east-1 ap-northeast-1 ap-northeast-2 ap-northeast-3 ap-south-1 ap-south-2 "
        "ap-southeast-1 ap-southeast-2 ap-southeast-3 ca-central-1 eu-central-1 eu-central-2 "
        "eu-north-1 eu-south-1 eu-south-2 eu-west-1 eu-west-2 eu-west-3 me-central-1 me-south-1 "
        "us-east-1 us-east-2 us-west-1 us-west-2"
    ),
    "lambda": (
        "europe-central-1 asia-south-1 me-west-1 europe-south-1 asia-northeast-1 asia-northeast-2 "
        "australia-east-1 us-east-1 us-east-2 us-east-3 us-west-2 us-west-1 us-south-1 us-south-2 "
        "us-south-3 us-west-3 us-midwest-1"
    ),
    "nebius": "eu-north1 eu-west1 us-central1",
    "oci": "af-casablanca-1 af-johannesburg-1",
}


@pytest.mark.parametrize(
    ("provider", "region"),
    [(provider, region) for provider, names in REGIONS.items() for region in names.split()],
)
def test_a_region_of_a_published_list_has_its_providers_form(provider, region):
    assert has_region(provider, region)


def test_sky_takes_only_clouds_that_have_the_region():
    task = yaml.safe_load(cloud_files("sky", cloud={"region": "us-east-1"}).files["task.yaml"])
    asked = task["resources"]
    places = {each["infra"] for each in asked.get("any_of", [asked])}
    assert places <= {"aws/us-east-1", "lambda/us-east-1"}
    assert "aws/us-east-1" in places
    task = yaml.safe_load(cloud_files("sky", cloud={"region": "eastus"}).files["task.yaml"])
    assert task["resources"]["infra"] == "azure/eastus"


@pytest.mark.parametrize("provider", [None, "gcp"])
def test_a_region_that_no_cloud_has_is_refused(provider):
    with pytest.raises(JobError) as caught:
        cloud_files("sky", cloud={"region": "pwn"}, plan={"provider": provider})
    assert caught.value.problems[0].code == "H040"
    assert "pwn" in caught.value.problems[0].what


@pytest.mark.parametrize("engine", ["lambda", "runpod", "vertex", "modal"])
def test_a_region_that_is_spelled_another_way_is_said(engine):
    said = [gap.what for gap in cloud_files(engine, cloud={"region": "pwn"}).gaps]
    assert "the region pwn" in said


@pytest.mark.parametrize(("engine", "name"), [("runpod", "start.sh"), ("vertex", "job.yaml")])
def test_an_image_with_an_older_torch_gets_the_one_that_was_tested(engine, name):
    assert "pip install --quiet 'torch>=2.11,<2.14'" in start_of(cloud_files(engine), name)
    own = cloud_files(engine, cloud={"image": "mine:1"})
    assert "pip install" not in start_of(own, name)


def start_of(found: Rendered, name: str) -> str:
    if name == "start.sh":
        return found.files[name]
    pools = yaml.safe_load(found.files[name])["workerPoolSpecs"]
    return str(pools[0]["containerSpec"]["command"][2])


def test_a_refusal_says_which_key_asks_for_it():
    with pytest.raises(RenderError) as caught:
        cloud_files("vertex", cloud={"storage": None})
    assert "cloud.storage" in caught.value.problems[0].where


def test_runpods_pod_names_its_gpu_and_asks_for_nothing_open():
    pod = json.loads(cloud_files("runpod").files["pod.json"])
    assert pod["gpu_type_id"] == "NVIDIA H100 80GB HBM3"
    assert pod["support_public_ip"] is False
    assert "trap 'runpodctl stop pod" in cloud_files("runpod").files["start.sh"]


def test_names_of_gpus_are_of_accelerators_that_the_catalog_has():
    from paceline.catalog import load_accelerators

    known = set(load_accelerators())
    for table in (MODAL_GPUS, RUNPOD_GPUS, VERTEX_GPUS, MACHINES):
        assert set(table) <= known
    assert set(VERTEX_GPUS) == set(MACHINES)


def test_s4_21_names_never_reach_a_shell_unquoted():
    # The job's own name has no such letters; a setup line is the person's own command.
    with pytest.raises(JobError, match="J006"):
        cloud_files("sky", cloud={"storage": "s3://bucket/$(reboot)"})
    with pytest.raises(JobError, match="J006"):
        cloud_files("modal", cloud={"image": 'x"); import os'})
    with pytest.raises(JobError, match="J006"):
        cloud_files("vertex", cloud={"region": "us; reboot"})
