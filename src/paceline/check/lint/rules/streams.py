"""Streams and hand-made shares: read twice, or of unequal length."""

import ast
import re
from collections.abc import Iterator
from math import prod

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
            Severity.ERROR if not ranked else Severity.INFO,
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


def check_streaming(program: Program, context: Context) -> Iterator[Finding]:
    """A streamed Hugging Face data set that no rank takes its part of."""
    if program.framework in PREPARES or not program.wraps:
        return
    if program.has_call("datasets.distributed.split_dataset_by_node", method=("shard", "split")):
        return
    for call in program.calls("datasets.load_dataset"):
        streaming = call.argument(None, "streaming")
        if streaming is None or streaming.const is not True:
            continue
        if any(RANK in one.taints for one in call.args) or RANK in expression_taints(call):
            continue
        yield program.finding(
            "iterable-dataset-duplicates",
            Severity.ERROR,
            call,
            what="every rank streams the whole data set: nothing splits it by rank",
            fix=(
                "pass it through datasets.distributed.split_dataset_by_node(dataset, rank=rank, "
                "world_size=world_size)"
            ),
        )


def expression_taints(call: Call) -> frozenset[str]:
    found: frozenset[str] = frozenset()
    for one in call.kwargs.values():
        found |= one.taints
    return found


def check_webdataset(program: Program, context: Context) -> Iterator[Finding]:
    """A WebDataset that no node splitter divides among the ranks."""
    if not (program.wraps or program.has_call("torch.distributed.init_process_group")):
        return
    if program.has_call("webdataset.split_by_node", "webdataset.ResampledShards"):
        return
    if program.mentions("split_by_node"):
        return
    for call in program.calls("webdataset.WebDataset", "webdataset.DataPipeline"):
        if call.open_ended or call.argument(None, "nodesplitter", "resampled") is not None:
            continue
        if any(one.divergent for one in call.args):
            continue
        if call.name.endswith("DataPipeline") and not any(
            one.instance == "webdataset.SimpleShardList" for one in call.args
        ):
            continue
        yield program.finding(
            "webdataset-nodesplitter",
            Severity.ERROR,
            call,
            what=(
                "no nodesplitter divides these shards among the ranks: WebDataset raises, or "
                "every rank reads all of them"
            ),
            fix="pass nodesplitter=wds.split_by_node (or resampled=True and .with_epoch(n))",
        )


BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def check_shard_counts(program: Program, context: Context) -> Iterator[Finding]:
    """Shards that do not go round: fewer than readers, or no multiple of the ranks."""
    world = context.num_processes
    if world is None or world < 2:
        return
    for call in program.calls("webdataset.WebDataset"):
        urls = call.argument(0, "urls")
        text = urls.likely() if urls is not None else None
        resampled = call.argument(None, "resampled")
        if not isinstance(text, str) or (resampled is not None and resampled.const is not False):
            continue
        number = prod(int(last) - int(first) + 1 for first, last in BRACES.findall(text))
        if BRACES.search(text) and number < world:
            yield program.finding(
                "webdataset-nodesplitter",
                Severity.ERROR,
                call,
                what=f"{number} shards for {world} ranks: some ranks get none",
                fix=f"write the data set in {world} shards or more, or pass resampled=True",
            )
    if not program.has_call("datasets.distributed.split_dataset_by_node"):
        return
    for call in program.calls(method="to_iterable_dataset"):
        shards = call.argument(0, "num_shards")
        count = shards.likely() if shards is not None else None
        if isinstance(count, int) and count % world:
            yield program.finding(
                "streaming-shards-not-factor",
                Severity.WARNING,
                call,
                what=(
                    f"{count} shards are no multiple of {world} ranks: every rank reads all of the "
                    "data and throws most of it away"
                ),
                fix=f"num_shards={-(-count // world) * world}",
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
                Severity.ERROR if reason == "size" else Severity.WARNING,
                one.node,
                what=(
                    "the ranks' parts differ in length, as " + UNEVEN[reason] + "; the training "
                    f"loop in line {loop.line} gives some ranks more iterations, and they wait for "
                    "ranks that are done"
                ),
                fix=(
                    "cut the parts to one length (`n = len(data) // world_size * world_size; "
                    "data[:n][rank::world_size]`), use DistributedSampler, or wrap the loop in "
                    "`with Join([model]):`"
                ),
                seen=(loop,),
            )


def sources_of(over: Value) -> Iterator[Value]:
    """What a loop runs over is made of; of an own class that ends, what it yields as well."""
    yield from over.origins()
    iterate = over.of_class.method("__iter__") if over.of_class is not None else None
    if iterate is not None and "*" in over.fields and not endless(iterate.node):
        yield from over.fields["*"].origins()


def check_uneven_streams(program: Program, context: Context) -> Iterator[Finding]:
    """An IterableDataset that deals out samples in turn: some ranks get one more."""
    if not program.wraps or joined(program) or program.framework in PREPARES:
        return
    looped = [one for loop in training_loops(program) for one in (loop.over or Value()).any()]
    for own in program.classes:
        iterate = own.method("__iter__")
        if iterate is None or "torch.utils.data.IterableDataset" not in own.library_bases():
            continue
        loaders = [one for one in loaders_over(program, own) if one.result in looped]
        if not loaders or endless(iterate.node):
            continue
        turn = next((one for one in ast.walk(iterate.node) if deals_in_turn(one)), None)
        if turn is not None:
            yield program.finding(
                "uneven-inputs-hang",
                Severity.INFO,
                turn,
                what=(
                    "samples are dealt out in turn: where their number is no multiple of the "
                    "number of ranks, some ranks have a batch more and wait in it"
                ),
                fix="give every rank n // world_size samples, or stop all ranks after a fixed step",
                seen=(loaders[0],),
            )


def endless(node: ast.AST) -> bool:
    """Whether a stream starts again at its end: `while True`, `itertools.cycle`."""
    for one in ast.walk(node):
        if isinstance(one, ast.While) and isinstance(one.test, ast.Constant) and one.test.value:
            return True
        if isinstance(one, ast.Call) and ast.unparse(one.func).endswith("cycle"):
            return True
    return False


def deals_in_turn(node: ast.AST) -> bool:
    """`range(rank, n, world)`, `islice(it, rank, None, world)`, `xs[rank::world]`, `i % world`."""
    if isinstance(node, ast.Slice):
        return node.step is not None and not isinstance(node.step, ast.Constant)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        step = 2 if called == "range" else 3
        if called == "range" or called.endswith("islice"):
            return len(node.args) > step and not isinstance(node.args[step], ast.Constant)
        return False
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.BinOp):
        return isinstance(node.left.op, ast.Mod) and isinstance(node.ops[0], ast.Eq | ast.NotEq)
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
    check_streaming,
    check_webdataset,
    check_shard_counts,
    check_uneven_parts,
    check_uneven_streams,
)
