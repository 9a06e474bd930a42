"""What is put around the model: `nn.DataParallel` goes, DDP, `fully_shard` or `prepare` comes."""

import ast
from collections.abc import Iterator

from paceline.adapt.adaptation import Work
from paceline.adapt.result import Left, Refusal
from paceline.adapt.script import Function, Script

MODULE_NAMES = {
    "add_module", "apply", "bfloat16", "buffers", "children", "compile", "cpu", "cuda", "double",
    "eval", "float", "forward", "get_buffer", "get_parameter", "get_submodule", "half",
    "load_state_dict", "modules", "module", "named_buffers", "named_children", "named_modules",
    "named_parameters", "parameters", "register_buffer", "register_forward_hook",
    "register_forward_pre_hook", "register_full_backward_hook", "requires_grad_", "share_memory",
    "state_dict", "to", "train", "training", "type", "zero_grad", "no_sync", "join",
}  # fmt: skip
"""Attributes of `torch.nn.Module` (PyTorch 2.13), which a wrapped model has as well."""

NO_FORWARD = {
    "save_pretrained", "push_to_hub", "gradient_checkpointing_enable", "enable_input_require_grads",
    "gradient_checkpointing_disable", "num_parameters", "print_trainable_parameters",
    "resize_token_embeddings", "get_input_embeddings", "get_output_embeddings", "tie_weights",
    "configure_optimizers", "get_num_params", "num_params", "count_parameters",
}  # fmt: skip
"""Methods that compute no output: they need no rank to take part."""


def wrap_model(work: Work) -> None:
    """Take off DataParallel, put on what the target asks for, and reach the model through it."""
    _take_off_data_parallel(work)
    _put_on(work)
    _reach_inside(work)


def _take_off_data_parallel(work: Work) -> None:
    script, edits = work.script, work.edits
    for call in script.calls:
        if script.qualified(call.func) not in (
            "torch.nn.DataParallel",
            "torch.nn.parallel.DataParallel",
        ):
            continue
        stmt = script.statement(call)
        owner = script.parents[stmt]
        what = "nn.DataParallel is gone: every rank has one device"
        if (
            isinstance(owner, ast.If)
            and not owner.orelse
            and all(each is stmt or _is_print(each) for each in owner.body)
        ):
            edits.remove(owner, only_one=_block_of(script, owner) == [owner])
            work.removed.add(owner)
            work.say(owner, what)
        elif (
            isinstance(stmt, ast.Assign)
            and stmt.value is call
            and ast.unparse(stmt.targets[0]) == ast.unparse(call.args[0])
        ):
            edits.remove(stmt, only_one=_block_of(script, stmt) == [stmt])
            work.removed.add(stmt)
            work.say(stmt, what)
        elif call.args:
            edits.replace_span(edits.start(call), edits.start(call.args[0]), "")
            edits.replace_span(edits.end(call.args[0]), edits.end(call), "")
            work.say(call, what)
    for call in script.calls:
        if script.dotted(call.func) != "isinstance" or len(call.args) != 2:
            continue
        if (script.qualified(call.args[1]) or "").endswith("DataParallel"):
            edits.replace(call, "False")


def _is_print(stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.Expr) and ast.unparse(stmt).startswith(
        ("print(", "logger.", "logging.")
    )


