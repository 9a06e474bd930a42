"""torchtitan: its job as a Python function of its config classes, and the script that starts it.

Since 0.3 torchtitan has no TOML: `--module` and `--config` name a function that returns a
`Trainer.Config`. Leaves out: models other than those of Llama's shape, Qwen3's, dense or with
routed experts, and gpt-oss; its registry has more.
"""

from json import dumps

from paceline.catalog.engines import load_engines
from paceline.estimate.stages import blocks_by_stage
from paceline.job import Job
from paceline.job.sources import tokenizer_folder
from paceline.job.train_rules import decay_steps
from paceline.parallel.stages import torch_class
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.render.carried import OF_PROGRAM
from paceline.render.engine import Files, Gap
from paceline.render.environment import (
    export_lines,
    meeting_lines,
    restart_words,
    torchrun_options,
)
from paceline.render.model import config_of, rotary_base
from paceline.render.shell import presence_lines, script
from paceline.render.text import commented, header
from paceline.render.torchtitan_gaps import VERSION, is_torchtitan, registered, titan_gaps
from paceline.render.torchtitan_gaps import model_gaps as model_gaps

MODULE = "paceline_job"

CARRIES = OF_PROGRAM | {
    *("data.sources", "model.tokenizer", "train.compile", "recovery.max_restarts"),
    *("train.async_tensor", "train.fp8_recipe", "train.attention"),
}
"""Settings that the files say, beside the plan; `data` is a gap of its own."""


def render(plan: Plan, job: Job) -> Files:
    """`paceline_job.py`, the job as torchtitan's config, and `launch.sh`, run on every node."""
    return {f"{MODULE}.py": _config(plan, job), "launch.sh": _launch(plan, job)}


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """What torchtitan 0.3 cannot express."""
    return titan_gaps(plan, job)


def rows_of(job: Job) -> str | None:
    """Folder of the job's rows; None where its data are text for another engine."""
    if not is_torchtitan(job) or not isinstance(job.spec.data.path, str):
        return None
    return str(job.folder / job.spec.data.path)


def assets_of(job: Job) -> str | None:
    """Folder of the job's tokenizer, which torchtitan reads."""
    return tokenizer_folder(job) if is_torchtitan(job) else None


def stages(plan: Plan) -> tuple[range, ...]:
    """The blocks of each stage, as the plan was priced."""
    return blocks_by_stage(plan.layout, case_of_plan(plan))


def _config(plan: Plan, job: Job) -> str:
    train, layout = job.spec.train, plan.layout
    about = header(
        plan,
        job,
        f"For torchtitan {VERSION}: --module {MODULE} --config job",
        *(["Needs torchao, which has the float8 products."] if plan.precision == "fp8" else []),
        *(
            []
            if plan.engine == "torchtitan"
            else [
                f"Memory and time were planned for the engine {plan.engine}: `engine: torchtitan`",
                "in the job plans for what torchtitan keeps and hides.",
            ]
        ),
    )
    decay = {"constant": "0.0", "wsd": f"{decay_steps(train) / train.steps:.6g}"}.get(
        train.schedule, "None"
    )
    shape = "cosine" if train.schedule == "cosine" else "linear"
    end = 1.0 if train.schedule == "constant" else train.final_learning_rate
    clip = 'float("inf")' if train.clip_norm is None else repr(train.clip_norm)
    rows = rows_of(job)  # `c4_test` is the data set that reads rows of a folder as they are
    path = f", {dumps(rows)}" if rows is not None else ""
    per_rank = layout.micro_batch * (layout.accumulation if layout.pipeline > 1 else 1)
    lines = [
        commented(about).rstrip("\n"),
        _imports(plan, job),
        *_model(plan, job),
        "def adamw(pattern: str, weight_decay: float) -> ParamGroupConfig:",
        "    values = {",
        f'        "lr": {train.learning_rate!r},',
        f'        "betas": {train.betas!r},',
        f'        "eps": {train.eps!r},',
        '        "weight_decay": weight_decay,',
        "    }",
        "    return ParamGroupConfig(",
        '        pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=values',
        "    )",
        "",
        "",
        "def job() -> Trainer.Config:",
        "    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)",
        "    return Trainer.Config(",
        f'        hf_assets_path=os.environ.get("HF_ASSETS", {dumps(assets_of(job) or "assets")}),',
        '        dump_folder=".",',
        "        model_spec=model(),",
        "        loss=ChunkedLossWrapper.Config(loss_fn=loss),",
        "        dataloader=HuggingFaceTextDataLoader.Config(",
        f'            dataset=os.environ.get("DATASET", {dumps("c4_test" if rows else "c4")}),',
        f'            dataset_path=os.environ.get("DATASET_PATH"{path}),',
        "        ),",
        "        optimizer=OptimizersContainer.Config(",
        "            # Weight decay is for matrices: norms have none.",
        "            param_groups=[",
        '                adamw(r".*norm.*", 0.0),',
        f'                adamw(r".*", {train.weight_decay!r}),',
        "            ],",
        "        ),",
        "        lr_scheduler=LRSchedulersContainer.Config(",
        f"            warmup_steps={train.warmup_steps},",
        f'            decay_type="{shape}",',
        f"            decay_ratio={decay},",
        f"            min_lr_factor={end!r},",
        "        ),",
        "        training=TrainingConfig(",
        f"            local_batch_size={per_rank},",
        f"            global_batch_size={layout.global_batch},",
        f"            seq_len={plan.profile.seq_len},",
        f"            steps={train.steps},",
        f"            max_norm={clip},",
        f'            mixed_precision_param="{_narrow(plan)}",',
        f"            enable_cpu_offload={layout.offload != 'none'},",
        # They support neither pipelines nor this exchange among expert ranks (trainer.py, 0.3.0).
        f"            disable_cuda_graphs={layout.pipeline > 1 or layout.expert > 1},",
        "        ),",
        *_parallelism(plan),
        "        checkpoint=CheckpointManager.Config(",
        "            enable=True,",
        f"            interval={plan.checkpoint_every},",
        f"            keep_latest_k={max(2, job.spec.checkpoint.keep_last)},",
        "            last_save_model_only=False,",
        "        ),",
        f"        activation_checkpoint={_recompute(plan)},",
        f"        compile=CompileConfig({_compiled(plan, train.compile)}),",
        "        metrics=MetricsProcessor.Config(log_freq=1),",
        f"        debug=DebugConfig(seed={train.seed}),",
        "    )",
        "",
    ]
    return "\n".join(lines)


