"""Files: written once and whole, by one rank, with every collective outside of its branch."""

import ast

from paceline.adapt.adaptation import Work
from paceline.adapt.data import given_last
from paceline.adapt.result import Target

_FILE_CALLS = {
    "shutil.copyfile", "shutil.copy", "shutil.copy2", "shutil.move", "shutil.rmtree", "os.remove",
    "os.rename", "os.replace", "os.unlink", "os.symlink", "numpy.save", "numpy.savez",
    "numpy.savetxt", "matplotlib.pyplot.savefig", "torchvision.utils.save_image",
}  # fmt: skip
_FILE_METHODS = {"to_csv", "to_json", "to_parquet", "savefig", "write_text", "write_bytes"}


def save_and_load(work: Work) -> None:
    """Checkpoints keep the form that the script gave them, so old ones can be resumed."""
    for call in work.script.calls:
        full = work.script.qualified(call.func) or ""
        if full == "torch.save":
            _save(work, call)
        elif full == "torch.load":
            _load(work, call)
        elif isinstance(call.func, ast.Attribute) and not full:
            _state(work, call, call.func)
        _write(work, call, full)


def _save(work: Work, call: ast.Call) -> None:
    script, edits = work.script, work.edits
    if any(isinstance(parent, ast.ExceptHandler) for parent in script.up(call)):
        work.leave(call, "ranks may not come to an exception together, and those that wait for the "
                         "others would wait for ever: save in the loop, at a step all "
                         "agree on")  # fmt: skip
        return
    given = {k.arg: k.value for k in call.keywords}
    path = given.get("f") or (call.args[1] if len(call.args) > 1 else None)
    value = given.get("obj") or (call.args[0] if call.args else None)
    if path is None or value is None or set(given) - {"f", "obj"}:
        work.leave(call, "save on one rank alone, outside of any collective")
        return
    place = script.place(path)
    if any(isinstance(b.stmt, ast.With) for b in script.bindings.get(place or ("", ""), [])):
        work.leave(call, "every rank would write into this file: save to a path instead")
        return
    for node in ast.walk(value):
        if isinstance(node, (ast.Name, ast.Attribute)) and work.roles.is_model(node):
            parent = script.parents[node]
            if isinstance(parent, ast.Attribute):
                continue
            if work.fsdp2:
                work.leave(node, "the whole model object holds shards: save its state_dict()")
                return
            edits.replace(node, work.inner(node))
    edits.replace(call.func, work.use("save_once"))
    if "f" in given:
        edits.replace(next(k for k in call.keywords if k.arg == "f"), f"path={edits.text(path)}")
    if "obj" in given:
        edits.replace(
            next(k for k in call.keywords if k.arg == "obj"), f"value={edits.text(value)}"
        )
    work.say(call, "saved by one rank, whole or not at all; the others wait")
    _agree_on(work, call)


def _agree_on(work: Work, node: ast.AST) -> None:
    """Conditions above it that rest on computed numbers take rank 0's answer."""
    for guard in work.guards(node):
        is_guard = not isinstance(guard, ast.If) or "__name__" in ast.unparse(guard.test)
        if not is_guard and not work.alike.plain(guard.test):
            work.agree(guard.test)


def _load(work: Work, call: ast.Call) -> None:
    given = next((k.value for k in call.keywords if k.arg == "map_location"), None)
    if given is not None or len(call.args) > 1:
        if given is not None and work.accelerate and not isinstance(given, ast.Lambda):
            work.edits.replace(given, '"cpu"')  # Accelerate's `cpu:0` is no place torch.load knows
            work.say(call, "loaded to the CPU; load_state_dict moves it to each rank's device")
        return
    last = call.args[-1] if call.args else call.keywords[-1].value
    if call.keywords:
        last = call.keywords[-1].value
    where = work.device if work.target is Target.DDP else '"cpu"'
    work.edits.wrap(last, "", f", map_location={where}")
    work.say(call, f"loaded to {where}, not to the device it was saved from")


