"""What Megatron Core 0.16 lacks of a plan: for Megatron-LM and Megatron Bridge."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.job import Job
from paceline.job.engine import ENGINE_NAMES
from paceline.job.job import DataSpec
from paceline.parallel.abilities import abilities_of
from paceline.plan import Plan
from paceline.profile import DecoderShape, ModelProfile
from paceline.render.device import accelerator_refusals
from paceline.render.engine import ANY_MODEL, Gap
from paceline.render.megatron_words import (
    deepseek_differs,
    learned_positions,
    prefixes_of,
    tokenizer_of,
    virtual,
)
from paceline.render.model import config_of, rotary_base, router_coefficient
from paceline.render.shared_gaps import loop_gaps, precision_gaps, schedule_gaps

_HELD_OUT = DataSpec().held_out


def core_gaps(plan: Plan, job: Job) -> list[Gap]:
    """What Megatron Core 0.16 lacks of a plan, whoever starts it."""
    return [*_refusals(plan, job), *_layout_gaps(plan), *_training_gaps(plan, job)]


def _refusals(plan: Plan, job: Job) -> Iterator[Gap]:
    why = "Megatron Core 0.16 trains on GPUs over NCCL only"
    yield from accelerator_refusals(plan, uses=abilities_of("megatron").backends, why=why)
    yield from model_gaps(plan.profile, plan.decoder, config_of(job))
    layout = plan.layout
    if virtual(plan) > 1 and layout.accumulation % layout.pipeline:
        yield Gap(
            what=f"{layout.accumulation} micro-batches in an interleaved pipeline of "
            f"{layout.pipeline}",
            where="train.global_batch",
            why="Megatron's interleaved schedule takes multiples of the stages",
            nearest=None,
            fix=f"choose train.global_batch so that accumulation is a multiple of "
            f"{layout.pipeline}, or layout.schedule: 1f1b",
        )
    if layout.context > 1 and (plan.profile.seq_len or 0) % (2 * layout.context):
        yield Gap(
            what=f"context {layout.context} of {plan.profile.seq_len} tokens",
            where="data.seq_len",
            why="Megatron cuts a sample into 2 x context equal parts",
            nearest=None,
            fix=f"data.seq_len: a multiple of {2 * layout.context}",
        )


def model_gaps(
    profile: ModelProfile, decoder: DecoderShape | None, config: Mapping[str, Any]
) -> Iterator[Gap]:
    """A model that these words do not describe, whatever the layout."""
    kinds = len(profile.blocks)
    is_v2 = config.get("model_type") == "deepseek_v2"
    recipe = "Megatron Bridge's recipes/deepseek/deepseek_v2.py" if is_v2 else _OWN_RECIPE
    if config.get("model_type") == "deepseek_v3":
        reason = deepseek_differs(profile, config)
    elif is_v2 and config.get("n_group", 1) > 1:
        reason = "groups of experts chosen by their best one: Megatron Core chooses by the sum of"
        reason += " the best few (moe_utils.py, group_limited_topk)"
    else:
        reason = _foreign(profile, decoder, config) if kinds == 1 else f"{kinds} kinds of blocks"
    if reason:
        yield Gap(
            what=f"the model {profile.name}",
            where="model",
            why="these files describe decoders like Llama (RMSNorm, rotary positions, gates), "
            f"GPT-2 and DeepSeek-V3; this one has {reason}",
            nearest=None,
            engines=ANY_MODEL,
            fix=f"start {recipe} yourself, which Paceline does not plan",
        )


_OWN_RECIPE = "the recipe of the model's own family"


def _foreign(profile: ModelProfile, decoder: DecoderShape | None, config: Mapping[str, Any]) -> str:
    """What the model has that these words do not describe; empty where they do."""
    if learned_positions(profile):
        return ""
    block = profile.blocks[0]
    norms = 2 * block.hidden + (2 * block.head_dim if block.query_key_norm else 0)
    bias = (block.heads + 2 * block.kv_heads) * block.head_dim
    has_bias = decoder is not None and decoder.qkv_bias
    checks = {
        "parts of its own": block.measured is not None or profile.outside is not None,
        "attention that is not causal": not block.causal,
        "layers without a gate": not block.gated,
        "GELU in its gates": str(config.get("model_type", "")).startswith("gemma"),
        "compressed keys and values": block.kv_rank > 0,
        "cross-attention": block.cross_heads > 0,
        f"windows of {block.window} tokens": 0 < block.window < (profile.seq_len or 0),
        "parallel blocks": block.parallel,
        "other norms or biases": block.vector_parameters != norms + (bias if has_bias else 0),
    }
    return next((name for name, has in checks.items() if has), "")


def _layout_gaps(plan: Plan) -> Iterator[Gap]:
    layout = plan.layout
    has = "Megatron Core 0.16 has 1F1B and its interleaved form"
    yield from schedule_gaps(plan, "megatron", has)
    is_own = ENGINE_NAMES[plan.engine].is_megatron  # whose plan is of so many blocks, whichever
    if layout.recompute == "selective" and not is_own:
        yield Gap(
            what=f"selective recomputation as {plan.engine} does it",
            where="layout.recompute",
            why="Megatron recomputes the core of the attention, and nothing else",
            nearest="core attention is recomputed: more memory, less time than planned",
            fix="engine: megatron, so that memory and time are Megatron's",
        )
    if layout.recompute == "full" and layout.recompute_every > 1 and not is_own:
        yield Gap(
            what=f"one block in {layout.recompute_every} recomputed",
            where="layout.recompute_every",
            why="Megatron recomputes the first blocks of each stage, not every so many",
            nearest="as many blocks of each stage: the same memory and time",
        )
    if layout.offload == "nvme":
        yield Gap(
            what="optimizer state on nvme",
            where="layout.offload",
            why="Megatron Core 0.16 offloads it to the host's memory only",
            nearest="optimizer state in the host's memory",
            fix="layout.offload: cpu",
        )
    tf32 = "float32; TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in the environment allows TF32"
    yield from precision_gaps(plan, {"tf32": ("Megatron has no flag for it", tf32)})


def _training_gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    train, spec = job.spec.train, job.spec
    yield from loop_gaps(
        job,
        "Megatron",
        adapters="Megatron Bridge's peft recipes, or `paceline run`",
        optimizers=("adamw", "sgd"),
        why_optimizers="Megatron Core 0.16 has Adam, SGD and a Muon of its own scaling",
        wires=("none", "bf16"),
        why_wires="Megatron sends float32 or bf16",
    )
    if train.compile:
        yield Gap(
            what="compiled blocks",
            where="train.compile",
            why="Megatron has fused kernels of its own",
            nearest="Transformer Engine's kernels",
            fix="train.compile: false",
        )
    if not (rotary_base(plan, job) or learned_positions(plan.profile)):
        yield Gap(
            what="the base of the rotary positions",
            where="model",
            why="the model's config.json has no rope_theta",
            nearest="10000, Megatron's default: set the model's own",
        )
    if plan.profile.blocks[-1].experts and router_coefficient(job):
        yield Gap(
            what="the balancing loss as transformers defines it",
            where="train.router_loss",
            why="Megatron Core 0.16 adds that of each layer, divided by the experts of a token "
            "(moe_utils.py, switch_load_balancing_loss_func)",
            nearest=f"Megatron's, multiplied by {router_coefficient(job):g}",
        )
    if not prefixes_of(job) and spec.data.corpus != "mock":
        yield Gap(
            what="the job's data (data.path, data.corpus, data.sources)",
            where="data",
            why="Megatron reads token files that its tools/preprocess_data.py wrote",
            nearest="launch.sh ends unless DATA_PATH names the prefix of such files",
            fix="engine: megatron and data.path: /data/my-corpus_text_document, or data.corpus: "
            "mock",
        )
    if spec.model.tokenizer not in ("auto", "bytes") and tokenizer_of(job) is None:
        yield Gap(
            what=f"the tokenizer {spec.model.tokenizer}",
            where="model.tokenizer",
            why=f"it is for the data of the engine {spec.engine}",
            nearest="token numbers as DATA_PATH has them",
        )
    if job.spec.data.held_out != _HELD_OUT:
        yield Gap(
            what=f"data.held_out: {job.spec.data.held_out:g}",
            where="data.held_out",
            why="Megatron divides samples, not files, and launch.sh has no share of the job's data",
            nearest="one sample in a hundred is held out",
        )
    if train.warmup_steps or train.schedule != "constant":
        yield Gap(
            what="the learning rate of each step",
            where="train.schedule",
            why="Megatron's warm-up begins with a rate of 0, Paceline's with the first increment, "
            "and Megatron's decay ends one step after the last",
            nearest="the same curve, one step later",
        )
