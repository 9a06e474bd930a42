"""Small configurations: environment files, TF_CONFIG, MLX's and MPI's hostfiles, Dockerfiles,
compose files."""

import re
from collections.abc import Iterator
from dataclasses import replace

from paceline.check.finding import Finding
from paceline.check.lint.configs.images import check_image
from paceline.check.lint.configs.launch_line import Launch, launches_in_words
from paceline.check.lint.configs.launch_rules import check_launch
from paceline.check.lint.configs.marked import Marked, Unreadable, read_json
from paceline.check.lint.configs.megatron_arguments import check_megatron
from paceline.check.lint.configs.say import ERROR, INFO, WARNING, found
from paceline.check.lint.configs.scene import Scene
from paceline.check.lint.configs.shell import Word
from paceline.check.lint.configs.variables import (
    LOOPBACK,
    Variable,
    check_variables,
    surroundings,
)
from paceline.check.lint.context import Context

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)\s*=\s*(.*?)\s*$")


def is_environment(text: str) -> bool:
    """Whether every line that says something is `NAME=value`."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    return bool(lines) and all(_ASSIGNMENT.match(line) for line in lines)


def read_environment(path: str, text: str) -> list[Variable]:
    """The variables of an environment file such as `.deepspeed_env` or `nccl.conf`."""
    found_ones = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        match = _ASSIGNMENT.match(line)
        if match is not None:
            value = match[2].strip("\"'")
            found_ones.append(
                Variable(name=match[1], value=value, path=path, line=number, column=1)
            )
    return found_ones


def check_environment(path: str, text: str, context: Context) -> Iterator[Finding]:
    """The variables, and a TF_CONFIG among them."""
    variables = read_environment(path, text)
    yield from check_variables(variables, surroundings(context))
    yield from check_tf_variables(variables)


def check_tf_variables(variables: list[Variable]) -> Iterator[Finding]:
    """A TF_CONFIG that is written out as text."""
    for each in variables:
        if each.name != "TF_CONFIG" or not each.value.strip().startswith("{"):
            continue
        try:
            value = read_json(each.value)
        except Unreadable as error:
            if "$" not in each.value:
                yield found(
                    "tf-config-mismatch",
                    ERROR,
                    each.path,
                    each.line,
                    f"TF_CONFIG is no JSON: {error.what}",
                    fix="write it as one JSON object",
                )
            continue
        for finding in check_tf_config(each.path, value):
            yield replace(finding, where=replace(finding.where, line=each.line))


def is_tf_config(config: Marked) -> bool:
    """Whether a JSON mapping is a TF_CONFIG."""
    return config.at("cluster") is not None and (
        config.at("task") is not None or config.at("cluster", "worker") is not None
    )


def check_tf_config(path: str, config: Marked) -> Iterator[Finding]:
    """The task against the cluster it is said to be in."""
    cluster, task = config.at("cluster"), config.at("task")
    if cluster is None or not isinstance(cluster.value, dict):
        return
    addresses = [address for _, group in cluster.entries() for address in group.items()]
    seen: dict[str, Marked] = {}
    for address in addresses:
        text = address.text() or ""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit():
            yield found(
                "tf-config-mismatch",
                ERROR,
                path,
                address.line,
                f"{text or 'an address'} has no port",
                fix="HOST:PORT",
            )
        if text in seen:
            yield found(
                "tf-config-mismatch",
                ERROR,
                path,
                address.line,
                f"{text} stands in line {seen[text].line} too: two tasks cannot share a port",
                fix="one address for each task",
            )
        seen[text] = address
        hosts = {(one.text() or "").rpartition(":")[0] for one in addresses}
        if LOOPBACK.match(host) and len(hosts) > 1:
            yield found(
                "tf-config-mismatch",
                ERROR,
                path,
                address.line,
                f"{text} is another machine for each task",
                fix="an address that the others reach",
            )
    if task is None:
        return
    kind, index = task.text("type"), task.number("index")
    group = cluster.at(kind) if kind is not None else None
    if kind is not None and group is None and kind != "evaluator":
        yield found(
            "tf-config-mismatch",
            ERROR,
            path,
            (task.at("type") or task).line,
            f"the task is a {kind}, and the cluster has {', '.join(dict(cluster.entries()))} only",
            fix="the name of a group of the cluster",
        )
    elif group is not None and index is not None and index >= len(list(group.items())):
        number = len(list(group.items()))
        yield found(
            "tf-config-mismatch",
            ERROR,
            path,
            (task.at("index") or task).line,
            f"task {index} of {number} {kind}s: they are counted from 0",
            fix=f"0 to {number - 1}",
        )


def mlx_hosts(config: Marked) -> list[Marked] | None:
    """The hosts of an MLX hostfile; None where it is something else."""
    listed = config.at("hosts") if isinstance(config.value, dict) else config
    hosts = list(listed.items()) if listed is not None else []
    return hosts if hosts and all(one.at("ssh") is not None for one in hosts) else None


def check_mlx_hosts(path: str, hosts: list[Marked]) -> Iterator[Finding]:
    """Addresses that a ring of machines cannot be made of."""
    seen: dict[str, Marked] = {}
    for host in hosts:
        name = host.text("ssh") or "?"
        addresses = host.at("ips")
        listed = list(addresses.items()) if addresses is not None else []
        rdma = host.at("rdma")
        if (
            len(hosts) > 1
            and addresses is not None
            and not listed
            and not (rdma is not None and list(rdma.items()))
        ):
            yield found(
                "mlx-ring-connect",
                ERROR,
                path,
                addresses.line,
                f"{name} has no address for the ring",
                fix='"ips": ["..."]',
            )
        for address in listed:
            text = address.text() or ""
            if LOOPBACK.match(text) and len({one.text("ssh") for one in hosts}) > 1:
                yield found(
                    "mlx-ring-connect",
                    ERROR,
                    path,
                    address.line,
                    f"{name} is given as {text}, which its neighbours cannot reach",
                    fix="the address of its Thunderbolt or Ethernet port",
                )
            elif text in seen and not LOOPBACK.match(text):
                yield found(
                    "mlx-ring-connect",
                    ERROR,
                    path,
                    address.line,
                    f"{name} has the address {text} of line {seen[text].line}",
                    fix="one address for each machine",
                )
            seen.setdefault(text, address)
    yield from _check_links(path, hosts)


def _check_links(path: str, hosts: list[Marked]) -> Iterator[Finding]:
    """The RDMA device of each pair of machines."""
    for number, host in enumerate(hosts):
        rdma = host.at("rdma")
        links = list(rdma.items()) if rdma is not None else []
        if rdma is None or not links:
            continue
        if len(links) != len(hosts):
            yield found(
                "mlx-ring-connect",
                ERROR,
                path,
                rdma.line,
                f"{host.text('ssh')} has {len(links)} RDMA devices, one for each of {len(hosts)} "
                "machines is wanted",
                fix="one device for each machine, null for itself",
            )
            continue
        for other, link in enumerate(links):
            if (link.value is None) != (other == number):
                yield found(
                    "mlx-ring-connect",
                    ERROR,
                    path,
                    link.line,
                    f"{host.text('ssh')} has "
                    + ("no device" if link.value is None else f"the device {link.value}")
                    + (f" to {hosts[other].text('ssh')}" if other != number else " to itself"),
                    fix="null for itself, and a device for every other machine",
                )


def is_arguments(text: str) -> bool:
    """Whether it is a file of arguments for Megatron-LM."""
    return "--tensor-model-parallel-size" in text and all(
        line.lstrip().startswith(("--", "#")) or not line.strip() for line in text.splitlines()
    )


def check_arguments(path: str, text: str, context: Context) -> Iterator[Finding]:
    """Megatron-LM's degrees, batch and model in such a file."""
    words = [
        Word(part, number)
        for number, line in enumerate(text.splitlines(), start=1)
        if not line.lstrip().startswith("#")
        for part in line.split()
    ]
    launch = Launch(
        path=path,
        program="arguments",
        line=1,
        words=tuple(words),
        options={},
        arguments=tuple(words),
    )
    yield from check_megatron(
        launch, Scene(nodes=context.nodes, gpus_per_node=context.gpus_per_node, context=context)
    )


