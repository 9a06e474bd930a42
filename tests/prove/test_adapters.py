"""Adapters in the dry run: what is proved is what real ranks hold, and what the plan has booked."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.prove.cases import ON_TWO, SHAPE, compared
from tests.prove.test_against_real_runs import CLOSE, real_peaks
from tests.ranks import run_ranks

from paceline.job import parse_job
from paceline.plan import plan_job
from paceline.profile.adapter import Adaptation
from paceline.prove.compare import compare
from paceline.prove.proof import ModelRequest, Request
from paceline.prove.prove import prove
from paceline.prove.request import request_of

JOB = """
model: {decoder: {layers: 6, hidden: 256, heads: 4, vocab: 256}}
data: {path: x, seq_len: 256}
train: {global_batch: 64, steps: 10, adapter: {rank: 8, targets: all}}
cluster: {accelerator: H100-SXM, per_node: 4}
"""

LAYOUTS = {
    "DDP": "{sharding: none, tensor: 1, pipeline: 1}",
    "ZeRO-2": "{sharding: zero2, tensor: 1, pipeline: 1}",
    "FSDP2": "{sharding: full, tensor: 1, pipeline: 1}",
    "selective": "{sharding: full, tensor: 1, pipeline: 1, recompute: selective}",
    "tensor": "{sharding: full, tensor: 2, pipeline: 1}",
}


def asked(name: str) -> Request:
    shape = replace(SHAPE, layers=4)
    wide = SHAPE.heads * SHAPE.head_dim
    adapters = Adaptation(
        targets=("query", "attention_output"),
        rank=4,
        scale=2.0,
        dropout=0.0,
        frozen_type="bfloat16",
        num_parameters=4 * 4 * 2 * (SHAPE.hidden + wide),
        seed=0,
    )
    model = ModelRequest(decoder=shape, adapters=adapters)
    return replace(compared(ON_TWO[name]), model=model)


@pytest.mark.ranks
def test_two_ranks_hold_at_their_fullest_what_was_proved():
    cases = {name: asked(name) for name in ("DDP", "FSDP2")}
    peaks = run_ranks(real_peaks, 2, cases)
    for name, request in cases.items():
        for stage in prove(request).stages:
            assert stage.peak_bytes == pytest.approx(peaks[stage.rank][name], rel=CLOSE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "lora") for layout in LAYOUTS),
        *(("FSDP2", "dora"), ("tensor", "qlora")),
        *(
            pytest.param(layout, kind, marks=pytest.mark.repeat)  # each kind and layout is above
            for kind, quick in (("dora", "FSDP2"), ("qlora", "tensor"))
            for layout in LAYOUTS
            if layout != quick
        ),
    ],
)
def test_the_plan_books_what_is_proved(layout: str, kind: str):
    text = JOB.replace("rank: 8", f"kind: {kind}, rank: 8")
    if kind == "qlora":  # whole blocks of 64 on each of two tensor ranks
        text = text.replace("vocab: 256", "vocab: 256, ffn: 768")
    job = parse_job(f"{text}layout: {LAYOUTS[layout]}\n", source="job", folder=Path("/nowhere"))
    plan = plan_job(job)
    found = compare(prove(request_of(job, plan)), plan)
    assert found.proved_bytes == pytest.approx(found.estimated_bytes, rel=0.1)
    parts = {each.part: each for each in found.parts}
    booked = parts["parameters"].estimated_bytes
    # Booked as split over tensor ranks; a tenth of a model in 4 bits as small as this one is what
    # they hold whole of its adapters.
    rel = 0.1 if (kind, layout) == ("qlora", "tensor") else 0.05
    assert parts["parameters"].proved_bytes == pytest.approx(booked, rel=rel)
