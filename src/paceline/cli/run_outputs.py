"""What a finished run makes of its prompts and tasks, as `paceline run` shows it."""

from collections.abc import Callable

from paceline.launch.outputs import make_outputs
from paceline.record.outputs import NAME, Outputs
from paceline.record.run import RunFolder
from paceline.units import counted


def make_and_show(run: RunFolder, note: Callable[[str], None]) -> None:
    """Do prompts and tasks, and say for each checkpoint how it went."""

    def show(outputs: Outputs) -> None:
        at = f"after step {outputs.step}"
        if outputs.generations:
            note(f"evaluate.prompts {at}: {counted(len(outputs.generations), 'continuation')}")
        for score in outputs.scores:
            note(f"evaluate.tasks {at}: {score}")
        if outputs.problem is not None:
            note(f"evaluate {at}: not everything was answered: {outputs.problem}")

    note(f"evaluate: checkpoints are exported for prompts and tasks, into {NAME}")
    make_outputs(run, show)
