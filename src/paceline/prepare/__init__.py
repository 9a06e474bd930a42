"""Data on their way to a run: rows become documents, tokens and packs on a disk, before any rank
starts. No torch here; `runtime/data` reads what is written."""

from paceline.prepare.index import Index, LeftOut, SourceIndex, fingerprint, open_index

__all__ = ["Index", "LeftOut", "SourceIndex", "fingerprint", "open_index"]
