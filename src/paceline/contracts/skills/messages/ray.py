"""The Ray trainer's contract: train, search, or look at the cluster."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.job.section import Number, Positive, Whole, section


def _lower(value: object) -> Any:
    return value.lower() if isinstance(value, str) else value


Lower = BeforeValidator(_lower)


@section
class Resources:
    """What each worker has to itself."""

    cpu: Annotated[Number, Field(ge=0)] = 1.0
    """Cores."""

    gpu: Annotated[Number, Field(ge=0)] | None = None
    """GPUs; left out, one where `useGpu` is true."""


@section
class Config:
    """The workers and where they are."""

    numWorkers: Annotated[Positive, Field(le=100_000)] = 1
    """Processes that train together. Refused are more than the memory holds, of the cluster or of
    this machine: 256 MiB each before they have a model."""

    useGpu: bool = False
    """Whether each has a GPU."""

    resourcesPerWorker: Resources = Field(default_factory=Resources)
    """What each has to itself."""

    address: str | None = None
    """Addition: of the cluster, such as `ray://head:10001`. Left out, RAY_ADDRESS or a cluster that
    runs on this machine; without one, `train` and `tune` start one here for their time."""

    storagePath: str = "ray_results"
    """Addition: folder or URL for checkpoints, which all nodes reach."""

    maxFailures: Whole = 2
    """Addition: how often the workers are started again, from the newest checkpoint, after a worker
    or a node was lost or the program failed."""


@section
class ScalingConfig:
    """How many workers there may be."""

    minWorkers: Positive | None = None
    """With it training is elastic: it goes on with so many when nodes are lost."""

    maxWorkers: Positive | None = None
    """Left out, `config.numWorkers`."""


@section
class TrainConfig:
    """What the workers run."""

    trainerPath: str
    """A Python file with `train_loop(config)`, which every worker runs: a training function of Ray
    Train, which calls `ray.train.report(metrics, checkpoint=...)`."""

    framework: Annotated[Literal["pytorch", "tensorflow", "xgboost"], Lower] = "pytorch"
    """Whose processes are set up to talk to each other."""

    scalingConfig: ScalingConfig = Field(default_factory=ScalingConfig)
    """How many workers there may be."""

    loopConfig: dict[str, Any] = Field(default_factory=dict)
    """Addition: what `train_loop` is given; a search puts its values over it."""


@section
class Range:
    """Values that a search may try."""

    type: Annotated[Literal["uniform", "loguniform", "randint", "choice", "grid"], Lower]
    """`uniform`, `loguniform` and `randint` lie from `min` up to `max`; `choice` and `grid` are of
    `values`, and a grid tries every one."""

    min: Number | None = None
    """Lowest."""

    max: Number | None = None
    """Highest; `randint` stays below it."""

    values: list[Any] | None = None
    """All of them."""


@section
class TuneConfig:
    """What to search, and how."""

    searchSpace: Annotated[dict[str, Range], Field(min_length=1)]
    """Name in `train_loop`'s config -> its values."""

    metric: str
    """A name that `train_loop` reports."""

    mode: Literal["min", "max"] = "min"
    """Whether low or high is good."""

    scheduler: Annotated[Literal["asha", "fifo"], Lower] = "asha"
    """`asha` stops trials early that fall behind, by their reports; `fifo` lets all run to the
    end."""

    numSamples: Annotated[Positive, Field(le=100_000)] = 10
    """Trials; of a grid, how often all of it."""

    maxReports: Positive = 100
    """Addition: reports of a whole trial, which ASHA's stages are cut from."""

    maxConcurrent: Positive | None = None
    """Addition: trials at once; left out, as many as the cluster has room for."""


@section
class Request:
    """What the Ray trainer is asked."""

    mode: Literal["train", "tune", "cluster"]
    """What to do."""

    config: Config
    """The workers."""

    trainConfig: TrainConfig | None = None
    """With `train` and `tune`."""

    tuneConfig: TuneConfig | None = None
    """With `tune`."""


@section
class Results:
    """What came of it."""

    bestConfig: dict[str, Any] | None = None
    """Values of a search's best trial."""

    bestMetric: float | None = None
    """What a search's best trial reported last."""

    numTrials: int = 0
    """Trials that were begun; 0 where it was no search."""

    completedTrials: int = 0
    """Trials that ended without an error, those that were stopped early included."""

    metrics: dict[str, Any] | None = None
    """Addition: what `train_loop` reported last."""

    worldSize: int | None = None
    """Addition: workers that were asked for together, at most."""


@section
class ClusterStatus:
    """What the cluster has, busy or not."""

    numNodes: int
    """Nodes that are alive."""

    totalCpu: float
    """Cores as Ray counts them: a cluster that is started here has as many as the workers ask for,
    even where the machine has fewer."""

    totalGpu: float
    """GPUs."""

    availableCpu: float | None = None
    """Addition: cores that are free now."""

    availableGpu: float | None = None
    """Addition: GPUs that are free now."""


@section
class Answer:
    """What the Ray trainer answers."""

    status: Literal["success", "error", "partial"]
    """`partial`: some trials of a search ended with an error, and some did not."""

    results: Results
    """What came of it."""

    checkpointPath: str | None = None
    """The newest checkpoint; of a search, the best trial's."""

    clusterStatus: ClusterStatus | None = None
    """State of the cluster that the action ran on."""

    trainingTime: float = 0.0
    """Seconds, without starting a cluster."""

    message: str | None = None
    """Addition: why the status is not `success`, or that workers share this machine's cores."""
