"""Which rank reads which samples of a data set with an index, and in which order."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Assign, Call, Class, Loop
from paceline.check.lint.facts.names import DATALOADER, DISTRIBUTED_SAMPLER
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import RANK, UNKNOWN, Value

PREPARES = frozenset({"accelerate", "fabric", "lightning", "transformers", "ray", "deepspeed"})
"""Frameworks that give every rank its part of a plain DataLoader and set the epoch themselves."""

_PLACES = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler")
"""DataLoader's first parameters, in order."""

_SAMPLERS = frozenset({"sampler", "batch_sampler"})


def check_sampler_and_shuffle(program: Program, context: Context) -> Iterator[Finding]:
    """`DataLoader(shuffle=True, sampler=...)` raises ValueError."""
    for call in program.calls(DATALOADER):
        shuffle = call.argument(2, "shuffle")
        sampler = call.argument(3, "sampler") or call.argument(4, "batch_sampler")
        if shuffle is None or shuffle.const is not True or sampler is None:
            continue
        if not surely_with_sampler(call, sampler):
            continue
        written = {*call.keyword_nodes, *_PLACES[: len(call.args)]}
        is_written = "shuffle" in written and not written.isdisjoint(_SAMPLERS)
        yield program.finding(
            "sampler-and-shuffle",
            call.keyword_nodes.get("shuffle", call.node),
            what="this DataLoader is given both shuffle=True and a sampler: it raises ValueError",
            fix="leave out shuffle=True here; the sampler shuffles",
            # `**options` may lack the one where the other is given
            level=Severity.ERROR if is_written else Severity.INFO,
        )


def surely_with_sampler(call: Call, sampler: Value) -> bool:
    """Whether some run gets here with a sampler that is not None.

    `sampler = None`, then `if dist.is_initialized(): sampler = ...`, has one in every run of
    several ranks; what stands under a condition on the sampler may have none.
    """
    options = list(sampler.any())
    if all(one.const is not None and one.default is not None for one in options):
        return True
    if not any(one.kind == "sampler" and one.call is not None for one in options):
        return False
    asked = [one for guard in call.guards for one in guard.test.origins()]
    shown = {ast.dump(one.node) for one in asked if one.node is not None}
    chosen = sampler.test
    if chosen is not None and (chosen.node is None or ast.dump(chosen.node) in shown):
        return False
    return not any(one in asked for one in [sampler, *options])


def check_set_epoch(program: Program, context: Context) -> Iterator[Finding]:
    """A shuffling DistributedSampler whose epoch is never set gives every epoch in one order."""
    if program.framework in PREPARES:
        return
    reported: set[Value] = set()
    for loop in program.loops:
        for sampler in samplers_of(loop):
            if sampler in reported or not shuffles(sampler):
                continue
            epochs = epoch_loop(program, loop)
            training = (*program.backwards, *program.steps)
            trains = any(loop in one.loops for one in training)
            if epochs is None or (training and not trains):
                continue
            reported.add(sampler)
            yield from epoch_findings(program, sampler, loop, epochs, trains)


def samplers_of(loop: Loop) -> Iterator[Value]:
    """DistributedSamplers of the loader that a loop runs over."""
    for loader in loop.over.any() if loop.over is not None else ():
        for field in ("sampler", "batch_sampler"):
            given = loader.fields.get(field)
            if given is None:
                continue
            for one in given.origins():
                if one.instance == DISTRIBUTED_SAMPLER:
                    yield one


def shuffles(sampler: Value) -> bool:
    call = sampler.call
    if not isinstance(call, Call) or call.open_ended:
        return False
    shuffle = call.argument(3, "shuffle")
    return shuffle is None or shuffle.const is True or shuffle.default is True


def epoch_loop(program: Program, loop: Loop) -> Loop | None:
    """The loop that starts a loop over batches again and again; None where it runs once."""
    inside = next(one for one in program.events if loop in one.loops)
    outer = inside.loops[: inside.loops.index(loop)]
    outer = tuple(one for one in outer if not one.is_comprehension and not one.over_batches)
    return outer[-1] if outer else None


