"""Data-parallel or fully sharded training with MLX, as `train.json` says. Started by mlx.launch, or
alone on one Mac.

Rank 0 writes a checkpoint every `checkpoint_every` steps into `checkpoints/`, and all ranks go on
from its newest: they need no storage in common. Where `initial.npz` lies beside this file, training
begins with the weights in it, by the names that they have here.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lm_plain
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

CHECKPOINTS = Path("checkpoints")
INITIAL = lm_plain.FOLDER / "initial.npz"
NARROW = {"bf16": mx.bfloat16}


class Block(nn.Module):
    """Causal attention, then SwiGLU, each on a normalised copy of the stream and added to it."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
        self.width, eps, bias = sizes["head_dim"], sizes["norm_eps"], sizes["qkv_bias"]
        self.rotary = nn.RoPE(self.width, base=sizes["rope_theta"])
        self.attention_norm = nn.RMSNorm(hidden, eps=eps)
        self.query = nn.Linear(hidden, self.heads * self.width, bias=bias)
        self.key = nn.Linear(hidden, self.kv_heads * self.width, bias=bias)
        self.value = nn.Linear(hidden, self.kv_heads * self.width, bias=bias)
        self.out = nn.Linear(self.heads * self.width, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=eps)
        self.gate = nn.Linear(hidden, sizes["ffn"], bias=False)
        self.up = nn.Linear(hidden, sizes["ffn"], bias=False)
        self.down = nn.Linear(sizes["ffn"], hidden, bias=False)

    def __call__(self, stream: mx.array) -> mx.array:
        batch, length, _ = stream.shape
        x = self.attention_norm(stream)
        query, key, value = (
            layer(x).reshape(batch, length, heads, self.width).transpose(0, 2, 1, 3)
            for layer, heads in (
                (self.query, self.heads),
                (self.key, self.kv_heads),
                (self.value, self.kv_heads),
            )
        )
        mixed = mx.fast.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, scale=self.width**-0.5, mask="causal"
        )
        stream = stream + self.out(mixed.transpose(0, 2, 1, 3).reshape(batch, length, -1))
        x = self.ffn_norm(stream)
        return stream + self.down(nn.silu(self.gate(x)) * self.up(x))


class LanguageModel(nn.Module):
    """Tokens -> logits of the next one: a Llama, or with biases a Qwen2."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        sizes, layout = settings["decoder"], settings["layout"]
        mx.random.seed(settings["seed"])
        self.embedding = nn.Embedding(sizes["vocab"], sizes["hidden"])
        self.blocks = [Block(sizes) for _ in range(sizes["layers"])]
        self.norm = nn.RMSNorm(sizes["hidden"], eps=sizes["norm_eps"])
        if not sizes["tied_embeddings"]:
            self.output = nn.Linear(sizes["hidden"], sizes["vocab"], bias=False)
        self.recomputes = layout["recompute"] != "none"
        drawn = [
            (name, each if each.ndim < 2 else 0.02 * mx.random.normal(each.shape))
            for name, each in tree_flatten(self.parameters())
        ]
        self.update(tree_unflatten(drawn))
        if INITIAL.exists():
            self.load_weights(str(INITIAL), strict=True)

    def __call__(self, tokens: mx.array) -> mx.array:
        stream = self.embedding(tokens)
        for block in self.blocks:
            run = nn.utils.checkpoint(block) if self.recomputes else block
            stream = run(stream)
        stream = self.norm(stream)
        return self.output(stream) if "output" in self else self.embedding.as_linear(stream)


class Ranks:
    """The group of all ranks, and what travels between them."""

    def __init__(self) -> None:
        # Without `strict`, a launch whose hostfile is not found is silently many runs of one rank.
        through_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
        self.group = mx.distributed.init(
            strict=through_mpi or "MLX_RANK" in os.environ,
            backend="mpi" if through_mpi else "any",
        )
        self.rank, self.size = self.group.rank(), self.group.size()

    def mean(self, value: mx.array) -> float:
        """Mean of a number over all ranks."""
        return mx.distributed.all_sum(value, group=self.group).item() / self.size

    def whole(self, shard: mx.array) -> mx.array:
        """The parts of all ranks, one after the other."""
        return mx.distributed.all_gather(shard, group=self.group)

    def from_first(self, value: mx.array) -> mx.array:
        """Rank 0's value, on all ranks."""
        mine = value if self.rank == 0 else mx.zeros_like(value)
        return mx.distributed.all_sum(mine, group=self.group)

    def my_part(self, whole: mx.array) -> mx.array:
        """This rank's rows of a tensor."""
        rows = whole.shape[0] // self.size
        return whole[self.rank * rows : (self.rank + 1) * rows]

    def can_scatter(self) -> bool:
        """Whether the backend has reduce-scatter: JACCL and NCCL do, ring and MPI (0.32) do not."""
        try:
            mx.eval(mx.distributed.sum_scatter(mx.ones((self.size,)), group=self.group))
        except (RuntimeError, ValueError):
            return False
        return True


