"""What a worker finds in its environment."""

from dataclasses import replace

import pytest
from tests.clusters import h100s

from paceline.control.environment import (
    CONNECT_LIMIT,
    RECOVERY,
    environment_of_workers,
    script_environment,
)
from paceline.launch.ranks import surroundings
from paceline.topology import Cluster


@pytest.fixture
def cluster() -> Cluster:
    return h100s(num_nodes=2, ranks_per_node=8)


def environment_for(
    cluster: Cluster, limit_s: float = 600.0, *, without: str | None = None
) -> dict[str, str]:
    return environment_of_workers(cluster, "127.0.0.1", limit_s=limit_s, without=without)


def test_torchs_watchdogs_end_no_worker(cluster: Cluster) -> None:
    environment = environment_for(cluster)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    set_by_agents = {name: setting.value for name, setting in RECOVERY.items()}
    assert set_by_agents.items() <= environment.items()


@pytest.mark.parametrize(("limit_s", "expected"), [(900.0, "900"), (10.0, "388")])
def test_a_rank_may_come_late_to_its_first_collective_as_to_any(
    cluster: Cluster, limit_s: float, expected: str
) -> None:
    large = replace(cluster, num_nodes=2048, ranks_per_node=8)
    environment = environment_for(large, limit_s)
    assert environment[CONNECT_LIMIT] == expected


def test_s1_15_the_flight_recorder_is_on_unless_the_operator_says_how_large_it_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment_for(cluster)["TORCH_FR_BUFFER_SIZE"] == "2000"
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "500")
    assert "TORCH_FR_BUFFER_SIZE" not in environment_for(cluster)


def test_what_the_operator_has_set_stays(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    monkeypatch.setenv("SECRET", "word")
    environment = environment_for(cluster, without="SECRET")
    assert environment["NCCL_NVLS_ENABLE"] == "2"
    assert "SECRET" not in environment


def test_threads_that_wait_for_each_other_soon_sleep_unless_the_operator_says_how_they_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a step of one rank with two threads took 17 times as long."""
    script = {"num_ranks": 1, "port": 29500, "restarts": 0, "threads": 2}
    assert environment_for(cluster)["GOMP_SPINCOUNT"] == "1000"
    assert script_environment(0, **script)["GOMP_SPINCOUNT"] == "1000"
    assert surroundings(2)["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in environment_for(cluster)
    assert "GOMP_SPINCOUNT" not in script_environment(0, **script)
    assert "GOMP_SPINCOUNT" not in surroundings(2)
