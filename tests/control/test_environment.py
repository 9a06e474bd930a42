"""What a worker finds in its environment."""

from dataclasses import replace

import pytest
from tests.clusters import h100s

from paceline.control.environment import CONNECT_LIMIT, NCCL, environment_of_workers
from paceline.topology import Cluster


@pytest.fixture
def cluster() -> Cluster:
    return h100s(num_nodes=2, ranks_per_node=8)


def test_torchs_watchdogs_end_no_worker(cluster: Cluster) -> None:
    environment = environment_of_workers(cluster, "127.0.0.1")
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert NCCL.items() <= environment.items()


def test_communicators_may_be_made_for_as_long_as_all_may_take_to_meet(cluster: Cluster) -> None:
    large = replace(cluster, num_nodes=2048, ranks_per_node=8)
    assert environment_of_workers(large, "127.0.0.1")[CONNECT_LIMIT] == "388"


def test_the_flight_recorder_is_on_unless_the_operator_says_how_large_it_is(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment_of_workers(cluster, "127.0.0.1")["TORCH_FR_BUFFER_SIZE"] == "2000"
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "500")
    assert "TORCH_FR_BUFFER_SIZE" not in environment_of_workers(cluster, "127.0.0.1")


def test_what_the_operator_has_set_stays(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")
    monkeypatch.setenv("SECRET", "word")
    environment = environment_of_workers(cluster, "127.0.0.1", without="SECRET")
    assert environment["NCCL_NVLS_ENABLE"] == "2"
    assert "SECRET" not in environment
