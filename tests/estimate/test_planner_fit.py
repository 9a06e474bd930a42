"""Which constants `benchmarks/planner_fit.py` fits, on steps that one constant alone decides."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytest.importorskip("scipy")

from planner_fit import _CONSTANTS, fit


def test_constants_that_are_not_named_stay_at_their_priors():
    run = SimpleNamespace(source="a list", step_s=0.7)
    columns = SimpleNamespace(
        runs=[run] * 20,
        step_s=lambda constants: (
            [constants.step["memory_share"] * constants.attention["flash1"]] * 20
        ),
    )
    found = fit(columns, prior=0.01, fitted=["step.memory_share"])
    assert found.attention["flash1"] == 0.50
    assert found.step["memory_share"] == pytest.approx(0.92)  # its highest; 1.4 would be needed
    priors = {paths[0]: row[0] for paths, row in _CONSTANTS.items()}
    for name, prior in priors.items():
        table, key = name.split(".")
        assert name == "step.memory_share" or getattr(found, table)[key] == prior
