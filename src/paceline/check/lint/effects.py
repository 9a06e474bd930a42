"""What calls of known libraries give back, and what they change: one function for each kind."""

import ast
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from paceline.check.lint import expressions, follow, iteration
from paceline.check.lint.events import RANK_SOURCES, Call, Function
from paceline.check.lint.names import (
    ACCELERATOR,
    CLOCKS,
    COLLECTIVES,
    DATA_PARALLEL,
    DATALOADER,
    DDP,
    DEEPSPEED_INIT,
    FILE_CALLS,
    FILE_METHODS,
    FSDP,
    FULLY_SHARD,
    MAIN_NAMES,
    RANK_CALLS,
    RETURNS_EQUAL,
    SAME_OBJECT,
    WRITES_EQUAL,
    kind_of,
)
from paceline.check.lint.values import (
    ALIKE,
    DATA,
    FILES,
    RANK,
    RANK_ZERO_ONLY,
    SIGNAL,
    TIME,
    UNKNOWN,
    Value,
    cleared,
)

if TYPE_CHECKING:
    from paceline.check.lint.walk import Walk

Effect = Callable[["Walk", Call], Value]


def apply(walk: "Walk", made: Call, callee: Value) -> Value:
    """What a call gives back that is not of an own function."""
    for table, key in ((EFFECTS, made.name), (METHODS, made.method or "")):
        if key in table:
            found = table[key](walk, made)
            if found is not None:
                return found
    if made.name in COLLECTIVES or made.name.startswith("torch.distributed."):
        return collective(walk, made)
    if is_forward(callee):
        return forward(walk, made, callee)
    return ordinary(walk, made)


def is_forward(callee: Value) -> bool:
    if callee.name is not None:
        return False
    if callee.attribute is not None and callee.receiver is not None:
        method = callee.attribute
        if callee.receiver.kind == "model" and callee.kind != "model":
            return method in {"forward", "__call__", "generate"}
    return callee.kind in {"model", "engine"}


def forward(walk: "Walk", made: Call, callee: Value) -> Value:
    """The forward pass of a model: its outputs depend on this rank's batch."""
    model = callee
    if callee.kind not in {"model", "engine"} and callee.receiver is not None:
        model = callee.receiver
    made.forward_of = made.callee if made.callee.options else model
    inputs = inputs_of(made)
    returned = run_own_forward(walk, model, made)
    taints = expressions.all_taints(inputs)
    result = Value(
        kind="output",
        call=made,
        sources=(*inputs, model),
        taints=taints if ALIKE in taints else taints | {DATA},
    )
    if returned is not None:
        result.fields["returned"] = returned
    return result


def run_own_forward(walk: "Walk", model: Value, made: Call) -> Value | None:
    """Walk through `forward` of an own class, so that what it calls is seen; what it returns."""
    inner = innermost(model)
    if inner.of_class is None:
        return None
    function = inner.of_class.method("forward")
    if function is not None and function.runs < 2:
        made.own = function
        return follow.enter(walk, function, [inner, *made.args], made.kwargs, made)
    return None


def innermost(model: Value) -> Value:
    """The plain model under all wrappers."""
    for _ in range(10):
        if model.inner is None:
            return model
        model = model.inner
    return model


def inputs_of(made: Call) -> tuple[Value, ...]:
    return (*made.args, *made.kwargs.values())


def ordinary(walk: "Walk", made: Call) -> Value:
    """Any other call: what it gives back depends on its receiver and arguments."""
    inputs = inputs_of(made)
    last = made.name.rpartition(".")[2].lower()
    if last in RANK_SOURCES - {"int", "str", "rank"} or last in MAIN_NAMES:
        main = True if last in MAIN_NAMES else None
        return Value(taints=frozenset({RANK}), main=main, call=made, instance=made.name)
    for one in inputs:
        escape(walk, one)
    receiver = (made.receiver,) if made.receiver is not None else ()
    if made.receiver is not None and made.receiver.name is not None:
        receiver = ()
    parts = (*receiver, *inputs)
    moved = inputs if made.method in {"to", "cuda"} else ()
    unlike = {id(one) for one in (*moved, made.kwargs.get("device"))}
    felt = [one for one in parts if id(one) not in unlike]
    value = Value(call=made, sources=parts, taints=expressions.all_taints(felt))
    if made.method is None and made.name.split(".")[0] not in TRANSPARENT:
        value.taints -= {TIME, FILES}
    method_of_instance = made.receiver is not None and made.receiver.name is None
    value.kind = None if method_of_instance else kind_of(made.name)
    if not made.name.startswith("?"):
        value.instance = made.name
    if value.kind in FRESH:
        value.taints = frozenset()
    if value.kind in {"loader", "dataset"}:
        value.taints -= {DATA}
    if made.receiver is not None and made.receiver.kind in {"output", "batch"}:
        value.kind = made.receiver.kind
    if made.receiver is not None and made.receiver.kind == "dataset" and value.kind is None:
        value.kind, value.instance = "dataset", made.receiver.instance
    if made.name.rpartition(".")[2] in {"tqdm", "Bar"} and made.args:
        value.kind = made.args[0].kind
    return value


