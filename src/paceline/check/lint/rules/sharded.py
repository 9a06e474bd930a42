"""What goes wrong with FSDP, `fully_shard` and their state dicts."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, exclusive
from paceline.check.lint.names import FSDP, FULLY_SHARD
from paceline.check.lint.program import Program
from paceline.check.lint.values import Value

FULL_TYPE = "torch.distributed.fsdp.StateDictType.FULL_STATE_DICT"


def check_clip(program: Program, context: Context) -> Iterator[Finding]:
    """torch's clip_grad_norm_ sees only this rank's shards of FSDP1's parameters."""
    for call in program.calls("torch.nn.utils.clip_grad_norm_"):
        given = call.argument(0, "parameters")
        model = sharded_owner(given) if given is not None else None
        if model is None:
            continue
        yield program.finding(
            "fsdp-clip-grad-norm",
            Severity.ERROR,
            call,
            what=(
                "the parameters are FSDP shards: the norm is that of this rank's part alone, and "
                "every rank clips by another factor"
            ),
            fix=f"{model.label or 'model'}.clip_grad_norm_(max_norm)",
        )


def sharded_owner(parameters: Value) -> Value | None:
    """The FSDP1 model whose parameters these are: a list of them, an optimizer's, a helper's."""
    for one in parameters.origins():
        model = one.receiver
        if one.kind != "parameters" or model is None:
            continue
        if by_plugin(model):
            return model
        if model.wrapped_by("fsdp1") and not any(
            keeps_whole(each) or each.wrapper not in {None, "fsdp1"} for each in model.any()
        ):
            return model
    return None


def by_plugin(model: Value) -> bool:
    """Whether Accelerate's FSDP plugin, in its first version, wraps the model."""
    for one in model.any():
        owner = one.call.receiver if isinstance(one.call, Call) else None
        start = owner.call if owner is not None and one.wrapper == "accelerate" else None
        plugin = start.argument(None, "fsdp_plugin") if isinstance(start, Call) else None
        if plugin is None or not isinstance(plugin.call, Call) or plugin.call.open_ended:
            continue
        version = plugin.call.argument(None, "fsdp_version")
        if version is None or version.const == 1:
            return True
    return False


def keeps_whole(model: Value) -> bool:
    """Whether every rank holds all of each parameter: `ShardingStrategy.NO_SHARD`."""
    wrap = model.call
    strategy = wrap.argument(2, "sharding_strategy") if isinstance(wrap, Call) else None
    return strategy is not None and (strategy.name or strategy.label).endswith("NO_SHARD")


def check_optimizer_first(program: Program, context: Context) -> Iterator[Finding]:
    """An optimizer that holds the parameters as they were before sharding."""
    sharding = program.calls(FSDP, FULLY_SHARD)
    for made in program.all_calls:
        if made.result.kind != "optimizer" or not made.args or made.own is not None:
            continue  # an own function's call: what it makes comes by itself
        if made.name.startswith("builtins."):
            continue  # `getattr(scheduler, "optimizer")` makes none
        models = [
            one
            for source in (*made.args, *made.kwargs.values())
            for one in source.origins()
            if one.kind == "model"
        ]
        for wrap in sharding:
            if wrap.root != made.root or wrap.order < made.order:
                continue
            if not shards_any(wrap, models) or exclusive(made, wrap):
                continue
            kept = wrap.argument(None, "use_orig_params")
            if kept is not None and kept.likely() is not False:
                continue  # the optimizer's parameters stay, as views of what is sharded
            yield program.finding(
                "fsdp-optimizer-before-wrap",
                Severity.ERROR,
                made,
                what=(
                    f"the optimizer is made before line {wrap.line} shards the model: it keeps the "
                    "old parameters and updates nothing that is trained"
                ),
                fix="make the optimizer after sharding, from the sharded model's parameters()",
                seen=(wrap,),
            )
            break


def shards_any(wrap: Call, models: list[Value]) -> bool:
    given = wrap.argument(0, "module")
    if given is None:
        return False
    return any(one in models for one in given.origins())


def check_wrapper_discarded(program: Program, context: Context) -> Iterator[Finding]:
    """`for layer in model.layers: FSDP(layer)` throws the wrappers away."""
    dropped = {id(node.value) for node in program.nodes() if isinstance(node, ast.Expr)}
    reported: set[int] = set()
    loops = [node for node in program.nodes() if isinstance(node, ast.For)]
    for call in program.calls(FSDP):
        if id(call.node) in reported:
            continue
        if id(call.node) in dropped or rebinds_loop_name(call, loops):
            reported.add(id(call.node))
            yield program.finding(
                "fsdp-wrapper-discarded",
                Severity.ERROR,
                call,
                what=(
                    "FSDP returns the wrapper and it is thrown away: the model goes on to call "
                    "the plain layer, whose parameters FSDP has just flattened and sharded"
                ),
                fix="assign it (`model.layers[i] = FSDP(layer)`), or use fully_shard(layer)",
            )


