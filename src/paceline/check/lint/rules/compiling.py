"""torch.compile and batches whose shape changes."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import DATALOADER
from paceline.check.lint.program import Program

COLLATORS = frozenset(
    {
        "transformers.DataCollatorWithPadding",
        "transformers.DataCollatorForSeq2Seq",
        "transformers.DataCollatorForTokenClassification",
    }
)
"""Collators of Transformers: each pads a batch to its longest sample."""


def check_changing_shapes(program: Program, context: Context) -> Iterator[Finding]:
    """A compiled model, and batches padded to the longest sample of each."""
    compiled = [one for one in program.calls("torch.compile") if takes_any_shape(one)]
    if not compiled or program.mentions("pad_to_multiple_of", "mark_dynamic", "max_length"):
        return
    padded = next((one for one in program.all_calls if pads_to_longest(program, one)), None)
    if padded is None:
        return
    yield program.finding(
        "compile-recompile-limit",
        Severity.INFO,
        padded,
        what=(
            "each batch is as long as its longest sample, and the model compiled in line "
            f"{compiled[0].line} is compiled again for new lengths, until the limit"
        ),
        fix="pad to a multiple of 64 or more, or torch.compile(model, dynamic=True)",
        seen=compiled[:1],
    )
    if program.is_distributed:
        yield program.finding(
            "compile-rank-skew",
            Severity.INFO,
            compiled[0],
            what=(
                f"batches differ in length (line {padded.line}), so ranks compile at different "
                "steps, and the others wait for them in the next collective"
            ),
            fix="pad to a few fixed lengths, and run each once before training",
            seen=(padded,),
        )


def takes_any_shape(call: Call) -> bool:
    """Whether nothing is said of changing shapes."""
    dynamic = call.argument(None, "dynamic")
    return not call.open_ended and (dynamic is None or dynamic.const is None)


def pads_to_longest(program: Program, call: Call) -> bool:
    """A collator, or `pad_sequence` in the function that a loader collates by."""
    if call.name in COLLATORS:
        padding = call.argument(None, "padding")
        return padding is None or padding.const in {True, "longest"}
    if call.name != "torch.nn.utils.rnn.pad_sequence":
        return False
    collates = [one.argument(6, "collate_fn") for one in program.calls(DATALOADER)]
    functions = {one.function for each in collates if each is not None for one in each.any()}
    return any(frame.function in functions for frame in call.frames)


RULES = (check_changing_shapes,)
