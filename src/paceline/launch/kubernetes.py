"""Kubernetes as a place: a TrainJob, a PyTorchJob or a RayJob, through the cluster's API.

The pods run the files of `render/kubernetes.py` (or `render/ray.py`), not Paceline's own agents:
what restarts them is the cluster's controller, and they resume from their own newest checkpoint.

As a program it prints logs: `python -m paceline.launch.kubernetes JOB_ID [RANK] [--follow]`.
"""

import calendar
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from paceline.errors import JobError, PacelineError, Problem, RunError
from paceline.job import Job, Script
from paceline.launch.kube import Api, check_client
from paceline.launch.places import Sight, State, Submission
from paceline.launch.tools import never_submitted
from paceline.plan import Plan
from paceline.record.placement import Placement
from paceline.record.run import RunFolder
from paceline.render import kubernetes as render_kubernetes
from paceline.render import ray as render_ray
from paceline.render import render_job
from paceline.render.pod import config_map, pod_gaps
from paceline.render.text import header, to_yaml

OBJECTS = "objects.yaml"

_BY_API = "It is created object by object through the API, all or nothing; kubectl is not needed."

_NOTE = (
    "The pods run the program of these files: a lost one is started again by the cluster, from the "
    "newest checkpoint. Records and drills are of Paceline's own agents, which are not there; "
    "Paceline does not check the nodes before the start (`paceline explain preflight`)."
)

_KINDS = {"trainjob": "TrainJob", "pytorchjob": "PyTorchJob", "rayjob": "RayJob"}
_LABELS = {
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    "rayjob": "ray.io/cluster",
}
"""Kind -> label of its pods, whose value is the job's name (of a RayJob, its cluster's). Source:
JobSet v0.12 api/jobset, training-operator v1.9 common/constants.go, KubeRay v1.7 constant.go."""

_CONDITIONS: dict[str, State] = {
    "Complete": "finished",
    "Succeeded": "finished",
    "Failed": "failed",
    "Suspended": "waiting",
    "Running": "running",
    "Restarting": "running",
    "Created": "waiting",
}
"""Condition of a TrainJob or a PyTorchJob -> the state, the last word first."""

_RAY_STATES: dict[str, State] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "finished",
    "FAILED": "failed",
    "STOPPED": "cancelled",
}


def check(job: Job | Script, plan: Plan | None) -> Iterator[Problem]:
    """Whether there is a client, and an image."""
    yield from check_client()
    if isinstance(job, Job) and job.spec.kubernetes.image is None:
        yield Problem(
            code="W026",
            what="the job names no container image",
            where=job.where("kubernetes.image"),
            fix="set kubernetes.image to one with Python, PyTorch and what your program needs",
        )


def prepare(
    job: Job | Script, plan: Plan | None, run: RunFolder, options: Sequence[str] = ()
) -> Submission:
    """The objects, in the order in which they are created."""
    if not isinstance(job, Job) or plan is None:
        raise JobError.of(
            code="W014",
            what="a program of this machine is not in the cluster's image",
            where="--on kubernetes",
            fix="put it into the image, and name it in a job file: kubernetes.script",
        )
    spec = job.spec.kubernetes
    if plan.engine != "paceline":
        return _engine_submission(job, plan, run.path.name)
    engine = "ray" if spec.api == "rayjob" else "kubernetes"
    files = render_job(engine, plan, job)
    if spec.api == "rayjob":
        program = {name: text for name, text in files.files.items() if name != "rayjob.yaml"}
        objects = [config_map(job, program), render_ray.rayjob(plan, job)]
    else:
        objects = render_kubernetes.objects(plan, job)
    return _submission(plan, job, objects, [gap.line for gap in files.gaps])


def _engine_submission(job: Job, plan: Plan, run: str) -> Submission:
    """Another engine's files in the ConfigMap; each pod starts its `launch.sh`."""
    spec = job.spec.kubernetes
    if spec.api == "rayjob":
        raise JobError.of(
            code="R015",
            what=f"a RayJob starts Ray Train's own program, not the engine {plan.engine}",
            where=job.where("kubernetes.api"),
            fix="kubernetes.api: trainjob or pytorchjob",
        )
    rendered = render_job(plan.engine, plan, job, own_program=spec.script is not None)
    gaps = [*rendered.gaps, *pod_gaps(plan, job)]
    refused = [gap for gap in gaps if gap.nearest is None]
    JobError.raise_for(
        Problem(code="H002", what=f"{gap.what}: {gap.why}", where=job.where(gap.where), fix=gap.fix)
        for gap in refused
    )
    objects = render_kubernetes.objects(plan, job, rendered.files, run=run)
    # The section `kubernetes` is what these objects are made of.
    left_out = [gap.line for gap in gaps if gap.where != "kubernetes"]
    return _submission(plan, job, objects, left_out)


def _submission(
    plan: Plan, job: Job, objects: Sequence[dict[str, Any]], left_out: Sequence[str]
) -> Submission:
    return Submission(
        files={OBJECTS: to_yaml(header(plan, job), *objects)},
        command=["kubectl", "create", "--filename", OBJECTS],
        notes=[_BY_API, _NOTE, *left_out],
    )


def submit(submission: Submission, run: RunFolder) -> str:
    """`NAMESPACE.KIND.NAME`, by which the run is found again."""
    objects = list(yaml.safe_load_all(submission.files[OBJECTS]))
    Api().create_all(objects)
    job = objects[-1]
    return f"{job['metadata']['namespace']}.{job['kind'].lower()}.{job['metadata']['name']}"


