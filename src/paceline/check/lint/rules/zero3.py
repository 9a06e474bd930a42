"""Generation whose steps gather weights from every rank: ZeRO's third stage, FSDP."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import DEEPSPEED_INIT
from paceline.check.lint.program import Program
from paceline.check.lint.rules.agreement import SHARDED, zero_stage

WATCHED = (
    "transformers.integrations.HfDeepSpeedConfig",
    "transformers.deepspeed.HfDeepSpeedConfig",
    "transformers.integrations.deepspeed.HfDeepSpeedConfig",
    "transformers.TrainingArguments",
    "transformers.Seq2SeqTrainingArguments",
    "trl.SFTConfig",
)
"""What transformers learns of ZeRO's stage from: its `generate` is then synchronised by itself."""


def check_zero3(program: Program, context: Context) -> Iterator[Finding]:
    """Sequences that end at different lengths, where every step gathers weights."""
    engines = [call for call in program.calls(DEEPSPEED_INIT) if is_stage_3(call)]
    if engines or _is_zero3_elsewhere(program):
        yield from _generation(program, program.calls(method="generate"), "ZeRO stage 3")
    else:
        sharded = [one for one in program.calls(method="generate") if _is_sharded(one)]
        yield from _generation(program, sharded, "FSDP")


def is_stage_3(call: Call) -> bool:
    return zero_stage(call.argument(None, "config", "config_params")) == 3


def _is_zero3_elsewhere(program: Program) -> bool:
    """Whether a plugin or a Trainer's argument says stage 3."""
    return any(
        (stage := call.argument(None, "zero_stage")) is not None and stage.likely() == 3
        for call in program.all_calls
    )


def _is_sharded(call: Call) -> bool:
    """Whether it is of a model under FSDP, or of the plain one in it."""
    for one in call.receiver.any() if call.receiver is not None else ():
        outer = one.fields.get("wrapped by")
        if one.wrapped_by(*SHARDED) or (outer is not None and outer.wrapped_by(*SHARDED)):
            return True
    return False


def _generation(program: Program, calls: list[Call], by: str) -> Iterator[Finding]:
    for call in calls:
        synced = call.argument(None, "synced_gpus")
        refused = synced is not None and synced.const is False
        if (synced is not None and not refused) or any(guard.main for guard in call.guards):
            continue
        if (call.open_ended and not refused) or _ends_alike(call):
            continue
        if any(one.call is not None and one.call.name.endswith(HALVES) for one in call.withs):
            continue
        watched = program.has_call(*WATCHED)
        yield program.finding(
            "zero3-generate-hang",
            call,
            what="each rank's generate() ends after as many steps as its own sequences need, and "
            f"with {by} every step gathers weights from all ranks",
            fix="generate(..., synced_gpus=True)",
            level=Severity.INFO if watched and not refused else Severity.WARNING,
        )


def _ends_alike(call: Call) -> bool:
    """Whether every sequence has one number of new tokens."""
    least, most = (call.argument(None, f"{one}_new_tokens") for one in ("min", "max"))
    if least is None or most is None:
        return False
    return least is most or (least.known() is not None and least.known() == most.known())


HALVES = ("GatheredParameters", "summon_full_params")


RULES = (check_zero3,)
