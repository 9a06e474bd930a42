# Made by Paceline 0.1.0 for the job tiny: rendering again overwrites it.
# data 2 x tensor 4 x pipeline 4 (interleaved, 2 virtual stages), ZeRO-1 on 4 nodes x 8 H100-SXM.
# micro-batch 1 x 32 accumulation steps x 2 data ranks = 64 samples a step.
# For Megatron Bridge 0.3.

import os

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain


DATA = []


def config() -> ConfigContainer:
    data = os.environ["DATA_PATH"].split() if "DATA_PATH" in os.environ else DATA
    if os.environ.get("MOCK_DATA"):
        data = None
    elif data == []:
        raise SystemExit("set DATA_PATH to the prefix of token files, or MOCK_DATA=1")
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=32,
            hidden_size=4096,
            ffn_hidden_size=14336,
            num_attention_heads=32,
            num_query_groups=8,
            kv_channels=128,
            normalization='RMSNorm',
            layernorm_epsilon=1e-05,
            gated_linear_unit=True,
            add_bias_linear=False,
            add_qkv_bias=False,
            qk_layernorm=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=4,
            sequence_parallel=True,
            pipeline_model_parallel_size=4,
            context_parallel_size=1,
            expert_model_parallel_size=1,
            virtual_pipeline_model_parallel_size=2,
            recompute_granularity='selective',
            activation_func=torch.nn.functional.silu,
            pipeline_dtype=torch.bfloat16,
            seq_length=4096,
            position_embedding_type='rope',
            rotary_base=500000,
            share_embeddings_and_output_weights=False,
            vocab_size=128256,
            make_vocab_size_divisible_by=1,
            init_model_with_meta_device=False,
        ),
        train=TrainingConfig(
            micro_batch_size=1,
            global_batch_size=64,
            train_iters=1000,
            eval_interval=100,
            eval_iters=4,
        ),
        optimizer=OptimizerConfig(
            optimizer='adam',
            weight_decay=0.1,
            clip_grad=1.0,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-08,
            lr=0.0003,
            min_lr=3e-05,
            use_distributed_optimizer=True,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style='cosine',
            lr_warmup_iters=20,
            lr_decay_iters=1000,
            start_weight_decay=0.1,
            end_weight_decay=0.1,
        ),
        ddp=DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
        ),
        dist=DistributedInitConfig(
            use_megatron_fsdp=False,
        ),
        dataset=GPTDatasetConfig(
            random_seed=0,
            seq_length=4096,
            blend=None if data is None else (data, None),
            split='99,1,0',
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            dataloader_type='single',
        ),
        tokenizer=TokenizerConfig(
            tokenizer_type='NullTokenizer',
            vocab_size=128255,
        ),
        checkpoint=CheckpointConfig(
            save='checkpoints',
            load='checkpoints',
            save_interval=1000,
            most_recent_k=3,
            ckpt_format='torch_dist',
        ),
        logger=LoggerConfig(
            log_interval=1,
        ),
        rng=RNGConfig(
            seed=1,
        ),
        mixed_precision='bf16_mixed',
    )


if __name__ == "__main__":
    pretrain(config(), forward_step)