def rebinds_loop_name(call: Call, loops: list[ast.For]) -> bool:
    """`for layer in model.layers: layer = FSDP(layer)`: the list keeps the plain layer."""
    for loop in loops:
        if not isinstance(loop.target, ast.Name):
            continue
        for node in loop.body:
            if (
                isinstance(node, ast.Assign)
                and node.value is call.node
                and all(
                    isinstance(one, ast.Name) and one.id == loop.target.id for one in node.targets
                )
            ):
                later = loop.body[loop.body.index(node) + 1 :]
                return not any(
                    isinstance(part, ast.Name) and part.id == loop.target.id
                    for statement in later
                    for part in ast.walk(statement)
                )
    return False


def check_full_state(program: Program, context: Context) -> Iterator[Finding]:
    """A full state dict gathered on the GPU of every rank."""
    for call in program.all_calls:
        full = [one for one in call.args if one.name == FULL_TYPE]
        if full and gathered_inside(program, call):
            configs = [*call.args, *call.kwargs.values()]
            config = next((one for one in configs if one.may_be(f"{FSDP_CONFIG}")), None)
            if config is not None and isinstance(config.call, Call):
                yield from gathers(program, config.call, "offload_to_cpu", "rank0_only")
            elif len(configs) < 3 and not call.open_ended:
                yield full_finding(program, call)
        if call.name == "torch.distributed.checkpoint.state_dict.StateDictOptions":
            wanted = call.argument(0, "full_state_dict")
            offload = call.argument(1, "cpu_offload")
            if call.argument(None, "broadcast_from_rank0") is not None:
                continue
            if wanted is not None and wanted.const is True and offload is None:
                yield full_finding(program, call)


def gathered_inside(program: Program, call: Call) -> bool:
    """Whether a state dict is taken under this setting: loading one gathers nothing."""
    takes = program.calls(method=("state_dict", "optim_state_dict", "full_optim_state_dict"))
    entered = [one for one in program.events if any(part.call is call for part in one.withs)]
    if not entered:
        return bool(takes)
    return any(one in entered for one in takes)


FSDP_CONFIG = "torch.distributed.fsdp.FullStateDictConfig"


def gathers(program: Program, config: Call, *names: str) -> Iterator[Finding]:
    given = [config.argument(position, name) for position, name in enumerate(names)]
    if config.open_ended or all(one is not None and one.const is not False for one in given):
        return
    yield full_finding(program, config)


def full_finding(program: Program, at: Call) -> Finding:
    return program.finding(
        "fsdp-full-state-dict-gather",
        Severity.WARNING,
        at,
        what="every rank gathers the whole state dict on its GPU: all parameters at once",
        fix=(
            "offload_to_cpu=True and rank0_only=True (cpu_offload=True in StateDictOptions), or a "
            "sharded checkpoint by torch.distributed.checkpoint"
        ),
    )


def check_cpu_offload(program: Program, context: Context) -> Iterator[Finding]:
    """CPU offload of one unit, the whole model: all of it is gathered in the forward pass."""
    for call in program.calls(FSDP):
        offload = call.argument(None, "cpu_offload")
        if offload is None or not offloads(offload) or call.open_ended:
            continue
        policy = call.argument(None, "auto_wrap_policy")
        if (policy is not None and policy.const is not None) or nested(program, call):
            continue
        yield offload_finding(program, call, "auto_wrap_policy is left out")
    for call in program.calls(FULLY_SHARD):
        offload = call.argument(None, "offload_policy")
        if offload is None or "CPUOffloadPolicy" not in (offload.instance or ""):
            continue
        if not nested(program, call):
            yield offload_finding(program, call, "no layer is sharded by itself")


def offloads(value: Value) -> bool:
    if value.const is True:
        return True
    if not isinstance(value.call, Call) or not (value.instance or "").endswith("CPUOffload"):
        return False
    given = value.call.argument(0, "offload_params")
    return given is not None and given.const is True


def nested(program: Program, call: Call) -> bool:
    """Whether other parts of the model are units of their own, or a helper may make them so."""
    return any(
        one is not call and one.node is not call.node for one in program.calls(call.name)
    ) or program.has_call(
        "torch.distributed.fsdp.wrap.wrap", "torch.distributed.fsdp.wrap.enable_wrap"
    )


def offload_finding(program: Program, call: Call, why: str) -> Finding:
    return program.finding(
        "fsdp-cpu-offload-oom",
        Severity.WARNING,
        call,
        what=(
            f"{why}: the whole model is one unit, and its forward pass gathers all parameters on "
            "the GPU although they are offloaded"
        ),
        fix="shard each layer as a unit: an auto_wrap_policy, or fully_shard(layer) for each",
    )


def check_recomputation(program: Program, context: Context) -> Iterator[Finding]:
    """A sharded causal language model that keeps all its activations."""
    models = [
        one
        for one in program.all_calls
        if one.name.startswith("transformers.AutoModelForCausalLM.")
    ]
    wraps = program.calls(FSDP, FULLY_SHARD)
    if not models or not wraps or program.mentions("checkpointing", "checkpoint_wrapper"):
        return
    yield program.finding(
        "no-gradient-checkpointing",
        Severity.INFO,
        models[0],
        what="a sharded language model keeps the activations of all layers for the backward pass",
        fix="model.gradient_checkpointing_enable()",
        seen=wraps[:1],
    )