def epoch_findings(
    program: Program, sampler: Value, loop: Loop, epochs: Loop, trains: bool
) -> Iterator[Finding]:
    """Where no epoch is set, or one number; a hint where the loop is not seen to train: to others
    the order of their batches is all one."""
    level = Severity.ERROR if trains else Severity.INFO
    sets = [one for one in program.calls(method="set_epoch") if may_set(one, sampler)]
    inside = [one for one in sets if epochs in one.loops]
    if not inside:
        where = (
            f"set_epoch is called outside this loop ({sets[0].spot})"
            if sets
            else "no set_epoch call"
        )
        what = f"{where}: the DistributedSampler gives every epoch the same order"
        fix = f"call `{sampler.label or 'sampler'}.set_epoch(epoch)` first in this loop"
        yield program.finding(
            "set-epoch-missing",
            epochs,
            what,
            fix,
            seen=[sampler.call, loop] if sampler.call is not None else [loop],
            first=set_epoch_call(loop, epochs),
            level=level,
        )
        return
    varies = any(not is_constant(one) for one in inside)
    for one in inside:
        constant = not varies and is_constant(one)
        if constant or any(guard.main is not None for guard in one.guards):
            what = (
                "set_epoch is given the same number in every epoch: the order never changes"
                if constant
                else "set_epoch is called on some ranks only: their orders no longer fit"
            )
            fix = "call set_epoch(epoch) with the loop's counter, on every rank"
            yield program.finding("set-epoch-missing", one, what, fix, level=level)


def is_constant(call: Call) -> bool:
    epoch = call.argument(0, "epoch")
    return epoch is not None and epoch.kind != "counter" and epoch.const is not UNKNOWN


COUNTERS = ("range", "trange", "tqdm.trange", "tqdm.auto.trange")
AROUND = ("enumerate", "iter", "tqdm", "tqdm.tqdm", "track")
"""Calls around a loader or a counter that hand on what they go over."""


def set_epoch_call(loop: Loop, epochs: Loop) -> str | None:
    """`loader.sampler.set_epoch(epoch)` for the start of a loop over epochs.

    None where the loop counts no epochs, or its loader has no name there that surely means one
    with a DistributedSampler.
    """
    if not isinstance(epochs.node, ast.For) or not isinstance(loop.node, ast.For):
        return None
    counter, loader = counter_of(epochs.node), handed_on(loop.node.iter)
    root = loader
    while isinstance(root, ast.Attribute):
        root = root.value
    if counter is None or loop.depth != epochs.depth or not isinstance(root, ast.Name):
        return None
    inside = [node for one in epochs.node.body for node in ast.walk(one)]
    if any(isinstance(one, ast.Name) and one.id == root.id and is_bound(one) for one in inside):
        return None
    for one in loop.over.any() if loop.over is not None else ():
        given = one.fields.get("sampler")
        if given is None or any(each.instance != DISTRIBUTED_SAMPLER for each in given.any()):
            return None
    return f"{ast.unparse(loader)}.sampler.set_epoch({counter})"


