"""A proof beside real ranks: the same code on tensors with values, over gloo."""

import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.prove.cases import (
    MORE_ON_FOUR,
    MORE_ON_TWO,
    ON_FOUR,
    ON_TWO,
    SHAPE,
    compared,
    layout,
    pipeline,
)
from tests.ranks import run_ranks
from torch.utils._python_dispatch import _disable_current_modes

from paceline.prove.patches import dry_run
from paceline.prove.proof import ModelRequest
from paceline.prove.prove import prove
from paceline.prove.segments import cut, find_peak
from paceline.prove.world import trace_rank, trace_step, world
from paceline.runtime.strategy.expert import split as expert

pytestmark = pytest.mark.filterwarnings("ignore")

CLOSE = 1e-3
"""0.1 % of what tensors hold at the fullest instant."""


def real_peaks(rank, world, cases):
    """Most bytes in tensors in the second step of each layout, on this rank."""
    warnings.simplefilter("ignore")
    peaks = {}
    for name, asked in cases.items():
        with even_routing(), unseen_copies():
            trace = trace_step(asked, is_fake=False)
        peaks[name] = find_peak(cut(trace, lambda _: 0.0)).num_bytes
    return peaks


@contextmanager
def even_routing():
    """Every expert gets its even share of the tokens, as is taken for granted in a proof."""
    spread = expert.run_spread_experts

    def run(run_local, tokens_TH, expert_TK, weight_TK, num_local, group):
        with _disable_current_modes():
            even = torch.arange(expert_TK.numel()) % (num_local * group.size())
            expert_TK.data.copy_(even.view_as(expert_TK))
        return spread(run_local, tokens_TH, expert_TK, weight_TK, num_local, group)

    with patch.object(expert, "run_spread_experts", run):
        yield


@contextmanager
def unseen_copies():
    """What gloo copies for itself while it is waited for is a transport's buffer, as NCCL's are.

    Its thread lets go of a collective's tensors just after the waiting one has been told.
    """
    wait = dist.Work.wait

    def quiet(work, *args):
        with _disable_current_modes():
            done = wait(work, *args)
        time.sleep(0.001)
        return done

    with patch.object(dist.Work, "wait", quiet):
        yield


@pytest.fixture(scope="module")
def on_two():
    return run_ranks(real_peaks, 2, requests(ON_TWO))


@pytest.fixture(scope="module")
def more_on_two():
    return run_ranks(real_peaks, 2, requests(MORE_ON_TWO))


@pytest.fixture(scope="module")
def on_four():
    return run_ranks(real_peaks, 4, requests(ON_FOUR))


@pytest.fixture(scope="module")
def more_on_four():
    return run_ranks(real_peaks, 4, requests(MORE_ON_FOUR))


def requests(layouts):
    return {name: compared(layout) for name, layout in layouts.items()}


@pytest.mark.ranks
@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_hold_at_their_fullest_what_was_proved(name, on_two):
    for stage in prove(compared(ON_TWO[name])).stages:
        assert stage.peak_bytes == pytest.approx(on_two[stage.rank][name], rel=CLOSE)


@pytest.mark.repeat  # the same comparison on two ranks is above
@pytest.mark.ranks
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_hold_at_their_fullest_what_was_proved(name, on_four):
    for stage in prove(compared(ON_FOUR[name])).stages:
        assert stage.peak_bytes == pytest.approx(on_four[stage.rank][name], rel=CLOSE)


def in_chunks(of):
    """With logits that are the fullest moment, unless they are made in chunks."""
    asked = compared(of)
    shape = replace(asked.model.decoder, vocab=4096)
    return replace(asked, model=ModelRequest(decoder=shape), loss_chunk=24)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_loss_in_chunks_holds_what_was_proved_and_less_than_one_of_all_logits():
    asked = {"FSDP2": in_chunks(layout()), "PP": in_chunks(pipeline())}
    real = run_ranks(real_peaks, 2, asked)
    for name, request in asked.items():
        stages = prove(request).stages
        for stage in stages:
            assert stage.peak_bytes == pytest.approx(real[stage.rank][name], rel=CLOSE), name
        whole = prove(replace(request, loss_chunk=0)).stages
        assert stages[-1].peak_bytes < whole[-1].peak_bytes, name


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", MORE_ON_TWO)
def test_two_ranks_of_more_variants_hold_what_was_proved(name, more_on_two):
    for stage in prove(compared(MORE_ON_TWO[name])).stages:
        assert stage.peak_bytes == pytest.approx(more_on_two[stage.rank][name], rel=CLOSE)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", MORE_ON_FOUR)
def test_four_ranks_of_pairs_and_schedules_hold_what_was_proved(name, more_on_four):
    for stage in prove(compared(MORE_ON_FOUR[name])).stages:
        assert stage.peak_bytes == pytest.approx(more_on_four[stage.rank][name], rel=CLOSE)


@pytest.mark.slow
@pytest.mark.ranks
def test_ddp_of_several_buckets_keeps_what_it_was_proved_to_keep():
    """Real ranks sort their buckets anew after the first step; fake ones keep the first."""
    wide = replace(SHAPE, hidden=512, head_dim=128, ffn=1024, vocab=2048)
    asked = replace(compared(ON_TWO["DDP"]), model=ModelRequest(decoder=wide))
    (stage,) = prove(asked).stages
    assert stage.parts["gradients"] > 2 * 25 * 2**20
    peaks = run_ranks(real_peaks, 2, {"DDP": asked})
    assert stage.peak_bytes == pytest.approx(peaks[0]["DDP"], rel=CLOSE)


@pytest.mark.parametrize("name", ["FSDP2", "FSDP2 accumulating"])
def test_the_count_of_bytes_is_that_of_torchs_own_allocator(name):
    """Real tensors in a pretended world: the profiler hears of every allocation."""
    asked = compared(ON_TWO[name])
    proved = cut(trace_rank(asked, 0), lambda _: 0.0)
    rise = find_peak(proved).num_bytes - sum(proved.resting.values())
    assert allocator_rise(asked) == pytest.approx(rise, rel=CLOSE)


def allocator_rise(asked):
    """Most bytes above the beginning of the step, by allocator events."""
    profile = torch.profiler.profile(profile_memory=True)

    with world(0, asked.layout.num_ranks), dry_run(is_cuda=False):
        trace_step(asked, is_fake=False, before_step=profile.start)
        profile.stop()
    level = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    return highest
