"""What Paceline itself writes: no secrets in it, and nothing that `lint` finds."""

import pytest
from tests.render.plans import rendered

from paceline.errors import JobError
from paceline.job.secrets import find_in_lines
from paceline.render import ENGINES, RenderError

MACS = {"accelerator": "M3-Ultra", "nodes": 2, "per_node": 1, "network": "10Gb/s"}
PLAIN = {"pipeline": 1, "tensor": 1, "context": 1}
CHANGES = (
    {},
    {"layout": {"sharding": "full"}},
    {"layout": {"tensor": 2}},
    {"layout": {"pipeline": 2}},
    {"train": {"precision": "fp32"}},
    {"cluster": {"nodes": 1}},
    {"cluster": MACS},
    {"cluster": {"nodes": 1, "per_node": 1}},
    {"cloud": {"storage": "gs://bucket/runs"}, "layout": PLAIN | {"sharding": "full"}},
    {"kubernetes": {"image": "nvcr.io/nvidia/pytorch:25.01-py3", "secrets": {"HF_TOKEN": "a/b"}}},
)


def files_of(engine):
    """Of every job above that the engine can express."""
    for changes in CHANGES:
        try:
            yield rendered(engine, **changes).files
        except (JobError, RenderError):
            continue


@pytest.mark.parametrize("engine", ENGINES)
def test_s0_25_no_rendered_file_holds_a_secret(engine):
    seen = 0
    for files in files_of(engine):
        for name, text in files.items():
            seen += 1
            assert list(find_in_lines(text, in_code=name.endswith(".py"))) == []
    assert seen


def test_s0_25_render_refuses_to_write_a_secret_and_does_not_show_it(monkeypatch):
    from paceline.render import torchrun

    token = f"hf_{'a1' * 12}"
    monkeypatch.setattr(torchrun, "render", lambda plan, job: {"launch.sh": f"\nX={token}\n"})
    with pytest.raises(JobError) as caught:
        rendered("torchrun")
    assert "J013: launch.sh line 2 would hold a Hugging Face token" in str(caught.value)
    assert token not in str(caught.value)
