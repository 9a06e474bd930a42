"""Which cluster a job gets, on machines made up for the test."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.catalog import catalog_name, load_accelerators
from paceline.errors import JobError
from paceline.job import parse_job
from paceline.topology import Cluster, FoundGpu, Machine, find_cluster
from paceline.topology.read_nvidia import read_gpu_query

JOB = """\
model: {decoder: {layers: 2, hidden: 64, heads: 4}}
data: {path: x}
train: {global_batch: 8, steps: 100}
"""
GIB = 2**30


def machine(num_cores: float = 4, gpus: tuple[FoundGpu, ...] = ()) -> Machine:
    return Machine(
        num_cores=num_cores,
        clock_hz=2e9,
        simd_bytes=32,
        has_bf16=False,
        memory_bytes=16 * GIB,
        available_bytes=12 * GIB,
        gpus=gpus,
    )


def h100s(count: int) -> tuple[FoundGpu, ...]:
    return (FoundGpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85_520_809_984),) * count


def find(here: Machine, *overrides: str) -> Cluster:
    sets = [f"cluster.{each}" for each in overrides]
    job = parse_job(JOB, source="job.yaml", folder=Path("/nowhere"), overrides=sets)
    return find_cluster(job.spec.cluster, job, here)


def test_a_machine_without_gpus_is_a_cpu_with_a_rank_a_core_up_to_two():
    cluster = find(machine())
    assert (cluster.accelerator, cluster.backend, cluster.is_local) == ("cpu", "gloo", True)
    assert (cluster.num_nodes, cluster.ranks_per_node) == (1, 2)
    assert find(machine(num_cores=1)).ranks_per_node == 1


def test_gpus_that_cannot_be_seen_are_no_reason_to_take_cpus():
    here = replace(machine(), why_no_gpus="nvidia-smi ends with 15: GPU is lost")
    for overrides in ((), ("per_node=2",)):
        with pytest.raises(JobError, match=r"T006: .* cannot be used: nvidia-smi ends"):
            find(here, *overrides)
    assert find(here, "accelerator=cpu").accelerator == "cpu"


def test_ranks_on_a_cpu_share_its_memory_and_cores():
    cluster = find(machine(), "accelerator=cpu", "per_node=4")
    assert cluster.memory_bytes == 4 * GIB
    assert cluster.usable_bytes == 3 * GIB
    assert cluster.cores_per_rank == 1.0


def test_simulated_nodes_share_the_machine_as_ranks_do():
    cluster = find(machine(), "accelerator=cpu", "nodes=2", "per_node=2")
    assert cluster.is_local
    assert cluster.memory_bytes == 4 * GIB
    assert cluster.cores_per_rank == 1.0


def test_declared_memory_of_a_cpu_is_that_of_a_node():
    cluster = find(machine(), "accelerator=cpu", "per_node=2", "memory=8 GiB")
    assert cluster.usable_bytes == 4 * GIB
    assert cluster.known["usable_bytes"] == "declared"


def test_the_peak_of_a_cpu_is_cores_x_clock_x_lanes_x_2_and_says_estimated():
    cluster = find(machine(num_cores=4), "per_node=2")
    assert cluster.peak_flops_per_s["fp32"] == 2 * 2e9 * 8 * 2
    assert cluster.known["peak_flops_per_s"] == "estimated"


def test_the_gpus_of_this_machine_are_found():
    cluster = find(machine(gpus=h100s(8)))
    assert (cluster.accelerator, cluster.ranks_per_node) == ("H100-SXM", 8)
    assert (cluster.backend, cluster.is_local) == ("nccl", True)
    assert cluster.known["memory_bytes"] == "measured"


def test_two_simulated_nodes_divide_the_gpus():
    assert find(machine(gpus=h100s(8)), "nodes=2").ranks_per_node == 4


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(JobError, match=r"T002: 1 node x 4 is 4 GPUs, this machine has 2"):
        find(machine(gpus=h100s(2)), "per_node=4")


def test_different_gpus_in_one_machine_are_refused():
    gpus = (*h100s(1), FoundGpu(name="NVIDIA L4", memory_bytes=24_152_899_584))
    with pytest.raises(JobError, match="T003: this machine has different GPUs"):
        find(machine(gpus=gpus))


def test_a_gpu_older_than_the_catalog_has_memory_and_no_rates():
    gpu = FoundGpu(name="NVIDIA GeForce GTX 970", memory_bytes=4 * GIB, compute_capability="5.2")
    cluster = find(machine(gpus=(gpu,)))
    assert cluster.accelerator == "NVIDIA GeForce GTX 970"
    assert cluster.memory_bytes == 4 * GIB
    assert cluster.peak_flops_per_s == {}
    assert cluster.link_bytes_per_s is None


def card(capability: str | None, **facts) -> FoundGpu:
    return FoundGpu(
        name="NVIDIA L50", memory_bytes=32 * GIB, compute_capability=capability, **facts
    )


def test_a_gpu_that_the_catalog_lacks_is_estimated_from_those_of_its_compute_capability():
    known = load_accelerators()
    cluster = find(machine(gpus=(card("8.9", pcie_generation=5, pcie_lanes=8),) * 2))
    peaks = [known[name].peak_flops_per_s["bf16"] for name in cluster.resembles]
    assert {"L4", "L40S", "RTX-4090"} <= set(cluster.resembles)
    assert cluster.peak_flops_per_s["bf16"] == pytest.approx((min(peaks) * max(peaks)) ** 0.5)
    assert cluster.rates_within >= (max(peaks) / min(peaks)) ** 0.5 * 0.999
    assert cluster.known["peak_flops_per_s"] == "estimated"
    assert (cluster.accelerator, cluster.memory_bytes) == ("NVIDIA L50", 32 * GIB)
    assert cluster.link_bytes_per_s == pytest.approx(31.5e9)  # 8 lanes of PCIe 5


def test_a_gpu_of_a_new_compute_capability_is_estimated_from_its_generation():
    assert "H100-SXM" in find(machine(gpus=(card("9.9"),))).resembles


def test_an_unknown_gpu_that_one_known_card_resembles_has_a_range_too():
    cluster = find(machine(gpus=(card("7.5"),)))
    assert cluster.resembles == ("T4",)
    assert cluster.rates_within >= 2


@pytest.mark.parametrize(
    ("capability", "among", "not_among"),
    [("13.0", {"A100-80", "GB300", "RTX-5090"}, {"T4"}), (None, {"T4", "L40S"}, {"H100-SXM"})],
)
def test_a_gpu_of_an_unknown_generation_has_the_range_of_all_that_it_may_be(
    capability, among, not_among
):
    cluster = find(machine(gpus=(card(capability),)))
    assert among <= set(cluster.resembles)
    assert not not_among & set(cluster.resembles)
    assert cluster.rates_within > 2
    assert ("bf16" in cluster.peak_flops_per_s) is (capability is not None)


def told(line: str, *overrides: str) -> Cluster:
    """The cluster of a machine of 16 GiB, 12 of them free, whose nvidia-smi prints a line."""
    return find(machine(gpus=read_gpu_query(line)), *overrides)


def test_a_card_that_uses_its_host_s_memory_has_what_is_free_of_it():
    spark = told("0, NVIDIA GB10, [N/A], 1, 1, 12.1, [N/A]")
    assert (spark.accelerator, spark.memory_bytes, spark.usable_bytes) == (
        "GB10",
        16 * GIB,
        12 * GIB,
    )
    jetson = told("0, Orin (nvgpu), [N/A], [N/A], [N/A], 8.7, [N/A]")
    assert (jetson.usable_bytes, jetson.known["memory_bytes"]) == (12 * GIB, "measured")


def test_a_card_of_the_catalog_that_does_not_say_its_memory_has_the_catalog_s():
    cluster = told("0, NVIDIA L4, [N/A], 4, 16, 8.9, [N/A]")
    assert cluster.memory_bytes == load_accelerators()["L4"].memory_bytes
    assert cluster.known["memory_bytes"] == "cited"


def test_a_memory_that_nobody_says_is_asked_for():
    line = "0, GRID V100-8Q, [N/A], 3, 16"
    with pytest.raises(JobError, match=r"T007: (.|\n)*set cluster\.memory"):
        told(line)
    assert told(line, "memory=10 GiB").memory_bytes == 10 * GIB


def test_copies_to_the_host_have_the_pcie_link_that_the_card_reports():
    wide = told("0, NVIDIA H100 80GB HBM3, 81559 MiB, 5, 16, 9.0, Disabled")
    narrow = told("0, NVIDIA H100 80GB HBM3, 81559 MiB, 4, 8, 9.0, Disabled")
    assert wide.host_link_bytes_per_s == 63e9
    assert narrow.host_link_bytes_per_s == pytest.approx(31.5e9 / 2)
    assert narrow.copy_bytes_per_s == pytest.approx(wide.copy_bytes_per_s / 4)
    grace = told("0, NVIDIA GH200 480GB, 97871 MiB, 5, 1, 9.0, Disabled")
    assert grace.host_link_bytes_per_s == 450e9


CUT = "0, NVIDIA H100 80GB HBM3, 81559 MiB, 5, 16, 9.0, Enabled\n"
LISTED = (
    CUT
    + """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5d5ba0d6)
  MIG 1g.10gb     Device  0: (UUID: MIG-48a5a7d5)
  MIG 1g.10gb     Device  1: (UUID: MIG-37aee2a8)
