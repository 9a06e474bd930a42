"""The process group: how large, and by which backend."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.names import DISTRIBUTED_SAMPLER, INIT_GROUP
from paceline.check.lint.facts.program import Program

OWN_DEVICES = frozenset({"accelerate", "fabric", "lightning", "transformers", "deepspeed", "ray"})
"""Frameworks that set each process's device."""


def backend_of(init: Call) -> set[str] | None:
    """The backends an init_process_group may use; None where reading does not tell."""
    given = init.argument(0, "backend")
    if given is None or given.const is None:
        return None
    found: set[str] = set()
    for one in given.any():
        text = one.likely()
        if not isinstance(text, str):
            return None
        found.add(text.lower())
    return found


def check_fixed_world(program: Program, context: Context) -> Iterator[Finding]:
    """World size or rank as a literal in a program that a launcher starts."""
    if program.has_call("torch.multiprocessing.spawn", "torch.multiprocessing.Process"):
        return
    if any(backend_of(one) == {"fake"} for one in program.calls(INIT_GROUP)):
        return
    yield from _fixed_variables(program)
    reported: set[tuple[str, int]] = set()
    for call in program.calls(INIT_GROUP, DISTRIBUTED_SAMPLER):
        fixed: dict[tuple[str, int], list[tuple[str, int, ast.AST]]] = {}
        for name in ("world_size", "num_replicas", "rank"):
            given = call.argument(None, name)
            if given is None or not isinstance(given.const, int) or isinstance(given.const, bool):
                continue
            if given.const == -1 or (name == "rank" and world_of_one(call)):
                continue
            if name == "num_replicas" and given.const == 1:
                continue
            if given.const == 1 and name == "world_size":
                continue
            at = given.node if given.node is not None else call.node
            place = program.place(at)
            line = place.path, place.line or 1
            fixed.setdefault(line, []).append((name, given.const, at))
        for line in fixed.keys() - reported:
            told = " and ".join(f"{name} is fixed to {const}" for name, const, _ in fixed[line])
            names = " and ".join(name for name, _, _ in fixed[line])
            what = f"{told}, whatever the launcher starts"
            fix = f"leave {names} out: the launcher's environment has the numbers"
            yield program.finding(
                "world-size-hardcoded", fixed[line][0][2], what, fix, seen=(call,)
            )
        reported |= fixed.keys()


_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def _fixed_variables(program: Program) -> Iterator[Finding]:
    """`os.environ["RANK"] = "0"`: over what the launcher says. In a branch it may be meant for a
    start without one, and with a world of one rank it is."""
    if not program.calls(INIT_GROUP) or "environ" not in program.text:
        return
    branches = [one for one in program.source.nodes if isinstance(one, ast.If | ast.Try)]
    inside = {id(node) for branch in branches for node in ast.walk(branch)}
    found: dict[str, tuple[str, ast.Assign]] = {}
    for node in program.source.nodes:
        match node:
            case ast.Assign(
                targets=[ast.Subscript(value=owner, slice=ast.Constant(value=str(name)))],
                value=ast.Constant(value=str(text)),
            ) if name in _LAUNCHERS and id(node) not in inside:
                if getattr(owner, "attr", getattr(owner, "id", None)) == "environ":
                    found[name] = text, node
    if "WORLD_SIZE" in found and found["WORLD_SIZE"][0] == "1":
        return
    for name, (text, node) in found.items():
        what = f"{name} is set to {text} in every process, over what the launcher says"
        fix = f"leave the line out: torchrun, accelerate and deepspeed set {name}"
        yield program.finding("world-size-hardcoded", node, what, fix)


def world_of_one(call: Call) -> bool:
    size = call.argument(None, "world_size", "num_replicas")
    return size is not None and size.const == 1


def check_gloo_for_gpu(program: Program, context: Context) -> Iterator[Finding]:
    """Gradients on GPUs, and gloo to move them."""
    inits = program.calls(INIT_GROUP)
    if any(backend_of(one) != {"gloo"} for one in inits) or program.framework in OWN_DEVICES:
        return
    on_gpu = [one for one in program.all_calls if puts_model_on_gpu(one)]
    trains = bool(program.wraps or program.backwards)  # else there are no gradients to move
    if trains and on_gpu and not program.has_call("torch.distributed.new_group"):
        for init in inits[:1]:
            what = (
                f"the model is on a GPU ({on_gpu[0].spot}) and gloo moves its gradients "
                "through the CPU"
            )
            fix = 'init_process_group("nccl"), or "cpu:gloo,cuda:nccl" for both'
            yield program.finding("gloo-backend-gpu", init, what, fix, seen=on_gpu[:1])


def puts_model_on_gpu(call: Call) -> bool:
    """`model.cuda()`, `model.to("cuda:0")`, `model.to(f"cuda:{rank}")`."""
    if call.receiver is None or not call.receiver.has_kind("model"):
        return False
    given = call.argument(0, "device")
    texts = [ast.unparse(one.node) for one in given.origins() if one.node] if given else []
    return call.method == "cuda" or (call.method == "to" and any("cuda" in one for one in texts))


RULES = (
    check_fixed_world,
    check_gloo_for_gpu,
)