def shard(model: LanguageModel, settings: dict[str, Any], ranks: Ranks) -> nn.Module:
    """The model with each block's parameters, gradients and optimizer state on all ranks in parts.
    Where the backend has no reduce-scatter, gradients are all-reduced and cut instead: the same
    numbers and memory, twice the bytes on the wire."""
    if not hasattr(nn, "fully_shard"):
        raise SystemExit("this MLX has no nn.fully_shard: install mlx 0.32 or newer")
    if not ranks.can_scatter():
        if ranks.rank == 0:
            print("no sum_scatter in this backend: gradients are all-reduced and cut", flush=True)

        def scatter(x: mx.array, *, group: Any = None, stream: Any = None) -> mx.array:
            return ranks.my_part(mx.distributed.all_sum(x, group=group, stream=stream))

        mx.distributed.sum_scatter = scatter
    narrow = NARROW.get(settings["precision"])
    try:
        model.blocks = [
            nn.fully_shard(block, group=ranks.group, compute_dtype=narrow) for block in model.blocks
        ]
        return nn.fully_shard(model, group=ranks.group, compute_dtype=narrow)
    except ValueError as error:  # a size that the ranks do not divide
        raise SystemExit(str(error)) from None


def loss_of(model: nn.Module, tokens: mx.array) -> mx.array:
    """Mean cross-entropy of every next token."""
    logits = model(tokens[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")


class Trainer:
    """One rank's model, optimizer and step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.ranks = settings, Ranks()
        model = LanguageModel(settings)
        narrow = NARROW.get(settings.get("states"))
        if narrow is not None:  # the optimizer's state has the parameters' type
            model.set_dtype(narrow)
        asks = settings["layout"]["sharding"] != "none" and self.ranks.size > 1
        self.model = shard(model, settings, self.ranks) if asks else model
        self.is_sharded = asks
        self.narrow = None if asks or narrow else NARROW.get(settings["precision"])
        decay, betas, eps = settings["weight_decay"], settings["betas"], settings["eps"]
        self.optimizer = optim.MultiOptimizer(
            [
                optim.AdamW(1.0, betas, eps, weight_decay=each, bias_correction=True)
                for each in (decay, 0.0)
            ],
            [lambda _, gradient: gradient.ndim >= 2],
        )
        self.optimizer.init(self.model.trainable_parameters())
        mx.eval(self.model.parameters(), self.optimizer.state)

    def step(self, batches: list[mx.array]) -> tuple[mx.array, Any]:
        """This rank's mean loss, and the gradients' mean over all ranks."""
        total, gradients = mx.array(0.0), None
        for tokens in batches:
            loss, found = self.loss_and_gradients(tokens)
            total = total + loss / len(batches)
            found = tree_map(lambda g: g / len(batches), found)
            gradients = (
                found if gradients is None else tree_map(lambda a, b: a + b, gradients, found)
            )
            mx.eval(total, gradients)  # lets go of the activations
        if not self.is_sharded:  # fully_shard's own are means already
            gradients = nn.average_gradients(gradients, group=self.ranks.group)
        return total, gradients

    def loss_and_gradients(self, tokens: mx.array) -> tuple[mx.array, Any]:
        """Loss and gradients of one micro-batch. Narrow copies of the float32 parameters are
        multiplied."""
        whole, narrow = self.model.trainable_parameters(), self.narrow

        def loss(parameters: Any) -> mx.array:
            if narrow is not None:
                parameters = tree_map(lambda p: p.astype(narrow), parameters)
            self.model.update(parameters)
            return loss_of(self.model, tokens)

        found = mx.value_and_grad(loss)(whole)
        self.model.update(whole)
        return found

    def clip(self, gradients: Any) -> Any:
        """The gradients scaled down to the largest norm."""
        most = self.settings["clip_norm"]
        if most is None:
            return gradients
        if self.is_sharded:
            return nn.utils.clip_grad_norm_sharded(gradients, most, group=self.ranks.group)[0]
        return optim.clip_grad_norm(gradients, most)[0]

    def train(self) -> None:
        """From the newest checkpoint to the last step."""
        settings, ranks = self.settings, self.ranks
        text = lm_plain.Text(settings)
        for step in range(self.resume(), settings["steps"]):
            self.optimizer.learning_rate = lm_plain.learning_rate(settings, step)
            rows = text.micro_batches(step, ranks.rank, ranks.size)
            batches = [mx.array(each) for each in rows]
            loss, gradients = self.step(batches)
            self.optimizer.update(self.model, self.clip(gradients))
            mx.eval(self.model.parameters(), self.optimizer.state)
            mean = ranks.mean(loss)
            if ranks.rank == 0:
                lm_plain.say_step(step + 1, mean)
            if (step + 1) % settings["checkpoint_every"] == 0:
                self.save(step + 1)
        self.say_end()

    def state(self) -> Iterator[tuple[str, mx.array]]:
        """Every tensor of the model and the optimizer, as this rank holds it."""
        for name, each in tree_flatten(self.model.parameters()):
            yield "model." + name.replace("module.", ""), each
        for name, each in tree_flatten(self.optimizer.state):
            yield "optimizer." + name.replace("module.", ""), each

    def is_part(self, tensor: mx.array) -> bool:
        """Whether this rank holds a part of it only."""
        return self.is_sharded and tensor.ndim > 0

    def save(self, step: int) -> None:
        """Rank 0's file appears under its name when it is whole."""
        whole = {}
        for name, each in self.state():
            whole[name] = self.ranks.whole(each) if self.is_part(each) else each
            mx.eval(whole[name])
        if self.ranks.rank == 0:
            CHECKPOINTS.mkdir(exist_ok=True)
            part = CHECKPOINTS / f".step-{step:08d}.safetensors"
            mx.save_safetensors(str(part), whole)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(CHECKPOINTS / f"step-{step:08d}.safetensors")
            for old in sorted(CHECKPOINTS.glob("step-*"))[: -self.settings["keep_checkpoints"]]:
                old.unlink()

    def resume(self) -> int:
        """The step of rank 0's newest checkpoint, or 0."""
        ranks, first = self.ranks, self.ranks.rank == 0
        found = sorted(CHECKPOINTS.glob("step-*")) if first else []
        step = int(found[-1].stem.removeprefix("step-")) if found else 0
        step = int(ranks.from_first(mx.array(step)).item())
        if not step:
            return 0
        kept = mx.load(str(found[-1])) if first else {}
        tensors = []
        for name, each in self.state():
            rows = (each.shape[0] * ranks.size, *each.shape[1:]) if self.is_part(each) else None
            whole = kept[name] if first else mx.zeros(rows or each.shape, each.dtype)
            whole = ranks.from_first(whole)
            tensors.append(ranks.my_part(whole) if self.is_part(each) else whole)
            mx.eval(tensors[-1])
        parameters = [name for name, _ in tree_flatten(self.model.parameters())]
        state = [name for name, _ in tree_flatten(self.optimizer.state)]
        self.model.update(tree_unflatten(list(zip(parameters, tensors, strict=False))))
        rest = tensors[len(parameters) :]
        self.optimizer.state = tree_unflatten(list(zip(state, rest, strict=True)))
        return step

    def say_end(self) -> None:
        """World size, wrapper, shards and the hash of the whole parameters."""
        parameters = tree_flatten(self.model.parameters())
        whole = []
        for name, each in parameters:
            tensor = self.ranks.whole(each) if self.is_part(each) else each
            tensor = mx.contiguous(tensor)
            mx.eval(tensor)
            name = name.replace("module.", "")
            whole.append((name, tuple(tensor.shape), bytes(memoryview(tensor))))
        memory = {"rank": self.ranks.rank, "peak_memory_bytes": mx.get_peak_memory()}
        print(json.dumps(memory), flush=True)
        lm_plain.say_end(
            rank=self.ranks.rank,
            world_size=self.ranks.size,
            wrapper="FullyShardedModule" if self.is_sharded else "average_gradients",
            sharded=sum(self.is_part(each) for _, each in parameters),
            sha256=lm_plain.digest(whole),
        )


if __name__ == "__main__":
    settings = lm_plain.read_settings()
    lm_plain.check(settings)
    Trainer(settings).train()
