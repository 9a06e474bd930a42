"""What every rank has to do together, and some do not: collectives and saves in branches."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Guard, surely_by_rank
from paceline.check.lint.names import COLLECTIVES, DDP, FSDP
from paceline.check.lint.program import Program
from paceline.check.lint.values import Value, innermost, stops_gradients

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


GATHERED_SAVES = frozenset(
    {"accelerate.Accelerator.get_state_dict", "accelerate.Accelerator.save_model"}
)
"""Calls that gather a sharded model's weights from every rank, and no others'."""

SAVE_STATE = "accelerate.Accelerator.save_state"

SHARDED = ("fsdp1", "fsdp2")


WORDS = {
    "collective": "every rank of the group has to call it",
    "save": "every rank has to call it",
    "forward": "every rank has to run the forward pass of a wrapped model",
    "backward": "every rank has to run the backward pass of a wrapped model",
}


@dataclass(frozen=True, slots=True)
class Joint:
    """A call that needs every rank, and what kind of call it is."""

    call: Call
    kind: str
    """collective, save, forward, backward."""

    condition: str = ""
    """What has to be so for it to need them, where the program does not show that it is."""

    severity: Severity = Severity.ERROR

    @property
    def shown(self) -> str:
        return self.call.name.rpartition(".")[2] if self.kind != "forward" else "the forward pass"


def joint_calls(program: Program) -> Iterator[Joint]:
    """Calls that need every rank, in order."""
    for call in program.all_calls:
        kind = joint_kind(program, call)
        if kind is not None and not any(one.alone for one in call.guards):
            yield Joint(call, kind)


def conditional_calls(program: Program) -> Iterator[Joint]:
    """Calls that need every rank in some runs of the program, with the condition."""
    for call in program.all_calls:
        if any(one.alone for one in call.guards) or joint_kind(program, call) is not None:
            continue
        if call.name == SAVE_STATE:
            yield Joint(call, "save", "with FSDP or DeepSpeed ", Severity.INFO)
        elif only_reads_ddp(call) and has_buffers(program, call.forward_of) is None:
            condition = "where the model has buffers, as batch normalisation has, "
            yield Joint(call, "forward", condition, Severity.INFO)


def only_reads_ddp(call: Call) -> bool:
    """Whether it is a forward pass of DDP without gradients: it broadcasts buffers, if anything."""
    return only_reads(call, "ddp")


def only_reads(call: Call, wrapper: str) -> bool:
    """Whether it is a forward pass without gradients of a model that is wrapped so."""
    return (
        call.forward_of is not None
        and call.forward_of.wrapped_by(wrapper)
        and any(map(stops_gradients, call.withs))
    )


def has_buffers(program: Program, model: Value | None) -> bool | None:
    """Whether DDP broadcasts buffers of the model before a forward pass; None if not known.

    Source: `DistributedDataParallel.will_sync_module_buffers`, torch 2.13.
    """
    wraps = [one.call for one in model.any() if isinstance(one.call, Call)] if model else []
    given = [one.argument(None, "broadcast_buffers") for one in wraps]
    if given and all(one is not None and one.const is False for one in given):
        return False
    surely = [one for one in program.all_calls if not any(map(one.stands_under, one.guards))]
    made = {one.name.rpartition(".")[2] for one in surely}
    if made & {"register_buffer", "convert_sync_batchnorm"} or any("BatchNorm" in n for n in made):
        return True
    inner = innermost(model) if model is not None else Value()
    ours = inner.of_class is not None or (inner.instance or "").startswith("torch.nn.")
    parts = [one for one in program.all_calls if one.result.kind == "model" and one.own is None]
    plain = all(one.result.wrapper or one.name.startswith(("torch.nn.", "own.")) for one in parts)
    return False if ours and plain else None


def joint_kind(program: Program, call: Call) -> str | None:
    """collective, save, forward or backward where a call needs every rank; else None."""
    if call not in program.joint_kinds:
        program.joint_kinds[call] = find_joint_kind(program, call)
    return program.joint_kinds[call]


def find_joint_kind(program: Program, call: Call) -> str | None:
    if call.name == SAVE_STATE:
        return "save" if saves_together(program, call) else None
    if call.name in COLLECTIVES:
        return None if of_a_part(call) else "collective"
    if call.name in {DDP, FSDP}:
        return None if of_a_part(call) else "collective"
    if call.name in SAVES:
        return None if of_a_part(call) or whole_model(call) else "save"
    if call.is_method("state_dict") and call.receiver is not None:
        return "save" if sharded_by_then(call, call.receiver) else None
    if call.name in GATHERED_SAVES:
        model = call.argument(0, "model")
        return "save" if model is not None and sharded_by_framework(model) else None
    if call.is_method("full_tensor"):
        return "save"
    if call.is_method("consolidate_state_dict"):
        return "save"
    receiver = call.receiver or Value()
    if call.is_method("save_checkpoint") and receiver.wrapped_by("deepspeed"):
        return "save"
    if only_reads_ddp(call):
        return "forward" if has_buffers(program, call.forward_of) else None
    if only_reads(call, "deepspeed"):  # below ZeRO's third stage a rank has the weights whole
        models = call.forward_of.any() if call.forward_of is not None else ()
        return "forward" if any(map(holds_parts, models)) else None
    if call.forward_of is not None and (
        call.forward_of.wrapped_by("ddp", "deepspeed") or sharded_by_then(call, call.forward_of)
    ):
        return "forward"
    if call.forward_of is not None and (
        sharded_by_framework(call.forward_of) or inside_of_sharded(call, call.forward_of)
    ):
        return "forward"
    if call.receiver is not None:
        kind = of_lightning_module(call, call.receiver) or of_trainer(call, call.receiver)
        if kind is not None or saves_parts(call, call.receiver):
            return kind or "save"
    if call.is_method("compute") and call.receiver is not None:
        torchmetrics = any(
            (one.instance or "").startswith("torchmetrics.") for one in call.receiver.any()
        )
        return "collective" if torchmetrics else None
    return None


def saves_together(program: Program, call: Call) -> bool:
    """Whether Accelerate's `save_state` waits for every rank: it gathers shards, or names folders.

    Source: `Accelerator.save_state`, accelerate 1.15: with DDP alone no call in it is of all ranks.
    """
    owners = [one.call for one in call.receiver.any()] if call.receiver is not None else []
    for start in owners:
        if isinstance(start, Call):
            given = [start.argument(None, *PLUGINS), start.argument(None, "project_config")]
            named = given[1].call if given[1] is not None else None
            naming = (
                named.argument(None, "automatic_checkpoint_naming")
                if isinstance(named, Call)
                else None
            )
            plugins = given[0].any() if given[0] is not None else ()
            if any((one.instance or "").endswith("Plugin") for one in plugins):
                return True
            if naming is not None and naming.likely() is True:
                return True
    prepared = program.calls("accelerate.Accelerator.prepare")
    results = [each for one in prepared for each in (one.result, *(one.result.items or ()))]
    return any(model.is_sharded for one in results for model in one.any())


def sharded_by_then(call: Call, model: Value) -> bool:
    """Whether FSDP holds the model when the call is made; `fully_shard` changes it in place."""
    for one in model.any():
        at = one.fields.get("wrapped at")
        later = at is not None and at.call.root == call.root and at.call.order > call.order
        if one.wrapper in SHARDED and not later:
            return True
    return False


def of_trainer(call: Call, trainer: Value) -> str | None:
    """`trainer.evaluate()`, `trainer.save_checkpoint(path)` of a library's Trainer."""
    if call.own is not None or not trainer.has_kind("trainer"):
        return None
    if any(one.of_class is not None for one in trainer.any()):
        return None
    if call.method == "save_checkpoint":
        return "save"
    known = any(one.instance is not None for one in trainer.any())
    return "forward" if known and call.method in {"evaluate", "predict", "validate"} else None


