"""The kernel's Xid lines: each class has its verdict, the rank whose GPU it is, and what yields."""

import pytest
from tests.check.diagnose.corpus import diagnose_text

from paceline.catalog.failure import Effect, load_failures

CLASSES = [name for name in load_failures() if name.startswith("xid-")]
SECONDARY = [name for name in CLASSES if load_failures()[name].effect is Effect.SECONDARY]
NUMBERS = {"xid-119-gsp-timeout": 120, "xid-140-ecc-unrecovered": 171, "xid-144-150-nvlink5": 149}
RANKS = (
    "n1:10:20 [3] NCCL INFO comm 0x5 rank 11 nRanks 16 cudaDev 3 busId 3b000 commId 0x1 - Init "
    "COMPLETE\n"
    "n2:10:20 [3] NCCL INFO comm 0x5 rank 3 nRanks 16 cudaDev 3 busId 3b000 commId 0x1 - Init "
    "COMPLETE\n"
)


def kernel_line(name, host="n1"):
    number = NUMBERS.get(name, int(name.split("-")[1]))
    return f"Mar 21 02:07:08 {host} kernel: NVRM: Xid (PCI:0000:3b:00): {number}, pid=7, x\n"


def test_there_are_eighteen_classes():
    assert len(CLASSES) == 18
    assert len(SECONDARY) == 3


@pytest.mark.parametrize("name", CLASSES)
def test_each_class_is_known_by_its_number_and_names_the_rank_of_its_gpu(name):
    diagnosis = diagnose_text(RANKS + kernel_line(name))
    assert diagnosis.causes[0].id == name
    assert diagnosis.causes[0].rank == 11
    assert diagnosis.causes[0].host == "n1"
    assert diagnosis.causes[0].failure.fix


def test_the_same_bus_on_another_host_is_another_rank_and_unsaid_where_no_host_is():
    assert diagnose_text(RANKS + kernel_line("xid-79-fallen-off-bus", "n2")).causes[0].rank == 3
    bare = "[74889.644132] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    assert diagnose_text(RANKS + bare).causes[0].rank is None
    assert diagnose_text(RANKS.splitlines()[0] + "\n" + bare).causes[0].rank == 11


@pytest.mark.parametrize("secondary", SECONDARY)
@pytest.mark.parametrize("name", sorted(set(CLASSES) - set(SECONDARY)))
def test_a_secondary_xid_never_wins_also_when_it_comes_first(name, secondary):
    causes = diagnose_text(kernel_line(secondary) + kernel_line(name)).causes
    assert causes[0].id == name
    assert secondary not in {cause.id for cause in causes}
