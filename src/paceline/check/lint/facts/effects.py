"""What calls of known libraries give back, and what they change: one function for each kind."""

from collections.abc import Callable, Mapping

from paceline.check.lint.facts import plain_calls, wrapping
from paceline.check.lint.facts.events import RANK_SOURCES, Call
from paceline.check.lint.facts.names import (
    CLOCKS,
    COLLECTIVES,
    DATALOADER,
    MAIN_NAMES,
    RANK_CALLS,
    RETURNS_EQUAL,
    SAME_OBJECT,
    WRITES_EQUAL,
    kind_of,
)
from paceline.check.lint.facts.values import (
    ALIKE,
    DATA,
    RANK,
    TIME,
    Value,
    all_taints,
    cleared,
    innermost,
)
from paceline.check.lint.facts.walker import Walker


def apply(walk: Walker, made: Call, callee: Value) -> Value:
    """What a call gives back that is not of an own function."""
    by_name = (EFFECTS, wrapping.EFFECTS, plain_calls.EFFECTS)
    by_method = (METHODS, plain_calls.METHODS)
    for key, tables in ((made.name, by_name), (made.method or "", by_method)):
        for table in tables:
            found = table[key](walk, made) if key in table else None
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


def forward(walk: Walker, made: Call, callee: Value) -> Value:
    """The forward pass of a model: its outputs depend on this rank's batch."""
    model = callee
    if callee.kind not in {"model", "engine"} and callee.receiver is not None:
        model = callee.receiver
    made.forward_of = made.callee if made.callee.options else model
    inputs = inputs_of(made)
    inner = innermost(model)
    function = inner.of_class.method("forward") if inner.of_class is not None else None
    if function is not None and function.runs < 2:  # what it calls is seen
        made.own = function
        walk.enter(function, [inner, *made.args], made.kwargs, made)
    taints = all_taints(inputs)
    return Value(
        kind="output",
        call=made,
        sources=(*inputs, model),
        taints=taints if ALIKE in taints else taints | {DATA},
    )


def inputs_of(made: Call) -> tuple[Value, ...]:
    return (*made.args, *made.kwargs.values())


def ordinary(walk: Walker, made: Call) -> Value:
    """Any other call: what it gives back depends on its receiver and arguments."""
    inputs = inputs_of(made)
    last = made.name.rpartition(".")[2].lower()
    if last in RANK_SOURCES - {"int", "str", "rank"} or last in MAIN_NAMES:
        main = True if last in MAIN_NAMES else None
        return Value(taints=frozenset({RANK}), main=main, call=made, instance=made.name)
    receiver = (made.receiver,) if made.receiver is not None else ()
    if made.receiver is not None and made.receiver.name is not None:
        receiver = ()
    parts = (*receiver, *inputs)
    moved = inputs if made.method in {"to", "cuda"} else ()
    states = [one for one in receiver if one.has_kind("model", "optimizer", "scheduler")]
    unlike = {id(one) for one in (*moved, *states, made.kwargs.get("device"))}
    felt = [one for one in parts if id(one) not in unlike]
    value = Value(call=made, sources=parts, taints=all_taints(felt))
    if made.method is None and made.name.split(".")[0] not in TRANSPARENT:
        value.taints -= {TIME}
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


# collectives


def collective(walk: Walker, made: Call) -> Value:
    last = made.name.rpartition(".")[2]
    for position in WRITES_EQUAL.get(last, ()):
        target = made.argument(position, "tensor", "object_list", "tensor_list", "output_tensor")
        if target is not None:
            cleared(target)
    if last in {"get_rank", "get_group_rank", "get_node_local_rank"}:
        return Value(taints=frozenset({RANK}), call=made, instance=made.name)
    if made.name in COLLECTIVES or last in {"is_initialized", "is_available", "get_world_size"}:
        return Value(call=made, instance=made.name)
    return ordinary(walk, made)


def rank_call(walk: Walker, made: Call) -> Value:
    return Value(taints=frozenset({RANK}), call=made, instance=made.name)


def clock(walk: Walker, made: Call) -> Value:
    return Value(taints=frozenset({TIME}), call=made, instance=made.name)


def equal(walk: Walker, made: Call) -> Value:
    return Value(call=made, sources=inputs_of(made), instance=made.name)


# data


def loader(walk: Walker, made: Call) -> Value:
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


# methods


def same_object(walk: Walker, made: Call) -> Value | None:
    """`model.to(device)` is the model; a tensor moved is another tensor of the same data."""
    receiver = made.receiver
    if receiver is None or receiver.name is not None:
        return None
    return receiver if receiver.has_kind("model", "generator") else None


def size(walk: Walker, made: Call) -> Value:
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


def count(walk: Walker, made: Call) -> Value:
    receiver = made.receiver or Value()
    taints = receiver.taints
    if DATA in taints:
        taints = (taints - {DATA}) | {"count"}
    return Value(call=made, sources=(receiver,), taints=frozenset(taints))


def append(walk: Walker, made: Call) -> Value | None:
    """`xs.append(x)`, `xs.extend(x)`, `s.update(x)`: the container holds x too."""
    receiver = made.receiver
    if receiver is None or receiver.name is not None or not made.args:
        return None
    entries = made.args[0].entries if made.method == "update" else None
    more = all_taints(made.args) if entries is None else frozenset()
    for one in receiver.any():
        if one.kind in {"model", "optimizer", "scaler", "sampler", "loader"}:
            continue
        one.taints = one.taints | more
        one.fields |= {f"[{key}]": value for key, value in (entries or {}).items()}
        one.sources = (*one.sources, *made.args)[-20:]
        if one.items is not None and made.method == "append" and not walk.loops:
            one.items = [*one.items, made.args[0]]
        else:
            one.items = None
    return Value(call=made)


def get(walk: Walker, made: Call) -> Value | None:
    """`batch.get("key")`: which keys there are, the program says, and no sample."""
    key = made.argument(0, "key")
    if made.receiver is None or made.receiver.name is not None or key is None:
        return None
    value = ordinary(walk, made)
    if isinstance(key.const, str) and made.receiver.kind != "batch":
        value.taints -= {DATA}
    return value


def parameters(walk: Walker, made: Call) -> Value | None:
    if made.receiver is not None and made.receiver.has_kind("model"):
        return Value(
            call=made,
            sources=(made.receiver,),
            kind="parameters",
            receiver=made.receiver,
            taints=frozenset(),
        )
    return None


EFFECTS: Mapping[str, Callable[[Walker, Call], Value | None]] = {
    DATALOADER: loader,
    "torchdata.stateful_dataloader.StatefulDataLoader": loader,
    **dict.fromkeys(RANK_CALLS, rank_call),
    **dict.fromkeys(CLOCKS, clock),
    **dict.fromkeys(RETURNS_EQUAL, equal),
}

METHODS: Mapping[str, Callable[[Walker, Call], Value | None]] = {
    "size": size,
    "get": get,
    "numel": count,
    "append": append,
    "extend": append,
    "add": append,
    "update": append,
    "parameters": parameters,
    "named_parameters": parameters,
    **dict.fromkeys(SAME_OBJECT, same_object),
}
