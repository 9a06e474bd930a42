"""The best evaluation of a run so far, and how many since then were no better: what early stopping
goes by. Checkpoints and snapshots hold it, so that a resumed run decides as an undisturbed one."""

from math import isfinite

import msgspec


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluations up to a step."""

    loss: float | None = None
    """The lowest; None while none was finite."""

    step: int = 0
    """Step of the lowest, the newest of equals."""

    to_beat: float | None = None
    """Loss of the last one that counted as an improvement."""

    waited: int = 0
    """Evaluations since then."""

    counted: int = -1
    """Step of the newest evaluation that is in these numbers."""

    def after(self, step: int, loss: float, *, min_delta: float = 0.0) -> "Best":
        """These numbers with one more evaluation; the same when it was counted already.

        >>> Best().after(0, 2.0).after(10, 1.5).after(20, 1.6).waited
        1
        """
        if step <= self.counted:
            return self
        if not isfinite(loss):
            return msgspec.structs.replace(self, waited=self.waited + 1, counted=step)
        is_lowest = self.loss is None or loss <= self.loss
        improves = self.to_beat is None or loss < self.to_beat - min_delta
        return Best(
            loss=loss if is_lowest else self.loss,
            step=step if is_lowest else self.step,
            to_beat=loss if improves else self.to_beat,
            waited=0 if improves else self.waited + 1,
            counted=step,
        )
