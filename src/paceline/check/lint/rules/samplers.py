"""Which rank reads which samples of a data set with an index, and in which order."""

import ast
from collections.abc import Iterator
from typing import TypeGuard

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Assign, Call, Class, Loop
from paceline.check.lint.facts.names import DATALOADER, DISTRIBUTED_SAMPLER
from paceline.check.lint.facts.program import OWNERS, Program
from paceline.check.lint.facts.values import RANK, UNKNOWN, Value

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
    if program.framework in OWNERS:
        return
    reported: set[Value] = set()
    for loop in program.loops:
        for sampler in samplers_of(loop):
            if sampler in reported or not shuffles(sampler):
                continue
            epochs = epoch_loop(program, loop)
            trains = any(loop in one.loops for one in program.steps)
            if epochs is None or (program.steps and not trains):
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


AROUND = ("enumerate", "iter", "tqdm", "tqdm.tqdm", "track")
"""Calls around a loader that hand on what they go over."""


def set_epoch_call(loop: Loop, epochs: Loop) -> str | None:
    """`loader.sampler.set_epoch(epoch)` for the start of a loop over epochs.

    None where the loop counts no epochs, or its loader has no name there that surely means one
    with a DistributedSampler.
    """
    counts = epochs.over is not None and epochs.over.kind == "counter" and "_" not in epochs.targets
    if not counts or not isinstance(loop.node, ast.For) or loop.depth != epochs.depth:
        return None
    loader = loop.node.iter
    while isinstance(loader, ast.Call) and ast.unparse(loader.func) in AROUND and loader.args:
        loader = loader.args[0]
    name = ast.unparse(loader)
    bound = {one.id for one in ast.walk(epochs.node) if is_bound(one)}
    given = [one.fields.get("sampler") or Value() for one in (loop.over or Value()).any()]
    is_sure = all(each.instance == DISTRIBUTED_SAMPLER for one in given for each in one.any())
    if not is_sure or name.split(".")[0] in bound or not name.replace(".", "").isidentifier():
        return None
    return f"{name}.sampler.set_epoch({epochs.targets[0]})"


def is_bound(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


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
    """Every rank trains on the whole data set, each in an order of its own."""
    if program.framework in OWNERS or not program.wraps:
        return
    reported: set[Call] = set()
    for loop in training_loops(program):
        for loader in loop.over.any() if loop.over is not None else ():
            call = loader.call
            if not isinstance(call, Call) or call.name != DATALOADER or call in reported:
                continue
            reported.add(call)
            if shuffles_all(call) and not batches_are_split(program, loop):
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


def shuffles_all(call: Call) -> bool:
    """Whether a DataLoader surely shuffles all samples: of a data set with an index, without a
    sampler."""
    data, shuffle = call.argument(0, "dataset"), call.argument(2, "shuffle")
    given = (call.argument(3, "sampler"), call.argument(4, "batch_sampler"))
    if call.open_ended or data is None or shuffle is None or shuffle.const is not True:
        return False
    if any(one is not None and one.const is not None for one in given):
        return False
    return not any(one.divergent or one.name == "shard" for one in data.origins())


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
    if program.framework in OWNERS or is_joined or program.has_call(*joins):
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
                if call.has_argument(7, "pin_memory") or program.framework in OWNERS:
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