TRANSPARENT = frozenset(
    {"builtins", "torch", "os", "math", "numpy", "re", "json", "datetime", "pathlib", "statistics"}
)
"""Packages whose functions compute with what they are given; others may do anything with it."""

FRESH = frozenset({"model", "optimizer", "scheduler", "accelerator", "fabric", "scaler", "device"})
"""Objects that are alike on all ranks whatever they were given."""


def escape(walk: "Walk", value: Value) -> None:
    """An own function handed to a library is called by it."""
    for one in value.any():
        if isinstance(one.function, Function):
            walk.escaped.append(one.function)


# collectives


def collective(walk: "Walk", made: Call) -> Value:
    last = made.name.rpartition(".")[2]
    for position in WRITES_EQUAL.get(last, ()):
        target = made.argument(position, "tensor", "object_list", "tensor_list", "output_tensor")
        if target is not None:
            cleared(target)
    if last in {"reduce", "gather", "gather_object"}:
        target = made.argument(0 if last == "reduce" else 1, "tensor", "gather_list")
        if target is not None:
            for one in target.any():
                one.taints = one.taints | {RANK_ZERO_ONLY}
    if last in {"get_rank", "get_group_rank", "get_node_local_rank"}:
        return Value(taints=frozenset({RANK}), call=made, instance=made.name)
    if made.name in COLLECTIVES or last in {"is_initialized", "is_available", "get_world_size"}:
        return Value(call=made, instance=made.name)
    return ordinary(walk, made)


def rank_call(walk: "Walk", made: Call) -> Value:
    return Value(taints=frozenset({RANK}), call=made, instance=made.name)


def file_call(walk: "Walk", made: Call) -> Value:
    parts = inputs_of(made)
    return Value(
        taints=expressions.all_taints(parts) | {FILES}, call=made, sources=parts, instance=made.name
    )


def clock(walk: "Walk", made: Call) -> Value:
    return Value(taints=frozenset({TIME}), call=made, instance=made.name)


def equal(walk: "Walk", made: Call) -> Value:
    return Value(call=made, sources=inputs_of(made), instance=made.name)


# wrapping


def wrap(kind: str, *names: str) -> Effect:
    def wrapped(walk: "Walk", made: Call) -> Value:
        model = made.argument(0, *names) or Value()
        return around(
            model,
            Value(
                kind="model",
                wrapper=kind,
                inner=model,
                instance=made.name,
                call=made,
                sources=(model,),
            ),
        )

    return wrapped


def around(model: Value, wrapped: Value) -> Value:
    """The wrapped model; the plain one in it knows it, wherever a program gets hold of that."""
    for one in model.any():
        one.fields["wrapped by"] = wrapped
    return wrapped


def fully_shard(walk: "Walk", made: Call) -> Value:
    """FSDP2 shards in place and gives the same module back."""
    model = made.argument(0, "module") or Value()
    for one in model.any():
        one.wrapper = "fsdp2"
        one.kind = "model"
        one.fields.setdefault("wrapped at", Value(call=made))
    return model


def first_argument(walk: "Walk", made: Call) -> Value | None:
    """`torch.compile(model)`, `convert_sync_batchnorm(model)`: the model, for our purposes."""
    model = made.argument(0, "model", "module", "fn")
    return model


def prepare(walk: "Walk", made: Call) -> Value:
    """`accelerator.prepare(model, loader)`: the same things, owned by the accelerator."""
    results = []
    for one in made.args:
        if one.has_kind("model"):
            model = Value(
                kind="model",
                wrapper="accelerate",
                inner=one,
                call=made,
                sources=(one,),
                instance="accelerate.prepared",
            )
            results.append(around(one, model))
            continue
        kind = next((part.kind for part in one.any() if part.kind is not None), None)
        prepared = Value(kind=kind, call=made, sources=(one,), instance="accelerate.prepared")
        prepared.inner = one
        results.append(prepared)
    if len(results) == 1 and not made.open_ended:
        return results[0]
    return Value(items=results, call=made) if not made.open_ended else Value(call=made)


