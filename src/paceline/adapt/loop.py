"""One step of training: when gradients are reduced, how they are scaled, clipped and counted."""

import ast
import re

from paceline.adapt.adaptation import Work


def adapt_loop(work: Work) -> None:
    """Backward passes, accumulation and clipping of the loops that train."""
    _backward(work)
    _accumulate(work)
    _clip(work)
    _listed(work)


def _backward(work: Work) -> None:
    script, edits = work.script, work.edits
    for call in script.backwards:
        assert isinstance(call.func, ast.Attribute)
        made_of = _made_of(work, call.func.value)
        if made_of == {"sum", "mean"}:
            work.leave(
                call,
                "part of the loss is a mean over samples and part a sum: ranks average, so "
                "multiply the sums by the number of ranks",
            )
        if made_of == {"sum"}:
            factor = "accelerator.num_processes" if work.accelerate else "WORLD_SIZE"
            work.use("accelerator" if work.accelerate else "RANK")
            edits.wrap(call.func.value, "(", f" * {factor})")
            work.say(
                call, "the loss is a sum and ranks average: it is scaled by the number of ranks"
            )
        masked = _masked(work, call) if made_of != {"sum"} else []
        for node in masked:
            work.leave(
                node,
                "a mean over the targets that count, and ranks have different numbers of them: the "
                "mean of ranks is not the batch's mean; sum the loss and divide by the targets of "
                "all ranks",
            )
        if not masked and ".loss\n" in script.source:
            work.say(
                call,
                "every rank's loss weighs the same: where padding leaves them different numbers of "
                "targets, the mean differs a little from the whole batch's",
            )
        if work.accelerate:
            rest = [edits.text(each) for each in call.args]
            rest += [f"{k.arg}={edits.text(k.value)}" for k in call.keywords]
            start, value_end = edits.start(call), edits.end(call.func.value)
            dot = value_end + edits.source[value_end : edits.end(call.func)].rindex(".")
            own = edits.start(call.func.value) > start and not rest  # `(loss / 4).backward()`
            edits.replace_span(start, start, "accelerator.backward" + ("" if own else "("))
            close = "" if own else "".join(f", {each}" for each in rest) + ")"
            edits.replace_span(dot, edits.end(call), close)
            work.use("accelerator")
            work.say(call, "accelerator.backward")


_COUNTS = re.compile(r"\bsum\(|count_nonzero\(")
"""How a script counts the targets that a mask lets through."""


def _masked(work: Work, backward: ast.Call) -> list[ast.AST]:
    """Where targets are left out of a mean loss: by an index, or by dividing by a mask's sum."""
    script = work.script
    found: list[ast.AST] = []
    for node in ast.walk(script.tree):
        if isinstance(node, ast.keyword) and node.arg == "ignore_index":
            owner = script.parents[node]
            if isinstance(owner, ast.Call) and not _is_sum(work, owner):
                found.append(node)
        elif isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-100":
            if not isinstance(script.parents[node], ast.keyword):
                found.append(node)
        elif node in work.roles.training and isinstance(node, ast.BinOp):
            counts = isinstance(node.op, ast.Div) and work.alike.varies(node.right)
            by_mask = counts and _COUNTS.search(_text(work, node.right))
            if by_mask and "sum(" in ast.unparse(node.left):
                found.append(node)
        elif node in work.roles.training and isinstance(node, ast.Call):
            value = node.func.value if isinstance(node.func, ast.Attribute) else None
            if value is not None and ast.unparse(node.func).endswith(".mean"):
                chosen = isinstance(value, ast.Subscript) and work.alike.varies(value.slice)
                if chosen or "masked_select(" in ast.unparse(value):
                    found.append(node)
    loss = _made_from(work, backward)
    by_index = (ast.keyword, ast.UnaryOp)
    return [each for each in found if isinstance(each, by_index) or each in loss]


