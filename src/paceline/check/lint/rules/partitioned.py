"""Weights that ZeRO's third stage has parted as the model was made, read or written as if whole."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Assign, Call, Event
from paceline.check.lint.names import DEEPSPEED_INIT
from paceline.check.lint.program import Program
from paceline.check.lint.rules.agreement import zero_stage
from paceline.check.lint.values import Value

WATCHED = {
    "transformers.integrations.HfDeepSpeedConfig": 0,
    "transformers.deepspeed.HfDeepSpeedConfig": 0,
    "transformers.integrations.deepspeed.HfDeepSpeedConfig": 0,
    "transformers.TrainingArguments": None,
    "transformers.Seq2SeqTrainingArguments": None,
    "trl.SFTConfig": None,
}
"""What transformers learns the stage from, and the position of the configuration."""


def check_partitioned_weights(program: Program, context: Context) -> Iterator[Finding]:
    """A weight's values used outside of GatheredParameters: each rank holds none or a part."""
    parted: dict[Value, Call] = {}
    for model, start in parted_models(program):
        parted.setdefault(model, start)
    reported: set[int] = set()
    for event in program.events if parted else ():
        for value in used_values(event):
            owner = owner_of(value)
            maker = next(
                (one for one in (owner.any() if owner is not None else ()) if one in parted), None
            )
            if maker is None or id(event.node) in reported or is_gathered(event):
                continue
            since = parted[maker]
            if since.order >= event.order or event.node is since.node:
                continue
            reported.add(id(event.node))
            yield program.finding(
                "zero3-zero-size-params",
                Severity.ERROR,
                event,
                what=(
                    f"line {since.line} leaves each rank a part of every weight, and here the "
                    "plain weight is used, which is empty (`torch.Size([0])`)"
                ),
                fix="with deepspeed.zero.GatheredParameters(weight, modifier_rank=0): ...",
                seen=(since,),
            )


def check_ignored_sizes(program: Program, context: Context) -> Iterator[Finding]:
    """`ignore_mismatched_sizes=True`: each weight has size 0, and what was trained is dropped."""
    starts = stage_3_starts(program)
    for call in program.calls(method="from_pretrained"):
        ignore = call.argument(None, "ignore_mismatched_sizes")
        before = [one for one in starts if one.order < call.order and one.root == call.root]
        if ignore is None or ignore.const is not True or not before:
            continue
        yield program.finding(
            "zero3-zero-size-params",
            Severity.WARNING,
            call.keyword_nodes.get("ignore_mismatched_sizes", call.node),
            what=(
                f"with ZeRO stage 3 (line {before[0].line}) weights have size 0 while they are "
                "loaded: where sizes are ignored, trained weights may be dropped without a word"
            ),
            fix="leave ignore_mismatched_sizes out",
            seen=before[:1],
        )


def stage_3_starts(program: Program) -> list[Call]:
    """Calls from which on transformers makes models in parts."""
    found = []
    for call in program.calls(*WATCHED):
        config = call.argument(WATCHED[call.name], "deepspeed", "config_file_or_dict")
        if zero_stage(config) == 3:
            found.append(call)
    return found


def parted_models(program: Program) -> Iterator[tuple[Value, Call]]:
    """Models of which each rank holds a part, and the call since which it does."""
    starts = stage_3_starts(program)
    for call in program.all_calls:
        if call.result.kind == "model" and call.method in {"from_pretrained", "from_config"}:
            before = [one for one in starts if one.order < call.order and one.root == call.root]
            if before:
                yield call.result, before[0]
        if call.result.kind == "model" and call.result.call is call:
            for one in call.withs:
                if isinstance(one.call, Call) and one.call.name == "deepspeed.zero.Init":
                    yield call.result, one.call
        if call.name == DEEPSPEED_INIT:
            config = call.argument(None, "config", "config_params")
            given = call.argument(1, "model")
            for one in given.any() if given is not None and zero_stage(config) == 3 else ():
                yield one, call


READS = frozenset(
    {
        *("mean", "norm", "std", "var", "abs", "max", "min", "clone", "cpu", "numpy", "tolist"),
        *("normal_", "uniform_", "zero_", "fill_", "copy_", "mul_", "add_", "lerp_", "div_"),
        *("clamp_", "sub_", "addcmul_", "trunc_normal_"),
    }
)
"""Methods that use a tensor's values."""


def used_values(event: Event) -> list[Value]:
    """Tensors whose values an event reads or writes."""
    if isinstance(event, Assign):
        written = isinstance(event.node, ast.Assign | ast.AugAssign) and event.attribute is None
        return [event.owner] if written and event.owner is not None else []
    if not isinstance(event, Call):
        return []
    if event.name.startswith("torch.nn.init."):
        return list(event.args[:1])
    if event.method in READS and event.receiver is not None:
        return [event.receiver, *event.args]
    return []


def owner_of(weight: Value, depth: int = 10) -> Value | None:
    """The model of a weight: `model.head.weight[:n]`, `for p in model.parameters()`."""
    made = weight.element_of
    if made is None and len(weight.sources) == 1:
        made = weight.sources[0].element_of  # of `name, p in model.named_parameters()`
    if made is not None:
        return made.receiver if made.kind == "parameters" else None
    if weight.attribute in {"weight", "bias"} and weight.receiver is not None:
        return module_owner(weight.receiver, depth)
    if weight.receiver is None or depth == 0:
        return None
    if weight.attribute == "data" or isinstance(weight.node, ast.Subscript):
        return owner_of(weight.receiver, depth - 1)
    return None


PARTS = frozenset({"get_input_embeddings", "get_output_embeddings", "get_submodule"})


def module_owner(module: Value, depth: int) -> Value | None:
    """The model that a part of it was taken from."""
    if depth == 0:
        return None
    made = module.call
    if isinstance(made, Call) and made.method in PARTS and made.receiver is not None:
        return module_owner(made.receiver, depth - 1)
    if made is None and module.receiver is not None:
        return module_owner(module.receiver, depth - 1)
    return module


def is_gathered(event: Event) -> bool:
    names = [one.call.name for one in event.withs if isinstance(one.call, Call)]
    return any(name.endswith(("GatheredParameters", "zero.Init")) for name in names)


RULES = (check_partitioned_weights, check_ignored_sizes)
