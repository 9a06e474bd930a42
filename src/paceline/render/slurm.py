"""Slurm: batch scripts. `job.sbatch` starts torchrun on every node for a program that knows nothing
of Paceline; `agents_script` starts our own controller, and is what `paceline run --on slurm` hands
over.

Slurm tells a job `grace` seconds before its time is over, or before it is preempted where the
cluster says so (`PreemptParameters=send_user_signal`); what runs then saves, and the job goes back
into the queue. The controller is in the batch step, on the job's first node: it outlives the login
node's sessions, and no port of a login node is needed. When that node is lost Slurm starts the job
again, and the run resumes from its newest checkpoint.
"""

from collections.abc import Iterator, Sequence

from paceline.job import Job, Script, SlurmSpec
from paceline.job.non_defaults import fields_of
from paceline.plan import Plan
from paceline.render.carried import OF_DDP
from paceline.render.engine import Files, Gap
from paceline.render.environment import export_lines
from paceline.render.example import example, program_lines
from paceline.render.shell import check_one_line, command, quote, script
from paceline.render.slurm_directives import Ask, directives
from paceline.render.text import header
from paceline.render.torchrun import gaps as gaps_of_torchrun
from paceline.units import counted

_EACH_ITS_OWN = "# shellcheck disable=SC2016 # each node reads its own number"

_ADDRESS = 'scontrol --oneliner show node "$first" | sed "s/.* NodeAddr=\\([^ ]*\\).*/\\1/"'
"""What Slurm itself reaches a node by: names need not be known to the network."""

_PORT = "HEAD_PORT=$((20000 + ${SLURM_JOB_ID:?} % 12768))"
"""Port of the rendezvous: another one for each job that shares a node, below those that Linux takes
for connections (from 32768, net.ipv4.ip_local_port_range)."""

CARRIES = (
    (OF_DDP | {"recovery.max_restarts", "recovery.grace"})
    | {f"slurm.{name}" for name in fields_of(SlurmSpec)}
) - {"slurm.python"}
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`job.sbatch`, which starts torchrun on every node, and the example program."""
    lines = [
        'cd "${SLURM_SUBMIT_DIR:?submit this with sbatch}"',
        *program_lines(plan),
        *job.spec.slurm.setup,
        *export_lines(plan),
        *_meet(plan.cluster.num_nodes),
        *_follow(
            _on_nodes(
                "torchrun",
                _torchrun(plan.cluster.num_nodes, plan.cluster.ranks_per_node),
                '"${TRAIN_SCRIPT:-train.py}" "$@"',
                nodes=plan.cluster.num_nodes,
                number="--node-rank",
            )
        ),
        *_ends(job.spec.slurm, restarts=job.spec.recovery.max_restarts),
    ]
    return {"job.sbatch": _of_plan(plan, job, lines)} | example(
        plan, job, "train_torchrun.py", "lm.py"
    )


def gaps(plan: Plan, job: Job) -> Iterator[Gap]:
    """What torchrun's example program lacks, and what Slurm is not asked for."""
    yield from gaps_of_torchrun(plan, job)
    if job.spec.slurm.spare_nodes:
        yield Gap(
            what=counted(job.spec.slurm.spare_nodes, "spare node"),
            where="slurm.spare_nodes",
            why="torchrun keeps none; a lost node ends the job, which goes back into the queue",
            nearest="the job begins again on other nodes, from the program's own checkpoint",
            fix="paceline run --on slurm uses them",
        )
    if job.spec.slurm.array is not None:
        yield Gap(
            what=f"slurm.array {job.spec.slurm.array}",
            where="slurm.array",
            why="an array starts several jobs, and a plan is one run",
            nearest=None,
            fix="leave slurm.array out, or submit your own script: "
            "paceline run --script train.py --on slurm",
        )


def agents_script(
    plan: Plan, job: Job, *, run: str, python: str, options: Sequence[str] = ()
) -> str:
    """The batch script of a run with Paceline's own controller and agents.

    Args:
        plan: Its nodes; spares come on top.
        job: Its `slurm` section.
        run: The run's folder.
        python: Interpreter on the nodes.
        options: Of the `paceline run` that starts there.
    """
    return _of_plan(plan, job, _resume(job.spec.slurm, run, python, options), has_agents=True)


