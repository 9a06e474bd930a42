"""The section `evaluate` of a job file: when the evaluation loss is measured, and what follows."""

from typing import Annotated

from pydantic import Field

from paceline.job.section import Auto, Number, Positive, section


@section
class EvaluateSpec:
    """Held-out evaluation."""

    every: Positive | Auto = "auto"
    """Steps between evaluations; the first and the last step are always evaluated. `auto` is a
    tenth of the run."""

    samples: Positive = 256
    """Held-out samples in one evaluation, the same ones every time."""

    patience: Positive | None = None
    """Early stopping: the run ends after this many evaluations in a row without an improvement. The
    checkpoint with the lowest evaluation loss is kept. Left out, every step is done."""

    min_delta: Annotated[Number, Field(ge=0)] = 0.0
    """Only with `patience`: an evaluation is an improvement when its loss is lower by more than
    this, in nats per token, than that of the last improvement."""

    prompts: str | None = None
    """File of prompts, relative to the job file, that the trained model continues after the last
    step, for the report. `.jsonl`: rows with `prompt`, or with `messages`, a conversation that it
    answers. Any other file: a prompt a line."""

    prompt_tokens: Positive = 128
    """Only with `prompts`: tokens that are written for each at most, always the likeliest."""

    tasks: list[str] = Field(default_factory=list)
    """Tasks of lm-evaluation-harness that the trained model does after the last step: YAML files,
    relative to the job file. Needs the extra `eval`."""

    outputs_every: Positive | None = None
    """Only with `prompts` or `tasks`: they are also done with the model as it was after every so
    many steps. At each of these steps a checkpoint is saved, and kept. Left out, they are done with
    the last model alone."""
