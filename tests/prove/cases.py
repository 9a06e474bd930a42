"""The models and the layouts that are proved and run in these tests."""

from dataclasses import replace

from paceline.parallel import Layout
from paceline.profile import DecoderShape
from paceline.prove.proof import ModelRequest, Request

SHAPE = DecoderShape(
    layers=8,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab=256,
    tied_embeddings=False,
)
MIXTRAL = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
SEQ_LEN = 64


def layout(**fields) -> Layout:
    given = {"data": 2, "sharding": "full", "micro_batch": 2, "accumulation": 1}
    return Layout(**{**given, **fields})


def request(of: Layout, precision: str = "bf16", **fields) -> Request:
    given = {"model": ModelRequest(decoder=SHAPE), "seq_len": SEQ_LEN, "is_cuda": False}
    return Request(layout=of, precision=precision, **{**given, **fields})


def compared(of: Layout) -> Request:
    """What real ranks are compared with: every block, and no more blocks than stages need."""
    if of.expert > 1:
        return request(of, model=ModelRequest(config=MIXTRAL), whole=True)
    blocks = 8 if of.pipeline > 1 else 4
    shape = replace(SHAPE, layers=blocks, kv_heads=max(SHAPE.kv_heads, of.tensor))
    return request(of, model=ModelRequest(decoder=shape), whole=True)


def pipeline(ranks: int = 2, schedule: str = "1f1b", chunks: int = 1, **fields) -> Layout:
    return layout(
        **{
            "data": 1,
            "sharding": "none",
            "pipeline": ranks,
            "schedule": schedule,
            "chunks": chunks,
            "accumulation": 4 if ranks == 2 else 8,
            **fields,
        }
    )


def tensor(ranks: int = 2, **fields) -> Layout:
    return layout(**{"data": 1, "sharding": "none", "tensor": ranks, **fields})


ON_TWO = {
    "DDP": layout(sharding="none"),
    "DDP accumulating": layout(sharding="none", accumulation=2),
    "ZeRO-1": layout(sharding="zero1", accumulation=2),
    "ZeRO-2": layout(sharding="zero2", accumulation=2),
    "FSDP2": layout(),
    "FSDP2 accumulating": layout(accumulation=3),
    "FSDP2 reducing each time": layout(accumulation=3, reduce_every_micro_batch=True),
    "FSDP2, recompute": layout(recompute="full"),
    "FSDP2, recompute every 2": layout(recompute="full", recompute_every=2),
    "FSDP2, selective recompute": layout(recompute="selective"),
    "tensor": tensor(),
    "tensor, whole tokens": tensor(sequence_parallel=False),
    "tensor accumulating": tensor(accumulation=3),
    "tensor, recompute": tensor(recompute="full"),
    "tensor, selective recompute": tensor(recompute="selective"),
    "ring": layout(data=1, context=2),
    "ring, recompute": layout(data=1, context=2, recompute="full"),
    "ring, nothing sharded": layout(data=1, context=2, sharding="none"),
    "Ulysses": layout(data=1, context=2, context_kind="ulysses"),
    "GPipe": pipeline(schedule="gpipe"),
    "1F1B": pipeline(),
    "1F1B, recompute": pipeline(recompute="full"),
    "1F1B, selective recompute": pipeline(recompute="selective"),
    "interleaved": pipeline(schedule="interleaved", chunks=2),
    "zero-bubble": pipeline(schedule="zero-bubble"),
    "zero-bubble in a v": pipeline(schedule="zero-bubble", chunks=2),
    "DualPipe-V": pipeline(schedule="dualpipe-v", chunks=2),
    "experts": layout(expert=2),
    "experts, nothing sharded": layout(expert=2, sharding="none"),
    "experts, recompute": layout(expert=2, recompute="full", accumulation=2),
}
MORE_ON_TWO = {
    name: ON_TWO.pop(name)
    for name in (
        *("DDP accumulating", "FSDP2 reducing each time", "FSDP2, recompute every 2"),
        *("tensor, whole tokens", "tensor accumulating", "tensor, recompute", "ring, recompute"),
        *("ring, nothing sharded", "GPipe", "1F1B, recompute", "zero-bubble in a v"),
        *("experts, nothing sharded", "experts", "ZeRO-1", "FSDP2, selective recompute"),
        *("tensor, selective recompute", "1F1B", "interleaved", "zero-bubble", "ring"),
    )
}
"""Slow, and much like others."""

ON_FOUR = {
    "HSDP": layout(data=4, sharding="hybrid", shard=2),
    "FSDP2 x tensor, recompute": layout(tensor=2, recompute="full", accumulation=2),
    "FSDP2 x ring": layout(context=2),
    "FSDP2 x 1F1B": pipeline(data=2, sharding="full"),
    "experts on 4": layout(data=4, expert=4),
}
MORE_ON_FOUR = {
    "tensor 4": tensor(4),
    "FSDP2 x tensor": layout(tensor=2),
    "DDP x tensor": tensor(data=2, accumulation=2),
    "FSDP2 x tensor, selective recompute": layout(tensor=2, recompute="selective"),
    "FSDP2 x Ulysses": layout(context=2, context_kind="ulysses"),
    "tensor x ring": layout(data=1, tensor=2, context=2),
    "FSDP2 x experts": layout(data=4, expert=2),
    "GPipe on 4": pipeline(4, "gpipe"),
    "1F1B on 4": pipeline(4),
    "interleaved on 4": pipeline(4, "interleaved", 2),
    "zero-bubble on 4": pipeline(4, "zero-bubble"),
    "zero-bubble in a v on 4": pipeline(4, "zero-bubble", 2),
    "DualPipe-V on 4": pipeline(4, "dualpipe-v", 2),
    "DDP x 1F1B": pipeline(data=2),
    "tensor x 1F1B": pipeline(tensor=2),
    "FSDP2 x GPipe": pipeline(data=2, sharding="full", schedule="gpipe"),
    "FSDP2 x interleaved": pipeline(data=2, sharding="full", schedule="interleaved", chunks=2),
    "FSDP2 x zero-bubble": pipeline(data=2, sharding="full", schedule="zero-bubble"),
    "FSDP2 x zero-bubble in a v": pipeline(
        data=2, sharding="full", schedule="zero-bubble", chunks=2
    ),
    "FSDP2 x DualPipe-V": pipeline(data=2, sharding="full", schedule="dualpipe-v", chunks=2),
}
"""Slow, and much like others."""
