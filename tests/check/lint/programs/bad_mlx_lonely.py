# mlx.launch --hosts mac1,mac2 this.py
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map


def all_reduce_grads(grads, world):
    return tree_map(lambda x: mx.distributed.all_sum(x, group=world) / world.size(), grads)


def main():
    world = mx.distributed.init(backend="ring")  # expect: mlx-silent-singleton
    model = nn.Linear(4, 4)
    grads = nn.value_and_grad(model, lambda m, x: m(x).sum())(model, mx.ones((2, 4)))[1]
    all_reduce_grads(grads, world)


main()
