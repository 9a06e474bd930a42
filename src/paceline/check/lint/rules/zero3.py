"""What ZeRO's third stage, which gathers each layer when it is called, does not survive."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import DEEPSPEED_INIT
from paceline.check.lint.program import Program
from paceline.check.lint.rules.agreement import SHARDED, zero_stage
from paceline.check.lint.rules.partitioned import WATCHED
from paceline.check.lint.values import Value

EXPERTS = re.compile(
    r"mixtral|moe|dbrx|deepseek|gpt.?oss|jamba|arctic|grok|phi-?3\.5-moe|olmoe|granite.*moe|switch",
    re.IGNORECASE,
)
"""In the name of a class or checkpoint: its feed-forward layers are experts, of which a token takes
some. DeepSeek's are so since V2; names with a dense model's size are taken out below."""

DENSE = re.compile(r"deepseek-(llm|coder-(1\.3|6\.7|33)b|r1-distill)", re.IGNORECASE)


def check_zero3(program: Program, context: Context) -> Iterator[Finding]:
    """Experts that ranks call differently, and sequences that end at different lengths."""
    engines = [call for call in program.calls(DEEPSPEED_INIT) if is_stage_3(call)]
    for engine in engines:
        model = engine.argument(1, "model")
        if (
            model is not None
            and _names_experts(model)
            and not program.mentions("set_z3_leaf", "leaf_module", "z3_leaf")
        ):
            yield program.finding(
                "zero3-moe-hang",
                Severity.ERROR,
                engine,
                what="ZeRO stage 3 gathers an expert's weights when it is called, and ranks call "
                "different experts: their all-gathers do not match",
                fix="deepspeed.utils.set_z3_leaf_modules(model, [TheSparseMoeBlock]) before "
                "deepspeed.initialize, or stage 2",
            )
    if engines or _is_zero3_elsewhere(program):
        yield from _generation(program, program.calls(method="generate"), "ZeRO stage 3")
    else:
        sharded = [one for one in program.calls(method="generate") if _is_sharded(one)]
        yield from _generation(program, sharded, "FSDP")


def is_stage_3(call: Call) -> bool:
    return zero_stage(call.argument(None, "config", "config_params")) == 3


def _names_experts(model: Value) -> bool:
    for one in model.origins():
        names = [one.instance or "", one.name or ""]
        call = one.call
        if isinstance(call, Call):
            names.append(call.name)
            names += [str(arg.likely()) for arg in call.args[:1] if isinstance(arg.likely(), str)]
        for name in names:
            if EXPERTS.search(name.rpartition("transformers.")[2]) and not DENSE.search(name):
                return True
    return False


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
            Severity.INFO if watched and not refused else Severity.WARNING,
            call,
            what="each rank's generate() ends after as many steps as its own sequences need, and "
            f"with {by} every step gathers weights from all ranks",
            fix="generate(..., synced_gpus=True)",
        )


def _ends_alike(call: Call) -> bool:
    """Whether every sequence has one number of new tokens."""
    least, most = (call.argument(None, f"{one}_new_tokens") for one in ("min", "max"))
    if least is None or most is None:
        return False
    return least is most or (least.known() is not None and least.known() == most.known())


HALVES = ("GatheredParameters", "summon_full_params")


def check_empty_weights(program: Program, context: Context) -> Iterator[Finding]:
    """Weights written or read past the engine, where each rank holds none or a part of them."""
    engines = [call for call in program.calls(DEEPSPEED_INIT) if is_stage_3(call)]
    for call in program.calls(method=("state_dict", "load_state_dict", "save_pretrained")):
        model = call.receiver
        if model is None or any(one.call is not None and _gathers(one.call) for one in call.withs):
            continue
        inside = [one for one in engines if one.order < call.order and _is_plain(one, model)]
        if not inside:
            continue
        if call.method != "load_state_dict" and program.mentions("gather_16bit", "zero_to_fp32"):
            continue
        reads = call.method == "load_state_dict"
        yield program.finding(
            "zero3-zero-size-params",
            Severity.ERROR,
            call,
            what=(
                f"since line {inside[0].line} each rank holds a part of every weight, and the "
                "plain model's are empty (`torch.Size([0])`): "
                + ("they cannot be filled here" if reads else "that is what is saved")
            ),
            fix="engine.load_checkpoint, or load before deepspeed.initialize"
            if reads
            else "engine.save_checkpoint, or engine.save_16bit_model, on every rank",
            seen=inside[:1],
        )


def _gathers(call: object) -> bool:
    return isinstance(call, Call) and call.name.endswith(HALVES)


def _is_plain(engine: Call, model: Value) -> bool:
    given = engine.argument(1, "model")
    plain = set(given.any()) if given is not None else set()
    return any(one in plain and one.wrapper is None for one in model.any())


RULES = (
    check_zero3,
    check_empty_weights,
)
