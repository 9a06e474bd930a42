"""Where the numbers of a run can go besides its own folder, one row a sink.

A new sink is its word and row here, and its module in `launch/sinks/`, named for it; settings of
one are a section of `job/metrics.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SinkName = Literal["tensorboard", "wandb", "mlflow", "prometheus", "otel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkRow:
    """One row of the table of sinks."""

    title: str
    package: str | None = None
    """What has to be installed, as it is imported; the sink's name is our extra with it."""

    keeps_steps: bool = True
    """Whether it has a curve of what it was sent. Others show the present: only the newest numbers
    go there, and a finished run cannot be sent."""

    lags: bool = False
    """Whether it cannot say what is safe until it is closed: the mark then stays one flush behind,
    and the sink itself leaves out steps that it has."""

    goes_back: bool = False
    """Whether steps that the run repeats take the place of those sent before; others keep those."""


SINKS: Mapping[str, SinkRow] = {
    "tensorboard": SinkRow(title="TensorBoard", package="tensorboard", goes_back=True),
    "wandb": SinkRow(title="Weights & Biases", package="wandb", lags=True),
    "mlflow": SinkRow(title="MLflow", package="mlflow"),
    "prometheus": SinkRow(title="Prometheus", keeps_steps=False),
    "otel": SinkRow(title="OpenTelemetry", goes_back=True),
}
"""Name in the job file -> the sink."""
