"""DeepSpeed's JSON configuration: keys that nothing reads, precision, the batch's triangle."""

import difflib
import re
from collections.abc import Iterator
from typing import Any

from paceline.check.finding import Finding, Severity
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import ERROR, WARNING, bf16_finding, found
from paceline.check.lint.context import Context
from paceline.check.lint.gpus import lacks_bf16
from paceline.check.lint.words import words_by_section, words_of
from paceline.units import counted

TOP_LEVEL = words_of("deepspeed", "top_level")
"""Keys that deepspeed 0.14 to 0.18 read (deepspeed/runtime/constants.py and the modules' own
configs); any other is passed over without a word."""

ZERO = words_of("deepspeed", "zero")
"""`DeepSpeedZeroConfig`, whose model forbids any other key."""

OFFLOAD = words_by_section("deepspeed", "offload")
PRECISION = words_by_section("deepspeed", "precision")
OPTIMIZER = words_of("deepspeed", "optimizer")
SCHEDULER = words_of("deepspeed", "scheduler")


def is_deepspeed(config: Marked) -> bool:
    """Whether a JSON mapping is DeepSpeed's: it has its keys, and more of them than of others'.

    Programs on top of DeepSpeed (GPT-NeoX) put some of them among their own, and hand those on.
    """
    keys = {name for name, _ in config.entries()}
    if 2 * len(keys & (TOP_LEVEL | ZERO)) < len(keys):
        return False
    surely = {
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "steps_per_print",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
    }
    return (
        bool(keys & surely)
        or len(keys & {"train_batch_size", "gradient_accumulation_steps", "fp16", "bf16"}) > 1
    )


def check_deepspeed(path: str, config: Marked, context: Context) -> Iterator[Finding]:
    """Everything the file shows, alone and on the machines of the context."""
    old = (context.version("deepspeed") or (99,)) < (0, 17, 1)
    yield from (one for one in _check_keys(path, config) if not (old and SINCE_0_17 in one.what))
    yield from _check_kinds(path, config)
    yield from _check_zero(path, config)
    yield from _check_precision(path, config, context)
    yield from check_triangle(path, config, context.num_processes)


PASSED_OVER = "it is silently ignored"
FAILS = "the start fails"
SINCE_0_17 = "DeepSpeed 0.17.1 and later do not start with it, and earlier ones ignore it"
"""`DeepSpeedFP16Config` and `DeepSpeedBF16Config` came with 0.17.1 (pull request 6976)."""


def _silent(
    path: str, at: Marked, what: str, fix: str, level: Severity = ERROR, **more: Any
) -> Finding:
    return found("ds-config-silent-keys", path, at, what, fix, level=level, **more)


def _unknown(
    path: str, name: str, value: Marked, section: str, known: frozenset[str], what: str
) -> Finding:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    fix = f"write {near[0]}" if near else "take it out"
    level = WARNING if what is SINCE_0_17 or not (section or near) else ERROR
    return _silent(path, value, f"{section or _WHOLE} has no key {name}: {what}", fix, level)


_WHOLE = "DeepSpeed's configuration"


def _check_keys(path: str, config: Marked) -> Iterator[Finding]:
    for name, value in config.entries():
        for old in value.again:
            what = f"{name} is set again here: its value in line {old.line} is lost"
            yield _silent(path, value, what, "keep one", evidence=[(path, old.line, name)])
        if name in TOP_LEVEL or name.startswith(("_", "//", "#", "comment")):
            continue
        if name in ZERO:
            what = f"{name} belongs in zero_optimization: here it is ignored"
            yield _silent(path, value, what, "move it into zero_optimization")
        elif name == "zero_stage":
            what = "DeepSpeed has no key zero_stage: nothing is sharded"
            yield _silent(path, value, what, f'"zero_optimization": {{"stage": {value.text()}}}')
        else:
            yield _unknown(path, name, value, "", TOP_LEVEL, PASSED_OVER)
    for section, known in (*PRECISION.items(), ("optimizer", OPTIMIZER), ("scheduler", SCHEDULER)):
        inside = config.at(section)
        entries = inside.entries() if inside is not None else ()
        others = [(name, value) for name, value in entries if name not in known]
        if section in PRECISION and len(others) > 1:
            names = ", ".join(name for name, _ in others)
            what = f"{section} has no keys {names}: {SINCE_0_17}"
            yield _silent(path, others[0][1], what, "take them out", WARNING)
            continue
        for name, value in others:
            what = SINCE_0_17 if section in PRECISION else PASSED_OVER
            yield _unknown(path, name, value, section, known, what)


def _check_kinds(path: str, config: Marked) -> Iterator[Finding]:
    """Values that DeepSpeed cannot take: the start fails."""

    def wrong(value: Marked, what: str, fix: str) -> Finding:
        return _silent(path, value, f"{what}: the start fails", fix)

    for name, inner in (("zero_optimization", "stage"), ("fp16", "enabled"), ("bf16", "enabled")):
        section = config.at(name)
        if section is None or section.value is None or isinstance(section.value, dict):
            continue
        if name == "zero_optimization" and isinstance(section.value, bool):
            continue  # an old way of writing stage 1 and 0, still read
        said = "a list" if isinstance(section.value, list) else section.text()
        fix = f'"{name}": {{"{inner}": {said if said != "a list" else "..."}}}'
        yield wrong(section, f"{name} is {said}, and has to be a mapping", fix)
    stage = config.at("zero_optimization", "stage")
    if stage is not None and not _may_be(stage, range(4)):
        yield wrong(stage, f"ZeRO has no stage {stage.text()}", '"stage": 0, 1, 2 or 3')
    for name in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        size = config.at(name)
        if size is not None and not _may_be(size, range(1, 2**31)):
            fix = f'"{name}": a whole number from 1 on, or "auto" under Accelerate and the Trainer'
            yield wrong(size, f"{name} is {size.text()}", fix)


