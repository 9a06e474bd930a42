"""The example program's losses on a single device, in float64 and in a precision, as JSON.

python single_device.py FOLDER PRECISION
"""

import contextlib
import json
import sys

import torch
import torch.nn.functional as F

sys.path.insert(0, sys.argv[1])
import lm

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def losses(settings: dict, precision: str) -> list[float]:
    """Of every step, with the micro-batches of all data ranks one after another."""
    batch = settings["batch"]
    micro_batches = batch["global"] // batch["micro"]
    model = lm.build(settings)
    if precision == "fp64":
        model = model.double()
        model.set_experts_implementation("eager")  # the other products are of narrower numbers
    narrow = AUTOCAST.get(precision)
    optimizer = lm.adamw(settings, model)
    samples, found = lm.Samples(settings), []
    for step in range(settings["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = lm.learning_rate(settings, step)
        total = 0.0
        for tokens in samples.micro_batches(step, 0, 1):
            cast = torch.autocast("cpu", narrow) if narrow else contextlib.nullcontext()
            with cast:
                output = model(tokens[:, :-1])
            logits = output.logits if precision == "fp64" else output.logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            if settings["router_loss"]:
                loss = loss + settings["router_loss"] * output.aux_loss
            loss = loss / micro_batches
            loss.backward()
            total += loss.item()
        if settings["clip_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


def main() -> None:
    """Prints the losses, and the most numbers that one element adds up."""
    torch.set_num_threads(1)
    settings = lm.read_settings()
    tokens = settings["batch"]["global"] * settings["data"]["seq_len"]
    shapes = [size for each in lm.build(settings).parameters() for size in each.shape]
    result = {
        "truth": losses(settings, "fp64"),
        "narrow": losses(settings, sys.argv[2]),
        "longest": max(tokens, *shapes),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
