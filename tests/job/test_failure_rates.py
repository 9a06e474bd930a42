"""The failure process as a person gives it."""

import pytest

from paceline.errors import JobError
from paceline.job.failure_rates import PRESETS, read_failures


def test_a_line_is_a_rate_and_terms():
    spec = read_failures("6.5e-3/node-day, weibull 0.8, rack 0.05 of 16, hang 0.1, repair 8h")
    assert (spec.per_node_day, spec.shape, spec.rack, spec.rack_size) == (6.5e-3, 0.8, 0.05, 16)
    assert (spec.hang, spec.repair) == (0.1, 8 * 3600)
    assert spec.source == "given by the user"


def test_terms_change_a_preset_and_its_name_says_so():
    spec = read_failures("kokolis-rsc2, x 2, repeat 0.02 x 10")
    assert spec.per_node_day == pytest.approx(2 * 2.34e-3)
    assert (spec.repeat_share, spec.repeat_factor) == (0.02, 10)
    assert spec.name == "kokolis-rsc2, x 2, repeat 0.02 x 10"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_read_by_its_name_and_names_its_source(name: str):
    assert read_failures(name) == PRESETS[name]
    assert PRESETS[name].source.startswith("published")


def test_llama3_gives_the_interruptions_that_were_counted():
    assert PRESETS["llama3"].at(2048) * 2048 * 54 == pytest.approx(419)


def test_where_failures_grow_faster_than_the_nodes_the_published_rate_is_met():
    process = PRESETS["ft-hsdp-100k"]
    assert 24 * 60 / (process.at(12_288) * 12_288) == pytest.approx(18)
    assert process.at(4096) == pytest.approx(process.at(12_288) / 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kokolis", "did you mean `kokolis-rsc"),
        ("llama3, weibul 0.8", "did you mean `weibull 0.8`"),
        ("rack 0.9, process 0.5", "1.4"),
        ("rack 1.5", "less than or equal to 1"),
        ("repair 4x", "is not a duration"),
        ("", "is no failure process"),
        ("missing.yaml", "cannot be read"),
    ],
)
def test_what_is_not_understood_is_said(text: str, said: str):
    with pytest.raises(JobError, match=r"S001|J006") as caught:
        read_failures(text)
    assert said in str(caught.value)


def test_a_file_has_the_same_fields_and_may_start_from_a_preset(tmp_path):
    path = tmp_path / "failures.yaml"
    path.write_text("preset: llama3\nrack: 0.05\nrepair: 8h\n")
    spec = read_failures(str(path))
    assert (spec.rack, spec.repair) == (0.05, 8 * 3600)
    assert spec.per_node_day == PRESETS["llama3"].per_node_day
    path.write_text("per_node_day: 0.01\nrak: 0.05\n")
    with pytest.raises(JobError, match="did you mean `rack"):
        read_failures(str(path))
