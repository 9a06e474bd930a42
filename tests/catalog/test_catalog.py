"""The catalog: every number there, and names that are not."""

import pytest

from paceline.catalog import (
    find_accelerator,
    find_model_preset,
    load_accelerators,
    load_model_presets,
)
from paceline.errors import JobError


def test_every_entry_names_its_source():
    for entry in (*load_accelerators().values(), *load_model_presets().values()):
        assert entry.source


def test_every_peak_has_an_efficiency_below_one():
    for accelerator in load_accelerators().values():
        assert set(accelerator.peak_flops_per_s) <= set(accelerator.efficiency)
        assert all(0 < share < 1 for share in accelerator.efficiency.values())


def test_the_accelerators_that_people_have_are_there():
    names = set(load_accelerators())
    assert {"A100-40", "A100-80", "H100-SXM", "H200", "B200", "V100-32"} <= names
    assert {"L4", "L40S", "RTX-4090", "MI300X", "cpu"} <= names


def test_v100_has_no_bf16():
    assert "bf16" not in load_accelerators()["V100-32"].peak_flops_per_s


def test_an_unknown_accelerator_names_the_nearest():
    with pytest.raises(JobError) as caught:
        find_accelerator("h100", where="here")
    (problem,) = caught.value.problems
    assert problem.code == "T001"
    assert "`H100-SXM`" in problem.fix


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(JobError, match="did you mean `llama-3-8b`"):
        find_model_preset("llama3-8b", where="here")


def test_a_name_like_none_lists_all():
    with pytest.raises(JobError, match="choose one of tiny, llama-2-7b"):
        find_model_preset("zzzzzz", where="here")
