"""What goes wrong with devices and process groups: which GPU, how large a group, which backend."""

import ast
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, is_rank_number
from paceline.check.lint.facts.names import (
    DATA_PARALLEL,
    DDP,
    DISTRIBUTED_SAMPLER,
    INIT_GROUP,
    LOCAL_RANK_WORDS,
)
from paceline.check.lint.facts.program import OWNERS, Program
from paceline.check.lint.facts.values import RANK, Value, stops_gradients


def device_indices(program: Program) -> list[tuple[Call, Value]]:
    """Calls that choose a GPU by number, with the number: set_device(i), cuda(i), "cuda:{i}"."""
    found: list[tuple[Call, Value]] = []
    for call in program.all_calls:
        first = call.argument(0, "device")
        if call.name == "torch.cuda.set_device" and first is not None:
            found.append((call, first))
        elif call.name == "torch.device":
            index = call.argument(1, "index")
            text = index if index is not None else call.argument(0)
            if text is not None and (index is not None or RANK in text.taints):
                found.append((call, text))
        elif call.method in {"cuda", "to"} and first is not None and names_gpu(first):
            found.append((call, first))
        elif (where := call.argument(None, "device_map")) is not None and where.entries:
            found += [(call, one) for one in where.entries.values()]
        elif call.name == DDP:
            ids = call.argument(1, "device_ids")
            found += [(call, one) for one in (ids.items or () if ids is not None else ())]
    return found


def names_gpu(value: Value) -> bool:
    if value.instance == "torch.device":
        return False
    return RANK in value.taints or isinstance(value.const, int)


def check_global_rank_as_device(program: Program, context: Context) -> Iterator[Finding]:
    """The rank of the whole job used as the number of a GPU on one node."""
    nodes = context.nodes
    if nodes is None and context.num_processes is not None and context.devices:
        nodes = -(-context.num_processes // context.devices)
    if nodes == 1:
        return
    per_node = context.devices or context.gpus_per_node
    for call, index in device_indices(program):
        if not is_rank_number(index) or not is_global_rank(index):
            continue
        what = (
            "this is the global rank, and a node has GPUs"
            + (f" 0 to {per_node - 1}" if per_node else " from 0 on")
            + f": on all but the first of {nodes or 'several'} nodes there is no such GPU"
        )
        fix = 'use int(os.environ["LOCAL_RANK"])'
        level = Severity.ERROR if nodes else Severity.WARNING
        yield program.finding("invalid-device-ordinal", call, what, fix, level=level)
        return


def is_global_rank(index: Value) -> bool:
    """Whether a number is the global rank itself, not computed from it and not the local rank."""
    for one in same_number(index):
        names = {one.attribute, one.label, one.label.rpartition(".")[2]}
        call = one.call if isinstance(one.call, Call) else None
        within = " ".join(frame.function.name for frame in (call.frames if call else ()))
        if names & LOCAL_RANK_WORDS or "local" in f"{one.label} {within}".lower():
            return False
        of_group = call is not None and call.argument(0, "group") is not None
        if one.instance == "torch.distributed.get_rank" and not of_group:
            return True
        is_set = one.instance == "os.environ" and one.attribute in {"RANK", "SLURM_PROCID"}
        if is_set or one.attribute == "process_index":
            return True
    return False


def same_number(index: Value) -> Iterator[Value]:
    """What holds the same number, or a text with it: `int(x)`, `f"cuda:{x}"`; nothing computed."""
    waiting = list(index.any())
    for one in waiting:
        if one.operation is None and len(waiting) < MOST_COPIES:
            yield one
            waiting += [each for part in one.sources if RANK in part.taints for each in part.any()]


MOST_COPIES = 64
"""A guess: a number that is handed on more often is not followed to its end."""


def check_data_parallel(program: Program, context: Context) -> Iterator[Finding]:
    """nn.DataParallel: one process, the model copied in every step. A hint where none trains it."""
    forwards = [one for one in program.forwards if not any(map(stops_gradients, one.withs))]
    for call in program.calls(DATA_PARALLEL):
        trains = any(call.result in (one.forward_of or Value()).any() for one in forwards)
        what = "DataParallel runs all GPUs from one process and copies the model in every step"
        fix = "DistributedDataParallel, one process a GPU; `paceline adapt` rewrites it"
        yield program.finding(
            "dataparallel-not-ddp",
            call,
            what,
            fix,
            level=Severity.WARNING if trains and program.backwards else Severity.INFO,
        )


SPREAD = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})
"""Words of `device_map` that spread a model over all GPUs that a process sees."""


def check_device_map(program: Program, context: Context) -> Iterator[Finding]:
    """A model spread over all GPUs in each of several processes."""
    users = [*program.wraps]
    for arguments in program.calls("transformers.TrainingArguments"):
        given = arguments.argument(None, "fsdp")
        if given is not None and given.likely():
            users.append(arguments)
    for call in program.calls(method="from_pretrained") if users else ():
        where = call.argument(None, "device_map")
        if where is None or where.const not in SPREAD:
            continue
        what = (
            f'device_map="{where.const}" spreads the model over all GPUs, and '
            f"{users[0].spot} starts one process for each"
        )
        fix = "leave device_map out; for QLoRA device_map={'': int(os.environ['LOCAL_RANK'])}"
        yield program.finding("device-map-with-distributed", call, what, fix, seen=users[:1])


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
    if any(backend_of(one) != {"gloo"} for one in inits) or program.framework in OWNERS:
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
    check_device_map,
    check_global_rank_as_device,
    check_data_parallel,
    check_fixed_world,
    check_gloo_for_gpu,
)
