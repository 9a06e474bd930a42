"""What goes wrong with devices, process groups and what each process is told of the others."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call, is_rank_number
from paceline.check.lint.facts.names import (
    DATA_PARALLEL,
    DDP,
    LOCAL_RANK_WORDS,
)
from paceline.check.lint.facts.program import Program
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
        made = one.call.frames if isinstance(one.call, Call) else ()
        within = " ".join(frame.function.name for frame in made)
        if names & LOCAL_RANK_WORDS or "local" in f"{one.label} {within}".lower():
            return False
        if one.instance == "torch.distributed.get_rank" or one.attribute == "process_index":
            return True
        if one.instance == "os.environ" and one.attribute in {"RANK", "SLURM_PROCID"}:
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


RULES = (
    check_device_map,
    check_global_rank_as_device,
    check_data_parallel,
)
