"""YAML of NeMo, Megatron and their like: parallel degrees by their usual names, at any depth."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.megatron_arguments import bubble
from paceline.check.lint.configs.say import found
from paceline.check.lint.context import Context
from paceline.units import counted

TENSOR = ("tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree")
PIPELINE = ("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree")


def is_parallel(document: Marked) -> bool:
    """Whether a YAML mapping says a tensor or pipeline degree in these words."""
    return _find(document, *TENSOR) is not None or _find(document, *PIPELINE) is not None


def check_parallel(path: str, document: Marked, context: Context) -> Iterator[Finding]:
    """Degrees against the nodes, the model and the batch that the same file says."""
    tensor_at, pipeline_at = _find(document, *TENSOR), _find(document, *PIPELINE)
    tensor, pipeline = _number(tensor_at) or 1, _number(pipeline_at) or 1
    cut = _number(_find(document, "context_parallel_size")) or 1
    per_node = _number(document.at("trainer", "devices")) or context.gpus_per_node
    per_node = per_node or context.devices
    nodes = _number(document.at("trainer", "num_nodes")) or context.nodes
    world = per_node * nodes if per_node and nodes else context.num_processes
    split, place = tensor * pipeline * cut, tensor_at or pipeline_at
    if world is not None and place is not None and world % split:
        yield found(
            "divisibility",
            path,
            place.line,
            f"tensor {tensor} x pipeline {pipeline} x context {cut} is {split}, which does not "
            f"divide {counted(world, 'rank')}",
            fix="choose degrees whose product divides the number of ranks",
        )
        return
    yield from _check_model(path, document, tensor, pipeline)
    micro, batch = _find(document, "micro_batch_size"), _find(document, "global_batch_size")
    size, total = _number(micro), _number(batch)
    if not (world and size and total) or batch is None:
        return
    data = world // split
    if total % (size * data):
        yield found(
            "divisibility",
            path,
            batch.line,
            f"global batch {total} is not a multiple of micro-batch {size} x {data} data ranks",
            fix=f"a multiple of {size * data}",
        )
    elif pipeline > 1 and pipeline_at is not None:
        chunks = _number(_find(document, "virtual_pipeline_model_parallel_size")) or 1
        yield from bubble(path, pipeline_at.line, pipeline, total // (size * data), chunks)


def _check_model(path: str, document: Marked, tensor: int, pipeline: int) -> Iterator[Finding]:
    for name, degree, what in (
        ("num_attention_heads", tensor, "tensor"),
        ("num_query_groups", tensor, "tensor"),
        ("num_layers", pipeline, "pipeline"),
    ):
        given = _find(document, name)
        number = _number(given)
        if given is None or not number or number % degree == 0:
            continue
        if name == "num_query_groups" and degree % number == 0:
            continue
        yield found(
            "divisibility",
            path,
            given.line,
            f"{name} {number} is not divisible by {what} parallel {degree}",
            fix=f"choose a degree that divides {number}",
        )


def _find(document: Marked, *names: str) -> Marked | None:
    """The first entry of one of these names, at any depth."""
    for one in document.walk():
        for name, value in one.entries():
            if name in names:
                return value
    return None


def _number(given: Marked | None) -> int | None:
    number = given.number() if given is not None else None
    return number if number is not None and number > 0 else None
