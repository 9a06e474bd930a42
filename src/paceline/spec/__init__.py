"""What is asked: the job file."""

from paceline.spec.cloud import CloudSpec
from paceline.spec.evaluate import EvaluateSpec
from paceline.spec.job import (
    CheckpointSpec,
    ClusterSpec,
    DataSpec,
    DecoderSpec,
    DrillSpec,
    JobSpec,
    LayoutSpec,
    ModelSpec,
    PlanSpec,
    RecoverySpec,
)
from paceline.spec.kubernetes import KubernetesSpec
from paceline.spec.length import CountSamples, Length, SourceSize
from paceline.spec.load import (
    Job,
    dump_job,
    dump_script,
    job_schema,
    load_job,
    load_script,
    make_script,
    parse_job,
)
from paceline.spec.metrics import MetricsSpec
from paceline.spec.places import SlurmSpec, SshSpec
from paceline.spec.script import Script, ScriptSpec
from paceline.spec.train import AdapterSpec, ObjectiveSpec, TrainSpec

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