_IMPORTS = """
import os

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
{pipeline}from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
{imports}from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer
"""


_PIPELINE = "from torchtitan.distributed.pipeline_parallel import pipeline_llm\n"
_PARTS = "from torchtitan.models.common import Embedding, Linear\n"
_REGISTERED = "from torchtitan.models import gpt_oss as family\n"
_LLAMA = """from torchtitan.models import llama3 as family
from torchtitan.models.common import ComplexRoPE, RMSNorm
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
"""
_QWEN = """from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.models import qwen3 as family
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
"""


def _imports(plan: Plan, job: Job) -> str:
    """What the file needs of torchtitan; a model of its registry brings its own parts."""
    if registered(config_of(job)):
        return _IMPORTS.format(pipeline="", imports=_REGISTERED)
    family = _LLAMA if plan.decoder is not None else _QWEN
    return _IMPORTS.format(pipeline=_PIPELINE, imports=_PARTS + family)


def _model(plan: Plan, job: Job) -> list[str]:
    """Lines for a model of torchtitan's registry, or one of the plan's own sizes, put together as
    the registry does it."""
    attention = "varlen" if plan.attention == "flash" else "flex"
    if name := registered(config_of(job)):
        asked = f'moe_comm_backend="standard", attn_backend="{attention}"'
        return [
            f"VOCABULARY = {plan.profile.head_outputs}",
            "",
            "",
            "def model() -> ModelSpec:",
            f'    return family.model_registry("{name}", {asked})',
            "",
            "",
        ]
    profile, block, is_llama = plan.profile, plan.profile.blocks[0], plan.decoder is not None
    tied, name = profile.tied, "Llama3" if is_llama else "Qwen3"
    head = "_output_linear_init(width)" if is_llama else "_LINEAR_INIT"
    norm = "RMSNorm.Config(normalized_shape=width, param_init=family._NORM_INIT)"
    layers = [f"hidden_dim={block.ffn}"]
    if block.experts:
        layers = [
            f"moe_hidden_dim={block.expert_ffn}",
            f"num_experts={block.experts}",
            f"top_k={block.experts_per_token}",
            'moe_comm_backend="standard"',
        ]
    if not is_llama:
        layers.insert(0, f"head_dim={block.head_dim}")
    hook = "register_moe_load_balancing_hook" if block.experts else "None"
    return [
        f"VOCABULARY = {profile.head_outputs}",
        "",
        "",
        "def model() -> ModelSpec:",
        f"    width, vocabulary = {block.hidden}, VOCABULARY",
        f"    rope = {'ComplexRoPE' if is_llama else 'CosSinRoPE'}.Config(",
        f"        dim={block.head_dim},",
        f"        max_seq_len={profile.seq_len},",
        f"        theta={float(rotary_base(plan, job) or 0)!r},",
        "    )",
        f"    layers = family._build_{name.lower()}_{'moe_' * bool(block.experts)}layers(",
        f"        n_layers={profile.num_blocks},",
        "        dim=width,",
        f"        n_heads={block.heads},",
        f"        n_kv_heads={block.kv_heads},",
        *(f"        {each}," for each in layers),
        "        rope=rope,",
        f'        attn_backend="{attention}",',
        "    )",
        f"    config = {name}Model.Config(",
        "        dim=width,",
        "        vocab_size=vocabulary,",
        f"        enable_weight_tying={tied},",
        "        tok_embeddings=Embedding.Config(",
        "            num_embeddings=vocabulary,",
        "            embedding_dim=width,",
        f"            param_init=family._EMBEDDING_{'SKIP_' if tied else ''}INIT,",
        "        ),",
        f"        norm={norm if is_llama else 'family._qwen3_norm(width)'},",
        "        lm_head=Linear.Config(",
        "            in_features=width,",
        "            out_features=vocabulary,",
        f"            param_init=family.{head},",
        "        ),",
        "        layers=layers,",
        "    )",
        *(_float8(plan) if plan.precision == "fp8" else []),
        "    return ModelSpec(",
        f'        name="{name.lower()}",',
        '        flavor="paceline",',
        "        model=config,",
        f"        parallelize_fn=family.parallelize_{'llama' if is_llama else 'qwen3'},",
        "        pipelining_fn=pipeline_llm,",
        f"        post_optimizer_build_fn={hook},",
        f"        state_dict_adapter={name}StateDictAdapter,",
        "    )",
        "",
        "",
    ]


