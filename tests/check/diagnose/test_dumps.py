"""Stacks, flight-recorder dumps, NCCL's report and queues: what each concludes."""

import json
import os
import pickle

import pytest
from tests.check.diagnose.corpus import diagnose_text

from paceline.check.diagnose.conclusion import diagnosis_data
from paceline.check.diagnose.diagnose import diagnose
from paceline.check.diagnose.flight import of_newest_generation, read_dump
from paceline.record.log_files import Log
from paceline.report.diagnose_text import diagnosis_lines

IN_TORCH = "/opt/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py"


def entry(seq, operation, sizes, state, line):
    return {
        "record_id": seq,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "profiling_name": f"nccl:{operation}",
        "input_sizes": [sizes],
        "input_dtypes": ["Float"],
        "state": state,
        "is_p2p": False,
        "frames": [
            {"name": "all_reduce", "filename": IN_TORCH, "line": 5},
            {"name": "step", "filename": "/u/train.py", "line": line},
        ],
    }


def dumps(*ranks, pack=pickle.dumps):
    group = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2]"}}
    return [
        Log(
            name=f"nccl_trace_rank_{rank}",
            rank=rank,
            blocks=[pack({"version": "2.4", "pg_config": group, "entries": entries})],
        )
        for rank, entries in enumerate(ranks)
    ]


DONE = entry(1, "all_reduce", [4], "completed", 10)
WAITS = entry(2, "all_reduce", [4], "started", 11)


def as_json(content):
    return json.dumps(content).encode()


def test_a_dump_names_the_rank_that_never_called_the_collective():
    for pack in (pickle.dumps, as_json):
        cause = diagnose(dumps([DONE, WAITS], [DONE, WAITS], [DONE], pack=pack)).causes[0]
        assert cause.rank == 2
        assert "never called collective 2 (all_reduce at /u/train.py:11 in step)" in cause.what
        assert cause.place == "/u/train.py:10 in step"


def test_a_dump_names_another_operation_and_other_sizes():
    broadcast = entry(2, "broadcast", [4], "started", 30)
    cause = diagnose(dumps([DONE, WAITS], [DONE, broadcast], [DONE, WAITS])).causes[0]
    assert (cause.id, cause.rank) == ("collective-mismatch", 1)
    wide = entry(2, "all_reduce", [8], "started", 11)
    cause = diagnose(dumps([DONE, WAITS], [DONE, WAITS], [DONE, wide])).causes[0]
    assert (cause.id, cause.rank) == ("collective-mismatch", 2)
    assert "input sizes" in cause.what


def test_ranks_that_agree_have_no_cause():
    assert not diagnose(dumps([DONE], [DONE], [DONE])).causes


def test_a_dump_that_would_run_code_is_refused_and_nothing_runs(tmp_path):
    class Bad:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "made"),))

    log = Log(name="nccl_trace_rank_0", blocks=[pickle.dumps({"entries": [Bad()]})])
    diagnosis = diagnose([log])
    assert "plain data" in diagnosis.troubles[0]
    assert not (tmp_path / "made").exists()


