"""A LoRA step beside peft + Accelerate's: seconds and peak memory, on the same model and samples.

    .venv/bin/python benchmarks/lora_step.py [pairs]

Two ranks over gloo, data parallel, a Llama of transformers with drawn weights, rank 16 beside every
linear of its blocks, AdamW, clipping. Blocks of steps are taken in turn by both in the same
processes; a pair is two neighbouring blocks. Memory is the growth of the peak resident size over
what the imports took, of each alone in processes of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

from figures import interval, machine, ratio_of_medians, spread

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, SEQ_LEN, SAMPLES, BLOCK = 16, 256, 4, 3
"""`SAMPLES` a rank and step; `BLOCK` steps in a block."""

LEARNING_RATE, CLIP, DECAY = 3e-4, 1.0, 0.1


class Side(Protocol):
    """One of the two."""

    def step(self, number: int) -> float:
        """One optimizer step; its loss over both ranks."""
        ...


def tokens_of(number: int, rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(2 * number + rank)
    return torch.randint(0, 1024, (SAMPLES, SEQ_LEN + 1), generator=generator)


class Ours:
    """Paceline's driver, as a run has it but for its record and recovery."""

    def __init__(self) -> None:
        import torch

        from paceline.job import AdapterSpec, TrainSpec
        from paceline.parallel.layout import Layout
        from paceline.profile import profile_config
        from paceline.profile.adapter import adaptation_of, with_adapter
        from paceline.runtime import strategy
        from paceline.runtime.huggingface import build_hf
        from paceline.runtime.optimizer import make_optimizer
        from paceline.runtime.strategy.adapter.place import add_adapters
        from paceline.runtime.trainer import Trainer

        spec = AdapterSpec(rank=RANK, targets=list(TARGETS))
        profile = profile_config(CONFIG, SEQ_LEN, source="llama", where="", name=None)
        adapter = with_adapter(profile, spec, family="llama", where="").adapter
        assert adapter is not None
        layout = Layout(data=2, sharding="none", micro_batch=SAMPLES, accumulation=1)
        meshes = strategy.make_meshes(layout, "cpu")
        model = build_hf(CONFIG)
        add_adapters(model, adaptation_of(adapter, spec, precision="fp32", seed=0))
        model = strategy.apply(model, layout, meshes, precision="fp32")
        train = TrainSpec(
            global_batch=2 * SAMPLES, steps=100, learning_rate=LEARNING_RATE, weight_decay=DECAY
        )
        self.trainer = Trainer(
            model=model,
            optimizer=make_optimizer(model, train),
            layout=layout,
            meshes=meshes,
            device=torch.device("cpu"),
            precision="fp32",
            seed=0,
            clip_norm=CLIP,
        )

    def step(self, number: int) -> float:
        from paceline.runtime.step import Step

        tokens = tokens_of(number, self.trainer.meshes.place.data)
        step = Step(number, self.trainer, LEARNING_RATE)
        step.train_on([(tokens[:, :-1], tokens[:, 1:])])
        step.apply()
        return step.loss


class Theirs:
    """peft and Accelerate, as their guides have it."""

    def __init__(self) -> None:
        import torch
        from accelerate import Accelerator
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = {name: value for name, value in CONFIG.items() if name != "model_type"}
        config = AutoConfig.for_model("llama", **fields, use_cache=False)
        torch.manual_seed(0)
        wanted = LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM"
        )
        model = get_peft_model(AutoModelForCausalLM.from_config(config), wanted)
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=DECAY, fused=True
        )
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def step(self, number: int) -> float:
        import torch.nn.functional as F

        accelerator = self.accelerator
        tokens = tokens_of(number, accelerator.process_index)
        logits = self.model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(accelerator.reduce(loss.detach(), "mean"))


SIDES: dict[str, type] = {"ours": Ours, "theirs": Theirs}


def rank_main(names: list[str], num_blocks: int, out: Path) -> None:
    """One rank: blocks of steps of each side in turn, and what was held at most."""
    import resource

    import accelerate
    import peft
    import torch
    import torch.distributed as dist
    import transformers

    from paceline.runtime import session

    assert all((accelerate, peft, transformers, session))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sides: dict[str, Side] = {name: SIDES[name]() for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    number = 0
    for block in range(num_blocks + 1):
        order = names if block % 2 else names[::-1]
        for name in order:
            dist.barrier()
            started = time.perf_counter()
            for index in range(BLOCK):
                losses[name] = sides[name].step(number + index + 1)
            dist.barrier()
            if block:  # the first one warms up
                seconds[name].append((time.perf_counter() - started) / BLOCK)
        number += BLOCK
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"seconds": seconds, "losses": losses, "peak": peak}))
    dist.destroy_process_group()


def run(names: list[str], num_blocks: int) -> Any:
    """What rank 0 of two has measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        workers = []
        for rank in range(2):
            places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": 29533}
            environment = os.environ | {name: str(value) for name, value in places.items()}
            environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, __file__, "--rank", ",".join(names), str(num_blocks), out]
            workers.append(subprocess.Popen(command, env=environment))
        if any(worker.wait() for worker in workers):
            raise SystemExit("a rank failed")
        return json.loads(out.read_text())


def main() -> None:
    """Print both steps, their ratio, and both peaks."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2].split(","), int(sys.argv[3]), Path(sys.argv[4]))
        return
    num_pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 24
    print(f"measured; {machine()}", flush=True)
    found = run(["ours", "theirs"], num_pairs)
    ours, theirs = found["seconds"]["ours"], found["seconds"]["theirs"]
    ratio, low, high = interval(list(zip(ours, theirs, strict=True)), ratio_of_medians)
    print(f"ours:   {spread(ours, digits=4)}")
    print(f"theirs: {spread(theirs, digits=4)}")
    print(f"ratio of medians {ratio:.3f} ({low:.3f} to {high:.3f}, 95 %); goal at most 1.02")
    print(f"losses after the same steps: {found['losses']}")
    for name in SIDES:
        print(f"peak of {name} alone: {run([name], 2)['peak'] / 2**20:.1f} MiB over its imports")


if __name__ == "__main__":
    main()
