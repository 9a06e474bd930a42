import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.render.plans import rendered

from paceline.render import Rendered, RenderError

CPU: dict[str, Any] = {"accelerator": "cpu", "nodes": 1, "per_node": 2, "network": "auto"}
PLAIN: dict[str, Any] = {"pipeline": 1, "tensor": 1, "context": 1, "recompute": "none"}


def written(found: Rendered, folder: Path) -> Path:
    for name, text in found.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_s2_10_a_worker_is_a_node_with_all_its_gpus(check_golden):
    found = rendered("tensorflow", layout=PLAIN | {"sharding": "none"})
    configs = [json.loads(found.files[f"tf_config/worker-{node}.json"]) for node in range(2)]
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": node} for node in range(2)
    ]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert "tf_config/worker-2.json" not in found.files
    check_golden("tensorflow/two-nodes", found)


def test_a_rank_of_a_cpu_is_a_worker_of_its_own():
    found = rendered("tensorflow", cluster=CPU, train={"precision": "fp32"}, layout=PLAIN)
    workers = json.loads(found.files["tf_config/worker-0.json"])["cluster"]["worker"]
    assert workers == ["127.0.0.1:12345", "127.0.0.1:12346"]
    assert found.gaps == ()


def test_s2_10_one_node_needs_no_tf_config(check_golden):
    found = rendered("tensorflow", cluster={"nodes": 1}, layout=PLAIN | {"sharding": "none"})
    assert not [name for name in found.files if name.startswith("tf_config")]
    check_golden("tensorflow/one-node", found)


def test_sharding_becomes_whole_copies_where_they_fit_and_is_refused_where_not():
    found = rendered("tensorflow", layout=PLAIN | {"sharding": "full"})
    assert [gap.what for gap in found.gaps] == ["FSDP2 over 16 ranks"]
    assert (found.gaps[0].nearest or "").startswith("whole copies: ")
    with pytest.raises(RenderError, match="which needs 108 GiB of"):
        rendered(
            "tensorflow",
            model={"decoder": None, "size": "7B"},
            layout=PLAIN | {"sharding": "full"},
        )


@pytest.mark.parametrize("way", ["tensor", "pipeline", "context"])
def test_a_split_model_is_refused_as_every_replica_would_be_a_data_rank(way):
    with pytest.raises(RenderError, match=f"{way} 2: .*16 replicas would be a data rank") as found:
        rendered("tensorflow", layout=PLAIN | {"sharding": "none", way: 2})
    assert f"layout.{way}: 1" in [problem.fix for problem in found.value.problems]


def test_an_8b_model_over_tensor_and_pipeline_ranks_has_no_files():
    cluster = {"nodes": 3, "per_node": 8}
    layout = PLAIN | {"sharding": "none", "tensor": 8, "pipeline": 3}
    with pytest.raises(RenderError, match="every one of the 24 replicas"):
        rendered(
            "tensorflow", model={"decoder": None, "size": "8B"}, cluster=cluster, layout=layout
        )


def test_hosts_of_the_job_are_those_of_the_workers():
    layout = PLAIN | {"sharding": "none"}
    found = rendered("tensorflow", layout=layout, ssh={"hosts": ["me@a", "b"]})
    config = json.loads(found.files["tf_config/worker-1.json"])
    assert config["cluster"]["worker"] == ["a:12345", "b:12345"]


def test_what_tensorflow_lacks_is_said_or_refused():
    found = rendered("tensorflow", layout=PLAIN | {"recompute": "full", "sharding": "none"})
    assert [gap.what for gap in found.gaps] == ["recompute full"]
    with pytest.raises(RenderError, match="no loss scaler"):
        rendered("tensorflow", layout=PLAIN | {"sharding": "none"}, train={"precision": "fp16"})
    macs = {"accelerator": "M3-Ultra", "per_node": 1, "network": "auto"}
    with pytest.raises(RenderError, match="TPUStrategy is not tested"):
        rendered("tensorflow", cluster=macs, layout=PLAIN)


def test_recompute_is_left_out_only_where_every_activation_fits():
    model = {"decoder": {"layers": 32, "hidden": 1024, "heads": 8}}
    data, layout = {"seq_len": 16384}, PLAIN | {"recompute": "full", "sharding": "none"}
    small = rendered("tensorflow", model=model, data=data, layout=layout | {"micro_batch": 1})
    (said,) = [gap for gap in small.gaps if gap.what == "recompute full"]
    assert "GiB of 79.6 GiB a rank" in str(said.nearest)
    with pytest.raises(RenderError, match="keeps every activation, which needs") as refused:
        rendered("tensorflow", model=model, data=data, layout=layout | {"micro_batch": 4})
    assert ["layout.recompute" in problem.where for problem in refused.value.problems] == [True]


def test_hosts_take_the_place_of_the_rendered_names(tmp_path):
    folder = written(rendered("tensorflow", layout=PLAIN | {"sharding": "none"}), tmp_path)

    def config(worker: str, hosts: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, str(folder / "tf_config.py"), worker]
        env = os.environ | {"HOSTS": hosts}
        return subprocess.run(words, capture_output=True, text=True, env=env, check=False)

    found = json.loads(config("1", "127.0.0.1,127.0.0.2:2222").stdout)
    assert found["cluster"]["worker"] == ["127.0.0.1:12345", "127.0.0.2:2222"]
    assert found["task"]["index"] == 1
    for worker, hosts, message in (
        ("0", "127.0.0.1", "HOSTS names 1 hosts, the plan has 2 workers"),
        ("0", "127.0.0.1,127.0.0.1", "HOSTS names 127.0.0.1:12345 twice"),
        ("2", "", "there is no worker '2': they are 0 to 1"),
        ("../worker-0", "", "there is no worker"),
        ("0", "no-such-host.invalid,127.0.0.1", "is not known here"),
    ):
        refused = config(worker, hosts)
        assert refused.returncode == 1
        assert message in refused.stderr