def fabric_setup(walk: "Walk", made: Call) -> Value:
    made_values = prepare(walk, made)
    for one in made_values.items or [made_values]:
        one.instance = "lightning.fabric.prepared"
        if one.wrapper is not None:
            one.wrapper = "fabric"
    return made_values


def deepspeed_engine(walk: "Walk", made: Call) -> Value:
    model = made.argument(1, "model") or Value()
    engine = Value(
        kind="model",
        wrapper="deepspeed",
        inner=model,
        instance="deepspeed.DeepSpeedEngine",
        call=made,
        sources=(model,),
    )
    around(model, engine)
    loader = Value(kind="loader", instance="deepspeed.prepared", call=made)
    optimizer = Value(kind="optimizer", instance="deepspeed.prepared", call=made)
    return Value(items=[engine, optimizer, loader, Value(kind="scheduler")], call=made)


def unwrap(walk: "Walk", made: Call) -> Value:
    model = made.argument(0, "model", "module") or Value()
    for one in model.any():
        if one.inner is not None:
            return one.inner
    return model


# data


def loader(walk: "Walk", made: Call) -> Value:
    value = ordinary(walk, made)
    value.kind = "loader"
    for position, field in (
        (0, "dataset"),
        (1, "batch_size"),
        (3, "sampler"),
        (4, "batch_sampler"),
    ):
        given = made.argument(position, field)
        if given is not None and given.const is not None:
            value.fields[field] = given
    return value


# parsers and environment


def environment_get(walk: "Walk", made: Call) -> Value:
    variable = made.argument(0, "key")
    if variable is None or not isinstance(variable.const, str):
        return Value(call=made)
    value = expressions.environment(variable.const, made.node, made.argument(1, "default"))
    value.call = made
    return value


def add_argument(walk: "Walk", made: Call) -> Value | None:
    """argparse: what `args.name` is unless somebody says otherwise."""
    if made.receiver is None or not made.args:
        return None
    flags = [one.const for one in made.args if isinstance(one.const, str)]
    if not flags:
        return None
    longest = max(flags, key=lambda flag: (flag.startswith("--"), len(flag)))
    destination = made.kwargs.get("dest")
    field = destination.const if destination is not None else None
    field = field if isinstance(field, str) else longest.lstrip("-").replace("-", "_")
    from paceline.check.lint.walk import parameter

    value = parameter(field, None)
    value.label, value.node = f"args.{field}", made.node
    value.kind = None
    default = made.kwargs.get("default")
    if default is not None and default.const is not UNKNOWN:
        value.default = default.const
        value.taints |= default.taints
    action = made.kwargs.get("action")
    if default is None and action is not None and action.const in {"store_true", "store_false"}:
        value.default = action.const == "store_false"
    parser = made.receiver
    root = parser.receiver if parser.kind != "parser" and parser.receiver is not None else parser
    for one in {id(parser): parser, id(root): root}.values():
        one.fields[f"--{field}"] = value
        if one.call is not None and one.call.receiver is not None:
            one.call.receiver.fields[f"--{field}"] = value
    return Value(call=made)


def parse_args(walk: "Walk", made: Call) -> Value:
    parser = made.receiver or Value()
    fields = {key[2:]: one for key, one in parser.fields.items() if key.startswith("--")}
    namespace = Value(kind="namespace", fields=fields, call=made, label="args")
    if made.method == "parse_known_args":
        return Value(items=[namespace, Value()], call=made)
    return namespace


# plain Python


def cast(walk: "Walk", made: Call) -> Value:
    """`int(x)`, `str(x)`, `bool(x)`, `float(x)`: x."""
    if not made.args:
        return Value(call=made)
    given = made.args[0]
    value = Value(
        const=UNKNOWN,
        default=given.default,
        taints=given.taints,
        main=given.main,
        sources=(given,),
        call=made,
        attribute=given.attribute,
        label=given.label,
        instance=given.instance if given.instance == "os.environ" else None,
        kind="counter" if given.kind == "counter" else None,
        loop=given.loop,
        start=given.start,
        step=given.step,
        operation=given.operation,
    )
    if given.const is not UNKNOWN and made.name in {"builtins.int", "builtins.float"}:
        value.const = given.const if isinstance(given.const, int | float) else UNKNOWN
    return value