_SLOTS = re.compile(r"^(\S+)\s+slots=(\d+)")


def is_hostfile(text: str) -> bool:
    """Whether it is a hostfile of DeepSpeed or MPI."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return bool(lines) and all(_SLOTS.match(line) for line in lines)


def check_hostfile(path: str, text: str) -> Iterator[Finding]:
    """Hosts that are named twice."""
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        match = _SLOTS.match(line)
        if match is None:
            continue
        if match[1] in seen:
            yield found(
                "duplicate-gpu",
                ERROR,
                path,
                number,
                f"{match[1]} stands in line {seen[match[1]]} too",
                fix="one line for each host, with all its slots",
            )
        if (
            LOOPBACK.match(match[1])
            and len(text.splitlines()) > 1
            and any(
                (one := _SLOTS.match(other)) and not LOOPBACK.match(one[1])
                for other in text.splitlines()
            )
        ):
            yield found(
                "rendezvous-c10d-timeout",
                WARNING,
                path,
                number,
                f"{match[1]} is another machine for each of the others",
                fix="the name that the others know it by",
            )
        seen.setdefault(match[1], number)


def is_dockerfile(text: str) -> bool:
    """Whether it is a Dockerfile: its first instruction is FROM or ARG."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return re.match(r"(?i)(FROM\s+\S+|ARG\s+\w+)", first) is not None and (
        re.search(r"(?im)^\s*FROM\s+\S+", text) is not None
    )


