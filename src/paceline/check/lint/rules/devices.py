"""What goes wrong with devices, process groups and what each process is told of the others."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Assign, Call, Event
from paceline.check.lint.names import (
    DATA_PARALLEL,
    DDP,
    INIT_GROUP,
    LOCAL_RANK_WORDS,
)
from paceline.check.lint.program import Program
from paceline.check.lint.rules.groups import OWN_DEVICES, backend_of
from paceline.check.lint.values import RANK, Value


def sets_device(program: Program) -> bool:
    if program.has_call("torch.cuda.set_device", "torch.accelerator.set_device_index"):
        return True
    if any(one.instance == "torch.cuda.device" for call in program.all_calls for one in call.withs):
        return True
    return any("CUDA_VISIBLE_DEVICES" in one.target for one in program.assigns)


def check_set_device(program: Program, context: Context) -> Iterator[Finding]:
    """NCCL without a device of its own for each process: all of them open a context on GPU 0."""
    if program.framework in OWN_DEVICES or sets_device(program):
        return
    for init in program.calls(INIT_GROUP):
        backends = backend_of(init)
        if backends is None or "nccl" not in backends or init.has_argument(None, "device_id"):
            continue
        bare = [one for one in bare_cuda(program) if one.root == init.root]
        if not bare and not indexed_cuda(program):
            continue
        yield program.finding(
            "missing-set-device",
            Severity.ERROR if bare else Severity.INFO,
            init,
            what=(
                "no torch.cuda.set_device and no device_id: "
                + (
                    f"`.cuda()` in line {bare[0].line} means GPU 0 in every process, and NCCL "
                    "finds several ranks on one GPU"
                    if bare
                    else "barriers and object collectives use GPU 0 in every process"
                )
            ),
            fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before this line',
            seen=bare[:1],
        )
        return


def bare_cuda(program: Program) -> list[Call]:
    """Moves of a model, and tensors for a collective, that mean the current GPU: `.cuda()`,
    `.to("cuda")`, `device="cuda"`."""
    exchanged = {
        id(origin)
        for call in program.collectives
        for given in call.args
        for origin in given.origins()
    }
    return [
        one
        for one in program.all_calls
        if is_bare_cuda(one)
        and (
            (one.receiver is not None and one.receiver.has_kind("model"))
            or id(one.result) in exchanged
        )
    ]


def is_bare_cuda(call: Call) -> bool:
    if call.method == "cuda" and (call.receiver is None or call.receiver.name is None):
        return call.argument(0, "device") is None and not call.open_ended
    given = call.argument(0, "device") if call.method == "to" else call.argument(None, "device")
    if call.name == "torch.device":
        return False
    if given is None:
        return False
    options = list(given.any())
    others = [one for one in options if not is_current_cuda(one) and one.const != "cpu"]
    return len(options) > 0 and not others and any(is_current_cuda(one) for one in options)


def is_current_cuda(value: Value) -> bool:
    if value.const == "cuda":
        return True
    call = value.call
    if value.instance == "torch.device" and isinstance(call, Call) and len(call.args) == 1:
        return all(one.const == "cuda" for one in call.args[0].any())
    return False


def indexed_cuda(program: Program) -> bool:
    """Whether models or tensors are put on GPUs by index."""
    return bool(device_indices(program)) or any(
        one.method == "cuda" and one.args for one in program.all_calls
    )


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
    if nodes is None or nodes < 2:
        return
    for call, index in device_indices(program):
        if not is_global_rank(index):
            continue
        per_node = context.devices or context.gpus_per_node
        yield program.finding(
            "invalid-device-ordinal",
            Severity.ERROR,
            call,
            what=(
                "this is the rank in the whole job, and a node has GPUs"
                + (f" 0 to {per_node - 1}" if per_node else "")
                + f": on all but the first of {nodes} nodes there is no such GPU"
            ),
            fix='use int(os.environ["LOCAL_RANK"])',
        )
        return


def is_global_rank(index: Value) -> bool:
    """Whether a number is the global rank itself, not its remainder and not the local rank."""
    found = False
    for one in index.origins():
        if one.operation is not None and one.operation[0] == "Mod":
            return False
        names = {one.attribute, one.label, one.label.rpartition(".")[2]}
        if names & LOCAL_RANK_WORDS or "local" in one.label.lower():
            return False
        if one.instance == "torch.distributed.get_node_local_rank":
            return False
        if one.instance == "torch.distributed.get_rank":
            found = True
        if one.instance == "os.environ" and one.attribute in {"RANK", "SLURM_PROCID"}:
            found = True
    return found


def check_hidden_devices(program: Program, context: Context) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES leaves fewer GPUs than the process asks for."""
    for assign in program.assigns:
        if "CUDA_VISIBLE_DEVICES" not in assign.target or assign.owner is None:
            continue
        if RANK in assign.value.taints:
            for call in program.calls("torch.cuda.set_device"):
                index = call.argument(0, "device")
                if index is not None and RANK in index.taints and call.order > assign.order:
                    yield program.finding(
                        "invalid-device-ordinal",
                        Severity.ERROR,
                        call,
                        what=(
                            f"line {assign.line} leaves this process one visible GPU, whose "
                            "number is 0"
                        ),
                        fix="set_device(0), or leave CUDA_VISIBLE_DEVICES alone",
                        seen=(assign,),
                    )
                    return
            continue
        if isinstance(assign.value.const, str):
            yield from listed_devices(program, context, assign, assign.value.const)


