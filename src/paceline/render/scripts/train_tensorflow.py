"""Replicas that train together with TensorFlow, as `train.json` and TF_CONFIG say.

A loop of its own on `tf.Module`: Keras 3 does not train under MultiWorkerMirroredStrategy
(github.com/keras-team/keras/issues/20585). The first worker writes a checkpoint every
`checkpoint_every` steps into `checkpoints/`, from whose newest all go on, and at the end exports
`saved_model/`. Where `initial.npz` lies beside this file, training begins with the weights in it,
by the names that they have here.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_plain
import numpy as np
import tensorflow as tf

CHECKPOINTS, EXPORT = Path("checkpoints"), Path("saved_model")
INITIAL = lm_plain.FOLDER / "initial.npz"
NARROW = {"bf16": tf.bfloat16}


def weight_shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name of each weight -> its shape."""
    sizes = settings["decoder"]
    hidden, ffn = sizes["hidden"], sizes["ffn"]
    wide, narrow = (sizes["head_dim"] * sizes[heads] for heads in ("heads", "kv_heads"))
    block: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "query.weight": (wide, hidden),
        "key.weight": (narrow, hidden),
        "value.weight": (narrow, hidden),
        "out.weight": (hidden, wide),
        "ffn_norm.weight": (hidden,),
        "gate.weight": (ffn, hidden),
        "up.weight": (ffn, hidden),
        "down.weight": (hidden, ffn),
    }
    if sizes["qkv_bias"]:
        block |= {"query.bias": (wide,), "key.bias": (narrow,), "value.bias": (narrow,)}
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (sizes["vocab"], hidden)}
    for number in range(sizes["layers"]):
        shapes |= {f"blocks.{number}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (hidden,)
    return (
        shapes
        if sizes["tied_embeddings"]
        else shapes | {"output.weight": shapes["embedding.weight"]}
    )


def initial_weights(settings: dict[str, Any]) -> list[np.ndarray]:
    """Weights of `initial.npz`, or drawn from the seed: equal on every worker."""
    shapes = weight_shapes(settings)
    if INITIAL.exists():
        with np.load(INITIAL) as kept:
            return [kept[name].astype(np.float32) for name in shapes]
    return [
        np.full(shape, name.endswith("norm.weight"), np.float32)
        if len(shape) < 2
        else 0.02 * tf.random.stateless_normal(shape, seed=[settings["seed"], place]).numpy()
        for place, (name, shape) in enumerate(shapes.items())
    ]


class LanguageModel(tf.Module):
    """Tokens -> logits of the next one: a Llama, or with biases a Qwen2."""

    def __init__(self, settings: dict[str, Any], values: list[np.ndarray]) -> None:
        super().__init__()
        self.weights = [tf.Variable(each, dtype=tf.float32) for each in values]
        self.settings = json.dumps(settings)  # text, which a SavedModel need not follow

    def __call__(self, tokens: tf.Tensor) -> tf.Tensor:
        settings = json.loads(self.settings)
        narrow = NARROW.get(settings["precision"], tf.float32)
        sizes, names = settings["decoder"], weight_shapes(settings)
        weight = dict(zip(names, self.weights, strict=True))

        def linear(name: str, x: tf.Tensor) -> tf.Tensor:
            found = tf.einsum("...i,oi->...o", x, tf.cast(weight[f"{name}.weight"], narrow))
            bias = weight.get(f"{name}.bias")
            return found if bias is None else found + tf.cast(bias, narrow)

        def norm(name: str, x: tf.Tensor) -> tf.Tensor:
            wide = tf.cast(x, tf.float32)
            mean = tf.reduce_mean(tf.square(wide), axis=-1, keepdims=True)
            return tf.cast(
                wide * tf.math.rsqrt(mean + sizes["norm_eps"]) * weight[f"{name}.weight"], narrow
            )

        stream = tf.cast(tf.gather(weight["embedding.weight"], tokens), narrow)
        for number in range(sizes["layers"]):
            stream = _block(f"blocks.{number}", stream, sizes, linear, norm)
        output = "embedding" if sizes["tied_embeddings"] else "output"
        return tf.cast(linear(output, norm("norm", stream)), tf.float32)


def _block(
    name: str,
    stream: tf.Tensor,
    sizes: dict[str, Any],
    linear: Callable[[str, tf.Tensor], tf.Tensor],
    norm: Callable[[str, tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """Causal attention, then SwiGLU, each on a normalised copy of the stream and added to it."""
    batch, length = tf.shape(stream)[0], tf.shape(stream)[1]
    x = norm(f"{name}.attention_norm", stream)
    query, key, value = (
        tf.transpose(
            tf.reshape(linear(f"{name}.{part}", x), (batch, length, heads, -1)), (0, 2, 1, 3)
        )
        for part, heads in (
            ("query", sizes["heads"]),
            ("key", sizes["kv_heads"]),
            ("value", sizes["kv_heads"]),
        )
    )
    query, key = (_rotated(x, sizes) for x in (query, key))
    each = sizes["heads"] // sizes["kv_heads"]
    key, value = tf.repeat(key, each, axis=1), tf.repeat(value, each, axis=1)
    scores = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32)
    scores *= sizes["head_dim"] ** -0.5
    seen = tf.linalg.band_part(tf.ones((length, length), tf.bool), -1, 0)
    shares = tf.nn.softmax(tf.where(seen, scores, scores.dtype.min))
    mixed = tf.transpose(tf.matmul(tf.cast(shares, value.dtype), value), (0, 2, 1, 3))
    mixed = tf.reshape(mixed, (batch, length, sizes["heads"] * sizes["head_dim"]))
    stream += linear(f"{name}.out", mixed)
    x = norm(f"{name}.ffn_norm", stream)
    gate = tf.nn.silu(linear(f"{name}.gate", x))
    return stream + linear(f"{name}.down", gate * linear(f"{name}.up", x))


def _rotated(x: tf.Tensor, sizes: dict[str, Any]) -> tf.Tensor:
    """Rotary positions of `x`, of shape (samples, heads, length, width): each number of a head's
    first half is turned with the one in the same place of its second half."""
    length, half = tf.shape(x)[2], sizes["head_dim"] // 2
    steps = sizes["rope_theta"] ** (-tf.range(half, dtype=tf.float32) / half)
    angles = tf.range(length, dtype=tf.float32)[:, None] * steps
    cos, sin = (tf.cast(each, x.dtype) for each in (tf.cos(angles), tf.sin(angles)))
    first, second = x[..., :half], x[..., half:]
    return tf.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


def make_strategy() -> tf.distribute.Strategy:
    """Strategy over all workers where TF_CONFIG names several, else over this machine's GPUs."""
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    if len(config.get("cluster", {}).get("worker", [])) < 2:
        return tf.distribute.MirroredStrategy()
    ways = tf.distribute.experimental.CommunicationImplementation
    way = ways.NCCL if tf.config.list_physical_devices("GPU") else ways.RING
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=way)
    )


class Trainer:
    """This worker's replicas of the model, and the step that they take together."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.strategy = make_strategy()
        self.size: int = self.strategy.num_replicas_in_sync
        resolver = self.strategy.cluster_resolver
        self.worker: int = (resolver.task_id or 0) if resolver else 0
        self.names = list(weight_shapes(settings))
        values = initial_weights(settings)
        with self.strategy.scope():
            self.model = LanguageModel(settings, values)
            zeros = [np.zeros_like(each) for each in values]
            self.first = [tf.Variable(each) for each in zeros]
            self.second = [tf.Variable(each) for each in zeros]

    def state(self) -> list[tf.Variable]:
        """Weights and both moments."""
        return [*self.model.weights, *self.first, *self.second]

    @tf.function
    def step(self, tokens: Any, rate: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """One optimizer step of all replicas: the mean loss of the global batch.

        Args:
            tokens: Of each replica, int32 of shape (accumulation, micro-batch, seq_len + 1).
            rate: The learning rate.
            number: Of the step, from 1, for the moments' correction.
        """
        losses, gradients = self.strategy.run(self._gradients, args=(tokens,))
        # All replicas have the same sums now: this worker's first stands for all.
        local = self.strategy.experimental_local_results
        self._update([local(each)[0] for each in gradients], rate, number)
        return local(losses)[0]

    def _gradients(self, tokens: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """In a replica: means over the micro-batches of all replicas."""
        context = tf.distribute.get_replica_context()
        count = tokens.shape[0]
        weights = self.model.weights

        def add(place: tf.Tensor, total: tf.Tensor, sums: list[tf.Tensor]) -> Any:
            batch = tokens[place]
            with tf.GradientTape() as tape:
                logits = self.model(batch[:, :-1])
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[:, 1:], logits)
                loss = tf.reduce_mean(each) / (count * self.size)
            found = [tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)]
            sums = [a + b for a, b in zip(sums, found, strict=True)]
            return place + 1, total + loss, sums

        zeros = [tf.zeros(each.shape) for each in weights]
        start = (tf.constant(0), tf.constant(0.0), zeros)
        _, total, sums = tf.while_loop(
            lambda place, *_: place < count, add, start, parallel_iterations=1
        )
        both = context.all_reduce(tf.distribute.ReduceOp.SUM, [total, *sums])
        return both[0], list(both[1:])

    def _update(self, gradients: list[tf.Tensor], rate: tf.Tensor, number: tf.Tensor) -> None:
        """AdamW, with weight decay on matrices only."""
        most, eps = self.settings["clip_norm"], self.settings["eps"]
        beta_1, beta_2 = self.settings["betas"]
        if most is not None:
            scale = tf.minimum(1.0, most / (tf.linalg.global_norm(gradients) + 1e-6))
            gradients = [each * scale for each in gradients]
        rows = zip(self.model.weights, self.first, self.second, gradients, strict=True)
        for weight, first, second, gradient in rows:
            decay = self.settings["weight_decay"] if gradient.shape.rank >= 2 else 0.0
            m = first * beta_1 + gradient * (1 - beta_1)
            v = second * beta_2 + tf.square(gradient) * (1 - beta_2)
            below = tf.sqrt(v / (1 - beta_2**number)) + eps
            weight.assign(weight * (1 - rate * decay) - rate * m / (1 - beta_1**number) / below)
            first.assign(m)
            second.assign(v)

    def train(self) -> None:
        """From the newest checkpoint to the last step, and the export."""
        settings, text = self.settings, lm_plain.Text(self.settings)
        for step in range(self.resume(), settings["steps"]):

            def tokens_of(context: Any, step: int = step) -> tf.Tensor:
                rows = text.micro_batches(step, context.replica_id_in_sync_group, self.size)
                return tf.constant(list(rows), tf.int32)

            tokens = self.strategy.experimental_distribute_values_from_function(tokens_of)
            rate = tf.constant(lm_plain.learning_rate(settings, step), tf.float32)
            loss = self.step(tokens, rate, tf.constant(step + 1.0))
            if self.worker == 0:
                lm_plain.say_step(step + 1, float(loss))
            if (step + 1) % settings["checkpoint_every"] == 0 and self.worker == 0:
                self.save(step + 1)
        if self.worker == 0:
            self.export()
        self.say_end()

    def save(self, step: int) -> None:
        """A file that appears under its name when it is whole."""
        CHECKPOINTS.mkdir(exist_ok=True)
        part = CHECKPOINTS / f".step-{step:08d}.npz"
        with part.open("wb") as file:
            np.savez(file, *(each.numpy() for each in self.state()))
            file.flush()
            os.fsync(file.fileno())
        part.rename(CHECKPOINTS / f"step-{step:08d}.npz")
        for old in sorted(CHECKPOINTS.glob("step-*"))[: -self.settings["keep_checkpoints"]]:
            old.unlink()

    def resume(self) -> int:
        """The step of the first worker's newest checkpoint, or 0. Workers need no storage in
        common: what the first one read is added to the others' zeros."""
        found = sorted(CHECKPOINTS.glob("step-*.npz")) if self.worker == 0 else []
        step = int(found[-1].stem.removeprefix("step-")) if found else 0
        (agreed,) = self.from_first([np.array(step, np.float32)])
        if not int(agreed):
            return 0
        if found:
            with np.load(found[-1]) as kept:
                values = [kept[f"arr_{place}"] for place in range(len(kept.files))]
        else:
            values = [np.zeros(each.shape, np.float32) for each in self.state()]
        for variable, value in zip(self.state(), self.from_first(values), strict=True):
            variable.assign(value)
        return int(agreed)

    def from_first(self, values: list[np.ndarray]) -> list[tf.Tensor]:
        """The first worker's values, on all of them."""

        @tf.function
        def everywhere() -> list[tf.Tensor]:
            def add() -> list[tf.Tensor]:
                context = tf.distribute.get_replica_context()
                mine = tf.cast(context.replica_id_in_sync_group == 0, tf.float32)
                return context.all_reduce(tf.distribute.ReduceOp.SUM, [mine * v for v in values])

            return self.strategy.run(add)

        return [self.strategy.experimental_local_results(each)[0] for each in everywhere()]

    def export(self) -> None:
        """A SavedModel with one signature: tokens -> logits of the next one."""
        with tf.device("CPU:0"):
            whole = LanguageModel(self.settings, [each.numpy() for each in self.model.weights])

            @tf.function(input_signature=[tf.TensorSpec((None, None), tf.int32, name="tokens")])
            def serve(tokens: tf.Tensor) -> dict[str, tf.Tensor]:
                return {"logits": whole(tokens)}

            part = EXPORT.with_name(f".{EXPORT.name}")
            shutil.rmtree(part, ignore_errors=True)
            tf.saved_model.save(whole, str(part), signatures={"serving_default": serve})
        shutil.rmtree(EXPORT, ignore_errors=True)
        part.rename(EXPORT)

    def say_end(self) -> None:
        """World size, the strategy's class and the hash of the parameters."""
        whole = zip(self.names, (each.numpy() for each in self.model.weights), strict=True)
        lm_plain.say_end(
            rank=self.worker * (self.size // max(1, self.num_workers())),
            world_size=self.size,
            wrapper=type(self.strategy).__name__,
            sharded=0,
            sha256=lm_plain.digest((name, value.shape, value.tobytes()) for name, value in whole),
        )

    def num_workers(self) -> int:
        """As TF_CONFIG says."""
        config = json.loads(os.environ.get("TF_CONFIG") or "{}")
        return len(config.get("cluster", {}).get("worker", [])) or 1


if __name__ == "__main__":
    settings = lm_plain.read_settings()
    lm_plain.check(settings)
    Trainer(settings).train()