LIGHTNING = ("lightning.pytorch.LightningModule", "lightning.pytorch.Callback")


def of_lightning_module(call: Call, receiver: Value) -> str | None:
    """`self.all_gather(x)`, `self.log(..., sync_dist=True)`, `trainer.strategy.barrier()`."""
    owners = {one.of_class for one in receiver.any() if one.of_class is not None}
    owners |= {frame.function.own_class for frame in call.frames[-1:] if frame.function.own_class}
    if not any(base in LIGHTNING for own in owners for base in own.library_bases()):
        return None
    if call.method in {"barrier", "reduce", "broadcast"} and "strategy" in receiver.label:
        return "collective"
    if receiver.of_class is None:
        return None
    if call.method == "all_gather":
        return "collective"
    synced = call.argument(None, "sync_dist")
    if call.method in {"log", "log_dict"} and synced is not None and synced.const is True:
        return "collective"
    return None


def saves_parts(call: Call, trainer: Value) -> bool:
    """Whether Transformers' Trainer saves a model whose weights every rank has a part of."""
    if call.method != "save_model" or not trainer.has_kind("trainer"):
        return False
    for one in trainer.any():
        start = one.call
        arguments = start.argument(1, "args") if isinstance(start, Call) else None
        made = arguments.call if arguments is not None else None
        if not isinstance(made, Call):
            continue
        sharded = made.argument(None, "fsdp", "deepspeed")
        if sharded is not None and sharded.const not in {None, "", False}:
            return True
    return False


PLUGINS = ("fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin")
STRATEGIES = ("fsdp", "deepspeed", "modelparallel")


