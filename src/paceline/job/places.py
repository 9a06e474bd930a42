"""What is asked of a place: which hosts, which queue, for how long."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from paceline.job.section import Auto, Positive, Wait, Whole, section, shipped

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@%+,/-]*")
_HOST = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9][A-Za-z0-9._-]*")
_OPTION = re.compile(r"--[a-z][a-z-]*(=[^\s\x00-\x1f]+)?")
_SET_BY_FIELD = {f"--{name}": field for name, field in shipped("sbatch_options.toml").items()}
"""Option of sbatch -> what says it here."""

_SET_ALWAYS = (
    *("--no-kill", "--open-mode", "--parsable", "--input", "--wrap", "--wait", "--test-only"),
    *("--ntasks-per-gpu", "--ntasks-per-core", "--ntasks-per-socket", "--kill-on-invalid-dep"),
    *("--help", "--usage", "--version", "--quiet", "--batch"),
)
"""What a run would not get on with otherwise, or would never be submitted with."""

_ARRAY = re.compile(r"[0-9]+(-[0-9]+)?(:[0-9]+)?(,[0-9]+(-[0-9]+)?(:[0-9]+)?)*(%[0-9]+)?")


def _check_word(value: str) -> str:
    if not _WORD.fullmatch(value):
        raise ValueError("this is no name that Slurm knows: letters, digits and ._:@%+,/- only")
    return value


def check_host(value: str) -> str:
    """A name or address, maybe with `user@`: nothing that ssh or a shell could take for an option.

    Raises:
        ValueError: It is none.
    """
    if value.count(":") > 1:
        raise ValueError(
            f"{value!r} is an IPv6 address, which ssh and rsync write differently: give a name"
        )
    if not _HOST.fullmatch(value):
        raise ValueError(
            f"{value!r} is no host: letters, digits, `.`, `_` and `-`, with `user@` before it"
        )
    return value


def _check_option(value: str) -> str:
    if not _OPTION.fullmatch(value):
        raise ValueError(f"{value!r} is no option of sbatch: write it like --reservation=mine")
    name = value.partition("=")[0]
    # sbatch takes any beginning of an option's name for it.
    for option, field in _SET_BY_FIELD.items():
        if option.startswith(name):
            raise ValueError(f"{option} is set by {field}")
    for option in _SET_ALWAYS:
        if option.startswith(name):
            raise ValueError(f"{option} is Paceline's own affair: leave it out")
    return value


def _check_array(value: str) -> str:
    if not _ARRAY.fullmatch(value):
        raise ValueError(f"{value!r} is no list of task numbers: write it like 0-9 or 1,3,5%2")
    return value


def _check_line(value: str) -> str:
    if not value.isprintable():
        raise ValueError("write each command in one line, without control characters")
    return value


Word = Annotated[str, AfterValidator(_check_word)]
Host = Annotated[str, AfterValidator(check_host)]
Line = Annotated[str, AfterValidator(_check_line)]


@section
class SshSpec:
    """Hosts that are reached over ssh."""

    hosts: list[Host] = Field(default_factory=list)
    """Names or addresses, in the order of their nodes: `[node-a, trainer@10.0.0.7]`. Those beyond
    `cluster.nodes` are spares, which take the place of a host that is lost."""

    hostfile: str | None = None
    """File with a host a line, relative to the job file; `slots=8` behind it is checked against
    `cluster.per_node`. Instead of `hosts`."""

    port: Annotated[Positive, Field(lt=65536)] | None = None
    """TCP port of sshd. Left out, what ssh itself would take."""

    identity: str | None = None
    """Private key file. Left out, what ssh itself would take. Keys that ask for a passphrase need
    an ssh agent: nobody is asked."""

    config: str | None = None
    """ssh's configuration file, instead of `~/.ssh/config`."""

    python: str | None = None
    """Python on the hosts. Left out, the same path as here."""

    address: str | Auto = "auto"
    """Address of this machine, IPv4 or IPv6, that the hosts reach. `auto` is the one from which the
    first host is reached."""

    connect_timeout: Wait = 10.0
    """How long one attempt to connect may take."""


@section
class SlurmSpec:
    """What Slurm is asked for."""

    partition: Word | None = None
    """Partition. Left out, Slurm's default."""

    account: Word | None = None
    """Account that is charged."""

    qos: Word | None = None
    """Quality of service."""

    constraint: Word | None = None
    """Features that the nodes must have."""

    time: Wait | None = None
    """Longest time for one start of the job: `4h`. Left out, the partition's limit. At least
    `recovery.grace` and 150 s, or there is no time to work."""

    memory: Word | None = None
    """Memory of each node, as Slurm writes it: `0` is all of it, `200G`."""

    gpus_per_node: Whole | Auto = "auto"
    """Accelerators of each node. `auto` is one for each rank of the plan, none on CPUs, and none
    for a program that is not one of ours."""

    gpu_type: Word | None = None
    """Type of the accelerators as Slurm names it: `h100`. Left out, any."""

    spare_nodes: Whole = 0
    """Nodes beyond `cluster.nodes` that are held so that one of them takes the place of a node that
    is lost. Without one the run goes on with fewer ranks, if `recovery.shrink` lets it."""

    cpus: Positive | Auto = "auto"
    """Cores of each node, for all its ranks. `auto` is all of them where the nodes are `exclusive`,
    else one for each rank."""

    exclusive: bool | Auto = "auto"
    """Whether nobody else may have a part of the nodes. `auto` is yes, so that ranks have all of
    their node's cores, unless `cpus` says how many or `array` makes many jobs."""

    requeue: bool = True
    """Whether Slurm starts the job again when its first node is lost or it is preempted; it resumes
    from its newest checkpoint."""

    max_requeues: Whole = 100
    """How often a job that is out of time, or preempted, puts itself back into the queue."""

    array: Annotated[str, AfterValidator(_check_array)] | None = None
    """Task numbers, `0-9%2`: as many jobs of the same program, which reads its own number from
    `SLURM_ARRAY_TASK_ID`. Only for a program that is not one of ours."""

    setup: list[Line] = Field(default_factory=list)
    """Shell commands before anything is started, such as `module load cuda`; they are run as they
    are written."""

    options: list[Annotated[str, AfterValidator(_check_option)]] = Field(default_factory=list)
    """Further options of sbatch, one each: `--reservation=mine`."""

    python: str | None = None
    """Python on the nodes. Left out, the same path as here."""


@section
class RaySpec:
    """A Ray cluster, for `paceline run --on ray`."""

    address: str | None = None
    """Address of the cluster, such as `10.0.0.5:6379`. Left out, RAY_ADDRESS or the one that this
    machine is part of."""

    python: str | None = None
    """Python on the nodes. Left out, the same path as here."""
