import json

import pytest
from tests.render.plans import rendered

from paceline.render import RenderError

ONE = {"nodes": 1}


def test_one_node_of_gpus(check_golden):
    found = rendered("kfp", cluster=ONE, kubernetes={"image": "registry.internal/train:1"})
    assert found.gaps == ()
    check_golden("kfp/one-node", found)


def test_s2_11_the_pipeline_carries_every_file_of_the_program():
    files = rendered("kfp", cluster=ONE).files
    assert set(json.loads(files["kfp.json"])["program"]) == files.keys() - {
        "pipeline.py",
        "kfp.json",
    }


def test_several_nodes_are_refused():
    with pytest.raises(RenderError, match="a step of a pipeline is one pod"):
        rendered("kfp")


def test_what_pods_of_a_pipeline_do_not_get_is_said():
    found = rendered("kfp", cluster=ONE, kubernetes={"secrets": {"HF_TOKEN": "hf/token"}})
    assert "kubernetes.secrets" in [gap.what for gap in found.gaps]
