"""Judgement is arithmetic on facts: made ones are judged without any rank."""

import dataclasses
import math

from tests.verify.scene import case_of, layout_of, line_of, with_rank, with_step

from paceline.check.verify.judge import judge
from paceline.check.verify.locate import Fault, locate
from paceline.check.verify.tolerance import Tolerance, reading_is_off
from paceline.record.verification import (
    Bytes,
    Deviation,
    Facts,
    Piece,
    RankFacts,
    Reading,
    Reference,
    ReferenceStep,
    Run,
    RunFacts,
    StepFacts,
)

LAYOUT = layout_of(micro_batch=1, accumulation=1)
OUTPUT = Reading(8, 4.0, 8.0, 2.0)
HALF = Reading(4, 2.0, 4.0, 2.0)


def off(share: float, **more: float) -> Deviation:
    return Deviation(squares=share**2 * 16, of=16.0, count=4, largest=share, most=2.0, **more)


def step(ids: tuple[int, ...]) -> StepFacts:
    return StepFacts(
        step=1,
        loss_sum=8.0,
        num_targets=4,
        grad_norm=3.0,
        ids=ids,
        modules={"block": HALF},
        inputs={"block": HALF},
        gradients={"weight": off(1e-15)},
        parameters={"weight": off(1e-15)},
        digests={"weight": "same"},
    )


def facts() -> Facts:
    """Two data ranks, one module, one parameter, one step; all of it right."""
    case = case_of(LAYOUT, only=("float64", "job"), steps=2, num_samples=2)
    case = dataclasses.replace(case, predicted={"parameters": 16, "gradients": 16, "optimizer": 32})
    ranks = []
    for rank in (0, 1):
        pieces = {"weight": Piece(shape=(2, 2), count=4, itemsize=4, part="")}
        held = Bytes(parameters=16, gradients=16, optimizer=32)
        run = RunFacts(name="", steps=(step((rank,)),), pieces=pieces, held=held)
        ranks.append(
            RankFacts(
                rank=rank,
                world_size=2,
                device="cpu",
                host="here",
                pid=rank,
                tensor=0,
                context=0,
                data=rank,
                pipeline=0,
                sampler=((rank,), (1 - rank,)),
                runs={name: dataclasses.replace(run, name=name) for name in ("float64", "job")},
            )
        )
    narrow = {"weight": off(1e-7)}
    truth = ReferenceStep(
        loss=2.0, grad_norm=3.0, modules={"block": OUTPUT}, inputs={"block": OUTPUT}
    )
    reference = Reference(
        wide=(truth,),
        narrow=(dataclasses.replace(truth, gradients=narrow, parameters=narrow),),
        shapes={"weight": (2, 2)},
        longest_sum=64,
        num_chained=2,
        has_dropout=False,
    )
    return Facts(case=case, reference=reference, ranks=tuple(ranks))


def test_facts_that_are_right_pass_every_line():
    verdict = judge(facts())
    assert verdict.failed == ()
    assert verdict.is_right


def test_nothing_looked_at_is_not_right():
    case = dataclasses.replace(
        facts().case, runs=(Run(name="x", layout=LAYOUT, precision="fp32", steps=1),)
    )
    empty = dataclasses.replace(facts(), case=case, ranks=())
    assert not judge(empty).is_right


def test_a_rank_that_is_elsewhere_or_missing_is_found():
    assert line_of(with_rank(facts(), 1, data=0), "every rank took part").status == "fail"
    assert line_of(with_rank(facts(), 1, world_size=1), "every rank took part").status == "fail"
    alone = dataclasses.replace(facts(), ranks=facts().ranks[:1])
    assert line_of(alone, "every rank took part").what == "1 of 2 ranks wrote down what they saw"


def test_s3_7_a_sampler_that_repeats_an_epochs_order_is_found():
    wrong = with_rank(with_rank(facts(), 0, sampler=((0,), (0,))), 1, sampler=((1,), (1,)))
    assert line_of(wrong, "sampler covers the data").what == "two epochs have the same order"


def test_s3_7_a_sample_that_nobody_reads_is_found():
    line = line_of(with_rank(facts(), 1, sampler=((0,), (0,))), "sampler covers the data")
    assert line.status == "fail"
    assert line.where == "epoch 1, sample 0"


