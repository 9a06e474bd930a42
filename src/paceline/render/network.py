"""The network between a plan's nodes: settings, an all-reduce sweep, and what its log must say.

It is an engine of its own, as its files are for whoever starts the job, however that is done: other
engines' launch scripts have the same settings in them. What a pod needs to see the NICs is in the
files of Kubernetes.
"""

from dataclasses import asdict
from shlex import quote

from paceline.job import Job
from paceline.plan import Plan
from paceline.render.carried import EVERYTHING
from paceline.render.engine import Files, Gap
from paceline.render.environment import export_lines, meeting_lines, torchrun_options
from paceline.render.example import script_text
from paceline.render.fabric import decide_network, log_lines, site_settings
from paceline.render.shell import script
from paceline.render.text import commented, header, to_json

_CHECK = "check-network.sh"

CARRIES = EVERYTHING
"""Settings that the files say, beside the plan."""


def render(plan: Plan, job: Job) -> Files:
    """`network.json`, `network.sh`, the sweep, and the check of its log where NCCL writes one."""
    files = {
        "network.json": to_json(asdict(decide_network(plan))),
        "network.sh": _settings(plan, job),
        "all-reduce.sh": _sweep(plan, job),
        "all_reduce.py": script_text("all_reduce.py"),
    }
    if log_lines(plan):
        files[_CHECK] = _check(plan, job)
    return files


def gaps(plan: Plan, job: Job) -> list[Gap]:
    """Only NCCL and gloo are known here."""
    if plan.cluster.backend in ("nccl", "gloo"):
        return []
    is_mac = plan.cluster.backend == "mlx"
    return [
        Gap(
            what=f"the network of {plan.cluster.accelerator}",
            where="cluster.accelerator",
            why=f"these files are for NCCL and gloo, it talks through {plan.cluster.backend}",
            nearest=None,
            fix="render for MLX, whose hosts.sh looks at Thunderbolt: `paceline render --for mlx`"
            if is_mac
            else "ask its vendor's tools",
        )
    ]


def _settings(plan: Plan, job: Job) -> str:
    """To be sourced: it ends nothing, and starts nothing."""
    about = header(plan, job, decide_network(plan).reason, "", "Use it with: . ./network.sh")
    lines = export_lines(plan)
    for each in site_settings(plan):
        lines += [f"# export {each.name}={each.value}  # {each.reason}"]
    return "# shellcheck shell=bash\n" + commented(about) + "\n".join([*lines, ""])


def _sweep(plan: Plan, job: Job) -> str:
    about = ["All-reduce from 1 KiB to 256 MiB over all ranks; run it on every node."]
    lines = ['cd "$(dirname "$0")"', "# shellcheck source=network.sh", ". ./network.sh"]
    if log_lines(plan):
        lines += [
            "mkdir -p nccl-logs",
            "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_DEBUG_FILE=nccl-logs/%h-%p.log",
        ]
    run = f'torchrun {" ".join(torchrun_options(plan))} all_reduce.py --json "$found" "$@"'
    lines.append("found=all_reduce.json")
    if decide_network(plan).choice == "rdma":
        about += [
            "With --tcp over TCP, into all_reduce-tcp.json; compare the two with",
            "  paceline bench --compare all_reduce.json all_reduce-tcp.json",
        ]
        lines += [
            'if [[ "${1:-}" == --tcp ]]; then',
            "  shift",
            "  found=all_reduce-tcp.json",
            "  # paceline: ignore[ethernet-fallback] TCP is what --tcp asks for",
            "  export NCCL_NET=Socket",
            "fi",
        ]
    lines += [*meeting_lines(plan), run]
    if log_lines(plan):
        lines.append(f'[[ "$found" == *-tcp.json ]] || ./{_CHECK} nccl-logs/*.log')
    return script(header(plan, job, *about), *lines)


def _check(plan: Plan, job: Job) -> str:
    about = [
        f"Usage: {_CHECK} LOG...",
        "The logs of all ranks, written with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET.",
        "Ends with 1 where they say something else than the plan expects.",
    ]
    lines = [
        f'[ "$#" -gt 0 ] || {{ echo "usage: {_CHECK} LOG..." >&2; exit 2; }}',
        'logs=("$@")',
        "failed=0",
        "check() {  # yes, no, better or worse; what is looked for; what it means",
        "  local found",
        '  found="$(cat -- "${logs[@]}" | grep -cE -- "$2" || true)"',
        '  case "$1:$((found > 0))" in',
        '    yes:1 | better:1) echo "ok    $found x $2" ;;',
        '    no:0 | worse:0) echo "ok    never $2" ;;',
        '    worse:1) echo "slow  $found x $2: $3" ;;',
        '    better:0) echo "slow  never $2: $3" ;;',
        '    yes:0) echo "FAIL  never $2: $3"; failed=1 ;;',
        '    no:1) echo "FAIL  $found x $2: $3"; failed=1 ;;',
        "  esac",
        "}",
    ]
    lines += [
        f"check {each.wanted} {quote(each.pattern)} {quote(each.meaning)}"
        for each in log_lines(plan)
    ]
    return script(header(plan, job, *about), *lines, 'exit "$failed"')
