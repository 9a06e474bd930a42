"""A plan in Megatron Core's own words: fields of its TransformerConfig, and its ways to shard. For
Megatron-LM, whose flags are these fields, and for Megatron Bridge.

Source of the words: megatron-core 0.16.1, core/transformer/transformer_config.py,
core/model_parallel_config.py; Megatron-LM core_r0.16, megatron/training/arguments.py.
"""

from collections.abc import Mapping
from math import ceil
from typing import Any

from paceline.choices.pipeline_schedules import LOOPED
from paceline.estimate.stages import blocks_by_stage
from paceline.job import Job
from paceline.job.engine import ENGINE_NAMES
from paceline.job.sources import tokenizer_folder
from paceline.job.train_rules import decay_steps
from paceline.parallel.stages import is_v_shaped, num_stages
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.profile import Block, ModelProfile
from paceline.render.model import config_of, is_renormed, rotary_base, router_coefficient
from paceline.render.shell import presence_lines

Words = dict[str, Any]
"""Field -> value."""

TOLD = frozenset(
    {
        *("data.path", "data.corpus", "data.sources", "model.tokenizer"),
        *("train.steps", "train.optimizer", "train.learning_rate", "train.warmup_steps"),
        *("train.schedule", "train.final_learning_rate"),
        *("train.weight_decay", "train.clip_norm", "train.seed", "train.gradient_compression"),
        *("train.betas", "train.eps", "train.decay_steps", "train.router_loss"),
        *("train.token_dispatcher", "train.async_expert"),
        *("checkpoint.every", "evaluate.every", "evaluate.samples", "recovery.max_restarts"),
    }
)
"""Settings that these words say, beside the plan; `data` is a gap of its own."""

SHARDING = {"zero2": "optim_grads", "full": "optim_grads_params", "hybrid": "optim_grads_params"}
"""Layout.sharding -> Megatron FSDP's `data_parallel_sharding_strategy`. ZeRO-1 is the distributed
optimizer, which needs no FSDP."""


def prefixes_of(job: Job) -> list[str]:
    """Token files of the job, each by its prefix; none where its data are text for another
    engine."""
    if not ENGINE_NAMES[job.spec.engine].is_megatron or job.spec.data.path is None:
        return []
    asked = job.spec.data.path
    return [str(job.folder / each) for each in ([asked] if isinstance(asked, str) else asked)]


def tokenizer_of(job: Job) -> str | None:
    """Folder of the job's tokenizer; None where token numbers are taken as they are."""
    return tokenizer_folder(job) if ENGINE_NAMES[job.spec.engine].is_megatron else None


def needed_lines(job: Job) -> list[str]:
    """Lines of a script that name at once what the job asks for and the node does not have."""
    tokenizer = tokenizer_of(job)
    return [
        *presence_lines([tokenizer] if tokenizer is not None else []),
        *presence_lines(
            [f"{prefix}.idx" for prefix in prefixes_of(job)], unless=["DATA_PATH", "MOCK_DATA"]
        ),
    ]


def uses_fsdp(plan: Plan) -> bool:
    """Whether the plan needs Megatron FSDP."""
    return plan.layout.sharding in SHARDING and plan.layout.data * plan.layout.context > 1


def copies(plan: Plan) -> int:
    """Groups of ranks that each share one copy of the sharded state: more than 1 with HSDP."""
    layout = plan.layout
    return layout.data * layout.context // layout.shard_degree if layout.sharding == "hybrid" else 1


_LEAST_POSITIONS = 16
"""A guess: a table of fewer learned positions is something else, such as BLOOM's norm."""


def learned_positions(profile: ModelProfile) -> int:
    """Rows of the table of positions of a model built like GPT-2: LayerNorm, biases everywhere,
    GELU without a gate, causal. 0 for every other one."""
    block, width = profile.blocks[0], profile.blocks[0].hidden
    biases = (block.heads + 2 * block.kv_heads) * block.head_dim + block.ffn + 2 * width
    head = 2 * width + (0 if profile.tied else profile.head_outputs * width)
    is_plain = not (block.gated or block.relu or block.parallel or block.query_key_norm)
    rows = profile.num_embedding_parameters // max(width, 1) - profile.head_outputs
    is_like = (
        is_plain
        and block.causal
        and not block.experts
        and block.vector_parameters == 4 * width + biases
        and profile.num_head_parameters == head
        and profile.num_embedding_parameters % width == 0
    )
    return rows if is_like and rows >= _LEAST_POSITIONS else 0