def _state(work: Work, call: ast.Call, func: ast.Attribute) -> None:
    edits = work.edits
    model, optimizer = work.roles.is_model(func.value), work.roles.is_optimizer(func.value)
    if func.attr == "state_dict" and model:
        if work.fsdp2:
            _full(work, call)
        elif work.accelerate:
            edits.replace(call, f"accelerator.get_state_dict({_bare(work, func.value)})")
            work.use("accelerator")
        else:
            edits.replace(func.value, work.inner(func.value))
        work.say(call, "the state of the model itself, as the script saved it before")
    elif func.attr == "state_dict" and optimizer and work.fsdp2:
        _full(work, call)
        work.say(call, "the optimizer's state put together, as the script saved it before")
    elif func.attr == "load_state_dict" and model:
        if work.fsdp2:
            text = _bare(work, func.value)
            rest = edits.start(call.args[0]) if call.args else edits.end(call) - 1
            edits.replace_span(edits.start(call), rest, f"{work.use('load_full_state')}({text}, ")
        else:
            edits.replace(func.value, work.inner(func.value))
        work.say(call, "loaded into the model itself")
    elif func.attr == "load_state_dict" and optimizer and work.fsdp2 and call.args:
        text = edits.text(func.value)
        name = work.use("load_full_optimizer_state")
        edits.replace_span(edits.start(call), edits.start(call.args[0]), f"{name}({text}, ")
        work.say(call, "every rank takes its shards")
    elif func.attr == "push_to_hub" and model and work.fsdp2:
        work.leave(call, "the model holds shards: save it whole first, and push that folder")
    elif func.attr in ("save_pretrained", "push_to_hub"):
        _save_pretrained(work, call, func, model=model)


def _bare(work: Work, node: ast.expr) -> str:
    while isinstance(node, ast.Attribute) and node.attr == "module":
        node = node.value
    return work.edits.text(node)


def _full(work: Work, call: ast.Call) -> None:
    saved = any(
        isinstance(parent, ast.Call) and work.script.qualified(parent.func) == "torch.save"
        for parent in work.script.up(call)
    )
    tail = ")" if saved else ", everywhere=True)"
    work.edits.wrap(call, f"{work.use('full_state')}(", tail)
    _agree_on(work, call)


def _save_pretrained(work: Work, call: ast.Call, func: ast.Attribute, *, model: bool) -> None:
    script, edits = work.script, work.edits
    stmt = script.statement(call)
    if not isinstance(stmt, ast.Expr):
        work.leave(call, f"every rank would write: call it under `if {work.is_main}:`")
        return
    if model and work.fsdp2:
        text = _bare(work, func.value)
        state = f"{work.use('full_state')}({text}.state_dict())"
        edits.before(stmt, [f"whole_model = {state}"])
        edits.wrap(given_last(call), "", ", state_dict=whole_model")
        _agree_on(work, call)
    elif model:
        edits.replace(func.value, work.inner(func.value))
    work.only_on_main(stmt)
    work.say(call, "saved by one rank")


def _write(work: Work, call: ast.Call, full: str) -> None:
    """Other files: `open(..., "w")`, `np.save`, `os.makedirs`."""
    script, edits = work.script, work.edits
    name = script.dotted(call.func) or ""
    stmt = script.statement(call)
    if name == "open" and call.args:
        mode = call.args[1] if len(call.args) > 1 else None
        mode = next((k.value for k in call.keywords if k.arg == "mode"), mode)
        if isinstance(mode, ast.Constant) and set(str(mode.value)) & set("wax+"):
            if any(script.qualified(c.func) == "torch.save" for c in ast.walk(stmt)
                   if isinstance(c, ast.Call)):  # fmt: skip
                return
            edits.wrap(call.args[0], f"{work.use('once')}(", ")")
            work.say(call, "written by one rank")
    elif full == "os.makedirs" or (not full and _calls(call, "mkdir")):
        if not any(k.arg == "exist_ok" for k in call.keywords):
            text = ", exist_ok=True" if call.args or call.keywords else "exist_ok=True"
            at = edits.end(call) - 1
            edits.replace_span(at, at, text)
            work.say(call, "several ranks may make the folder at once: exist_ok")
    elif full == "os.mkdir":
        edits.replace_span(edits.start(call), edits.end(call.func), "os.makedirs")
        at = edits.end(call) - 1
        edits.replace_span(at, at, ", exist_ok=True")
        work.say(call, "several ranks may make the folder at once: exist_ok")
    elif full in _FILE_CALLS or (not full and _calls(call, *_FILE_METHODS)):
        if isinstance(stmt, ast.Expr) and stmt.value is call:
            work.only_on_main(stmt)
            work.say(call, "written by one rank")
        else:
            work.leave(call, f"every rank would do this: put it under `if {work.is_main}:`")
    elif full in ("json.dump", "pickle.dump", "yaml.dump") and not isinstance(stmt, ast.With):
        return  # into a file that open() gave, which is rank 0's alone


def _calls(call: ast.Call, *names: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in names
