"""A callback for Hugging Face's Trainer (and TRL's): exact steps, numbers and checkpoints.

from paceline.integrations.transformers import PacelineCallback

trainer = Trainer(..., callbacks=[PacelineCallback()])
"""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from paceline.integrations.log import log


class PacelineCallback(TrainerCallback):
    """Gives a Trainer's steps, logged numbers and checkpoints to `paceline.log`."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step, without numbers."""
        if state.is_world_process_zero:
            log(step=state.global_step, steps=state.max_steps)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Numbers of the newest step; those of the whole training are left out."""
        numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, int | float)}
        if state.is_world_process_zero and numbers and "train_runtime" not in numbers:
            log(numbers, step=state.global_step, steps=state.max_steps)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A checkpoint is complete."""
        if state.is_world_process_zero and args.output_dir is not None:
            folder = Path(args.output_dir).resolve() / f"checkpoint-{state.global_step}"
            log(checkpoint=folder, step=state.global_step)
