"""Megatron-LM: a file of arguments for its pretrain_gpt.py, and the script that starts it.

Flags are those of core_r0.16, megatron/training/arguments.py. Leaves out: preparing the data, and
evaluation beyond its loss.
"""

from collections.abc import Iterator
from math import ceil

from paceline.job import Job
from paceline.job.engine import ENGINE_NAMES, is_before, tag
from paceline.plan import Plan
from paceline.render.engine import Files, Gap
from paceline.render.environment import (
    Variable,
    export_lines,
    meeting_lines,
    restart_words,
    torchrun_options,
)
from paceline.render.megatron_gaps import core_gaps
from paceline.render.megatron_gaps import model_gaps as model_gaps
from paceline.render.megatron_words import (
    SHARDING,
    TOLD,
    Words,
    batch_words,
    copies,
    learned_positions,
    model_words,
    needed_lines,
    optimizer_words,
    parallel_words,
    planned_for,
    position_words,
    prefixes_of,
    schedule_words,
    tokenizer_of,
    uses_fsdp,
)
from paceline.render.shell import check_one_line, command, quote, script
from paceline.render.text import commented, header

_SINCE = {
    "--overlap-moe-expert-parallel-comm": "0.14",
    "--pipeline-model-parallel-layout": "0.13",
    "--rope-type": "0.14",
    "--use-megatron-fsdp": "0.14",  # --use-custom-fsdp before
}
"""Flags that are newer than core_v0.12.0 -> the first core version that has them. All others that
are written here, and these, are flags up to the last release of job/engines.toml. Source:
megatron/training/arguments.py of each tag, and the classes that it makes flags of;
tests/render/megatron_flags.txt."""

_ARGUMENTS = "arguments.txt"

_RENAMED = {
    "layernorm_epsilon": "norm-epsilon",
    "num_moe_experts": "num-experts",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "gated_linear_unit": "swiglu",
}
"""Fields of TransformerConfig -> flags, where they differ in more than dashes."""

_NEGATED = {"add_bias_linear": "disable-bias-linear"}
"""Fields that are true unless the flag is given."""

