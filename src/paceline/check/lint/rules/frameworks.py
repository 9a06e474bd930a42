"""What goes wrong with the idioms of Accelerate, DeepSpeed, Transformers, TensorFlow, MLX, Horovod
and Ray Train."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from paceline.check.finding import Finding, Severity
from paceline.check.lint.context import Context
from paceline.check.lint.events import Call
from paceline.check.lint.names import ACCELERATOR, DATALOADER, DEEPSPEED_INIT
from paceline.check.lint.program import Program
from paceline.check.lint.rules.agreement import zero_stage
from paceline.check.lint.values import UNKNOWN, Value

MAPS = ("map", "filter", "save_to_disk", "to_parquet")
FIRST = ("main_process_first", "local_main_process_first")

SMALL = re.compile(
    r"^(nyu-mll/)?glue$|imdb|squad|wikitext|ag_news|mnist|cifar|tiny_?shakespeare|mrpc|sst2?|"
    r"conll|dolly|alpaca|samsum|yelp|emotion|rotten_tomatoes",
    re.IGNORECASE,
)
"""Data sets of less than about 1 GB of text (their cards on the hub): mapped in minutes."""


def check_preprocessing_first(program: Program, context: Context) -> Iterator[Finding]:
    """One process maps a data set while all others wait with the default time limit."""
    if _has_long_timeout(program) or (context.num_processes or 2) < 2:
        return
    for call in program.all_calls:
        if call.method not in MAPS:
            continue
        for entered in call.withs:
            first = entered.call
            if not isinstance(first, Call) or first.method not in FIRST:
                continue
            data = call.receiver or Value()
            loud = is_known(data) and not is_small(data)
            yield program.finding(
                "rank0-preprocess-timeout",
                Severity.WARNING if loud else Severity.INFO,
                first,
                what=f"the other processes wait in a barrier while the first runs .{call.method}() "
                f"in line {call.line}; the process group's time limit is the default 10 minutes",
                fix="preprocess before the launch, or give a longer limit: "
                "InitProcessGroupKwargs(timeout=timedelta(hours=3)), ddp_timeout with Trainer",
                seen=(call,),
            )
            break


def is_small(data: Value) -> bool:
    return any(SMALL.search(name) for name in data_set_names(data))


def is_known(data: Value) -> bool:
    """Whether the program says which data set of the hub it is, or what unless told otherwise."""
    return any(name not in FILE_FORMATS for name in data_set_names(data))


FILE_FORMATS = frozenset({"json", "csv", "text", "parquet", "arrow", "imagefolder", "None"})
"""First arguments of `load_dataset` that read somebody's own files, of any size."""


def data_set_names(data: Value) -> list[str]:
    return [
        str(given.likely())
        for one in data.origins()
        if isinstance(one.call, Call) and one.call.name.startswith("datasets.")
        for given in [one.call.argument(0, "path")]
        if given is not None
    ]


def _has_long_timeout(program: Program) -> bool:
    for call in program.all_calls:
        if call.name.endswith(("InitProcessGroupKwargs", "init_process_group")) and (
            call.argument(None, "timeout") is not None
        ):
            return True
        if call.argument(None, "ddp_timeout") is not None:
            return True
    return False


def _entry(value: Value, key: str) -> Value | None:
    for one in value.any():
        if one.entries is not None and key in one.entries:
            return one.entries[key]
    return None


def check_config_before_group(program: Program, context: Context) -> Iterator[Finding]:
    """A ZeRO-3 model is loaded before anything tells Transformers of DeepSpeed."""
    marks = ("TrainingArguments", "init_distributed", "HfDeepSpeedConfig", "Init", "Accelerator")
    if not (program.has_call(DEEPSPEED_INIT) or program.mentions("deepspeed")):
        return
    starts = [call for call in program.all_calls if call.name.endswith(marks)]
    trainers = [
        call
        for call in starts
        if call.name.endswith("TrainingArguments") and call.argument(None, "deepspeed") is not None
    ]
    stage = zero_stage(trainers[0].argument(None, "deepspeed")) if trainers else 0
    if stage not in {None, 3}:
        return
    first = min(starts, key=lambda call: call.order)
    for call in program.all_calls:
        if call.method == "from_pretrained" and "Model" in call.name and call.order < first.order:
            yield program.finding(
                "ds-config-before-dist-init",
                Severity.WARNING if stage == 3 else Severity.INFO,
                call,
                what=f"the model is loaded before TrainingArguments in line {trainers[0].line}: "
                "each process holds it whole, and ZeRO-3 cannot divide it while it is read",
                fix="create TrainingArguments first, then call from_pretrained",
                seen=trainers[:1],
            )
            return


