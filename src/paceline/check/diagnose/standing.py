"""What yields to what: which failures are causes, which follow from others.

The catalog's effect says most of it (`secondary` never wins over a cause). Beside it stands here
what is a cause of its own and yet often follows from a nearer one. Sources: the catalog's
`not_to_confuse`, and the threads in tests/check/logs.
"""

from collections.abc import Mapping

from paceline.catalog.failure import Effect, Failure

SYMPTOMS = frozenset(
    {
        "nccl-system-error",
        "nccl-connect-refused",
        "rendezvous-c10d-timeout",
        "rendezvous-timeout-few-nodes",
        "rendezvous-closed",
        "store-clients-timeout",
        "ray-worker-died",
        "watchdog-thread-stuck",
        "elastic-no-restart-on-node-loss",
        "monitored-barrier-names-rank",
        "horovod-stalled",
        "jax-coordination-timeout",
        "dataloader-worker-killed",
        "sigterm-preempted",
        "segfault-exit-11",
        "sigbus-exit-7",
        "host-oom-sigkill",
        "gloo-loopback-fullmesh",
        "rank0-preprocess-timeout",
        "ib-wc-retry-exceeded",
        "k8s-master-dns-not-ready",
        "mlx-jaccl-peer-loss",
        "dataloader-timeout",
        "weights-only-load",
    }
)
"""Causes where nothing nearer is seen. An exception of the program is nearer."""

YIELDS: Mapping[str, frozenset[str]] = {
    "ds-batch-size-mismatch": frozenset({"ds-config-before-dist-init"}),
    "dns-unresolvable-master": frozenset({"ipv6-bracket-master-addr", "k8s-master-dns-not-ready"}),
    "rendezvous-c10d-timeout": frozenset(
        {"dns-unresolvable-master", "ipv6-bracket-master-addr", "port-in-use"}
    ),
    "cuda-oom": frozenset({"nccl-cuda-oom", "cuda-oom-fragmentation", "missing-set-device"}),
    "host-oom-sigkill": frozenset({"slurm-oom-kill", "ray-memory-monitor-kill"}),
    "sigterm-preempted": frozenset(
        {"slurm-oom-kill", "host-oom-sigkill", "segfault-exit-11", "sigbus-exit-7"}
    ),
    "ray-worker-died": frozenset({"ray-memory-monitor-kill", "host-oom-sigkill"}),
    "dataloader-worker-killed": frozenset({"shm-too-small", "host-oom-sigkill", "slurm-oom-kill"}),
    "sigbus-exit-7": frozenset({"shm-too-small", "dataloader-worker-killed"}),
    "nccl-cuda-oom": frozenset({"nvls-multicast-failure", "shm-too-small"}),
    "nccl-connect-refused": frozenset({"nccl-wrong-interface", "port-in-use"}),
    "segfault-exit-11": frozenset({"dataloader-worker-killed"}),
    "too-many-open-files": frozenset(),
    "ib-wc-retry-exceeded": frozenset({"ib-wc-local-prot"}),
    "monitored-barrier-names-rank": frozenset({"collective-mismatch"}),
    "mlx-jaccl-peer-loss": frozenset({"mlx-ring-connect"}),
    "illegal-memory-access": frozenset(
        {
            "cublas-or-assert",
            "xid-48-double-bit-ecc",
            "xid-79-fallen-off-bus",
            "gpu-ecc-uncorrectable",
        }
    ),
    "gpu-ecc-uncorrectable": frozenset(
        {
            "xid-48-double-bit-ecc",
            "xid-94-contained-ecc",
            "xid-95-uncontained-ecc",
            "xid-140-ecc-unrecovered",
        }
    ),
    "xid-13-sm-exception": frozenset({"xid-48-double-bit-ecc", "xid-79-fallen-off-bus"}),
    "xid-31-mmu-fault": frozenset({"xid-13-sm-exception", "xid-48-double-bit-ecc"}),
    "xid-109-ctxsw-timeout": frozenset({"xid-13-sm-exception", "xid-31-mmu-fault"}),
    "disk-full-checkpoint": frozenset({"shm-too-small"}),
    "nan-loss-undetected": frozenset({"fp16-loss-scale-collapse", "nan-first-step-stack"}),
    "gloo-size-mismatch": frozenset({"collective-mismatch"}),
    "container-lost-gpu": frozenset({"driver-library-mismatch"}),
}
"""Failure -> those that are nearer to the cause when both are seen, whichever came first."""

GENERAL = frozenset({"nccl-system-error"})
"""Says that something failed and not what: yields to everything that says more."""

MINOR = frozenset(
    {
        "nccl-env-deprecated",
        "tokenizers-fork",
        "omp-threads-default",
        "ddp-find-unused-overhead",
        "dataloader-starved",
        "rccl-iommu-pt",
        "streaming-shards-not-factor",
        "acs-p2p-hang",
    }
)
"""Said as a note; a cause only where nothing else is seen."""


def level_of(failure: Failure) -> float:
    """0 is a cause, and each further level yields to those before it."""
    if failure.effect is Effect.SECONDARY:
        return 5
    if failure.id in MINOR or failure.effect is Effect.INFO:
        return 4
    if failure.effect in {Effect.SILENT, Effect.DEGRADED, Effect.WARNING}:
        return 3
    if failure.effect is Effect.FALLBACK:
        return 1
    if failure.id in GENERAL:
        return 2.5
    return 2 if failure.id in SYMPTOMS else 0