CARRIES = TOLD | {"train.attention", "train.fp8_recipe", "engine_path"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`arguments.txt`, a flag and its value a line, and `launch.sh`, run on every node."""
    words = arguments(plan, job)
    oldest, newest = _oldest(words), (ENGINE_NAMES["megatron"].files or ("", ""))[1]
    about = header(
        plan,
        job,
        f"For pretrain_gpt.py of Megatron-LM {_tag(plan)}. Its core_v{tag(oldest)} to "
        f"core_v{newest} have",
        "these flags too.",
        *planned_for(plan),
    )
    lines = " ".join(words).replace(" --", "\n--") + "\n"
    return {_ARGUMENTS: commented(about) + lines, "launch.sh": _launch(plan, job)}


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What Megatron Core lacks, and that its script keeps every checkpoint."""
    keeps = Gap(
        what=f"the newest {job.spec.checkpoint.keep_last} checkpoints kept",
        where="checkpoint.keep_last",
        why="Megatron-LM deletes none of those it writes",
        nearest="all are kept: watch the disk space",
    )
    found = [*core_gaps(plan, job), keeps]
    if plan.engine != "megatron" or any(gap.nearest is None for gap in found):
        return found
    return [*found, *_release_gaps(plan, _oldest(arguments(plan, job)))]


def _release_gaps(plan: Plan, oldest: str) -> Iterator[Gap]:
    if is_before(plan.engine_version, oldest):
        yield Gap(
            what=f"this layout with megatron {plan.engine_version}",
            where="engine",
            why=f"its flags are there since core_v{tag(oldest)}",
            nearest=None,
            fix=f"engine: megatron {tag(oldest)}, or a newer one",
        )


def _oldest(words: list[str]) -> str:
    """The first core version that has all flags."""
    return max((_SINCE[word] for word in words if word in _SINCE), default="0.12")


def _tag(plan: Plan) -> str:
    """Git tag of Megatron-LM, as the plan has it."""
    own = plan.engine == "megatron"
    return "core_v" + tag(plan.engine_version if own else ENGINE_NAMES["megatron"].planned)


def arguments(plan: Plan, job: Job) -> list[str]:
    """The command line of pretrain_gpt.py, without its data."""
    model = flags(model_words(plan, job))
    if plan.profile.blocks[0].kv_heads != plan.profile.blocks[0].heads:
        model.insert(model.index("--num-query-groups"), "--group-query-attention")
    else:
        place = model.index("--num-query-groups")
        del model[place : place + 2]
    return [
        *model,
        *_positions_and_vocabulary(plan, job),
        *flags(parallel_words(plan)),
        *_sharding(plan, job),
        *flags(batch_words(plan, job)),
        *flags(optimizer_words(job)),
        *flags(schedule_words(job)),
        *([] if plan.attention == "auto" else ["--attention-backend", plan.attention]),
        *_precision(plan),
        *_run(plan, job),
    ]


def flags(words: Words) -> list[str]:
    """Fields of Megatron Core as flags.

    >>> flags({"num_layers": 2, "add_bias_linear": False, "sequence_parallel": False})
    ['--num-layers', '2', '--disable-bias-linear']
    """
    found: list[str] = []
    for name, value in words.items():
        if name in _NEGATED:
            found += [] if value else [f"--{_NEGATED[name]}"]
            continue
        flag = f"--{_RENAMED.get(name, name.replace('_', '-'))}"
        if value is True:
            found.append(flag)
        elif value is not False:
            found += [flag, f"{value:.10g}" if isinstance(value, float) else str(value)]
    return found


def _positions_and_vocabulary(plan: Plan, job: Job) -> list[str]:
    vocabulary = plan.profile.head_outputs
    found = ["--seq-length", str(plan.profile.seq_len), "--max-position-embeddings"]
    found.append(str(learned_positions(plan.profile) or plan.profile.seq_len))
    found += flags(position_words(plan, job))
    if not plan.profile.tied:
        found.append("--untie-embeddings-and-output-weights")
    tokenizer = tokenizer_of(job)
    if tokenizer is not None:
        found += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", tokenizer]
    else:  # takes numbers as they are and adds one for the end of a document
        found += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary - 1)]
    return [*found, "--make-vocab-size-divisible-by", "1"]


def _sharding(plan: Plan, job: Job) -> list[str]:
    layout = plan.layout
    found: list[str] = []
    if layout.data * layout.context > 1 and layout.sharding != "none":
        found += ["--use-distributed-optimizer", "--overlap-param-gather"]
    elif layout.offload != "none":
        found.append("--use-distributed-optimizer")  # over one rank: only it can be offloaded
    if layout.data * layout.context > 1:
        found.append("--overlap-grad-reduce")
    if uses_fsdp(plan):
        found += ["--use-megatron-fsdp", "--init-model-with-meta-device"]
        # docs/user-guide/features/custom_fsdp.md, core_v0.16.1: its gradients are not the kernels'.
        found.append("--no-gradient-accumulation-fusion")
        found += ["--data-parallel-sharding-strategy", SHARDING[layout.sharding]]
        if copies(plan) > 1:
            found += ["--num-distributed-optimizer-instances", str(copies(plan))]
    if layout.offload != "none":
        found += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "1"]
        found += ["--use-precision-aware-optimizer"]
    if job.spec.train.gradient_compression == "bf16":
        found.append("--grad-reduce-in-bf16")
    return found


def _precision(plan: Plan) -> list[str]:
    recipe = [] if plan.fp8_recipe == "auto" else ["--fp8-recipe", plan.fp8_recipe]
    return {
        "bf16": ["--bf16"],
        "fp16": ["--fp16"],
        "fp8": ["--bf16", "--fp8-format", "e4m3" if "mxfp8" in recipe else "hybrid", *recipe],
    }.get(plan.precision, [])