def _may_be(value: Marked, allowed: range) -> bool:
    """Whether it is one of these numbers, or something that is filled in before DeepSpeed reads."""
    text = value.text()
    if text is None:
        return not isinstance(value.value, dict | list)
    if text == "auto" or re.search(r"[${}<>%]", text):
        return True
    return value.number() in allowed and not isinstance(value.value, bool)


def _check_zero(path: str, config: Marked) -> Iterator[Finding]:
    zero = config.at("zero_optimization")
    if zero is None or not isinstance(zero.value, dict):
        return
    for name, value in zero.entries():
        if name not in ZERO:
            yield _unknown(path, name, value, "zero_optimization", ZERO, FAILS)
        if name in OFFLOAD:
            for inner, below in value.entries():
                if inner not in OFFLOAD[name]:
                    yield _unknown(path, inner, below, name, OFFLOAD[name], FAILS)
    stage_at = zero.at("stage")
    stage = zero.number("stage") if stage_at is not None else 0
    if stage is None:
        return
    offload = zero.at("offload_param")
    if offload is not None and stage < 3 and offload.text("device") not in {None, "none"}:
        what = f"offload_param needs stage 3, and the stage is {stage}: the weights stay on the GPU"
        fix = '"stage": 3, or take offload_param out'
        yield _silent(path, offload, what, fix)
    moved = zero.at("offload_optimizer")
    if moved is not None and stage == 0 and moved.text("device") not in {None, "none"}:
        what = "offload_optimizer needs a stage of 1 or more, and none is set"
        fix = '"stage": 2'
        yield _silent(path, moved, what, fix)
    elastic = zero.at("elastic_checkpoint")
    if elastic is not None and stage == 3 and zero.true("elastic_checkpoint"):
        # NotImplementedError in state_dict and load_state_dict. Source: deepspeed 0.19.8,
        # deepspeed/runtime/zero/stage3.py.
        what = "stage 3 has no elastic_checkpoint: save_checkpoint and load_checkpoint raise"
        fix = (
            "take it out; for other numbers of ranks use Universal Checkpointing "
            "(ds_to_universal.py, and load_universal in checkpoint)"
        )
        yield found("ckpt-world-size-mismatch", path, elastic.line, what, fix)
    if stage_at is None and len(zero.value) and not moved and not offload:
        what = "zero_optimization without a stage is stage 0: nothing is sharded"
        fix = '"stage": 2'
        yield _silent(path, zero, what, fix, WARNING)


def _check_precision(path: str, config: Marked, context: Context) -> Iterator[Finding]:
    fp16 = config.at("fp16")
    bf16 = config.at("bf16") or config.at("bfloat16")
    half = fp16 is not None and fp16.true("enabled")
    brain = bf16 is not None and bf16.true("enabled")
    if half and brain and fp16 is not None and bf16 is not None:
        first, last = sorted((fp16, bf16), key=lambda one: (one.line, one.column))
        what = "fp16 and bf16 are both enabled"
        fix = "keep one: bf16 on Ampere GPUs or newer"
        yield found(
            "ds-fp16-bf16-both",
            path,
            last.line,
            what,
            fix,
            evidence=[(path, first.line, f"{'fp16' if first is fp16 else 'bf16'} is enabled")],
        )
    if brain and bf16 is not None and context.gpu is not None and lacks_bf16(context.gpu):
        yield bf16_finding(path, bf16.line, "bf16.enabled", context.gpu)
    if half and not brain and fp16 is not None:
        scale = fp16.at("loss_scale")
        if scale is not None and scale.text() in {"1", "1.0"}:
            what = "loss_scale 1 does not scale: small gradients become 0 in fp16"
            fix = '"loss_scale": 0, which scales dynamically'
            yield found("mixed-precision-loss-scaling", path, scale.line, what, fix, level=WARNING)


def check_triangle(path: str, config: Marked, ranks: int | None) -> Iterator[Finding]:
    """train_batch_size = micro-batch x accumulation x ranks."""
    total = config.number("train_batch_size")
    micro = config.number("train_micro_batch_size_per_gpu")
    steps = config.number("gradient_accumulation_steps")
    place = config.at("train_batch_size")
    if total is None or place is None or total < 1:
        return
    if micro and steps and ranks and total != micro * steps * ranks:
        what = (
            f"train_batch_size {total} is not micro-batch {micro} x {steps} accumulation steps x "
            f"{counted(ranks, 'rank')} = {micro * steps * ranks}"
        )
        fix = f'"train_batch_size": {micro * steps * ranks}, or leave one of the three out'
        yield found("ds-batch-size-mismatch", path, place.line, what, fix)
        return
    for number, name in (
        (micro and steps and micro * steps, f"micro-batch {micro} x {steps} accumulation steps"),
        (micro, f"micro-batch {micro}"),
        (steps, f"{steps} accumulation steps"),
    ):
        if number and total % (number * (ranks or 1)):
            by = f"{name} x {ranks} ranks" if ranks else name
            by += f" = {number * (ranks or 1)}" if " x " in by else ""
            what = f"train_batch_size {total} is not a multiple of {by}"
            fix = "leave train_batch_size out: DeepSpeed computes it"
            yield found("ds-batch-size-mismatch", path, place.line, what, fix)
            return
    if ranks and not micro and not steps and total % ranks:
        what = f"train_batch_size {total} is not a multiple of {counted(ranks, 'rank')}"
        fix = f"{-(-total // ranks) * ranks}"
        yield found("ds-batch-size-mismatch", path, place.line, what, fix)
