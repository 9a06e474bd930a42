"""How the pods of a manifest reach each other: names, ports, policies, RDMA."""

import re
from collections.abc import Iterator

from paceline.check.finding import Finding
from paceline.check.lint.configs.kubernetes import ClusterJob, Pods
from paceline.check.lint.configs.marked import Marked
from paceline.check.lint.configs.say import ERROR, INFO, WARNING, found


def check_network(job: ClusterJob, pods: Pods) -> Iterator[Finding]:
    """The host's network, with the host's names and ports."""
    host = pods.spec.at("hostNetwork")
    if host is None or not host.true():
        return
    if pods.spec.text("dnsPolicy") != "ClusterFirstWithHostNet" and job.num_pods > 1:
        yield found(
            "k8s-init-container-stuck",
            ERROR,
            job.path,
            host.line,
            "with hostNetwork the pods ask the node's resolver, which knows no service of the "
            "cluster",
            fix="dnsPolicy: ClusterFirstWithHostNet",
        )
    names = pods.variables(job.path)
    if job.num_pods > 1 and "GLOO_SOCKET_IFNAME" not in names:
        yield found(
            "gloo-loopback-fullmesh",
            INFO,
            job.path,
            host.line,
            "with hostNetwork Gloo takes the interface of the node's own name, often the loopback",
            fix="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )


def check_master(
    job: ClusterJob, pods: Pods, services: dict[str | None, Marked]
) -> Iterator[Finding]:
    """The name of the first pod."""
    given = pods.variables(job.path).get("MASTER_ADDR")
    if given is None or not given.value or job.num_pods < 2 or "$" in given.value:
        return
    host = given.value
    named = {f"{job.name}-master-0", f"{job.name}-worker-0"} if job.kind != "Job" else set()
    if "." in host:
        domain = host.split(".")[1]
        subdomain = pods.spec.text("subdomain")
        if job.kind == "Job" and host.startswith(f"{job.name}-0.") and subdomain is None:
            yield found(
                "dns-unresolvable-master",
                ERROR,
                job.path,
                given.line,
                f"{host} has no record: the pods have no subdomain",
                fix=f"subdomain: {domain}, and a headless Service {domain}",
                column=given.column,
            )
        return
    if re.fullmatch(r"[\d:a-fA-F]*", host) or host == "localhost" or host in services:
        return
    if host in named or host.startswith("["):
        return
    certain = job.kind == "Job" and host.startswith(job.name)
    yield found(
        "dns-unresolvable-master",
        ERROR if certain else WARNING,
        job.path,
        given.line,
        f"the short name {host} is no service of this file, and pods have none of their own",
        fix=f"a headless Service, and {host}.SERVICE as the address",
        column=given.column,
    )


def check_rdma(job: ClusterJob, pods: Pods) -> Iterator[Finding]:
    """RDMA devices and the right to lock memory for them."""
    container = pods.container
    if container is None:
        return
    locks = container.plain("securityContext", "capabilities", "add") or []
    free = container.true("securityContext", "privileged") or "IPC_LOCK" in [
        str(each).upper() for each in locks
    ]
    rdma = pods.rdma
    if rdma is not None and not free:
        yield found(
            "memlock-limit",
            INFO,
            job.path,
            rdma.line,
            "the pods have RDMA devices, and may not lock the memory that they register",
            fix="securityContext: {capabilities: {add: [IPC_LOCK]}}",
        )
    variables = pods.variables(job.path)
    adapters = variables.get("NCCL_IB_HCA")
    if (
        adapters is not None
        and rdma is None
        and pods.resources is None
        and not container.true("securityContext", "privileged")
        and not pods.spec.true("hostNetwork")
        and "infiniband" not in str(pods.spec.plain("volumes"))
        and job.num_pods > 1
    ):
        yield found(
            "ethernet-fallback",
            WARNING,
            job.path,
            adapters.line,
            f"NCCL_IB_HCA={adapters.value}, and the pods ask for no RDMA device: NCCL falls back "
            "to TCP",
            fix="ask for the device plugin's resource, such as rdma/hca: 1",
        )


def check_policy(path: str, document: Marked) -> Iterator[Finding]:
    """A policy that lets only the rendezvous' port in, where NCCL and Gloo take any."""
    rules = document.at("spec", "ingress")
    listed = list(rules.items()) if rules is not None else []
    if not listed or any(rule.at("ports") is None for rule in listed):
        return
    ports = [port for rule in listed for port in (rule.at("ports") or Marked([], 0)).items()]
    numbers = {port.number("port") for port in ports}
    ranges = any(port.at("endPort") is not None for port in ports)
    if not ranges and numbers & {29500, 29400, 23456, 12355, 2222}:
        yield found(
            "nccl-connect-refused",
            WARNING,
            path,
            ports[0].line,
            f"only port {', '.join(str(one) for one in sorted(n for n in numbers if n))} is let "
            "in, and NCCL and Gloo connect on ports that the system chooses",
            fix="let the job's pods reach each other on all ports",
        )