def _run(plan: Plan, job: Job) -> list[str]:
    samples = job.spec.evaluate.samples
    return [
        *("--seed", str(max(1, job.spec.train.seed))),
        *("--ckpt-format", "fsdp_dtensor" if uses_fsdp(plan) else "torch_dist"),
        *("--save", "checkpoints", "--load", "checkpoints"),
        *("--save-interval", str(plan.checkpoint_every)),
        *("--eval-interval", str(plan.evaluate_every)),
        *("--eval-iters", str(ceil(samples / plan.layout.global_batch))),
        *("--log-interval", "1", "--log-throughput"),
        *("--distributed-timeout-minutes", "10"),
        "--exit-signal-handler",  # SIGTERM saves a checkpoint and ends
    ]


def _launch(plan: Plan, job: Job) -> str:
    about = header(
        plan,
        job,
        f"Needs MEGATRON_PATH, a checkout of NVIDIA/Megatron-LM at {_tag(plan)}, and the same "
        "folder",
        "on every node: checkpoints/ is written here.",
        *restart_words(job),
        *planned_for(plan),
    )
    ranks = " ".join(torchrun_options(plan))
    return script(
        about,
        *_checkout(plan, job),
        'cd "$(dirname "$0")"',
        *export_lines(plan, restarts=job.spec.recovery.max_restarts > 0),
        *(f"export {each.name}={each.value}  # {each.reason}" for each in connections(plan)),
        *(["unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron FSDP refuses 1"] * uses_fsdp(plan)),
        *meeting_lines(plan),
        "arguments=()",
        'while read -r -a words; do arguments+=("${words[@]}"); done \\',
        f"  < <(grep -v '^#' {_ARGUMENTS})",
        *_data(job),
        *needed_lines(job),
        f"exec torchrun {ranks} \\",
        f"  --max-restarts={job.spec.recovery.max_restarts} \\",
        '  "$MEGATRON_PATH/pretrain_gpt.py" "${arguments[@]}" "${data[@]}" "$@"',
    )


def _checkout(plan: Plan, job: Job) -> list[str]:
    wanted = f': "${{MEGATRON_PATH:?set it to a checkout of Megatron-LM, {_tag(plan)}}}"'
    if job.spec.engine_path is None:
        return [wanted]
    path = check_one_line(job.spec.engine_path, what="engine_path", where=job.where("engine_path"))
    return [
        f'if [ -z "${{MEGATRON_PATH:-}}" ]; then MEGATRON_PATH={quote(path)}; fi',
        'if [ ! -e "$MEGATRON_PATH/pretrain_gpt.py" ]; then',
        '  echo "$(uname -n) has no $MEGATRON_PATH/pretrain_gpt.py" >&2; exit 2',
        "fi",
    ]


def _data(job: Job) -> list[str]:
    """Token files that the job or DATA_PATH names; made-up samples where one of them asks."""
    prefixes = prefixes_of(job)
    named = ["data=()"]
    if job.spec.data.corpus == "mock":
        named = ["data=(--mock-data)"]
    elif prefixes:
        named = [f'data=(--data-path {command(*prefixes)} --split "99,1,0")']
    return [
        *named,
        'if [ -n "${DATA_PATH:-}" ]; then data=(--data-path "$DATA_PATH" --split "99,1,0"); fi',
        'if [ -n "${MOCK_DATA:-}" ]; then data=(--mock-data); fi',
        'if [ "${#data[@]}" -eq 0 ]; then',
        '  echo "set DATA_PATH to the prefix of token files, or MOCK_DATA=1 to try without" >&2',
        "  exit 2",
        "fi",
    ]


def connections(plan: Plan) -> list[Variable]:
    """Megatron's own environment."""
    if uses_fsdp(plan) or (plan.layout.tensor == 1 and plan.layout.context == 1):
        return []
    why = "before Blackwell communication is launched before the product that would fill the GPU"
    return [Variable(name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", reason=why)]
