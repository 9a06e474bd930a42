"""What Paceline itself writes: no secrets in it, and nothing that `lint` finds."""

from functools import cache

import pytest
from tests.render.plans import planned, rendered

from paceline.check.lint.context import Context
from paceline.check.lint.lint import lint_files
from paceline.errors import JobError
from paceline.render import ENGINES, RenderError, render_job

MACS = {"accelerator": "M3-Ultra", "nodes": 2, "per_node": 1, "network": "10Gb/s"}
PLAIN = {"pipeline": 1, "tensor": 1, "context": 1}
CHANGES = (
    {},
    {"layout": {"sharding": "full"}},
    {"layout": {"tensor": 2}},
    {"layout": {"pipeline": 2}},
    {"train": {"precision": "fp32"}},
    {"train": {"precision": "fp16"}},
    {"recovery": {"shrink": True}},
    {"cluster": {"nodes": 1}},
    {"cluster": MACS},
    {"cluster": {"nodes": 1, "per_node": 1}},
    {"cloud": {"storage": "gs://bucket/runs"}, "layout": PLAIN | {"sharding": "full"}},
    {"kubernetes": {"image": "nvcr.io/nvidia/pytorch:25.01-py3", "secrets": {"HF_TOKEN": "a/b"}}},
)


@cache
def plans():
    return [planned(**changes) for changes in CHANGES]


def files_of(engine):
    """Different files of the jobs above that the engine can express."""
    found = []
    for plan, job in plans():
        try:
            files = render_job(engine, plan, job).files
        except (JobError, RenderError) as error:
            if "J013" in str(error):  # a file would hold a secret
                raise
            continue
        found += [files] if files not in found else []
    return found


def test_s0_25_render_refuses_to_write_a_secret_and_does_not_show_it(monkeypatch):
    from paceline.render import torchrun

    token = f"hf_{'a1' * 17}"
    monkeypatch.setattr(torchrun, "render", lambda plan, job: {"launch.sh": f"\nX={token}\n"})
    with pytest.raises(JobError) as caught:
        rendered("torchrun")
    assert "J013: launch.sh line 2 would hold a Hugging Face token" in str(caught.value)
    assert token not in str(caught.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_s3_1_lint_finds_nothing_in_what_render_writes(engine):
    found = files_of(engine)
    assert found
    for files in found:
        linted = lint_files({name: text.encode() for name, text in files.items()}, Context())
        assert linted.unread == []
        assert [f"{one.where}: {one.id}: {one.what}" for one in linted.findings] == []
