"""What machines did, gathered over nodes and GPUs."""

import math

import pytest

from paceline.record.machine_series import MachineSeries
from paceline.record.machines import MachineSample, RankSample


def sample(at, node, cpu, received=None):
    return MachineSample(at=at, node=node, cpu_utilization=cpu, received_bytes_per_s=received)


def test_every_time_has_the_mean_and_the_extremes_of_all_nodes():
    series = MachineSeries()
    series.take([sample(10.0, 0, 0.2), sample(10.0, 1, 0.4), sample(20.0, 0, 0.9, received=5.0)])
    at, columns = series.binned(100)
    assert at.tolist() == [10.0, 20.0]
    cpu, received = columns["host/cpu_utilization"], columns["host/received_bytes_per_s"]
    assert cpu.mean.tolist() == pytest.approx([0.3, 0.9])
    assert (cpu.low[0], cpu.high[0]) == (0.2, 0.4)
    assert math.isnan(received.mean[0])
    assert received.mean[1] == 5.0


def test_many_samples_are_gathered_and_no_spike_is_lost():
    series = MachineSeries()
    series.take([sample(float(at), 0, 1.0 if at == 777 else 0.0) for at in range(1000)])
    at, columns = series.binned(10)
    assert len(at) == 10
    assert columns["host/cpu_utilization"].high[7] == 1.0
    assert series.num == 1000
    assert MachineSeries().binned(10)[1] == {}


def test_ranks_are_where_they_were_seen_last_until_that_is_too_long_ago():
    series = MachineSeries()
    forward, backward = RankSample(0, "forward", 7), RankSample(0, "backward", 9)
    old = RankSample(1, "save", 6)
    series.take([MachineSample(at=10.0, node=0, ranks=[forward, old])])
    series.take([MachineSample(at=90.0, node=0, ranks=[backward])])
    assert series.ranks_since(30.0) == [backward]
    assert series.ranks_since(5.0) == [backward, old]
