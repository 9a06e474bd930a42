"""What recorded nodes mean for a job: no machine is looked at."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.preflight.machines import (
    CONTAINER,
    EFA,
    H100,
    LINUX,
    LOOPBACK,
    MAC,
    MI300,
    NOTE,
    ON_8_H100,
    ON_CPU,
    answers,
    ports,
    text,
)

from paceline.check.preflight.need import Need, need_of
from paceline.check.preflight.preflight import Preflight, check_names, judge
from paceline.check.preflight.result import Result, Status
from paceline.control.environment import RECOVERY
from paceline.job import parse_job
from paceline.plan import plan_job
from paceline.report.preflight_text import format_preflight
from paceline.topology.node.facts import (
    Device,
    Disk,
    Gathered,
    Interface,
    NodeFacts,
    Reached,
    SweepFacts,
    SweepPoint,
    TorchFacts,
)
from paceline.topology.probe import Look


def judged(*nodes: NodeFacts, need: Need = ON_8_H100, **options: object) -> Preflight:
    return judge(answers(*nodes), need, note=NOTE, **options)


def not_right(verdict: Preflight) -> dict[tuple[str, str], Result]:
    """(node, check) -> what is neither pass nor unknown."""
    return {
        (each.node, each.name): each
        for each in verdict.results
        if each.status in (Status.WARNING, Status.FAIL)
    }


def only(verdict: Preflight) -> Result:
    (found,) = not_right(verdict).values()
    return found


def with_environment(facts: NodeFacts, **values: str) -> NodeFacts:
    return replace(facts, environment=facts.environment | values)


def with_gpu(facts: NodeFacts, **texts: str | None) -> NodeFacts:
    return replace(facts, gpu=replace(facts.gpu, **texts))


@pytest.mark.parametrize(
    ("nodes", "need"),
    [
        ((H100, H100, H100, H100), ON_8_H100),
        ((EFA, EFA, EFA, EFA), ON_8_H100),
        ((MI300, MI300, MI300, MI300), replace(ON_8_H100, accelerator="MI300X")),
        ((LINUX,), ON_CPU),
        ((MAC,), ON_CPU),
    ],
    ids=["h100", "efa", "mi300", "linux", "mac"],
)
def test_nothing_is_said_of_nodes_that_are_as_they_should_be(nodes, need):
    verdict = judged(*nodes, need=need)
    assert not_right(verdict) == {}
    assert verdict.is_fit
    assert verdict.good_nodes == verdict.nodes


CASES: Mapping[str, tuple[NodeFacts, Status, str, str]] = {
    "64 MiB of /dev/shm": (
        replace(H100, shm=Disk(total_bytes=64 * 2**20, free_bytes=64 * 2**20)),
        Status.FAIL,
        "shared-memory",
        "shm-too-small",
    ),
    "/dev/shm that old runs have filled": (
        replace(H100, shm=Disk(total_bytes=2**40, free_bytes=2**20)),
        Status.FAIL,
        "shared-memory",
        "shm-too-small",
    ),
    "ulimit -n 64": (
        replace(H100, limits=H100.limits | {"nofile": (64, 64)}),
        Status.FAIL,
        "open-files",
        "too-many-open-files",
    ),
    "memory that cannot be locked": (
        replace(H100, limits=H100.limits | {"memlock": (65536, 65536)}),
        Status.FAIL,
        "locked-memory",
        "memlock-limit",
    ),
    "ulimit -u 200": (
        replace(H100, limits=H100.limits | {"nproc": (200, 200)}),
        Status.FAIL,
        "processes",
        "process-limits",
    ),
    "a host whose ECC has failed": (
        replace(H100, memory_errors={"ue": 1, "ce": 90}),
        Status.FAIL,
        "host-ecc",
        "host-memory-errors",
    ),
    "seven GPUs": (
        with_gpu(H100, state="".join(text("state-8xh100.csv").splitlines(keepends=True)[:7])),
        Status.FAIL,
        "accelerators",
        "too-few-accelerators",
    ),
    "CUDA_VISIBLE_DEVICES of four": (
        with_gpu(H100, visible="0,1,2,3"),
        Status.FAIL,
        "accelerators",
        "invalid-device-ordinal",
    ),
    "GPUs of another kind": (
        with_gpu(H100, state=text("state-8xh100.csv").replace("H100 80GB HBM3", "H200")),
        Status.FAIL,
        "accelerators",
        "too-few-accelerators",
    ),
    "GPUs cut into slices": (
        with_gpu(H100, state=text("state-8xh100.csv").replace("Disabled", "Enabled")),
        Status.FAIL,
        "accelerators",
        "too-few-accelerators",
    ),
    "a GPU that another process fills": (
        with_gpu(H100, state=text("state-8xh100.csv").replace("81559, 1,", "81559, 70000,", 1)),
        Status.FAIL,
        "accelerator-memory",
        "accelerator-in-use",
    ),
    "a GPU that another process fills, beside one that has room": (
        with_gpu(
            H100,
            state=text("state-8xh100.csv")
            .replace("81559, 1,", "81559, 70000,", 1)
            .replace("81559, 1,", "81559, 9000,", 1),
        ),
        Status.FAIL,
        "accelerator-memory",
        "accelerator-in-use",
    ),
    "uncorrectable errors of a GPU": (
        with_gpu(H100, errors=text("errors-8xh100.csv").replace("3, Enabled, 0", "3, Enabled, 4")),
        Status.FAIL,
        "accelerator-ecc",
        "gpu-ecc-uncorrectable",
    ),
    "a row that could not be remapped": (
        with_gpu(
            H100, rows=text("rows-8xh100.csv").replace("52:00.0, 0, 0, 0", "52:00.0, 1, 0, 1")
        ),
        Status.FAIL,
        "accelerator-ecc",
        "xid-64-row-remap-failure",
    ),
    "a row that waits for a reset": (
        with_gpu(
            H100, rows=text("rows-8xh100.csv").replace("1B:00.0, 0, 0, 0", "1B:00.0, 1, Yes, No")
        ),
        Status.WARNING,
        "accelerator-ecc",
        "xid-63-row-remap-event",
    ),
    "a GPU that is too hot": (
        with_gpu(H100, errors=text("errors-8xh100.csv").replace("0000001\n", "0000040\n", 1)),
        Status.WARNING,
        "accelerator-clocks",
        "straggler-throttle",
    ),
    "no fabric manager": (
        with_gpu(H100, fabric=text("fabric-8xh100.csv").replace("Completed", "In Progress")),
        Status.FAIL,
        "fabric",
        "fabric-manager-not-running",
    ),
    "half of the lanes": (
        with_gpu(H100, state=text("state-8xh100.csv").replace("1, 16, 16", "1, 8, 16", 1)),
        Status.WARNING,
        "pcie",
        "straggler-throttle",
    ),
    "an NVLink that is down": (
        with_gpu(H100, topology=text("topo-8xh100.txt").replace("NV18", "NV17", 1)),
        Status.WARNING,
        "links",
        "xid-74-nvlink",
    ),
    "ports that are slower than planned": (
        replace(H100, rdma=ports(8, rate="200 Gb/sec (4X HDR)")),
        Status.WARNING,
        "rdma-rate",
        "slow-collectives",
    ),
    "bridges with access control": (
        replace(H100, acs={"0000:16:01.0": 0x1D}),
        Status.WARNING,
        "acs",
        "acs-p2p-hang",
    ),
    "another driver loaded than installed": (
        with_gpu(H100, kernel_driver=text("nvidia-driver-version.txt").replace("550.54", "535.1")),
        Status.FAIL,
        "versions",
        "driver-library-mismatch",
    ),
    "nvidia-smi that says so itself": (
        replace(
            with_gpu(H100, state=""),
            looks=(
                Look(
                    what="nvidia-smi --query-gpu=index,name",
                    found=False,
                    why="exit code 18: Failed to initialize NVML: Driver/library version mismatch",
                ),
            ),
        ),
        Status.FAIL,
        "driver",
        "driver-library-mismatch",
    ),
    "a container that lost its GPU": (
        replace(
            with_gpu(H100, state=""),
            looks=(
                Look(
                    what="nvidia-smi --query-gpu=index,name",
                    found=False,
                    why="exit code 255: Failed to initialize NVML: Unknown Error",
                ),
            ),
        ),
        Status.FAIL,
        "driver",
        "container-lost-gpu",
    ),
    "a folder that cannot be written": (
        replace(H100, folders=(replace(H100.folders[0], why_not="Read-only file system"),)),
        Status.FAIL,
        "checkpoint-folder",
        "checkpoint-folder-unusable",
    ),
    "checkpoints in memory": (
        replace(H100, folders=(replace(H100.folders[0], kind="tmpfs"),)),
        Status.WARNING,
        "checkpoint-ephemeral",
        "checkpoint-ephemeral",
    ),
    "checkpoints in a container's own layer": (
        replace(H100, folders=(replace(H100.folders[0], kind="overlay"),)),
        Status.WARNING,
        "checkpoint-ephemeral",
        "checkpoint-ephemeral",
    ),
    "room for one checkpoint": (
        replace(
            H100,
            folders=(
                replace(H100.folders[0], disk=Disk(total_bytes=2**50, free_bytes=2 * 10**12)),
            ),
        ),
        Status.FAIL,
        "checkpoint-room",
        "disk-full-checkpoint",
    ),
    "a folder of its own": (
        replace(H100, folders=(replace(H100.folders[0], note=None, kind="ext4"),)),
        Status.FAIL,
        "shared-folder",
        "folder-not-shared",
    ),
    "a lock that was left behind": (
        replace(H100, stale_locks=("/root/.cache/torch_extensions/py311_cu124/fused/lock",)),
        Status.WARNING,
        "caches",
        "stale-extension-lock",
    ),
    "NCCL_SOCKET_IFNAME of another machine": (
        with_environment(H100, NCCL_SOCKET_IFNAME="ens5"),
        Status.FAIL,
        "interface",
        "nccl-wrong-interface",
    ),
    "NCCL_SOCKET_IFNAME=lo": (
        with_environment(H100, NCCL_SOCKET_IFNAME="lo"),
        Status.FAIL,
        "interface",
        "nccl-wrong-interface",
    ),
    "NCCL_SOCKET_IFNAME=docker0": (
        with_environment(H100, NCCL_SOCKET_IFNAME="docker"),
        Status.FAIL,
        "interface",
        "nccl-wrong-interface",
    ),
    "GLOO_SOCKET_IFNAME of another machine": (
        with_environment(H100, GLOO_SOCKET_IFNAME="eth0"),
        Status.FAIL,
        "interface",
        "gloo-ifname-missing",
    ),
    "GLOO_SOCKET_IFNAME=lo": (
        with_environment(H100, GLOO_SOCKET_IFNAME="lo"),
        Status.FAIL,
        "interface",
        "gloo-loopback-fullmesh",
    ),
    "no InfiniBand": (
        replace(H100, rdma=replace(ports(8, down=8))),
        Status.FAIL,
        "rdma",
        "ethernet-fallback",
    ),
    "no device files of InfiniBand": (
        replace(H100, rdma=replace(ports(8), device_files=())),
        Status.FAIL,
        "rdma",
        "ethernet-fallback",
    ),
    "no libibverbs": (
        replace(H100, rdma=replace(ports(8), libraries={"libibverbs": None})),
        Status.FAIL,
        "rdma",
        "ethernet-fallback",
    ),
    "EFA without its plugin": (
        replace(EFA, rdma=replace(EFA.rdma, libraries=EFA.rdma.libraries | {"libnccl-net": None})),
        Status.FAIL,
        "rdma",
        "ethernet-fallback",
    ),
    "no peer memory": (
        replace(H100, rdma=replace(ports(8), modules=("ib_uverbs",))),
        Status.WARNING,
        "gpu-direct",
        "gdr-peermem-missing",
    ),
    "an IOMMU that translates": (
        replace(MI300, kernel_words="amd_iommu=on"),
        Status.WARNING,
        "iommu",
        "rccl-iommu-pt",
    ),
    "a port that is taken": (
        replace(H100, ports={29500: "Address already in use"}),
        Status.FAIL,
        "ports",
        "port-in-use",
    ),
    "data that are not there": (
        replace(H100, data={"/data/*.txt": ""}),
        Status.FAIL,
        "data",
        "data-differs-between-nodes",
    ),
    "no torch": (
        replace(H100, packages={"python": "3.11.7"}),
        Status.FAIL,
        "versions",
        "environment-differs-between-nodes",
    ),
    "a torch that is newer than the driver": (
        replace(H100, packages=H100.packages | {"torch": "2.9.0+cu130"}),
        Status.FAIL,
        "versions",
        "accelerator-not-usable",
    ),
    "TORCH_DISTRIBUTED_DEBUG": (
        with_environment(H100, TORCH_DISTRIBUTED_DEBUG="DETAIL"),
        Status.FAIL,
        "environment",
        "recovery-undone",
    ),
    "TORCH_NCCL_DESYNC_DEBUG": (
        with_environment(H100, TORCH_NCCL_DESYNC_DEBUG="1"),
        Status.FAIL,
        "environment",
        "recovery-undone",
    ),
    "a watchdog of torch's that ends survivors": (
        with_environment(H100, TORCH_NCCL_ASYNC_ERROR_HANDLING="1"),
        Status.FAIL,
        "environment",
        "recovery-undone",
    ),
    "no watchdog that notices an error": (
        with_environment(H100, TORCH_NCCL_BLOCKING_WAIT="true"),
        Status.FAIL,
        "environment",
        "recovery-undone",
    ),
    "NVLink SHARP": (
        with_environment(H100, NCCL_NVLS_ENABLE="2"),
        Status.WARNING,
        "environment",
        "recovery-undone",
    ),
    "NCCL_IB_HCA that matches nothing": (
        with_environment(H100, NCCL_IB_HCA="=mlx4_0:1"),
        Status.FAIL,
        "environment",
        "ethernet-fallback",
    ),
    "a word that NCCL ends the run with": (
        with_environment(H100, NCCL_ALGO="Bogus"),
        Status.FAIL,
        "environment",
        "nccl-env-deprecated",
    ),
    "a size with a unit, of which NCCL reads the number": (
        with_environment(H100, NCCL_BUFFSIZE="8M"),
        Status.WARNING,
        "environment",
        "nccl-env-deprecated",
    ),
    "a graph file of another machine": (
        replace(H100, nccl_files={"/etc/nccl.conf": "NCCL_GRAPH_FILE=/opt/graph.xml"}),
        Status.WARNING,
        "environment",
        "nccl-graph-file-env",
    ),
}


@pytest.mark.parametrize(("facts", "status", "name", "id"), CASES.values(), ids=CASES)
def test_one_fault_of_a_node_is_found_and_nothing_else(facts, status, name, id):
    need = replace(ON_8_H100, accelerator="MI300X") if facts.gpu.rocm else ON_8_H100
    found = only(judged(facts, need=need))
    assert (found.name, found.status, found.id) == (name, status, id)
    assert found.fix


@pytest.mark.parametrize(
    ("kind", "disk_model", "said"),
    [
        ("tmpfs", None, "in memory (tmpfs)"),
        ("overlay", None, "in the container's own layer"),
        ("ext4", "Amazon EC2 NVMe Instance Storage", "the instance's own disk"),
        ("ext4", "nvme_card", "the instance's own disk (nvme_card)"),
        ("ext4", "nvme_card-pd", None),
        ("ext4", "Amazon Elastic Block Store", None),
        ("lustre", None, None),
    ],
)
def test_s1_13_a_folder_that_goes_with_its_machine_is_warned_of(kind, disk_model, said):
    folder = replace(H100.folders[0], kind=kind, disk_model=disk_model)
    facts = replace(H100, folders=(folder,))
    if said is None:
        assert not_right(judged(facts)) == {}
        return
    found = only(judged(facts))
    assert (found.name, found.status) == ("checkpoint-ephemeral", Status.WARNING)
    assert said in found.evidence
    assert "checkpoint.copy_to" in found.fix
    copied = judged(facts, need=replace(ON_8_H100, is_copied=True))
    assert not_right(copied) == {}
    (passes,) = [each for each in copied.results if each.name == "checkpoint-ephemeral"]
    assert "copied by checkpoint.copy_to" in passes.evidence


def test_a_node_without_any_gpu_is_offered_cpus():
    none = with_gpu(H100, state="", kernel_driver="", device_files=())
    (found,) = (each for each in judged(none).results if each.name == "accelerators")
    assert found.evidence == "no accelerator; the job puts 8 ranks here"
    assert found.fix.endswith("or set cluster.accelerator to cpu")


def test_a_plan_for_a_slice_wants_a_card_that_is_cut():
    need = replace(ON_8_H100, accelerator="H100-SXM 1g.10gb", ranks_per_node=1)
    cut = with_gpu(H100, state=text("state-8xh100.csv").replace("Disabled", "Enabled"))
    wrong = {name for _, name in not_right(judged(cut, need=need))}
    assert "accelerators" not in wrong
    (whole,) = [
        each
        for (_, name), each in not_right(judged(H100, need=need)).items()
        if name == "accelerators"
    ]
    assert "not cut into slices (MIG); the plan is for H100-SXM 1g.10gb" in whole.evidence


def test_every_check_of_these_tests_can_be_allowed():
    assert {name for _, _, name, _ in CASES.values()} <= set(check_names())


def test_a_fail_that_is_allowed_by_check_or_failure_is_a_warning():
    facts = replace(H100, shm=Disk(total_bytes=2**26, free_bytes=2**26))
    for name in ("shared-memory", "shm-too-small"):
        verdict = judged(facts, allowed=[name])
        assert verdict.is_fit
        assert "allowed" in only(verdict).evidence


def test_docker_defaults_fail_a_container_and_say_what_could_not_be_read():
    verdict = judged(CONTAINER, need=ON_CPU)
    assert only(verdict).id == "shm-too-small"
    unread = [
        each.name
        for each in judged(replace(H100, kernel_log=None)).results
        if each.status == "unknown"
    ]
    assert unread == ["kernel-log"]


def test_a_run_on_cpus_is_not_kept_from_64_mib_of_shared_memory_that_it_does_not_use():
    verdict = judged(CONTAINER, need=replace(ON_CPU, is_strict=False))
    assert verdict.is_fit


def test_a_quick_look_counts_only_what_the_jobs_own_ranks_use():
    assert judge(replace(answers(CONTAINER), is_quick=True), ON_CPU, note=NOTE).is_fit


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize(("backend", "status"), [("gloo", "warning"), ("nccl", "fail")])
def test_a_wrong_interface_of_nccl_fails_only_jobs_that_use_nccl(is_quick, backend, status):
    node = with_environment(LINUX, NCCL_SOCKET_IFNAME="ens-of-another-machine")
    seen = replace(answers(node), is_quick=is_quick)
    verdict = judge(seen, replace(ON_CPU, backend=backend), note=NOTE)
    found = not_right(verdict)[(verdict.nodes[0], "interface")]
    assert (found.id, found.status) == ("nccl-wrong-interface", status)


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize(
    ("limits", "status", "said", "not_said"),
    [
        ((64, 64), "fail", "raise the hard limit", "ulimit -n 64"),
        ((64, 4096), "fail", "ulimit -n 4096 now, which is enough for this job", "ulimit -n 64 "),
        ((64, 128), "fail", "ulimit -n 128 now, which helps, but is too few", "ulimit -n 64 "),
        ((64, None), "fail", "ulimit -n 65536", "limits.conf"),
        ((512, 512), "warning", "raise the hard limit", "ulimit -n 512"),
    ],
)
def test_the_fix_for_few_open_files_is_one_that_changes_something(
    limits, status, said, not_said, is_quick
):
    node = replace(LINUX, limits=LINUX.limits | {"nofile": limits})
    need = replace(ON_CPU, has_agents=False)
    verdict = judge(replace(answers(node), is_quick=is_quick), need, note=NOTE)
    found = not_right(verdict)[(verdict.nodes[0], "open-files")]
    assert (found.id, found.status) == ("too-many-open-files", status)
    assert said in found.fix
    assert not_said not in found.fix
    if limits[1] is not None:
        for way in ("/etc/security/limits.conf", "LimitNOFILE=65536", "--ulimit nofile=65536"):
            assert way in found.fix


@pytest.mark.parametrize(
    ("limits", "is_fit"), [((64, 64), False), ((64, 4096), True), ((64, None), True)]
)
def test_a_run_counts_the_open_files_that_its_agents_raise_the_limit_to(limits, is_fit):
    node = replace(LINUX, limits=LINUX.limits | {"nofile": limits})
    assert judge(replace(answers(node), is_quick=True), ON_CPU, note=NOTE).is_fit is is_fit
    assert not judged(node, need=ON_CPU).is_fit  # as other programs would find it


def test_the_odd_node_of_four_is_named_where_versions_differ():
    odd = replace(H100, packages=H100.packages | {"torch": "2.5.1+cu124"})
    found = only(judged(H100, H100, odd, H100))
    assert (found.node, found.name, found.status) == ("node03", "packages", Status.FAIL)
    assert "torch 2.5.1+cu124, most nodes 2.6.0+cu124" in found.evidence


@pytest.mark.parametrize(
    ("odd", "name", "id", "status"),
    [
        (replace(H100, code={"paceline": "bb"}), "code", "code-differs-between-nodes", "fail"),
        (
            replace(H100, packages=H100.packages | {"rich": "13.0"}),
            "packages",
            "environment-differs-between-nodes",
            "warning",
        ),
        (
            replace(H100, rdma=ports(8, down=1)),
            "rdma-alike",
            "nccl-mixed-nic-counts",
            "fail",
        ),
        (with_environment(H100, NCCL_NVLS_ENABLE="0"), "settings", "nccl-size-mismatch", "fail"),
        (
            replace(
                H100,
                interfaces=(
                    LOOPBACK,
                    Interface(name="bond0", is_up=True, mtu=1500, addresses=("10.1.0.2",)),
                ),
            ),
            "mtu",
            "mtu-mismatch",
            "warning",
        ),
    ],
    ids=["code", "a package", "a NIC down", "NCCL's settings", "mtu"],
)
def test_what_only_one_node_has_is_its_fault(odd, name, id, status):
    need = replace(ON_8_H100, network_bytes_per_s=300e9)
    found = only(judged(H100, odd, H100, need=need))
    assert (found.node, found.name, found.id, found.status) == ("node02", name, id, status)


def test_every_file_that_differs_is_named_and_what_is_not_there_beside_it():
    usual = replace(H100, code={"paceline": "aa", "/job/mine.py": "1", "/job/more": "2"})
    odd = replace(H100, code={"paceline": "bb", "/job/mine.py": "9", "/job/more": ""})
    found = only(judged(usual, odd, usual))
    assert found.evidence == (
        "/job/more is not there; paceline, /job/mine.py are another than on most nodes"
    )


def test_s4_11_code_that_a_node_did_not_name_is_no_pass():
    usual = replace(H100, code={"job folder": "1"})
    found = only(judged(usual, usual, replace(H100, code={})))
    assert (found.node, found.evidence) == ("node03", "job folder is not there")


def test_data_that_are_not_there_are_said_once():
    usual = replace(H100, data={"/data/*.txt": "1"})
    found = only(judged(usual, usual, replace(H100, data={"/data/*.txt": ""})))
    assert (found.node, found.evidence) == ("node03", "/data/*.txt has no file here")


@pytest.mark.parametrize(("version", "status"), [("3.11.9", "warning"), ("3.12.1", "fail")])
def test_only_another_minor_version_of_python_is_a_fail(version, status):
    odd = replace(LINUX, packages=LINUX.packages | {"python": version})
    need = replace(ON_CPU, num_nodes=3, ranks_per_node=1, is_apart=True)
    found = only(judged(LINUX, LINUX, odd, need=need))
    assert (found.node, found.name, found.status) == ("node03", "packages", status)


def test_a_variable_of_nccl_that_differs_does_not_keep_a_job_over_gloo_from_running():
    need = replace(ON_CPU, num_nodes=3, ranks_per_node=1, is_apart=True)
    found = only(judged(LINUX, with_environment(LINUX, NCCL_ALGO="Ring"), LINUX, need=need))
    assert (found.name, found.status) == ("settings", Status.WARNING)


def test_s4_5_preflight_judges_values_of_nccl_as_lint_does_and_devices_by_those_there_are():
    fine = {"NCCL_IB_HCA": "mlx5_1", "NCCL_NTHREADS": "256", "NCCL_BUFFSIZE": "4194304"}
    need = replace(ON_8_H100, harmful=dict.fromkeys(list(fine)[1:], "harms"))
    assert not_right(judged(with_environment(H100, **fine), need=need)) == {}
    ports = H100.rdma.ports
    (port,) = [each for each in ports if each.device == "mlx5_1"]
    more = (*ports, replace(port, device="mlx5_10"))
    facts = replace(H100, rdma=replace(H100.rdma, ports=more))
    found = only(judged(with_environment(facts, NCCL_IB_HCA="mlx5_1"), need=need))
    assert found.status is Status.WARNING
    assert found.evidence.startswith("NCCL_IB_HCA=mlx5_1 takes mlx5_10 too")
    assert found.fix == 'NCCL_IB_HCA="=mlx5_1"'


def test_s4_5_a_value_that_nccl_refuses_is_named_where_ranks_talk_over_gloo():
    found = only(judged(with_environment(LINUX, NCCL_ALGO="Bogus"), need=ON_CPU))
    assert found.status is Status.WARNING
    assert found.evidence.endswith("; ranks talk over gloo here, which does not read it")


def test_a_variable_that_undoes_recovery_is_shown_with_its_cost_and_the_fix():
    found = only(judged(with_environment(H100, TORCH_NCCL_ASYNC_ERROR_HANDLING="3")))
    assert found.evidence == (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=3: torch's watchdog ends every survivor of a lost rank, "
        "with its state"
    )
    assert found.fix == "unset TORCH_NCCL_ASYNC_ERROR_HANDLING (agents set 0)"


def test_what_agents_would_set_and_names_that_give_way_to_it_harm_nothing():
    same = {name: setting.value for name, setting in RECOVERY.items()}
    harmful = dict.fromkeys((*RECOVERY, "NCCL_BLOCKING_WAIT"), "harms")
    need = replace(ON_8_H100, harmful=harmful)
    old = {"NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert not_right(judged(with_environment(H100, **same, **old), need=need)) == {}


def test_debugging_at_detail_is_slow_where_it_undoes_no_recovery():
    facts = with_environment(H100, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    found = only(judged(facts, need=replace(ON_8_H100, has_agents=False)))
    assert (found.status, found.id) == (Status.WARNING, "debugging-left-on")
    assert not_right(judged(with_environment(H100, TORCH_DISTRIBUTED_DEBUG="info"))) == {}


def test_other_engines_have_the_plans_advice_about_torchs_watchdog():
    need = replace(ON_8_H100, has_agents=False, harmful={"TORCH_NCCL_BLOCKING_WAIT": "waits"})
    found = only(judged(with_environment(H100, TORCH_NCCL_BLOCKING_WAIT="1"), need=need))
    assert (found.status, found.id) == (Status.WARNING, "debugging-left-on")


def test_a_clock_that_nothing_keeps_right_is_said_beside_how_far_it_is_off():
    gathered = answers(replace(LINUX, keeps_time=False))
    nodes = (replace(gathered.nodes[0], ahead_s=40.0),)
    found = only(judge(replace(gathered, nodes=nodes), ON_CPU, note=NOTE))
    assert found.evidence.endswith("nothing keeps it right")


def test_a_port_that_is_slower_than_those_of_other_nodes_is_named():
    slow = replace(H100, rdma=ports(8, rate="200 Gb/sec (4X HDR)"))
    found = not_right(judged(H100, slow, H100))
    assert found["node02", "rdma-alike"].id == "straggler-throttle"
    assert {node for node, _ in found} == {"node02"}


def test_a_node_that_is_silent_fails_and_the_others_are_not_blamed_for_not_reaching_it():
    gathered = answers(H100, H100, H100)
    first, second, third = gathered.nodes
    unheard = Reached(peer="node03", resolved=("10.1.0.3",), why_not="10.1.0.3 port 4: timed out")
    nodes = (
        replace(first, calls=(first.calls[0], unheard)),
        replace(second, calls=(second.calls[0], unheard)),
        replace(third, facts=None, calls=None, why_not="nothing was heard for 40 s"),
    )
    verdict = judge(replace(gathered, nodes=nodes), ON_8_H100, note=NOTE)
    assert verdict.bad_nodes == ("node03",)
    assert [each.id for each in verdict.failing] == ["node-unreachable"]


def test_a_node_that_reaches_neither_four_silent_nodes_nor_one_that_answers_is_blamed():
    """The text names three of the five alone."""
    gathered = answers(*[H100] * 6)
    first, second, *others = gathered.nodes
    refused = [
        Reached(peer=f"node0{number}", resolved=(), why_not="timed out")
        for number in (3, 4, 5, 6, 2)
    ]
    nodes = (
        replace(first, calls=tuple(refused)),
        second,
        *(replace(each, facts=None, calls=None, why_not="nothing was heard") for each in others),
    )
    verdict = judge(replace(gathered, nodes=nodes), ON_8_H100, note=NOTE)
    assert verdict.bad_nodes == ("node01", "node03", "node04", "node05", "node06")


@pytest.mark.parametrize(
    ("call", "name", "id", "status"),
    [
        (
            Reached(peer="node02", resolved=("10.1.0.2",), why_not="10.1.0.2 port 9: refused"),
            "reach",
            "nccl-connect-refused",
            "fail",
        ),
        (
            Reached(peer="node02", resolved=("10.1.0.2",), why_not="10.1.0.2: the MTU differs"),
            "reach",
            "mtu-mismatch",
            "fail",
        ),
        (
            Reached(peer="node02", resolved=("10.1.0.2",), address="a", unreached=("172.17.0.1",)),
            "reach",
            "nccl-wrong-interface",
            "warning",
        ),
        (Reached(peer="node02", address="10.1.0.2"), "names", "dns-unresolvable-master", "warning"),
        (
            Reached(peer="node02", resolved=("127.0.1.1",), address="10.1.0.2"),
            "names",
            "gloo-loopback-fullmesh",
            "fail",
        ),
    ],
)
def test_a_call_that_goes_wrong_says_how(call, name, id, status):
    gathered = answers(H100, H100)
    nodes = (replace(gathered.nodes[0], calls=(call,)), gathered.nodes[1])
    found = only(judge(replace(gathered, nodes=nodes), ON_8_H100, note=NOTE))
    assert (found.name, found.id, found.status) == (name, id, status)


def test_rays_own_numbers_of_nodes_are_no_names_to_resolve():
    gathered = answers(H100, H100)
    call = Reached(peer="node02", address="10.1.0.2")
    nodes = (replace(gathered.nodes[0], calls=(call,)), gathered.nodes[1])
    need = replace(ON_8_H100, has_host_names=False)
    verdict = judge(replace(gathered, nodes=nodes), need, note=NOTE)
    assert not not_right(verdict)


@pytest.mark.parametrize(("ahead", "status"), [(4.0, None), (-40.0, "warning"), (400.0, "fail")])
def test_clocks_that_differ_by_more_than_the_way_explains(ahead, status):
    gathered = answers(H100)
    nodes = (replace(gathered.nodes[0], ahead_s=ahead, ahead_within_s=0.5),)
    found = not_right(judge(replace(gathered, nodes=nodes), ON_8_H100, note=NOTE))
    assert [each.status for each in found.values()] == ([] if status is None else [status])


def test_two_names_of_one_machine_are_no_two_nodes_of_gpus():
    gathered = answers(H100, H100)
    twin = replace(gathered.nodes[1], facts=gathered.nodes[0].facts)
    found = only(judge(replace(gathered, nodes=(gathered.nodes[0], twin)), ON_8_H100, note=NOTE))
    assert (found.node, found.name) == ("node02", "machines")


def test_nodes_of_one_machine_may_talk_over_its_loopback():
    offline = replace(
        with_environment(LINUX, GLOO_SOCKET_IFNAME="lo"), interfaces=(LOOPBACK,), boot_id="1"
    )
    need = replace(ON_CPU, num_nodes=2, ranks_per_node=1, is_apart=True)
    gathered = answers(offline, offline)
    one = tuple(replace(each, facts=offline, calls=None) for each in gathered.nodes)
    assert judge(replace(gathered, nodes=one), need, note=NOTE).is_fit
    assert not judge(gathered, need, note=NOTE).is_fit  # two machines


def measured(gathered: Gathered, *rates: float, busbw: float = 350e9) -> Gathered:
    nodes = tuple(
        replace(
            node,
            torch=TorchFacts(
                torch="2.6.0",
                nccl="2.20.5",
                is_available=True,
                devices=(Device(name="H100", matmul_flops_per_s=rate),) * 8,
            ),
        )
        for node, rate in zip(gathered.nodes, rates, strict=True)
    )
    point = SweepPoint(bytes=2**28, seconds=1e-3, busbw_bytes_per_s=busbw)
    sweep = SweepFacts(world_size=16, backend="nccl", points=(point,))
    return replace(gathered, nodes=nodes, sweep=sweep)


def test_a_node_whose_gpus_are_slower_than_the_others_is_named():
    verdict = judge(measured(answers(H100, H100, H100), 7e14, 7e14, 5e14), ON_8_H100, note=NOTE)
    found = only(verdict)
    assert (found.node, found.name, found.id) == ("node03", "matmul", "straggler-throttle")


def test_another_nccl_that_is_loaded_is_a_fail_wherever_it_came_from():
    gathered = measured(answers(H100, H100, H100), 7e14, 7e14, 7e14)
    third = gathered.nodes[2]
    assert third.torch is not None
    odd = replace(third, torch=replace(third.torch, nccl="2.21.5"))
    found = only(judge(replace(gathered, nodes=(*gathered.nodes[:2], odd)), ON_8_H100, note=NOTE))
    assert (found.node, found.id, found.status) == ("node03", "nccl-version-mismatch", "fail")
    assert found.evidence == "PyTorch loads NCCL 2.21.5, on most nodes 2.20.5"


def test_all_reduce_far_below_the_links_of_the_plan_is_a_warning():
    verdict = judge(measured(answers(H100, H100), 7e14, 7e14, busbw=11e9), ON_8_H100, note=NOTE)
    found = only(verdict)
    assert found.id == "slow-collectives"
    assert "bus bandwidth 11 GB/s, algorithm bandwidth 268 GB/s at 256 MiB" in found.evidence
    assert "400 GB/s" in found.evidence


def test_s0_2_a_node_without_the_plans_nvlinks_is_a_warning():
    bare = replace(H100, gpu=replace(H100.gpu, topology=H100.gpu.topology.replace("NV18", "PHB ")))
    found = only(judged(bare, need=replace(ON_8_H100, link_bytes_per_s=450e9)))
    assert (found.name, found.status) == ("links", "warning")
    assert found.evidence == (
        "no NVLink or XGMI here: PHB; the plan counts on 450 GB/s between its GPUs"
    )
    assert not not_right(judged(bare, need=replace(ON_8_H100, link_bytes_per_s=63e9)))


def test_a_torch_without_the_gpus_kernels_is_said_so():
    gathered = answers(H100)
    torch = TorchFacts(
        torch="2.6.0",
        is_available=True,
        devices=(
            Device(
                name="GPU 0",
                why_not="CUDA error: no kernel image is available for execution on the device",
            ),
        ),
    )
    nodes = (replace(gathered.nodes[0], torch=torch),)
    found = only(judge(replace(gathered, nodes=nodes), ON_8_H100, note=NOTE))
    assert found.id == "no-kernel-image"


def test_what_was_gathered_is_the_same_after_a_file():
    gathered = measured(answers(H100, EFA, MI300, MAC), 1.0, 2.0, 3.0, 4.0)
    assert msgspec.json.decode(msgspec.json.encode(gathered), type=Gathered) == gathered


def test_what_a_job_needs_is_its_plans():
    text = """