def program_script(job: Script, *, folder: str, python: str) -> str:
    """The batch script of a program that is not one of ours: torchrun or accelerate on every node.

    Args:
        job: Its command: `python train.py ...`, `torchrun`'s other programs, or
            `accelerate launch ...`.
        folder: Where it runs.
        python: Interpreter that has torchrun, where the command is no Python of its own.
    """
    spec = job.spec
    for name, value in spec.environment.items():
        check_one_line(value, what=f"environment.{name}", where=job.source)
    check_one_line(folder, what="the job's folder", where=job.source)
    lines = [
        *spec.slurm.setup,
        f"cd {quote(folder)}",
        *(f"export {name}={quote(value)}" for name, value in spec.environment.items()),
        *_meet(spec.nodes),
        *_follow(_start(job, python)),
        *_ends(spec.slurm, restarts=spec.recovery.max_restarts),
    ]
    return _of_program(job, lines)


def launcher_script(job: Script, *, run: str, python: str, options: Sequence[str] = ()) -> str:
    """The batch script of a launcher on every node (`starts: nodes`), which our controller in the
    batch step starts, watches and starts again.

    Args:
        job: The launcher's nodes and its `slurm` section.
        run: The run's folder.
        python: Interpreter on the nodes.
        options: Of the `paceline run` that starts there.
    """
    return _of_program(job, _resume(job.spec.slurm, run, python, options))


def _resume(slurm: SlurmSpec, run: str, python: str, options: Sequence[str]) -> list[str]:
    """Our own controller in the batch step, which starts the agents of all nodes."""
    check_one_line(run, what="the run's folder", where="--out")
    start = command(python, "-m", "paceline", "run", "--resume", run, "--on", "srun", *options)
    return [*slurm.setup, f"cd {quote(run)}", *_follow(start), *_ends(slurm, restarts=0)]


def _of_plan(plan: Plan, job: Job, lines: Sequence[str], *, has_agents: bool = False) -> str:
    """The whole batch script of a plan, which does `lines`. Agents have the job's spare nodes too,
    and outlive a node that is lost."""
    ask = Ask(
        name=job.spec.name,
        nodes=plan.cluster.num_nodes + (job.spec.slurm.spare_nodes if has_agents else 0),
        accelerators=0 if plan.cluster.backend == "gloo" else plan.cluster.ranks_per_node,
        ranks=plan.cluster.ranks_per_node,
        grace_s=job.spec.recovery.grace,
        outlives_nodes=has_agents,
        slurm=job.spec.slurm,
        where=job.where("slurm.time"),
    )
    return script(header(plan, job), *lines, directives=directives(ask))


def _of_program(job: Script, lines: Sequence[str]) -> str:
    """The whole batch script of a program that is not one of ours, which does `lines`."""
    spec = job.spec
    ask = Ask(
        name=spec.name,
        nodes=spec.nodes,
        accelerators=0,
        ranks=spec.processes,
        grace_s=spec.recovery.grace,
        outlives_nodes=False,
        slurm=spec.slurm,
        where=f"slurm.time, {job.source}",
    )
    made = f"Made by Paceline for the program {spec.name}: making it again overwrites it."
    return script([made], *lines, directives=directives(ask))


def _meet(nodes: int) -> list[str]:
    """Where the ranks of several nodes meet: at the job's first node."""
    if nodes == 1:
        return []
    return [
        'first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?}" | head -n 1)',
        f"HEAD_ADDRESS=$({_ADDRESS})",
        _PORT,
    ]


def _start(job: Script, python: str) -> str:
    """The program on every node, as a command of a shell."""
    spec, words = job.spec, job.spec.command
    if words[:2] == ["accelerate", "launch"]:
        ranks = spec.nodes * spec.processes
        options = [f"--num_machines {spec.nodes}", f"--num_processes {ranks}"]
        options += ["--multi_gpu"] if ranks > 1 else []
        if spec.nodes > 1:
            options += ['--main_process_ip "$HEAD_ADDRESS"', '--main_process_port "$HEAD_PORT"']
        launcher, number = "accelerate launch", "--machine_rank"
        return _on_nodes(launcher, options, command(*words[2:]), nodes=spec.nodes, number=number)
    is_python = words[0].rpartition("/")[2].startswith("python") and len(words) > 1
    launcher = command(words[0] if is_python else python, "-m", "torch.distributed.run")
    rest = command(*words[1:]) if is_python else f"--no-python {command(*words)}"
    options = _torchrun(spec.nodes, spec.processes)
    return _on_nodes(launcher, options, rest, nodes=spec.nodes, number="--node-rank")


