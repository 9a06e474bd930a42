"""DeepSpeed loads a checkpoint into a small model and says what every parameter and moment is.

torchrun load_universal.py SHAPES.json ROOT STAGE SAVE: digests by name, from rank 0, as JSON; in
SAVE the checkpoint that DeepSpeed itself writes of it.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch


class Model(torch.nn.Module):
    """Parameters of given names and shapes, each of which a loss depends on."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            owner: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return sum((scale * each.float()).square().mean() for each in self.parameters())


def main() -> None:
    """Prints the line that the test reads."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    shapes, root, stage, save = sys.argv[1:]
    model = Model(json.loads(Path(shapes).read_text()))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
        "gradient_clipping": 1.0,
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.load_checkpoint(root, load_lr_scheduler_states=False)
    found = {}
    for name, each in engine.module.named_parameters():
        found[name] = digest(safe_get_full_fp32_param(each))
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{key}"] = digest(safe_get_full_optimizer_state(each, key))
    steps = {int(state["step"]) for state in engine.optimizer.optimizer.state.values()}
    engine.save_checkpoint(save)
    engine.backward(engine(torch.ones(())))  # and it trains on
    engine.step()
    after = {int(state["step"]) for state in engine.optimizer.optimizer.state.values()}
    if torch.distributed.get_rank() == 0:
        told = {"digests": found, "steps": sorted(steps), "after": sorted(after)}
        print(json.dumps({**told, "global_steps": engine.global_steps}))


def digest(value: torch.Tensor) -> str:
    """SHA-256 of a tensor's shape and numbers."""
    value = value.detach().float().cpu().contiguous()
    return hashlib.sha256(str(tuple(value.shape)).encode() + value.numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
