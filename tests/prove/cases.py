"""The model and the layouts that are proved and run in these tests."""

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
SEQ_LEN = 64


def layout(**fields) -> Layout:
    given = {"data": 2, "sharding": "full", "micro_batch": 2, "accumulation": 1}
    return Layout(**{**given, **fields})


def request(of: Layout, precision: str = "bf16", **fields) -> Request:
    given = {"model": ModelRequest(decoder=SHAPE), "seq_len": SEQ_LEN, "is_cuda": False}
    return Request(layout=of, precision=precision, **{**given, **fields})


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
}
IN_PRETENDED_WORLD = {
    "tensor": layout(data=1, tensor=2, sharding="none"),
    "tensor, recompute": layout(data=1, tensor=2, sharding="none", recompute="full"),
    "ring": layout(data=1, context=2),
    "Ulysses": layout(data=1, context=2, context_kind="ulysses"),
    "1F1B": layout(data=1, pipeline=2, sharding="none", accumulation=4),
    "interleaved": layout(
        data=1, pipeline=2, sharding="none", accumulation=4, schedule="interleaved", chunks=2
    ),
}
ON_FOUR = {"HSDP": layout(data=4, sharding="hybrid", shard=2)}
IN_PRETENDED_WORLD |= {
    "FSDP2 x tensor": layout(tensor=2),
    "FSDP2 x pipeline": layout(pipeline=2, accumulation=4),
    "zero-bubble": layout(
        data=1, pipeline=4, sharding="none", accumulation=8, schedule="zero-bubble", chunks=2
    ),
}
