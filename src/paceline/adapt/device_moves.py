"""Which device a tensor or the model is moved to, as far as the script itself says it."""

import ast
import re
from collections.abc import Iterator, Sequence

from paceline.adapt.script import Script

OPTION = "?"
"""Stands for a device that only the command line, a setting or the machine knows."""

ELSEWHERE = "elsewhere"
"""Stands for a device that another file gives: an imported name, or a caller that is not here."""

NUMBER = "number"
"""Stands for an integer, which PyTorch takes as the index of a GPU; also for an integer where the
machine has a GPU, and the CPU where it has none."""

_NAMES_DEVICE = re.compile(r"(?i)dev|gpu|cuda|accel")
_OPTIONS = re.compile(
    r"(?i)^(?:self\.)?_?(?:args?|cfg|conf|config|opts?|hp|hparams|flags|settings)$"
)
"""What scripts call the object that holds their options. A guess, from the usual examples."""

_SETTERS = {"torch.set_default_device", "torch.cuda.device"}
_AVAILABLE = {"torch.cuda.is_available()", "torch.accelerator.is_available()"}


def moves(script: Script) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Every call that says where a value goes, and the expression that says it."""
    for call in script.calls:
        for keyword in call.keywords:
            full = script.qualified(call.func) or ""
            if keyword.arg == "device" and (full.startswith("torch.") or _is_to(call)):
                yield call, keyword.value
        if call.args and (_is_to(call) or script.qualified(call.func) in _SETTERS):
            yield call, call.args[0]


def _is_to(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "to"


def is_choice(script: Script, node: ast.IfExp | ast.If) -> bool:
    """Whether more than the machine decides between its two devices."""
    test = node.test
    place = script.place(test)
    values = [each.value for each in script.bindings.get(place, [])] if place is not None else []
    return not all(ast.unparse(each) in _AVAILABLE for each in values or [test])


def devices(script: Script, node: ast.expr) -> set[str]:
    """The devices an expression can name, `OPTION`, `ELSEWHERE` and `NUMBER` among them; empty
    where it names none."""
    return _devices(script, node, set())


def is_number(script: Script, node: ast.expr) -> bool:
    """Whether an expression is the index of a GPU, or another name of one, wherever it is given."""
    found = devices(script, node)
    is_gpu = all(each == NUMBER or each.startswith("cuda") for each in found)
    is_known = all(
        isinstance(each, ast.Constant) or devices(script, each) for each in script.origins(node)
    )
    return NUMBER in found and is_gpu and is_known


def _devices(script: Script, node: ast.expr, seen: set[ast.expr]) -> set[str]:
    if node in seen:
        return set()
    seen.add(node)
    if isinstance(node, ast.Constant):
        if type(node.value) is int:
            return {NUMBER}
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.IfExp):
        found = _all(script, [node.body, node.orelse], seen)
        if found and is_choice(script, node):
            return found | {OPTION}
        return {NUMBER} if found == {NUMBER, "cpu"} else found
    if isinstance(node, ast.BoolOp):
        return _all(script, node.values, seen)
    if isinstance(node, (ast.JoinedStr, ast.BinOp)):
        return {OPTION} if "cuda" in ast.unparse(node) else set()
    if isinstance(node, ast.Call):
        return _of_call(script, node, seen)
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return _held(script, node.value, key, seen) if isinstance(key, str) else set()
    place = script.place(node)
    bound = script.bindings.get(place, []) if place is not None else []
    default = _default(script, node)
    if bound or default:
        values = [each.value for each in bound if each.index is None]
        found = _all(script, values + default, seen)
        by_machine = not default and _is_by_machine(script, [each.stmt for each in bound])
        return {NUMBER} if found == {NUMBER, "cpu"} and by_machine else found
    if isinstance(node, ast.Attribute):
        found = _held(script, node.value, node.attr, seen)
        return found or _from_elsewhere(script, node, node.attr)
    return _from_elsewhere(script, node, node.id) if isinstance(node, ast.Name) else set()


def _is_by_machine(script: Script, stmts: Sequence[ast.AST]) -> bool:
    """Whether nothing but the machine's GPUs decides which of the assignments holds."""
    branches = [set(_branches(script, stmt)) for stmt in stmts]
    some = {each for around in branches for each in around}
    choices = [test for test, side in some if not all((test, side) in each for each in branches)]
    return bool(choices) and not any(is_choice(script, each) for each in choices)