SPREADS = {"auto", "balanced", "balanced_low_0", "sequential"}


def check_device_map(program: Program, context: Context) -> Iterator[Finding]:
    """A model spread over all accelerators by every one of several processes."""
    launchers = {"torchrun", "accelerate", "deepspeed"}
    many = (context.num_processes or 0) > 1 or context.launcher in launchers
    owned = program.framework in {"accelerate", "deepspeed", "horovod"}
    if not (many or program.wraps or owned or _is_sharded_by_arguments(program)):
        return
    for call in program.calls(method="from_pretrained"):
        spread = call.argument(None, "device_map")
        if spread is None or spread.const not in SPREADS:
            continue
        if program.framework == "accelerate" and not _is_prepared(program, call) and not many:
            continue
        quantised = any(
            call.argument(None, key) is not None
            for key in ("load_in_4bit", "load_in_8bit", "quantization_config")
        )
        yield program.finding(
            "quantised-model-on-many-devices" if quantised else "device-map-with-distributed",
            Severity.ERROR,
            call,
            what=f'device_map="{spread.const}" lays the model over all accelerators of the node, '
            "and every process of the launch does so",
            fix='device_map={"": local_rank} for a quantised model'
            if quantised
            else "leave device_map out: the launcher's processes each move their own copy",
        )


def _is_sharded_by_arguments(program: Program) -> bool:
    """Whether the Trainer's arguments ask for FSDP or DeepSpeed: there are several processes."""
    for call in program.calls("transformers.TrainingArguments", "trl.SFTConfig"):
        for name in ("fsdp", "deepspeed"):
            given = call.argument(None, name)
            if given is not None and (given.const or given.entries):
                return True
    return False


def _is_prepared(program: Program, loaded: Call) -> bool:
    return any(
        loaded.result in arg.origins()
        for call in program.calls(f"{ACCELERATOR}.prepare", f"{ACCELERATOR}.prepare_model")
        for arg in call.args
    )


def check_scheduler_length(program: Program, context: Context) -> Iterator[Finding]:
    """Accelerate steps a prepared scheduler once for each process."""
    accelerators = program.calls(ACCELERATOR)
    if not accelerators or (context.num_processes or 2) < 2:
        return
    options = ("step_scheduler_with_optimizer", "split_batches", "dataloader_config")
    if any(call.has_argument(None, *options) for call in accelerators):
        return
    prepared = [
        source
        for call in program.calls(f"{ACCELERATOR}.prepare", f"{ACCELERATOR}.prepare_scheduler")
        for arg in call.args
        for source in arg.origins()
    ]
    for call in program.all_calls:
        steps = call.argument(None, "num_training_steps")
        if steps is None or call.result not in prepared:
            continue
        if any(str(one.const).startswith("constant") for one in call.args):
            continue
        text = "" if steps.node is None else ast.unparse(steps.node)
        origins = " ".join(filter(None, (one.label for one in steps.origins())))
        if "num_processes" in text + origins or "world" in (text + origins).lower():
            continue
        if steps.likely(UNKNOWN) is UNKNOWN and not _counts_prepared(program, steps):
            continue
        if _mentions_processes(steps):
            continue
        yield program.finding(
            "accelerate-scheduler-steps-xN",
            Severity.WARNING,
            call,
            what="accelerator.prepare() makes the scheduler step once a process at every step: the "
            "rate has reached its end after 1/num_processes of num_training_steps",
            fix="num_training_steps=steps * accelerator.num_processes, or do not prepare it",
        )


def _mentions_processes(value: Value) -> bool:
    return any("num_processes" in (one.label or one.attribute or "") for one in value.origins())


