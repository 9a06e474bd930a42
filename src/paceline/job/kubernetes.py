"""What only Kubernetes needs to know: the image, and how the cluster names its resources."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from paceline.job.section import Bytes, Seconds, section

_LABEL = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
_QUALIFIED = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"

Label = Annotated[str, Field(pattern=_LABEL)]
Resource = Annotated[str, Field(pattern=_QUALIFIED)]


def _check_secret(value: str) -> str:
    name, slash, key = value.partition("/")
    if not slash or not name or not key or "/" in key:
        raise ValueError("write it as SECRET/KEY: its name in the cluster, never its value")
    return value


SecretKey = Annotated[
    str, Field(pattern=r"^[a-z0-9][-a-z0-9.]*/[-._a-zA-Z0-9]+$"), AfterValidator(_check_secret)
]


@section
class KubernetesSpec:
    """Read by the engines `kubernetes` and `ray` and by `run --on kubernetes` alone."""

    image: (
        Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._:/@-]*(:[A-Za-z0-9_][\w.-]*)?$")] | None
    ) = None
    """Container image with Python, PyTorch and what your program needs. Without one the files have
    a placeholder that Kubernetes refuses."""

    script: Annotated[str, Field(pattern=r"^/[A-Za-z0-9._/-]+$")] | None = None
    """Program in the image that every rank runs instead of the example program: `/app/train.py`."""

    namespace: Label = "default"
    """Where the objects go."""

    api: Literal["trainjob", "pytorchjob", "rayjob"] = "trainjob"
    """What `run --on kubernetes` submits: for Kubeflow Trainer v2, for the older training operator,
    or for KubeRay."""

    runtime: Annotated[str, Field(pattern=_SUBDOMAIN)] | None = None
    """A ClusterTrainingRuntime that the cluster has, such as `torch-distributed`. Left out, a
    TrainingRuntime is written beside the TrainJob."""

    accelerator_resource: Resource | Literal["auto", "none"] = "auto"
    """How the cluster counts accelerators. `auto` is `nvidia.com/gpu`, `amd.com/gpu` by the
    accelerator's vendor, `nvidia.com/mig-1g.10gb` for a slice, and `none` on a CPU."""

    node_selector: dict[Resource, str] = Field(default_factory=dict)
    """Labels that a node must have, such as `nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3`."""

    tolerations: list[Resource] = Field(default_factory=list)
    """Keys of taints that the pods tolerate, whatever their value."""

    service_account: Annotated[str, Field(pattern=_SUBDOMAIN)] | None = None
    """Account that the pods run as; left out, the namespace's default."""

    rdma_resource: Resource | None = None
    """What an RDMA device is counted as, such as `rdma/hca_shared_devices_a` or
    `openshift.io/mlnxnics`; each pod asks for `rdma_devices` of them. Left out, pods have no
    RDMA and NCCL goes over TCP."""

    rdma_devices: Annotated[int, Field(gt=0, le=64)] = 1
    """How many of them a pod asks for."""

    network: Annotated[str, Field(pattern=r"^[-a-z0-9./]+$")] | None = None
    """SR-IOV network that the pods are attached to, `NAME` or `NAMESPACE/NAME` of a
    NetworkAttachmentDefinition."""

    shm: Bytes | Literal["auto"] = "auto"
    """Size of /dev/shm, which NCCL and data loaders use; a container's own is 64 MiB. `auto` is
    1 GiB for each rank, a guess."""

    claim: Annotated[str, Field(pattern=_SUBDOMAIN)] | None = None
    """PersistentVolumeClaim for checkpoints, mounted at /workspace, where the program runs;
    every node must be able to write it (ReadWriteMany). Left out, they are lost with their pod."""

    queue: Label | None = None
    """LocalQueue of Kueue, which starts all pods of the job or none. Left out, the cluster's
    scheduler starts each pod by itself, and some may hold their GPUs and wait for the others."""

    secrets: dict[Annotated[str, Field(pattern=_VARIABLE)], SecretKey] = Field(default_factory=dict)
    """Environment variable -> `SECRET/KEY` of a Secret in the cluster: `HF_TOKEN: hf/token`. Values
    never stand in a file."""

    max_run: Seconds | None = None
    """The job is ended after this long."""
