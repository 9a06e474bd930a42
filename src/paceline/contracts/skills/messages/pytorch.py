"""The PyTorch trainer's contract."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.job.section import Number, Positive, Whole, section

_SCHEDULERS = {
    "steplr": "step",
    "cosine": "cosine",
    "cosineannealinglr": "cosine",
    "onecycle": "onecycle",
    "onecyclelr": "onecycle",
}


def _plain(value: object) -> Any:
    """`StepLR`, `CosineAnnealingLR` and the like in the short words; capitals do not matter."""
    if not isinstance(value, str):
        return value
    return _SCHEDULERS.get(value.lower(), value.lower())


Lower = BeforeValidator(_plain)


@section
class DataConfig:
    """What to train on."""

    trainPath: str
    """Samples: an `.npz` with `x` and `y`, or a `.csv` of numbers with a header, the target last.
    Whole-number targets are classes. Any other path, when the model's file defines
    `load_data(path)`, which returns a dataset with a length whose samples are (input, target),
    such as `TensorDataset(x, y)`."""

    valPath: str | None = None
    """Held-out samples, in the same form. Early stopping and validation figures need it."""

    batchSize: Positive = 32
    """Samples of a batch, over all processes. A step has `gradientAccumulation` of them."""

    numWorkers: Annotated[Whole, Field(le=256)] = 0
    """Processes that load samples, for each training process."""


@section
class EarlyStopping:
    """When to stop before the last epoch: the contract promises it and has no place for it."""

    patience: Positive
    """Epochs without a lower validation loss."""

    minDelta: Annotated[Number, Field(ge=0)] = 0.0
    """How much lower counts."""


@section
class TrainingConfig:
    """How to train."""

    epochs: Annotated[Positive, Field(le=1_000_000)]
    """Passes over the samples."""

    learningRate: Annotated[Number, Field(gt=0)] = 1e-3
    """Peak learning rate."""

    optimizer: Annotated[Literal["adamw", "adam", "sgd", "rmsprop"], Lower] = "adamw"
    """`sgd` has momentum 0.9."""

    scheduler: Annotated[Literal["none", "step", "cosine", "onecycle"], Lower] = "none"
    """`step` divides the rate by 10 after each third of the epochs, `cosine` falls to 0 at the last
    one, `onecycle` rises for the first 30 % of the steps and falls to nearly 0. PyTorch's class
    names are taken too."""

    mixedPrecision: bool | Literal["bf16", "fp16"] = False
    """Autocast. `true` is bf16; fp16 has a loss scaler and needs a GPU."""

    gradientClipping: Annotated[Number, Field(gt=0)] | None = None
    """Largest gradient norm."""

    gradientAccumulation: Positive = 1
    """Batches whose gradients are averaged before one optimizer step."""

    earlyStopping: EarlyStopping | None = None
    """Addition to the contract: stop when the validation loss no longer falls."""

    numProcesses: Annotated[Positive, Field(le=1024)] = 1
    """Addition: processes of this machine that share every batch (DistributedDataParallel). The
    published text also names DataParallel, which PyTorch advises against."""

    seed: Whole = 0
    """Addition: of initial weights and the order of samples."""


@section
class CheckpointConfig:
    """Where checkpoints go."""

    saveDir: str = "checkpoints"
    """Folder; `epoch-N.pt`, and `best.pt` where there is a validation set."""

    saveEvery: Positive = 1
    """Epochs between checkpoints; the last epoch is always saved."""

    resumeFrom: str | None = None
    """A checkpoint of this trainer to resume from. The optimizer must be the checkpoint's; rate and
    schedule are this request's, from that epoch on."""


@section
class Request:
    """What the PyTorch trainer is asked."""

    modelPath: str
    """A Python file with `build_model()`, which returns an `nn.Module`. It may define
    `load_data(path)` and `loss(output, target)` too; left out, the loss is cross-entropy for
    classes and mean squared error for other numbers."""

    dataConfig: DataConfig
    """What to train on."""

    trainingConfig: TrainingConfig
    """How to train."""

    checkpointConfig: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Where checkpoints go."""


@section
class Metrics:
    """Figures of the last epoch, of the TensorFlow trainer too."""

    trainLoss: float | None = None
    """Mean over the samples, as they were trained on."""

    valLoss: float | None = None
    """Mean over the held-out samples."""

    trainAccuracy: float | None = None
    """Share from 0 to 1; only with classes."""

    valAccuracy: float | None = None
    """Share from 0 to 1; only with classes."""

    epochsTrained: int = 0
    """Epochs that are in the model, those before a resume included (PyTorch)."""

    trainingTime: float = 0.0
    """Seconds, from the start of the processes to their end."""


@section
class Epoch:
    """A point of the learning curve."""

    epoch: int
    """From 1."""

    trainLoss: float
    """As in `metrics`."""

    valLoss: float | None = None
    """As in `metrics`."""

    trainAccuracy: float | None = None
    """Addition."""

    valAccuracy: float | None = None
    """Addition."""

    learningRate: float | None = None
    """Addition: that the epoch's last step was taken with."""


@section
class Answer:
    """What the PyTorch trainer answers."""

    status: Literal["success", "error", "early_stopped"]
    """How it ended."""

    metrics: Metrics
    """Figures of the last epoch."""

    checkpointPath: str
    """The newest checkpoint; empty where none was written."""

    learningCurve: list[Epoch] = Field(default_factory=list)
    """Every epoch of this call."""

    bestCheckpointPath: str | None = None
    """Addition: the one with the lowest validation loss."""

    worldSize: int | None = None
    """Addition: processes that really trained together, as their group counts."""

    message: str | None = None
    """Addition: why the status is `error`, or what else to know."""