def _float8(plan: Plan) -> list[str]:
    """All linears but the head and the router, and the experts: components/quantization of 0.3.0,
    whose float8 has scales of rows; 0.2 has tensorwise ones too."""
    kind, which = "Float8", 'recipe_name="rowwise", filter_fqns=["lm_head", "router.gate"]'
    if plan.fp8_recipe == "mxfp8":
        kind, which = "MXFP8", 'fqns=["attention", "feed_forward"]'
    converters = [(f"{kind}LinearConverter", f"{which}, ")]
    if plan.profile.blocks[0].experts:
        converters.append((f"{kind}GroupedExpertsConverter", ""))
    return [
        "    from torchtitan.components import quantization",
        "",
        "    converters = [",
        *(
            f"        quantization.{name}.Config({words}model_compile_enabled=True),"
            for name, words in converters
        ),
        "    ]",
        "    for each in converters:",
        "        config = each.build().convert(config)",
    ]


def _parallelism(plan: Plan) -> list[str]:
    layout = plan.layout
    if layout.sharding == "none":
        replicate, shard = layout.data, 1
    elif layout.sharding == "hybrid":
        shard = max(1, layout.shard_degree // layout.context)
        replicate = layout.data // shard
    else:
        replicate, shard = 1, layout.data
    reshard = "always" if layout.sharding in ("full", "hybrid") else "never"
    lines = [
        "        parallelism=ParallelismConfig(",
        f"            data_parallel_replicate_degree={replicate},",
        f"            data_parallel_shard_degree={shard},",
        f'            fsdp_reshard_after_forward="{reshard}",',
        f"            tensor_parallel_degree={layout.tensor},",
        f"            enable_sequence_parallel={layout.sequence_parallel},",
        f"            context_parallel_degree={layout.context},",
        '            context_parallel_load_balancer="ptrr",',
        f"            pipeline_parallel_degree={layout.pipeline},",
        f"            expert_parallel_degree={layout.expert},",
    ]
    if layout.pipeline > 1:
        schedule = torch_class(layout).removeprefix("Schedule")
        lines += [
            f'            pipeline_parallel_schedule="{schedule}",',
            f"            pipeline_parallel_microbatch_size={layout.micro_batch},",
            "            module_fqns_per_model_part=[",
            *(f"                {part!r}," for part in _parts(plan)),
            "            ],",
        ]
    return [*lines, "        ),"]


def _parts(plan: Plan) -> list[list[str]]:
    """Modules of each stage by name."""
    parts = [[f"layers.{block}" for block in blocks] for blocks in stages(plan)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return parts


def _compiled(plan: Plan, is_asked: bool) -> str:
    """Blocks are compiled where the job asks for it, float8 needs it, or the plan's time is that of
    compiled blocks."""
    was_planned = load_engines()[plan.engine].host == "compiled"
    wanted = f"enable={is_asked or was_planned or plan.precision == 'fp8'}"
    return wanted + ", enable_async_tensor_parallel=True" * plan.async_tensor


def _recompute(plan: Plan) -> str:
    ways = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}
    return ways[plan.layout.recompute]


def _narrow(plan: Plan) -> str:
    return "float32" if plan.precision in ("fp32", "tf32") else "bfloat16"


def _launch(plan: Plan, job: Job) -> str:
    about = header(
        plan,
        job,
        f"Needs torchtitan {VERSION}, HF_ASSETS (a folder with the tokenizer's files) and the same",
        "folder on every node: checkpoint/ is written here.",
        *restart_words(job),
    )
    options = " ".join(torchrun_options(plan))
    return script(
        about,
        'cd "$(dirname "$0")"',
        *export_lines(plan, restarts=job.spec.recovery.max_restarts > 0),
        *meeting_lines(plan),
        *presence_lines(_given(assets_of(job)), unless=["HF_ASSETS"]),
        *presence_lines(_given(rows_of(job)), unless=["DATASET_PATH"]),
        f"exec torchrun {options} --max-restarts={job.spec.recovery.max_restarts} \\",
        f'  -m torchtitan.train --module {MODULE} --config job "$@"',
    )


def _given(path: str | None) -> list[str]:
    return [] if path is None else [path]
