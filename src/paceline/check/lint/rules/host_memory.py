"""Models that every process of a node reads into the node's memory."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.program import Program
from paceline.units import format_bytes

SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
"""The number of parameters in a checkpoint's name: `Llama-2-70b-hf`."""

LARGE_BYTES = 100e9
"""A guess: what eight processes of a node read at once without harm."""

NODE_BYTES = 1.5e12
"""Less than the memory of an 8-GPU node as it is sold: 2 TB with a DGX H100 (its data sheet)."""

NARROW = frozenset({"torch.float16", "torch.bfloat16", "torch.half"})
SPARES = ("device_map", "quantization_config", "load_in_4bit", "load_in_8bit")


def check_copies(program: Program, context: Context) -> Iterator[Finding]:
    """Each rank reads a large checkpoint as a whole before the model is sharded."""
    if program.framework is not None or not program.wraps:
        return
    for call in program.all_calls:
        if not call.name.startswith("transformers.") or call.result.kind != "model":
            continue
        size = copy_bytes(call)
        if size is None or size < LARGE_BYTES or reads_nothing(call):
            continue
        ranks = context.devices or context.gpus_per_node
        whole = size * ranks if ranks else None
        yield program.finding(
            "host-oom-sigkill",
            Severity.WARNING if whole is not None and whole > NODE_BYTES else Severity.INFO,
            call,
            what=(
                f"every rank reads {format_bytes(size)} of weights into its node's memory"
                + (f": {format_bytes(whole)} with {ranks} on a node" if whole else "")
                + "; the kernel kills processes (-9) when that runs out"
            ),
            fix="read the weights on rank 0 alone and make the others on torch.device('meta'), "
            "with sync_module_states=True; or load a sharded checkpoint",
            seen=program.wraps[:1],
        )
        return


def copy_bytes(call: Call) -> float | None:
    """Bytes of one copy of the named checkpoint; None where its name does not tell."""
    count = named_parameters(call)
    return None if count is None else count * (2 if names_narrow(call) else 4)


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


def reads_nothing(call: Call) -> bool:
    """Whether it reads on some ranks alone, onto devices, or makes empty weights."""
    if any(one.by_rank for one in call.guards):
        return True
    if any(call.has_argument(None, name) for name in SPARES):
        return True
    words = " ".join((one.instance or one.name or "") for one in call.withs)
    return "device" in words or "init_empty" in words or "Init" in words


RULES = (check_copies,)
