"""A callback for Lightning: exact steps, numbers and checkpoints.

    from paceline.integrations.lightning import PacelineCallback

    trainer = Trainer(..., callbacks=[PacelineCallback()])

Works with `lightning` and with `pytorch_lightning`, 2.0 or newer.
"""

from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    from pytorch_lightning import Callback, LightningModule, Trainer

from paceline.integrations.log import is_evaluation, log


class PacelineCallback(Callback):  # type: ignore[misc, unused-ignore]
    """Gives a Trainer's steps, logged numbers and checkpoints to `paceline.log`."""

    def __init__(self) -> None:
        self._saved = ""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """A step, with its numbers where the Trainer logs it (`log_every_n_steps`)."""
        if not trainer.is_global_zero:
            return
        is_logged = trainer.global_step % max(1, trainer.log_every_n_steps) == 0
        numbers = _numbers(trainer.logged_metrics) if is_logged else {}
        numbers = {name: value for name, value in numbers.items() if not is_evaluation(name)}
        log(numbers, step=trainer.global_step, steps=_steps(trainer))
        self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Numbers of an evaluation, but for the sanity check before training."""
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        numbers = _numbers(trainer.callback_metrics)
        log(
            {name: value for name, value in numbers.items() if is_evaluation(name)},
            step=trainer.global_step,
        )
        self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last checkpoint."""
        if trainer.is_global_zero:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        saver = trainer.checkpoint_callback
        path = str(getattr(saver, "last_model_path", "") or getattr(saver, "best_model_path", ""))
        if path and path != self._saved:
            self._saved = path
            log(checkpoint=path, step=trainer.global_step)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _steps(trainer: Trainer) -> int | None:
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < float("inf") else None
