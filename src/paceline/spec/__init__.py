"""What is asked: the job file."""

from paceline.spec.job import (
    AdapterSpec,
    CheckpointSpec,
    ClusterSpec,
    DataSpec,
    DecoderSpec,
    DrillSpec,
    EvaluateSpec,
    JobSpec,
    LayoutSpec,
    MetricsSpec,
    ModelSpec,
    PlanSpec,
    RecoverySpec,
    TrainSpec,
)
from paceline.spec.load import Job, dump_job, job_schema, load_job, parse_job

__all__ = [
    "AdapterSpec",
    "CheckpointSpec",
    "ClusterSpec",
    "DataSpec",
    "DecoderSpec",
    "DrillSpec",
    "EvaluateSpec",
    "Job",
    "JobSpec",
    "LayoutSpec",
    "MetricsSpec",
    "ModelSpec",
    "PlanSpec",
    "RecoverySpec",
    "TrainSpec",
    "dump_job",
    "job_schema",
    "load_job",
    "parse_job",
]
