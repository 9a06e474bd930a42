"""A finished step as one line: on the screen, and in every rank's log."""

from paceline.units import format_count


def step_text(
    step: int, num_steps: int, *, loss: float | None, per_s: float, unit: str = "tokens"
) -> str:
    """One step for a person.

    Args:
        per_s: Tokens or samples a second of all ranks together, as `unit` says.

    >>> step_text(7, 300, loss=2.5, per_s=12_345.0)
    'step   7/300  loss 2.5000   12.3K tokens/s'
    """
    shown = "not finite" if loss is None else f"{loss:.4f}"
    width = len(str(num_steps))
    return f"step {step:>{width}}/{num_steps}  loss {shown}  {format_count(per_s):>6} {unit}/s"
