"""Links inside a node as `nvidia-smi topo -m` shows them, on machines made up for the test."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.catalog import built_in_catalog
from paceline.errors import JobError
from paceline.job import dump_job, parse_job
from paceline.topology import Cluster, FoundGpu, Machine, find_cluster
from paceline.topology import machine as machine_module
from paceline.topology.machine import find_local_machine, with_links
from paceline.topology.read_nvidia import read_topology
from paceline.topology.unknown import pcie_link
from paceline.topology.wiring import levels_of_node

RECORDINGS = Path(__file__).parent / "recordings"
CATALOG = built_in_catalog()
JOB = """\
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {corpus: python-stdlib}
train: {global_batch: 8, steps: 100}
"""


def matrix(cells: list[list[str]]) -> str:
    """What the tool prints of GPUs whose pairs have these cells."""
    names = [f"GPU{i}" for i in range(len(cells))]
    head = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity"
    return "\n".join([head, *(f"{n}\t" + "\t".join(r) for n, r in zip(names, cells, strict=True))])


def among(count: int, cell) -> str:
    return matrix(
        [
            ["X" if a == b else cell(a, b) for b in range(count)] + ["0-63", "0"]
            for a in range(count)
        ]
    )


def wiring(name: str, text: str, *, per_node: int | None = None, ranks: int | None = None):
    topology = read_topology(text)
    assert topology is not None
    count = ranks or len(topology.gpus)
    known = CATALOG.accelerators[name]
    found = levels_of_node(
        topology,
        known,
        CATALOG,
        num_ranks=count,
        ranks_per_node=per_node or count,
        pcie=pcie_link(FoundGpu(name=name, memory_bytes=None), known, CATALOG.links),
    )
    return [(each.name, each.size, each.bytes_per_s, each.shape, each.seen) for each in found]


def socket(a: int, b: int, size: int = 4) -> str:
    return "PIX" if a // 2 == b // 2 else "NODE" if a // size == b // size else "SYS"


@pytest.mark.parametrize(
    ("name", "text", "levels"),
    [
        ("H200-NVL", among(4, lambda a, b: "PHB"), [("node", 4, 63e9, "switch", "PHB")]),
        ("H200-NVL", among(4, lambda a, b: "NV6"), [("scale-up", 4, 450e9, "mesh", "NV6")]),
        (
            "H100-NVL",
            among(4, lambda a, b: "NV12" if a // 2 == b // 2 else "PHB"),
            [("scale-up", 2, 300e9, "switch", "NV12"), ("node", 4, 63e9, "switch", "PHB")],
        ),
        ("H100-SXM", among(8, lambda a, b: "NV18"), [("scale-up", 8, 450e9, "switch", "NV18")]),
        ("H800", among(8, lambda a, b: "NV8"), [("scale-up", 8, 200e9, "switch", "NV8")]),
        (
            "RTX-3090",
            among(2, lambda a, b: "NV4"),
            [("scale-up", 2, 56.25e9, "switch", "NV4")],
        ),
        (
            "L40S",
            among(8, socket),
            [("socket", 4, 31.5e9, "switch", "NODE"), ("node", 8, 4e9, "switch", "SYS")],
        ),
        (  # bridges that ranks in their order do not meet
            "H100-NVL",
            among(4, lambda a, b: "NV12" if a % 2 == b % 2 else "PXB"),
            [("node", 4, 63e9, "switch", "PXB")],
        ),
    ],
)
def test_s0_2_links_inside_a_node_are_the_matrix_s(name: str, text: str, levels):
    assert wiring(name, text) == levels


def test_a_switched_node_keeps_what_was_measured_on_its_link():
    topology = read_topology(recording("topo-8xh100.txt"))
    assert topology is not None
    known = CATALOG.accelerators["H100-SXM"]
    (level,) = levels_of_node(
        topology,
        known,
        CATALOG,
        num_ranks=8,
        ranks_per_node=8,
        pcie=CATALOG.links["pcie-5-x16"],
    )
    row = CATALOG.links["nvlink-4"]
    assert (level.link, level.collective_share) == (row.name, row.collective_share)
    assert (level.bytes_per_s, level.known) == (row.bytes_per_s, "measured")


def test_nodes_of_one_machine_divide_its_pairs():
    text = among(4, lambda a, b: "NV12" if a // 2 == b // 2 else "SYS")
    assert wiring("H100-NVL", text, per_node=2) == [("scale-up", 2, 300e9, "switch", "NV12")]


def recording(name: str) -> str:
    return (RECORDINGS / name).read_text(encoding="utf-8")


def here(text: str, name: str = "NVIDIA H200 NVL", count: int = 4) -> Machine:
    gpu = FoundGpu(name=name, memory_bytes=150_754_820_096, pcie_generation=5, pcie_lanes=16)
    return replace(find_local_machine(), gpus=(gpu,) * count, topology=read_topology(text))


def find(machine: Machine, *overrides: str, folder: Path = Path("/nowhere")) -> Cluster:
    sets = [f"cluster.{each}" for each in overrides]
    job = parse_job(JOB, source="job.yaml", folder=folder, overrides=sets)
    return find_cluster(job.spec.cluster, job, machine)


def test_s0_2_this_machine_is_planned_with_its_own_links():
    cluster = find(here(among(4, lambda a, b: "PHB")))
    assert (cluster.link_bytes_per_s, cluster.known["link_bytes_per_s"]) == (63e9, "measured")
    assert [level.seen for level in cluster.levels] == ["PHB"]
    assert find(here("")).link_bytes_per_s == 450e9  # the catalog's, where there is no matrix


def test_a_card_with_fewer_lanes_has_their_rate():
    machine = here(among(4, lambda a, b: "PHB"))
    gpu = replace(machine.gpus[0], pcie_generation=4, pcie_lanes=8)
    assert find(replace(machine, gpus=(gpu,) * 4)).link_bytes_per_s == 15.75e9


def test_an_unknown_card_has_the_nvlinks_that_it_shows():
    machine = here(among(2, lambda a, b: "NV12"), name="NVIDIA A100X", count=2)
    gpu = replace(machine.gpus[0], compute_capability="8.0")
    assert find(replace(machine, gpus=(gpu,) * 2)).levels[0].bytes_per_s == 300e9


def test_a_rate_of_ones_own_catalog_file_is_kept(tmp_path: Path):
    (tmp_path / "paceline-catalog.toml").write_text(
        "[accelerators.H100-SXM]\nlink_bytes_per_s = 40e9\n", encoding="utf-8"
    )
    machine = here(among(8, lambda a, b: "NV18"), name="NVIDIA H100 80GB HBM3", count=8)
    assert find(machine, folder=tmp_path).link_bytes_per_s == 40e9


def test_the_matrix_is_of_the_gpus_that_are_seen(monkeypatch: pytest.MonkeyPatch):
    text = recording("topo-4xh100nvl-pairs.txt")
    monkeypatch.setattr(machine_module, "run_tool", lambda command, looks: text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    machine = with_links(replace(here(""), gpus=here("").gpus[:2]))
    assert machine.topology is not None
    assert machine.topology.gpus == ("GPU0", "GPU2")
    assert [level.seen for level in find(machine).levels] == ["SYS"]


def test_a_job_may_name_the_matrix_of_another_cluster(tmp_path: Path):
    joined, apart = among(4, lambda a, b: "NV6"), among(4, lambda a, b: "PHB")
    (tmp_path / "topo.txt").write_text(joined, encoding="utf-8")
    nodes = [
        {"name": name, "facts": {"gpu": {"topology": text}}}
        for name, text in (("a", apart), ("b", apart), ("c", joined))
    ]
    (tmp_path / "recorded.json").write_text(json.dumps({"nodes": nodes[:2]}), encoding="utf-8")
    (tmp_path / "differ.json").write_text(json.dumps({"nodes": nodes}), encoding="utf-8")
    asked = ("accelerator=H200-NVL", "nodes=2")
    machine = replace(here(""), gpus=())
    bridged = find(machine, *asked, "topology=topo.txt", folder=tmp_path)
    assert (bridged.ranks_per_node, bridged.levels[0].seen) == (4, "NV6")
    bare = find(machine, *asked, "topology=recorded.json", folder=tmp_path)
    assert [(each.name, each.seen) for each in bare.levels] == [("node", "PHB"), ("network", None)]
    for wrong in (
        "topology=differ.json",
        "topology=none.txt",
        "topology=differ.json/x",
    ):
        with pytest.raises(JobError, match="T019"):
            find(machine, *asked, wrong, folder=tmp_path)
    with pytest.raises(JobError, match=r"T019: topo\.txt has 4 GPUs for 8 ranks"):
        find(machine, *asked, "per_node=8", "topology=topo.txt", folder=tmp_path)
    with pytest.raises(JobError, match=r"T019: .* run on CPUs"):
        find(machine, "accelerator=cpu", "topology=topo.txt", folder=tmp_path)


@pytest.mark.parametrize(
    ("network", "link", "rdma"),
    [
        ("100Gb/s Ethernet", "ethernet-100", False),
        ("100GbE", "ethernet-100", False),
        ("Ethernet 10 Gbit/s", "ethernet-10", False),
        ("8x400Gb/s RoCE", "roce-400", True),
        ("400Gb/s InfiniBand", "infiniband-ndr", True),
        ("InfiniBand NDR, 400Gb/s", "infiniband-ndr", True),
        ("50Gb/s RDMA", "infiniband-ndr", True),
        ("400Gb/s", "infiniband-ndr", True),
    ],
)
def test_a_network_is_of_the_kind_that_stands_beside_its_rate(network: str, link: str, rdma: bool):
    cluster = find(
        replace(here(""), gpus=()), "accelerator=H100-SXM", "nodes=2", f"network={network}"
    )
    assert (cluster.network_link, cluster.uses_rdma) == (link, rdma)


def test_a_network_of_unknown_kind_is_refused_and_a_known_one_survives_the_run_s_folder():
    for wrong in ("network=100Gb/s Token-Ring", "network=10GbE InfiniBand", "network_kind=roce"):
        with pytest.raises(JobError, match="cluster"):
            find(here(""), "accelerator=H100-SXM", "nodes=2", wrong)
    job = parse_job(JOB, source="job.yaml", folder=Path("/"), overrides=["cluster.network=10GbE"])
    again = parse_job(dump_job(job.spec), source="job.yaml", folder=Path("/"))
    assert again.spec == job.spec
    assert (again.spec.cluster.network, again.spec.cluster.network_kind) == (1.25e9, "tcp")
    for wrong in (("network=100GbE", "rdma=true"), ("network=400Gb/s InfiniBand", "rdma=false")):
        with pytest.raises(JobError, match=r"cluster\.rdma is .*cluster\.network names"):
            find(replace(here(""), gpus=()), "accelerator=H100-SXM", "nodes=2", *wrong)
