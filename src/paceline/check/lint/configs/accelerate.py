"""Accelerate's configuration file (`accelerate launch --config_file`)."""

import difflib
import re
from collections.abc import Iterator, Mapping

from paceline.check.finding import Finding, Severity
from paceline.check.lint.configs.known_values import ACCELERATE, check_values
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import INFO, WARNING, bf16_finding, found
from paceline.check.lint.configs.variables import LOOPBACK, check_port
from paceline.check.lint.context import Context
from paceline.check.lint.gpus import lacks_bf16
from paceline.check.lint.words import words_of

TOP_LEVEL = words_of("accelerate", "top_level")
"""Fields of `ClusterConfig` and `SageMakerConfig` of accelerate 1.15, and two that older ones
wrote: with any other the launch ends."""

DEEPSPEED = words_of("accelerate", "deepspeed")
"""`accelerate launch --help`, deepspeed's group, 1.15."""

_IN_THE_JSON = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys of `DeepSpeedPlugin._deepspeed_config_checks` of accelerate 1.15, which raises where one
stands beside a DeepSpeed file; mixed_precision, the other one, is in `launch_rules.py`."""

FSDP = words_of("accelerate", "fsdp")

_FSDP1 = {
    "forward_prefetch": "is not read",
    "backward_prefetch": "is set to None",
    "use_orig_params": "is not read: FSDP2 always uses the original parameters",
    "sync_module_states": "is not read: FSDP2 does not need it",
}
"""Keys of FSDP1 without one of FSDP2 in their place -> what becomes of them there:
`FullyShardedDataParallelPlugin` of accelerate 1.15."""

_RESHARDS = {"full_shard": "true", "hybrid_shard": "true", "1": "true", "4": "true"}
"""Strategies that shard the weights too, by name and number: commands/to_fsdp2.py of accelerate
1.15."""


def is_accelerate(document: Marked) -> bool:
    """Whether a YAML mapping is Accelerate's: these words are nobody else's."""
    words = {"compute_environment", "distributed_type", "main_training_function", "num_machines"}
    return document.at("distributed_type") is not None and bool(
        words & set(dict(document.entries())) - {"distributed_type"}
        or document.at("num_processes")
        or document.at("fsdp_config")
        or document.at("deepspeed_config")
    )


def check_accelerate(path: str, config: Marked, context: Context) -> Iterator[Finding]:
    """Everything the file shows, alone and on the machines of the context."""
    yield from _check_keys(path, config)
    yield from check_values(path, config, ACCELERATE)
    yield from _check_numbers(path, config)
    yield from _check_counts(path, config, context)
    yield from _check_meeting(path, config)
    yield from _check_precision(path, config, context)
    yield from _check_fsdp(path, config)
    yield from _check_deepspeed(path, config)


def _check_numbers(path: str, config: Marked) -> Iterator[Finding]:
    """Counts that are no numbers: the launch ends in the middle of its arithmetic."""
    for name, lowest in (("num_processes", 1), ("num_machines", 1), ("machine_rank", 0)):
        value = config.at(name)
        text = value.text() if value is not None else None
        if value is None or text is None or re.search(r"[${}<>%]", text):
            continue
        number = value.number()
        if number is None or number < lowest:
            what = f"{name} is {text}: it has to be a whole number from {lowest} on"
            fix = f"{name}: {lowest}"
            yield found("config-unknown-key", path, value, what, fix)


def _check_keys(path: str, config: Marked) -> Iterator[Finding]:
    for name, value in config.entries():
        if name not in TOP_LEVEL:
            near = difflib.get_close_matches(name, TOP_LEVEL, n=1)
            inner = [one for one in FSDP if name == f"fsdp_{one}"]
            fix = (
                "move it into fsdp_config"
                if inner
                else "move it into deepspeed_config"
                if name in DEEPSPEED
                else f"write {near[0]}"
                if near
                else "take it out"
            )
            what = f"Accelerate has no key {name}: the launch ends with `unknown keys`"
            yield found("config-unknown-key", path, value, what, fix)
        for old in value.again:
            what = f"{name} is given again in line {value.line}, and only the last counts"
            yield found("config-unknown-key", path, old.line, what, "keep one", level=WARNING)
    for section, known, prefix in (
        ("deepspeed_config", DEEPSPEED, ""),
        ("fsdp_config", FSDP, "fsdp_"),
    ):
        inside = config.at(section)
        for name, value in inside.entries() if inside is not None else ():
            short = name.removeprefix(prefix)
            if short in known:
                continue
            near = difflib.get_close_matches(short, known, n=1, cutoff=0.75)
            what = f"{section} has no key {name}: nothing reads it"
            yield found(
                "config-unknown-key",
                path,
                value,
                what,
                f"write {prefix}{near[0]}" if near else "take it out",
                level=WARNING if near else INFO,
            )


def _check_counts(path: str, config: Marked, context: Context) -> Iterator[Finding]:
    processes, machines = config.at("num_processes"), config.at("num_machines")
    total, nodes = config.number("num_processes"), config.number("num_machines") or 1
    kind = (config.text("distributed_type") or "").upper()
    if processes is None or total is None:
        return
    if kind in {"NO", "FALSE"} and total > 1:
        what = f"distributed_type NO starts one process, whatever num_processes: {total} says"
        fix = "distributed_type: MULTI_GPU"
        yield found(
            "launcher-plain-python",
            path,
            (config.at("distributed_type") or processes).line,
            what,
            fix,
        )
        return
    if total % nodes:
        what = (
            f"num_processes {total} is the total of all machines, and {nodes} machines do not "
            "divide it"
        )
        fix = f"{nodes} x the GPUs of a machine"
        yield found("divisibility", path, processes.line, what, fix)
        return
    each = context.gpus_per_node
    if each is not None and total // nodes > each:
        what = f"{total // nodes} processes on each of {nodes} machines, which have {each} GPUs"
        fix = f"num_processes: {each * nodes}"
        yield found("invalid-device-ordinal", path, processes.line, what, fix)
    elif each is not None and nodes > 1 and total == each:
        what = (
            f"num_processes is the total of all machines: {total} starts {total // nodes} on each "
            f"of {nodes}, which have {each} GPUs"
        )
        fix = f"num_processes: {each * nodes}"
        yield found("divisibility", path, processes.line, what, fix, level=WARNING)
    if machines is not None and context.nodes is not None and nodes != context.nodes:
        what = f"the launcher waits for {nodes} machines, and the job has {context.nodes}"
        fix = f"num_machines: {context.nodes}"
        yield found("rendezvous-timeout-few-nodes", path, machines.line, what, fix)
    rank = config.at("machine_rank")
    number = rank.number() if rank is not None else None
    if rank is not None and number is not None and number >= nodes:
        what = f"machine_rank {number} of {nodes} machines: they are counted from 0"
        fix = f"machine_rank: 0 to {nodes - 1}"
        yield found("rendezvous-timeout-few-nodes", path, rank.line, what, fix)


def _check_meeting(path: str, config: Marked) -> Iterator[Finding]:
    address, port = config.at("main_process_ip"), config.at("main_process_port")
    nodes = config.number("num_machines") or 1
    text = address.text() if address is not None else None
    if address is not None and text is not None and nodes > 1 and LOOPBACK.match(text):
        what = f"main_process_ip {text} names a different machine on each of {nodes}"
        fix = "an address of the first machine that the others reach"
        yield found("rendezvous-c10d-timeout", path, address.line, what, fix)
    number = port.number() if port is not None else None
    if port is not None and number is not None:
        yield from check_port(path, port.line, "main_process_port", number)


def _check_precision(path: str, config: Marked, context: Context) -> Iterator[Finding]:
    precision = config.at("mixed_precision")
    if precision is None or context.gpu is None or precision.text() != "bf16":
        return
    if lacks_bf16(context.gpu):
        yield bf16_finding(path, precision.line, "mixed_precision: bf16", context.gpu)


def _check_fsdp(path: str, config: Marked) -> Iterator[Finding]:
    inside = config.at("fsdp_config")
    if inside is None or (config.text("distributed_type") or "").upper() != "FSDP":
        return
    keys = {name.removeprefix("fsdp_"): value for name, value in inside.entries()}
    version = keys.get("version")
    if version is not None and version.number() == 2:
        yield from _check_fsdp1_keys(path, keys)
    offload, wrap = keys.get("offload_params"), keys.get("auto_wrap_policy")
    if offload is not None and offload.true() and (wrap is None or wrap.text() == "NO_WRAP"):
        what = (
            "without a wrap policy the model is one unit: all its offloaded weights come to the "
            "GPU together"
        )
        fix = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        yield found("fsdp-cpu-offload-oom", path, (wrap or offload).line, what, fix)


def _check_fsdp1_keys(path: str, keys: Mapping[str, Marked]) -> Iterator[Finding]:
    """Keys of FSDP1 in a file that asks for FSDP2."""

    def stray(name: str, what: str, fix: str, level: Severity) -> Finding:
        what = f"fsdp_{name} is a key of FSDP1, and fsdp_version is 2: it {what}"
        return found("config-unknown-key", path, keys[name], what, fix, level=level)

    if (strategy := keys.get("sharding_strategy")) is not None:
        fix = "take it out"
        if "reshard_after_forward" not in keys:
            reshards = _RESHARDS.get((strategy.text() or "").lower(), "false")
            fix = f"fsdp_reshard_after_forward: {reshards}"
        what = "is not read, fsdp_reshard_after_forward is"
        yield stray("sharding_strategy", what, fix, WARNING)
    for name in keys.keys() & _FSDP1:
        yield stray(name, _FSDP1[name], "take it out", INFO)


def _check_deepspeed(path: str, config: Marked) -> Iterator[Finding]:
    inside = config.at("deepspeed_config")
    if inside is None or (config.text("distributed_type") or "").upper() != "DEEPSPEED":
        return
    named = inside.at("deepspeed_config_file")
    if named is not None:
        for name in _IN_THE_JSON:
            clash = inside.at(name)
            if clash is not None:
                what = (
                    f"{name} is given beside deepspeed_config_file: {named.text()}, which has to "
                    "set it: Accelerate ends with a ValueError"
                )
                fix = f"take it out here, and set it in {named.text()}"
                yield found(
                    "ds-config-silent-keys",
                    path,
                    clash.line,
                    what,
                    fix,
                    evidence=[(path, named.line, f"deepspeed_config_file: {named.text()}")],
                )
