"""Nodes that these tests do not run on, as probes would report them: recordings/README.md."""

from dataclasses import replace
from pathlib import Path

from paceline.check.preflight.need import Need
from paceline.topology.node.facts import (
    Disk,
    FolderFacts,
    Gathered,
    GpuTexts,
    Interface,
    NodeAnswer,
    NodeFacts,
    RdmaTexts,
    Reached,
)
from paceline.topology.node.probe_network import read_ifconfig
from paceline.topology.probe import PortText

HERE = Path(__file__).parent / "recordings"
TOPOLOGY = Path(__file__).parent.parent / "topology" / "recordings"
NOTE = "left here a moment ago"


def text(name: str) -> str:
    path = HERE / name
    return (path if path.exists() else TOPOLOGY / name).read_text()


LOOPBACK = Interface(name="lo", is_up=True, mtu=65536, addresses=("127.0.0.1", "::1"))
LINUX = NodeFacts(
    host="node01",
    system="Linux",
    kernel="5.15.0-105-generic",
    boot_id="1",
    packages={"python": "3.11.7", "paceline": "0.1.0", "torch": "2.6.0+cu124", "numpy": "2.1.3"},
    kernel_log="",
    meminfo="MemTotal: 2113503948 kB\nMemAvailable: 2089340000 kB\n",
    memory_errors={"ue": 0, "ce": 2},
    shm=Disk(total_bytes=2**40, free_bytes=2**40),
    limits={
        "nofile": (65536, 1048576),
        "memlock": (None, None),
        "nproc": (None, None),
        "stack": (8388608, None),
    },
    folders=(
        FolderFacts(
            path="/lustre/runs",
            nearest="/lustre/runs",
            kind="lustre",
            disk=Disk(total_bytes=2**50, free_bytes=2**49),
            why_not=None,
            note=NOTE,
        ),
    ),
    home_kind="nfs4",
    code={"paceline": "aa"},
    interfaces=(
        LOOPBACK,
        Interface(name="bond0", is_up=True, mtu=9000, addresses=("10.1.0.1",)),
        Interface(name="docker0", is_up=True, mtu=1500, addresses=("172.17.0.1",)),
    ),
    own_addresses=("10.1.0.1",),
    num_cpus=192,
)


def ports(count: int, *, down: int = 0, driver: str = "mlx5_core", **words: str) -> RdmaTexts:
    """So many ports, the last ones of them down."""
    usual = {"rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"} | words
    return RdmaTexts(
        ports=tuple(
            PortText(
                device=f"mlx5_{number}" if driver != "efa" else f"rdmap{number}s0",
                driver=driver,
                state="4: ACTIVE" if number < count - down else "1: DOWN",
                **usual,
            )
            for number in range(count)
        ),
        device_files=tuple(f"/dev/infiniband/uverbs{number}" for number in range(count)),
        modules=("nvidia_peermem", "ib_uverbs", "mlx5_ib"),
        libraries={"libibverbs": "libibverbs.so.1", "libnccl-net": None},
    )


H100_TEXTS = GpuTexts(
    state=text("state-8xh100.csv"),
    errors=text("errors-8xh100.csv"),
    fabric=text("fabric-8xh100.csv"),
    rows=text("rows-8xh100.csv"),
    head=text("nvidia-smi-head.txt"),
    topology=text("topo-8xh100.txt"),
    kernel_driver=text("nvidia-driver-version.txt"),
    device_files=tuple(f"/dev/nvidia{number}" for number in range(8)),
)
H100 = replace(
    LINUX, gpu=H100_TEXTS, rdma=ports(8), acs={}, lscpu=text("lscpu-2-sockets.txt"), num_cpus=192
)
"""A node of 8 H100 and 8 NDR InfiniBand ports: nothing is wrong."""

EFA = replace(
    H100,
    rdma=replace(
        ports(32, driver="efa", rate="100 Gb/sec (4X EDR)", link_layer="Unknown"),
        modules=("efa", "ib_uverbs"),
        libraries={
            "libibverbs": "libibverbs.so.1",
            "libnccl-net": "/opt/amazon/ofi-nccl/lib/libnccl-net.so",
        },
    ),
)
"""A node of AWS with 32 EFA ports and the plugin."""

MI300 = replace(
    LINUX,
    gpu=GpuTexts(
        rocm=text("rocm-8xmi300x.json"),
        rocm_topology=text("rocm-topo-8xmi300x.txt"),
        kernel_driver="6.8.5\n",
        device_files=("/dev/kfd",),
    ),
    kernel_words="iommu=pt",
    acs={},
    packages=LINUX.packages | {"torch": "2.6.0+rocm6.2"},
    rdma=replace(ports(8), modules=("amdgpu", "ib_uverbs")),
)
CONTAINER = replace(
    LINUX,
    host="3f2a9c1d7b6e",
    shm=Disk(total_bytes=64 * 2**20, free_bytes=64 * 2**20),
    limits=LINUX.limits | {"nofile": (1024, 1024), "memlock": (65536, 65536)},
    kernel_log=None,
)
"""A container that nobody gave more than Docker's defaults."""

MAC = NodeFacts(
    host="studio.local",
    system="Darwin",
    kernel="24.5.0",
    packages={"python": "3.12.4", "paceline": "0.1.0", "torch": "2.7.1"},
    limits={
        "nofile": (256, None),
        "memlock": (None, None),
        "nproc": (2666, 4000),
        "stack": (8372224, 67104768),
    },
    folders=(
        FolderFacts(
            path="/Users/a/runs",
            nearest="/Users/a",
            kind=None,
            disk=Disk(total_bytes=10**12, free_bytes=10**11),
            why_not=None,
        ),
    ),
    interfaces=read_ifconfig(text("ifconfig-mac.txt")),
    num_cpus=12,
)

ON_8_H100 = Need(
    num_nodes=4,
    ranks_per_node=8,
    backend="nccl",
    accelerator="H100-SXM",
    is_apart=True,
    wants_rdma=True,
    rank_bytes=60 * 10**9,
    host_bytes=0,
    checkpoint_bytes=10**12,
    num_checkpoints=4,
    link_bytes_per_s=450e9,
    network_bytes_per_s=400e9,
)
ON_CPU = Need(
    num_nodes=1, ranks_per_node=2, backend="gloo", checkpoint_bytes=10**6, num_checkpoints=4
)


def answers(*nodes: NodeFacts) -> Gathered:
    """Nodes `node01` ... of one job, which reach each other."""
    names = [f"node{number + 1:02}" for number in range(len(nodes))]
    return Gathered(
        place="ssh",
        at=0.0,
        nodes=tuple(
            NodeAnswer(
                name=name,
                facts=replace(facts, boot_id=name, host=name),
                ahead_s=0.002,
                ahead_within_s=0.3,
                calls=tuple(
                    Reached(peer=other, resolved=("10.1.0.9",), address="10.1.0.9", seconds=2e-4)
                    for other in names
                    if other != name
                ),
            )
            for name, facts in zip(names, nodes, strict=True)
        ),
    )
