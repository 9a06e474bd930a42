"""Reading what the tools of other machines print; where each text is from is in recordings/."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from paceline.topology.probe import PortText
from paceline.topology.read_amd import read_rocm_json, read_rocm_table, read_rocm_topology
from paceline.topology.read_mac import read_system_profiler
from paceline.topology.read_numa import read_lscpu
from paceline.topology.read_nvidia import read_gpu_query, read_topology
from paceline.topology.read_rdma import RdmaKind, read_ibv_devices, read_rdma_port

RECORDINGS = Path(__file__).parent / "recordings"


def recording(name: str) -> str:
    return (RECORDINGS / name).read_text()


def test_every_recording_is_in_the_readme():
    patterns = re.findall(r"^\| ([\w.*-]+) \|", recording("README.md"), re.M)
    names = {path.name for path in RECORDINGS.iterdir()} - {"README.md"}
    assert {name for name in names if not any(fnmatch(name, each) for each in patterns)} == set()


def test_the_query_gives_name_memory_and_pcie_of_each_gpu():
    gpus = read_gpu_query(recording("query-8xh100.csv"))
    assert len(gpus) == 8
    assert gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert gpus[0].memory_bytes == 81559 * 2**20
    assert (gpus[0].pcie_generation, gpus[0].pcie_lanes) == (5, 16)


def test_what_a_gpu_does_not_say_stays_unknown():
    (gpu,) = read_gpu_query("0, NVIDIA GB200, 189471 MiB, [N/A], [N/A]\n")
    assert (gpu.pcie_generation, gpu.pcie_lanes) == (None, None)


def test_a_matrix_that_gives_no_numa_node_leaves_it_unknown():
    head = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
    topology = read_topology(f"{head}GPU0\t X \tNV18\t0-31\t\nGPU1\tNV18\t X \t32-63\t1\n")
    assert topology is not None
    assert topology.between["GPU0", "GPU1"] == "NV18"
    assert topology.numa_nodes == {"GPU1": 1}


def test_gpus_behind_a_switch_are_one_group_of_nvlinks():
    topology = read_topology(recording("topo-8xh100.txt"))
    assert topology is not None
    assert topology.groups == (tuple(f"GPU{i}" for i in range(8)),)
    assert topology.num_links == 18
    assert topology.between["GPU0", "NIC0"] == "PIX"
    assert topology.numa_nodes == {f"GPU{i}": i // 4 for i in range(8)}


def test_cards_without_nvlink_are_groups_of_one():
    topology = read_topology(recording("topo-2xrtx5090.txt"))
    assert topology is not None
    assert topology.groups == (("GPU0",), ("GPU1",))
    assert topology.num_links is None
    assert topology.between["GPU0", "GPU1"] == "PHB"


def test_bridged_cards_are_pairs_even_when_pasted_with_blanks():
    topology = read_topology(recording("topo-4xh100nvl-pairs.txt"))
    assert topology is not None
    assert topology.groups == (("GPU0", "GPU1"), ("GPU2", "GPU3"))
    assert topology.numa_nodes["GPU3"] == 1


@pytest.mark.parametrize("text", ["", "No devices were found\n", "GPU0\tX\n", "\x00\x1b[4m"])
def test_a_text_without_a_matrix_has_no_topology(text: str):
    assert read_topology(text) is None
    assert read_gpu_query(text) == ()


def test_rocm_gives_cards_in_the_order_of_their_numbers():
    (one,) = read_rocm_json(recording("rocm-rx7900xt.json"))
    assert (one.name, one.memory_bytes) == ("Radeon RX 7900 XT", 21_458_059_264)
    assert len(read_rocm_json(recording("rocm-8xmi300x.json"))) == 8


def test_rocm_warns_before_its_json_and_is_read_all_the_same():
    text = "WARNING: AMD GPU device(s) is/are in a low-power state\n"
    assert read_rocm_json(text + recording("rocm-rx7900xt.json"))


def test_the_table_of_rocm_says_the_same_as_its_json():
    gpus = read_rocm_table(recording("rocm-table-2xmi210.txt"))
    assert [(gpu.name, gpu.memory_bytes) for gpu in gpus] == [
        ("AMD Instinct MI210", 68_702_699_520)
    ] * 2


def test_rocm_tells_gpus_on_infinity_fabric_from_those_on_pcie():
    fabric = read_rocm_topology(recording("rocm-topo-8xmi300x.txt"))
    pcie = read_rocm_topology(recording("rocm-topo-4xpcie.txt"))
    assert fabric is not None
    assert pcie is not None
    assert [len(group) for group in fabric.groups] == [8]
    assert fabric.numa_nodes["GPU7"] == 1
    assert [len(group) for group in pcie.groups] == [1, 1, 1, 1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"card0": 3}', '{"card0": {}}', "no GPUs"])
def test_a_text_that_rocm_does_not_print_has_no_gpus(text: str):
    assert read_rocm_json(text) == ()
    assert read_rocm_table(text) == ()
    assert read_rocm_topology(text) is None


@pytest.mark.parametrize(
    ("driver", "link_layer", "kind"),
    [
        ("mlx5_core", "InfiniBand", "infiniband"),
        ("mlx5_core", "Ethernet", "roce"),
        ("efa", "Unknown", "efa"),
        ("efa", "Unspecified", "efa"),
        ("hfi1", "InfiniBand", "omni-path"),
        ("", "", "unknown"),
    ],
)
def test_a_port_is_told_by_its_driver_and_its_link_layer(
    driver: str, link_layer: str, kind: RdmaKind
):
    rate = "400 Gb/sec (4X NDR)"
    port = read_rdma_port(
        PortText(device="a", driver=driver, rate=rate, link_layer=link_layer, state="4: ACTIVE")
    )
    assert (port.kind, port.bytes_per_s, port.is_active) == (kind, 50e9, True)


def test_a_port_that_is_down_or_says_no_rate_stays_so():
    told = PortText(device="a", driver="", rate="", link_layer="", state="1: DOWN")
    port = read_rdma_port(told)
    assert (port.bytes_per_s, port.is_active) == (None, False)


def test_s4_4_devices_are_listed_by_name_on_linux_and_on_a_mac():
    assert read_ibv_devices(recording("ibv_devices.txt")) == ("mlx5_0", "mlx5_1")
    assert read_ibv_devices(recording("ibv_devices-mac.txt")) == ("rdma_en2",)
    assert read_ibv_devices("") == ()


def test_lscpu_gives_sockets_cores_and_numa_nodes():
    cpu = read_lscpu(recording("lscpu-2-sockets.txt"))
    assert cpu is not None
    assert (cpu.num_sockets, cpu.num_cores) == (2, 96)
    assert cpu.numa_nodes == ("0-47,96-143", "48-95,144-191")
    assert read_lscpu("lscpu: not found") is None


def test_a_mac_says_its_chip_memory_and_thunderbolt_ports():
    mac = read_system_profiler(recording("mac-studio-m3-ultra.json"))
    assert mac is not None
    assert (mac.chip, mac.memory_bytes) == ("Apple M3 Ultra", 512 * 2**30)
    assert [port.bytes_per_s for port in mac.ports] == [15e9, 10e9, 10e9, 15e9]
    assert [port.is_connected for port in mac.ports] == [False, True, True, False]


def test_a_drive_on_thunderbolt_is_no_other_mac():
    mac = read_system_profiler(recording("mac-studio-m3-ultra.json"))
    assert mac is not None
    assert [port.peer for port in mac.ports] == [None, None, "MacBook Pro", None]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"SPHardwareDataType": [{}]}', '{"SPHardwareDataType": [3]}']
)
def test_a_text_that_no_mac_prints_is_no_mac(text: str):
    assert read_system_profiler(text) is None
