"""What one line says of itself, in the forms of launchers and loggers."""

import pytest

from paceline.check.diagnose.line import read_line


@pytest.mark.parametrize(
    ("raw", "message", "known"),
    [
        ("[rank3]: ValueError: x", "ValueError: x", {"rank": 3}),
        ("[default3]:[rank11]: ValueError: x", "ValueError: x", {"rank": 11, "local_rank": 3}),
        ("3: ValueError: x", "ValueError: x", {"rank": 3}),
        ("[1,3]<stderr>:ValueError: x", "ValueError: x", {"rank": 3}),
        (
            "(RayTrainWorker pid=123, ip=10.0.0.1) ValueError: x",
            "ValueError: x",
            {"pid": 123, "host": "10.0.0.1"},
        ),
        ("\x1b[36m(train pid=7)\x1b[0m ValueError: x", "ValueError: x", {"pid": 7}),
        ("worker-1: ValueError: x", "ValueError: x", {"host": "worker-1", "rank": None}),
        ("ValueError: 3: x", "ValueError: 3: x", {"rank": None, "host": None}),
        ("job-worker-1 pytorch │ ValueError: x", "ValueError: x", {"host": "job-worker-1"}),
        (
            "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught",
            "Watchdog caught",
            {"rank": 0, "level": "E"},
        ),
        ("2024-05-01 12:00:00.1: E tensorflow/c/x.cc:12] bad", "bad", {"level": "E"}),
        ("2024-05-01T12:00:00.123456789Z stderr F bad thing", "bad thing", {}),
        ("[2024-05-01 12:00:00,1] [ERROR] [launch.py:3:main] bad", "bad", {"level": "E"}),
        ("[2024-05-01 12:00:00,1] [INFO] [axolotl.x:45] [PID:9] [RANK:3] ok", "ok", {"rank": 3}),
        ('    "message": "MemoryError: std::bad_alloc",', 'MemoryError: std::bad_alloc",', {}),
        ("node1:1234:1300 [3] NCCL WARN bad", "NCCL WARN bad", {"host": "node1", "local_rank": 3}),
        (
            "Mar 21 02:07:08 node1 kernel: [12345.678901] NVRM: Xid (PCI:0000:3b:00): 13, x",
            "NVRM: Xid (PCI:0000:3b:00): 13, x",
            {"host": "node1"},
        ),
    ],
)
def test_what_launchers_and_loggers_put_in_front_is_read_and_taken_off(raw, message, known):
    line = read_line(raw, source="-", number=1)
    assert line.message == message
    assert {name: getattr(line, name) for name in known} == known


def test_times_of_different_forms_have_one_order():
    glog = read_line("[E0501 12:00:01.5 x.cpp:1] a", source="-", number=1)
    python = read_line("2024-05-01 12:00:01,700 ERROR b", source="-", number=2)
    assert glog.time_s is not None
    assert python.time_s == pytest.approx(glog.time_s + 0.2)