model: {preset: llama-3-8b}
train: {global_batch: 64, steps: 10}
data: {corpus: python-stdlib, seq_len: 4096}
cluster: {accelerator: H100-SXM, nodes: 4, per_node: 8, network: 8x400Gb/s InfiniBand}
checkpoint: {keep_last: 2, keep_best: 1}
"""
    job = parse_job(text, source="job.yaml", folder=Path("/"))
    need = need_of(job, plan_job(job), place="ssh")
    assert (need.num_nodes, need.ranks_per_node, need.backend) == (4, 8, "nccl")
    assert need.is_apart
    assert need.wants_rdma
    assert need.num_checkpoints == 4  # and the one that is being written
    assert need.checkpoint_bytes > 8e9 * 12  # parameters and two moments, float32
    assert need.network_bytes_per_s == pytest.approx(400e9)
    assert need.rates_known == "declared"
    assert "NCCL_P2P_DISABLE" in need.harmful


def test_s4_9_every_nodes_rate_and_share_is_told_and_one_that_computes_nothing_is_named():
    gathered = answers(H100, H100, H100)

    def of(rate: float | None) -> TorchFacts:
        device = Device(name="GPU 0", matmul_flops_per_s=rate, why_not=None if rate else "lost")
        return TorchFacts(torch="2.6.0", is_available=True, devices=(device,) * 2)

    def verdict(*rates: float | None) -> Preflight:
        nodes = zip(gathered.nodes, rates, strict=True)
        told = tuple(replace(node, torch=of(rate)) for node, rate in nodes)
        return judge(replace(gathered, nodes=told), ON_8_H100, note=NOTE)

    found = verdict(4e14, 4e14, 2e14)
    assert [each.share for each in found.rates] == pytest.approx([0.4, 0.4, 0.2])
    text = "\n".join(format_preflight(found))
    assert "waits for node03: 40% of what the nodes can do is lost" in text
    found = verdict(4e14, None, 4e14)
    assert (found.rates[1].flops_per_s, found.rates[1].why_not) == (0, "lost")
    assert "node02 computes nothing" in "\n".join(format_preflight(found))
    assert judged(H100, H100).rates == ()
