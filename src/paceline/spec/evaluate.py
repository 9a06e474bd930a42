"""The section `evaluate` of a job file: when the evaluation loss is measured, and what follows."""

from paceline.spec.section import Auto, Positive, section


@section
class EvaluateSpec:
    """Held-out evaluation."""

    every: Positive | Auto = "auto"
    """Steps between evaluations; the first and the last step are always evaluated. `auto` is a
    tenth of the run."""

    samples: Positive = 256
    """Held-out samples in one evaluation, the same ones every time."""