def _counts_prepared(program: Program, steps: Value) -> bool:
    """Whether the number is of steps of a loader that was prepared already: of one process."""
    measured = [
        one.call.argument(0) or Value()
        for one in steps.origins()
        if isinstance(one.call, Call) and one.call.name == "builtins.len"
    ]
    return any(one.instance == "accelerate.prepared" for each in measured for one in each.any())


def check_gathered_metrics(program: Program, context: Context) -> Iterator[Finding]:
    """Accelerate repeats samples so that batches divide; `gather` keeps the repeated."""
    if program.framework != "accelerate" or program.mentions("gather_for_metrics"):
        return
    for call in program.calls(f"{ACCELERATOR}.gather"):
        around = [loop for loop in call.loops if loop.over_batches]
        if not around or any(around[-1] in one.loops for one in program.backwards):
            continue
        if _cuts_to_length(call):
            continue
        text = ast.unparse(call.node).lower()
        if "loss" in text or not re.search(r"pred|label|logit|target|argmax|correct", text):
            continue
        yield program.finding(
            "eval-duplicates",
            Severity.INFO,
            call,
            what="the last batch is filled up with samples of before, and gather() counts them",
            fix="accelerator.gather_for_metrics(...)",
        )
        return


def _cuts_to_length(gather: Call) -> bool:
    """Whether its function cuts by the data set's length: `x[: len(loader.dataset) - seen]`."""
    body = gather.function.node if gather.function is not None else None
    return body is not None and any(
        isinstance(node, ast.Slice) and node.upper is not None and "len(" in ast.unparse(node.upper)
        for node in ast.walk(body)
    )


def check_skipped_batches(program: Program, context: Context) -> Iterator[Finding]:
    """skip_first_batches makes a loader whose sampler is in epoch 0 again."""
    if program.has_call(method="set_epoch"):
        return
    for call in program.calls(f"{ACCELERATOR}.skip_first_batches", "accelerate.skip_first_batches"):
        given = call.argument(0, "dataloader")
        loaders = [
            one.call
            for one in (given.origins() if given is not None else ())
            if isinstance(one.call, Call) and one.call.name == DATALOADER
        ]
        shuffled = [one for one in loaders if (one.argument(2, "shuffle") or Value()).const is True]
        if shuffled:
            yield program.finding(
                "skip-first-batches-epoch-reset",
                Severity.INFO,
                call,
                what="the loader without its first batches starts with the order of epoch 0, "
                "whichever epoch is resumed",
                fix="loader.set_epoch(epoch) before it",
                seen=shuffled[:1],
            )
            return


def check_tf_config(program: Program, context: Context) -> Iterator[Finding]:
    """TF_CONFIG is read when the strategy is made."""
    strategies = [
        call
        for call in program.all_calls
        if call.name.endswith(("MultiWorkerMirroredStrategy", "ParameterServerStrategy"))
    ]
    for assign in program.assigns:
        if "environ" not in assign.target or "TF_CONFIG" not in assign.target:
            continue
        before = [one for one in strategies if one.order < assign.order]
        first = next((one for one in before if one.root == assign.root), None)
        if first is not None:
            yield program.finding(
                "tf-config-after-strategy",
                Severity.ERROR,
                assign,
                what=f"TF_CONFIG is set after the strategy of line {first.line} has read it: each "
                "worker is a cluster of its own",
                fix=f"set TF_CONFIG before line {first.line}",
                seen=(first,),
            )
            return


def check_mlx_group(program: Program, context: Context) -> Iterator[Finding]:
    """Without `strict`, a launch that fails is many groups of one."""
    many = context.launcher == "mlx" or (context.num_processes or context.nodes or 0) > 1
    launched = program.launch is not None and "mlx.launch" in program.launch
    if not (many or launched):
        return
    for call in program.calls("mlx.core.distributed.init"):
        strict = call.argument(0, "strict")
        if call.open_ended or (strict is not None and strict.const is not False):
            continue
        if _checks_size(program):
            continue
        yield program.finding(
            "mlx-silent-singleton",
            Severity.WARNING,
            call,
            what=(
                "where no backend finds its peers, init() returns a group of one, and every "
                "process trains a model of its own without an error"
            ),
            fix="mx.distributed.init(strict=True, backend=...), and compare group.size()",
        )