def check_dockerfile(path: str, text: str, context: Context) -> Iterator[Finding]:
    """ENV lines, and what CMD and ENTRYPOINT start."""
    variables: list[Variable] = []
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        start, line = number + 1, lines[number].strip()
        pieces = [(start, line)]
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = lines[number].strip()
            pieces.append((number + 1, line))
        number += 1
        if re.match(r"(?i)FROM\s|RUN\s.*pip", pieces[0][1]):
            for place, piece in pieces:
                built = re.search(r"(?i)^FROM\s+(\S+)|(\S*/whl/cu\d+\S*)", piece)
                if built is not None:
                    yield from check_image(path, place, built[1] or built[2], context.gpu)
        if not re.match(r"(?i)ENV\s", pieces[0][1]):
            continue
        pieces[0] = (start, pieces[0][1][3:].strip())
        for place, piece in pieces:
            body = piece.removesuffix("\\").strip()
            pairs = re.findall(r"([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|\S*)", body)
            if not pairs and (old := re.match(r"([A-Za-z_]\w*)\s+(.+)", body)):
                pairs = [(old[1], old[2])]
            variables += [
                Variable(name=name, value=value.strip("\"'"), path=path, line=place)
                for name, value in pairs
            ]
    yield from check_variables(variables, surroundings(context))


def is_compose(document: Marked) -> bool:
    """Whether a YAML mapping is a compose file."""
    services = document.at("services")
    return (
        services is not None
        and isinstance(services.value, dict)
        and any(
            one.at("image") is not None or one.at("build") is not None
            for _, one in services.entries()
        )
    )


def check_compose(path: str, document: Marked, context: Context) -> Iterator[Finding]:
    """Shared memory, memory locks and variables of services that have GPUs."""
    for name, service in (document.at("services") or Marked({}, 0)).entries():
        gpus = "nvidia" in str(service.plain("deploy")) + str(service.plain("runtime")) or (
            service.at("gpus") is not None
        )
        size = service.at("shm_size")
        shares = service.text("ipc") == "host" or "/dev/shm" in str(service.plain("tmpfs")) + str(
            service.plain("volumes")
        )
        small = size is not None and _compose_bytes(size.text()) < 2**30
        if gpus and not shares and (size is None or small):
            said = size.text() if size is not None else "64 MB, Docker's default,"
            yield found(
                "shm-too-small",
                ERROR,
                path,
                size.line if size is not None else service.line,
                f"{name} has {said} of shared memory for NCCL and DataLoader workers",
                fix="shm_size: 16gb, or ipc: host",
            )
        devices = str(service.plain("devices"))
        if (
            "infiniband" in devices
            and "memlock" not in str(service.plain("ulimits"))
            and ("IPC_LOCK" not in str(service.plain("cap_add")) and not service.true("privileged"))
        ):
            yield found(
                "memlock-limit",
                INFO,
                path,
                (service.at("devices") or service).line,
                f"{name} has RDMA devices, and may lock a few MB only",
                fix="ulimits: {memlock: -1}, and cap_add: [IPC_LOCK]",
            )
        variables = _compose_variables(path, service)
        yield from check_variables(variables, surroundings(context))
        command = service.at("command")
        if command is not None and isinstance(command.value, str):
            words = [Word(text, command.line) for text in command.value.split()]
            launch = launches_in_words(path, words, {each.name: each for each in variables})
            if launch is not None:
                yield from check_launch(launch, Scene(context=context))


def _compose_bytes(text: str | None) -> float:
    match = re.fullmatch(r"(?i)(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", (text or "").strip())
    if match is None:
        return float("inf")
    return float(match[1]) * {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}[match[2].lower()]


def _compose_variables(path: str, service: Marked) -> list[Variable]:
    found_ones = []
    given = service.at("environment")
    if given is None:
        return []
    for name, value in given.entries():
        found_ones.append(Variable(name=name, value=value.text() or "", path=path, line=value.line))
    for entry in given.items():
        name, sign, text = (entry.text() or "").partition("=")
        if sign:
            found_ones.append(Variable(name=name, value=text, path=path, line=entry.line))
    return found_ones


def check_ray_cluster(path: str, document: Marked) -> Iterator[Finding]:
    """A cluster file of `ray up`: workers between their limits."""
    for name, kind in (document.at("available_node_types") or Marked({}, 0)).entries():
        least, most = kind.at("min_workers"), kind.number("max_workers")
        number = least.number() if least is not None else None
        if least is not None and number is not None and most is not None and number > most:
            yield found(
                "ray-unsatisfiable-resources",
                INFO,
                path,
                least.line,
                f"{name}: min_workers {number} is above max_workers {most}",
                fix=f"max_workers: {number}",
            )
