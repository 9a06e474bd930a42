"""The GPU kit's own code, on a CPU: what it shows of a GPU, only a GPU can say."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata

import pytest
import torch
from tests.gpu import checks, kit
from tests.gpu.checks import CHECKS
from tests.gpu.kit import BEGIN, END, LIMITS_S, PAGE, Line, run_check, table, with_figures

from paceline.control import parent


def test_without_a_gpu_the_kit_says_so_in_one_sentence_and_does_not_pass(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kit.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("./test-gpu: nothing was checked: PyTorch")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("version", "torch_version", "free", "said"),
    [
        ((3, 10, 4), "2.11.0", 80, "it needs 3.11 to 3.13"),
        ((3, 14, 0), "2.11.0", 80, "it needs 3.11 to 3.13"),
        ((3, 12, 3), "2.6.0+cu124", 80, "this is PyTorch 2.6.0+cu124; it needs 2.11 or newer"),
        ((3, 12, 3), "2.11.0+cu130", 3, "3.0 GiB of the NVIDIA L4's memory are free"),
        ((3, 12, 3), "2.11.0+cu130", 22, None),
    ],
)
def test_what_no_check_would_get_through_is_found_before_the_first_one(
    monkeypatch, version, torch_version, free, said
):
    monkeypatch.setattr(kit.sys, "version_info", version)
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 24 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L4")
    why = kit.why_no_gpu()
    assert why is None if said is None else said in why


def test_packages_that_are_missing_are_named_before_the_first_check(monkeypatch):
    monkeypatch.setattr(kit, "find_spec", lambda name: None if name in ("xxhash", "yaml") else name)
    assert (
        kit.why_no_gpu() == "this Python has no xxhash, pyyaml (docs/gpu.md has the list of wheels)"
    )


def test_torch_is_named_with_the_other_packages_that_are_missing(monkeypatch):
    monkeypatch.setattr(kit, "find_spec", lambda name: None if name == "torch" else name)
    assert "this Python has no torch (for CUDA)" in kit.why_no_gpu()


@pytest.mark.parametrize(
    ("visible", "cuda", "reason"),
    [
        ("7", "13.0", "CUDA_VISIBLE_DEVICES='7'; unset it"),
        (None, None, "it was built without CUDA"),
        (None, "13.0", "The NVIDIA driver on your system is too old (found version 11040)."),
    ],
)
def test_the_reason_that_no_device_is_seen_is_given(monkeypatch, visible, cuda, reason):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nSo")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert f"sees no CUDA device: {reason}" in kit.why_no_gpu()


def needed(names: Iterable[str]) -> set[str]:
    """Packages and all that they need, here, without extras."""
    found: set[str] = set()
    left = list(names)
    while left:
        name = re.split(r"[^A-Za-z0-9._-]", left.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        wanted = metadata.requires(name) or []
        left += [each for each in wanted if ";" not in each]
    return found


def test_the_page_lists_every_wheel_that_the_kit_needs():
    project = tomllib.loads((kit.ROOT / "pyproject.toml").read_text())["project"]
    block = re.search(r"pip download -d wheels ([^`]*)\n```", PAGE.read_text())
    assert block is not None
    listed = set(block[1].replace("\\\n", " ").split())
    wanted = needed([*project["dependencies"], *kit.PACKAGES.values()])
    assert wanted - listed == set()


def test_a_contract_is_checked_without_the_plugins_of_the_projects_own_tests(monkeypatch):
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="6 passed\n", stderr="")

    monkeypatch.setattr(checks.subprocess, "run", run)
    assert CHECKS["contract"]("cpu").verdict == "pass"
    (command,) = commands
    words = command[command.index("pytest") :]
    done = REAL_RUN(
        [sys.executable, "-m", *words, "-p", "no:timeout", "--collect-only"],
        capture_output=True, text=True, cwd=kit.ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_one_rank_after_an_abort_another_group_can_be_made" in done.stdout


REAL_RUN = subprocess.run


def test_a_holder_that_never_held_is_a_fail_of_its_own(monkeypatch):
    monkeypatch.setattr(checks, "HOLDER", "raise MemoryError")
    line = CHECKS["death"]("cpu")
    assert (line.verdict, line.expected) == ("fail", "memory comes back")
    assert line.found.endswith("ended before it did")


def test_sizes_follow_the_memory_that_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (22 * 2**30, 24 * 2**30))
    held = 2 * checks._at_most(20 << 30, "cuda", share=1 / 3)
    assert 14 * 2**30 < held < 15 * 2**30
    assert checks._at_most(7_000_000_000, "cuda", bytes_each=4, share=2 / 3) < 22 * 2**30 / 4
    assert checks._at_most(8 << 20, "cuda", share=1 / 3) == 8 << 20


def test_layouts_that_this_torch_or_a_package_lacks_are_left_out(monkeypatch):
    monkeypatch.delattr(checks.PipelineStage, "_setup_forward_recv_info")
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    monkeypatch.setattr(checks, "_layout", lambda name, device: {})
    monkeypatch.setattr(checks, "_proved", lambda name, device: None)
    names = [name for name, *_ in checks._layouts("cpu")]
    assert names == [
        *("DDP", "ZeRO-1", "ZeRO-2", "FSDP2", "hybrid", "tensor 8 + FSDP2"),
        *("context 8", "recompute"),
    ]


def test_two_ranks_without_a_newer_nccl_are_not_run_and_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    line = CHECKS["two-ranks"]("cuda")
    assert line.verdict == "not run"
    assert "pip install --no-deps 'nvidia-nccl-cu13>=2.30'" in line.found


def test_all_checks_together_take_25_minutes_at_most():
    assert sum(LIMITS_S.values()) <= 25 * 60
    assert list(CHECKS) == list(LIMITS_S)


def test_an_unknown_check_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as ended:
        kit.main(["memry"])
    assert ended.value.code == 2
    assert "there is no check memry; there are contract, memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "said"),
    [("import os; os._exit(3)", "exit code 3"), ("import time; time.sleep(60)", "nothing in 1 s")],
)
def test_a_check_that_dies_or_hangs_is_a_fail_and_the_next_one_begins(monkeypatch, program, said):
    real = kit.subprocess.Popen
    monkeypatch.setattr(
        kit.subprocess,
        "Popen",
        lambda command, **options: real([sys.executable, "-c", program], **options),
    )
    line = run_check("death", "cpu", limit_s=1 if "sleep" in program else 60)
    assert (line.verdict, line.found) == ("fail", said)


def test_a_check_that_raises_is_a_fail_with_the_reason(monkeypatch, capsys):
    def broken(device):
        raise RuntimeError("no |memory| left")

    monkeypatch.setitem(CHECKS, "death", broken)
    monkeypatch.setattr(kit.os, "_exit", lambda code: None)
    monkeypatch.setattr(parent, "die_with_parent", lambda pid: None)
    kit._one("death", "cpu", 1)
    line = Line(**json.loads(capsys.readouterr().out))
    assert (line.verdict, line.found) == ("fail", "RuntimeError: no /memory/ left")


def test_what_a_check_started_ends_when_the_check_is_killed():
    child = "import time; print('alive', flush=True); time.sleep(60); print('still alive')"
    program = (
        "import subprocess, sys; from tests.gpu.kit import tied; "
        "subprocess.run(tied([sys.executable, '-c', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", program, child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=kit.ROOT) as check:
        assert check.stdout is not None
        assert check.stdout.readline() == "alive\n"
        check.kill()
        assert check.stdout.read() == ""  # at its end nobody holds the pipe any more


def test_the_table_replaces_the_pages_figures_and_nothing_else():
    lines = [Line(name="death", expected="-", found="0.1 s", verdict="measured", seconds=1.5)]
    page = PAGE.read_text()
    new = with_figures(page, table(lines, "cpu"))
    assert "| death | - | 0.1 s | measured | 1.5 |" in new
    assert "CPU (shows nothing of a GPU)" in new
    assert new.partition(BEGIN)[0] == page.partition(BEGIN)[0]
    assert new.partition(END)[2] == page.partition(END)[2]


def test_checks_run_in_parts_fill_one_table_unless_machine_or_day_differ():
    def with_one(page, name, found):
        line = Line(name=name, expected="-", found=found, verdict="measured")
        return with_figures(page, table([line], "cpu"))

    whole = with_one(with_one(PAGE.read_text(), "death", "1 s"), "memory", "5 GiB")
    assert whole.index("| memory | - | 5 GiB |") < whole.index("| death | - | 1 s |")
    again = with_one(whole, "death", "2 s")
    assert again == whole.replace("| 1 s |", "| 2 s |")
    later = with_one(whole.replace(", Python 3", ", Python 2"), "death", "2 s")
    assert "| 5 GiB |" not in later
    assert later.count("| check |") == 2  # the page's own table of checks is the other


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "cpu", "--write"), "--write puts a GPU's figures into docs/gpu.md"),
        (("--device", "nope"), "invalid choice: 'nope'"),
    ],
)
def test_figures_of_a_cpu_and_unknown_devices_are_refused(capsys, words, said):
    with pytest.raises(SystemExit) as ended:
        kit.main(["death", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *("stall", "guard", "death", "narrow"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sticky", "gloo-on-gpu")),
    ],
)
def test_a_check_runs_on_a_cpu_and_holds(name):
    line = CHECKS[name]("cpu")
    assert line.name == name
    assert line.verdict in ("pass", "measured"), line


def test_two_ranks_on_one_gpu_are_not_run_without_nccl():
    line = CHECKS["two-ranks"]("cpu")
    assert (line.verdict, line.found) == ("not run", "a CPU has no NCCL")


@pytest.mark.slow
@pytest.mark.parametrize("fork_server", ["tests.gpu.gloo_fork_server", "tests.sim.fork_server"])
def test_the_drills_of_two_ranks_hold_over_gloo_and_over_the_double(monkeypatch, fork_server):
    monkeypatch.setenv("PACELINE_KIT_DEVICE", "cpu")
    if fork_server == "tests.sim.fork_server":  # every kernel of it takes 0.4 ms
        few = ("kill rank=1 step=3 phase=backward", "kill rank=1 step=3 phase=restore")
        monkeypatch.setattr(checks, "DRILLS", {"kills": ("adamw", 5, few)})
    monkeypatch.setenv("PACELINE_FORK_SERVER", fork_server)
    paths = (str(kit.ROOT), str(kit.ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    assert [each.found for each in checks.drills(fork_server) if each.status == "fail"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipeline 4, last", "tensor 8 + FSDP2", "experts 8"])
def test_one_rank_of_a_layout_takes_real_steps_under_a_fake_group(name):
    words = [name, "cpu", "cpu", "off"]
    command = [sys.executable, "-m", "tests.gpu.layouts", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=kit.ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["peak"] is None
    assert found["seconds"] > 0