HIDES_ALL = {"", "-1"}


def listed_devices(
    program: Program, context: Context, assign: Assign, text: str
) -> Iterator[Finding]:
    if not program.is_distributed or assign.guards or text.strip() in HIDES_ALL:
        return
    ids = [one for one in text.split(",") if one.strip()]
    if context.devices is not None and context.devices > len(ids) > 0:
        yield program.finding(
            "invalid-device-ordinal",
            Severity.ERROR,
            assign,
            what=f"{len(ids)} GPUs are visible, and {context.devices} processes run on the node",
            fix="leave CUDA_VISIBLE_DEVICES to the launcher",
        )
        return
    yield program.finding(
        "world-size-hardcoded",
        Severity.WARNING,
        assign,
        what=f"the program itself fixes its GPUs to {text!r}, whatever the launcher gives it",
        fix="leave CUDA_VISIBLE_DEVICES to the launcher or the scheduler",
    )


def check_one_gpu_for_all(program: Program, context: Context) -> Iterator[Finding]:
    """A literal `cuda:0` in a program of several ranks."""
    inits = program.calls(INIT_GROUP)
    if program.framework in OWN_DEVICES or not inits:
        return
    if any(backend_of(one) in ({"gloo"}, {"fake"}) for one in inits):
        return
    if any("CUDA_VISIBLE_DEVICES" in one.target for one in program.assigns):
        return
    for call in program.all_calls:
        index = first_gpu(call)
        if index is None or any(one.by_rank for one in call.guards):
            continue
        yield program.finding(
            "duplicate-gpu",
            Severity.ERROR,
            call,
            what="every process uses GPU 0: NCCL refuses two ranks on one GPU",
            fix='take the GPU of int(os.environ["LOCAL_RANK"])',
        )
        return


def first_gpu(call: Call) -> Value | None:
    """The literal by which a call chooses GPU 0 for a model or for the process."""
    first = call.argument(0, "device")
    if call.name == "torch.cuda.set_device":
        return first if first is not None and first.const in {0, "cuda:0"} else None
    if call.name == "torch.device" and first is not None:
        index = call.argument(1, "index")
        literal = first.const == "cuda:0" or (index is not None and index.const == 0)
        return first if literal else None
    if call.method in {"to", "cuda"} and first is not None and call.receiver is not None:
        model = call.receiver.has_kind("model")
        return (
            first if model and first.const in ({"cuda:0"} | ({0} if call.args else set())) else None
        )
    if call.name == DDP:
        ids = call.argument(1, "device_ids")
        items = ids.items if ids is not None else None
        return items[0] if items and items[0].const == 0 else None
    return None


def check_data_parallel(program: Program, context: Context) -> Iterator[Finding]:
    """nn.DataParallel: one process, the model copied in every step."""
    for call in program.calls(DATA_PARALLEL):
        yield program.finding(
            "dataparallel-not-ddp",
            Severity.WARNING,
            call,
            what="DataParallel runs all GPUs from one process and copies the model in every step",
            fix="DistributedDataParallel, one process a GPU; `paceline adapt` rewrites it",
        )


DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": {"1"},
    "TORCH_DISTRIBUTED_DEBUG": {"DETAIL"},
    "NCCL_DEBUG": {"TRACE"},
}


def check_debugging(program: Program, context: Context) -> Iterator[Finding]:
    """Checks for a day of debugging, left on in a training program."""
    if not program.is_distributed:
        return
    for assign in program.assigns:
        if assign.owner is None or assign.owner.name != "os.environ" or assign.guards:
            continue
        for name, values in DEBUGGING.items():
            if f"'{name}'" in assign.target and assign.value.const in values:
                yield debugging(program, assign, f"{name}={assign.value.const}")
    for call in program.calls("torch.autograd.set_detect_anomaly"):
        mode = call.argument(0, "mode")
        if mode is not None and mode.const is True and not call.guards:
            yield debugging(program, call, "set_detect_anomaly(True)")


def debugging(program: Program, event: Event, name: str) -> Finding:
    return program.finding(
        "debugging-left-on",
        Severity.WARNING,
        event,
        what=f"{name} slows down every step, and is set here for every run",
        fix="take it out, or set it only when asked to (`if args.debug:`)",
    )


RULES = (
    check_debugging,
    check_set_device,
    check_global_rank_as_device,
    check_hidden_devices,
    check_one_gpu_for_all,
    check_data_parallel,
)
