"""Which samples a rank reads: the global batch stays, each rank takes its share of every batch.

`DistributedSampler` gives rank r the samples r, r + W, r + 2W, ... of the epoch's order. With a
batch size that is divided by W, the k-th batches of all ranks together are the k-th batch of the
script before, so the losses agree where the order does.
"""

import ast

from paceline.adapt.adaptation import Work
from paceline.adapt.roles import Loop
from paceline.adapt.script import Place

_BY_POSITION = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler")


def share_data(work: Work) -> None:
    """Share out every loader that is trained on; the others are read whole by every rank."""
    script = work.script
    shared = [call for call in work.roles.train_loaders if _share_loader(work, call)]
    for call in script.calls:
        if work.roles.makes_loader(call) and call not in work.roles.train_loaders:
            work.say(call, "read whole by every rank, so that its numbers are those of one device")
    if not work.accelerate:
        for loop in work.roles.batch_loops:
            if script.origins(loop.iter) & set(shared):
                _set_epoch(work, loop)
        for place in {script.place(call.args[0]) for call in work.roles.next_calls}:
            if place is not None:
                _set_epoch_of_iterator(work, place)
    _download_once(work)


def _arguments(work: Work, call: ast.Call) -> dict[str, ast.expr]:
    given = dict(zip(_BY_POSITION, call.args, strict=False))
    given |= {k.arg: k.value for k in call.keywords if k.arg is not None}
    return given


def _share_loader(work: Work, call: ast.Call) -> bool:
    """Whether the loader's samples are now shared out by a sampler."""
    script, edits = work.script, work.edits
    given = _arguments(work, call)
    if any(k.arg is None for k in call.keywords):
        work.leave(
            call, "arguments in ** cannot be read: give the sampler and the batch size by hand"
        )
        return False
    for name in ("sampler", "batch_sampler"):
        if name in given and not _is_none(given[name]):
            why = (
                "a sampler of your own: give each rank its share of it (every WORLD_SIZE-th "
                "sample), and divide the batch size"
            )
            work.leave(given[name], why, f"{name}={edits.text(given[name])}")
            return False
    others = [
        loop for loop in ast.walk(script.tree)
        if isinstance(loop, ast.For) and loop not in work.roles.batch_loops
        and call in script.origins(loop.iter)
    ]  # fmt: skip
    if others and not any(_is_peek(loop) for loop in others) and _read_also_for_other(work, others):
        work.leave(call, "one DataLoader call makes the loader that is trained on and one "
                         "that is only "
                         "read: make them apart, and share out the first")  # fmt: skip
        return False
    dataset = given.get("dataset")
    size = given.get("batch_size")
    if dataset is None or size is None or _is_none(size):
        work.leave(call, "without a batch size there is nothing to share: give one that "
                         "the number of "
                         "ranks divides")  # fmt: skip
        return False
    if work.accelerate:
        work.loaders.append(call)
        work.say(call, "prepared by Accelerate, split_batches: the batch size is that of all ranks")
        return True
    edits.wrap(size, f"{work.use('per_rank')}(", ")")
    work.say(size, f"batch size {edits.text(size)} is shared by the ranks; the learning rate stays")
    if _is_stream(work, dataset):
        edits.wrap(dataset, f"{work.use('ShareOfStream')}(", ")")
        work.say(
            dataset, "an iterable dataset: each rank keeps its share of every group of samples"
        )
        return False
    shuffle = given.get("shuffle")
    _add_sampler(work, call, dataset, shuffle, given.get("drop_last"))
    return True


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_peek(loop: ast.For) -> bool:
    """A loop that looks at the first batch and leaves."""
    return isinstance(loop.body[-1], ast.Break)


def _read_also_for_other(work: Work, others: list[ast.For]) -> bool:
    return any("no_grad" in ast.unparse(each) or ".eval()" in ast.unparse(each)
               for loop in others
               if (each := work.script.function(loop)) is not None)  # fmt: skip


def _is_stream(work: Work, dataset: ast.expr) -> bool:
    script = work.script
    for origin in script.origins(dataset):
        name = script.dotted(origin.func) if isinstance(origin, ast.Call) else None
        if name in script.classes and any(
            (script.qualified(base) or "").endswith("IterableDataset")
            for base in script.classes[name or ""].bases
        ):
            return True
        if isinstance(origin, ast.Call) and (script.qualified(origin.func) or "") == (
            "datasets.load_dataset"
        ):
            return any(k.arg == "streaming" and not _is_false(k.value) for k in origin.keywords)
    return False


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _add_sampler(
    work: Work,
    call: ast.Call,
    dataset: ast.expr,
    shuffle: ast.expr | None,
    drop_last: ast.expr | None,
) -> None:
    edits = work.edits
    name = edits.text(dataset)
    if not isinstance(dataset, (ast.Name, ast.Attribute, ast.Subscript)):
        stmt = work.script.statement(call)
        name = "train_samples"
        edits.before(stmt, [f"{name} = {edits.text(dataset)}"])
        edits.replace(dataset, name)
    order = "False" if shuffle is None else edits.text(shuffle)
    options = [name, f"shuffle={order}"]
    if drop_last is not None and not _is_false(drop_last):
        options.append(f"drop_last={edits.text(drop_last)}")
    work.use("DistributedSampler")
    sampler = f"DistributedSampler({', '.join(options)})"
    keyword = next((k for k in call.keywords if k.arg == "shuffle"), None)
    none = next((k for k in call.keywords if k.arg == "sampler"), None)
    if none is not None:
        edits.replace(none.value, sampler)
    if keyword is not None and none is None:
        edits.replace(keyword, f"sampler={sampler}")
    elif keyword is not None:
        edits.replace(keyword.value, "False")
    elif shuffle is not None:  # by position
        edits.replace(shuffle, "False")
        if none is None:
            edits.add_argument(given_last(call), f"sampler={sampler}")
    elif none is None:
        edits.add_argument(given_last(call), f"sampler={sampler}")
    work.say(call, "every rank reads its share of each batch (DistributedSampler); where "
                   "the samples "
                   "do not divide, the last batch repeats a few")  # fmt: skip