def test_a_damaged_dump_is_said():
    whole = pickle.dumps({"entries": [DONE] * 50})
    for cut in (40, len(whole) // 2, len(whole) - 1):
        assert diagnose([Log(name="d", blocks=[whole[:cut]])]).troubles


def test_a_dump_that_is_nested_without_end_is_reported_as_damaged():
    nested = b'{"entries": [' + b"[" * 200_000 + b"]}"
    (trouble,) = diagnose([Log(name="d", blocks=[nested])]).troubles
    assert "a damaged flight-recorder dump" in trouble


PY_SPY = """\
Process {pid}: /usr/bin/python train.py --local_rank={rank}
Python v3.10.12 (/usr/bin/python3.10)

Thread {pid} (active): "MainThread"
    {top}
    main (train.py:70)
    <module> (train.py:90)
Thread 99 (idle): "Thread-1"
    wait (threading.py:320)
"""


def test_py_spy_of_all_ranks_names_the_one_that_stands_elsewhere():
    waits = "all_reduce (torch/distributed/distributed_c10d.py:2050)\n    step (train.py:40)"
    saves = "save (torch/serialization.py:600)\n    save_checkpoint (train.py:55)"
    text = "".join(
        PY_SPY.format(pid=100 + rank, rank=rank, top=saves if rank == 2 else waits)
        for rank in range(4)
    )
    cause = diagnose_text(text).causes[0]
    assert (cause.id, cause.rank) == ("rank0-only-collective-save", 2)
    assert (
        "train.py:55 in save_checkpoint; 3 others in all_reduce, train.py:40 in step" in cause.what
    )


FAULTHANDLER = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.10/threading.py", line 320 in wait
  File "/usr/lib/python3.10/threading.py", line 55 in run

Current thread 0x00007e1 (most recent call first):
  File "/u/train.py", line {line} in step
  File "/u/train.py", line 90 in <module>
"""
GDB = """\
Thread 2 (Thread 0x7f1 (LWP 12)):
#0  0x00007f in poll () from /lib/libc.so.6
Thread 1 (Thread 0x7f0 (LWP 11)):
#0  0x00007f in {function} (comm=0x1) from /lib/libnccl.so
#1  0x00007e in PyEval_EvalFrame (a=1) at Python/ceval.c:20
"""


def test_faulthandler_and_gdb_of_a_file_for_each_rank():
    logs = [
        Log(
            name=f"rank{r}",
            rank=r,
            blocks=[FAULTHANDLER.format(line=77 if r == 1 else 40).encode()],
        )
        for r in range(3)
    ]
    assert diagnose(logs).causes[0].rank == 1
    logs = [
        Log(
            name=f"rank{r}",
            rank=r,
            blocks=[GDB.format(function="read" if r == 2 else "ncclGroupEnd").encode()],
        )
        for r in range(3)
    ]
    assert diagnose(logs).causes[0].rank == 2


NCCL = """\
node1:11:11 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.5<0>
node1:11:11 [0] NCCL INFO cudaDriverVersion 12040
NCCL version 2.21.5+cuda12.4
node1:11:11 [0] NCCL INFO {devices}
node1:11:11 [0] NCCL INFO Using network {network}
node2:11:11 [0] NCCL INFO Using network {network}
node1:11:11 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/{way}
node1:11:11 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node1:11:11 [0] NCCL INFO comm 0x5 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
node1:11:11 [0] NCCL INFO 16 coll channels, 16 collnet channels, 0 nvls channels, 16 p2p channels
"""
DEVICES = "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.5<0>"


def test_s1_10_nccl_on_sockets_though_rdma_ports_are_there_is_the_cause_of_slowness():
    diagnosis = diagnose_text(NCCL.format(devices=DEVICES, network="Socket", way="Socket/0"))
    assert diagnosis.causes[0].id == "ethernet-fallback"
    assert "though 2 RDMA ports are there: mlx5_0, mlx5_1" in diagnosis.facts["network"]


def test_s1_10_variables_in_the_log_that_are_better_unset_are_named_with_the_reason():
    text = NCCL.format(devices=DEVICES, network="IB", way="IB/0/GDRDMA")
    told = "node1:11:11 [0] NCCL INFO {} set by environment to {}.\n"
    text += told.format("NCCL_ALGO", "Ring") + told.format("NCCL_SOCKET_IFNAME", "eth0")
    unset = diagnose_text(text).facts["unset"]
    assert unset.startswith("NCCL_ALGO=Ring: a debugging setting")
    assert "IFNAME" not in unset


ON_SOCKETS = """\
n1:10:20 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
n1:10:20 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0>
n1:10:20 [0] NCCL INFO Using network Socket
n1:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
n1:10:20 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
n1:10:20 [0] NCCL INFO Channel 01/0 : 3[1] -> 0[0] [receive] via NET/Socket/1
n1:10:20 [0] NCCL INFO Channel 01/0 : 2[0] -> 3[1] via SHM/direct/direct
n1:10:20 [0] NCCL INFO 2 coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels
"""


def test_s1_10_the_transport_of_each_pair_of_ranks_and_the_network_plugin_are_named():
    diagnosis = diagnose_text(ON_SOCKETS)
    assert diagnosis_data(diagnosis)["facts"]["nccl"]["pairs"] == [
        {"ranks": [0, 1], "transports": ["P2P/CUMEM/read"]},
        {"ranks": [0, 3], "transports": ["NET/Socket"]},
        {"ranks": [1, 2], "transports": ["NET/Socket"]},
        {"ranks": [2, 3], "transports": ["SHM/direct/direct"]},
    ]
    text = " ".join(" ".join(diagnosis_lines(diagnosis)).split())
    assert "NET/Socket 0-3, 1-2; P2P/CUMEM/read 0-1; SHM/direct/direct 2-3" in text
    assert "network plugin internal (libnccl-net.so not found)" in text


def test_s1_10_of_many_pairs_the_text_shows_some_and_json_all():
    line = "n1:10:20 [0] NCCL INFO Channel 00/0 : {}[0] -> {}[0] [send] via NET/IB/{}/GDRDMA\n"
    text = "n1:10:20 [0] NCCL INFO Using network IB\n"
    text += "".join(line.format(rank, rank + 1, rank % 2) for rank in range(40))
    diagnosis = diagnose_text(text)
    assert diagnosis.facts["pairs"].endswith("7-8, and 32 more")
    assert len(diagnosis.nccl["pairs"]) == 40


@pytest.mark.parametrize(
    ("said", "plugin"),
    [
        ("NET/Plugin: Loaded net plugin AWS Libfabric (v8)", "AWS Libfabric"),
        ("NET/Plugin: Loaded net plugin IBext_v8 (v8)", "IBext_v8"),
        ("NET/Plugin : No plugin found (libnccl-net.so).", "internal"),
        ("NET/IB : Using [0]mlx5_0:1/IB", None),
    ],
)
def test_s1_10_a_plugin_is_the_one_that_was_loaded(said, plugin):
    line = "n1:10:20 [0] NCCL INFO "
    assert diagnose_text(f"{line}{said}\n{line}Using network IB\n").nccl["plugin"] == plugin


def test_s4_5_warnings_of_nccl_are_shown_where_nothing_failed_and_json_has_fields():
    warning = "Could not find a path for pattern 4, falling back to simple order"
    text = NCCL.format(devices=DEVICES, network="IB", way="IB/0/GDRDMA")
    diagnosis = diagnose_text(f"{text}h1:9:9 [0] graph/search.cc:1135 NCCL WARN {warning}\n" * 2)
    assert warning in " ".join(" ".join(diagnosis_lines(diagnosis)).split())
    fields = diagnosis_data(diagnosis)["facts"]["nccl"]
    assert (fields["network"], fields["gdr"], fields["channels"]) == (["IB"], True, 16)
    assert [each["text"] for each in fields["warnings"]] == [warning]
    assert fields["verdict"].endswith("GPUDirect RDMA on all 2 connections between nodes")
    slow = diagnose_text(NCCL.format(devices=DEVICES, network="IB", way="IB/0"))
    assert slow.nccl["gdr"] is False


def test_s4_5_a_device_that_a_warning_names_is_not_said_to_be_missing():
    warning = "n1:10:20 [0] NCCL WARN NET/IB : Unable to open device mlx5_0\n"
    refused = diagnose_text(ON_SOCKETS + warning)
    assert refused.facts["network"].endswith(
        "mlx5_0 is there and was not used: NET/IB : Unable to open device mlx5_0"
    )
    (cause,) = refused.causes
    assert (cause.id, refused.has_failed) == ("ethernet-fallback", False)
    assert "no RDMA device was found" in diagnose_text(ON_SOCKETS).facts["network"]


def test_nccl_without_gpudirect_is_named_and_with_it_nothing_is_wrong():
    slow = diagnose_text(NCCL.format(devices=DEVICES, network="IB", way="IB/0"))
    assert slow.causes[0].id == "gdr-peermem-missing"
    good = diagnose_text(NCCL.format(devices=DEVICES, network="IB", way="IB/0/GDRDMA"))
    assert not good.causes
    assert not good.has_failed
    assert "GPUDirect RDMA on all 1 connections" in good.facts["network"]
    assert "NCCL 2.21.5+cuda12.4; CUDA driver 12.4; 16 ranks; 2 nodes" in good.facts["nccl"]


def test_texts_of_queues_say_why_the_job_does_not_start():
    squeue = " 4711       gpu    train       me PD       0:00      8 (QOSMaxGRESPerUser)\n"
    cause = diagnose_text(squeue).causes[0]
    assert cause.id == "slurm-job-pending"
    assert "a limit of the account or QOS is reached" in cause.what
    ray = "Demands:\n {'GPU': 1.0}: 4+ pending tasks/actors\n"
    cause = diagnose_text(ray).causes[0]
    assert cause.id == "ray-unsatisfiable-resources"
    assert "no node gives {'GPU': 1.0}; 4+ such requests wait" in cause.what
    pod = (
        "  Warning  FailedScheduling  2m  default-scheduler  "
        "0/8 nodes are available: 8 Insufficient nvidia.com/gpu. preemption: none\n"
    )
    cause = diagnose_text(pod).causes[0]
    assert cause.id == "k8s-gang-partial"
    assert "0 of 8 nodes can take the pod: 8 Insufficient nvidia.com/gpu" in cause.what


def test_an_xid_of_the_kernel_log_is_the_cause_and_a_secondary_one_never():
    head = "Mar 21 02:07:0{} node7 kernel: [123.456789] NVRM: Xid (PCI:0000:3b:00): {}, {}\n"
    text = head.format(7, 45, "pid=2713, name=python, Ch 00000010") + head.format(
        8, 79, "pid=0, GPU has fallen off the bus."
    )
    diagnosis = diagnose_text(text)
    assert (diagnosis.causes[0].id, diagnosis.causes[0].host) == ("xid-79-fallen-off-bus", "node7")
    assert "xid-45-preemptive-cleanup" in {each.id for each in diagnosis.consequences}


def test_a_rank_that_waits_for_data_is_named_at_its_own_line_and_no_time_out_is_claimed():
    loads = "select (selectors.py:415)\n    wait (multiprocessing/connection.py:947)\n"
    loads += "    _try_get_data (torch/utils/data/dataloader.py:1243)\n    train (train.py:120)"
    waits = "all_reduce (torch/distributed/distributed_c10d.py:2050)\n    step (train.py:40)"
    text = "".join(
        PY_SPY.format(pid=100 + rank, rank=rank, top=loads if rank == 2 else waits)
        for rank in range(4)
    )
    cause = diagnose_text(text).causes[0]
    assert (cause.rank, cause.place) == (2, "train.py:120 in train")
    assert "train.py:120 in train" in cause.evidence[0].text
    assert "timeout" not in cause.title.lower()


def test_one_process_that_waits_for_others_shows_the_frames_that_matter():
    gdb = GDB.format(function="ncclSocketProgress").replace(
        "#1 ", "#1  0x00007e in bootstrapInit () from /lib/libnccl.so\n#2 "
    )
    diagnosis = diagnose_text(gdb)
    assert not diagnosis.is_concluded
    assert "stands in ncclSocketProgress; bootstrapInit" in diagnosis.unknown[0].text
    aborted = f"""\
Fatal Python error: Aborted

Current thread 0x00007f01bb (most recent call first):
  File "{IN_TORCH}", line 2834 in all_reduce
  File "/home/u/train.py", line 77 in main
"""
    told = " ".join(each.text for each in diagnose_text(aborted).unknown)
    assert "in all_reduce; /home/u/train.py:77 in main" in told


def test_one_nodes_log_does_not_say_how_many_nodes_there_are():
    line = "node0:10:12 [0] NCCL INFO "
    text = f"{line}NET/IB : No device found.\n{line}Using network Socket\n"
    text += f"{line}ncclCommInitRank comm 0x55 rank 0 nranks 16 cudaDev 0 - Init START\n"
    unknown = diagnose_text(text).facts["network"]
    assert "how many nodes there are is not said" in unknown
    crossed = f"{line}Channel 00/0 : 15[7] -> 0[0] [receive] via NET/Socket/0\n"
    several = diagnose_text(text + crossed).facts["network"]
    assert "one node" not in several
    assert "not said" not in several
    local = f"{line}comm 0x5 rank 0 nRanks 16 localRanks 16 localRank 0\n"
    assert "one node, so GPUs do not use it" in diagnose_text(text + local).facts["network"]


def test_s1_10_rdma_forbidden_between_nodes_is_certain_with_its_line_and_no_device_is_invented():
    line = "n1:10:20 [0] NCCL INFO "
    text = f"""\
{line}NCCL_IB_DISABLE set by environment to 1.
{line}NET/Socket : Using [0]eth0:10.0.0.1<0> [1]docker0:172.17.0.1<0>
{line}Using network Socket
{line}Channel 00/0 : 15[7] -> 0[0] [receive] via NET/Socket/0
{line}comm 0x1 rank 0 nranks 16 cudaDev 0 busId 1b000 commId 0x2 - Init COMPLETE
"""
    diagnosis = diagnose_text(text)
    assert not diagnosis.has_failed
    (cause,) = diagnosis.causes
    assert (cause.id, cause.confidence) == ("ethernet-fallback", "certain")
    assert cause.failure.fix.startswith("Unset NCCL_IB_DISABLE")
    assert "NCCL_IB_DISABLE=1 forbids RDMA" in cause.what
    assert "whether there are RDMA devices is not said" in cause.what
    assert "NCCL_IB_DISABLE" in cause.evidence[0].text


def test_s1_10_a_bridge_taken_between_nodes_has_a_fix_and_a_real_interface_none():
    line = "n1:10:20 [0] NCCL INFO "
    text = f"""\
{line}Bootstrap : Using NAME:172.17.0.1<0>
{line}NET/Socket : Using [0]NAME:172.17.0.1<0>
{line}Using network Socket
{line}Channel 00/0 : 15[7] -> 0[0] [receive] via NET/Socket/0
"""
    cause = diagnose_text(text.replace("NAME", "docker0")).causes[0]
    assert (cause.id, cause.evidence[0].where.line) == ("nccl-wrong-interface", 1)
    assert "NCCL takes docker0, which no other node can be reached over" in cause.what
    assert "NCCL_SOCKET_IFNAME=NAME" in cause.check
    real = diagnose_text(text.replace("NAME", "eth0")).causes
    assert [each.id for each in real] == ["ethernet-fallback"]
    one_node = text.replace("via NET/Socket/0", "via P2P/CUMEM")
    alone = diagnose_text(one_node.replace("NAME", "docker0")).causes
    assert [each.id for each in alone] == ["ethernet-fallback"]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("NCCL_IB_HCA set to mlx5_1", "NCCL_IB_HCA=mlx5_1 takes mlx5_10 too"),
        ("NCCL_IB_HCA set to =mlx5_1", None),
        ("NCCL_DEBUG set by environment to TRACE", "prints what INFO prints"),
        ("NCCL_NTHREADS set by environment to 256.", None),
        ("NCCL_NTHREADS set by environment to 4.", "NCCL_NTHREADS=4: only 64, 128, 256 and 512"),
    ],
)
def test_s4_5_diagnose_names_a_setting_that_is_not_taken_as_meant(setting, said):
    line = "n1:10:20 [0] NCCL INFO "
    text = f"{line}{setting}\n{line}NET/IB : Using [0]mlx5_1:1/IB [1]mlx5_10:1/IB\n"
    unset = diagnose_text(f"{text}{line}Using network IB\n").facts.get("unset")
    assert said in unset if said else unset is None


def test_one_ranks_dump_alone_says_where_it_stands_and_concludes_nothing():
    group = "group 0 default_pg"
    diagnosis = diagnose(dumps([DONE, WAITS]))
    assert not diagnosis.is_concluded
    assert f"{group}: waits in collective 2 (all_reduce at" in diagnosis.unknown[0].text
    assert "the other ranks' are needed" in diagnosis.facts["dump"]
    ended = diagnose(dumps([DONE]))
    assert not ended.is_concluded
    assert f"{group}: all ended, the last was collective 1" in ended.unknown[0].text
    assert "unknown" in next(diagnosis_lines(ended))


def test_dumps_of_an_earlier_generation_are_not_compared_with_the_newest():
    old = read_dump(json.dumps({"generation": 1, "entries": [entry(9, "x", [1], "started", 1)]})
                    .encode(), source="old", rank=1)  # fmt: skip
    new = read_dump(json.dumps({"generation": 2, "entries": [entry(3, "x", [1], "started", 1)]})
                    .encode(), source="new", rank=0)  # fmt: skip
    assert of_newest_generation([old, new]) == [new]
    assert of_newest_generation([]) == []
