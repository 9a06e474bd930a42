"""Section `cluster` of the job file: where to train."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import ArgsKwargs

from paceline.choices import NetworkKind
from paceline.job.section import Auto, Bytes, NetworkRate, Positive, kind_of_network, section


@section
class ClusterSpec:
    """Where to train. Left out, it is this machine."""

    accelerator: str | Auto = "auto"
    """An accelerator from the catalog, such as `H100-SXM`; a slice of one (MIG), such as
    `H100-SXM 1g.10gb`; or `cpu`. `auto` is what this machine has."""

    nodes: Positive = 1
    """Machines. On this machine, each is simulated by an agent of its own."""

    per_node: Positive | Auto = "auto"
    """Ranks on each node: one for an accelerator. `auto` is every accelerator found, or one rank
    for every physical core up to 2 on a CPU."""

    memory: Bytes | Auto = "auto"
    """Memory of one accelerator (of one node, on CPU). `auto` is the catalog's or the machine's."""

    host_memory: Bytes | Auto = "auto"
    """Memory of one node's host, for what is offloaded there. `auto` is this machine's, or assumed:
    256 GiB for each accelerator, as in a DGX H100."""

    network: NetworkRate | Auto = "auto"
    """Bandwidth between nodes, for each node and direction: `8x400Gb/s InfiniBand`, `100GbE`; the
    word is `network_kind`. `auto` is the catalog's usual network for the accelerator."""

    network_kind: Literal["auto", NetworkKind] = "auto"
    """Only with `network`: what it is. `tcp` is Ethernet without RDMA; `rdma` any network with it;
    `auto` the accelerator's usual kind where the rate is one of its ports'."""

    rdma: bool | Auto = "auto"
    """Whether nodes talk by RDMA. `auto` is as usual for the accelerator's network. On Macs `true`
    is JACCL over Thunderbolt 5 (macOS 26.2); on GPUs `false` is TCP."""

    mlx_backend: Literal["auto", "ring", "mpi"] = "auto"
    """Only with MLX: what its ranks talk through. `ring` is TCP sockets, `mpi` Open MPI, which is
    installed on every machine and reaches the others by ssh; both are without RDMA. `auto` is JACCL
    where there is RDMA (`rdma`), else `ring`."""

    topology: str | None = None
    """A file with what `nvidia-smi topo -m` prints on a node, or a recording of `paceline preflight
    --record`, relative to the job file: the links inside a node are then as it shows them. Left
    out, this machine is asked, and another cluster's are the catalog's."""

    catalog: str | None = None
    """A catalog file of your own, relative to the job file: hardware, links and prices that the
    built-in one lacks or has otherwise. Left out, `paceline-catalog.toml` beside the job file is
    read if it is there."""

    rendezvous_port: Annotated[int, Field(gt=0, lt=65536)] | Auto = "auto"
    """TCP port where the ranks meet. `auto` takes a free one."""

    @model_validator(mode="before")
    @staticmethod
    def _take_kind(values: Any) -> Any:
        """The word beside the rate is the kind."""
        given = values.kwargs if isinstance(values, ArgsKwargs) else values
        if not isinstance(given, Mapping):
            return values
        text, asked = given.get("network", "auto"), given.get("network_kind", "auto")
        kind = kind_of_network(text) if isinstance(text, str) else None
        if asked != "auto" and text == "auto":
            raise ValueError(
                f"network_kind goes with a rate: set cluster.network to 400Gb/s {asked}, or what "
                "it is"
            )
        if kind is None:
            return values
        if asked not in ("auto", kind):
            raise ValueError(f"network is {text!r}, and network_kind {asked!r}")
        return {**given, "network_kind": kind}
