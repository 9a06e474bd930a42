"""Phases 10, 11 and 12: the training itself, its hyper-parameters, and what makes it fast."""

from typing import Any

from paceline.contracts.operate import sums_in, weights_in
from paceline.contracts.phases.case import Case
from paceline.contracts.phases.split import working_share
from paceline.job.train_rules import decay_steps
from paceline.plan import is_deterministic
from paceline.plan.advice.learning_rate import ScaledRate, scale_learning_rate
from paceline.render.mlx import runs_mlx
from paceline.units import counted, format_count, format_seconds


def configure_training(case: Case) -> dict[str, Any]:
    """What runs, for how long, and which file says so."""
    plan, view, train = case.plan, case.view, case.job.spec.train
    rate = plan.estimate.tokens_per_s
    return {
        "framework": "MLX" if runs_mlx(plan) else "PyTorch",
        "estimatedDuration": "unknown: the step's time is"
        if view.wall_s is None
        else f"{format_seconds(view.wall_s)} for {train.steps} steps, failures included",
        "estimatedDurationSeconds": view.wall_s,
        "configFiles": {
            "main": "job.yaml",
            "distributed": "launch-script.sh",
            "data": "job.yaml, section data",
        },
        "init": f"weights from seed {train.seed}, the same on every number of ranks",
        "wrapping": plan.layout_name,
        "loader": "phase 4",
        "optimizer": _optimizer(case),
        "scheduler": {
            "kind": train.schedule,
            "warmupSteps": train.warmup_steps,
            "steps": train.steps,
            "decaySteps": 0 if train.schedule == "constant" else decay_steps(train),
            "finalShare": train.final_learning_rate,
        },
        "loop": f"{plan.layout.accumulation} micro-batches of {plan.layout.micro_batch} a step, "
        "then one vote of all ranks whether to apply it",
        "precision": f"{plan.precision}; parameters in {weights_in(plan)}; gradients added up in "
        f"{sums_in(plan, case.job)}",
        "throughput": None if rate is None else f"{format_count(rate)} tokens/s (estimated)",
    }


def _optimizer(case: Case) -> dict[str, str | float | list[float]]:
    train = case.job.spec.train
    found: dict[str, str | float | list[float]] = {
        "name": train.optimizer,
        "learningRate": train.learning_rate,
        "weightDecay": train.weight_decay,
    }
    if train.optimizer.startswith("adamw"):
        found["betas"] = list(train.betas)
    return found


def choose_hyperparameters(case: Case) -> dict[str, Any]:
    """Batch and learning rate, and how they would follow another size of the cluster."""
    layout, train = case.plan.layout, case.job.spec.train

    def scaled(times: int) -> ScaledRate:
        return scale_learning_rate(
            train.learning_rate,
            base_batch=train.global_batch,
            batch=times * layout.global_batch,
            optimizer=train.optimizer,
        )

    found = scaled(1)
    rate = found.learning_rate
    guidelines = [
        {
            "numGPUs": times * layout.num_ranks,
            "batch": times * layout.global_batch,
            "lr": scaled(times).learning_rate,
            "rule": scaled(times).rule,
        }
        for times in (1, 2, 4, 8)
    ]
    return {
        "globalBatchSize": layout.global_batch,
        "microBatchSize": layout.micro_batch,
        "learningRate": rate,
        "optimizer": train.optimizer,
        "gradientAccumulationSteps": layout.accumulation,
        "dataParallelSize": layout.data,
        "learningRateScaling": {
            "rule": found.rule,
            "linear": found.linear_rate,
            "sqrt": found.sqrt_rate,
            "baselineBatch": train.global_batch,
            "baselineRate": train.learning_rate,
            "source": "linear: arXiv:1706.02677 (SGD); square root: arXiv:2205.10287 (Adam)",
        },
        "warmup": {"steps": train.warmup_steps, "shape": "linear from zero"},
        "betas": list(train.betas) if train.optimizer.startswith("adamw") else None,
        "weightDecay": train.weight_decay,
        "clipping": train.clip_norm,
        "scalingGuidelines": guidelines,
        "search": {
            "method": "short runs at a third, once and three times the rate",
            "learningRates": [rate / 3, rate, 3 * rate],
        },
    }


def optimise_performance(case: Case) -> dict[str, Any]:
    """What the plan does for speed; the speed-up is against one rank, from its own estimate."""
    plan, layout = case.plan, case.plan.layout
    mlx = runs_mlx(plan)
    narrow = plan.precision != "fp32"
    share = working_share(case)
    factor = layout.num_ranks * share if share else None
    return {
        "appliedOptimizations": [
            {
                "name": plan.precision,
                "applied": narrow,
                "why": f"matrix multiplications in {plan.precision}"
                if narrow
                else "the job asks for fp32"
                if case.job.spec.train.precision == "fp32"
                else f"{plan.cluster.accelerator} gains nothing from a narrower type here",
            },
            {
                "name": "fused optimizer",
                "applied": True,
                "why": "one pass over parameters, gradients and state",
            },
            {
                "name": "overlapped communication",
                "applied": layout.data > 1,
                "why": "gradients are reduced during the backward pass",
            },
            {
                "name": "recomputation",
                "applied": layout.recompute != "none",
                "why": f"recompute {layout.recompute}: it costs time and makes room",
            },
        ],
        "expectedSpeedup": "unknown"
        if factor is None
        else f"{factor:.4g}x of one rank's rate on {counted(layout.num_ranks, 'rank')} "
        f"(estimated; at most: "
        "one rank would not fit it)",
        "expectedSpeedupFactor": factor,
        "kernelFusion": f"{'mx' if mlx else 'torch'}.compile fuses what stands between matrices; "
        "it is not in the estimate",
        "precision": plan.precision,
        "compiler": "mx.compile of the step"
        if mlx
        else "torch.compile of each block: one compilation for all",
        "flashAttention": "mx.fast.scaled_dot_product_attention"
        if mlx
        else "scaled_dot_product_attention picks the flash kernel in bf16 on CUDA",
        "cudnn": {
            "benchmark": False,
            "deterministic": is_deterministic(case.job, plan),
            "TF32": plan.precision == "tf32",
        },
        "checklist": [
            text
            for text in (
                "measure tokens_per_s for 50 steps before and after each change",
                f"vote_s stays below a tenth of step_s on all {counted(layout.num_ranks, 'rank')}",
                "memory_bytes stays below phase 7's estimate",
            )
            if case.seen.shows(text)
        ],
    }
