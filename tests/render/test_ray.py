import json

import pytest
import yaml
from tests.render.plans import planned, rendered

from paceline.render import RenderError
from paceline.render.ray import options

CPU = {"accelerator": "cpu", "nodes": 1, "per_node": 4, "network": "auto"}
KUBERNETES = {
    "image": "registry.internal/train:1",
    "claim": "shared",
    "rdma_resource": "rdma/hca_shared_devices_a",
    "secrets": {"HF_TOKEN": "hf/token"},
    "max_run": "12h",
}


def test_two_nodes_of_gpus(check_golden):
    found = rendered(
        "ray",
        layout={"sharding": "full"},
        checkpoint={"copy_to": "s3://bucket/runs"},
        kubernetes=KUBERNETES,
    )
    assert found.gaps == ()
    check_golden("ray/two-nodes", found)


def test_cpus_of_one_node(check_golden):
    check_golden("ray/cpu", rendered("ray", cluster=CPU, layout={"sharding": "none"}))


def test_the_configmap_has_every_file_of_the_program():
    found = rendered("ray").files
    program = next(yaml.safe_load_all(found["rayjob.yaml"]))
    assert program["data"] == {name: text for name, text in found.items() if name != "rayjob.yaml"}


def test_a_job_that_may_shrink_has_elastic_workers():
    plan, job = planned(cluster=CPU, layout={"sharding": "none"})
    assert options(plan, job)["num_workers"] == [1, 4]


def test_a_job_that_must_not_shrink_has_a_fixed_number():
    plan, job = planned(cluster=CPU, layout={"sharding": "none"}, recovery={"shrink": False})
    assert options(plan, job)["num_workers"] == 4


def test_fewer_workers_still_hold_a_sharded_model():
    plan, job = planned(layout={"sharding": "full"})
    least, most = options(plan, job)["num_workers"]
    needed = plan.estimate.memory.total_bytes or 0
    assert most == 16
    assert needed * most <= plan.limit_bytes * least


def test_hybrid_groups_stay_whole_and_it_is_said():
    found = rendered("ray", layout={"sharding": "hybrid", "shard": 8})
    assert json.loads(found.files["ray.json"])["num_workers"] == 16
    assert "going on with fewer ranks" in [gap.what for gap in found.gaps]


def test_a_split_that_the_program_lacks_is_refused():
    with pytest.raises(RenderError, match="tensor 4"):
        rendered("ray", layout={"tensor": 4})


def test_a_storage_that_nodes_do_not_share_is_said():
    (gap,) = [gap for gap in rendered("ray").gaps if "storage" in gap.what]
    assert "RAY_STORAGE" in (gap.nearest or "")


def test_the_head_takes_no_rank_and_asks_for_no_accelerator():
    job = list(yaml.safe_load_all(rendered("ray").files["rayjob.yaml"]))[1]["spec"]
    head = job["rayClusterSpec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert "resources" not in head["template"]["spec"]["containers"][0]
    (workers,) = job["rayClusterSpec"]["workerGroupSpecs"]
    asked = workers["template"]["spec"]["containers"][0]["resources"]
    assert asked["limits"] == {"nvidia.com/gpu": 8}