def _branches(script: Script, node: ast.AST) -> Iterator[tuple[ast.If, bool]]:
    """Each `if` around a statement, and whether it stands in what is done where the test holds."""
    for holder in script.up(node):
        if isinstance(holder, ast.If):
            yield holder, node in holder.body
        node = holder


def _default(script: Script, node: ast.expr) -> list[ast.expr]:
    """The default of a parameter, where the script does not give it a value in every call."""
    function = script.function(node) if isinstance(node, ast.Name) else None
    if function is None or not isinstance(node, ast.Name):
        return []
    takes = function.args
    names = [*takes.posonlyargs, *takes.args]
    pairs = [
        *zip(names[len(names) - len(takes.defaults) :], takes.defaults, strict=True),
        *zip(takes.kwonlyargs, takes.kw_defaults, strict=True),
    ]
    value = next((each for name, each in pairs if name.arg == node.id), None)
    calls = script.calls_of(function) if value is not None else []
    is_always_given = calls and all(node.id in script.arguments(each, function) for each in calls)
    return [value] if value is not None and not is_always_given else []


def _from_elsewhere(script: Script, node: ast.expr, name: str) -> set[str]:
    """What this file gives no value: an imported device, and a number of a GPU by its name. A
    tensor's or a module's own `device` is not meant: it is right on every rank."""
    full = script.qualified(node)
    is_imported = full is not None and not full.startswith("torch.") and _NAMES_DEVICE.search(name)
    return {ELSEWHERE} if is_imported or "gpu" in name.lower() else set()


def _all(script: Script, nodes: list[ast.expr], seen: set[ast.expr]) -> set[str]:
    return {each for node in nodes for each in _devices(script, node, seen)}


def _of_call(script: Script, call: ast.Call, seen: set[ast.expr]) -> set[str]:
    if script.qualified(call.func) == "torch.device":  # one of an option is listed where it is made
        return _all(script, call.args[:1], seen) - {OPTION, ELSEWHERE, NUMBER}
    called = script.called(call)
    if called is not None and called.name != "__init__":
        returned = [each.value for each in ast.walk(called) if isinstance(each, ast.Return)]
        return _all(script, [each for each in returned if each is not None], seen)
    last = (script.dotted(call.func) or "").rsplit(".", 1)[-1]
    first = call.args[0] if call.args else None
    if last in ("int", "str") and first is not None:
        return _devices(script, first, seen)
    if last in ("get", "getenv", "pop") and isinstance(first, ast.Constant):
        return {OPTION} if _NAMES_DEVICE.search(str(first.value)) else set()
    return set()


def _held(script: Script, holder: ast.expr, key: str, seen: set[ast.expr]) -> set[str]:
    """What a dict, a namespace or a class of the script has under a name."""
    if not _NAMES_DEVICE.search(key):
        return set()
    place = script.place(holder)
    values = [each.value for each in script.bindings.get(place, [])] if place is not None else []
    given = [each for value in [*values, holder] for each in _given(script, value, key)]
    stored = [
        node.value
        for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value == key
        and ast.unparse(target.value) == ast.unparse(holder)
    ]
    if given or stored:
        return _all(script, [*given, *stored], seen)
    is_options = _OPTIONS.match(ast.unparse(holder)) or any(
        isinstance(each, ast.Call) and "pars" in ast.unparse(each.func)
        for each in [*values, holder]
    )
    return {OPTION} if is_options else set()


def _given(script: Script, value: ast.expr, key: str) -> Iterator[ast.expr]:
    if isinstance(value, ast.Dict):
        for name, each in zip(value.keys, value.values, strict=True):
            if isinstance(name, ast.Constant) and name.value == key:
                yield each
    owner = value
    if isinstance(value, ast.Call):
        yield from (each.value for each in value.keywords if each.arg == key)
        owner = value.func
    held = script.classes.get(script.dotted(owner) or "")
    for stmt in held.body if held is not None else []:
        if not isinstance(stmt, (ast.Assign, ast.AnnAssign)) or stmt.value is None:
            continue
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        if key in [ast.unparse(each) for each in targets]:
            yield stmt.value
