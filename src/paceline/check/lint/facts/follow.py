"""A call: noted, then walked into the own function, class or partial that it calls, or given its
known effect."""

import ast
from collections.abc import Mapping

from paceline.check.lint.facts import counters, effects
from paceline.check.lint.facts.choices import either, one_of
from paceline.check.lint.facts.events import Call, Class, Frame, Function, Guard, Scope
from paceline.check.lint.facts.names import RANK_NAMES, canonical, kind_of
from paceline.check.lint.facts.source import path_of, text
from paceline.check.lint.facts.unknowns import parameter
from paceline.check.lint.facts.values import RANK, UNKNOWN, UNSEEN, Value, all_taints
from paceline.check.lint.facts.walker import Walker

MAX_DEPTH = 14
"""Own functions in own functions. A guess: scripts seen have at most 7."""

MAX_RUNS = 10
"""Walks through one own function; a helper called in 40 places is like itself in most."""

MAX_FOREIGN = 6_000
"""Statements of other files in one reading. A guess: a script with its helpers takes some hundred;
without a bound, a program of a large package is read with most of the package."""


def call(walk: Walker, node: ast.Call) -> Value:
    """A call: noted, then followed into own functions, or given its known effect."""
    callee = walk.value(node.func)
    args: list[Value] = []
    kwargs: dict[str, Value] = {}
    open_ended = False
    for one in node.args:
        value = walk.value(one)
        if isinstance(one, ast.Starred):
            if value.items is not None:
                args += value.items
                continue
            open_ended = True
        args.append(value)
    nodes: dict[str, ast.AST] = {}
    for keyword in node.keywords:
        value = walk.value(keyword.value)
        if keyword.arg is not None:
            kwargs[keyword.arg], nodes[keyword.arg] = value, keyword
        elif value.entries is not None:
            kwargs.update(value.entries)
            open_ended = open_ended or value.attribute == "open"
        else:
            open_ended = True
            args_value = value
            kwargs.setdefault("**", args_value)
    receiver = callee.receiver
    method = node.func.attr if isinstance(node.func, ast.Attribute) else None
    if isinstance(node.func, ast.Attribute) and receiver is None:
        receiver = walk.looked_up(node.func.value)
    if method is None and is_bound_method(callee):
        method = callee.attribute
    made = Call(
        name=call_name(callee, receiver, method),
        callee=callee,
        receiver=receiver,
        method=method,
        args=tuple(args),
        kwargs=kwargs,
        keyword_nodes=nodes,
        open_ended=open_ended,
        **walk.context(node),
    )
    walk.note_call(made)
    made.result = called(walk, made)
    if made.result.call is None and not made.result.options:
        made.result.call = made
    return made.result


def is_bound_method(callee: Value) -> bool:
    """`save = accelerator.save_state`, called by that name: a method of a library's object."""
    owner = callee.receiver
    if owner is None or callee.options or callee.kind is not None or callee.name is not None:
        return False
    return owner.instance is not None or owner.kind is not None


def called(walk: Walker, made: Call) -> Value:
    """What a call returns, after walking into what it calls."""
    results = []
    for one in made.callee.any():
        if one.function is not None:
            made.own = one.function
            bound = [one.receiver] if one.receiver is not None else []
            results.append(enter(walk, one.function, [*bound, *made.args], made.kwargs, made))
        elif one.own_class is not None:
            results.append(instantiate(walk, one.own_class, list(made.args), made.kwargs, made))
        elif (method := called_method(one)) is not None:
            made.own = method
            results.append(enter(walk, method, [one, *made.args], made.kwargs, made))
        else:
            results.append(effects.apply(walk, made, one))
    return one_of(results, made.callee.test)


def called_method(value: Value) -> Function | None:
    """The `__call__` of an instance of an own class; a model's is its forward pass."""
    if value.of_class is None or value.kind == "model":
        return None
    found: Function | None = value.of_class.method("__call__")
    return found


def enter(
    walk: Walker,
    function: Function,
    args: list[Value],
    kwargs: Mapping[str, Value],
    call_made: Call | None,
) -> Value:
    """Walk through an own function with these arguments; what it returns."""
    inside = any(frame.function.node is function.node for frame in walk.frames)
    tired = walk.foreign > MAX_FOREIGN and path_of(function.node) != walk.main_path
    if inside or tired or function.runs >= MAX_RUNS or len(walk.frames) >= MAX_DEPTH:
        taints = all_taints(args)
        return Value(sources=tuple(args), taints=taints, instance=UNSEEN)
    if walk.trial is not None:
        walk.trial.runs.setdefault(function, function.runs)
    function.runs += 1
    scope = Scope(outer=function.scope)
    bind_parameters(walk, function, scope, args, kwargs)
    saved = (walk.scope, len(walk.guards), len(walk.withs))
    walk.scope = scope
    walk.frames.append(Frame(function, call_made, len(walk.withs)))
    walk.returned.append([])
    walk.global_names.append(set())
    decorate(walk, function)
    if isinstance(function.node, ast.Lambda):
        walk.returned[-1].append((walk.value(function.node.body), None))
    else:
        walk.block(function.node.body)
    walk.global_names.pop()
    values = walk.returned.pop()
    walk.frames.pop()
    walk.scope = saved[0]
    del walk.guards[saved[1] :]
    del walk.withs[saved[2] :]
    return joined(values)


