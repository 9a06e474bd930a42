"""What one node says of itself, word for word where a tool said it. Judges nothing.

Written as JSON by the node (`python -m paceline.topology.node`) and read by whoever asked. Empty
text is a tool that is not there or said nothing; `looks` has the reason. None is unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from paceline.topology.probe import Look, PortText


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a node is asked. The same for all nodes of a job."""

    folders: tuple[str, ...] = ()
    """Where the run writes; looked at by writing a small file there."""

    data: tuple[str, ...] = ()
    """Files that every node reads; patterns as the job has them, absolute."""

    code: Mapping[str, str] = field(default_factory=dict)
    """What it is called -> where it is: the job's folder where it holds a program of the job, and
    its model's config.json."""

    ports: tuple[int, ...] = ()
    """TCP ports that have to be free."""

    note: str | None = None
    """Name of a file that was left in `folders[0]` to be found."""

    is_quick: bool = False
    """Ask no command: only what the kernel answers at once, and versions of few packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTexts:
    """What the accelerators' tools print."""

    query: str = ""
    """`nvidia-smi --query-gpu=`, the fields of `read_nvidia.QUERY_MORE`, or NVML's answers."""

    why_none: str | None = None
    """What keeps GPUs from being seen that are here, or may be; None on a machine without any."""

    state: str = ""
    """`nvidia-smi --query-gpu=`, the fields of `read_state.STATE`."""

    errors: str = ""
    """What `nvidia-smi` answers for the fields of `read_state.ERRORS`."""

    fabric: str = ""
    """What it answers for the fields of `read_state.FABRIC`, which drivers before 535 lack."""

    rows: str = ""
    """`nvidia-smi --query-remapped-rows=`, the fields of `read_state.ROWS`."""

    head: str = ""
    """The table of `nvidia-smi` without options: the driver and its newest CUDA."""

    topology: str = ""
    rocm: str = ""
    """`rocm-smi` with the options of `read_state.ROCM`: JSON, or the table of older releases."""

    rocm_version: str = ""
    """Version of the installed ROCm."""

    rocm_topology: str = ""
    kernel_driver: str = ""
    """/proc/driver/nvidia/version, or /sys/module/amdgpu/version."""

    device_files: tuple[str, ...] = ()
    """/dev/nvidia0 ..., /dev/kfd."""

    on_bus: tuple[str, ...] = ()
    """PCI addresses of NVIDIA's cards, whether or not a driver is loaded."""

    uuids: tuple[str, ...] = ()
    """UUIDs of NVIDIA's GPUs from the driver's files; empty where there are no such files."""

    visible: str | None = None
    """CUDA_VISIBLE_DEVICES, or on AMD HIP_VISIBLE_DEVICES or ROCR_VISIBLE_DEVICES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed PyTorch, from its files: it was not imported."""

    version: str
    cuda: str | None = None
    """CUDA that it was built for; None without."""

    hip: str | None = None
    nccl_wanted: str | None = None
    """NCCL's package that it requires, `nvidia-nccl-cu13==2.29.7`; None where it brings its own."""

    nccl: str | None = None
    """Installed version of that package; None when it is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Room of one file system."""

    total_bytes: int
    free_bytes: int
    """For this user, quotas of the file system left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFacts:
    """A folder that the run writes to."""

    path: str
    nearest: str
    """The folder itself, or the nearest one above it that is there."""

    kind: str | None
    """Type of its file system: `ext4`, `nfs4`, `lustre`."""

    disk: Disk | None
    why_not: str | None
    """Why a file cannot be written there; None when it can."""

    note: str | None = None
    """Text of the note that was left there; None where it is not to be seen."""

    disk_model: str | None = None
    """Model of the disk under it, as Linux has it; None where that is no single disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """A network interface."""

    name: str
    is_up: bool
    mtu: int | None
    addresses: tuple[str, ...]
    """IPv4 first."""

    bytes_per_s: float | None = None
    """Rate of its link in one direction; None where the driver does not say, as virtual ones."""

    driver: str = ""
    """The kernel's driver; empty where no device is behind it."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.name.startswith("lo") and (self.name[2:].isdecimal() or self.name == "lo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drive:
    """A disk of the machine."""

    name: str
    """As the kernel has it: `nvme0n1`."""

    kind: Literal["NVMe", "SSD", "HDD", "virtual"]
    total_bytes: int
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mounted:
    """A file system on a disk of the machine, or on a server."""

    path: str
    kind: str
    """`ext4`, `xfs`, `nfs4`, `lustre`."""

    source: str
    """`/dev/nvme0n1p2`, `server:/export`."""

    disk: Disk | None
    """None where it did not answer in time, as a server that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaTexts:
    """What the kernel says of NICs that move data without the CPU."""

    ports: tuple[PortText, ...] = ()
    devinfo: str = ""
    """`ibv_devinfo`."""

    device_files: tuple[str, ...] = ()
    """/dev/infiniband/uverbs*."""

    modules: tuple[str, ...] = ()
    """Modules of the kernel that matter here: `nvidia_peermem`, `ib_uverbs`, `efa`."""

    libraries: Mapping[str, str | None] = field(default_factory=dict)
    """`libibverbs`, `libnccl-net` -> where the linker finds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MacTexts:
    """What a Mac's tools print."""

    profile: str = ""
    """`system_profiler`, as JSON: `topology/read_mac.py`."""

    macos: str = ""
    """Version, such as `26.2`."""

    ibv_devices: str = ""
    wired_limit_bytes: int | None = None
    """`iogpu.wired_limit_mb` that somebody set: memory that the GPU may have. None is macOS's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node."""

    host: str
    """What it calls itself."""

    system: str
    """`Linux` or `Darwin`."""

    kernel: str = ""
    boot_id: str = ""
    """What tells this machine from every other one, where the kernel says it."""

    unix_s: float = 0.0
    """Its clock when it answered."""

    keeps_time: bool | None = None
    """Whether something (NTP, PTP) keeps its clock right, as the kernel says; None where it does
    not say."""

    packages: Mapping[str, str] = field(default_factory=dict)
    """Name -> version of everything that is installed for its Python; `python` and `paceline`
    too. Of a quick look, those few that must be the same everywhere."""

    torch_build: TorchBuild | None = None
    gpu: GpuTexts = field(default_factory=GpuTexts)
    mac: MacTexts | None = None
    """None of a quick look, and of what is no Mac."""

    kernel_log: str | None = None
    """Lines about hardware; None where this user may not read it."""

    meminfo: str = ""
    memory_limit_bytes: int | None = None
    """Limit of the memory of the process's group."""

    memory_errors: Mapping[str, int] = field(default_factory=dict)
    """`ue` and `ce` of all memory controllers, from EDAC; empty where there is none."""

    shm: Disk | None = None
    """/dev/shm; None where there is none."""

    limits: Mapping[str, tuple[int | None, int | None]] = field(default_factory=dict)
    """`nofile`, `memlock`, `nproc`, `stack` -> soft and hard; None is unlimited."""

    folders: tuple[FolderFacts, ...] = ()
    home_kind: str | None = None
    """Type of the file system of the home folder."""

    stale_locks: tuple[str, ...] = ()
    """`lock` files of interrupted builds of PyTorch extensions."""

    data: Mapping[str, str] = field(default_factory=dict)
    """Pattern -> hash over the names and sizes of its files; empty text where there are none."""

    code: Mapping[str, str] = field(default_factory=dict)
    """`job folder`, `config.json` or `paceline` -> hash over its code; empty where it is none."""

    interfaces: tuple[Interface, ...] = ()
    own_addresses: tuple[str, ...] | None = None
    """What its own name leads to; empty when to nothing, None where nobody asked."""

    ports: Mapping[int, str] = field(default_factory=dict)
    """Port that was asked about -> why it cannot be had; empty text when it can."""

    rdma: RdmaTexts = field(default_factory=RdmaTexts)
    acs: Mapping[str, int] | None = None
    """PCI bridge -> its ACS control register where that is not 0; None where it may not be
    read."""

    kernel_words: str = ""
    """Words of the kernel's command line about the IOMMU."""

    num_cpus: int | None = None
    """That this process may run on."""

    num_cores: float | None = None
    """Physical cores of them, after the quota of the process's group."""

    drives: tuple[Drive, ...] = ()
    mounts: tuple[Mounted, ...] = ()
    """File systems that are mounted; a quick look does not ask for them."""

    lscpu: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the libraries that train; nothing else is read."""

    nccl_files: Mapping[str, str] = field(default_factory=dict)
    """/etc/nccl.conf and ~/.nccl.conf, those that are there."""

    looks: tuple[Look, ...] = ()
    seconds: float = 0.0
    """How long all this took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another node, as this one is to reach it."""

    name: str
    addresses: tuple[str, ...]
    """That it listens on, the one that its libraries would take first."""

    port: int
    word: str
    """That only its listener knows: several machines may have the same address on a bridge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What one node found when it called another."""

    peer: str
    resolved: tuple[str, ...] = ()
    """What the peer's name leads to here; empty when to nothing."""

    address: str | None = None
    """Under which it answered; None when it did not."""

    seconds: float | None = None
    """To connect and be answered."""

    why_not: str | None = None
    unreached: tuple[str, ...] = ()
    """Addresses of it that were tried before and did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as PyTorch sees it, or the CPU."""

    name: str
    capability: str | None = None
    """`sm_90`, `gfx942`."""

    matmul_flops_per_s: float | None = None
    """Rate of a large matrix product, the best of some."""

    why_not: str | None = None
    """What went wrong on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What a process that imports PyTorch says."""

    torch: str
    cuda: str | None = None
    """That it was built for; `hip 6.2` on AMD."""

    nccl: str | None = None
    architectures: tuple[str, ...] = ()
    is_available: bool = False
    why_not: str | None = None
    """Why PyTorch does not get accelerators that are there."""

    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """All-reduce of one size over all ranks."""

    bytes: int
    seconds: float
    busbw_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFacts:
    """All-reduce over the ranks of all nodes."""

    world_size: int
    backend: str
    points: tuple[SweepPoint, ...] = ()
    why_not: str | None = None
    """Why there are no points."""

    node: str | None = None
    """The node where it failed first, where it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What is known of one node when everybody has been asked."""

    name: str
    """As the job, Slurm or a hostfile calls it."""

    facts: NodeFacts | None = None
    why_not: str | None = None
    """Why there are no facts."""

    is_unreached: bool = False
    """Whether there are none because nobody got there."""

    ahead_s: float | None = None
    """How far its clock is ahead of the asking machine's."""

    ahead_within_s: float | None = None
    """How much further ahead it may be: the time its answer may have been on the way."""

    calls: tuple[Reached, ...] | None = None
    """To every other node; None when it was not asked to."""

    calls_why_not: str | None = None
    torch: TorchFacts | None = None
    torch_why_not: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Everything that the nodes of a job said."""

    place: str
    at: float
    """Unix time."""

    nodes: tuple[NodeAnswer, ...]
    sweep: SweepFacts | None = None
    """None when it was not measured."""

    is_quick: bool = False
    seconds: float = 0.0