def length(walk: "Walk", made: Call) -> Value:
    """`len(x)`: of a batch a count, which the last batch may lower on all ranks alike."""
    given = made.args[0] if made.args else Value()
    taints = given.taints
    if given.kind in {"loader", "dataset"} or given.has_kind("batch") or DATA in taints:
        taints = (taints - {DATA}) | ({"count"} if DATA in taints else set())
    value = Value(call=made, sources=(given,), taints=frozenset(taints), instance="builtins.len")
    if given.items is not None:
        value.const = len(given.items)
    return value


def next_(walk: "Walk", made: Call) -> Value:
    if not made.args:
        return Value(call=made)
    return iteration.elements(walk, made.args[0], made.node)[1]


def getattr_(walk: "Walk", made: Call) -> Value | None:
    if len(made.args) < 2 or not isinstance(made.args[1].const, str):
        return None
    found = expressions.attribute_of(walk, made.args[0], made.args[1].const, made.node)
    return found


def plain(walk: "Walk", made: Call) -> Value:
    """Answers that are the same on every rank: `isinstance`, `hasattr`, `type`."""
    return Value(call=made, sources=made.args, instance=made.name)


def dict_(walk: "Walk", made: Call) -> Value | None:
    """`dict(other, shuffle=True)`: the entries of a literal."""
    entries: dict[str, Value] = {}
    for one in made.args:
        if one.entries is None:
            return None
        entries.update(one.entries)
    entries.update(made.kwargs)
    return Value(
        call=made,
        entries=entries,
        taints=expressions.all_taints([*entries.values()]),
        attribute="open" if made.open_ended else None,
    )


def partial(walk: "Walk", made: Call) -> Value:
    return Value(kind="partial", call=made, sources=made.args)


def spawn(walk: "Walk", made: Call) -> Value:
    """`mp.spawn(f, args=...)` calls f(rank, *args)."""
    target = made.argument(0, "fn", "function", "target")
    given = made.argument(1, "args")
    if target is not None:
        call_back(walk, made, target, [Value(taints=frozenset({RANK}), label="rank")], given)
    return Value(call=made)


def process(walk: "Walk", made: Call) -> Value | None:
    """`Process(target=f, args=(rank, ...))` calls f."""
    target = made.argument(None, "target")
    if target is not None:
        call_back(walk, made, target, [], made.argument(None, "args"))
    return None


def launched(walk: "Walk", made: Call) -> Value | None:
    """`notebook_launcher(f, args)`, `main = record(main)` and the like call f."""
    target = made.argument(0, "function", "fn")
    if target is not None:
        call_back(walk, made, target, [], made.argument(1, "args"))
    return Value(call=made)


def call_back(
    walk: "Walk", made: Call, target: Value, first: list[Value], given: Value | None
) -> None:
    rest = list(given.items) if given is not None and given.items is not None else []
    for one in target.any():
        if one.function is not None:
            bound = [one.receiver] if one.receiver is not None else []
            follow.enter(walk, one.function, [*bound, *first, *rest], {}, made)


def signal_handler(walk: "Walk", made: Call) -> Value:
    """`signal.signal(SIGTERM, stop)`: what `stop` sets changes on each rank by itself."""
    handler = made.argument(1, "handler")
    for one in handler.any() if handler is not None else ():
        if one.function is None:
            continue
        nodes = list(ast.walk(one.function.node))
        shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        for node in nodes:
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                held = Value(label=ast.unparse(target), node=target, taints=frozenset({SIGNAL}))
                if isinstance(target, ast.Name) and target.id in shared:
                    one.function.scope.module.names[target.id] = held
                elif isinstance(target, ast.Attribute) and one.receiver is not None:
                    one.receiver.fields[target.attr] = held
    return Value(call=made)


def record(walk: "Walk", made: Call) -> Value | None:
    return made.args[0] if made.args else None


# methods


def same_object(walk: "Walk", made: Call) -> Value | None:
    """`model.to(device)` is the model; a tensor moved is another tensor of the same data."""
    receiver = made.receiver
    if receiver is None or receiver.name is not None:
        return None
    if receiver.has_kind("model"):
        if made.method in {"half", "bfloat16", "float"}:
            for one in receiver.any():
                one.fields["dtype"] = Value(name=f"torch.{DTYPES[made.method]}", call=made)
        return receiver
    if receiver.has_kind("generator"):
        return receiver
    return None


DTYPES = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}


def size(walk: "Walk", made: Call) -> Value:
    """`x.size(0)` is the batch; other dimensions belong to this rank's data."""
    receiver = made.receiver or Value()
    dim = made.argument(0, "dim")
    taints = receiver.taints
    if DATA in taints:
        if dim is None:
            taints = (taints - {DATA}) | {"shape"}
        elif dim.const == 0:
            taints -= {DATA}
    return Value(call=made, sources=(receiver,), taints=frozenset(taints))


