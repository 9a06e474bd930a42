"""`find_unused_parameters=True` as frameworks spell it."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.program import Program

SPELLED = {
    "accelerate.DistributedDataParallelKwargs": "find_unused_parameters",
    "accelerate.utils.DistributedDataParallelKwargs": "find_unused_parameters",
    "lightning.pytorch.strategies.DDPStrategy": "find_unused_parameters",
    "transformers.TrainingArguments": "ddp_find_unused_parameters",
    "transformers.Seq2SeqTrainingArguments": "ddp_find_unused_parameters",
    "trl.SFTConfig": "ddp_find_unused_parameters",
}
"""Calls that hand it on to DDP, and their keyword."""

TRAINERS = ("lightning.pytorch.Trainer", "lightning.fabric.Fabric")


def check_spelled_find_unused(program: Program, context: Context) -> Iterator[Finding]:
    """DDP told by a framework to look for unused parameters after each forward pass."""
    for call in program.calls(*SPELLED, *TRAINERS):
        name = SPELLED.get(call.name, "strategy")
        given = call.argument(None, name)
        wanted = True if name != "strategy" else "ddp_find_unused_parameters_true"
        if given is None or given.const != wanted:
            continue
        yield program.finding(
            "ddp-find-unused-overhead",
            Severity.INFO,
            call.keyword_nodes.get(name, call.node),
            what="DDP walks the whole graph after each forward pass to look for unused parameters",
            fix="leave it out where every parameter gets a gradient",
        )


RULES = (check_spelled_find_unused,)