def _block_of(script: Script, stmt: ast.stmt) -> list[ast.stmt]:
    """The statements it stands among."""
    parent = script.parents[stmt]
    for name in ("body", "orelse", "finalbody", "handlers"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and stmt in block:
            return block
    return [stmt]


def _put_on(work: Work) -> None:
    script, edits = work.script, work.edits
    call = work.roles.optimizers[0]
    names = work.roles.model_names_in(call)
    if work.accelerate:
        _prepare(work, call, names[0])
        return
    here = script.function(call)
    near = [each for each in names if script.function(each) is here]
    name = min(near or names, key=lambda each: each.lineno)  # a list of parameters may come first
    stmt, model = climb(script, name)
    stmt = _beside_model(script, stmt, model)
    text = edits.text(model)
    if work.fsdp2:
        stmt = _before_compile(script, stmt, model)
        lines = [f"{work.use('shard')}({text})"]
        for method in sorted(_forwards_by_name(work)):
            lines.append(f'register_fsdp_forward_method({text}, "{method}")')
            work.use("register_fsdp_forward_method")
        edits.before(stmt, lines)
        work.say(
            stmt, f"{text} is split over the ranks, layer by layer, before its optimizer is made"
        )
    else:
        edits.before(stmt, [f"{text} = {work.use('distribute')}({text})"])
        if "BatchNorm" in script.source:
            work.say(stmt, "batch statistics over all ranks on GPUs; on CPU ranks each has its own")
        work.say(stmt, f"{text} is wrapped in DistributedDataParallel before its optimizer is made")


def climb(script: Script, name: ast.expr) -> tuple[ast.stmt, ast.expr]:
    """From where its parameters are taken out to where the model is owned: statement and name.

    Raises:
        Refusal: A function that makes the optimizer is called in several places.
    """
    stmt = script.statement(name)
    while True:
        place = script.place(name)
        function = script.function(stmt)
        if function is None or place is None or place[0] != script.scope_name(function):
            return stmt, name
        bound = script.bindings.get(place, [])
        if not bound or not all(isinstance(each.stmt, ast.Call) for each in bound):
            return stmt, name
        sites = script.calls_of(function)
        if len(sites) != 1:
            raise Refusal(
                Left(
                    stmt.lineno,
                    f"{function.name}() makes the optimizer and is called in {len(sites)} places",
                    "which call is the training run cannot be known; make the optimizer where the "
                    "model is made",
                )
            )
        given = bound[0].value
        if not isinstance(given, (ast.Name, ast.Attribute)):
            return stmt, name
        stmt, name = script.statement(sites[0]), given


def _beside_model(script: Script, stmt: ast.stmt, model: ast.expr) -> ast.stmt:
    """The statement, or the one it stands in, that follows the model's own."""
    place = script.place(model)
    made = [
        each.stmt
        for each in script.bindings.get(place, [])  # type: ignore[arg-type]
        if isinstance(each.stmt, ast.stmt) and each.stmt.lineno < stmt.lineno
    ]
    while True:
        block = _block_of(script, stmt)
        before = block[: block.index(stmt)] if stmt in block else []
        if any(each is other or each in script.up(other) for each in before for other in made):
            return stmt
        parent = script.parents[stmt]
        if not isinstance(parent, ast.stmt) or isinstance(
            parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            return stmt
        if isinstance(parent, ast.If) and "__name__" in ast.unparse(parent.test):
            return stmt
        stmt = parent


def _before_compile(script: Script, stmt: ast.stmt, model: ast.expr) -> ast.stmt:
    block = _block_of(script, stmt)
    for each in script.bindings.get(script.place(model), []):  # type: ignore[arg-type]
        made_by = script.qualified(each.value.func) if isinstance(each.value, ast.Call) else None
        if made_by == "torch.compile" and isinstance(each.stmt, ast.stmt):
            for candidate in [each.stmt, *script.up(each.stmt)]:
                if not isinstance(candidate, ast.stmt) or candidate not in block:
                    continue
                if block.index(candidate) < block.index(stmt):
                    return candidate
    return stmt


def _prepare(work: Work, call: ast.Call, name: ast.expr) -> None:
    script, edits = work.script, work.edits
    stmt = script.statement(call)
    optimizer = _target(stmt, call)
    function = script.function(call)
    if optimizer is None and function is not None:  # `return AdamW(model.parameters())`
        for site in script.calls_of(function):
            outer = _target(script.statement(site), site)
            model = script.bindings.get(script.place(name) or ("", ""), [])
            if outer is not None:
                stmt, optimizer = script.statement(site), outer
                name = model[0].value if model and isinstance(model[0].stmt, ast.Call) else name
                break
    elif function is not None and optimizer is not None and "." not in optimizer:
        place = script.place(name)
        returned = [
            each
            for each in ast.walk(function)
            if isinstance(each, ast.Return) and each.value is not None
        ]
        bound = script.bindings.get(place, []) if place is not None else []
        if bound and all(isinstance(each.stmt, ast.Call) for each in bound) and returned:
            sites = script.calls_of(function)
            if len(sites) == 1 and isinstance(returned[-1].value, ast.Name):
                outer = _target(script.statement(sites[0]), sites[0])
                if outer is not None and returned[-1].value.id == optimizer:
                    stmt, optimizer, name = script.statement(sites[0]), outer, bound[0].value
    if optimizer is None:
        raise Refusal(
            Left(
                call.lineno,
                "the optimizer is given no name where it is made",
                "Accelerate has to put its own in its place: assign it to a name",
            )
        )
    stmt = _beside_model(script, stmt, name)
    text = edits.text(name)
    owner = script.owner_class(function) if function else None
    if owner is not None and isinstance(name, ast.Name):  # `self.model = model` in __init__
        for each in ast.walk(owner):
            if (
                isinstance(each, ast.Assign)
                and isinstance(each.value, ast.Name)
                and each.value.id == name.id
                and isinstance(each.targets[0], ast.Attribute)
            ):
                text = ast.unparse(each.targets[0])
                if each.lineno > stmt.lineno:
                    stmt = each
    work.use("accelerator")
    names = [text, optimizer]
    for loader in work.loaders:
        made = script.statement(loader)
        known = _target(made, loader)
        if known is not None and made in _block_of(script, stmt) and made.lineno < stmt.lineno:
            names.append(known)  # not where it is made: preparing it draws a random number
        else:
            edits.wrap(loader, f"{work.use('prepared')}(", ")")
    together = ", ".join(names)
    if "BatchNorm" in script.source or "torchvision.models" in script.imports.values():
        sync = f"{text} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({text})"
        edits.after(stmt, ['if accelerator.device.type == "cuda":', f"    {sync}"])
        work.say(stmt, "batch statistics over all ranks on GPUs; on CPU ranks each has its own")
    edits.after(stmt, [f"{together} = accelerator.prepare({together})"])
    work.say(stmt, f"{together} are prepared by Accelerate")


def _target(stmt: ast.stmt, call: ast.expr) -> str | None:
    """The one name that a statement gives a call's value to."""
    if isinstance(stmt, ast.Assign) and stmt.value is call and len(stmt.targets) == 1:
        target = stmt.targets[0]
        if isinstance(target, (ast.Name, ast.Attribute)):
            return ast.unparse(target)
    return None


def _outside_uses(work: Work) -> Iterator[ast.Attribute]:
    """Every `model.x` that a wrapped model does not have."""
    script = work.script
    for node in ast.walk(script.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr not in MODULE_NAMES
            and work.roles.is_model(node.value)
            and not any(each in work.removed for each in script.up(node))
        ):
            yield node


def _is_call(script: Script, node: ast.Attribute) -> bool:
    parent = script.parents[node]
    return isinstance(parent, ast.Call) and parent.func is node


def _forwards_by_name(work: Work) -> set[str]:
    """Methods of the model that the script calls in place of the model itself."""
    return {
        node.attr
        for node in _outside_uses(work)
        if _is_call(work.script, node) and node.attr not in NO_FORWARD
    }


def _reach_inside(work: Work) -> None:
    script, edits = work.script, work.edits
    for node in ast.walk(script.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "module"
            and work.roles.is_model(node.value)
        ):
            edits.replace(node, work.inner(node))
    if work.fsdp2:
        return
    for node in _outside_uses(work):
        called = _is_call(script, node)
        if called and node in work.roles.training and node.attr not in NO_FORWARD:
            work.leave(
                node,
                f"{node.attr}() would go past the wrapper's forward, and gradients would not be "
                "averaged: let forward() do it, and call the model",
            )
            continue
        if _is_before_optimizer(work, node):
            continue
        edits.replace(node.value, work.inner(node.value))
        work.say(node, f".{node.attr} is reached through the wrapper")


def _is_before_optimizer(work: Work, node: ast.AST) -> bool:
    """In the function where the optimizer is made, above it: nothing is wrapped yet."""
    script, call = work.script, work.roles.optimizers[0]
    function: Function | None = script.function(call)
    return script.function(node) is function and script.statement(node).lineno <= call.lineno
