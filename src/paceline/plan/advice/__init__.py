"""Small answers from a few numbers: batch, learning rate, buckets, checkpoint interval."""

from paceline.plan.advice.accumulate import BatchSplit, solve_batch
from paceline.plan.advice.buckets import BucketAdvice, advise_buckets
from paceline.plan.advice.checkpoints import CheckpointAdvice, advise_checkpoints
from paceline.plan.advice.critical_batch import CriticalBatch, critical_batch
from paceline.plan.advice.find_batch import FoundBatch, find_batch
from paceline.plan.advice.learning_rate import ScaledRate, scale_learning_rate

__all__ = [
    "BatchSplit",
    "BucketAdvice",
    "CheckpointAdvice",
    "CriticalBatch",
    "FoundBatch",
    "ScaledRate",
    "advise_buckets",
    "advise_checkpoints",
    "critical_batch",
    "find_batch",
    "scale_learning_rate",
    "solve_batch",
]
