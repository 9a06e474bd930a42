"""What is wrong with how a training function uses its steps."""

from paceline.errors import RunError
from paceline.parallel.layout import Layout


def check_complete(
    number: int, *, is_finished: bool, num_backward: int, num_asked: int, where: str
) -> None:
    """
    Raises:
        RunError: `R024`, a step is applied twice, or before all its micro-batches were computed.
    """
    if is_finished:
        what = f"step {number} was applied twice"
    elif num_backward != num_asked:
        what = f"step {number}: step.backward was called {num_backward} times for "
        what += f"{num_asked} micro-batch{'es' if num_asked > 1 else ''}"
    else:
        return
    raise RunError.of(
        code="R024",
        what=what,
        where=where,
        fix="in every step, go through all of step.micro_batches, call step.backward once "
        "for each, then step.apply once",
    )


def check_takes_a_loop(layout: Layout, where: str) -> None:
    """
    Raises:
        RunError: `R024`, ranks share a sample or the blocks, which a loop cannot train.
    """
    if layout.pipeline == 1 and layout.context == 1:
        return
    axis = "pipeline" if layout.pipeline > 1 else "context"
    raise RunError.of(
        code="R024",
        what=f"layout.{axis} is {getattr(layout, axis)}, and the program goes through "
        "the step's micro-batches itself",
        where=where,
        fix="call step.train(samples, num_samples, loss_of=...), or step.train_on(loader, "
        f"loss_of=...), which work in every layout, or set layout.{axis} to 1",
    )
