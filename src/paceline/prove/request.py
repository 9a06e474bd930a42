"""From a plan to the request that proves it. Imports no torch."""

from collections.abc import Iterator

from paceline.estimate.inputs import Traffic
from paceline.job import Job, TrainSpec
from paceline.parallel import Layout
from paceline.plan import Plan
from paceline.plan.case import case_of_plan
from paceline.profile import resolve_config
from paceline.profile.adapter import adaptation_of
from paceline.prove.proof import HostRates, ModelRequest, Request


def request_of(
    job: Job,
    plan: Plan,
    *,
    layout: Layout | None = None,
    whole: bool = False,
    wants_trace: bool = False,
) -> Request:
    """What a helper process needs to prove a plan's layout, or another one of the same job.

    Args:
        job: As read.
        plan: Of the job.
        layout: The plan's when left out.
        whole: Trace every block.
        wants_trace: Return the simulated step's events as well.
    """
    case = case_of_plan(plan)
    layout = layout or plan.layout
    return Request(
        model=_model(job, plan),
        layout=layout,
        seq_len=job.spec.data.seq_len,
        precision=plan.precision,
        optimizer=job.spec.train.optimizer,
        loss_chunk=plan.loss_chunk,
        router_loss=plan.router_loss,
        compression=job.spec.train.gradient_compression,
        powersgd_rank=job.spec.train.powersgd_rank,
        ranks_per_node=plan.cluster.ranks_per_node,
        is_cuda=plan.cluster.backend != "gloo",
        rates=case.rates,
        host=host_rates(layout, case.traffic),
        whole=whole,
        left_out=tuple(_left_out(job.spec.train)),
        wants_trace=wants_trace,
    )


def host_rates(layout: Layout, traffic: Traffic) -> HostRates | None:
    """What an offloading layout moves its state with, by the planner's rates."""
    if layout.offload == "none":
        return None
    disk = float(traffic.disk_bytes_per_s)
    memory, link = float(traffic.host_memory_bytes_per_s), float(traffic.host_bytes_per_s)
    if layout.offload == "nvme":
        return HostRates(link_bytes_per_s=disk, state_bytes_per_s=disk)
    return HostRates(link_bytes_per_s=link, state_bytes_per_s=memory)


def _left_out(train: TrainSpec) -> Iterator[str]:
    """How the runtime carries a layout out beyond the layout itself: not traced."""
    if train.compile:
        yield "compilation (train.compile)"
    if train.bucket != "auto":
        yield "the size of DDP's buckets (train.bucket)"
    if train.static_graph:
        yield "DDP's static graph (train.static_graph)"


def _model(job: Job, plan: Plan) -> ModelRequest:
    spec, adapter = job.spec.train.adapter, plan.profile.adapter
    adapters = None
    if spec is not None and adapter is not None:
        seed = job.spec.train.seed
        adapters = adaptation_of(adapter, spec, precision=plan.precision, seed=seed)
    if plan.decoder is not None:
        return ModelRequest(decoder=plan.decoder, adapters=adapters)
    if job.spec.model.factory is not None:
        return ModelRequest(factory=job.spec.model.factory, folder=str(job.folder))
    asked = resolve_config(job)
    assert asked is not None, "a model without a decoder's shape or a factory has a config"
    return ModelRequest(config=dict(asked.config), adapters=adapters)
