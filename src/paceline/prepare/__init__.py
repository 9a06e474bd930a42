"""Data on their way to a run: rows become documents, tokens and packs on a disk, before any rank
starts. No torch here; `runtime/data` reads what is written."""

from paceline.prepare.before import check_data
from paceline.prepare.index import Index, LeftOut, SourceIndex, fingerprint, open_index
from paceline.prepare.prepare import Report, Step, find_prepared, prepared
from paceline.prepare.trained_on import Prepared, TrainedOn, count_samples, find_data

__all__ = [
    "Index",
    "LeftOut",
    "Prepared",
    "Report",
    "SourceIndex",
    "Step",
    "TrainedOn",
    "check_data",
    "count_samples",
    "find_data",
    "find_prepared",
    "fingerprint",
    "open_index",
    "prepared",
]