def _made_from(work: Work, backward: ast.Call) -> set[ast.AST]:
    script = work.script
    found: set[ast.AST] = set()
    todo: list[ast.AST] = [backward.func]
    while todo:
        root = todo.pop()
        for node in ast.walk(root):
            if node in found:
                continue
            found.add(node)
            if isinstance(node, (ast.Name, ast.Attribute)):
                place = script.place(node)
                todo += [b.value for b in script.bindings.get(place, [])] if place else []
            called = script.called(node) if isinstance(node, ast.Call) else None
            if called is not None:
                todo += [
                    each.value
                    for each in ast.walk(called)
                    if isinstance(each, ast.Return) and each.value is not None
                ]
    return found


def _text(work: Work, node: ast.expr) -> str:
    place = work.script.place(node)
    bound = work.script.bindings.get(place, []) if place is not None else []
    return " ".join([ast.unparse(node), *(ast.unparse(each.value) for each in bound)])


def sums(work: Work, loss: ast.expr) -> bool:
    """Whether the loss is a sum over samples, not divided by how many they are."""
    return _made_of(work, loss) == {"sum"}


def _made_of(work: Work, loss: ast.expr) -> set[str]:
    """What the terms of a loss that rest on samples are: `sum`, `mean`, or both."""
    script = work.script
    found: set[str] = set()
    seen: set[ast.AST] = set()
    todo: list[ast.expr] = [loss]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, ast.UnaryOp):
            todo.append(node.operand)
        elif isinstance(node, ast.BinOp):
            by_samples = isinstance(node.op, ast.Div) and work.alike.varies(node.right)
            if by_samples:
                found.add("mean")
            else:
                todo += [node.left, node.right]
        elif isinstance(node, ast.Call):
            called = script.called(node)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "scale":
                todo.extend(node.args)
            elif called is not None and called.name != "__init__":
                todo.extend(
                    each.value
                    for each in ast.walk(called)
                    if isinstance(each, ast.Return) and each.value is not None
                )
            elif work.alike.varies(node):
                found.add("sum" if _is_sum(work, node) else "mean")
        elif isinstance(node, (ast.Name, ast.Attribute)):
            place = script.place(node)
            bound = script.bindings.get(place, []) if place is not None else []
            todo.extend(each.value for each in bound if each.index is None)
    return found


def _is_sum(work: Work, node: ast.Call) -> bool:
    """`x.sum()`, `torch.sum(x)`, or a loss made with reduction="sum"."""
    full = work.script.qualified(node.func)
    if full == "torch.sum" or (
        full is None and isinstance(node.func, ast.Attribute) and node.func.attr == "sum"
    ):
        return True
    return any(
        k.arg == "reduction" and isinstance(k.value, ast.Constant) and k.value.value == "sum"
        for origin in [node, *work.script.origins(node.func)]
        if isinstance(origin, ast.Call)
        for k in origin.keywords
    )


def _accumulate(work: Work) -> None:
    """No reduction before the last micro-batch of a step."""
    script = work.script
    for call in script.backwards:
        loop = next((p for p in script.up(call) if isinstance(p, (ast.For, ast.While))), None)
        if loop is None or call not in work.roles.training:
            continue
        condition = _step_condition(work, loop)
        if condition is None:
            continue
        if any(isinstance(each, ast.If) and each in script.up(call) for each in ast.walk(loop)):
            continue
        _hold_back(work, loop, call, condition)


def _step_condition(work: Work, loop: ast.For | ast.While) -> ast.If | None:
    """`if (step + 1) % accumulation == 0:` around the optimizer's step in the loop's own body."""
    for stmt in loop.body:
        if not isinstance(stmt, ast.If):
            continue
        steps = any(
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "step"
            and (
                work.roles.is_optimizer(node.func.value)
                or (work.roles.is_scaler(node.func.value) and bool(node.args))
            )
            for each in stmt.body
            for node in ast.walk(each)
        )
        if steps:
            return stmt
    return None