def joined(returns: list[tuple[Value, Guard | None]]) -> Value:
    """What a function gives back: one of its returns, or a stream of what it yields."""
    stream = [one for one, _ in returns if one.kind == "yielded"]
    if stream:
        inner = one_of([one.fields["*"] for one in stream], None)
        made = Value(kind="stream", sources=(inner,), taints=inner.taints)
        made.fields["*"] = inner
        within = [part for one in stream for part in one.fields["within"].items or ()]
        made.fields["within"] = Value(items=within)
        return made
    if not returns:
        return Value(const=None)
    made = returns[-1][0]
    for value, guard in reversed(returns[:-1]):
        if guard is None or guard.how not in {"if", "exit"}:
            made = either(value, made)
        elif guard.holds:
            made = either(value, made, guard.test)
        else:
            made = either(made, value, guard.test)
    return made


def replace_decorated(walk: Walker, function: Function) -> None:
    """Call the file's own decorators: what they give back stands for the function from here on."""
    held = Value(function=function, label=function.name)
    for one in reversed(function.decorators):
        if one.function is None:
            if (one.name or "").startswith("builtins."):
                return  # a property or static method is looked up by its decorator
            continue
        given = enter(walk, one.function, [held], {}, None)
        if isinstance(given.function, Function):
            held = given
    if held.function is not function:
        function.decorated = held.function
        held.function.is_decoration = True


def decorate(walk: Walker, function: Function) -> None:
    """`@torch.no_grad()` is a `with` around the body; `@rank_zero_only` a condition."""
    for one in function.decorators:
        if one.function is not None:
            continue  # an own decorator: what it does is seen
        known = one.name or (one.call.name if isinstance(one.call, Call) else one.label) or ""
        last = known.rpartition(".")[2]
        if last in {"no_grad", "inference_mode", "autocast"}:
            walk.withs.append(one if one.call is not None else Value(name=one.name, instance=known))
        if last in {"rank_zero_only", "on_main_process", "main_process_only", "master_only"}:
            test = Value(taints=frozenset({RANK}), main=True, node=function.node)
            walk.guards.append(Guard(test, function.node, True, "decorator", len(walk.frames)))


def bind_parameters(
    walk: Walker, function: Function, scope: Scope, args: list[Value], kwargs: Mapping[str, Value]
) -> None:
    """Give parameters what the call passes; their defaults, or unknowns of their own, otherwise."""
    spec = function.node.args
    positional = [*spec.posonlyargs, *spec.args]
    defaults = dict(zip([one.arg for one in positional][::-1], spec.defaults[::-1], strict=False))
    for one, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        if default is not None:
            defaults[one.arg] = default
    for index, one in enumerate(positional):
        if index < len(args):
            scope.names[one.arg] = passed(one.arg, args[index])
    for one in [*positional, *spec.kwonlyargs]:
        if one.arg in scope.names:
            continue
        if one.arg in kwargs:
            scope.names[one.arg] = passed(one.arg, kwargs[one.arg])
            continue
        value = parameter(one.arg, text(one.annotation) if one.annotation else None)
        if one.arg in defaults:
            given = walk.value(defaults[one.arg])
            value = parameter_default(walk, value, given)
        scope.names[one.arg] = value
    if spec.vararg is not None:
        rest = args[len(positional) :]
        scope.names[spec.vararg.arg] = Value(items=list(rest), taints=all_taints(rest))
    if spec.kwarg is not None:
        named_ones = {one.arg for one in [*positional, *spec.kwonlyargs]}
        extra = {key: value for key, value in kwargs.items() if key not in named_ones}
        scope.names[spec.kwarg.arg] = Value(entries=extra, taints=all_taints([*extra.values()]))


def passed(name: str, value: Value) -> Value:
    """What a parameter holds; a number for `rank` is this rank's: `train(rank=0, world_size=1)`.

    -1 is none: `create_loader(rank=-1)` is not distributed.
    """
    if name in RANK_NAMES and type(value.const) is int and value.const >= 0:
        return Value(const=value.const, taints=value.taints | {RANK}, node=value.node, label=name)
    return value