"""
)


def test_a_slice_of_a_card_has_its_share_of_the_rates_and_a_range():
    whole, slice_ = load_accelerators()["H100-SXM"], told(LISTED)
    peak = whole.peak_flops_per_s["bf16"]
    assert slice_.accelerator == "H100-SXM 1g.10gb"
    assert slice_.peak_flops_per_s["bf16"] == pytest.approx(peak / 7)
    assert slice_.memory_bytes_per_s == pytest.approx(whole.memory_bytes_per_s / 8)
    assert slice_.memory_bytes == pytest.approx(9.7 * GIB, rel=0.01)  # nvidia-smi: 9.75
    assert (slice_.rates_within, slice_.num_ranks) == (1.2, 1)


def test_unlike_slices_have_to_be_named():
    unlike = LISTED.replace("1g.10gb     Device  1", "3g.40gb     Device  1")
    for lines in (CUT, unlike):
        with pytest.raises(JobError, match=r"T007: (.|\n)*cluster\.accelerator: H100-SXM 1g"):
            told(lines)
    named = told(unlike, "accelerator=H100-SXM 3g.40gb")
    assert (named.is_local, named.accelerator) == (True, "H100-SXM 3g.40gb")


def test_the_whole_card_is_not_planned_where_it_is_cut():
    assert not told(LISTED, "accelerator=H100-SXM").is_local


def test_ranks_on_slices_of_one_node_are_refused():
    for lines, overrides in ((LISTED, ["per_node=2"]), ("", ["accelerator=A100-80 3g.40gb"])):
        with pytest.raises(JobError, match=r"T025: 2 ranks(.|\n)*set per_node to 1"):
            told(lines, *overrides, "per_node=2")


def test_slices_of_several_nodes_share_no_nvlink():
    cluster = told("", "accelerator=GB200 1g.23gb", "nodes=4")
    assert [level.name for level in cluster.levels] == ["network"]


@pytest.mark.parametrize(
    ("smi", "name"),
    [
        ("NVIDIA H100 80GB HBM2e", "H100-PCIe"),
        ("A100-SXM-80GB", "A100-80"),
        ("NVIDIA GH200 120GB", "GH200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("Aqua Vanjaram [Instinct MI300X]", "MI300X"),
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", "MI250"),
        ("Instinct MI210", "MI210"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Server"),
        ("NVIDIA A800 80GB PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("Quadro RTX 6000", None),
        ("Aldebaran/MI200 [Instinct MI250X/MI250]", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100-SXM 1g.10gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.11gb", None),
        ("NVIDIA L4 MIG 1g.6gb", None),
    ],
)
def test_a_card_is_known_by_the_names_that_its_tools_report(smi, name):
    assert catalog_name(smi) == name


def test_a_gpu_that_the_catalog_has_is_not_estimated():
    cluster = find(machine(gpus=h100s(2)))
    assert (cluster.rates_within, cluster.resembles) == (1.0, ())


def test_a_precision_that_one_of_its_kind_lacks_is_not_taken_for_granted():
    assert "bf16" not in find(machine(gpus=(card("7.0"),))).peak_flops_per_s


def test_a_cluster_that_is_elsewhere_is_taken_as_declared():
    cluster = find(machine(), "accelerator=A100-80", "nodes=4", "network=100Gb/s")
    assert not cluster.is_local
    assert (cluster.num_ranks, cluster.cores_per_rank) == (32, None)
    assert cluster.network_bytes_per_s == 12.5e9
    assert cluster.known["network_bytes_per_s"] == "declared"
    assert cluster.known["memory_bytes"] == "cited"


def test_more_of_a_kind_than_here_is_another_cluster():
    assert not find(machine(gpus=h100s(2)), "accelerator=H100-SXM", "per_node=8").is_local
    assert find(machine(gpus=h100s(8)), "accelerator=H100-SXM", "per_node=8").is_local


def test_an_unknown_accelerator_is_placed_in_the_job():
    with pytest.raises(JobError, match=r"where: cluster\.accelerator, --set"):
        find(machine(), "accelerator=H1000")


def test_a_mixture_of_accelerators_is_refused_and_the_slowest_named():
    with pytest.raises(JobError) as caught:
        find(machine(), "accelerator='4x H100-SXM + 4x A100-80'")
    (problem,) = caught.value.problems
    assert problem.code == "T005"
    assert problem.fix.startswith("set accelerator to A100-80 and memory to 79.6 GiB")


def test_s4_3_macs_with_slower_ports_than_the_slowest_chip_are_planned_with_those():
    with pytest.raises(JobError) as caught:
        find(machine(), "accelerator='M1-Ultra + M4-Max'")
    (problem,) = caught.value.problems
    assert problem.fix.startswith("set accelerator to M4-Max, network to 40Gb/s and memory to")


def test_a_published_spelling_is_the_accelerator():
    assert find(machine(), "accelerator=h100-sxm5-80gb").accelerator == "H100-SXM"


def test_several_nics_of_a_kind_count_together():
    cluster = find(machine(), "accelerator=H100-SXM", "nodes=2", "network='8x200Gb/s RoCE'")
    assert cluster.network_bytes_per_s == 200e9


def test_the_catalog_file_beside_the_job_is_read(tmp_path: Path):
    (tmp_path / "paceline-catalog.toml").write_text(
        '[accelerators.ours]\nlike = "H100-SXM"\nmemory_bytes = "96 GiB"\nnum_per_node = 4\n'
    )
    sets = ["cluster.accelerator=ours"]
    job = parse_job(JOB, source="job.yaml", folder=tmp_path, overrides=sets)
    cluster = find_cluster(job.spec.cluster, job, machine())
    assert (cluster.memory_bytes, cluster.ranks_per_node) == (96 * GIB, 4)


def test_a_catalog_file_that_the_job_names_and_is_not_there_is_refused(tmp_path: Path):
    job = parse_job(JOB, source="j", folder=tmp_path, overrides=["cluster.catalog=no.toml"])
    with pytest.raises(JobError, match="T010: there is no file"):
        find_cluster(job.spec.cluster, job, machine())


@pytest.mark.parametrize(
    ("accelerator", "per_node", "node_bytes_per_s"),
    [
        ("H100-SXM", 8, 400e9),
        ("H100-SXM", 1, 50e9),  # one of eight NICs
        ("A100-80", 4, 100e9),
        ("L4", 1, 12.5e9),  # the one NIC of its node
        ("Trainium1", 4, 50e9),
    ],
)
def test_a_part_of_a_node_s_accelerators_has_its_part_of_the_nics(
    accelerator: str, per_node: int, node_bytes_per_s: float
):
    cluster = find(machine(), f"accelerator={accelerator}", "nodes=2", f"per_node={per_node}")
    assert cluster.network_bytes_per_s == node_bytes_per_s
    assert cluster.levels[-1].bytes_per_s == node_bytes_per_s / per_node


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("memory=5PB", "T026: cluster.memory is 4.44 PiB for one accelerator, and A100-80 has"),
        ("memory=96GB", "T026: cluster.memory is 89.4 GiB for one accelerator, and A100-80 has"),
        ("network=8x4000Gb/s", "T026: cluster.network is 32,000 Gb/s a node, and the host links"),
    ],
)
def test_numbers_that_the_named_accelerator_cannot_have_are_refused(asked: str, message: str):
    with pytest.raises(JobError, match=message):
        find(machine(), "accelerator=A100-80", "nodes=2", asked)


@pytest.mark.parametrize(
    ("accelerator", "field"),
    [("cpu", "memory"), ("cpu", "host_memory"), ("A100-80", "host_memory")],
)
def test_more_memory_than_any_machine_has_is_refused(accelerator: str, field: str):
    asked = (f"accelerator={accelerator}", "nodes=2", "per_node=4")
    with pytest.raises(JobError, match=f"T026: cluster.{field} is 4.44 PiB, and no single machine"):
        find(machine(), *asked, f"{field}=5PB")
    assert find(machine(), *asked, "host_memory=12TB").host_bytes == 12 * 10**12


@pytest.mark.parametrize("asked", ["memory=80GiB", "memory=80GB", "memory=20GiB", "memory=85GiB"])
def test_less_memory_than_the_card_has_and_a_gib_for_a_gb_are_taken(asked: str):
    assert find(machine(), "accelerator=A100-80", "nodes=2", asked).known["memory_bytes"] == (
        "declared"
    )
