"""Makes `tests.ranks` importable from every test, lets commands keep their compiled modules, gives
ranks one thread each, and starts the longest files first."""

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests import at_once, ranks
from tests.warm import warm

from paceline.report.table import COLUMNS

sys.path.insert(0, str(Path(__file__).parent.parent))

# A test of ranks starts five processes or more: where this is set each would compile our modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Four files are tested at a time: ranks with several threads each would wait for one another's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Commands and programs that import torch are forks of processes that have imported what they need
# (tests/warm/warm.py). The first process of a session owns those: the ones it distributes files to
# share them.
_WARM = str(Path(__file__).parent / "warm")
if "PACELINE_TESTS_SESSION" not in os.environ:
    _session = tempfile.mkdtemp(prefix="paceline-warm-")
    atexit.register(shutil.rmtree, _session, ignore_errors=True)
    os.environ["PACELINE_TESTS_SESSION"] = f"{_session}:{os.getpid()}"
    if sys.platform == "linux":
        _paths = (_WARM, os.environ.get("PYTHONPATH"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _paths))

# Sentences of screens are looked for whole; how they are wrapped is in tests/cli/test_screens.py.
os.environ["COLUMNS"] = "200"
COLUMNS.set(200)

# How long an example takes is no matter of a test's: on a busy machine it would fail by its time.
settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")

LONGEST_FIRST = (
    *("prove/test_against_estimate.py", "run/test_foreign_programs.py"),
    *("run/test_smoke_script.py", "runtime/test_context.py", "runtime/test_pipeline.py"),
    *("prove/test_prove.py", "contracts/test_phases.py", "runtime/test_tensor.py"),
    *("run/test_resume.py", "runtime/test_shard.py", "drill/test_fault_matrix.py"),
    *("prove/test_against_real_runs.py", "contracts/test_pytorch_trainer.py"),
    *("render/test_carried.py", "runtime/test_nf4.py", "runtime/test_chunked_loss.py"),
    *("plan/test_plan.py", "runtime/test_replicas.py", "docs/test_capability_commands.py"),
    *("check/diagnose/test_diagnose.py", "run/test_own_code.py", "runtime/test_state.py"),
    *("runtime/test_initial.py", "runtime/test_layouts_hf.py", "launch/test_plannable.py"),
    *("profile/test_from_config.py", "prove/test_pipelines.py", "launch/test_engine_run.py"),
    *("runtime/recovery/test_peer.py", "sim/test_contract.py", "sim/test_whole_runs.py"),
    *("runtime/test_session.py", "runtime/test_export.py", "runtime/test_checkpoint.py"),
    *("runtime/test_adapters.py", "plan/test_caution.py", "cli/test_plan_files.py"),
    *("runtime/test_checkpoint_background.py", "run/test_controller.py", "runtime/test_packed.py"),
    # Long with --ranks alone.
    *("runtime/test_layouts.py", "drill/test_fault_matrix_wide.py"),
    *("run/test_sharded_recovery.py", "run/test_recovery.py", "run/test_shrink.py"),
    *("run/test_corruption.py", "verify/test_layouts.py", "run/test_partition.py"),
    *("preflight/test_here.py", "runtime/test_huggingface.py", "preflight/test_hosts.py"),
    *("verify/test_command.py", "bench/test_bench.py", "adapt/test_adapted_runs.py"),
    *("run/test_leaving.py", "cli/test_calibrate.py", "drill/test_soak.py"),
    *("verify/test_planted_faults.py", "run/test_stuck.py", "run/test_recovery_layouts.py"),
)
"""Files that several processes share (`./test`): were one of these the last, the others would wait
for it. By the time they took on 2 cores; a wrong place costs seconds and nothing else."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="Write the golden files of tests/render."
    )
    parser.addoption(
        "--at-once", type=int, default=0, metavar="N", help="Test N files at once, in forks."
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--at-once") and not session.config.option.collectonly:
        # Forks share them. They import what they need on another core than the tests are read on.
        ranks.start_server()
        warm.begin(warm.COMMAND)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("--at-once")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop
    return at_once.run(session, count)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Tests that repeat others, and slow ones, start programs as people do."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("repeat") or item.get_closest_marker("slow"):
            paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            patch.setenv("PYTHONPATH", os.pathsep.join(each for each in paths if each != _WARM))
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
