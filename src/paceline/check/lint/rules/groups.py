"""The process group: how large, by which backend, and processes that are forked too late."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.names import DDP, DISTRIBUTED_SAMPLER, INIT_GROUP
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import Value

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
    reported: set[int] = set()
    for call in program.calls(INIT_GROUP, DISTRIBUTED_SAMPLER):
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
            if id(at) in reported:
                continue
            reported.add(id(at))
            what = f"{name} is fixed to {given.const}, whatever the launcher starts"
            fix = f"leave {name} out, so that it comes from the launcher's environment"
            yield program.finding("world-size-hardcoded", at, what, fix, seen=(call,))


def world_of_one(call: Call) -> bool:
    size = call.argument(None, "world_size", "num_replicas")
    return size is not None and size.const == 1


def check_gloo_for_gpu(program: Program, context: Context) -> Iterator[Finding]:
    """Gradients on GPUs, and gloo to move them."""
    inits = program.calls(INIT_GROUP)
    if any(backend_of(one) != {"gloo"} for one in inits):
        return
    if program.has_call("torch.distributed.new_group") or program.framework in OWN_DEVICES:
        return
    if not program.wraps and not program.backwards:
        return  # there are no gradients to move
    for init in inits:
        users = [one for one in program.all_calls if puts_model_on_gpu(one)]
        if users:
            what = (
                f"the model is on a GPU ({users[0].spot}) and gloo moves its gradients "
                "through the CPU"
            )
            fix = 'init_process_group("nccl"), or "cpu:gloo,cuda:nccl" for both'
            yield program.finding("gloo-backend-gpu", init, what, fix, seen=users[:1])
            return


def puts_model_on_gpu(call: Call) -> bool:
    if call.receiver is None or not call.receiver.has_kind("model"):
        if call.name != DDP:
            return False
        ids = call.argument(1, "device_ids")
        return ids is not None and any(one.items for one in ids.any())
    if call.method == "cuda":
        return True
    if call.method != "to":
        return False
    given = call.argument(0, "device")
    return given is not None and any(is_cuda(one) for one in given.any())


def is_cuda(value: Value) -> bool:
    if isinstance(value.const, str):
        return value.const.startswith("cuda")
    if value.instance == "torch.device" and isinstance(value.call, Call) and value.call.args:
        return any(is_cuda(one) for one in value.call.args[0].any())
    node = value.node
    return isinstance(node, ast.JoinedStr) and ast.unparse(node).startswith(("f'cuda", 'f"cuda'))


MAKERS = frozenset(
    f"torch.{name}"
    for name in ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange", "as_tensor")
)
"""Calls that make a CPU tensor unless a device is given."""


def check_cpu_tensor_in_nccl(program: Program, context: Context) -> Iterator[Finding]:
    """A tensor of the CPU in a collective of an NCCL-only group."""
    inits = program.calls(INIT_GROUP)
    if not inits or any(backend_of(one) != {"nccl"} for one in inits):
        return
    if program.has_call(
        "torch.set_default_device", "torch.distributed.new_group", "torch.set_default_tensor_type"
    ):
        return
    for call in program.collectives:
        if not call.name.startswith("torch.distributed.") or call.name.endswith("object"):
            continue
        tensor = call.argument(0, "tensor")
        if tensor is None or call.name.endswith("_list") or tensor.options:
            continue
        if on_cpu(tensor):
            what = "this tensor is on the CPU and the group has only the NCCL backend: it raises"
            fix = "make the tensor with device=device, or use backend cpu:gloo,cuda:nccl"
            yield program.finding("no-backend-for-cpu", call, what, fix)


def on_cpu(tensor: Value, depth: int = 8) -> bool:
    """Whether a tensor is surely on the CPU: made there, and only changed since."""
    if depth == 0 or tensor.options:
        return False
    if isinstance(tensor.node, ast.AugAssign) and tensor.operation is not None:
        return on_cpu(tensor.operation[1], depth - 1)
    call = tensor.call
    if not isinstance(call, Call):
        return False
    if call.method == "cpu":
        return True
    if call.method in SAME_DEVICE and call.receiver is not None and call.receiver.name is None:
        return on_cpu(call.receiver, depth - 1)
    if call.name in {"torch.stack", "torch.cat"} and call.args and call.args[0].items:
        return all(on_cpu(one, depth - 1) for one in call.args[0].items)
    if call.name not in MAKERS or call.argument(None, "device") is not None or call.open_ended:
        return False
    return not (call.args and call.args[0].kind == "output")  # torch.tensor(x) stays where x is


SAME_DEVICE = frozenset({"clone", "detach", "float", "double", "long", "int", "view", "reshape"})


PROCESSES = ("torch.multiprocessing.Process", "multiprocessing.Process")

NOTEBOOK = "accelerate.notebook_launcher"


def check_fork_after_cuda(program: Program, context: Context) -> Iterator[Finding]:
    """CUDA in use before processes are forked that use it too."""
    if program.has_call(method=("set_start_method", "get_context")):
        return
    for fork in program.calls(*PROCESSES, NOTEBOOK):
        if fork.has_argument(None, "mp_context") or not uses_cuda_after(program, fork):
            continue
        for call in program.all_calls:
            if call.order > fork.order or call.root != fork.root or not starts_cuda(call):
                continue
            if any(frame.call is fork for frame in call.frames):
                continue
            if {id(one.node) for one in call.guards} - {id(one.node) for one in fork.guards}:
                continue  # only some of the runs that fork come there
            what = (
                f"CUDA is initialised here, and {fork.spot} forks processes: it cannot be "
                "initialised in them again"
            )
            fix = 'mp.set_start_method("spawn"), or use CUDA only inside the processes'
            yield program.finding("cuda-init-before-fork", call, what, fix, seen=(fork,))
            return


def uses_cuda_after(program: Program, fork: Call) -> bool:
    """Whether the forked process uses CUDA, as far as its function can be followed."""
    if fork.name == NOTEBOOK:
        count = fork.argument(2, "num_processes")
        return count is not None and isinstance(count.likely(), int) and count.likely() > 1
    inside = [one for one in program.all_calls if any(frame.call is fork for frame in one.frames)]
    return any(starts_cuda(one) or one.method in {"cuda", "to"} for one in inside)


def starts_cuda(call: Call) -> bool:
    """Whether a call initialises CUDA in this process, if it has not been."""
    if call.name in {"torch.cuda.set_device", "torch.cuda.current_device", "torch.cuda.init"}:
        return True
    if call.method == "cuda":
        return call.receiver is not None and call.receiver.name is None
    given = call.argument(0) if call.method == "to" else call.argument(None, "device")
    if given is None or call.name == "torch.device":
        return False
    return all(is_cuda(one) for one in given.any())


RULES = (
    check_fixed_world,
    check_gloo_for_gpu,
    check_cpu_tensor_in_nccl,
    check_fork_after_cuda,
)
