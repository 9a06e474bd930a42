"""Streams and hand-made shares: read twice, or of unequal length."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Class, is_rank_number
from paceline.check.lint.names import DATALOADER
from paceline.check.lint.program import Program
from paceline.check.lint.rules.samplers import PREPARES, training_loops
from paceline.check.lint.values import RANK, SHARD, Value


def check_iterable_dataset(program: Program, context: Context) -> Iterator[Finding]:
    """An IterableDataset that every rank, or every worker, reads as a whole."""
    if not (program.wraps or program.has_call("torch.distributed.init_process_group")):
        return
    if program.framework in PREPARES:
        return
    for own in program.classes:
        if "torch.utils.data.IterableDataset" not in own.library_bases():
            continue
        iterate = own.method("__iter__")
        if iterate is None:
            continue
        loaders = loaders_over(program, own)
        if not loaders:
            continue
        around = [own, *classes_around(own, loaders)]
        ranked = any(splits_by_rank(one, loaders) for one in around)
        worked = any(splits_by_worker(one) for one in around)
        workers = max(worker_count(one) for one in loaders)
        if ranked and (worked or workers < 2):
            continue
        who = "every rank" if not ranked else "every worker process of a loader"
        yield program.finding(
            "iterable-dataset-duplicates",
            own.node,
            what=(
                f"{who} reads all samples of {own.name}: its __iter__ (line "
                f"{iterate.node.lineno}) does not split them by "
                + ("rank" if not ranked else "get_worker_info()")
            ),
            fix=(
                "in __iter__, keep each (rank * num_workers + worker)-th sample of "
                "world_size * num_workers, by get_worker_info() and the rank"
            ),
            seen=(iterate.node, loaders[0]),
            level=Severity.ERROR if not ranked else Severity.INFO,
        )


def loaders_over(program: Program, own: Class) -> list[Call]:
    return [
        one
        for one in program.calls(DATALOADER)
        if any(value.of_class is own for value in (one.argument(0, "dataset") or Value()).origins())
    ]


def classes_around(own: Class, loaders: list[Call]) -> list[Class]:
    """Own classes that a loader's data set was built through: `Share(Stream(...))`."""
    given = [one.argument(0, "dataset") or Value() for one in loaders]
    found = [each.of_class for one in given for each in one.origins() if each.of_class is not None]
    return [one for one in dict.fromkeys(found) if one is not own]


def worker_count(loader: Call) -> int:
    workers = loader.argument(5, "num_workers")
    count = workers.likely(0) if workers is not None else 0
    return count if isinstance(count, int) else 0


RANK_WORDS = ("rank", "world", "shard", "replica", "num_parts", "process_index")


def splits_by_rank(own: Class, loaders: list[Call]) -> bool:
    """Whether a rank, a world size or a shard plays a part in the class or in what it is given."""
    for part in own.ancestors():
        for node in ast.walk(part.node):
            name = getattr(node, "id", None) or getattr(node, "attr", None)
            name = name or getattr(node, "arg", None)
            if isinstance(name, str) and any(word in name.lower() for word in RANK_WORDS):
                return True
            if isinstance(node, ast.Constant) and str(node.value) in {"RANK", "WORLD_SIZE"}:
                return True
    data = [one.argument(0, "dataset") or Value() for one in loaders]
    return any(value.divergent for one in data for value in one.origins())


def splits_by_worker(own: Class) -> bool:
    return any(
        "worker" in (getattr(node, "attr", None) or getattr(node, "id", None) or "")
        for part in own.ancestors()
        for node in ast.walk(part.node)
    )


def check_uneven_parts(program: Program, context: Context) -> Iterator[Finding]:
    """Ranks train on parts of the data of unequal length, and the longest part waits."""
    if not program.is_distributed or joined(program) or program.framework in PREPARES:
        return
    reported: set[int] = set()
    joint = [one.loops[-1] for one in program.collectives if one.loops]
    for loop in dict.fromkeys([*training_loops(program), *joint]):
        if loop.over is None or drops_last(loop.over):
            continue
        for one in sources_of(loop.over):
            reason = uneven(one)
            if reason is None or id(one.node) in reported or one.node is None:
                continue
            reported.add(id(one.node))
            yield program.finding(
                "uneven-inputs-hang",
                one.node,
                what=(
                    "the ranks' parts differ in length, as " + UNEVEN[reason] + "; the training "
                    f"loop in {loop.spot} gives some ranks more iterations, and they wait for "
                    "ranks that are done"
                ),
                fix=(
                    "cut the parts to one length (`n = len(data) // world_size * world_size; "
                    "data[:n][rank::world_size]`), use DistributedSampler, or wrap the loop in "
                    "`with Join([model]):`"
                ),
                seen=(loop,),
                level=Severity.ERROR if reason == "size" else Severity.WARNING,
            )


def sources_of(over: Value) -> Iterator[Value]:
    """What a loop runs over is made of; of an own class that ends, what it yields as well."""
    yield from over.origins()
    iterate = over.of_class.method("__iter__") if over.of_class is not None else None
    if iterate is not None and "*" in over.fields and not endless(iterate.node):
        yield from over.fields["*"].origins()


def endless(node: ast.AST) -> bool:
    """Whether a stream starts again at its end: `while True`, `itertools.cycle`."""
    for one in ast.walk(node):
        if isinstance(one, ast.While) and isinstance(one.test, ast.Constant) and one.test.value:
            return True
        if isinstance(one, ast.Call) and ast.unparse(one.func).endswith("cycle"):
            return True
    return False


UNEVEN = {
    "stride": "data[rank::world_size] gives the first ranks one sample more",
    "size": "their size is computed from the rank",
}


def joined(program: Program) -> bool:
    """Whether a `Join` context lets ranks that are done stand in for the rest."""
    return program.has_call("torch.distributed.algorithms.join.Join", method="join") and any(
        one.name.endswith("Join")
        or (one.is_method("join") and one.receiver is not None and one.receiver.wrapped_by("ddp"))
        for one in program.all_calls
    )


def drops_last(over: Value) -> bool:
    """Whether a loader leaves out its last, shorter batch."""
    for one in over.any():
        if isinstance(one.call, Call):
            drop = one.call.argument(8, "drop_last")
            if drop is not None and drop.const is not False:
                return True
    return False


def uneven(value: Value) -> str | None:
    """Why a part of the data is longer on some ranks."""
    node = value.node
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        if node.slice.step is None or SHARD not in value.taints:
            return None
        base = value.sources[0]
        cut = any(
            one.operation is not None and one.operation[0] in {"FloorDiv", "Mod"}
            for one in base.origins()
        )
        return None if cut else "stride"
    call = value.call
    if isinstance(call, Call) and call.name in SIZED and call.node is node:
        sizes = [one for one in call.args if RANK in one.taints and one.operation is not None]
        if call.name == "builtins.range" and len(call.args) > 1 and RANK in call.args[0].taints:
            return None  # begins and ends by the rank: range(rank * n, (rank + 1) * n)
        if any(sizes_by_rank(one) and is_rank_number(one) for one in sizes):
            return "size"
    return None


SIZED = frozenset(
    {"torch.randn", "torch.rand", "torch.zeros", "torch.ones", "torch.empty", "builtins.range"}
)


def sizes_by_rank(value: Value) -> bool:
    """`100 + 10 * rank`: a number that grows with the rank."""
    return value.operation is not None and value.operation[0] in {"Add", "Sub", "Mult"}


RULES = (
    check_iterable_dataset,
    check_uneven_parts,
)
