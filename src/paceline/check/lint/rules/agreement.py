"""What every rank has to do together, and some do not: collectives and saves in branches."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, Guard, surely_by_rank
from paceline.check.lint.facts.names import COLLECTIVES, DDP, FSDP
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import Value

CHECKPOINT = "torch.distributed.checkpoint"


SAVES = frozenset(
    {
        f"{CHECKPOINT}.save",
        f"{CHECKPOINT}.async_save",
        f"{CHECKPOINT}.save_state_dict",
        f"{CHECKPOINT}.state_dict.get_state_dict",
        f"{CHECKPOINT}.state_dict.get_model_state_dict",
        f"{CHECKPOINT}.state_dict.get_optimizer_state_dict",
        f"{FSDP}.optim_state_dict",
        f"{FSDP}.full_optim_state_dict",
        f"{FSDP}.summon_full_params",
        "deepspeed.DeepSpeedEngine.save_checkpoint",
        "deepspeed.DeepSpeedEngine.save_16bit_model",
        "lightning.pytorch.Trainer.save_checkpoint",
        "lightning.fabric.Fabric.save",
    }
)
"""Calls in which every rank takes part to write one checkpoint."""


SHARDED = ("fsdp1", "fsdp2")


NEEDS = {
    "collective": "every rank of the group has to call it",
    "save": "every rank has to call it",
}


def joint_calls(program: Program) -> list[Call]:
    """Calls that need every rank, in order."""
    return [
        call
        for call in program.all_calls
        if joint_kind(program, call) is not None and not any(one.alone for one in call.guards)
    ]


def joint_kind(program: Program, call: Call) -> str | None:
    """collective or save where a call needs every rank; else None."""
    if call not in program.joint_kinds:
        program.joint_kinds[call] = find_joint_kind(program, call)
    return program.joint_kinds[call]


def find_joint_kind(program: Program, call: Call) -> str | None:
    if call.name in COLLECTIVES | {DDP, FSDP} or wraps_in_accelerate(call):
        return None if of_a_part(call) else "collective"
    if call.name in SAVES:
        return None if of_a_part(call) or whole_model(call) else "save"
    if call.is_method("state_dict") and call.receiver is not None:
        return "save" if sharded_by_then(call, call.receiver) else None
    if call.is_method("full_tensor", "consolidate_state_dict"):
        return "save"
    receiver = call.receiver or Value()
    if call.is_method("save_checkpoint") and receiver.wrapped_by("deepspeed"):
        return "save"
    if is_saved_by_trainer(call, receiver):
        return "save"
    metrics = ((one.instance or "").startswith("torchmetrics.") for one in receiver.any())
    return "collective" if call.is_method("compute") and any(metrics) else None


def wraps_in_accelerate(call: Call) -> bool:
    """`accelerator.prepare(model)`: DDP and FSDP compare the model's parameters over the ranks."""
    given = call.args if call.name == "accelerate.Accelerator.prepare" else call.args[:1]
    named = call.name in {"accelerate.Accelerator.prepare", "accelerate.Accelerator.prepare_model"}
    return named and any(one.has_kind("model") for one in given)


def sharded_by_then(call: Call, model: Value) -> bool:
    """Whether FSDP holds the model when the call is made; `fully_shard` changes it in place."""
    for one in model.any():
        at = one.fields.get("wrapped at")
        later = at is not None and at.call.root == call.root and at.call.order > call.order
        if one.wrapper in SHARDED and not later:
            return True
    return False


def is_saved_by_trainer(call: Call, trainer: Value) -> bool:
    """`trainer.save_checkpoint(path)` of a library's Trainer."""
    is_ours = call.own is not None or any(one.of_class is not None for one in trainer.any())
    return call.method == "save_checkpoint" and trainer.has_kind("trainer") and not is_ours


GROUPS = ("group", "process_group")


def of_a_part(call: Call) -> bool:
    """Whether it is for a group that the call names: the branch may be that group's."""
    group = call.argument(None, *GROUPS)
    written = [getattr(call.keyword_nodes.get(name), "value", None) for name in GROUPS]
    asked = any(isinstance(one, ast.Call) for one in written)
    return asked or (group is not None and group.const is not None)


def whole_model(call: Call) -> bool:
    """Whether a state dict is taken of a model that nothing is seen to shard."""
    if not call.name.startswith(f"{CHECKPOINT}.state_dict.get_"):
        return False
    model = call.argument(0, "model")
    return model is not None and not model.wrapped_by(*SHARDED, "accelerate", "fabric", "deepspeed")


def check_rank_branches(program: Program, context: Context) -> Iterator[Finding]:
    """collective-mismatch, rank0-only-collective-save."""
    joints = list(joint_calls(program))
    reported: set[int] = set()
    for call in sorted(joints, key=lambda one: (joint_kind(program, one) != "save", one.order)):
        guard = rank_guard(call)
        if guard is None or answered(call, guard, joints):
            continue
        if goes_on_in_with(call, guard, joints):
            continue
        if handed_on_elsewhere(call, guard):
            continue
        at = call.at_depth(guard.depth)
        key = guard.node if opposite_calls(guard, joints) else at
        if id(key) in reported:
            continue
        reported.add(id(key))
        yield rank_finding(program, call, guard)