def sharded_by_framework(model: Value) -> bool:
    """Whether Accelerate or Fabric, as the program sets them up, gives each rank a part of it."""
    for one in model.any():
        made = one.call
        if one.is_sharded:
            return True
        if one.wrapper not in {"accelerate", "fabric"} or not isinstance(made, Call):
            continue
        for owner in made.receiver.any() if made.receiver is not None else ():
            start = owner.call
            if not isinstance(start, Call):
                continue
            plugins = [start.argument(None, name) for name in PLUGINS]
            if any(each is not None and each.const is not None for each in plugins):
                return True
            strategy = start.argument(1, "strategy") if one.wrapper == "fabric" else None
            for each in strategy.any() if strategy is not None else ():
                name = (each.instance or "").rpartition(".")[2] or str(each.likely(""))
                if any(word in name.lower() for word in STRATEGIES):
                    return True
    return False


GATHER = ("summon_full_params", "GatheredParameters", "unwrap_model_for_generation")


def inside_of_sharded(call: Call, model: Value) -> bool:
    """Whether it is the plain model in a sharded one, whose weights no rank has whole."""
    if any(one.call.name.endswith(GATHER) for one in call.withs if isinstance(one.call, Call)):
        return False
    for one in model.any():
        outer = one.fields.get("wrapped by")
        if outer is None or one.wrapper is not None or not isinstance(outer.call, Call):
            continue
        if outer.call.order > call.order:
            continue
        if outer.wrapped_by(*SHARDED) or holds_parts(outer):
            return True
    return False


def holds_parts(model: Value) -> bool:
    """Whether a framework leaves each rank a part of the weights: FSDP, or ZeRO's third stage."""
    if model.wrapped_by("deepspeed"):
        if not isinstance(model.call, Call):
            return False
        return zero_stage(model.call.argument(None, "config", "config_params")) == 3
    if not sharded_by_framework(model):
        return False
    owner = model.call.receiver
    for one in owner.any() if owner is not None else ():
        plugin = one.call.argument(None, *PLUGINS[1:3]) if isinstance(one.call, Call) else None
        if plugin is not None and plugin.const is not None:
            stage = plugin.call.argument(None, "zero_stage") if plugin.call is not None else None
            return stage is not None and stage.likely() == 3
    return True


def zero_stage(config: Value | None) -> int | None:
    """The stage that a DeepSpeed configuration written as a dict asks for."""
    for one in config.any() if config is not None else ():
        zero = (one.entries or {}).get("zero_optimization")
        stage = (zero.entries or {}).get("stage") if zero is not None else None
        if stage is not None and isinstance(stage.likely(), int):
            return int(stage.likely())
    return None


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
    """collective-mismatch, rank0-only-collective-save, rank0-only-validation."""
    joints = [*joint_calls(program), *conditional_calls(program)]
    order = {"save": 0, "forward": 1, "collective": 2, "backward": 3}
    reported: set[int] = set()
    for joint in sorted(joints, key=lambda one: (order[one.kind], one.call.order)):
        guard = rank_guard(joint.call)
        if guard is None or answered(joint, guard, joints):
            continue
        if same_function_elsewhere(program, joint, guard) or goes_on_in_with(joint, guard, joints):
            continue
        if handed_on_elsewhere(joint, guard):
            continue
        at = joint.call.at_depth(guard.depth)
        key = guard.node if opposite_calls(guard, joints) else at
        if id(key) in reported:
            continue
        reported.add(id(key))
        yield rank_finding(program, joint, guard)


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


def answered(joint: Joint, guard: Guard, joints: list[Joint]) -> bool:
    """Whether the ranks that do not pass the condition make the same calls in the function, too."""
    frames = joint.call.frames[: guard.depth]
    beside = [one for one in joints if one.call.frames[: guard.depth] == frames]
    if guard.main is not None and len(joint.call.frames) == guard.depth:
        for other in beside:  # `if not main: barrier()`, then `if main: barrier()` in the function
            theirs = [one for one in other.call.guards if one.main is (not guard.main)]
            apart = any(one.node is not guard.node for one in theirs)
            if apart and other.call.name == joint.call.name and other.call.frames == frames:
                return True
    return any(
        [one.call.name for one in calls if under(one, guard, guard.holds)]
        == opposite_calls(guard, calls)
        for calls in (beside, joints)
    )


def opposite_calls(guard: Guard, joints: list[Joint]) -> list[str]:
    """Calls of the ranks that do not pass a condition, in order."""
    test = guard.test
    theirs = []
    for other in joints:
        for one in other.call.guards:
            if one.depth != guard.depth or one is guard:
                continue
            same_test = one.test is test and one.holds is not guard.holds
            opposite = guard.main is not None and one.main is (not guard.main)
            if same_test or opposite:
                theirs.append(other.call.name)
                break
    return theirs