def _hold_back(work: Work, loop: ast.For | ast.While, call: ast.Call, condition: ast.If) -> None:
    script, edits = work.script, work.edits
    stmt = script.statement(call)
    if stmt not in loop.body:
        work.leave(stmt, "gradients are reduced with every micro-batch here, which is "
                         "right and slower: "
                         "put no_sync around all but the last")  # fmt: skip
        return
    names = {n.id for n in ast.walk(condition.test) if isinstance(n, ast.Name)}
    between = loop.body[: loop.body.index(condition)]
    changed = {
        node.id
        for each in between
        for node in ast.walk(each)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    if names & changed or not work.alike.plain(condition.test):
        work.leave(condition, "whether this is the last micro-batch is only known after "
                              "the backward "
                              "pass: gradients are reduced with every one, which is right "
                              "and slower")  # fmt: skip
        return
    test = edits.text(condition.test)
    last = "is_last_micro_batch"
    model = _called_model(work, between)
    if model is None:
        work.leave(stmt, "the forward pass is in a function: gradients are reduced with every "
                         "micro-batch, which is right and slower")  # fmt: skip
        return
    if work.fsdp2:
        length = _length(work, loop)
        said = [ast.dump(each) for each in ast.walk(condition.test)]
        missing = length is not None and ast.dump(ast.parse(length, mode="eval").body) not in said
        tail = f" or {length}" if missing else ""
        wrapped = f"({test})" if tail and isinstance(condition.test, ast.BoolOp) else test
        edits.before(loop.body[0], [f"{last} = {wrapped}{tail}",
                                    f"{model}.set_requires_gradient_sync({last})"])  # fmt: skip
        work.say(stmt, "gradients are reduced with the last micro-batch of a step, and "
                       "with the last of "
                       "an epoch, which an incomplete step carries into the next as "
                       "before")  # fmt: skip
        return
    first = next((s for s in between if _called_model(work, [s]) is not None), stmt)
    if any(isinstance(n, (ast.Break, ast.Continue)) for s in between for n in ast.walk(s)):
        work.leave(stmt, "the loop leaves early before the backward pass: gradients are "
                         "reduced with "
                         "every micro-batch, which is right and slower")  # fmt: skip
        return
    work.use("nullcontext")
    hold = f"accelerator.no_sync({model})" if work.accelerate else f"{model}.no_sync()"
    edits.before(first, [f"{last} = {test}",
                         f"with nullcontext() if {last} else {hold}:"])  # fmt: skip
    edits.indent(first, stmt, "    ")
    work.say(first, "no_sync: gradients are reduced with the last micro-batch of a step only; an "
                    "incomplete step is continued as before")  # fmt: skip


def _length(work: Work, loop: ast.For | ast.While) -> str | None:
    """`step + 1 == len(loader)`, where the loop counts and the loader has a length."""
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple):
        return None
    counter = loop.target.elts[0]
    node: ast.expr = loop.iter
    start = 0
    while isinstance(node, ast.Call) and node.args:
        if work.script.dotted(node.func) == "enumerate" and (len(node.args) > 1 or node.keywords):
            given = node.args[1] if len(node.args) > 1 else node.keywords[0].value
            if not isinstance(given, ast.Constant) or not isinstance(given.value, int):
                return None
            start = given.value
        node = node.args[0]
    if not isinstance(counter, ast.Name) or not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    if work.helpers & {"ShareOfStream"}:
        return None
    plus = f" + {1 - start}" if start != 1 else ""
    return f"{counter.id}{plus} == len({ast.unparse(node)})"


def _called_model(work: Work, statements: list[ast.stmt]) -> str | None:
    for stmt in statements:
        for node in ast.walk(stmt):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, (ast.Name, ast.Attribute))
                and work.roles.is_model(node.func)
            ):
                return ast.unparse(node.func)
    return None


def _clip(work: Work) -> None:
    script, edits = work.script, work.edits
    for call in script.calls:
        full = script.qualified(call.func) or ""
        if not full.endswith(("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_")):
            continue
        if work.accelerate:
            work.use("accelerator")
            edits.replace(
                call.func,
                f"accelerator.{'clip_grad_value_' if 'value' in full else 'clip_grad_norm_'}",
            )
            work.say(call, "clipped by Accelerate")
        elif work.fsdp2 and not isinstance(script.parents[call], ast.Expr):
            edits.wrap(call, f"{work.use('whole')}(", ")")
            work.say(call, "the norm of all shards together")


