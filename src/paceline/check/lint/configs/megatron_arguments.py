"""Megatron-LM's arguments: what has to divide what, and the settings that its overlap needs."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.launch_line import Launch, whole
from paceline.check.lint.configs.say import found
from paceline.check.lint.configs.scene import Scene, started
from paceline.check.lint.configs.shell import Word
from paceline.units import counted

BUBBLE = 0.2
"""The share of a step spent waiting above which a pipeline is called wasteful (the catalog's)."""


def check_megatron(launch: Launch, scene: Scene) -> Iterator[Finding]:
    """What the degrees in a launch of Megatron-LM, or of a script with its words, contradict."""
    sizes = _Sizes(launch)
    if sizes.tensor is None and sizes.pipeline is None:
        return
    yield from _check_world(launch, scene, sizes)
    yield from _check_model(launch, sizes)
    yield from _check_bubble(launch, scene, sizes)


class _Sizes:
    """The arguments that are whole numbers, each with its word."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.tensor_word = launch.argument(
            "tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree"
        )
        self.pipeline_word = launch.argument(
            "pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree"
        )
        self.tensor = self._whole(self.tensor_word)
        self.pipeline = self._whole(self.pipeline_word)
        self.context = self.number("context_parallel_size") or 1

    def number(self, *names: str) -> int | None:
        return self._whole(self.launch.argument(*names))

    def word(self, *names: str) -> Word:
        word = self.launch.argument(*names)
        assert word is not None
        return word

    @staticmethod
    def _whole(word: Word | None) -> int | None:
        return whole(word.text) if word is not None else None


def _check_world(launch: Launch, scene: Scene, sizes: _Sizes) -> Iterator[Finding]:
    world = started(launch, scene).world or scene.context.num_processes
    split = (sizes.tensor or 1) * (sizes.pipeline or 1) * sizes.context
    word = sizes.tensor_word or sizes.pipeline_word
    if word is None or world is None:
        return
    if world % split:
        yield found(
            "divisibility",
            launch.path,
            word.line,
            f"tensor {sizes.tensor or 1} x pipeline {sizes.pipeline or 1} x context "
            f"{sizes.context} is {split}, which does not divide {counted(world, 'rank')}",
            fix="choose degrees whose product divides the number of ranks",
        )
        return
    micro, whole_batch = sizes.number("micro_batch_size"), sizes.number("global_batch_size")
    data = world // split
    if micro and whole_batch and whole_batch % (micro * data):
        yield found(
            "divisibility",
            launch.path,
            sizes.word("global_batch_size").line,
            f"global batch {whole_batch} is not a multiple of micro-batch {micro} x {data} data "
            "ranks",
            fix=f"a multiple of {micro * data}",
        )


def _check_model(launch: Launch, sizes: _Sizes) -> Iterator[Finding]:
    """Heads, groups, layers and sequence against the degrees that split them."""
    tensor, pipeline = sizes.tensor or 1, sizes.pipeline or 1
    has_uneven = launch.argument(
        "decoder_first_pipeline_num_layers",
        "num_layers_per_virtual_pipeline_stage",
        "account_for_embedding_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "decoder_last_pipeline_num_layers",
        "pp_partition_method",
        "deepspeed",
    )
    for name, degree, what in (
        ("num_attention_heads", tensor, "tensor"),
        ("num_query_groups", tensor, "tensor"),
        ("ffn_hidden_size", tensor, "tensor"),
        ("num_layers", 1 if has_uneven is not None else pipeline, "pipeline"),
        ("seq_length", 2 * sizes.context if sizes.context > 1 else 1, "2 x context"),
    ):
        number = sizes.number(name)
        if number and number % degree and not (name == "num_query_groups" and degree % number == 0):
            yield found(
                "divisibility",
                launch.path,
                sizes.word(name).line,
                f"--{name.replace('_', '-')} {number} is not divisible by {what} parallel {degree}",
                fix=f"choose a degree that divides {number}",
            )


def _check_bubble(launch: Launch, scene: Scene, sizes: _Sizes) -> Iterator[Finding]:
    world = started(launch, scene).world or scene.context.num_processes
    micro, batch = sizes.number("micro_batch_size"), sizes.number("global_batch_size")
    pipeline = sizes.pipeline
    if not (pipeline and pipeline > 1 and world and micro and batch) or sizes.pipeline_word is None:
        return
    data = world // ((sizes.tensor or 1) * pipeline * sizes.context)
    if not data or batch % (micro * data):
        return
    chunk, layers = (
        sizes.number("num_layers_per_virtual_pipeline_stage"),
        sizes.number("num_layers"),
    )
    chunks = layers // (pipeline * chunk) if chunk and layers else 1
    yield from bubble(
        launch.path, sizes.pipeline_word.line, pipeline, batch // (micro * data), max(chunks, 1)
    )


def bubble(path: str, line: int, stages: int, batches: int, chunks: int) -> Iterator[Finding]:
    """A pipeline whose stages wait more than a fifth of a step.

    Source: arXiv:2104.04473, section 2.2: (p - 1) / (v m) of the ideal time.
    """
    share = (stages - 1) / (batches * chunks + stages - 1)
    if share > BUBBLE:
        enough = -(-4 * (stages - 1) // chunks)
        yield found(
            "pipeline-bubble",
            path,
            line,
            f"{stages} stages with {batches} micro-batches wait {share:.0%} of each step",
            fix=f"{enough} micro-batches or more, fewer stages, or interleaved chunks",
        )
