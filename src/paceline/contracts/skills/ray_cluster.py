"""The Ray cluster of a request: where it is, what it has, and whether that is enough."""

import contextlib
import importlib
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.contracts.skills.messages.ray import ClusterStatus, Request
from paceline.units import counted, format_bytes

_TOKEN = (
    "one with token authentication, Ray's default on this machine from 2.59 on and everywhere from "
    "2.61 on, wants the same RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as there: "
    "`ray get-auth-token` prints it"
)
"""Source: docs.ray.io, "Ray token authentication" and the notice of its rollout, 2026-11."""

_CONNECT_S = 10.0
"""Seconds for one TCP connection: its first packet is sent again after 1, 3 and 7 s (RFC 6298,
section 2, whose wait starts at 1 s and doubles)."""

_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
"""What opens a connection of HTTP/2, and so of gRPC, which Ray speaks: the other end answers with
SETTINGS too, whose type, 4, is a frame's fourth byte (RFC 9113, sections 3.4, 4.1 and 6.5)."""

_HEAD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_CLIENT = "/ray.rpc.RayletDriver/ClusterInfo"
"""Calls that only look. Source: Ray 2.60, gcs_service.proto and ray_client.proto."""

WORKER_BYTES = 256 * 2**20
"""Memory of a worker before it has a model. Measured: 255 MB of its own in a process that has
imported Ray Train and torch (Ray 2.60, torch 2.13 for CPUs)."""


@contextlib.contextmanager
def connected(request: Request, folder: Path) -> Iterator[str | None]:
    """A cluster; None, or why there is none."""
    import ray

    address = address_of(request)
    # A search needs the dashboard's state API: by it Ray takes back the workers of a stopped trial.
    options: dict[str, Any] = {
        "ignore_reinit_error": True,
        "include_dashboard": request.mode == "tune",
    }
    if request.mode == "cluster":
        address = address or "auto"
    elif request.trainConfig is not None:
        options["runtime_env"] = _files(request, folder, is_here=address is None)
    if address is not None:
        options = {key: each for key, each in options.items() if key != "include_dashboard"}
        options["address"] = address
    else:
        # Here workers may share cores: more of them than cores only wait for each other.
        needed = workers_of(request)[1] * resources_of_worker(request).get("CPU", 0)
        options["num_cpus"] = max(os.cpu_count() or 1, math.ceil(needed))
    failure, where = None, "here" if address == "auto" else f"at {address}"
    try:
        _knock(address)
        ray.init(**options)
    except _NotRay as error:
        failure = f"no Ray cluster answers {where}: {error} ({error.fix})"
    except Exception as error:  # noqa: BLE001 - where no node starts, Ray raises it bare
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        failure = (
            f"no Ray cluster answers {where}: {first} (`ray start --head` starts one; {_TOKEN})"
        )
        if address is None:
            failure = (
                f"Ray cannot start a cluster on this machine: {first} (give a short path with free "
                "space as RAY_TMPDIR, or the address of a running cluster as config.address)"
            )
    try:
        yield failure
    finally:
        ray.shutdown()


class _NotRay(Exception):
    """What listens at an address is not what Ray would talk to."""

    fix = "give HOST:PORT of `ray start --head`, 6379 by default, or ray://HOST:10001"


def _knock(address: str | None) -> None:
    """Ask once who listens at `host:port`: Ray itself tries for minutes, whoever it is.

    Raises:
        OSError: Nothing listens there.
        _NotRay: Something else does.
    """
    place = (address or "").removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit():
        return
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as there:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return  # it waits for a handshake before it says anything
        there.sendall(_PREFACE)
        try:
            heard = there.recv(256)
        except TimeoutError:
            what = f"something listens there, and answers nothing in {_CONNECT_S:g} s"
            raise _NotRay(what) from None
    if heard[3:4] != _SETTINGS[3:4]:
        line = next(iter(heard.decode("ascii", "replace").splitlines()), "")
        said = f'answers "{line[:80]}"' if line.isprintable() and line else "closes the connection"
        raise _NotRay(f"what listens there {said}")
    service = _CLIENT if place != address else _HEAD
    grpc = importlib.import_module("grpc")
    with grpc.insecure_channel(place, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(service)(b"", timeout=_CONNECT_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                what = "Ray's client server" if place != address else "a Ray head"
                raise _NotRay(f"what listens there is a gRPC server, but not {what}") from None


def _files(request: Request, folder: Path, *, is_here: bool) -> dict[str, Any]:
    """So that workers find what lies beside the trainer's file; to another machine it is sent."""
    assert request.trainConfig is not None
    place = (folder / request.trainConfig.trainerPath).resolve().parent
    if not is_here:
        return {"working_dir": str(place), "excludes": [request.config.storagePath]}
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}


def cluster_status() -> ClusterStatus:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    return ClusterStatus(
        numNodes=sum(bool(node["Alive"]) for node in ray.nodes()),
        totalCpu=total.get("CPU", 0.0),
        totalGpu=total.get("GPU", 0.0),
        availableCpu=free.get("CPU", 0.0),
        availableGpu=free.get("GPU", 0.0),
    )


def lacking(request: Request, status: ClusterStatus) -> str | None:
    """What the smallest group of workers needs and the cluster does not have; Ray would wait."""
    if request.mode == "cluster":
        return None
    import ray

    least, asked = workers_of(request)[0], resources_of_worker(request)
    for kind, there in (("CPU", status.totalCpu), ("GPU", status.totalGpu)):
        needed = least * asked.get(kind, 0.0)
        if needed > there:
            return f"{least} workers need {needed:g} {kind}s, the cluster has {there:g}"
    memory = ray.cluster_resources().get("memory")
    if memory is not None and least * WORKER_BYTES > memory:
        return f"{memory_of(least)}, the cluster has {format_bytes(int(memory))}"
    return None


def shares_cores(request: Request) -> str | None:
    """What is said of a cluster that is started here with more cores than this machine has."""
    workers, cores = workers_of(request)[1], os.cpu_count() or 1
    needed = workers * resources_of_worker(request).get("CPU", 0.0)
    if address_of(request) or needed <= cores:
        return None
    return (
        f"{counted(workers, 'worker')} ask for {needed:g} cores and share the {cores} of this "
        "machine: their time is not that of a cluster"
    )


def address_of(request: Request) -> str | None:
    """The cluster that is asked for; None starts one on this machine."""
    return request.config.address or os.environ.get("RAY_ADDRESS")


def workers_of(request: Request) -> tuple[int, int]:
    """Fewest and most."""
    asked = request.config.numWorkers
    if request.trainConfig is None:
        return asked, asked
    scaling = request.trainConfig.scalingConfig
    most = scaling.maxWorkers or asked
    return scaling.minWorkers or most, most


def resources_of_worker(request: Request) -> dict[str, float]:
    """What Ray keeps for one worker."""
    config = request.config
    gpus = config.resourcesPerWorker.gpu
    found = {"CPU": config.resourcesPerWorker.cpu}
    if config.useGpu:
        found["GPU"] = 1.0 if gpus is None else gpus
    return {name: amount for name, amount in found.items() if amount}


def memory_of(workers: int) -> str:
    needed = format_bytes(workers * WORKER_BYTES)
    return f"{counted(workers, 'worker')} need{'s' if workers == 1 else ''} {needed} at least"