def same_function_elsewhere(program: Program, joint: Joint, guard: Guard) -> bool:
    """Whether the other side of the condition calls the own function that leads here."""
    if guard.depth >= len(joint.call.frames):
        return False
    function = joint.call.frames[guard.depth].function
    for other in program.all_calls:
        if other.own is function and any(
            one.test is guard.test and one.holds is not guard.holds for one in other.guards
        ):
            return True
    return False


def handed_on_elsewhere(joint: Joint, guard: Guard) -> bool:
    """Whether a function written on the other side, which somebody is to call, makes the call."""
    if not isinstance(guard.node, ast.If):
        return False
    last = joint.call.name.rpartition(".")[2]
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == last
        for statement in (guard.node.orelse if guard.holds else guard.node.body)
        for outer in ast.walk(statement)
        if isinstance(outer, ast.FunctionDef | ast.Lambda)
        for node in ast.walk(outer)
    )


def goes_on_in_with(joint: Joint, guard: Guard, joints: list[Joint]) -> bool:
    """Whether a context manager yields to the other ranks, for whom the same call stands ready."""
    if not 0 < guard.depth <= len(joint.call.frames):
        return False
    function = joint.call.frames[guard.depth - 1].function
    yields = any(isinstance(one, ast.Yield) for one in ast.walk(guard.node))
    if not yields or not function.has_decorator("contextmanager"):
        return False
    same = [one for one in joints if one.call.name == joint.call.name]
    return any(not under(one, guard, guard.holds) for one in same)


def under(joint: Joint, guard: Guard, holds: bool) -> bool:
    for one in joint.call.guards:
        if one is guard or (one.test is guard.test and one.holds is holds):
            return True
        if guard.main is not None and one.main is guard.main and one.depth == guard.depth:
            return True
    return False


def rank_finding(program: Program, joint: Joint, guard: Guard) -> Finding:
    call = joint.call
    at = call.at_depth(guard.depth)
    only = "only a part of the ranks"
    if guard.main is not None:
        only = "only the main process" if guard.main else "every process but the main one"
    ends = f"waits there until the time-out: {joint.condition}{WORDS[joint.kind]}"
    deeper = f" (through {call.spot})" if at is not call.node else ""
    id = {
        "collective": "collective-mismatch",
        "save": "rank0-only-collective-save",
        "forward": "rank0-only-validation",
        "backward": "collective-mismatch",
    }[joint.kind]
    fix = {
        "collective": "move it out of the branch, so that every rank calls it",
        "save": "let every rank make this call, above the branch; what it gives is for the branch",
        "forward": (
            "let every rank evaluate its share and reduce the result; with DDP, "
            "`model.module` may be called on one rank"
        ),
        "backward": "let every rank run it",
    }[joint.kind]
    if call.is_method("state_dict") and call.receiver and wrappers(call.receiver) == {"fsdp2"}:
        ends = "saves its own shards alone: those of the other ranks are in no file"
        fix = "above the branch, on every rank: get_model_state_dict with full_state_dict=True"
    return program.finding(
        id,
        at,
        what=f"{only} reaches {joint.shown}{deeper} (condition in {guard.spot}) and {ends}",
        fix=fix,
        seen=(guard, call),
        level=joint.severity if is_shown(program, joint, guard) else Severity.INFO,
    )


def is_shown(program: Program, joint: Joint, guard: Guard) -> bool:
    """Whether the calls on the way prove it for every run: the condition asks for the rank, the way
    there is the only one, the model is wrapped whatever its options are, and no other method of
    the class makes the same call for the ranks that are missed (one on entering, one on leaving).
    """
    call = joint.call
    model = call.forward_of if joint.kind == "forward" else call.receiver
    if "lightning" in call.name or (model is not None and model.has_kind("trainer")):
        return False  # whether it waits for all ranks depends on the release
    ways = [one.call.receiver for one in call.frames[guard.depth :] if one.call is not None]
    own_class = call.function.own_class if call.function is not None else None
    others = (one for one in program.calls(call.name) if one.root != call.root)
    return (
        surely_by_rank(guard.test)
        and all(one is None or len(objects(one)) < 2 for one in ways)
        and (model is None or joint.kind == "collective" or len(wrappers(model)) < 2)
        and not any(
            own_class is not None
            and one.function is not None
            and one.function.own_class is own_class
            and rank_guard(one) is not None
            for one in others
        )
    )


def objects(receiver: Value) -> list[Value]:
    """What a method may belong to; a variable that is None until then is one thing."""
    return [one for one in receiver.any() if one.const is not None]


def wrappers(model: Value) -> set[str | None]:
    return {one.wrapper for one in objects(model)}


RULES = (check_rank_branches,)
