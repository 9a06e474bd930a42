"""`paceline doctor`: machines with one thing wrong, requirements files, and what --fix installs."""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.command import run_command
from tests.preflight.machines import CONTAINER, H100, MAC, text

import paceline
from paceline.check.preflight.doctor import Asked, Interpreter, check_machine, torch_to_install
from paceline.check.preflight.packages import find_lacks
from paceline.check.preflight.result import Status
from paceline.record.requirements import Requirements, find_requirements, read_requirements
from paceline.topology.node.facts import (
    Device,
    Disk,
    FolderFacts,
    Gathered,
    GpuTexts,
    NodeAnswer,
    TorchBuild,
    TorchFacts,
)
from paceline.topology.node.probe_packages import Installed
from paceline.topology.probe import find_cards

PYTHON = Interpreter(version="3.11.7", executable="/env/bin/python", prefix="/env")
BUILD = TorchBuild(
    version="2.11.0+cu126", cuda="12.6", nccl_wanted="nvidia-nccl-cu12==2.28.9", nccl="2.28.9"
)
NODE = replace(H100, torch_build=BUILD, packages=H100.packages | {"torch": "2.11.0+cu126"})
TORCH = TorchFacts(
    torch="2.11.0+cu126",
    cuda="12.6",
    nccl="2.28.9",
    architectures=("sm_80", "sm_90", "compute_90"),
    is_available=True,
    devices=(Device(name="NVIDIA H100 80GB HBM3", capability="sm_90", matmul_flops_per_s=6e14),),
)


def looked(facts=NODE, torch=TORCH, python=PYTHON, requirements=None, installed=None, **asked):
    gathered = Gathered(
        place="local", at=0.0, nodes=(NodeAnswer(name=facts.host, facts=facts, torch=torch),)
    )
    requirements = requirements or Requirements()
    lacks = find_lacks(requirements, installed or {})
    return check_machine(gathered, Asked(**asked), python, requirements, lacks)


def wrong(results):
    return {
        each.name: (each.status.value, each.id)
        for each in results
        if each.status in (Status.FAIL, Status.WARNING)
    }


def test_s0_20_a_machine_where_nothing_is_wrong_passes_with_all_that_was_seen():
    results = looked(vram_bytes=80 * 10**9, ram_bytes=10**12, disk_bytes=10**12)
    assert wrong(results) == {}
    said = {each.name: each.evidence for each in results}
    assert said["python"] == "Python 3.11.7, /env/bin/python"
    assert said["driver"] == "driver 550.54.15 runs CUDA 12.6"
    assert said["nccl"] == "torch 2.11.0+cu126, NCCL 2.28.9"
    assert said["architectures"].startswith("torch has code for sm_90: sm_80 sm_90")
    assert "8 NVIDIA H100 80GB HBM3, driver 550.54.15" in said["accelerators"]
    assert {"vram", "ram", "disk", "shared-memory", "interface", "rdma"} <= said.keys()


def on_gpu(**changes):
    return replace(NODE, gpu=replace(NODE.gpu, **changes))


def on_torch(**changes):
    return replace(TORCH, **changes)