def parameter_default(walk: Walker, value: Value, given: Value) -> Value:
    """A parameter that nobody passes: its default, sure only when the call is seen."""
    if walk.frames or walk.root == 0:
        if not isinstance(given.const, bool | int | float | str) or given.const is None:
            if given.const is not None:
                return given
            value.default = None
            return value
        value.const = given.const
        if given.const == -1:  # of a rank: the call is not distributed
            value.taints -= {RANK}
    value.default = given.const
    return value


def instantiate(
    walk: Walker,
    own_class: Class,
    args: list[Value],
    kwargs: Mapping[str, Value],
    call_made: Call | None,
) -> Value:
    """An instance of an own class, its `__init__` walked through."""
    made = Value(of_class=own_class, instance=f"own.{own_class.name}", call=call_made)
    made.kind = class_kind(own_class)
    made.sources = (*args, *kwargs.values())
    if made.kind not in {"model", "loader"}:
        made.taints = (
            all_taints([*args, *kwargs.values()]) if made.kind == "dataset" else frozenset()
        )
    walk.instances.setdefault(own_class, made)
    init = own_class.method("__init__")
    if init is not None:
        enter(walk, init, [made, *args], kwargs, call_made)
    else:
        dataclass_fields(walk, made, args, kwargs)
    counters.count_in_methods(own_class, made)
    return made


def dataclass_fields(
    walk: Walker, made: Value, args: list[Value], kwargs: Mapping[str, Value]
) -> None:
    """Fields of a class without `__init__`, a dataclass: what is passed, else its defaults."""
    own_class = made.of_class
    names = [
        one.target.id
        for part in [*own_class.ancestors()][::-1]
        for one in part.node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    names = list(dict.fromkeys(names))
    made.fields.update(zip(names, args, strict=False))
    made.fields.update({key: value for key, value in kwargs.items() if key in names})
    open_ended = isinstance(made.call, Call) and made.call.open_ended
    for name in names:
        if name not in made.fields:
            given = own_class.attribute(name)
            if given is not None:
                made.fields[name] = field_default(walk, given, sure=not open_ended)


def field_default(walk: Walker, given: Value, *, sure: bool) -> Value:
    """What a dataclass's field is when nothing is passed for it: `field(default_factory=Config)`.

    Where something that was not seen may be passed, a literal is only the likely one.
    """
    made = given.call
    if isinstance(made, Call) and made.name == "dataclasses.field":
        default, factory = made.argument(None, "default"), made.argument(None, "default_factory")
        if factory is not None and factory.own_class is not None:
            return instantiate(walk, factory.own_class, [], {}, None)
        if factory is not None and factory.function is not None:
            return enter(walk, factory.function, [], {}, None)
        given = default or Value()
    if sure or given.const is UNKNOWN:
        return given
    return Value(default=given.const, label=given.label, taints=given.taints)


def class_kind(own_class: Class) -> str | None:
    """What instances of an own class are, by the library classes that it builds on."""
    for base in sorted(own_class.library_bases()):
        last = base.rpartition(".")[2]
        if base in {"torch.nn.Module", "lightning.pytorch.LightningModule"}:
            return "model"
        if last.endswith(("PreTrainedModel", "ForCausalLM")) or (
            base.startswith("torch.nn.") and last[:1].isupper()
        ):
            return "model"
        if last in {"Dataset", "IterableDataset", "TensorDataset", "MapDataPipe", "IterDataPipe"}:
            return "dataset"
        if last in {"DataLoader"}:
            return "loader"
        if last.endswith("Sampler"):
            return "sampler"
        found = kind_of(base)
        if found is not None:
            return found
    return None


def call_name(callee: Value, receiver: Value | None, method: str | None) -> str:
    """Qualified name of what is called."""
    for one in callee.any():
        if one.name is not None:
            return one.name
        if one.function is not None:
            function = one.function
            inside = f"{function.own_class.name}." if function.own_class is not None else ""
            return f"own.{inside}{function.name}"
        if one.own_class is not None:
            return f"own.{one.own_class.name}"
    if method is not None and receiver is not None:
        for one in receiver.any():
            if one.instance is not None:
                return canonical(f"{one.instance}.{method}")
        for one in receiver.any():
            if one.kind in CLASS_OF_KIND:
                return f"{CLASS_OF_KIND[one.kind]}.{method}"
    return f"?.{method}" if method is not None else "?"


CLASS_OF_KIND = {
    "accelerator": "accelerate.Accelerator",
    "fabric": "lightning.fabric.Fabric",
    "sampler": "torch.utils.data.Sampler",
    "engine": "deepspeed.DeepSpeedEngine",
}
"""The class behind names like `accelerator`, where a parameter's type is not seen."""