def test_a_parameter_that_no_rank_holds_whole_is_found():
    run = facts().ranks[0].runs["job"]
    half = {"weight": Piece(shape=(2, 2), count=2, itemsize=4, part="0/2")}
    runs = {name: dataclasses.replace(run, pieces=half) for name in ("float64", "job")}
    wrong = with_rank(with_rank(facts(), 0, runs=runs), 1, runs=runs)
    line = line_of(wrong, "sharded as planned")
    assert line.status == "fail"
    assert line.what == "weight: its parts are 2 numbers of 4"


def test_more_bytes_than_predicted_are_found_with_their_rank():
    run = dataclasses.replace(
        facts().ranks[1].runs["job"], held=Bytes(parameters=16, gradients=16, optimizer=64)
    )
    wrong = with_rank(facts(), 1, runs=facts().ranks[1].runs | {"job": run})
    line = line_of(wrong, "bytes as predicted")
    assert (line.status, line.where) == ("fail", "rank 1")
    assert line.what == "optimizer: 64 bytes, 32 predicted"


def test_copies_with_other_bits_are_found():
    line = line_of(with_step(facts(), 1, "job", 0, digests={"weight": "x"}), "copies in sync")
    assert line.status == "fail"
    assert line.what == "weight differs between ranks 0, 1"


def test_the_forward_pass_is_looked_at_before_the_backward_pass():
    wrong = with_step(
        facts(),
        1,
        "float64",
        0,
        modules={"block": Reading(4, 2.1, 4.0, 2.0)},
        gradients={"weight": off(0.5)},
    )
    fault = locate(wrong, Tolerance(wrong.case, wrong.reference), "float64")
    assert fault is not None
    assert (fault.kind, fault.name) == ("forward", "block")
    assert line_of(wrong, "outputs of modules in float64").status == "fail"


def located(wrong: Facts) -> Fault:
    fault = locate(wrong, Tolerance(wrong.case, wrong.reference), "float64")
    assert fault is not None
    return fault


def test_a_module_without_an_input_is_wrong_by_its_samples_or_its_parameters():
    wrong = with_step(facts(), 1, "float64", 0, modules={"block": Reading(4, 2.1, 4.0, 2.0)})
    assert located(wrong).looks_like.startswith("what goes into it is right")
    (truth,) = wrong.reference.wide
    first = dataclasses.replace(wrong.reference, wide=(dataclasses.replace(truth, inputs={}),))
    wrong = dataclasses.replace(wrong, reference=first)
    assert located(wrong).looks_like.startswith("only token ids go into it")


def test_a_gradient_that_is_wrong_and_one_that_is_missing_are_found_with_their_rank():
    wrong = located(with_step(facts(), 1, "float64", 0, gradients={"weight": off(0.5)}))
    assert (wrong.kind, wrong.ranks, wrong.off) == ("gradient", (1,), 0.5)
    lacking = located(with_step(facts(), 1, "float64", 0, gradients={}, missing=("weight",)))
    assert (lacking.kind, lacking.ranks) == ("gradient", (1,))
    assert lacking.looks_like == "it has no gradient at all"


def test_a_loss_that_is_not_a_number_is_never_right():
    wrong = with_step(facts(), 0, "float64", 0, loss_sum=math.nan)
    assert line_of(wrong, "loss curve in float64").status == "fail"
    wrong = with_step(facts(), 0, "job", 0, loss_sum=math.nan)
    assert line_of(wrong, "finite numbers").where == "step 1, rank 0"


def test_s3_11_rounding_of_another_order_is_right_and_a_narrower_type_is_not():
    tolerance = Tolerance(facts().case, facts().reference)
    assert tolerance.wide < 1e-13
    assert 2**-24 < tolerance.narrow(1e-7) < 2**-8


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_by_the_usual_one():
    tolerance = Tolerance(facts().case, facts().reference)
    noise = Deviation(squares=1e-36, of=1e-36, count=4, largest=1e-18, most=1e-18)
    assert tolerance.off(noise, "gradients", 1) < tolerance.gradient(1, "weight")


def test_readings_of_parts_are_compared_as_one():
    assert reading_is_off(OUTPUT, OUTPUT, 1e-12) == 0
    assert reading_is_off(Reading(8, 4.0, 8.0, math.nan), OUTPUT, 1e-12) == math.inf
