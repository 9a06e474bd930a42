"""The cause that real threads confirmed is named: tests/check/logs, one test a thread."""

import pytest
from tests.check.diagnose.corpus import cases, diagnose_text

from paceline.catalog.failure import load_failures
from paceline.catalog.symptom import load_symptoms
from paceline.check.diagnose.conclusion import MAX_SHOWN

NOT_FIRST = {
    "axolotl-ai-cloud/axolotl#2250": "held: another wording",
    "deepspeedai/DeepSpeed#5539": "one time-out line; nothing says that it generates",
    "2U1/Qwen-VL-Series-Finetune#17": "one time-out line; nothing of the mixed data",
    "Lightning-AI/torchmetrics#2300": "cancelled is what the log says; one of 96 members came",
    "X-Square-Robot/wall-x#114": "a shape mismatch: of the vocabulary and not of the world size",
    "deepspeedai/DeepSpeed#5623": "the last line of a compiler's errors, and none of them",
    "pytorch/pytorch#175024": "one message of autograd; nothing says that DDP wrote in place",
    "FateScript/CenterNet-better#45": "the program's own exception; the folder is its output's",
    "pytorch/pytorch#17349": "one line of NCCL that says nothing more",
}
"""Threads whose cause does not come first, and why."""

NOT_AMONG_THREE = {
    "hiyouga/LlamaFactory#1845": "the excerpt does not say that the model has experts",
    "huggingface/accelerate#2912": "one time-out line; nothing says that a save was running",
    "aws/aws-ofi-nccl#584": "one warning of NCCL's plugin",
    "prajdabre/yanmtt#7": "a column of steps and losses without a name",
    "pytorch/pytorch#75512": "only the words of a closed connection",
}
"""Threads whose cause is not even among the first three."""


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.source)
def test_the_confirmed_cause_of_a_thread_comes_first_or_is_among_three(case):
    diagnosis = diagnose_text(case.text)
    named = [each.id for each in (*diagnosis.causes, *diagnosis.resembling)]
    is_first = named[:1] != [] and named[0] in case.causes
    assert is_first is (case.source not in NOT_FIRST.keys() | NOT_AMONG_THREE.keys())
    is_among = any(each in case.causes for each in named[:MAX_SHOWN])
    assert is_among is (case.source not in NOT_AMONG_THREE)


def test_no_thread_is_a_source_of_the_catalog():
    known = {source for failure in load_failures().values() for source in failure.sources}
    assert not known & {case.source for case in cases()}
    assert len({case.source for case in cases()}) == len(cases())


def test_no_held_thread_shaped_a_symptom():
    known = {source for symptom in load_symptoms().values() for source in symptom.sources}
    assert not known & {case.source for case in cases() if case.held}
