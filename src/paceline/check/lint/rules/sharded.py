"""What goes wrong with the units of FSDP and `fully_shard`."""

from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.context import Context
from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.names import DDP, FSDP, FULLY_SHARD
from paceline.check.lint.facts.program import Program
from paceline.check.lint.facts.values import Value


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


RULES = (check_cpu_offload, check_recomputation)