def given_last(call: ast.Call) -> ast.expr:
    """The last argument of a call, by place in the text."""
    everything = [*call.args, *(k.value for k in call.keywords)]
    return max(everything, key=lambda each: (each.end_lineno or 0, each.end_col_offset or 0))


def epoch_loop(work: Work, node: ast.AST) -> tuple[Loop | None, ast.stmt]:
    """The loop around a batch loop, also at the call of its function, and the statement in it."""
    script = work.script
    seen: set[ast.AST] = set()
    stmt = script.statement(node)
    while True:
        inner: ast.AST = stmt
        for parent in script.up(stmt):
            if isinstance(parent, (ast.For, ast.While)):
                return parent, inner  # type: ignore[return-value]
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
                sites = script.calls_of(parent)
                if parent in seen or len(sites) != 1:
                    return None, stmt
                seen.add(parent)
                stmt = script.statement(sites[0])
                break
            inner = parent
        else:
            return None, stmt


def _loader_text(work: Work, node: ast.expr) -> str | None:
    """The loader as it is named: under `enumerate`, a progress bar, or a name for these."""
    script = work.script
    while isinstance(node, ast.Call) and node.args:
        node = node.args[0]
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    place = script.place(node)
    bound = script.bindings.get(place, []) if place is not None else []
    if len(bound) == 1 and isinstance(bound[0].value, ast.Call):
        called = script.dotted(bound[0].value.func) or ""
        if called.split(".")[-1] in ("tqdm", "enumerate", "iter", "trange"):
            return _loader_text(work, bound[0].value)
    return ast.unparse(node)


def _set_epoch(work: Work, loop: ast.For) -> None:
    """`set_epoch` above the batch loop: without it every epoch has the same order."""
    text = _loader_text(work, loop.iter)
    outer, _ = epoch_loop(work, loop)
    if outer is None:
        return
    if text is None:
        work.leave(loop, "the loader has no name here: call its sampler's set_epoch(epoch) before")
        return
    number = _epoch_number(work, outer, loop)
    work.edits.before(loop, [f"{text}.sampler.set_epoch({number or f'{text}.sampler.epoch + 1'})"])
    work.say(loop, "set_epoch: another order in every epoch, the same on all ranks")


def _epoch_number(work: Work, outer: Loop, loop: ast.For) -> str | None:
    """The name that counts epochs, as the batch loop sees it."""
    if not isinstance(outer, ast.For):
        return None
    target = outer.target
    if isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    if not isinstance(target, ast.Name) or target.id.startswith("_"):
        return None
    if work.roles.is_loader(outer.iter):
        return None
    inside = work.script.function(loop)
    if work.script.function(outer) is inside:
        return target.id
    if inside is None:
        return None
    for call in work.script.calls_of(inside):
        for name, value in work.script.arguments(call, inside).items():
            if isinstance(value, ast.Name) and value.id == target.id:
                return name
    return None


def _set_epoch_of_iterator(work: Work, place: Place) -> None:
    """`batches = iter(loader)` made anew when it is used up: another order each time."""
    script = work.script
    for bound in script.bindings.get(place, []):
        made = bound.value
        if not isinstance(made, ast.Call) or script.dotted(made.func) != "iter":
            continue
        if any(isinstance(each, (ast.ExceptHandler, ast.If)) for each in script.up(made)):
            text = _loader_text(work, made)
            if (
                text is not None
                and work.roles.is_loader(made.args[0])
                and isinstance(bound.stmt, ast.stmt)
            ):
                origins = script.origins(made.args[0])
                if any(_is_stream(work, _arguments(work, o).get("dataset", o)) for o in origins
                       if isinstance(o, ast.Call)):  # fmt: skip
                    continue
                work.edits.before(
                    bound.stmt, [f"{text}.sampler.set_epoch({text}.sampler.epoch + 1)"]
                )
                work.say(
                    bound.stmt, "set_epoch: another order in every epoch, the same on all ranks"
                )


def _download_once(work: Work) -> None:
    """Downloads into one folder: the first rank writes, the others then find it there."""
    script = work.script
    statements: list[ast.stmt] = []
    for call in script.calls:
        for keyword in call.keywords:
            if keyword.arg == "download" and not _is_false(keyword.value):
                stmt = script.statement(call)
                if stmt not in statements and isinstance(
                    stmt, (ast.Assign, ast.Expr, ast.AnnAssign)
                ):
                    statements.append(stmt)
    for stmt in statements:
        if not work.edits.stands_alone(stmt):
            work.leave(stmt, "all ranks would download at once: let rank 0 go first")
            continue
        context = "accelerator.main_process_first" if work.accelerate else work.use("rank_0_first")
        if work.accelerate:
            work.use("accelerator")
        work.edits.before(stmt, [f"with {context}():"])
        work.edits.indent(stmt, stmt, "    ")
        work.say(stmt, "rank 0 downloads first, the others find the files")
