"""Where tensors live: every rank has a device of its own, and no number of a device stays."""

import ast
import re

from paceline.adapt.adaptation import Work
from paceline.adapt.device_moves import (
    ELSEWHERE,
    NUMBER,
    OPTION,
    devices,
    is_choice,
    is_number,
    moves,
)

_NUMBERED = re.compile(r"^cuda:\d+$")
_UNKNOWN = {
    OPTION: "an option chooses the device",
    ELSEWHERE: "the device is set outside this file",
}


def place_on_device(work: Work) -> None:
    """`.cuda()`, `"cuda:0"` and `torch.device(...)` become this rank's device."""
    for node in ast.walk(work.script.tree):
        if isinstance(node, ast.Call):
            _call(work, node)
    for node in ast.walk(work.script.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            _constant(work, node)
        elif isinstance(node, ast.Assign) and "CUDA_VISIBLE_DEVICES" in ast.unparse(
            node.targets[0]
        ):
            work.edits.remove(node, only_one=_alone(work, node))
            work.say(node, "CUDA_VISIBLE_DEVICES is the launcher's: the line is gone")
    _place_moves(work)


def _place_moves(work: Work) -> None:
    """A move to the index of a GPU goes to this rank's device; one to a device that may be another
    than the model's is listed."""
    if uses_no_gpu(work):
        return
    for call, where in moves(work.script):
        found = devices(work.script, where)
        unknown = next((why for each, why in _UNKNOWN.items() if each in found), None)
        if unknown is not None:
            work.leave(call, f"{unknown}, but each rank has its own: write {work.device} here")
        elif is_number(work.script, where):
            work.edits.replace(where, work.device)
            work.say(where, f"GPU index {ast.unparse(where)} -> {work.device}")
        elif NUMBER in found:
            work.leave(call, "the device may be the index of a GPU, but each rank has its own: "
                             f"write {work.device} here")  # fmt: skip
        elif found == {"cpu"} and not work.script.qualified(call.func) and (
            call in work.roles.training or _is_models(work, call)
        ):  # fmt: skip
            work.leave(call, "is put on the CPU, but the model is on this rank's device: write "
                             f"{work.device} here if the model takes it")  # fmt: skip


def _is_models(work: Work, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and work.roles.is_model(call.func.value)


def uses_no_gpu(work: Work) -> bool:
    """Whether nothing in the script says where a tensor or the model lives, or all says `cpu`."""
    script = work.script
    moved = [devices(script, where) for _, where in moves(script)]
    if any(found - {"cpu"} for found in moved):
        return False
    moves_itself = any(
        isinstance(call.func, ast.Attribute)
        and (
            call.func.attr in ("cuda", "to_device")
            or (call.func.attr == "to" and not any(call is each for each in on_cpu(work)))
        )
        for call in script.calls
    )
    says = any(k.arg == "device_map" for call in script.calls for k in call.keywords)
    named = any(word in script.source for word in ("set_default_device", '"cuda', "'cuda"))
    made = any(
        script.qualified(call.func) == "torch.device" and devices(script, call) != {"cpu"}
        for call in script.calls
    )
    return not (moves_itself or says or named or made)


def on_cpu(work: Work) -> list[ast.Call]:
    """The moves to the CPU, and to nothing else."""
    script = work.script
    return [call for call, where in moves(script) if devices(script, where) == {"cpu"}]


def _call(work: Work, call: ast.Call) -> None:
    script, edits = work.script, work.edits
    full = script.qualified(call.func)
    if full == "torch.device":
        _device(work, call)
    elif full == "torch.cuda.set_device":
        stmt = script.statement(call)
        edits.remove(stmt, only_one=_alone(work, stmt))
        work.say(call, "set_device is called with this rank's own device, in join_ranks")
    elif full == "torch.cuda.device_count":
        if not _only_for_data_parallel(work, call):
            work.leave(call, "one process has one GPU now: decide whether the number of ranks "
                             "(WORLD_SIZE) is meant")  # fmt: skip
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and full is None:
        start = edits.end(call.func.value)
        rest = [
            f"{k.arg}={edits.text(k.value)}" for k in call.keywords if k.arg not in (None, "device")
        ]
        text = f".to({', '.join([work.device, *rest])})"
        edits.replace_span(start, edits.end(call), text)
        work.say(call, f".cuda() -> .to({work.device}): also right where there is no GPU")


def _device(work: Work, call: ast.Call) -> None:
    """`torch.device(...)` with a GPU named in it; an option's value cannot be known here."""
    text = ast.unparse(call)
    if "mps" in text or "xpu" in text:
        return
    names_gpu = any(
        isinstance(each, ast.Constant) and isinstance(each.value, str) and "cuda" in each.value
        for each in ast.walk(call)
    )
    if not names_gpu and call.args:
        given = call.args[0]
        if is_number(work.script, given):
            work.edits.replace(call, work.device)
            work.say(call, f"the device is this rank's own: {work.device}")
        elif devices(work.script, given) & {OPTION, ELSEWHERE, NUMBER} or not (
            isinstance(given, ast.Constant) or work.script.origins(given)
        ):
            work.leave(call, "the device comes from outside the script: say `cuda` without "
                             "a number "
                             "and each rank takes its own, with a number all would share "
                             "one")  # fmt: skip
    if not names_gpu:
        return
    tests = [each.test for each in ast.walk(call) if isinstance(each, ast.IfExp)]
    if all("is_available" in ast.unparse(test) for test in tests):
        work.edits.replace(call, work.device)
        work.say(call, f"the device is this rank's own: {work.device}")
    else:  # an option may ask for the CPU: keep the choice, drop the number
        for each in ast.walk(call):
            if isinstance(each, ast.Constant) and _NUMBERED.match(repr(each.value)[1:-1]):
                work.edits.replace(each, '"cuda"')
        if any(
            is_choice(work.script, each) for each in ast.walk(call) if isinstance(each, ast.IfExp)
        ):
            work.leave(call, "an option chooses the device, but each rank has its own: write "
                             f"{work.device} here")  # fmt: skip


def _constant(work: Work, node: ast.Constant) -> None:
    if node.value != "cuda" and not _NUMBERED.match(str(node.value)):
        return
    parent = work.script.parents.get(node)
    is_place = isinstance(parent, ast.Call) and (
        isinstance(parent.func, ast.Attribute) and parent.func.attr == "to"
    )
    is_keyword = isinstance(parent, ast.keyword) and parent.arg in ("device", "map_location")
    if is_keyword:
        assert parent is not None
        owner = work.script.parents[parent]
        name = work.script.qualified(owner.func) if isinstance(owner, ast.Call) else None
        is_keyword = name not in ("torch.amp.GradScaler", "torch.amp.autocast", "torch.autocast")
    if is_place or is_keyword:
        work.edits.replace(node, work.device)
        work.say(node, f'"{node.value!s}" -> {work.device}')
    elif _NUMBERED.match(str(node.value)):
        if isinstance(parent, ast.keyword) and parent.arg == "default":
            work.leave(node, "this default would put every rank on one GPU: make it "
                             "`cuda`, which is "
                             "each rank's own after set_device")  # fmt: skip
        elif not isinstance(parent, (ast.Compare, ast.JoinedStr)):
            work.edits.replace(node, '"cuda"')
            work.say(
                node, f'"{node.value!s}" -> "cuda", which is this rank\'s own after set_device'
            )


def _only_for_data_parallel(work: Work, call: ast.Call) -> bool:
    stmt = work.script.statement(call)
    return "DataParallel" in ast.unparse(stmt) or (
        isinstance(stmt, ast.Expr) and "print" in ast.unparse(stmt)
    )


def _alone(work: Work, stmt: ast.stmt) -> bool:
    """Whether its block would be empty without it."""
    parent = work.script.parents[stmt]
    return any(
        block == [stmt]
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(parent, name, None), list)
    )
