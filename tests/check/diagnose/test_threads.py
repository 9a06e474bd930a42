"""The cause that real threads confirmed is named: tests/check/logs, one test a thread."""

import pytest
from tests.check.diagnose.corpus import cases

from paceline.check.diagnose.diagnose import diagnose_text

NOT_YET = {
    "pytorch/pytorch#14768": "shared memory that cannot be opened; the thread says: too many files",
    "hiyouga/LlamaFactory#1845": "the excerpt does not say that the model has experts",
    "QwenAudio/CosyVoice#297": "one time-out line of gloo, nothing of the batches",
    "GoogleCloudPlatform/scientific-computing-examples#118": "held: another wording",
    "axolotl-ai-cloud/axolotl#2250": "held: another wording",
}
"""Threads whose cause does not come first, and why."""


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.source)
def test_the_confirmed_cause_of_a_thread_comes_first(case):
    diagnosis = diagnose_text(case.text)
    first = diagnosis.causes[0].id if diagnosis.causes else None
    assert (first in case.causes) is (case.source not in NOT_YET)


def test_no_thread_is_a_source_of_the_catalog():
    from paceline.catalog.failure import load_failures

    known = {source for failure in load_failures().values() for source in failure.sources}
    assert not known & {case.source for case in cases()}
    assert len({case.source for case in cases()}) == len(cases())
