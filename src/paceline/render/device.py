"""What the plan's accelerator leaves an engine: refusals and fixes that several engines share."""

from collections.abc import Iterator

from paceline.catalog import accelerator_named, load_accelerators
from paceline.parallel.abilities import what_trains_on
from paceline.plan import Plan
from paceline.render.engine import Gap


def accelerator_refusals(plan: Plan, *, uses: tuple[str, ...], why: str) -> Iterator[Gap]:
    """Ranks whose collectives go through a library that the engine does not use.

    Args:
        plan: Its cluster's backend is looked at.
        uses: Backends that the engine has: `("nccl", "gloo")`.
        why: Why it has no other.
    """
    cluster = plan.cluster
    if cluster.backend in uses:
        return
    is_mac = cluster.backend == "mlx"
    fix = "`paceline render --for mlx`" if is_mac else what_trains_on(cluster)
    yield Gap(
        what=f"ranks on {cluster.accelerator}",
        why=why,
        nearest=None,
        fix=f"{fix}; or set cluster.accelerator to a GPU",
        where="cluster.accelerator",
    )


def kernel_refusals(plan: Plan) -> Iterator[Gap]:
    """Kernels of PyTorch's attention that an accelerator or a split sample does not have."""
    asked, cluster = plan.attention, plan.cluster
    known = accelerator_named(cluster.accelerator, load_accelerators())
    why = ""
    if asked == "fused" and (known is None or known.vendor != "NVIDIA"):
        why = "cuDNN has it for NVIDIA's GPUs"
    elif (
        asked in ("flash", "fused") and known is not None and "bf16" not in cluster.peak_flops_per_s
    ):
        why = "PyTorch has this kernel for Ampere and newer GPUs (sdp_utils.cpp, check_sm_version)"
    elif asked == "unfused" and plan.layout.context > 1:
        why = "context ranks go round with scaled_dot_product_attention alone"
    if why:
        yield Gap(
            what=f"attention {asked} on {cluster.accelerator}",
            why=why,
            nearest=None,
            fix="leave train.attention out",
            where="train.attention",
        )


def wider_precision(plan: Plan) -> str:
    """The fix for a precision that an engine lacks: bf16 where the accelerator has it."""
    has_bf16 = "bf16" in plan.cluster.peak_flops_per_s
    return f"train.precision: {'bf16' if has_bf16 else 'fp32'}"
