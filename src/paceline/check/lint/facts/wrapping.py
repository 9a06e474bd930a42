"""What wrapping, sharding and preparing a model or loader gives back."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline.check.lint.facts.events import Call
from paceline.check.lint.facts.names import (
    ACCELERATOR,
    DATA_PARALLEL,
    DDP,
    DEEPSPEED_INIT,
    FSDP,
    FULLY_SHARD,
)
from paceline.check.lint.facts.values import Value
from paceline.check.lint.facts.walker import Walker

Effect = Callable[[Walker, Call], Value]


def wrapped(model: Value, made: Call, kind: str, instance: str) -> Value:
    """What a call makes of a model, which is in it."""
    return Value(
        kind="model", wrapper=kind, inner=model, instance=instance, call=made, sources=(model,)
    )


def wrap(kind: str, *names: str) -> Effect:
    def effect(walk: Walker, made: Call) -> Value:
        return wrapped(made.argument(0, *names) or Value(), made, kind, made.name)

    return effect


def fully_shard(walk: Walker, made: Call) -> Value:
    """FSDP2 shards in place and gives the same module back."""
    model = made.argument(0, "module") or Value()
    for one in model.any():
        one.wrapper = "fsdp2"
        one.kind = "model"
        one.fields.setdefault("wrapped at", Value(call=made))
    return model


def first_argument(walk: Walker, made: Call) -> Value | None:
    """`torch.compile(model)`, `convert_sync_batchnorm(model)`: the model, for our purposes."""
    model = made.argument(0, "model", "module", "fn")
    return model


def deep_copy(walk: Walker, made: Call) -> Value:
    """Another object like the one that is copied, down to the model under all wrappers."""
    return copied(made.argument(0, "x") or Value())


def copied(value: Value) -> Value:
    inner = copied(value.inner) if value.inner is not None else None
    options = tuple(copied(one) for one in value.options)
    return replace(value, inner=inner, options=options, fields=dict(value.fields))


def prepare(walk: Walker, made: Call) -> Value:
    """`accelerator.prepare(model, loader)`: the same things, owned by the accelerator."""
    results = []
    for one in made.args:
        if one.has_kind("model"):
            results.append(wrapped(one, made, "accelerate", "accelerate.prepared"))
            continue
        kind = next((part.kind for part in one.any() if part.kind is not None), None)
        prepared = Value(kind=kind, call=made, sources=(one,), instance="accelerate.prepared")
        prepared.inner = one
        results.append(prepared)
    if len(results) == 1 and not made.open_ended:
        return results[0]
    return Value(items=results, call=made) if not made.open_ended else Value(call=made)


def fabric_setup(walk: Walker, made: Call) -> Value:
    made_values = prepare(walk, made)
    for one in made_values.items or [made_values]:
        one.instance = "lightning.fabric.prepared"
        if one.wrapper is not None:
            one.wrapper = "fabric"
    return made_values


def deepspeed_engine(walk: Walker, made: Call) -> Value:
    model = made.argument(1, "model") or Value()
    engine = wrapped(model, made, "deepspeed", "deepspeed.DeepSpeedEngine")
    loader = Value(kind="loader", instance="deepspeed.prepared", call=made)
    optimizer = Value(kind="optimizer", instance="deepspeed.prepared", call=made)
    return Value(items=[engine, optimizer, loader, Value(kind="scheduler")], call=made)


def unwrap(walk: Walker, made: Call) -> Value:
    """What is unwrapped is a model, whatever made it."""
    model = made.argument(0, "model", "module") or Value()
    plain = next((one.inner for one in model.any() if one.inner is not None), model)
    plain.kind = plain.kind or "model"
    return plain


EFFECTS: Mapping[str, Callable[[Walker, Call], Value | None]] = {
    DDP: wrap("ddp", "module"),
    FSDP: wrap("fsdp1", "module"),
    DATA_PARALLEL: wrap("dp", "module"),
    "apex.parallel.DistributedDataParallel": wrap("ddp", "module"),
    "ray.train.torch.prepare_model": wrap("ddp", "model"),
    FULLY_SHARD: fully_shard,
    "torch.distributed._composable.replicate": wrap("ddp", "module"),
    "torch.compile": first_argument,
    "torch.jit.script": first_argument,
    "jax.jit": first_argument,
    "jax.pmap": first_argument,
    "flax.nnx.jit": first_argument,
    "mlx.core.compile": first_argument,
    "tensorflow.function": first_argument,
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": first_argument,
    "peft.get_peft_model": first_argument,
    "copy.deepcopy": deep_copy,
    f"{ACCELERATOR}.prepare": prepare,
    f"{ACCELERATOR}.prepare_model": prepare,
    f"{ACCELERATOR}.prepare_data_loader": prepare,
    f"{ACCELERATOR}.unwrap_model": unwrap,
    "accelerate.utils.extract_model_from_parallel": unwrap,
    "lightning.fabric.Fabric.setup": fabric_setup,
    "lightning.fabric.Fabric.setup_dataloaders": fabric_setup,
    "lightning.fabric.Fabric.setup_module": fabric_setup,
    DEEPSPEED_INIT: deepspeed_engine,
    "ray.train.torch.prepare_data_loader": prepare,
}
