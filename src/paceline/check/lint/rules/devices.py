"""What goes wrong with devices, process groups and what each process is told of the others."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.names import DATA_PARALLEL, DDP, LOCAL_RANK_WORDS
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
        what = (
            "this is the global rank, and a node has GPUs"
            + (f" 0 to {per_node - 1}" if per_node else "")
            + f": on all but the first of {nodes} nodes there is no such GPU"
        )
        fix = 'use int(os.environ["LOCAL_RANK"])'
        yield program.finding("invalid-device-ordinal", call, what, fix)
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


RULES = (check_global_rank_as_device, check_data_parallel)
