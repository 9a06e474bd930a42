# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# FSDP2 over 32 ranks on 4 nodes x 8 H100-SXM.
# micro-batch 2 x 1 accumulation step x 32 data ranks = 64 samples a step.
# For torchtitan 0.3.0: --module paceline_job --config job

import os

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import Embedding, Linear
from torchtitan.models import llama3 as family
from torchtitan.models.common import ComplexRoPE, RMSNorm
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

VOCABULARY = 128256


def model() -> ModelSpec:
    width, vocabulary = 4096, VOCABULARY
    rope = ComplexRoPE.Config(
        dim=128,
        max_seq_len=4096,
        theta=500000.0,
    )
    layers = family._build_llama3_layers(
        n_layers=32,
        dim=width,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=14336,
        rope=rope,
        attn_backend="flex",
    )
    config = Llama3Model.Config(
        dim=width,
        vocab_size=vocabulary,
        enable_weight_tying=False,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=width,
            param_init=family._EMBEDDING_INIT,
        ),
        norm=RMSNorm.Config(normalized_shape=width, param_init=family._NORM_INIT),
        lm_head=Linear.Config(
            in_features=width,
            out_features=vocabulary,
            param_init=family._output_linear_init(width),
        ),
        layers=layers,
    )
    return ModelSpec(
        name="llama3",
        flavor="paceline",
        model=config,
        parallelize_fn=family.parallelize_llama,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=None,
        state_dict_adapter=Llama3StateDictAdapter,
    )


def adamw(pattern: str, weight_decay: float) -> ParamGroupConfig:
    values = {
        "lr": 0.0003,
        "betas": (0.9, 0.95),
        "eps": 1e-08,
        "weight_decay": weight_decay,
    }
    return ParamGroupConfig(
        pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=values
    )


def job() -> Trainer.Config:
    loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    return Trainer.Config(
        hf_assets_path=os.environ.get("HF_ASSETS", "assets"),
        dump_folder=".",
        model_spec=model(),
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        dataloader=HuggingFaceTextDataLoader.Config(
            dataset=os.environ.get("DATASET", "c4"),
            dataset_path=os.environ.get("DATASET_PATH"),
        ),
        optimizer=OptimizersContainer.Config(
            # Weight decay is for matrices: norms have none.
            param_groups=[
                adamw(r".*norm.*", 0.0),
                adamw(r".*", 0.1),
            ],
        ),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=20,
            decay_type="cosine",
            decay_ratio=None,
            min_lr_factor=0.1,
        ),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=64,
            seq_len=4096,
            steps=1000,
            max_norm=1.0,
            mixed_precision_param="bfloat16",
            enable_cpu_offload=False,
            disable_cuda_graphs=False,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=1,
            data_parallel_shard_degree=32,
            fsdp_reshard_after_forward="always",
            tensor_parallel_degree=1,
            enable_sequence_parallel=True,
            context_parallel_degree=1,
            context_parallel_load_balancer="ptrr",
            pipeline_parallel_degree=1,
            expert_parallel_degree=1,
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=1000,
            keep_latest_k=3,
            last_save_model_only=False,
        ),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(enable=True),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=0),
    )
