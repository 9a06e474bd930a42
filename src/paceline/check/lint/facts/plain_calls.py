"""What calls of plain Python give back: casts, parsers, the environment, functions called later."""

from collections.abc import Callable, Mapping

from paceline.check.lint.facts import iteration
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.unknowns import environment, parameter
from paceline.check.lint.facts.values import DATA, RANK, UNKNOWN, Value, all_taints
from paceline.check.lint.facts.walker import Walker


def environment_get(walk: Walker, made: Call) -> Value:
    variable = made.argument(0, "key")
    if variable is None or not isinstance(variable.const, str):
        return Value(call=made)
    value = environment(variable.const, made.node, made.argument(1, "default"))
    value.call = made
    return value


def add_argument(walk: Walker, made: Call) -> Value | None:
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


def parse_args(walk: Walker, made: Call) -> Value:
    parser = made.receiver or Value()
    fields = {key[2:]: one for key, one in parser.fields.items() if key.startswith("--")}
    namespace = Value(kind="namespace", fields=fields, call=made, label="args")
    if made.method == "parse_known_args":
        return Value(items=[namespace, Value()], call=made)
    return namespace


def cast(walk: Walker, made: Call) -> Value:
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
        operation=given.operation,
    )
    if given.const is not UNKNOWN and made.name in {"builtins.int", "builtins.float"}:
        value.const = given.const if isinstance(given.const, int | float) else UNKNOWN
    return value


def length(walk: Walker, made: Call) -> Value:
    """`len(x)`: of a batch a count, which the last batch may lower on all ranks alike."""
    given = made.args[0] if made.args else Value()
    taints = given.taints
    if given.kind in {"loader", "dataset"} or given.has_kind("batch") or DATA in taints:
        taints = (taints - {DATA}) | ({"count"} if DATA in taints else set())
    value = Value(call=made, sources=(given,), taints=frozenset(taints), instance="builtins.len")
    if given.items is not None:
        value.const = len(given.items)
    return value


def next_(walk: Walker, made: Call) -> Value:
    if not made.args:
        return Value(call=made)
    return iteration.elements(walk, made.args[0], made.node)[1]


def getattr_(walk: Walker, made: Call) -> Value | None:
    if len(made.args) < 2 or not isinstance(made.args[1].const, str):
        return None
    found = walk.attribute(made.args[0], made.args[1].const, made.node)
    return found


def plain(walk: Walker, made: Call) -> Value:
    """Answers that are the same on every rank: `isinstance`, `hasattr`, `type`."""
    return Value(call=made, sources=made.args, instance=made.name)


def dict_(walk: Walker, made: Call) -> Value | None:
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
        taints=all_taints([*entries.values()]),
        attribute="open" if made.open_ended else None,
    )


def spawn(walk: Walker, made: Call) -> Value:
    """`mp.spawn(f, args=...)` calls f(rank, *args)."""
    target = made.argument(0, "fn", "function", "target")
    given = made.argument(1, "args")
    if target is not None:
        guards, walk.guards = walk.guards, []  # one process passed them, before it starts the ranks
        call_back(walk, made, target, [Value(taints=frozenset({RANK}), label="rank")], given)
        walk.guards = guards
    return Value(call=made)


def process(walk: Walker, made: Call) -> Value | None:
    """`Process(target=f, args=(rank, ...))` calls f."""
    target = made.argument(None, "target")
    if target is not None:
        call_back(walk, made, target, [], made.argument(None, "args"))
    return None


def launched(walk: Walker, made: Call) -> Value | None:
    """`notebook_launcher(f, args)`, `main = record(main)` and the like call f."""
    target = made.argument(0, "function", "fn")
    if target is not None:
        call_back(walk, made, target, [], made.argument(1, "args"))
    return Value(call=made)


def call_back(
    walk: Walker, made: Call, target: Value, first: list[Value], given: Value | None
) -> None:
    rest = list(given.items) if given is not None and given.items is not None else []
    for one in target.any():
        if one.function is not None:
            bound = [one.receiver] if one.receiver is not None else []
            walk.enter(one.function, [*bound, *first, *rest], {}, made)


def record(walk: Walker, made: Call) -> Value | None:
    return made.args[0] if made.args else None


EFFECTS: Mapping[str, Callable[[Walker, Call], Value | None]] = {
    "torch.distributed.elastic.multiprocessing.errors.record": record,
    "os.environ.get": environment_get,
    "os.getenv": environment_get,
    "torch.multiprocessing.spawn": spawn,
    "torch.multiprocessing.Process": process,
    "multiprocessing.Process": process,
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
}

METHODS: Mapping[str, Callable[[Walker, Call], Value | None]] = {
    "add_argument": add_argument,
    "parse_args": parse_args,
    "parse_known_args": parse_args,
}
