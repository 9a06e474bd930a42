"""Are the optimizers of torch and torchao the same in every layout?

    python benchmarks/optimizer_layouts.py

One matrix on two gloo ranks, split by rows and by columns, takes three steps beside the whole one.
Prints how far off it is, as a share of how far it moved. torchao is left out where it is missing.
"""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

SHAPES = (48, 512), (48, 304), (3, 48, 64)
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def makers() -> Iterator[tuple[str, Make]]:
    yield "AdamW(fused)", lambda given: torch.optim.AdamW(given, lr=0.01, fused=True)
    yield "SGD", lambda given: torch.optim.SGD(given, lr=0.01, momentum=0.9)
    yield "SGD(fused)", lambda given: torch.optim.SGD(given, lr=0.01, momentum=0.9, fused=True)
    yield "Adafactor", lambda given: torch.optim.Adafactor(given, lr=0.01)
    yield "Muon", lambda given: torch.optim.Muon(given, lr=0.01)
    if importlib.util.find_spec("torchao") is not None:
        import torchao.optim

        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
            yield (
                f"torchao {name}",
                lambda given, name=name: getattr(torchao.optim, name)(given, lr=0.01),
            )


def after_steps(
    make: Make, start: Tensor, gradients: list[Tensor], place: Callable[[Tensor], Tensor]
) -> Tensor:
    parameter = nn.Parameter(place(start.clone()))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = place(gradient.clone())
        optimizer.step()
    end = parameter.detach()
    return end.full_tensor() if isinstance(end, DTensor) else end


def compare(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    for shape in SHAPES:
        start = torch.randn(shape) * 0.1
        gradients = [torch.randn(shape) for _ in range(3)]
        for name, make in makers():
            for dim in range(len(shape)):
                split = lambda tensor, dim=dim: distribute_tensor(tensor, mesh, [Shard(dim)])  # noqa: E731
                try:
                    whole = after_steps(make, start, gradients, lambda tensor: tensor)
                    off = (after_steps(make, start, gradients, split) - whole).norm()
                    found = f"off by {off / (whole - start).norm():.1e} of the movement"
                except Exception as error:  # noqa: BLE001 - whatever an optimizer says
                    found = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                if rank == 0:
                    print(f"{shape!s:12}  split dim {dim}  {name:20}  {found}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(compare, args=(2, f"{folder}/store"), nprocs=2)