BUSY = replace(NODE, ports={29500: "Address already in use"})
SMALL = FolderFacts(
    path="/data",
    nearest="/data",
    kind="ext4",
    why_not=None,
    disk=Disk(total_bytes=10**12, free_bytes=30 * 10**9),
)
FAULTS = {
    "torch built for CPUs": (
        {"facts": replace(NODE, torch_build=TorchBuild(version="2.11.0+cpu"))},
        {"nccl": ("fail", "accelerator-not-usable")},
    ),
    "a driver too old for CUDA 13": (
        {"facts": replace(NODE, torch_build=replace(BUILD, cuda="13.0"))},
        {"driver": ("fail", "accelerator-not-usable")},
    ),
    "no code for the card": (
        {"torch": on_torch(architectures=("sm_70", "sm_80"))},
        {"architectures": ("fail", "no-kernel-image")},
    ),
    "another NCCL is loaded": (
        {"torch": on_torch(nccl="2.21.5")},
        {"nccl": ("warning", "nccl-version-mismatch")},
    ),
    "cards that are too small": (
        {"vram_bytes": 96 * 10**9},
        {"vram": ("fail", "cuda-oom")},
    ),
    "too little memory": (
        {"ram_bytes": 4 * 10**12},
        {"ram": ("fail", "host-oom-sigkill")},
    ),
    "too little room": (
        {"facts": replace(NODE, folders=(SMALL,)), "disk_bytes": 50 * 10**9},
        {"disk": ("fail", "disk-full-checkpoint")},
    ),
    "a folder that cannot be written": (
        {"facts": replace(NODE, folders=(replace(SMALL, why_not="Read-only file system"),))},
        {"disk": ("fail", "checkpoint-folder-unusable")},
    ),
    "a port that was named": (
        {"facts": BUSY, "named_ports": (29500,)},
        {"ports": ("fail", "port-in-use")},
    ),
    "the port that nobody named": (
        {"facts": BUSY},
        {"ports": ("warning", "port-in-use")},
    ),
    "a card without a driver": (
        {
            "facts": replace(NODE, gpu=GpuTexts(on_bus=("0000:1b:00.0",)), torch_build=None),
            "torch": None,
            "requirements": Requirements(),
        },
        {
            "driver": ("fail", "accelerator-not-usable"),
            "torch": ("fail", "requirements-not-met"),
        },
    ),
    "a driver that shows no card": (
        {
            "facts": replace(NODE, gpu=GpuTexts(kernel_driver=text("nvidia-driver-version.txt"))),
            "torch": None,
        },
        {"accelerators": ("fail", "accelerator-not-usable")},
    ),
    "two kinds of cards": (
        {"facts": on_gpu(state=NODE.gpu.state.replace("H100 80GB HBM3", "A100-SXM4-80GB", 1))},
        {"accelerators": ("warning", "too-few-accelerators")},
    ),
    "Python below what pyproject.toml asks for": (
        {"requirements": Requirements(python=">=3.12")},
        {"python": ("fail", "requirements-not-met")},
    ),
    "another environment is active": (
        {"python": replace(PYTHON, active="/elsewhere/.venv")},
        {"python": ("warning", "other-python-than-active")},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_s0_20_one_fault_is_the_only_finding_and_has_a_fix(fault):
    given, expected = FAULTS[fault]
    results = looked(**given)
    assert wrong(results) == expected
    assert results[0].status is not Status.PASS, "what is wrong comes first"
    assert all(each.fix for each in results if each.status in (Status.FAIL, Status.WARNING))


def test_s0_20_a_container_with_64_mb_of_shared_memory_fails():
    results = looked(facts=replace(CONTAINER, torch_build=TorchBuild(version="2.11.0")), torch=None)
    assert wrong(results)["shared-memory"] == ("fail", "shm-too-small")


def test_s0_20_a_mac_and_gpus_that_were_hidden_on_purpose_are_judged_as_cpus():
    assert "accelerators" not in wrong(looked(facts=MAC, torch=None))
    hidden = looked(facts=on_gpu(visible=""), torch=None)
    assert "accelerators" not in wrong(hidden)
    sizes = looked(facts=MAC, torch=None, ram_bytes=10**9)
    assert {each.name: each.status for each in sizes}["ram"] is Status.UNKNOWN


@pytest.mark.parametrize(
    ("driver", "wheels"),
    [
        *(("550.54.15", "cu126"), ("580.65.06", "cu130"), ("470.57.02", "cu118")),
        ("390.157", "cu118"),  # runs none of them: not the newest
    ],
)
def test_s0_20_the_torch_to_install_is_one_that_the_driver_runs(driver, wheels):
    kernel = NODE.gpu.kernel_driver.replace("550.54.15", driver)
    index = ["--index-url", f"https://download.pytorch.org/whl/{wheels}"]
    facts = replace(on_gpu(kernel_driver=kernel), torch_build=TorchBuild(version="2.11.0+cpu"))
    again = ["--force-reinstall", "torch", *index]
    assert torch_to_install(looked(facts=facts), facts, []) == again
    missing = replace(facts, torch_build=None)
    results = looked(facts=missing, torch=None)
    assert torch_to_install(results, missing, []) == ["torch", *index]


def test_s0_20_torch_is_installed_once_and_only_where_it_is_wrong(tmp_path):
    assert torch_to_install(looked(), NODE, []) == []
    old = looked(torch=on_torch(architectures=("sm_70",)))
    assert torch_to_install(old, NODE, []) == [], "another build may lack the card as well"
    facts = replace(NODE, torch_build=None)
    (tmp_path / "requirements.txt").write_text("torch>=2.11\n")
    asked = read_requirements([tmp_path / "requirements.txt"])
    lacks = find_lacks(asked, {})
    results = looked(facts=facts, torch=None, requirements=asked)
    assert torch_to_install(results, facts, lacks) == []


def test_s0_20_a_card_on_the_bus_is_found_without_its_driver(tmp_path):
    for name, vendor, kind in (
        ("0000:1b:00.0", "0x10de", "0x030200"),
        ("0000:1b:00.1", "0x10de", "0x040300"),  # its sound
        ("0000:03:00.0", "0x8086", "0x020000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert find_cards(tmp_path) == ("0000:1b:00.0",)


HERE = {
    "numpy": Installed(version="1.24.0"),
    "torch": Installed(
        version="2.11.0+cu126",
        requires=(
            "nvidia-nccl-cu12==2.28.9; platform_system == 'Linux'",
            "opt-einsum>=3.3; extra == 'opt-einsum'",
        ),
    ),
    "nvidia-nccl-cu12": Installed(version="2.21.5"),
    "ruamel-yaml": Installed(version="0.18"),
}


def lacks_of(folder: Path, text: str, **more: object) -> list[str]:
    (folder / "requirements.txt").write_text(text)
    read = read_requirements([folder / "requirements.txt"], **more)
    assert read.troubles == []
    return [lack.evidence for lack in find_lacks(read, HERE)]


def test_s0_20_versions_markers_extras_and_what_packages_need_in_turn_are_compared(tmp_path):
    found = lacks_of(
        tmp_path,
        "# what we train with\n"
        "numpy>=1.26  # for its types\n"
        "ruamel.yaml==0.18\n"
        "pywin32; sys_platform == 'win32'\n"
        "torch[opt-einsum]>=2.11 \\\n"
        "    --hash=sha256:00\n",
    )
    assert [each.replace("torch 2.11.0+cu126", "TORCH") for each in found] == [
        "numpy 1.24.0 is installed; requirements.txt:2 asks for numpy>=1.26",
        "nvidia-nccl-cu12 2.21.5 is installed; TORCH asks for nvidia-nccl-cu12==2.28.9",
        "opt-einsum is not installed; TORCH asks for opt-einsum>=3.3",
    ]


def test_s0_20_included_files_and_constraints_are_followed_and_a_loop_ends(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/base.txt").write_text("-r ../requirements.txt\npeft\n")
    (tmp_path / "limits.txt").write_text("numpy<1.24\nnot-asked-for==1\n")
    found = lacks_of(tmp_path, "-r sub/base.txt\n-c limits.txt\n--index-url https://here/simple\n")
    assert found == [
        "peft is not installed; sub/base.txt:2 asks for peft",
        "numpy 1.24.0 is installed; limits.txt:1 asks for numpy<1.24",
    ]
    read = read_requirements([tmp_path / "requirements.txt"])
    assert read.options == ["--index-url", "https://here/simple"]


def test_s0_20_pyproject_with_an_extra_of_its_own_is_read(tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "Mine"\nrequires-python = ">=3.11"\ndependencies = ["numpy"]\n'
        '[project.optional-dependencies]\ntrain = ["peft"]\nall = ["mine[train]", "trl"]\n'
    )
    read = read_requirements([tmp_path / "pyproject.toml"], extras=["all"])
    assert [str(each.requirement) for each in read.wanted] == ["numpy", "peft", "trl"]
    assert (read.python, read.troubles) == (">=3.11", [])
    unknown = read_requirements([tmp_path / "pyproject.toml"], extras=["tain"])
    assert unknown.troubles == [("--extra tain", "no pyproject.toml that was read has it")]


def test_s0_20_a_file_for_another_machine_only_warns_when_it_was_found(tmp_path):
    (tmp_path / "requirements-tpu.txt").write_text("jax\n")
    found = read_requirements(find_requirements(tmp_path), named=False)
    assert wrong(looked(requirements=found)) == {"packages": ("warning", "requirements-not-met")}
    named = read_requirements([tmp_path / "requirements-tpu.txt"])
    assert wrong(looked(requirements=named)) == {"packages": ("fail", "requirements-not-met")}


def test_s0_20_paths_are_told_and_addresses_with_a_name_are_looked_up(tmp_path):
    (tmp_path / "requirements.txt").write_text(
        "-e .\n./wheels/a.whl\ngit+https://github.com/x/y@main#egg=peft\ntrl @ https://x/trl.whl\n"
    )
    read = read_requirements([tmp_path / "requirements.txt"])
    assert [where for where, _ in read.troubles] == ["requirements.txt:1", "requirements.txt:2"]
    assert [lack.spec for lack in find_lacks(read, {})] == ["peft", "trl @ https://x/trl.whl"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("pyproject.toml", b'[project]\ndependencies = "numpy"', "have to be a list"),
        ("pyproject.toml", b"project = [", "it is not toml"),
        ("pyproject.toml", b"tool.poetry.name = 'x'", "Poetry's own table"),
        ("requirements.txt", b"\xe9\xff", "it is no utf-8 text"),
        ("requirements.txt", b"-r gone.txt\n", "no such file"),
    ],
)
def test_s0_20_a_file_that_cannot_be_used_is_named_with_the_reason(tmp_path, name, data, said):
    (tmp_path / name).write_bytes(data)
    ((_, why),) = read_requirements([tmp_path / name]).troubles
    assert said in why
    done = run_command("doctor", "--no-torch", "-r", name, folder=tmp_path)
    assert (done.returncode, "T022" in done.stderr) == (2, True)


def test_s0_20_what_powershell_writes_and_odd_tables_are_read(tmp_path):
    (tmp_path / "requirements.txt").write_text("numpy\r\n", encoding="utf-16")
    (tmp_path / "pyproject.toml").write_text("tool = 3\nproject = 4\n")
    read = read_requirements(find_requirements(tmp_path))
    assert ([str(each.requirement) for each in read.wanted], read.troubles) == (["numpy"], [])


def test_s0_20_a_password_in_an_index_is_not_printed(tmp_path):
    (tmp_path / "requirements.txt").write_text(
        "--index-url https://me:hunter2@host/simple\ngit+https://hunter2@host/x\nno-such-of-ours\n"
    )
    words = ["doctor", "--no-torch", "--fix"]
    for more in ([], ["--json"]):
        done = run_command(*words, *more, folder=tmp_path)
        assert "hunter2" not in done.stdout + done.stderr
        assert "https://***@host/simple" in done.stdout


def test_s0_20_a_line_that_is_no_requirement_ends_with_its_place(tmp_path):
    (tmp_path / "reqs.txt").write_text("numpy\ntorch=>2\n")
    done = run_command("doctor", "-r", "reqs.txt", "--json", folder=tmp_path)
    assert done.returncode == 2
    (problem,) = json.loads(done.stdout)["problems"]
    assert problem["code"] == "T022"
    assert problem["what"].startswith("reqs.txt:2: 'torch=>2' is no requirement")


def test_s0_20_the_command_says_what_is_missing_and_which_command_helps(tmp_path):
    (tmp_path / "requirements.txt").write_text("no-such-package-of-ours>=3\n")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["doctor", "--no-torch", "--port", port, "--fix", "--min-disk", "1kB"]
        done = run_command(*words, folder=tmp_path)
        as_json = run_command(*words, "--json", folder=tmp_path)
    assert done.returncode == 1
    first, *lines = done.stdout.splitlines()
    assert first.startswith("Not ready to train: ")
    assert any(line.startswith("fails    packages ") for line in lines)
    assert any(line.startswith("fails    ports ") for line in lines)
    assert "pip install 'no-such-package-of-ours>=3'" in done.stdout
    data = json.loads(as_json.stdout)
    assert (data["fit"], data["installed"]) == (False, False)
    assert data["requirements"] == ["requirements.txt"]
    assert data["pip"][0].endswith("'no-such-package-of-ours>=3'")


def test_s0_20_yes_without_fix_and_a_size_without_a_unit_are_refused(tmp_path):
    assert "--yes goes with --fix" in run_command("doctor", "--yes", folder=tmp_path).stderr
    done = run_command("doctor", "--min-vram", "24", folder=tmp_path)
    assert (done.returncode, "has no unit of bytes" in done.stderr) == (2, True)


def make_wheel(folder: Path, name: str, version: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_s0_20_fix_installs_into_the_environment_that_runs_and_looks_again(tmp_path):
    make_wheel(tmp_path, "oursmall", "2.0")
    (tmp_path / "requirements.txt").write_text(
        f"--no-index\n--find-links {tmp_path}\noursmall>=2\n"
    )
    subprocess.run([sys.executable, "-m", "venv", "env"], cwd=tmp_path, check=True)
    python = tmp_path / "env/bin/python"
    source = Path(paceline.__file__).parent.parent
    path = os.pathsep.join([str(source), sysconfig.get_path("purelib")])
    done = subprocess.run(
        [python, "-m", "paceline", "doctor", "--no-torch", "--fix", "--yes", "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "VIRTUAL_ENV": str(tmp_path / "env")},
        capture_output=True,
        text=True,
        check=False,
    )
    data = json.loads(done.stdout)
    assert data["installed"] is True, done.stderr
    assert not any(
        each["name"] == "packages" and each["status"] == "fail" for each in data["results"]
    )
    assert list((tmp_path / "env").glob("lib/python*/site-packages/oursmall.py"))
    shutil.rmtree(tmp_path / "env")


def test_s4_5_a_variable_that_is_better_left_unset_is_named_on_any_machine():
    for facts, name, value in (
        (NODE, "NCCL_ALGO", "Ring"),
        (NODE, "NCCL_PROTO", "LL"),
        (MAC, "MLX_METAL_FAST_SYNCH", "1"),
    ):
        set_there = replace(facts, environment=facts.environment | {name: value})
        (found,) = (each for each in looked(set_there) if name in each.evidence)
        assert (found.status, found.fix) == (Status.WARNING, f"unset {name}")


def test_a_variable_at_its_default_harms_nothing():
    same = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "MLX_METAL_FAST_SYNCH": "0"}
    assert wrong(looked(replace(NODE, environment=NODE.environment | same))) == {}