def look(placement: Placement) -> Sight:
    namespace, kind, name = _parts(placement)
    api = Api()
    found = api.get(_KINDS[kind], namespace, name)
    if found is None:
        raise _gone(placement, "submit it again: paceline run --resume RUN --on kubernetes")
    return read_status(kind, found.get("status") or {}, _pods(api, namespace, kind, found))


def read_status(kind: str, status: dict[str, Any], pods: Sequence[dict[str, Any]]) -> Sight:
    """The status of an object, and where its pods are."""
    if kind == "rayjob":
        word = str(status.get("jobStatus") or "")
        state: State = _RAY_STATES.get(word, "waiting")
        detail = word or str(status.get("jobDeploymentStatus") or "not seen by KubeRay yet")
        started, ended = status.get("startTime"), status.get("endTime")
    else:
        true = {
            each["type"]: each
            for each in status.get("conditions") or []
            if each.get("status") == "True"
        }
        named = next((each for each in _CONDITIONS if each in true), None)
        state = "waiting" if named is None else _CONDITIONS[named]
        reason = true[named].get("message") if named else None
        detail = named or "not seen by its controller yet"
        detail = f"{detail} ({' '.join(str(reason).split())[:200]})" if reason else detail
        started = status.get("startTime")
        over = named is not None and state in ("finished", "failed")
        ended = true[named].get("lastTransitionTime") if over and named else None
    running = [each for each in pods if each.get("status", {}).get("phase") == "Running"]
    if state == "waiting" and running and kind == "trainjob":
        state, detail = "running", f"{len(running)} of {len(pods)} pods run"
    first = min((each["status"].get("startTime") or "" for each in running), default=None)
    restarts = sum(
        container.get("restartCount", 0)
        for each in pods
        for container in each.get("status", {}).get("containerStatuses") or []
    )
    return Sight(
        state=state,
        detail=detail,
        nodes=[each["spec"]["nodeName"] for each in pods if each["spec"].get("nodeName")],
        started_at=_unix(started or first),
        ended_at=_unix(ended),
        restarts=restarts,
    )


def cancel(placement: Placement) -> None:
    """The job and what belongs to it are deleted: pods get SIGTERM and their grace. Checkpoints on
    a claim stay."""
    namespace, kind, name = _parts(placement)
    api = Api()
    if not api.delete(_KINDS[kind], namespace, name):
        raise _gone(placement, "nothing to do: it has ended")
    if kind == "trainjob":
        api.delete("TrainingRuntime", namespace, f"{name}-runtime")
    api.delete("ConfigMap", namespace, f"{name}-program")


def log_command(placement: Placement, rank: int | None, follow: bool) -> Sequence[str] | None:
    """The pods' own logs: this module as a program."""
    words = [sys.executable, "-m", "paceline.launch.kubernetes", str(placement.job_id)]
    words += [str(rank)] if rank is not None else []
    return words + (["--follow"] if follow else [])


def _parts(placement: Placement) -> tuple[str, str, str]:
    parts = (placement.job_id or "").split(".")
    if len(parts) != 3 or parts[1] not in _KINDS:
        raise never_submitted("kubernetes")
    return parts[0], parts[1], parts[2]


def _gone(placement: Placement, fix: str) -> RunError:
    namespace, kind, name = _parts(placement)
    what = f"the cluster has no {_KINDS[kind]} {name} in {namespace} (any more)"
    return RunError.of(code="W012", what=what, where="kubernetes", fix=fix)


def _unix(text: str | None) -> float | None:
    """Unix time of `2026-11-22T03:00:00Z`."""
    try:
        return float(calendar.timegm(time.strptime(text or "", "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


def print_logs(job_id: str, rank: int | None, *, follow: bool) -> None:
    """The log of every pod, one after the other; or of the pod that has a rank.

    Raises:
        JobError: `W017`, there is no such pod (yet).
        RunError: The cluster cannot be asked.
    """
    namespace, kind, name = _parts(Placement(place="kubernetes", job_id=job_id))
    api = Api()
    found = api.get(_KINDS[kind], namespace, name)
    pods = _pods(api, namespace, kind, found) if found is not None else []
    if rank is not None and found is not None:
        if kind == "rayjob":
            raise JobError.of(
                code="W017",
                what="Ray decides which pod has which rank, and prints all at the driver",
                where=name,
                fix="leave --rank out",
            )
        per_pod = _ranks_per_pod(kind, found)
        pods = pods[rank // per_pod : rank // per_pod + 1]
    if not pods:
        raise JobError.of(
            code="W017",
            what=f"{name} has no pod{'' if rank is None else f' of rank {rank}'} (yet)",
            where=f"namespace {namespace}",
            fix="see whether it has started: paceline status; ranks count from 0",
        )

    def write(part: bytes) -> None:
        sys.stdout.buffer.write(part)
        sys.stdout.flush()

    for pod in pods:
        if len(pods) > 1:
            write(f"==> {pod['metadata']['name']} <==\n".encode())
        api.log(namespace, pod["metadata"]["name"], follow=follow, write=write)


def _pods(api: Api, namespace: str, kind: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of a job that is there, in the order of their names; none before its controller saw
    it."""
    value = found["metadata"]["name"]
    if kind == "rayjob":
        value = (found.get("status") or {}).get("rayClusterName")
    return api.pods(namespace, f"{_LABELS[kind]}={value}") if value else []


def _ranks_per_pod(kind: str, found: dict[str, Any]) -> int:
    spec = found.get("spec") or {}
    if kind == "trainjob":
        return int(spec.get("trainer", {}).get("numProcPerNode") or 1)
    return int(spec.get("nprocPerNode") or 1)


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--follow"]
    try:
        print_logs(words[0], int(words[1]) if words[1:] else None, follow="--follow" in sys.argv)
    except PacelineError as error:
        sys.exit(str(error))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)


if __name__ == "__main__":
    main()