def _listed(work: Work) -> None:
    """What a rewriting cannot do safely in a loop that trains."""
    script = work.script
    for call in script.calls:
        full = script.qualified(call.func) or ""
        if full == "torch.autograd.grad":
            work.leave(
                call, "gradients taken this way are not averaged over ranks: all-reduce them"
            )
        elif full.endswith(("copy.deepcopy", "swa_utils.AveragedModel")) and call.args:
            if work.roles.is_model(call.args[0]):
                work.leave(call, "a copy of the model: whether it is taken before or after "
                                 "wrapping "
                                 "matters; copy and update the model inside the "
                                 "wrapper")  # fmt: skip
        elif full == "torch.optim.LBFGS":
            work.leave(call, "its closure runs the model several times in a step: not adapted")
        elif full == "torch.utils.checkpoint.checkpoint_sequential" and work.fsdp2:
            work.leave(
                call, "recomputation across layers that are split apart: recompute per layer"
            )
    counts: dict[ast.AST, int] = {}
    for call in script.backwards:
        loop = next((p for p in script.up(call) if isinstance(p, (ast.For, ast.While))), None)
        if loop is not None:
            counts[loop] = counts.get(loop, 0) + 1
            if counts[loop] == 2:
                work.leave(call, "a second backward pass in one step: gradients of one "
                                 "forward pass are "
                                 "averaged once; add the losses and go backward once")  # fmt: skip
    if work.fsdp2:
        _parameters_by_hand(work)
    for loop in work.roles.batch_loops:
        _early_exits(work, loop)


def _parameters_by_hand(work: Work) -> None:
    """Arithmetic on gradients or weights, which are shards now."""
    script = work.script
    for node in ast.walk(script.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("grad", "data"):
            name = script.place(node.value)
            loops = [p for p in script.up(node) if isinstance(p, (ast.For, ast.comprehension))]
            generators = [
                g for p in script.up(node) if isinstance(p, (ast.GeneratorExp, ast.ListComp))
                for g in p.generators
            ]  # fmt: skip
            for loop in [*loops, *generators]:
                if name is not None and "parameters(" in ast.unparse(loop.iter):
                    work.leave(node, "a parameter is a shard here: a norm or a sum of it "
                                     "is one rank's "
                                     "part; use full_tensor() or clip_grad_norm_'s "
                                     "result")  # fmt: skip


def _early_exits(work: Work, loop: ast.For) -> None:
    """Leaving a loop where ranks may not agree: the others would wait for ever."""
    script = work.script
    epoch = next((p for p in script.up(loop) if isinstance(p, (ast.For, ast.While))), loop)
    for node in ast.walk(epoch):
        if not isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Raise)):
            continue
        if script.function(node) is not script.function(loop):
            continue
        for guard in script.up(node):
            if guard is epoch:
                break
            if not isinstance(guard, ast.If) or work.alike.plain(guard.test):
                continue
            if work.alike.varies(guard.test) and loop in script.up(guard):
                work.leave(guard, "each rank decides this by its own samples, and one that "
                                  "leaves alone "
                                  "stops the others: decide it together (agreed, or an "
                                  "all-reduce)")  # fmt: skip
            elif not isinstance(node, ast.Raise):
                work.agree(guard.test)
    _exits_at_callers(work, loop)


def _exits_at_callers(work: Work, loop: ast.For) -> None:
    """Exits in the function that calls the one with the batch loop, as early stopping is."""
    script = work.script
    function = script.function(loop)
    if function is None:
        return
    for call in script.calls_of(function):
        outer = next((p for p in script.up(call) if isinstance(p, (ast.For, ast.While))), None)
        if outer is None or script.function(outer) is not script.function(call):
            continue
        for node in ast.walk(outer):
            if isinstance(node, (ast.Break, ast.Return)):
                for guard in script.up(node):
                    if guard is outer:
                        break
                    if isinstance(guard, ast.If) and not work.alike.plain(guard.test):
                        work.agree(guard.test)
