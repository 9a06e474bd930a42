"""A run's numbers as TensorBoard event files, where the job asks for them."""

from pathlib import Path

from paceline.record.metric_names import numbers_of
from paceline.record.metrics import StepMetrics


class TensorBoard:
    """The writer of a run's folder `tensorboard`; writes nothing where it is not wanted."""

    def __init__(self, folder: Path, *, wanted: bool, last_step: int) -> None:
        """Args:
        folder: The run's folder.
        wanted: Whether the job asks for the files.
        last_step: Last step of the state: what the files have of later ones is not shown any more.
        """
        self._writer = None
        if wanted:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)

    def write(self, line: StepMetrics) -> None:
        """Add a step's numbers."""
        if self._writer is None:
            return
        for tag, value in numbers_of(line).items():
            if value is not None:
                self._writer.add_scalar(tag, value, line.step)

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()
