"""The TensorFlow trainer's contract."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.contracts.skills.messages.pytorch import Metrics
from paceline.job.section import Number, Positive, Whole, section

_STRATEGIES = {
    "mirroredstrategy": "mirrored",
    "multiworkermirroredstrategy": "multi_worker_mirrored",
    "multiworkermirrored": "multi_worker_mirrored",
    "tpustrategy": "tpu",
    "parameterserverstrategy": "parameter_server",
    "parameterserver": "parameter_server",
}

_CALLBACKS = {
    "earlystopping": "early_stopping",
    "modelcheckpoint": "checkpoint",
    "tensorboard": "tensorboard",
    "reducelronplateau": "reduce_lr",
    "csvlogger": "csv",
    "backupandrestore": "backup",
}


def _strategy(value: object) -> Any:
    """TensorFlow's class names in the short words."""
    return _STRATEGIES.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _callback(value: object) -> Any:
    """Keras's class names in the short words."""
    return _CALLBACKS.get(value.lower(), value.lower()) if isinstance(value, str) else value


Callback = Annotated[
    Literal["early_stopping", "checkpoint", "tensorboard", "reduce_lr", "csv", "backup"],
    BeforeValidator(_callback),
]


@section
class ModelConfig:
    """What to train."""

    modelPath: str
    """A Python file with `build_model()`, which returns a `keras.Model` (Keras 3). It may define
    `loss`, a Keras loss or its name; left out, it is cross-entropy of logits for classes and mean
    squared error for other numbers."""

    modelType: Literal["sequential", "functional", "subclassed"] | None = None
    """What it must be; left out, anything."""


@section
class DataConfig:
    """What to train on."""

    trainPath: str
    """Samples: an `.npz` with `x` and `y`, or a `.csv` of numbers with a header, the target last.
    Whole-number targets are classes."""

    valPath: str | None = None
    """Held-out samples, in the same form. Early stopping and validation figures need it."""

    batchSize: Positive = 32
    """Samples of a batch, over all replicas."""


@section
class TrainingConfig:
    """How to train."""

    epochs: Annotated[Positive, Field(le=1_000_000)]
    """Passes over the samples."""

    learningRate: Annotated[Number, Field(gt=0)] = 1e-3
    """Learning rate."""

    optimizer: Literal["adamw", "adam", "sgd", "rmsprop"] = "adamw"
    """`sgd` has momentum 0.9."""

    callbacks: list[Callback] = Field(default_factory=list)
    """`early_stopping` (patience 5), `checkpoint` (the best), `tensorboard`, `reduce_lr` (halves it
    after 3 epochs without gain), `csv`, `backup` (a run that is started again goes on). Keras's
    class names are taken too."""

    distributionStrategy: Annotated[
        Literal["none", "mirrored", "multi_worker_mirrored", "tpu", "parameter_server"],
        BeforeValidator(_strategy),
    ] = "none"
    """`mirrored` is every GPU of this machine, or `numReplicas` parts of its CPU. Keras 3 trains
    under no other of these: they are refused with what does."""

    numReplicas: Annotated[Positive, Field(le=64)] | None = None
    """Addition: replicas of `mirrored` on a machine without GPUs."""

    seed: Whole = 0
    """Addition: of initial weights and the order of samples."""


@section
class ExportConfig:
    """What to write at the end."""

    savedModelPath: str | None = None
    """Folder of a SavedModel for serving."""

    tflitePath: str | None = None
    """File for phones and small devices (LiteRT, which was TensorFlow Lite)."""

    servingSignatures: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(
        default_factory=lambda: ["serving_default"]
    )
    """Names under which the model can be called in the SavedModel."""


@section
class Request:
    """What the TensorFlow trainer is asked."""

    modelConfig: ModelConfig
    """What to train."""

    dataConfig: DataConfig
    """What to train on."""

    trainingConfig: TrainingConfig
    """How to train."""

    exportConfig: ExportConfig = Field(default_factory=ExportConfig)
    """What to write at the end."""


@section
class Answer:
    """What the TensorFlow trainer answers."""

    status: Literal["success", "error", "early_stopped"]
    """How it ended."""

    metrics: Metrics
    """Figures of the last epoch."""

    modelPath: str = ""
    """The trained model, `model.keras`; empty where there is none."""

    savedModelPath: str | None = None
    """The SavedModel, where it was asked for."""

    tensorboardLogDir: str | None = None
    """Logs, with the callback `tensorboard`."""

    history: dict[str, list[float]] = Field(default_factory=dict)
    """Each figure of Keras, epoch by epoch."""

    tflitePath: str | None = None
    """Addition: the file, where it was asked for."""

    worldSize: int | None = None
    """Addition: replicas that trained together, as the strategy counts."""

    message: str | None = None
    """Addition: why the status is `error`."""