def rank_guard(call: Call) -> Guard | None:
    """The outermost condition that lets some ranks pass and not others.

    None where two conditions leave no rank, as the main process's inside of all others'.
    """
    if {True, False} <= {one.main for one in call.guards}:
        return None
    for one in call.guards:
        if one.by_rank and one.how != "while" and not open_to_all(one, call):
            return one
    return None


def open_to_all(guard: Guard, call: Call) -> bool:
    """`if everywhere or rank == 0:`, where the call stands in an `if everywhere:` further in."""
    sign, *parts = guard.test.operation or ("",)
    if sign != ("Or" if guard.holds else "And"):
        return False
    equal = [one for one in parts if not one.divergent]
    return any(
        follows(other.test, other.holds, one, guard.holds)
        for one in equal
        for other in call.guards
        if other is not guard
    )


def follows(test: Value, holds: bool, one: Value, wanted: bool) -> bool:
    """Whether a condition that holds, or not, settles another one as wanted."""
    if test is one:
        return holds is wanted
    sign, *parts = test.operation or ("",)
    if sign == "Not":
        return follows(parts[0], not holds, one, wanted)
    return sign == ("And" if holds else "Or") and any(
        follows(part, holds, one, wanted) for part in parts
    )


def answered(call: Call, guard: Guard, joints: list[Call]) -> bool:
    """Whether the ranks that do not pass the condition make the same calls in the function, too."""
    frames = call.frames[: guard.depth]
    beside = [one for one in joints if one.frames[: guard.depth] == frames]
    return any(
        [one.name for one in calls if under(one, guard, guard.holds)]
        == opposite_calls(guard, calls)
        for calls in (beside, joints)
    )


def opposite_calls(guard: Guard, joints: list[Call]) -> list[str]:
    """Calls of the ranks that do not pass a condition, in order."""
    test = guard.test
    theirs = []
    for other in joints:
        for one in other.guards:
            if one.depth != guard.depth or one is guard:
                continue
            same_test = one.test is test and one.holds is not guard.holds
            opposite = guard.main is not None and one.main is (not guard.main)
            if same_test or opposite:
                theirs.append(other.name)
                break
    return theirs


def handed_on_elsewhere(call: Call, guard: Guard) -> bool:
    """Whether a function written on the other side, which somebody is to call, makes the call."""
    if not isinstance(guard.node, ast.If):
        return False
    last = call.name.rpartition(".")[2]
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == last
        for statement in (guard.node.orelse if guard.holds else guard.node.body)
        for outer in ast.walk(statement)
        if isinstance(outer, ast.FunctionDef | ast.Lambda)
        for node in ast.walk(outer)
    )


def goes_on_in_with(call: Call, guard: Guard, joints: list[Call]) -> bool:
    """Whether a context manager yields to the other ranks, for whom the same call stands ready."""
    if not 0 < guard.depth <= len(call.frames):
        return False
    function = call.frames[guard.depth - 1].function
    yields = any(isinstance(one, ast.Yield) for one in ast.walk(guard.node))
    if not yields or not function.has_decorator("contextmanager"):
        return False
    same = [one for one in joints if one.name == call.name]
    return any(not under(one, guard, guard.holds) for one in same)


def under(call: Call, guard: Guard, holds: bool) -> bool:
    for one in call.guards:
        if one is guard or (one.test is guard.test and one.holds is holds):
            return True
        if guard.main is not None and one.main is guard.main and one.depth == guard.depth:
            return True
    return False


def rank_finding(program: Program, call: Call, guard: Guard) -> Finding:
    at = call.at_depth(guard.depth)
    only = "only a part of the ranks"
    if guard.main is not None:
        only = "only the main process" if guard.main else "every process but the main one"
    there = call.name.rpartition(".")[2]
    there += f" (through {call.spot})" if at is not call.node else ""
    kind = joint_kind(program, call) or ""
    if kind == "collective":
        id, fix = "collective-mismatch", "move it out of the branch, so that every rank calls it"
    else:
        id = "rank0-only-collective-save"
        fix = "let every rank make this call, above the branch; what it gives is for the branch"
    ends = f"waits there until the time-out: {NEEDS[kind]}"
    if call.is_method("state_dict") and call.receiver and wrappers(call.receiver) == {"fsdp2"}:
        ends = "saves its own shards alone: those of the other ranks are in no file"
        fix = "above the branch, on every rank: get_model_state_dict with full_state_dict=True"
    what = f"{only} reaches {there} (condition in {guard.spot}) and {ends}"
    return program.finding(
        id,
        at,
        what,
        fix,
        seen=(guard, call),
        level=Severity.ERROR if is_shown(call, guard) else Severity.INFO,
    )


def is_shown(call: Call, guard: Guard) -> bool:
    """Whether condition and collective prove it for every run: the condition asks for the rank,
    and both stand in one function that hands nothing on between (one half of a context manager
    waits for the other).
    """
    function = call.function
    parts = ast.walk(function.node) if function is not None else ()
    return (
        surely_by_rank(guard.test)
        and len(call.frames) == guard.depth
        and (function is None or not function.name.startswith("__"))
        and not any(isinstance(one, ast.Yield) for one in parts)
    )


def wrappers(model: Value) -> set[str | None]:
    """How a model is wrapped; a variable that is None until then is one thing."""
    return {one.wrapper for one in model.any() if one.const is not None}


RULES = (check_rank_branches,)
