"""What each recompute policy is: one row, read by the planner, the laws and the runtime."""

import re
from pathlib import Path
from typing import get_args

import numpy as np

import paceline
from paceline.choices import Recompute
from paceline.choices.recomputes import RECOMPUTE_FACTS
from paceline.estimate.recompute import _DOES, _KEEPS
from paceline.parallel.table import RECOMPUTES, code_of
from paceline.parallel.word_columns import goes_backward_once, share_untouched

SOURCE = Path(paceline.__file__).parent
NAMES_A_POLICY = {
    "choices/recomputes.py",
    "estimate/recompute.py",
    "runtime/strategy/recompute.py",
}
"""Besides engines, which say what they have of it and what they call it."""


def test_every_policy_has_a_row_bytes_and_seconds():
    assert set(RECOMPUTE_FACTS) == set(get_args(Recompute))
    assert set(_KEEPS) == set(_DOES) == set(get_args(Recompute)) - {"none"}


def test_a_policy_is_named_in_three_files_and_by_engines():
    named = re.compile(r'"selective"|recompute"?(=|, | [=!]= )"(selective|full)"')
    files = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if named.search(path.read_text(encoding="utf-8"))
    }
    engines = {name for name in files if name.startswith(("render/", "parallel/abilities"))}
    assert files - engines <= NAMES_A_POLICY


def test_columns_say_what_the_rows_say():
    codes = np.array([code_of("recompute", word) for word in RECOMPUTES])
    for word, code in zip(RECOMPUTES, codes, strict=True):
        facts = RECOMPUTE_FACTS[word]
        assert goes_backward_once(code) == facts.one_backward
        assert (share_untouched(code, 4, 8) == 0.75) == facts.whole_blocks
    assert share_untouched(codes, 1, 8).tolist() == [1.0, 0.0, 0.0]
