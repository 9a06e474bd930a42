"""What is asked: the job file."""

from paceline.job.cloud import CloudSpec
from paceline.job.evaluate import EvaluateSpec
from paceline.job.job import (
    CheckpointSpec,
    ClusterSpec,
    DataSpec,
    DecoderSpec,
    DrillSpec,
    Job,
    JobSpec,
    LayoutSpec,
    ModelSpec,
    PlanSpec,
    RecoverySpec,
)
from paceline.job.kubernetes import KubernetesSpec
from paceline.job.length import Length, SourceSize
from paceline.job.length_rules import CountSamples
from paceline.job.load import (
    dump_job,
    dump_script,
    job_schema,
    load_job,
    load_script,
    make_script,
    parse_job,
)
from paceline.job.metrics import MetricsSpec
from paceline.job.places import SlurmSpec, SshSpec
from paceline.job.script import Script, ScriptSpec
from paceline.job.train import AdapterSpec, ObjectiveSpec, TrainSpec

__all__ = [
    "AdapterSpec",
    "CheckpointSpec",
    "CloudSpec",
    "ClusterSpec",
    "CountSamples",
    "DataSpec",
    "DecoderSpec",
    "DrillSpec",
    "EvaluateSpec",
    "Job",
    "JobSpec",
    "KubernetesSpec",
    "LayoutSpec",
    "Length",
    "MetricsSpec",
    "ModelSpec",
    "ObjectiveSpec",
    "PlanSpec",
    "RecoverySpec",
    "Script",
    "ScriptSpec",
    "SlurmSpec",
    "SourceSize",
    "SshSpec",
    "TrainSpec",
    "dump_job",
    "dump_script",
    "job_schema",
    "load_job",
    "load_script",
    "make_script",
    "parse_job",
]
