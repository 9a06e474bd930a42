"""The batch as each engine counts it: one place, so that no two files contradict each other."""

from paceline.plan import Plan


def per_rank(plan: Plan) -> int:
    """Samples that one data rank reads for an optimizer step."""
    return plan.layout.micro_batch * plan.layout.accumulation


def triangle(plan: Plan) -> dict[str, int]:
    """DeepSpeed's three numbers: `train_batch_size` is the product of the others and of the data
    ranks. Source: deepspeed/runtime/config.py, `_batch_assertion`."""
    layout = plan.layout
    return {
        "train_batch_size": layout.global_batch,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
    }