def model_words(plan: Plan, job: Job) -> Words:
    """The model of a plan that `megatron_gaps` does not refuse."""
    shape, block, profile = plan.decoder, plan.profile.blocks[0], plan.profile
    is_gpt = learned_positions(profile) > 0
    found: Words = {
        "num_layers": profile.num_blocks,
        "hidden_size": block.hidden,
        "ffn_hidden_size": block.ffn or block.expert_ffn,
        "num_attention_heads": block.heads,
        "num_query_groups": block.kv_heads,
        "kv_channels": block.value_dim if block.kv_rank else block.head_dim,
        "normalization": "LayerNorm" if is_gpt else "RMSNorm",
        "layernorm_epsilon": config_of(job).get("rms_norm_eps", 1e-5)
        if shape is None
        else shape.norm_eps,
        "gated_linear_unit": not is_gpt,
        "add_bias_linear": is_gpt,
        "add_qkv_bias": shape is not None and shape.qkv_bias,
        "qk_layernorm": block.query_key_norm or block.kv_rank > 0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    routed = next((each for each in profile.blocks if each.experts), None)
    if routed is not None:
        found |= {
            "num_moe_experts": routed.experts,
            "moe_router_topk": routed.experts_per_token,
            "moe_ffn_hidden_size": routed.expert_ffn,
            **_dispatch_words(plan),
            **_router_words(job),
        }
        if routed.shared_ffn:
            found["moe_shared_expert_intermediate_size"] = routed.shared_ffn
        if len(profile.blocks) > 1:
            parts = (f"[{int(each.experts > 0)}]*{each.count}" for each in profile.blocks)
            found["moe_layer_freq"] = f"({'+'.join(parts)})"
    return found | (_latent_words(block, job) if block.kv_rank else {})


def _dispatch_words(plan: Plan) -> Words:
    """core/transformer/moe/token_dispatcher.py, core_v0.16.1: flex "requires TPxEP > 1", and DeepEP
    takes probabilities in float32."""
    found: Words = {"moe_token_dispatcher_type": "alltoall"}
    if plan.layout.expert > 1:
        if plan.token_dispatcher == "deepep":
            found = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
            found["moe_router_dtype"] = "fp32"
        if plan.async_expert:
            found["overlap_moe_expert_parallel_comm"] = True
    return found


def _latent_words(block: Block, job: Job) -> Words:
    """Attention of DeepSeek-V3. What YaRN has besides is Megatron's default for it, and no flag of
    core 0.16.1: `deepseek_differs` refuses other values."""
    found: Words = {
        "multi_latent_attention": True,
        "kv_lora_rank": block.kv_rank,
        "qk_head_dim": block.head_dim - block.rope_dim,
        "qk_pos_emb_head_dim": block.rope_dim,
        "v_head_dim": block.value_dim,
        "rope_type": "rope",
    }
    if block.query_rank:
        found["q_lora_rank"] = block.query_rank
    if yarn := yarn_of(config_of(job)):
        found |= {"rope_type": "yarn", "rotary_scaling_factor": float(yarn["factor"])}
        found |= {name: float(yarn.get(name, 0)) for name in ("mscale", "mscale_all_dim")}
    return found


def yarn_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """How a config.json stretches rotary positions; empty where it does not."""
    stretched = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = stretched.get("rope_type", stretched.get("type", "default"))
    return stretched if kind != "default" else {}


def deepseek_differs(profile: ModelProfile, config: Mapping[str, Any]) -> str:
    """What these words cannot say of a DeepSeek-V3; empty where they say all."""
    yarn, usual = yarn_of(config), {"beta_fast": 32, "beta_slow": 1}
    usual["original_max_position_embeddings"] = 4096
    kind = yarn.get("rope_type", yarn.get("type", "yarn"))
    checks = {
        "other norms or biases": any(
            block.vector_parameters != 2 * block.hidden + block.query_rank + block.kv_rank
            for block in profile.blocks
        ),
        "weights of experts that do not add up to 1": not config["norm_topk_prob"],
        f"rotary positions stretched as {kind}": kind != "yarn",
        "another YaRN": any(yarn.get(name, value) != value for name, value in usual.items()),
    }
    return next((name for name, has in checks.items() if has), "")


def _router_words(job: Job) -> Words:
    """Routed experts beyond their sizes. Megatron Core takes the softmax of the chosen experts
    alone, as Mixtral, unless it is told to take it before (transformer_config.py, 0.16.1)."""
    config = config_of(job)
    found: Words = {"moe_router_pre_softmax": not is_renormed(job)}
    if config.get("model_type") == "deepseek_v3":
        found = {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        }
        if config["n_group"] > 1:
            found["moe_router_num_groups"] = config["n_group"]
            found["moe_router_group_topk"] = config["topk_group"]
    if balance := router_coefficient(job):
        found |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": balance}
    return found


def position_words(plan: Plan, job: Job) -> Words:
    """Learned or rotary positions; their base is Megatron's default where nobody knows it."""
    if learned_positions(plan.profile):
        return {"position_embedding_type": "learned_absolute"}
    return {"position_embedding_type": "rope", "rotary_base": rotary_base(plan, job) or 10_000}


def parallel_words(plan: Plan) -> Words:
    """Degrees, pipeline and recomputation."""
    layout, blocks = plan.layout, plan.profile.num_blocks
    found: Words = {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.tensor > 1 and layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
    }
    if any(block.experts for block in plan.profile.blocks):
        # Left out, it is the tensor degree: other experts than were planned (`routed_split`).
        found["expert_tensor_parallel_size"] = layout.tensor if layout.expert == 1 else 1
    if layout.context > 1:
        found["cp_comm_type"] = "a2a" if layout.context_kind == "ulysses" else "p2p"
    counts = stage_blocks(plan)
    if len(set(counts)) > 1:
        found["pipeline_model_parallel_layout"] = stage_text(counts)
    elif virtual(plan) > 1:
        found["virtual_pipeline_model_parallel_size"] = virtual(plan)
    if layout.recompute == "selective":
        found["recompute_granularity"] = "selective"
    elif layout.recompute == "full":
        stage = max(sum(counts[rank :: layout.pipeline]) for rank in range(layout.pipeline))
        found |= {"recompute_granularity": "full"}
        if layout.recompute_every == 1:
            found |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        else:
            # Of each virtual stage Megatron recomputes so many blocks, the first ones.
            each = ceil(stage / virtual(plan) / layout.recompute_every)
            found |= {"recompute_method": "block", "recompute_num_layers": each}
    assert sum(counts) == blocks, f"{counts} are not {blocks} blocks"
    return found


def virtual(plan: Plan) -> int:
    """Virtual stages of each pipeline rank that Megatron runs the plan with."""
    layout = plan.layout
    return layout.chunks if layout.pipeline > 1 and layout.schedule in LOOPED else 1


def stage_blocks(plan: Plan) -> tuple[int, ...]:
    """Blocks of each stage, in the order they are computed: as the plan was priced."""
    layout, blocks = plan.layout, plan.profile.num_blocks
    stages = layout.pipeline * virtual(plan)
    if stages != num_stages(layout) or is_v_shaped(layout):  # a schedule that Megatron lacks
        return tuple(len(range(stage, blocks, stages)) for stage in range(stages))
    return tuple(map(len, blocks_by_stage(layout, case_of_plan(plan))))


def stage_text(counts: tuple[int, ...]) -> str:
    """Megatron's notation of uneven stages: embedding, blocks, loss.

    >>> stage_text((3, 3, 2, 1))
    'Et*3|t*3|t*2|tL'
    """

    def blocks(count: int) -> str:
        return f"t*{count}" if count > 1 else "t" * count

    texts = [blocks(count) for count in counts]
    texts[0] = "E" + texts[0]
    texts[-1] += "L"
    return "|".join(texts)


def batch_words(plan: Plan, job: Job) -> Words:
    """Sizes of a step. Megatron divides the rest: data ranks and accumulation follow."""
    return {
        "micro_batch_size": plan.layout.micro_batch,
        "global_batch_size": plan.layout.global_batch,
        "train_iters": job.spec.train.steps,
    }


def schedule_words(job: Job) -> Words:
    """Learning rate. The peak is reached after the warm-up, and the end at the last step."""
    train = job.spec.train
    end = 1.0 if train.schedule == "constant" else train.final_learning_rate
    found: Words = {
        "lr": train.learning_rate,
        "min_lr": float(f"{train.learning_rate * end:.12g}"),  # 3e-05, not 2.9999999999999997e-05
        "lr_decay_style": "WSD" if train.schedule == "wsd" else train.schedule,
        "lr_warmup_iters": train.warmup_steps,
        "lr_decay_iters": train.steps,
    }
    if train.schedule == "wsd":
        found |= {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": decay_steps(train)}
    return found


def optimizer_words(job: Job) -> Words:
    """AdamW, with decay on matrices only, which is Megatron's way;
    or SGD with its momentum."""
    train = job.spec.train
    found: Words = {
        "optimizer": "sgd" if train.optimizer == "sgd" else "adam",
        "weight_decay": train.weight_decay,
        "clip_grad": train.clip_norm or 0.0,
    }
    if train.optimizer != "sgd":
        found |= dict(zip(("adam_beta1", "adam_beta2"), train.betas, strict=True))
        found["adam_eps"] = train.eps
    return found


def planned_for(plan: Plan) -> list[str]:
    """A comment, where the plan's memory and time are another engine's."""
    engine = ENGINE_NAMES[plan.engine]
    if engine.is_megatron and engine.files:  # not an older one, which has none of its own
        return []
    return [
        f"Memory and time were planned for the engine {plan.engine}: `engine: megatron` in the job",
        "plans for what Megatron keeps and hides.",
    ]