def _checks_size(program: Program) -> bool:
    """Whether the size is compared with what was expected."""
    return bool(re.search(r"(assert|if|raise)[^\n]*\.size\(\)\s*(==|!=|<|>)", program.text))


def _starts_alike(program: Program) -> bool:
    """Whether every worker seeds the generator alike before it makes its weights."""
    seeds = [one for one in program.calls("torch.manual_seed") if one.args]
    return bool(seeds) and not any(one.args[0].divergent for one in seeds)


def check_horovod(program: Program, context: Context) -> Iterator[Finding]:
    """Horovod's workers start from weights of their own unless they are told."""
    if not program.has_call("horovod.torch.init") or not program.backwards:
        return
    sent = program.mentions("broadcast_parameters", "broadcast_object", "broadcast_optimizer")
    if not sent and not _starts_alike(program):
        wrapped = program.calls("horovod.torch.DistributedOptimizer")
        if wrapped:
            yield program.finding(
                "ddp-model-differs",
                Severity.ERROR,
                wrapped[0],
                what="no worker's weights are sent to the others: each starts from its own",
                fix="hvd.broadcast_parameters(model.state_dict(), root_rank=0) before training",
            )


def check_ray_report(program: Program, context: Context) -> Iterator[Finding]:
    """`ray.train.report` waits for all workers."""
    for call in program.calls("ray.train.report", "ray.air.session.report"):
        if any(guard.main and guard.how == "if" for guard in call.guards):
            yield program.finding(
                "rank0-only-collective-save",
                Severity.ERROR,
                call,
                what="ray.train.report() is a barrier of all workers, and only one gets here",
                fix="call report() on every worker; attach the checkpoint on rank 0 alone",
            )


def check_ray_loader(program: Program, context: Context) -> Iterator[Finding]:
    """A loader that Ray Train was not given reads the whole data set on every worker."""
    if program.framework != "ray" or not program.mentions("torchtrainer"):
        return
    if program.mentions("prepare_data_loader", "get_dataset_shard", "distributedsampler"):
        return
    for call in program.calls(DATALOADER):
        if call.has_argument(2, "sampler") or call.has_argument(None, "batch_sampler"):
            continue
        over = [one.over for one in _loops(program) if one.over is not None]
        if any(call.result in one.origins() for one in over):
            yield program.finding(
                "sampler-missing",
                Severity.ERROR,
                call,
                what="every worker of the TorchTrainer reads the whole data set in its own order",
                fix="loader = ray.train.torch.prepare_data_loader(loader)",
            )
            return


def _loops(program: Program) -> list[Any]:
    return [loop for one in program.backwards for loop in one.loops]


def check_batch_of_config(program: Program, context: Context) -> Iterator[Finding]:
    """DeepSpeed's three batch numbers against the number of processes."""
    for call in program.calls(DEEPSPEED_INIT):
        config = call.argument(None, "config", "config_params")
        if config is None or context.num_processes is None:
            continue
        total, micro, steps = (
            _number(config, key)
            for key in (
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
            )
        )
        if total is None or micro is None or steps is None:
            continue
        if total != micro * steps * context.num_processes:
            yield program.finding(
                "ds-batch-size-mismatch",
                Severity.ERROR,
                call,
                what=f"train_batch_size {total} is not {micro} x {steps} x {context.num_processes} "
                "processes",
                fix="leave one of the three out, or set train_batch_size to "
                f"{micro * steps * context.num_processes}",
            )


def _number(config: Value, key: str) -> int | None:
    value = _entry(config, key)
    return value.const if value is not None and type(value.const) is int else None


RULES = (
    check_preprocessing_first,
    check_config_before_group,
    check_device_map,
    check_scheduler_length,
    check_gathered_metrics,
    check_skipped_batches,
    check_tf_config,
    check_mlx_group,
    check_horovod,
    check_ray_report,
    check_ray_loader,
    check_batch_of_config,
)