def _torchrun(nodes: int, processes: int) -> list[str]:
    """Options of torchrun that are the same on every node. The nodes are numbered by Slurm and meet
    at an address of the first: otherwise torchrun takes names that may mean every node itself."""
    if nodes == 1:
        return ["--standalone", f"--nproc-per-node={processes}"]
    return [
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes}",
        '--master-addr="$HEAD_ADDRESS"',
        '--master-port="$HEAD_PORT"',
    ]


def _on_nodes(launcher: str, options: list[str], rest: str, *, nodes: int, number: str) -> str:
    """A launcher once on every node; each knows its own number on that node only."""
    # Since 22.05 srun does not take --cpus-per-task over from sbatch; a task of a node is never
    # bound to a part of what its job has.
    cpus = '${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"}'
    start = f"srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \\\n  {cpus}"
    if nodes > 1:
        inner = f'exec {launcher} {number}="$SLURM_NODEID" "$@"'
        start = f"{_EACH_ITS_OWN}\n{start} \\\n  bash -c {quote(inner)}"
        launcher = "launcher"
    return f"{start} {launcher} \\\n  {' '.join(options)} \\\n  {rest}"


def _follow(start: str) -> list[str]:
    """Start it in the background, pass the first signal on as SIGTERM, and wait for its end.

    `wait` returns when a signal comes; the exit code is that of the last one.
    """
    return [
        "told='' pid=''",
        "# shellcheck disable=SC2329 # by the traps below",
        "tell() {  # once: a second signal would end the run at once",
        '  if [ -n "$told" ]; then return; fi',
        "  told=$1",
        '  if [ -n "$pid" ]; then kill -TERM "$pid" 2>/dev/null || true; fi',
        "}",
        "trap 'tell USR1' USR1  # time is nearly over, or preempted: save, and resume later",
        "trap 'tell USR2' USR2  # `paceline stop`: save, and do not requeue",
        "trap 'tell TERM' TERM",
        f"{start} &",
        "early=$told pid=$!  # one command: no signal comes between the two",
        'if [ -n "$early" ]; then kill -TERM "$pid" 2>/dev/null || true; fi',
        "code=0",
        'wait "$pid" || code=$?',
        'while [ -n "$told" ] && kill -0 "$pid" 2>/dev/null; do',
        "  code=0",
        '  wait "$pid" || code=$?',
        "done",
        'if [ -n "$told" ]; then  # the last `wait` may have ended by the signal',
        "  last=0",
        '  wait "$pid" 2>/dev/null || last=$?',
        '  if [ "$last" -ne 127 ]; then code=$last; fi',
        "fi",
    ]


def _ends(slurm: SlurmSpec, *, restarts: int) -> list[str]:
    """Back into the queue where it is not through; otherwise the job ends with its exit code."""
    again: Sequence[str] = []
    if slurm.requeue:
        again = [
            'if [ "$told" = USR1 ] && [ "$code" -ne 0 ]; then',
            f'  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {slurm.max_requeues} ]; then',
            f'    echo "out of time, and back in the queue {slurm.max_requeues} times before" >&2',
            '    exit "$code"',
            "  fi",
            '  echo "out of time: back into the queue" >&2',
            '  scontrol requeue "$SLURM_JOB_ID" && exit 0',
            "fi",
        ]
    if slurm.requeue and restarts:
        again = [
            *again,
            'if [ -z "$told" ] && [ "$code" -ne 0 ] && \\',
            f'  [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then',
            '  echo "ended with $code: back into the queue" >&2',
            '  scontrol requeue "$SLURM_JOB_ID" && exit 0',
            "fi",
        ]
    return [*again, 'exit "$code"']
