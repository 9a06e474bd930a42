"""What Ray Train asks for, against what its cluster has."""

from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.program import Program


def check_workers(program: Program, context: Context) -> Iterator[Finding]:
    """More GPUs for the workers than there are: the trainer waits for them without an end."""
    there, said = cluster_gpus(program, context)
    if there is None:
        return
    for call in program.all_calls:
        if not call.name.startswith("ray.") or not call.name.endswith(".ScalingConfig"):
            continue
        wanted = gpus_wanted(call)
        if wanted is None or wanted <= there:
            continue
        yield program.finding(
            "ray-unsatisfiable-resources",
            Severity.ERROR,
            call,
            what=f"the workers want {wanted:g} GPUs, and {said} {there:g}: they never start",
            fix="fewer workers, a smaller resources_per_worker, or more GPUs",
        )


def cluster_gpus(program: Program, context: Context) -> tuple[float | None, str]:
    """GPUs of the cluster, and who says so; None where it is unknown."""
    for call in program.calls("ray.init"):
        given = call.argument(None, "num_gpus")
        number = given.known() if given is not None else None
        if isinstance(number, int | float) and not call.has_argument(0, "address"):
            return number, f"ray.init in line {call.line} gives"
    if context.nodes is None or context.gpus_per_node is None:
        return None, ""
    return context.nodes * context.gpus_per_node, "the job has"


def gpus_wanted(call: Call) -> float | None:
    """GPUs that a ScalingConfig asks for; None where reading does not tell."""
    if call.open_ended:
        return None
    workers, uses = call.argument(1, "num_workers"), call.argument(2, "use_gpu")
    number = workers.known() if workers is not None else 1
    if uses is None or uses.known() is not True or not isinstance(number, int):
        return None
    resources = call.argument(3, "resources_per_worker")
    if resources is None or resources.const is None:
        return number
    entries = resources.entries
    if entries is None:
        return None
    each = entries["GPU"].known() if "GPU" in entries else 1
    return number * each if isinstance(each, int | float) else None


RULES = (check_workers,)
