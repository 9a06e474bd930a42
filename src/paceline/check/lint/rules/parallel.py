"""Ways to split a model that cannot work, or cost more than they give: by sizes that are known."""

import re
from collections.abc import Iterator

from paceline.catalog import accelerator_spellings, load_accelerators
from paceline.check.finding import Finding, Severity
from paceline.check.lint.configs.degrees import bubble
from paceline.check.lint.configs.say import findings
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.names import DDP, FSDP, FULLY_SHARD
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import Value, innermost
from paceline.check.lint.rules.samplers import training_loops
from paceline.units import counted, format_bytes

FEWER_TRAINED = ("get_peft_model", "LoraConfig", "requires_grad_", "requires_grad", "bitsandbytes")
"""Words of programs in which most parameters have no gradient, or less than 16 bits."""

WIDE_BYTES, NARROW_BYTES = 16, 8
"""Bytes of a parameter with its gradient and Adam's two moments, all in float32 or all in 16 bits.
Source: ZeRO, arXiv:1910.02054, section 3.1; torch/optim/adam.py, `zeros_like(p)`."""

MANY_RANKS = 128
"""From which one sample a rank is worth a word. A guess: hundreds of ranks, with a margin."""

SCHEDULES = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B")
PIPELINING = "torch.distributed.pipelining"
ADAMS = ("torch.optim.Adam", "torch.optim.AdamW")


def wrapped_models(program: Program) -> Iterator[tuple[Call, Value]]:
    """Each DDP(...) call and the plain model in it."""
    for call in program.calls(DDP):
        for one in (call.result.inner or Value()).any():
            yield call, innermost(one)


def check_ddp_fits(program: Program, context: Context) -> Iterator[Finding]:
    """A model that is larger, with its gradients and Adam's moments if there are, than its GPU."""
    if program.mentions(*FEWER_TRAINED):
        return
    has_moments = program.has_call(*ADAMS)
    kept = "gradient and Adam's moments" if has_moments else "gradient"
    gpu, room = room_of(context)
    for wrap, model in wrapped_models(program):
        made = model.call if isinstance(model.call, Call) else None
        count = named_parameters(made) if made is not None else None
        if made is None or count is None:
            continue
        each = NARROW_BYTES if names_narrow(made) else WIDE_BYTES
        each = each if has_moments else each // 2
        if count * each <= room:
            continue
        what = (
            f"DDP keeps {format_bytes(count * each)} on every rank ({count / 1e9:g}B "
            f"parameters, {each} bytes each with {kept}); {gpu} has "
            f"{format_bytes(room)}"
        )
        fix = "shard it: fully_shard or ZeRO-3; `paceline plan` has the ranks needed"
        yield program.finding("ddp-does-not-fit", wrap, what, fix, seen=(made,))
        return


def room_of(context: Context) -> tuple[str, int]:
    """The accelerator and its bytes; of an unknown one, those of the largest in the catalog."""
    known = load_accelerators()
    spelled = {name.lower(): each for name, each in accelerator_spellings(known).items()}
    name = spelled.get((context.gpu or "").lower())
    if name is not None and (size := known[name].memory_bytes):
        return name, size
    size, name = max((each.memory_bytes or 0, name) for name, each in known.items())
    return f"the largest known accelerator ({name})", size


def check_tiny_batches(program: Program, context: Context) -> Iterator[Finding]:
    """One sample a rank between two reductions, on hundreds of ranks."""
    ranks, wraps = context.num_processes, [wrap for wrap, _ in wrapped_models(program)]
    if ranks is None or ranks < MANY_RANKS or not wraps or program.mentions("no_sync"):
        return
    for loop in training_loops(program):
        for loader in (loop.over or Value()).origins():
            call = loader.call
            if not isinstance(call, Call) or call.name != "torch.utils.data.DataLoader":
                continue
            size = call.argument(1, "batch_size")
            if call.has_argument(None, "batch_sampler") or (size is not None and size.const != 1):
                continue
            what = (
                f"each of {counted(ranks, 'rank')} computes one sample between two "
                f"all-reduces of all "
                "gradients: most of a step is waiting"
            )
            fix = "a larger batch_size, several micro-batches under no_sync(), or fewer ranks"
            yield program.finding("scaling-not-linear", call, what, fix, seen=wraps[:1])
            return


def check_pipeline_bubble(program: Program, context: Context) -> Iterator[Finding]:
    """A schedule of torch.distributed.pipelining with too few micro-batches for its stages."""
    stages = [
        call.argument(2, "num_stages") for call in program.calls(f"{PIPELINING}.PipelineStage")
    ]
    counts = [one.const for one in stages if one is not None and isinstance(one.const, int)]
    for call in program.calls(*(f"{PIPELINING}.{name}" for name in SCHEDULES)):
        batches = call.argument(1, "n_microbatches")
        chunks = call.argument(0, "stages")
        many = len(chunks.items or ()) if chunks is not None else 0
        if counts and batches is not None and isinstance(batches.const, int) and batches.const > 0:
            ranks = counts[0] // max(1, many)
            waits = bubble(call.line, ranks, batches.const, max(1, many))
            yield from findings(program.path, waits)


