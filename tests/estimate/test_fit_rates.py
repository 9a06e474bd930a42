"""Constants come back from times made with them, and say how far off they are."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from paceline.catalog.efficiencies import load_efficiencies, with_measured
from paceline.catalog.engines import find_engine, load_engines
from paceline.catalog.measured import (
    AttentionTime,
    CollectiveTime,
    Measurements,
    MemoryTime,
    ProductTime,
)
from paceline.estimate.collectives import all_gather_s, all_reduce_s
from paceline.estimate.compute import matmul_s
from paceline.estimate.fit_rates import Fitted, fit_rates
from paceline.estimate.rates import rates_of
from paceline.job import ClusterSpec, parse_job
from paceline.topology import Cluster, find_cluster
from paceline.topology.machine import Machine

MACHINE = Machine(
    num_cores=8,
    clock_hz=2.5e9,
    simd_bytes=64,
    has_bf16=True,
    memory_bytes=2**36,
    available_bytes=2**36,
    gpus=(),
)
TRUTH = {
    "share": 0.71,
    "short_k": 190.0,
    "wave": 0.12,
    "launch_s": 4.1e-6,
    "memory_share": 0.66,
}
"""Of a made-up H100; the shipped one has .86, 161, .06, 2.8e-6, .93."""

ENGINE = load_engines()["paceline"]


def cluster_of(accelerator: str, per_node: int = 8, machine: Machine = MACHINE) -> Cluster:
    text = """
    model: {decoder: {layers: 1, hidden: 8, heads: 1}}
    data: {corpus: python-stdlib, seq_len: 8}
    train: {global_batch: 1, steps: 1}
    """
    job = parse_job(text, source="job.yaml", folder=Path("nowhere"))
    return find_cluster(ClusterSpec(accelerator=accelerator, per_node=per_node), job, machine)


def shapes() -> np.ndarray:
    sizes = (128, 256, 512, 1024, 2048, 4096, 8192)
    found = [(s, s, s) for s in sizes] + [(s, 64, s) for s in sizes]
    found += [(4096, s, 4 * s) for s in sizes] + [(s, 4 * s, 1536) for s in sizes]
    return np.array(found, float)


def measurements(**parts) -> Measurements:
    return Measurements(
        device="test",
        backend="nccl",
        num_ranks=8,
        ranks_per_node=8,
        threads=1,
        versions={},
        at="today",
        seconds=1.0,
        **parts,
    )


def products(cluster: Cluster, noise: float, precision: str = "bf16") -> tuple[ProductTime, ...]:
    name = cluster.accelerator
    row = {name: {"sustained": 1.0, "matmul": {precision: TRUTH}}}
    rates = rates_of(
        cluster, ENGINE, precision, with_measured(load_efficiencies(), row, accelerator=name)
    )
    m, k, n = shapes().T
    random = np.random.default_rng(5)
    times = matmul_s(m, k, n, rates.matmul) * np.exp(noise * random.standard_normal(len(m)))
    return tuple(
        ProductTime(
            precision=precision,
            rows=int(a),
            inner=int(b),
            columns=int(c),
            seconds=float(t),
            spread=0.01,
            num_repeats=9,
        )
        for a, b, c, t in zip(m, k, n, times, strict=True)
    )


def fit(cluster: Cluster, **parts) -> Fitted:
    return fit_rates(measurements(**parts), cluster, ENGINE, load_efficiencies())


def test_a_products_constants_come_back_exactly_from_times_without_noise():
    cluster = cluster_of("H100-SXM")
    fitted = fit(cluster, products=products(cluster, 0.0))
    assert fitted.row["matmul"]["bf16"] == pytest.approx(TRUTH, rel=0.02)
    assert fitted.errors["matmul.bf16"].p90 < 0.005
    assert fitted.shipped_errors["matmul.bf16"].median > 0.1


def test_a_products_constants_come_back_from_times_with_noise_and_a_few_disturbed_ones():
    cluster = cluster_of("H100-SXM")
    times = list(products(cluster, 0.03))
    for index in (3, 12, 21):  # another program ran
        times[index] = replace(times[index], seconds=times[index].seconds * 3, spread=0.6)
    found = fit(cluster, products=tuple(times)).row["matmul"]["bf16"]
    assert found["share"] == pytest.approx(TRUTH["share"], rel=0.04)
    assert found["launch_s"] == pytest.approx(TRUTH["launch_s"], rel=0.15)
    assert found["memory_share"] == pytest.approx(TRUTH["memory_share"], rel=0.25)


def test_a_constant_that_no_time_shows_stays_as_shipped():
    cluster = cluster_of("H100-SXM")
    large = tuple(each for each in products(cluster, 0.0) if each.inner >= 1024 <= each.rows)
    found = fit(cluster, products=large).row["matmul"]["bf16"]
    shipped = load_efficiencies().matmul_of("H100-SXM", "bf16")
    assert found["launch_s"] == pytest.approx(shipped.launch_s, rel=0.6)


def test_fp16_times_are_left_aside_where_bf16_was_measured_too():
    cluster = cluster_of("H100-SXM")
    slow = tuple(replace(p, precision="fp16", seconds=9.0) for p in products(cluster, 0.0))
    fitted = fit(cluster, products=products(cluster, 0.0) + slow)
    assert set(fitted.row["matmul"]) == {"bf16"}
    assert any("fp16" in note for note in fitted.notes)


def test_attentions_share_half_length_and_backward_come_back():
    cluster = cluster_of("H100-SXM")
    peak = cluster.peak_flops_per_s["bf16"]
    times = []
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        flops = 4 * (length * (length + 1) / 2) * 16 * 128
        forward = flops / (peak * 0.6 * length / (length + 900))
        times.append(
            AttentionTime(
                kernel="flash3",
                precision="bf16",
                samples=1,
                heads=16,
                seq_len=length,
                head_dim=128,
                forward_s=forward,
                backward_s=2.5 * forward / 0.55,
                spread=0.0,
                num_repeats=5,
            )
        )
    row = fit(cluster, attention=tuple(times)).row
    assert row["flash3"] == pytest.approx(0.6, rel=0.02)
    assert row["attention_half_len"] == pytest.approx(900, rel=0.05)
    assert row["backward"] == pytest.approx(0.55, rel=0.01)
    assert "flash2" not in row


def test_memory_share_is_of_what_a_rank_has():
    cluster = cluster_of("cpu", per_node=4)
    rate = 0.9 * cluster.memory_bytes_per_s
    time = MemoryTime(kind="triad", num_bytes=10**9, seconds=1e9 / rate, spread=0, num_repeats=5)
    assert fit(cluster, memory=(time,)).row["memory_share"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("accelerator", "ranks", "keys", "latency_s"),
    [
        ("H100-SXM", 8, ("link_share", "link_latency_s"), 80e-6),
        ("cpu", 2, ("gloo_share", "link_latency_s"), 4e-3),
    ],
)
def test_a_links_share_and_latency_come_back(accelerator, ranks, keys, latency_s):
    cluster = cluster_of(accelerator, per_node=ranks)
    row = {accelerator: dict(zip(keys, (0.6, latency_s), strict=True))}
    tables = with_measured(load_efficiencies(), row, accelerator=accelerator)
    precision = "bf16"
    rates = rates_of(cluster, ENGINE, precision, tables)
    times = tuple(
        CollectiveTime(
            kind=kind,
            num_bytes=size,
            num_ranks=ranks,
            is_inside_node=True,
            seconds=float(collective(size, ranks, 1, rates)),
            spread=0.01,
            num_repeats=9,
        )
        for size in (2**16, 2**20, 2**24, 2**28)
        for kind, collective in (("all_reduce", all_reduce_s), ("all_gather", all_gather_s))
    )
    found = fit(cluster, collectives=times).row
    assert (found[keys[0]], found[keys[1]]) == pytest.approx((0.6, latency_s), rel=0.1)


def test_too_few_times_claim_nothing():
    cluster = cluster_of("H100-SXM")
    fitted = fit(cluster, products=products(cluster, 0.0)[:5])
    assert "matmul" not in fitted.row
    assert "5 times, which is too few" in fitted.notes[0]


RECORDED = Path(__file__).parent / "recorded" / "calibrate-cpu.json"
"""A default minute on 2 cores of an AMD EPYC (Zen 4) that did other things too, torch 2.13.0+cpu;
2.6 GHz as its kernel reports."""


def test_the_fit_of_a_recorded_machine_is_far_closer_than_what_is_shipped():
    measured = msgspec.json.decode(RECORDED.read_bytes(), type=Measurements)
    machine = replace(MACHINE, num_cores=2, clock_hz=2.6e9)
    cluster = cluster_of("cpu", per_node=2, machine=machine)
    fitted = fit_rates(measured, cluster, ENGINE, load_efficiencies())
    for kind in ("fp32", "bf16"):
        error, before = (e[f"matmul.{kind}"] for e in (fitted.errors, fitted.shipped_errors))
        assert error.num_held_out >= 10
        assert error.median < 0.06 < 0.2 < before.median
    assert fitted.errors["attention"].median < fitted.shipped_errors["attention"].median
    assert 1.0 < fitted.row["matmul"]["fp32"]["share"] < 1.4  # the peak is an estimate, and low
    assert fitted.row["attention_half_len"] < 400


@pytest.mark.parametrize(
    ("accelerator", "engine"), [("A100-80", "megatron"), ("B300", "megatron-bridge")]
)
def test_a_calibrated_accelerator_keeps_what_is_known_of_its_family(accelerator, engine):
    cluster, shipped = cluster_of(accelerator), load_efficiencies()
    rows = {accelerator: {"step_s": 0.5}, "L4": {"memory_share": 0.1}}
    tables = with_measured(shipped, rows, accelerator=accelerator)
    software = find_engine(engine)
    for precision in ("bf16", "fp8") if accelerator == "B300" else ("bf16",):
        usual, own = (rates_of(cluster, software, precision, each) for each in (shipped, tables))
        assert own == replace(usual, step_s=0.5)
