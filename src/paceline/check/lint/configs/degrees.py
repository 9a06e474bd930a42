"""How long a pipeline waits, by the degrees and the batch beside it: in the arguments of
Megatron-LM and its like, and in YAML of NeMo and its like, by the same names."""

from collections.abc import Callable, Iterator

from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import Fault, Placed
from paceline.check.lint.context import Context

BUBBLE = 0.2
"""The share of a step spent waiting above which a pipeline is called wasteful (the catalog's)."""

TENSOR = ("tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree")
PIPELINE = ("pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree")

Given = Callable[..., tuple[int | None, Placed] | None]
"""By the names of a setting, its positive whole number and place; None where it is not given."""


def check_megatron(launch: Launch, world: int | None) -> Iterator[Fault]:
    """A pipeline that waits, in a launch of Megatron-LM or of a script with its words."""

    def given(*names: str) -> tuple[int | None, Placed] | None:
        word = launch.argument(*names)
        return None if word is None else (whole(word.text) or None, word)

    yield from _check(given, world)


def is_parallel(document: Marked) -> bool:
    """Whether a YAML mapping says a tensor or pipeline degree in these words."""
    return _find(document, *TENSOR, *PIPELINE) is not None


def check_parallel(document: Marked, context: Context) -> Iterator[Fault]:
    """A pipeline that waits by the degrees of a YAML file, at any depth of it."""

    def given(*names: str) -> tuple[int | None, Placed] | None:
        value = _find(document, *names)
        number = value.number() if value is not None else None
        return None if value is None else (number if (number or 0) > 0 else None, value)

    per_node = document.number("trainer", "devices") or context.gpus_per_node or context.devices
    nodes = document.number("trainer", "num_nodes") or context.nodes
    yield from _check(given, per_node * nodes if per_node and nodes else context.num_processes)


def _find(document: Marked, *names: str) -> Marked | None:
    """The first entry of one of these names, at any depth."""
    inside = (entry for one in document.walk() for entry in one.entries())
    return next((value for name, value in inside if name in names), None)


def _check(given: Given, world: int | None) -> Iterator[Fault]:
    place = given(*TENSOR) or given(*PIPELINE)
    if place is None:
        return

    def number(*names: str) -> int | None:
        return (given(*names) or (None, 0))[0]

    tensor, pipeline = number(*TENSOR) or 1, number(*PIPELINE) or 1
    split = tensor * pipeline * (number("context_parallel_size") or 1)
    micro, batch = number("micro_batch_size"), number("global_batch_size")
    data = (world or 0) // split
    if not (micro and batch and data) or batch % (micro * data) or pipeline == 1:
        return
    chunk, layers = number("num_layers_per_virtual_pipeline_stage"), number("num_layers")
    chunks = number("virtual_pipeline_model_parallel_size") or 1
    chunks = layers // (pipeline * chunk) if chunk and layers else chunks
    at = (given(*PIPELINE) or place)[1]
    yield from bubble(at, pipeline, batch // (micro * data), max(chunks, 1))


def bubble(at: int | Placed, stages: int, batches: int, chunks: int) -> Iterator[Fault]:
    """A pipeline whose stages wait more than a fifth of a step.

    Source: arXiv:2104.04473, section 2.2: (p - 1) / (v m) of the ideal time.
    """
    share = (stages - 1) / (batches * chunks + stages - 1)
    if share > BUBBLE:
        enough = -(-4 * (stages - 1) // chunks)
        what = f"{stages} stages with {batches} micro-batches wait {share:.0%} of each step"
        fix = f"{enough} micro-batches or more, fewer stages, or interleaved chunks"
        yield Fault("pipeline-bubble", at, what, fix)