def is_bound(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def handed_on(node: ast.expr) -> ast.expr:
    """What is gone over, under `enumerate` and bars."""
    while isinstance(node, ast.Call) and ast.unparse(node.func) in AROUND and node.args:
        node = node.args[0]
    return node


def counter_of(loop: ast.For) -> str | None:
    """The name that counts the turns of a loop, from a `range` or an `enumerate`."""
    over, target = handed_on(loop.iter), loop.target
    outer = ast.unparse(loop.iter.func) if isinstance(loop.iter, ast.Call) else ""
    if outer == "enumerate":
        target = target.elts[0] if isinstance(target, ast.Tuple) else loop.iter
    elif not isinstance(over, ast.Call) or ast.unparse(over.func) not in COUNTERS:
        return None
    return target.id if isinstance(target, ast.Name) and target.id != "_" else None


def may_set(call: Call, sampler: Value) -> bool:
    """Whether a `.set_epoch` is this sampler's: its own, its loader's, or of something unknown."""
    receiver = call.receiver
    if receiver is None:
        return True
    options = list(receiver.any())
    if sampler in options or any(sampler in one.origins() for one in options):
        return True
    for one in options:
        for field in ("sampler", "batch_sampler", "loader", "dataloader"):
            given = one.fields.get(field)
            if given is not None and sampler in given.origins():
                return True
    return any(one.instance is None and one.call is None for one in options)


def check_sampler_missing(program: Program, context: Context) -> Iterator[Finding]:
    """Every rank trains on the whole data set, in its own or even the same order."""
    if program.framework in PREPARES or not program.wraps:
        return
    reported: set[Value] = set()
    inner = [one.loops[-1] for one in program.backwards if one.loops]
    for loop in dict.fromkeys([*training_loops(program), *inner]):
        for loader in loaders_read(program, loop):
            call = loader.call
            if loader in reported or not isinstance(call, Call) or call.name != DATALOADER:
                continue
            reported.add(loader)
            if whole_data_set(call) and not batches_are_split(program, loop):
                what = (
                    "this loader feeds a distributed model and has no DistributedSampler: "
                    "every rank goes through the whole data set"
                )
                fix = "pass sampler=DistributedSampler(dataset) and leave shuffle out"
                yield program.finding("sampler-missing", call, what, fix, seen=(loop,))


def training_loops(program: Program) -> list[Loop]:
    """Loops over batches in which a backward pass runs."""
    inner = [one.loops[-1] for one in program.backwards if one.loops]
    found = [loop for one in program.backwards for loop in one.loops if loop in inner]
    return [one for one in dict.fromkeys(found) if one.over is not None]


def loaders_read(program: Program, loop: Loop) -> Iterator[Value]:
    """Loaders whose batches a loop takes: those it runs over, and those it calls `next` on."""
    yield from loop.over.any() if loop.over is not None else ()
    for call in program.calls("builtins.next"):
        source = call.result.element_of
        if loop in call.loops and source is not None:
            yield from source.any()


def whole_data_set(call: Call) -> bool:
    """Whether a DataLoader surely gives its rank all samples of a map-style data set."""
    if call.open_ended:
        return False
    data, shuffle = call.argument(0, "dataset"), call.argument(2, "shuffle")
    if data is None or data.divergent:
        return False
    if any(one.divergent or one.name == "shard" for one in data.origins()):
        return False
    batch_sampler = call.argument(4, "batch_sampler")
    if batch_sampler is not None and batch_sampler.const is not None:
        return False
    sampler = call.argument(3, "sampler")
    if sampler is not None and sampler.const is not None:
        return any(undistributed(one) for one in sampler.any()) and all(
            undistributed(one) for one in sampler.any()
        )
    return (shuffle is not None and shuffle.const is True) or map_style(data)


def undistributed(sampler: Value) -> bool:
    """A sampler that deals out the whole data set: torch's own plain ones, or one of one rank."""
    if sampler.const is None:
        return True
    if sampler.instance in PLAIN_SAMPLERS:
        return True
    call = sampler.call
    if sampler.instance != DISTRIBUTED_SAMPLER or not isinstance(call, Call):
        return False
    replicas = call.argument(1, "num_replicas")
    return replicas is not None and replicas.const == 1


PLAIN_SAMPLERS = frozenset(
    {
        "torch.utils.data.RandomSampler",
        "torch.utils.data.SequentialSampler",
        "torch.utils.data.WeightedRandomSampler",
        "torch.utils.data.SubsetRandomSampler",
    }
)


def map_style(data: Value) -> bool:
    """Whether it is surely a data set with `__getitem__`."""
    for one in data.any():
        own: Class | None = one.of_class
        if own is not None:
            if own.method("__getitem__") is None or own.method("__iter__") is not None:
                return False
            continue
        name = one.instance or ""
        if not name.startswith(("torchvision.datasets.", "torch.utils.data.TensorDataset")):
            return False
    return True


def batches_are_split(program: Program, loop: Loop) -> bool:
    """Whether the loop takes this rank's part of every batch, or skips by rank."""
    for call in program.forwards:
        if loop in call.loops and any(RANK in one.taints for one in call.args):
            return True
    skips = (one for one in program.exits if loop in one.loops and one.kind == "continue")
    return any(RANK in guard.test.taints for one in skips for guard in one.guards)


def check_cut_by_rank(program: Program, context: Context) -> Iterator[Finding]:
    """`data[rank::world_size]`: some ranks may have a batch more, and wait for the others in it."""
    joins = ("torch.distributed.algorithms.join.Join", "torch.distributed.algorithms.Join")
    ddp_joins = (one.receiver for one in program.calls(method="join"))
    is_joined = any(one is not None and one.wrapped_by("ddp") for one in ddp_joins)
    if program.framework in PREPARES or is_joined or program.has_call(*joins):
        return
    reported: set[Call] = set()
    for loop in training_loops(program) if program.wraps else ():
        ends_early = any(one.kind == "break" and loop in one.loops for one in program.exits)
        for loader in loop.over.any() if loop.over is not None and not ends_early else ():
            call = loader.call
            if not isinstance(call, Call) or call.name != DATALOADER or call in reported:
                continue
            cut = cut_by_rank(program, call)
            if cut is not None:
                reported.add(call)
                what = (
                    "each rank reads every n-th sample: where their number is no multiple of the "
                    "number of ranks, some ranks may have one batch more, and wait for the others "
                    f"in its backward pass ({loop.spot})"
                )
                fix = (
                    "give the loader DistributedSampler(data), which pads, or cut the data to a "
                    "multiple of the number of ranks first; or loop in `with model.join()`"
                )
                yield program.finding("uneven-inputs-hang", cut, what, fix, seen=(call, loop))


def cut_by_rank(program: Program, loader: Call) -> ast.AST | None:
    """Where the samples of a loader are taken with a step from the rank on; None where they are
    not, or where something may make the ranks' numbers of batches equal."""
    data, drops = loader.argument(0, "dataset"), loader.argument(8, "drop_last")
    chosen = (loader.argument(3, "sampler"), loader.argument(4, "batch_sampler"))
    if loader.open_ended or data is None or any(chosen) or (drops and drops.const is not False):
        return None
    found = [*data.origins(), *(one for own in data.any() for one in dealt_inside(program, own))]
    cuts = list(dict.fromkeys(one.node for one in found if steps_from_rank(one)))
    others = (one for one in found if isinstance(one.node, ast.Slice) and RANK not in one.taints)
    return cuts[0] if len(cuts) == 1 and not any(others) else None


def dealt_inside(program: Program, data: Value) -> Iterator[Value]:
    """What a data set of an own class takes and gives; nothing of one that may never end."""
    own: Class | None = data.of_class
    if own is None or any(isinstance(node, ast.While) for node in ast.walk(own.node)):
        return
    for one in program.events:
        function = one.function
        if function is None or function.own_class is not own:
            continue
        if function.name in ("__init__", "__iter__") and isinstance(one, Call | Assign):
            yield from (one.result if isinstance(one, Call) else one.value).origins()


def steps_from_rank(value: Value) -> bool:
    """`x[rank::n]`, `range(rank, len(x), n)` and `islice(x, rank, None, n)`."""
    if isinstance(value.node, ast.Slice):
        first, last, step = value.node.lower, value.node.upper, value.node.step
        return None not in (first, step) and last is None and RANK in value.sources[0].taints
    call = value.call
    starts = {"builtins.range": 0, "itertools.islice": 1}
    if not isinstance(call, Call) or call.name not in starts:
        return False
    start = starts[call.name]
    return len(call.args) == start + 3 and RANK in call.args[start].taints


def check_pinned_copies(program: Program, context: Context) -> Iterator[Finding]:
    """`non_blocking=True` copies of batches from pageable memory."""
    copies = [
        one
        for one in program.calls(method=("to", "cuda"))
        if (flag := one.argument(None, "non_blocking")) is not None
        and flag.const is True
        and one.receiver is not None
        and one.receiver.has_kind("batch")
    ]
    reported: set[int] = set()
    for copy in copies:
        for loop in copy.loops:
            for loader in loop.over.any() if loop.over is not None else ():
                call = loader.call
                if not isinstance(call, Call) or call.name != DATALOADER or id(call) in reported:
                    continue
                reported.add(id(call))
                if call.has_argument(7, "pin_memory") or program.framework in PREPARES:
                    continue
                what = (
                    f"{copy.spot} copies its batches with non_blocking=True, which does "
                    "nothing from pageable memory"
                )
                fix = "pass pin_memory=True"
                yield program.finding("no-pin-memory", call, what, fix, seen=(copy,))


RULES = (
    check_sampler_and_shuffle,
    check_set_epoch,
    check_sampler_missing,
    check_cut_by_rank,
    check_pinned_copies,
)
