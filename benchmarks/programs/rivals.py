"""The same layouts by hand, with Accelerate and with Lightning Fabric, for `step_time.py`.

Each `*_step` function returns one training step: what a careful person writes with that library,
with the loss logged every step. The model, the optimizer and its settings are the ones that
Paceline's step has.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from paceline.job import TrainSpec
from paceline.parallel import Layout
from paceline.runtime.decoder import Decoder
from paceline.runtime.optimizer import learning_rate_at, make_optimizer
from paceline.runtime.sampling import rank_slots

StepOf = Callable[[int], float]
"""Step number -> logged loss."""

Samples = Callable[[Any], tuple[Tensor, Tensor]]


class Scene:
    """What every rival trains."""

    def __init__(
        self, layout: Layout, make_model: Callable[[], Decoder], train: TrainSpec, samples: Samples
    ) -> None:
        self.layout = layout
        self.train = train
        self._make_model = make_model
        self._samples = samples
        self.mesh = init_device_mesh(
            "cpu", (layout.data, layout.tensor), mesh_dim_names=("data", "tensor")
        )

    def model(self) -> Decoder:
        torch.manual_seed(self.train.seed)
        return self._make_model()

    def batches(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This data rank's micro-batches of a step, other samples in every step."""
        layout, first = self.layout, number * self.layout.global_batch
        data_rank = self.mesh.get_local_rank("data")
        for slots in rank_slots(layout, data_rank):
            yield self._samples([first + slot for slot in slots])

    def set_rate(self, optimizer: Any, number: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(number, self.train)

    def loss_context(self) -> AbstractContextManager[object]:
        return loss_parallel() if self.layout.tensor > 1 else nullcontext()

    def logged(self, loss: Tensor) -> float:
        """Mean over the data ranks, as a person logs it."""
        whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
        mean = whole.detach().clone()
        dist.all_reduce(mean, group=self.mesh["data"].get_group())
        return float(mean) / self.layout.data


def loss_of(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())


def hand_step(scene: Scene) -> StepOf:
    """Plain PyTorch: DDP, FSDP2, tensor parallel, or the last two together."""
    layout = scene.layout
    model: nn.Module = split(scene.model(), layout, scene.mesh)
    if layout.sharding == "none" and layout.data > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model, scene.train)

    def step(number: int) -> float:
        scene.set_rate(optimizer, number)
        for inputs, targets in scene.batches(number):
            with scene.loss_context():
                loss = loss_of(model(inputs), targets)
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), scene.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return scene.logged(loss)

    return step


def split(model: Decoder, layout: Layout, mesh: DeviceMesh) -> Decoder:
    """Tensor and sequence parallelism, then FSDP2, as PyTorch's tutorials write them."""
    if layout.tensor > 1:
        _split_tensors(model, mesh["tensor"])
    if layout.sharding == "full":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return model


def _split_tensors(model: Decoder, mesh: DeviceMesh) -> None:
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, ends)
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    to_shares = RowwiseParallel(output_layouts=Shard(1))
    for block in model.blocks:
        ways = {
            "attention_norm": SequenceParallel(),
            "attention": whole,
            **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
            "attention.output": to_shares,
            "ffn_norm": SequenceParallel(),
            "ffn": whole,
            **{f"ffn.{name}": ColwiseParallel() for name in ("gate", "up")},
            "ffn.down": to_shares,
        }
        parallelize_module(block, mesh, ways)


def accelerate_step(scene: Scene) -> StepOf:
    """Accelerate: DDP, or FSDP2 by its plugin."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    if scene.layout.tensor > 1:
        raise NotImplementedError("its tensor parallelism is for models of transformers")
    _say_where()
    plugin = None
    if scene.layout.sharding == "full":
        PartialState(cpu=True)
        # On a CPU it would take DDP instead, without a word (accelerate/state.py).
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            reshard_after_forward=True,
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    bare = scene.model()
    model, optimizer = accelerator.prepare(bare, make_optimizer(bare, scene.train))
    _check(model, scene.layout)

    def step(number: int) -> float:
        scene.set_rate(optimizer, number)
        for inputs, targets in scene.batches(number):
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), scene.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return scene.logged(loss)

    return step


def fabric_step(scene: Scene) -> StepOf:
    """Lightning Fabric: DDP, or its model-parallel strategy with the splitting by hand."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy

    _say_where()
    layout = scene.layout
    is_split = layout.tensor > 1 or layout.sharding == "full"
    strategy: Any = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
    if is_split:
        strategy = ModelParallelStrategy(
            parallelize_fn=lambda model, mesh: split(model, layout, scene.mesh),
            data_parallel_size=layout.data,
            tensor_parallel_size=layout.tensor,
            process_group_backend="gloo",
        )
    fabric = Fabric(accelerator="cpu", devices=layout.num_ranks, strategy=strategy)
    fabric.launch()
    if is_split:
        model = fabric.setup(scene.model())
        optimizer = fabric.setup_optimizers(make_optimizer(model, scene.train))
    else:
        bare = scene.model()
        model, optimizer = fabric.setup(bare, make_optimizer(bare, scene.train))
    _check(model, layout)

    def step(number: int) -> float:
        scene.set_rate(optimizer, number)
        for inputs, targets in scene.batches(number):
            with scene.loss_context():
                loss = loss_of(model(inputs), targets)
                fabric.backward(loss)
        if is_split:  # Fabric's own clipping does not know DTensors of two meshes
            torch.nn.utils.clip_grad_norm_(model.parameters(), scene.train.clip_norm)
        else:
            fabric.clip_gradients(model, optimizer, max_norm=scene.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return scene.logged(loss)

    return step


def _say_where() -> None:
    """What `torchrun` would have set, which both libraries read. The process group is there."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
        "TORCHELASTIC_RUN_ID": "bench",
        "ACCELERATE_USE_CPU": "true",
    }


def _check(model: nn.Module, layout: Layout) -> None:
    """It does what it is timed for."""
    has_shards = any(isinstance(each, DTensor) for each in model.parameters())
    has_ddp = any(isinstance(each, DistributedDataParallel) for each in model.modules())
    wants_shards = layout.sharding == "full" or layout.tensor > 1
    if has_shards != wants_shards or has_ddp != (not wants_shards and layout.data > 1):
        raise RuntimeError(f"{layout.name} became something else: {type(model).__name__}")


RIVALS: dict[str, Callable[[Scene], StepOf]] = {
    "by hand": hand_step,
    "Accelerate": accelerate_step,
    "Fabric": fabric_step,
}