def check_needless(program: Program, context: Context) -> Iterator[Finding]:
    """Tensor or pipeline ranks for a model that one GPU trains by itself."""
    splits = program.calls(
        "torch.distributed.tensor.parallel.parallelize_module", f"{PIPELINING}.PipelineStage"
    )
    gpu, room = room_of(context)
    if not splits or context.gpu is None:
        return
    for call in program.all_calls:
        count = named_parameters(call)
        if count is not None and 2 * count * WIDE_BYTES <= room:
            what = (
                f"{count / 1e9:g}B parameters take {format_bytes(count * WIDE_BYTES)} with "
                f"gradients and Adam's moments, and {gpu} has {format_bytes(room)}: data ranks "
                "alone send less"
            )
            fix = "DDP or fully_shard alone; `paceline plan` compares them"
            yield program.finding(
                "model-parallel-needless", splits[0], what, fix, seen=(call,), level=Severity.INFO
            )
            return


COMPARES = ("replicas_differ", "allclose", "assert_close", "equal", "_verify_param_shape_across")
"""Words of programs that compare what ranks hold."""


def check_unverified(program: Program, context: Context) -> Iterator[Finding]:
    """Gradients that the program averages by hand, and nothing that compares the copies."""
    if program.wraps or program.framework or program.mentions(*COMPARES):
        return
    for call in program.calls("torch.distributed.all_reduce"):
        tensor = call.argument(0, "tensor")
        if tensor is not None and any(one.attribute == "grad" for one in tensor.origins()):
            what = (
                "gradients are averaged by hand, and nothing checks that the ranks' copies of "
                "the model stay equal"
            )
            fix = (
                "every few hundred steps: `assert paceline.replicas_differ(model) is None`; or "
                "DistributedDataParallel, which does both"
            )
            yield program.finding("sync-unverified", call, what, fix)
            return


SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
"""The number of parameters in a checkpoint's name: `Llama-2-70b-hf`."""


NARROW = frozenset({"torch.float16", "torch.bfloat16", "torch.half"})


def named_parameters(call: Call) -> float | None:
    """Parameters of the checkpoint that `from_pretrained` is given, by its name; else None."""
    named = call.argument(0, "pretrained_model_name_or_path")
    text = named.likely() if named is not None and call.method == "from_pretrained" else None
    found = SIZE.search(text) if isinstance(text, str) else None
    return None if found is None else float(found[1]) * 1e9


def names_narrow(call: Call) -> bool:
    """Whether a model is asked for in 16 bits."""
    dtype = call.argument(None, "torch_dtype", "dtype")
    return dtype is not None and (dtype.name in NARROW or dtype.const == "auto")


def check_cpu_offload(program: Program, context: Context) -> Iterator[Finding]:
    """CPU offload of one unit, the whole model: all of it is gathered in the forward pass."""
    for call in program.calls(FSDP):
        offload = call.argument(None, "cpu_offload")
        if offload is None or not offloads(offload) or call.open_ended:
            continue
        policy = call.argument(None, "auto_wrap_policy")
        if (policy is not None and policy.const is not None) or nested(program, call):
            continue
        yield offload_finding(program, call, "auto_wrap_policy is left out")
    for call in program.calls(FULLY_SHARD):
        offload = call.argument(None, "offload_policy")
        if offload is None or "CPUOffloadPolicy" not in (offload.instance or ""):
            continue
        if not nested(program, call):
            yield offload_finding(program, call, "no layer is sharded by itself")


def offloads(value: Value) -> bool:
    if value.const is True:
        return True
    if not isinstance(value.call, Call) or not (value.instance or "").endswith("CPUOffload"):
        return False
    given = value.call.argument(0, "offload_params")
    return given is not None and given.const is True


def nested(program: Program, call: Call) -> bool:
    """Whether other parts of the model are units of their own, or a helper may make them so."""
    return any(
        one is not call and one.node is not call.node for one in program.calls(call.name)
    ) or program.has_call(
        "torch.distributed.fsdp.wrap.wrap", "torch.distributed.fsdp.wrap.enable_wrap"
    )


def offload_finding(program: Program, call: Call, why: str) -> Finding:
    what = (
        f"{why}: the whole model is one unit, and its forward pass gathers all parameters on "
        "the GPU although they are offloaded"
    )
    fix = "shard each layer as a unit: an auto_wrap_policy, or fully_shard(layer) for each"
    return program.finding("fsdp-cpu-offload-oom", call, what, fix)


def check_recomputation(program: Program, context: Context) -> Iterator[Finding]:
    """A causal language model on several ranks that keeps all its activations."""
    models = [
        one
        for one in program.all_calls
        if one.name.startswith("transformers.AutoModelForCausalLM.")
    ]
    wraps = program.calls(FSDP, FULLY_SHARD, DDP)
    if not models or not wraps or program.mentions("checkpointing", "checkpoint_wrapper"):
        return
    what = "the language model keeps the activations of all layers for the backward pass"
    fix = "model.gradient_checkpointing_enable()"
    yield program.finding("no-gradient-checkpointing", models[0], what, fix, seen=wraps[:1])


RULES = (
    check_ddp_fits,
    check_tiny_batches,
    check_pipeline_bubble,
    check_needless,
    check_unverified,
    check_cpu_offload,
    check_recomputation,
)
