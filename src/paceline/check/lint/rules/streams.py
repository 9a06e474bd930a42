"""Streams and hand-made shares: read twice, or of unequal length."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call, Class
from paceline.check.lint.names import DATALOADER
from paceline.check.lint.program import Program
from paceline.check.lint.rules.samplers import PREPARES
from paceline.check.lint.values import Value


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


RULES = (check_iterable_dataset,)
