"""A model that Accelerate or Fabric has prepared, and a loader that it has not."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Loop
from paceline.check.lint.names import ACCELERATOR, DATALOADER
from paceline.check.lint.program import Program
from paceline.check.lint.rules.samplers import training_loops, whole_data_set

PREPARES = {
    "accelerate": (f"{ACCELERATOR}.prepare", f"{ACCELERATOR}.prepare_data_loader"),
    "fabric": ("lightning.fabric.Fabric.setup_dataloaders",),
}

FIXES = {
    "accelerate": "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    "fabric": "loader = fabric.setup_dataloaders(loader)",
}

OTHERWISE = ("split_between_processes", "prepare_data_loader", "skip_first_batches", "num_shards")
"""Words of programs that part their data in another way."""


def check_unprepared_loader(program: Program, context: Context) -> Iterator[Finding]:
    """Every process trains on the whole data set: nobody gave it a part."""
    by = program.framework
    if by not in PREPARES or program.mentions(*OTHERWISE):
        return
    prepares = program.calls(*PREPARES[by])
    if any(one.open_ended for one in prepares):
        return
    given = {id(part) for call in prepares for arg in call.args for part in arg.origins()}
    for loop in training_loops(program):
        if not trains_prepared(program, loop, by):
            continue
        options = list(loop.over.any()) if loop.over is not None else []
        calls = [one.call for one in options if isinstance(one.call, Call)]
        if len(calls) != len(options) or any(id(one) in given for one in options):
            continue
        if not calls or not all(one.name == DATALOADER and whole_data_set(one) for one in calls):
            continue
        yield program.finding(
            "sampler-missing",
            calls[0],
            what=(
                f"{loop.spot} trains a prepared model on this loader, which is not prepared: "
                "every process goes through the whole data set"
            ),
            fix=FIXES[by],
            seen=(loop,),
        )


def trains_prepared(program: Program, loop: Loop, by: str) -> bool:
    """Whether a model that was prepared is called in the loop."""
    inside = [one.forward_of for one in program.forwards if loop in one.loops]
    return any(one is not None and one.wrapped_by(by) for one in inside)


RULES = (check_unprepared_loader,)
