"""Every planted fault is found, and named by the step and the module where it begins."""

from pathlib import Path
from typing import Any

import pytest
from tests.verify.planted import VICTIM
from tests.verify.scene import case_of, layout_of, line_of, verify_all

from paceline.check.verify.judge import judge
from paceline.check.verify.locate import Fault, locate
from paceline.check.verify.tolerance import Tolerance
from paceline.record.verification import Case, Facts

pytestmark = pytest.mark.ranks

BOTH = ("float64", "job")
DDP = case_of(layout_of(), only=BOTH, steps=3)
FSDP = case_of(layout_of(sharding="full"), only=(*BOTH, "resumed"))
TENSOR = case_of(layout_of(data=1, tensor=2), only=BOTH, steps=3)
DROPOUT_JOB = """
model: {factory: "dropout_model:make"}
program: "dropout_model:train"
data: {corpus: python-stdlib, seq_len: 16}
train: {global_batch: 8, steps: 100, seed: 3}
"""


def dropout_case(**layout: Any) -> Case:
    """A model of one's own that has dropout."""
    folder = str(Path(__file__).parent)
    only = ("float64", "dropout")
    split = layout_of(**layout)
    return case_of(split, only=only, steps=2, job=DROPOUT_JOB, folder=folder, decoder=None)


ASKED = {
    "EveryGradientDoubled": DDP,
    "OneGradientHalved": DDP,
    "NoAllReduce": DDP,
    "SameSamples": DDP,
    "SkippedSampler": DDP,
    "StaleCopy": DDP,
    "StaleCopy of a shard": FSDP,
    "NarrowGradients": FSDP,
    "NotANumber": FSDP,
    "ForgottenMoment": FSDP,
    "ForwardLeavesOutRank1": TENSOR,
    "OneDropoutSeed": dropout_case(data=1, tensor=2, sequence_parallel=False),
    "OneSeedForAll": dropout_case(),
    "none of tensor": dropout_case(data=1, tensor=2, sequence_parallel=False),
    "none of data": dropout_case(),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    folder = tmp_path_factory.mktemp("planted")
    faults = [None if name.startswith("none") else name.split()[0] for name in ASKED]
    facts = verify_all(list(zip(ASKED.values(), faults, strict=True)), folder)
    return dict(zip(ASKED, facts, strict=True))


def fault_of(facts: Facts) -> Fault:
    fault = locate(facts, Tolerance(facts.case, facts.reference), "float64")
    assert fault is not None
    return fault


def test_s0_12_gradients_that_are_not_divided_are_told_by_their_factor(found: dict[str, Facts]):
    fault = fault_of(found["EveryGradientDoubled"])
    assert (fault.step, fault.kind) == (2, "gradient")
    assert "it is 2 x the right one, as if summed over the 2 data" in fault.looks_like
    assert "all by this factor" in fault.looks_like
    assert line_of(found["EveryGradientDoubled"], "gradients in float64").status == "fail"


def test_one_wrongly_scaled_gradient_is_named(found: dict[str, Facts]):
    fault = fault_of(found["OneGradientHalved"])
    assert (fault.step, fault.kind, fault.name) == (2, "gradient", VICTIM)
    assert "0.5 x the right one" in fault.looks_like
    assert "1 of 21 parameters" in fault.looks_like


def test_a_missing_all_reduce_is_told_from_wrong_scaling(found: dict[str, Facts]):
    fault = fault_of(found["NoAllReduce"])
    assert (fault.step, fault.kind, fault.name) == (2, "gradient", "output.weight")
    assert "rank 0 has that of data rank 0's samples" in fault.looks_like
    assert "the sum over the data ranks is missing" in fault.looks_like
    assert line_of(found["NoAllReduce"], "copies in sync").status == "fail"


def test_a_rank_that_reads_another_ranks_samples_is_named(found: dict[str, Facts]):
    line = line_of(found["SameSamples"], "samples of each rank")
    assert line.status == "fail"
    assert line.where == "step 2, rank 1"
    assert line.why == "it reads what rank 0 reads"
    fault = fault_of(found["SameSamples"])
    assert (fault.step, fault.kind, fault.name) == (2, "forward", "embedding")


def test_a_rank_that_reads_its_samples_again_is_named(found: dict[str, Facts]):
    line = line_of(found["SkippedSampler"], "samples of each rank")
    assert line.status == "fail"
    assert line.where == "step 2, rank 0"
    assert line.why == "it reads what it has read before"


def test_a_copy_that_is_not_updated_is_named_with_its_rank(found: dict[str, Facts]):
    fault = fault_of(found["StaleCopy"])
    assert (fault.step, fault.kind, fault.name, fault.ranks) == (2, "update", VICTIM, (1,))
    line = line_of(found["StaleCopy"], "copies in sync")
    assert line.status == "fail"
    assert line.where is not None
    assert line.where.startswith(f"step 2, {VICTIM}, rank ")


def test_a_shard_that_is_not_updated_is_named(found: dict[str, Facts]):
    fault = fault_of(found["StaleCopy of a shard"])
    assert (fault.step, fault.kind, fault.name) == (2, "update", VICTIM)


def test_gradients_rounded_to_bfloat16_are_not_taken_for_float32(found: dict[str, Facts]):
    verdict = judge(found["NarrowGradients"])
    assert line_of(verdict, "gradients in fp32").status == "fail"
    assert line_of(verdict, "gradients in float64").status == "pass"


def test_s0_12_a_number_that_is_not_one_is_found_in_its_step(found: dict[str, Facts]):
    line = line_of(found["NotANumber"], "finite numbers")
    assert line.status == "fail"
    assert line.where == "step 2, rank 0"


def test_s0_12_a_resume_that_forgets_a_moment_is_named(found: dict[str, Facts]):
    line = line_of(found["ForgottenMoment"], "save, load, resume")
    assert line.status == "fail"
    assert line.where is not None
    assert line.where.startswith(f"step 3, {VICTIM}")


def test_a_wrong_output_of_a_module_is_named_with_its_step(found: dict[str, Facts]):
    fault = fault_of(found["ForwardLeavesOutRank1"])
    assert (fault.step, fault.kind, fault.name) == (2, "forward", "blocks.1.ffn.down")
    assert "what goes into it is right" in fault.looks_like


def test_one_dropout_seed_for_all_tensor_ranks_is_found(found: dict[str, Facts]):
    assert line_of(found["none of tensor"], "dropout masks").status == "pass"
    line = line_of(found["OneDropoutSeed"], "dropout masks")
    assert line.status == "fail"
    assert line.what == "blocks.0.ffn.dropout: ranks 0 and 1 drop the same"
    assert line.why == "they hold different activations and draw from one seed"


def test_one_seed_for_all_data_ranks_is_found(found: dict[str, Facts]):
    assert line_of(found["none of data"], "dropout masks").status == "pass"
    assert line_of(found["OneSeedForAll"], "dropout masks").status == "fail"
