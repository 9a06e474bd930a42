"""Which constants `benchmarks/planner_fit.py` fits, on steps that one and another decide."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.catalog.efficiencies import load_efficiencies

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytest.importorskip("scipy")

from planner_fit import fit


def test_constants_that_are_not_fitted_stay_as_they_are_shipped():
    run = SimpleNamespace(source="a list", step_s=0.42)
    columns = SimpleNamespace(
        runs=[run] * 20,
        step_s=lambda constants: (
            [constants.step["memory_share"] * constants.attention["flash2"]] * 20
        ),
    )
    found, shipped = fit(columns, prior=0.01), load_efficiencies()
    assert found.step["memory_share"] == pytest.approx(0.70, abs=0.005)
    at_priors = {"backward": 0.82, "flash2_hopper": 0.37}  # no step has them
    assert found.attention == pytest.approx({**shipped.attention, **at_priors})
    assert {**found.step, "memory_share": 0} == {**shipped.step, "memory_share": 0}
    assert found.sustained == shipped.sustained