def count(walk: "Walk", made: Call) -> Value:
    receiver = made.receiver or Value()
    taints = receiver.taints
    if DATA in taints:
        taints = (taints - {DATA}) | {"count"}
    return Value(call=made, sources=(receiver,), taints=frozenset(taints))


def append(walk: "Walk", made: Call) -> Value | None:
    """`xs.append(x)`, `xs.extend(x)`, `s.update(x)`: the container holds x too."""
    receiver = made.receiver
    if receiver is None or receiver.name is not None or not made.args:
        return None
    more = expressions.all_taints(made.args)
    for one in receiver.any():
        if one.kind in {"model", "optimizer", "scaler", "sampler", "loader"}:
            continue
        one.taints = one.taints | more
        one.sources = (*one.sources, *made.args)[-20:]
        if one.items is not None and made.method == "append" and not walk.loops:
            one.items = [*one.items, made.args[0]]
        else:
            one.items = None
    return Value(call=made)


def file_method(walk: "Walk", made: Call) -> Value | None:
    if expressions.file_answer(made):
        value = expressions.file_value(made)
        value.call = made
        return value
    return None


def parameters(walk: "Walk", made: Call) -> Value | None:
    if made.receiver is not None and made.receiver.has_kind("model"):
        return Value(
            call=made,
            sources=(made.receiver,),
            kind="parameters",
            receiver=made.receiver,
            taints=frozenset(),
        )
    return None


EFFECTS: Mapping[str, Callable[["Walk", Call], Value | None]] = {
    DDP: wrap("ddp", "module"),
    FSDP: wrap("fsdp1", "module"),
    DATA_PARALLEL: wrap("dp", "module"),
    "apex.parallel.DistributedDataParallel": wrap("ddp", "module"),
    "ray.train.torch.prepare_model": wrap("ddp", "model"),
    FULLY_SHARD: fully_shard,
    "torch.distributed._composable.replicate": wrap("ddp", "module"),
    "torch.compile": first_argument,
    "torch.jit.script": first_argument,
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": first_argument,
    "peft.get_peft_model": first_argument,
    "copy.deepcopy": first_argument,
    "torch.distributed.elastic.multiprocessing.errors.record": record,
    f"{ACCELERATOR}.prepare": prepare,
    f"{ACCELERATOR}.prepare_model": prepare,
    f"{ACCELERATOR}.prepare_data_loader": prepare,
    f"{ACCELERATOR}.unwrap_model": unwrap,
    "accelerate.utils.extract_model_from_parallel": unwrap,
    "lightning.fabric.Fabric.setup": fabric_setup,
    "lightning.fabric.Fabric.setup_dataloaders": fabric_setup,
    "lightning.fabric.Fabric.setup_module": fabric_setup,
    DEEPSPEED_INIT: deepspeed_engine,
    DATALOADER: loader,
    "torchdata.stateful_dataloader.StatefulDataLoader": loader,
    "ray.train.torch.prepare_data_loader": prepare,
    "os.environ.get": environment_get,
    "os.getenv": environment_get,
    "functools.partial": partial,
    "torch.multiprocessing.spawn": spawn,
    "torch.multiprocessing.Process": process,
    "multiprocessing.Process": process,
    "signal.signal": signal_handler,
    "accelerate.notebook_launcher": launched,
    "accelerate.debug_launcher": launched,
    "builtins.int": cast,
    "builtins.str": cast,
    "builtins.bool": cast,
    "builtins.float": cast,
    "builtins.len": length,
    "builtins.next": next_,
    "builtins.getattr": getattr_,
    "builtins.dict": dict_,
    "builtins.isinstance": plain,
    "builtins.hasattr": plain,
    "builtins.type": plain,
    **dict.fromkeys(RANK_CALLS, rank_call),
    **dict.fromkeys(FILE_CALLS, file_call),
    **dict.fromkeys(CLOCKS, clock),
    **dict.fromkeys(RETURNS_EQUAL, equal),
}

METHODS: Mapping[str, Callable[["Walk", Call], Value | None]] = {
    "add_argument": add_argument,
    "parse_args": parse_args,
    "parse_known_args": parse_args,
    "size": size,
    "numel": count,
    "append": append,
    "extend": append,
    "add": append,
    "update": append,
    "parameters": parameters,
    "named_parameters": parameters,
    **dict.fromkeys(SAME_OBJECT, same_object),
    **dict.fromkeys(FILE_METHODS, file_method),
}