NARROW = frozenset({"torch.float16", "torch.bfloat16", "torch.half"})


def check_mixed_dtypes(program: Program, context: Context) -> Iterator[Finding]:
    """Adapters in float32 on a model in 16 bits, flattened into one of FSDP1's units."""
    for adapted in program.calls("peft.get_peft_model"):
        base, cast = adapted.argument(0, "model"), adapted.argument(None, "autocast_adapter_dtype")
        narrow = [
            one.call
            for one in (base.any() if base is not None else ())
            if isinstance(one.call, Call)
            and any(dtype.name in NARROW for dtype in one.call.kwargs.values())
        ]
        if not narrow or (cast is not None and cast.const is not True) or adapted.open_ended:
            continue
        for wrap in program.calls(FSDP):
            policy = wrap.argument(None, "auto_wrap_policy")
            if policy is not None and policy.const is not None:
                continue  # it may part the adapters from the rest
            given = wrap.argument(0, "module")
            if given is None or "dtype" in given.fields or adapted.order > wrap.order:
                continue
            if adapted.result in given.any() and not cast_again(program, given):
                yield program.finding(
                    "fsdp-mixed-dtype-flatten",
                    Severity.WARNING,
                    wrap,
                    what=(
                        f"line {adapted.line} adds adapters in float32 to weights of 16 bits, and "
                        "FSDP flattens both into one tensor: it raises"
                    ),
                    fix="get_peft_model(..., autocast_adapter_dtype=False), or fully_shard",
                    seen=(adapted, narrow[0]),
                )


def cast_again(program: Program, model: Value) -> bool:
    """Whether the whole model is given one number format."""
    return any(
        call.receiver is model and any(one.name in NARROW for one in call.args)
        for call in program.calls(method="to")
    )


def check_added_after(program: Program, context: Context) -> Iterator[Finding]:
    """Parameters or adapters added to a model that is sharded already."""
    sharded = program.calls(FULLY_SHARD)
    if not sharded:
        return
    for assign in program.assigns:
        if assign.owner is None or assign.attribute is None:
            continue
        owners = list(assign.owner.any())
        made_first = [
            one
            for one in sharded
            if one.order < assign.order and any(part in owners for part in (one.result.any()))
        ]
        if not made_first:
            continue
        if assign.value.instance in {"torch.nn.Parameter", "torch.nn.Linear", "torch.nn.Embedding"}:
            yield added(program, assign.node, made_first[0])
    for call in program.calls(method=("register_buffer", "register_parameter", "add_adapter")):
        made_first = [
            one for one in sharded if one.order < call.order and one.result is call.receiver
        ]
        if made_first:
            yield added(program, call.node, made_first[0])


def added(program: Program, node: ast.AST, sharded: Call) -> Finding:
    return program.finding(
        "dtensor-mixed",
        Severity.ERROR,
        node,
        what=(
            f"line {sharded.line} has made the model's parameters DTensors, and this adds a plain "
            "tensor beside them: operations on both raise"
        ),
        fix="add it before fully_shard",
        seen=(sharded,),
    )


def check_tied(program: Program, context: Context) -> Iterator[Finding]:
    """Weights that two modules share, and a wrapper or file that takes them apart."""
    ties = [
        one
        for one in program.assigns
        if one.attribute == "weight"
        and one.value.attribute == "weight"
        and one.value.receiver is not None
    ]
    if not ties:
        return
    for call in program.calls("safetensors.torch.save_file"):
        given = call.argument(0, "tensors")
        made = given.call if given is not None else None
        if not isinstance(made, Call) or made.method != "state_dict" or made.receiver is None:
            continue  # shared tensors may be taken out between the model and the file
        saved = [one.of_class for one in made.receiver.any() if one.of_class is not None]
        within = [node for one in saved for node in ast.walk(one.node)]
        inside = [one for one in ties if one.node in within]
        if inside:
            yield program.finding(
                "tied-weights",
                Severity.ERROR,
                call,
                what=f"line {inside[0].line} ties two weights: save_file refuses shared tensors",
                fix="safetensors.torch.save_model(model, path)",
                seen=inside[:1],
            )
    tied = [value for tie in ties for value in (tie.owner, tie.value.receiver) if value is not None]
    for call in program.calls(FSDP, FULLY_SHARD):
        given = call.argument(0, "module")
        if given is not None and given in tied:
            yield program.finding(
                "tied-weights",
                Severity.ERROR,
                call,
                what=(
                    f"this module shares its weight (line {ties[0].line}) and becomes a unit of "
                    "its own: the two copies drift apart"
                ),
                fix="leave both tied modules to the root unit",
                seen=ties[:1],
            )
            return


RULES = (
    check_clip,
    check_optimizer_first,
    check_wrapper_discarded,
    check_full_state,
    check_cpu_offload,
    check_recomputation,
    check_mixed_dtypes,
    check_added_after,
    check_tied,
)
