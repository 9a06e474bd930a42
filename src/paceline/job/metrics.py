"""The section `metrics` of a job file: where the numbers of a run go besides its own folder.

The sinks themselves are in `choices/sinks.py`; settings of one are a section here.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import Field

from paceline.choices.sinks import SINKS, SinkName
from paceline.errors import Problem
from paceline.job.section import Auto, Positive, section


@section
class WandbSpec:
    """Weights & Biases. The key is taken from WANDB_API_KEY or `wandb login`."""

    project: str = "paceline"
    """Project that the run is in."""

    entity: str | None = None
    """User or team. Left out, the key's own."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes files in the run's folder, which `wandb sync` uploads later."""


@section
class MlflowSpec:
    """MLflow. Credentials are taken from the variables that MLflow itself reads."""

    uri: str | None = None
    """Tracking server or database: `http://127.0.0.1:5000`, `sqlite:////data/mlflow.db`. Left out,
    MLFLOW_TRACKING_URI."""

    experiment: str = "paceline"
    """Experiment that the run is in; made if it does not exist."""


@section
class PrometheusSpec:
    """A page for Prometheus to scrape. It has no login: whoever reaches it can read the numbers."""

    port: Annotated[int, Field(ge=1, le=65535)] | Auto = "auto"
    """`auto` is the first free one from 9464, named in `logs/sink-prometheus.log`."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other one than this can be reached from outside of the machine."""


@section
class OtelSpec:
    """OpenTelemetry, by OTLP over HTTP in JSON. Headers come from OTEL_EXPORTER_OTLP_HEADERS."""

    endpoint: str | None = None
    """Collector: `http://127.0.0.1:4318`. Left out, OTEL_EXPORTER_OTLP_ENDPOINT."""


@section
class MetricsSpec:
    """Where metrics go besides `metrics.jsonl` in the run folder."""

    sinks: list[SinkName] = Field(default_factory=list)
    """Each is a process of its own that follows the run's files and can delay no step:
    `[tensorboard, wandb]`. `paceline runs send` sends what one missed."""

    every: Positive = 1
    """Only steps that are a multiple of this are sent. Evaluations, images and texts always are."""

    tensorboard: bool = False
    """Short for `sinks: [tensorboard]`."""

    wandb: WandbSpec = Field(default_factory=WandbSpec)
    """Weights & Biases."""

    mlflow: MlflowSpec = Field(default_factory=MlflowSpec)
    """MLflow."""

    prometheus: PrometheusSpec = Field(default_factory=PrometheusSpec)
    """A page for Prometheus to scrape."""

    otel: OtelSpec = Field(default_factory=OtelSpec)
    """OpenTelemetry."""

    @property
    def wanted(self) -> tuple[SinkName, ...]:
        """Every sink that is asked for, each once."""
        first: tuple[SinkName, ...] = ("tensorboard",) if self.tensorboard else ()
        return tuple(dict.fromkeys((*first, *self.sinks)))


def check_metrics(spec: MetricsSpec, where: Callable[[str], str]) -> Iterator[Problem]:
    """`J007` for settings of a sink that is not asked for."""
    defaults = MetricsSpec()
    for name in SINKS:
        given = getattr(spec, name, None)
        if name not in spec.wanted and given != getattr(defaults, name, None):
            yield Problem(
                code="J007",
                what=f"metrics.{name} is given, and {name} is not among metrics.sinks",
                where=where(f"metrics.{name}"),
                fix=f"add metrics.sinks: [{name}], or leave metrics.{name} out",
            )
