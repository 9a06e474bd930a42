"""Every rank's log holds how far the rank is: its newest steps, in the words of the screen."""

import contextlib
import time

from paceline.record.step_text import step_text

EVERY_S = 10.0
"""Between two lines, beside those of the first and the last step. A guess, as on the screen."""


class StepPrinter:
    """Prints finished steps on standard output, which is the rank's log."""

    def __init__(self, num_steps: int, unit: str) -> None:
        self._num_steps = num_steps
        self._unit = unit
        self._printed_at: float | None = None

    def step_done(self, step: int, loss: float | None, per_s: float) -> None:
        """Print the step, unless another one was printed a moment ago."""
        now_s = time.monotonic()
        is_soon = self._printed_at is not None and now_s - self._printed_at < EVERY_S
        if is_soon and step != self._num_steps:
            return
        self._printed_at = now_s
        text = step_text(step, self._num_steps, loss=loss, per_s=per_s, unit=self._unit)
        with contextlib.suppress(OSError):  # a full disk ends no training
            print(text, flush=True)
