"""Each private name of torch is there and does what it is used for.

Where one fails after an update of torch: `runtime/_torch_private.py` is the one file to change.
"""

import ast
import inspect
import pickle
import weakref
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel, distributed

from paceline.runtime import _torch_private as private


@pytest.fixture
def world() -> Iterator[int]:
    """Two ranks, of which this process plays the first and nobody the other."""
    dist.init_process_group("fake", store=private.fake_store(), rank=0, world_size=2)
    yield 2
    dist.destroy_process_group()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank that really sends."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_name_has_a_test():
    tree = ast.parse(Path(private.__file__).read_text())
    defined = {
        name
        for node in tree.body
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef)
            else [each.id for each in node.targets if isinstance(each, ast.Name)]
            if isinstance(node, ast.Assign)
            else []
        )
        if not name.startswith("_")
    }
    text = Path(__file__).read_text()
    without = {name for name in defined | set(private.__all__) if f"private.{name}" not in text}
    assert not without


@pytest.mark.parametrize(
    ("place", "name"), [(key, name) for key, names in private.OVERRIDDEN.items() for name in names]
)
def test_torch_still_calls_the_methods_that_we_override(place: str, name: str):
    module, _, kind = place.partition(":")
    owner = getattr(import_module(module), kind)
    assert hasattr(owner, name), f"{place} of torch {torch.__version__} has no {name}"
    others = [inspect.getsource(import_module(owner.__module__)), inspect.getsource(schedules)]
    assert sum(text.count(f".{name}(") for text in others), f"nothing calls {name}"


@pytest.mark.parametrize("name", ["AllreduceOptions", "GradBucket", "PrefixStore", "TCPStore"])
def test_types_of_process_groups_are_those_that_torch_distributed_has(name: str):
    assert getattr(private, name) is getattr(dist, name)
    # private.AllreduceOptions, private.GradBucket, private.PrefixStore, private.TCPStore


def test_all_reduce_options_take_a_time_limit():
    assert hasattr(private.AllreduceOptions(), "timeout")


def test_parameters_of_takes_what_stands_in_for_a_parameter():
    linear = nn.Linear(2, 3)
    stand_in = torch.zeros(3, 2)
    private.parameters_of(linear)["weight"] = stand_in
    assert linear.weight is stand_in
    assert private.parameters_of(nn.Linear(2, 3, bias=False)).keys() == {"weight", "bias"}


def test_without_parameters_leaves_the_original_its_own():
    linear = nn.Linear(2, 3)
    copied = private.without_parameters(linear)
    assert not list(copied.parameters())
    assert len(list(linear.parameters())) == 2
    assert copied.in_features == 2


def test_buffers_of_and_unsaved_buffers_know_every_buffer():
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("table", torch.zeros(1), persistent=False)
    assert private.buffers_of(module).keys() == {"kept", "table"}
    assert private.unsaved_buffers(module) == {"table"}


def test_children_of_replaces_a_block():
    blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    private.children_of(blocks)["1"] = nn.Identity()
    assert isinstance(blocks[1], nn.Identity)


def test_storage_key_is_the_same_for_views_alone_also_without_values():
    with private.FakeTensorMode():
        one, other = torch.empty(4), torch.empty(4)
        assert isinstance(one, private.FakeTensor)
        keys = [private.storage_key(each.untyped_storage()) for each in (one, one[1:], other)]
    assert keys[0] == keys[1] != keys[2]


def test_is_used_elsewhere_counts_tensors_of_a_storage():
    tensor = torch.empty(3)
    storage = tensor.untyped_storage()
    assert private.is_used_elsewhere(storage)
    del tensor
    assert not private.is_used_elsewhere(storage)


def test_version_of_grows_with_every_change():
    tensor = torch.zeros(3)
    before = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) > before


def test_detached_in_mode_shares_the_version_with_the_tensor():
    kept = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                kept.append(private.detached_in_mode(out))
            return out

    with Mode():
        made = torch.ones(2) * 3
        before = private.version_of(kept[0])
        made.add_(1)
    assert private.version_of(kept[0]) > before


def test_trunc_normal_is_what_torchs_own_calls(monkeypatch: pytest.MonkeyPatch):
    called: list[tuple[Any, ...]] = []

    def trunc_normal(tensor: Any, *args: Any, **_: Any) -> Any:
        called.append(args)
        return private.TRUNC_NORMAL(tensor, *args)

    monkeypatch.setattr(nn.init, private.TRUNC_NORMAL_NAME, trunc_normal)
    drawn = nn.init.trunc_normal_(torch.empty(1000), mean=0.0, std=1.0, a=-1.0, b=1.0)
    assert called == [(0.0, 1.0, -1.0, 1.0)]
    assert drawn.abs().max() <= 1


def test_item_gives_a_tensors_number():
    assert private.ITEM(torch.tensor([2.5])) == 2.5


def test_written_arguments_and_returns_alias_read_an_operators_schema():
    tensor, aten = torch.zeros(3), torch.ops.aten
    assert private.written_arguments(aten.add_.Tensor, (tensor, 1), {}) == [tensor]
    assert private.written_arguments(aten.add.Tensor, (tensor, 1), {}) == []
    assert private.returns_alias(aten.detach.default)
    assert not private.returns_alias(aten.add.Tensor)


def test_forget_tensors_leaves_no_weak_reference():
    mode = private.FakeTensorMode()
    fake = mode.from_tensor(torch.empty(3))
    assert weakref.getweakrefcount(fake)
    private.forget_tensors(mode)
    assert not weakref.getweakrefcount(fake)


def test_is_view_knows_views_and_not_what_unsafe_view_gives():
    tensor = torch.zeros(4, requires_grad=True) * 1
    assert private.is_view(tensor.view(2, 2))
    assert not private.is_view(private.UNSAFE_VIEW(tensor, (2, 2)))


def test_local_tensor_is_the_part_itself(world: int):
    mesh = init_device_mesh("cpu", (world,))
    part = torch.zeros(2)
    whole = nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)]))
    assert type(private.local_tensor(whole)) is torch.Tensor
    assert private.local_tensor(whole) is private.local_tensor(whole)
    assert private.local_tensor(whole).data_ptr() == part.data_ptr()


def test_scale_each_and_norm_of_each_are_torchs_own():
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([1.0])]
    private.scale_each(tensors, 2.0)
    assert [norm.item() for norm in private.norm_of_each(tensors)] == [10.0, 2.0]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="on a CPU, only since then")
def test_scaled_mm_multiplies_scales_by_row():
    left, right = (torch.eye(16).to(torch.float8_e4m3fn) for _ in range(2))
    rows = torch.arange(1.0, 17).view(-1, 1)
    out = private.SCALED_MM(
        left, right.T, scale_a=rows, scale_b=torch.ones(1, 16), out_dtype=torch.bfloat16
    )
    assert torch.equal(out.diag(), rows.view(-1).bfloat16())


def test_written_in_place_are_the_arguments_that_change():
    lists = [[torch.ones(2)] for _ in range(5)]
    update = torch.ops.aten._fused_adamw_.default
    assert private.written_in_place(update, lists) == [lists[0], lists[2], lists[3], lists[4]]
    assert private.written_in_place(torch.ops.aten.add.Tensor, lists[:2]) == []


def test_grouped_mm_is_what_the_public_function_runs():
    class Seen(private.TorchDispatchMode):
        packets: list[Any] = []  # noqa: RUF012 - one test's

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.packets.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Seen() as seen, private.FakeTensorMode():
        tokens, weights = (torch.empty(s, dtype=torch.bfloat16) for s in ((4, 16), (2, 16, 16)))
        nn.functional.grouped_mm(tokens, weights, offs=torch.empty(2, dtype=torch.int32))
    assert private.GROUPED_MM in seen.packets


ATTENTION = {
    "FLASH_CPU": ("dropout_p", "is_causal", "attn_mask", "scale"),
    "FLASH": ("dropout_p", "is_causal", "return_debug_mask", "scale"),
    "EFFICIENT": ("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"),
}
BACKWARD = {
    "FLASH_CPU_BACKWARD": ("out", "logsumexp", "dropout_p", "is_causal", "attn_mask", "scale"),
    "FLASH_BACKWARD": (
        *("out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "philox_seed", "philox_offset", "scale"),
    ),
    "EFFICIENT_BACKWARD": (
        *("attn_bias", "out", "logsumexp", "philox_seed", "philox_offset"),
        *("dropout_p", "grad_input_mask", "is_causal", "scale"),
    ),
}


@pytest.mark.parametrize("name", [*ATTENTION, *BACKWARD])
def test_attention_kernels_take_the_arguments_that_we_give(name: str):
    # private.FLASH_CPU, private.FLASH, private.EFFICIENT and, of each, the backward:
    # private.FLASH_CPU_BACKWARD, private.FLASH_BACKWARD, private.EFFICIENT_BACKWARD
    arguments = [each.name for each in getattr(private, name).default._schema.arguments]
    given = [
        each for each in arguments if each not in ("grad_out", "grad_out_", "query", "key", "value")
    ]
    expected = ATTENTION.get(name) or BACKWARD[name]
    assert tuple(given)[: len(expected)] == expected


@pytest.mark.parametrize(
    "name",
    ["all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor"],
)
def test_functional_collectives_send_what_they_are_given(alone: None, name: str):
    group = dist.group.WORLD
    assert group is not None
    given = {
        "all_gather_into_tensor": (1, group.group_name),
        "all_reduce": ("sum", group.group_name),
        "all_to_all_single": ([2], [2], group.group_name),
        "reduce_scatter_tensor": ("sum", 1, group.group_name),
    }[name]
    sent = torch.tensor([1.0, 2.0])
    got = private.FUNCTIONAL.wait_tensor(getattr(private.FUNCTIONAL, name)(sent, *given))
    assert torch.equal(got, sent)


def test_process_group_of_finds_objects_and_names(world: int):
    class Seen(private.TorchDispatchMode):
        groups: list[Any] = []  # noqa: RUF012 - one test's

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if "all" in func.name():
                self.groups.append(private.process_group_of(args))
            return func(*args, **(kwargs or {}))

    group = dist.new_group([0, 1])
    with Seen() as seen:
        dist.all_reduce(torch.zeros(1), group=group)
        sent = private.FUNCTIONAL.all_reduce(torch.zeros(1), "sum", group.group_name)
        private.FUNCTIONAL.wait_tensor(sent)
    assert [dist.get_process_group_ranks(each) for each in seen.groups] == [[0, 1]] * 2
    with pytest.raises(IndexError):
        private.process_group_of((torch.zeros(1),))


def test_backward_node_is_there_in_a_backward_pass_alone_and_has_its_number():
    seen: list[Any] = []
    start = private.sequence_number()
    leaf = torch.zeros(1, requires_grad=True)
    result = leaf * 2
    assert private.sequence_number() == start + 1
    assert private.backward_node() is None
    result.register_hook(lambda _: seen.append(private.backward_node()))
    (result + 0).sum().backward()
    assert private.backward_node() is None
    assert seen
    assert start <= private.sequence_number(result.grad_fn) <= private.sequence_number()


def test_all_groups_are_there_with_backends_that_take_a_time_limit(alone: None):
    dist.new_group([0])
    groups = private.all_groups()
    assert [each.size() for each in groups] == [1, 1]
    ((backend, devices),) = private.backends_of(groups[0]).items()
    assert isinstance(backend, private.Backend)
    assert {each.type for each in devices} == {"cpu", "cuda"}
    private.set_time_limit(backend, timedelta(seconds=7))
    assert backend.options._timeout == timedelta(seconds=7)


def test_number_ranks_lets_a_default_group_be_split_that_is_not_the_first(alone: None):
    """Without it the split ends the process: torch 2.13 gives a default group's backends no ranks,
    and only the first in a process finds them by itself."""
    group = dist.group.WORLD
    assert group is not None
    private.number_ranks(group)
    (backend,) = private.backends_of(group)
    assert backend.options.global_ranks_in_group == [0]
    half = group.split_group([0], timedelta(seconds=60), backend.options, "half")
    assert half is not None
    assert half.size() == 1


def test_a_backend_says_whether_it_is_well(alone: None):
    # private.Backend.get_error, which gloo does not have
    assert {"SUCCESS", "TIMEOUT", "COMM_ERROR"} <= set(private.ErrorType.__members__)


def test_forget_group_count_names_groups_as_in_a_new_process(tmp_path: Path):
    names = []
    for number in range(2):
        store = dist.FileStore(f"{tmp_path}/{number}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        names.append(dist.group.WORLD.group_name)
        dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 5
        private.forget_group_count()
    assert names[0] == names[1]


def test_storage_info_is_what_a_checkpoints_metadata_has():
    info = private.storage_info("__0_0.distcp", 8, 16)
    assert (info.relative_path, info.offset, info.length) == ("__0_0.distcp", 8, 16)


def test_meshes_are_split_joined_and_flattened_under_one_root(world: int):
    root = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "shards"))
    flat = private.flatten_mesh(root, "all")
    assert flat.size() == 2
    halves = private.unflatten_mesh(flat, (2, 1), ("data", "context"))
    assert (halves["data"].size(), halves["context"].size()) == (2, 1)
    joined = private.join_meshes([root["copies"], root["shards"]])
    assert joined.mesh_dim_names == ("copies", "shards")


def test_forget_groups_empties_what_a_mesh_keeps(world: int):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    assert mesh.get_group() is not None
    private.forget_groups([mesh])
    assert not mesh._get_root_mesh()._pg_registry


def test_local_shape_and_offset_counts_from_the_whole(world: int):
    mesh = init_device_mesh("cpu", (2,))
    size = torch.Size((5, 3))
    assert private.local_shape_and_offset(size, mesh, [Shard(0)]) == ((3, 3), (0, 0))
    assert private.local_shape_and_offset(size, mesh, [Replicate()]) == ((5, 3), (0, 0))


def test_settle_buckets_and_build_reducer_leave_a_replica_that_trains(alone: None):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    replica = DistributedDataParallel(model, init_sync=False)
    private.settle_buckets(replica)
    seen: list[int] = []

    def reduce(_: object, bucket: private.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parameters, is_sparse = replica._build_params_for_reducer()
    private.build_reducer(replica, parameters, is_sparse, (None, reduce))
    replica(torch.ones(1, 2)).sum().backward()
    assert seen
    assert all(each.grad is not None for each in model.parameters())


def test_ddp_start_and_rebuild_buckets_name_what_is_there(alone: None):
    for name in private.DDP_START:
        assert hasattr(distributed, name), name
    assert hasattr(DistributedDataParallel(nn.Linear(1, 1)).reducer, private.REBUILD_BUCKETS)


def test_fsdp_parameters_are_gathered_once_a_unit_has_run(world: int):
    mesh = init_device_mesh("cpu", (2,))
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    unit = fully_shard(nn.Linear(2, 4), mesh=mesh, mp_policy=narrow)
    assert private.fsdp_compute_type(unit) is torch.bfloat16
    found = private.fsdp_parameters(unit)
    assert len(found) == 2
    assert hasattr(found[0], "reset_sharded_param")
    assert private.gathered_parameter(found[0]) is None
    handle = unit.unshard(async_op=True)
    assert type(handle) is private.unshard_handle()
    assert hasattr(handle, "wait")
    handle.wait()
    assert private.gathered_parameter(found[0]).shape == (4, 2)
    assert private.fsdp_compute_type(fully_shard(nn.Linear(2, 4), mesh=mesh)) is None


def test_names_that_torch_2_11_lacks_are_there_from_the_release_that_is_said():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    owners = {
        "FSDPModule": FSDPModule,
        "FSDPState": FSDPState(),
        "PipelineStage": PipelineStage,
    }
    here = tuple(int(part) for part in torch.__version__.split(".")[:2])
    for name, since in private.SINCE.items():
        owner, _, attribute = name.partition(".")
        release = tuple(int(part) for part in since.split("."))
        assert hasattr(owners[owner], attribute) == (here >= release), name


class UnitOf211(nn.Module):
    """As much of torch 2.11's FSDPModule as is used: one group of parameters, or none."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.state = SimpleNamespace(_fsdp_param_group=group)

    def _get_fsdp_state(self) -> Any:
        return self.state


def test_parameters_of_a_unit_are_found_by_the_name_of_torch_2_11():
    unit: Any = UnitOf211(SimpleNamespace(fsdp_params=["weight", "bias"]))
    assert private.fsdp_parameters(unit) == ["weight", "bias"]
    nothing: Any = UnitOf211(None)
    assert private.fsdp_parameters(nothing) == []


@pytest.mark.parametrize("reduces", [True, False])
def test_zeros_are_reduced_where_torch_has_no_setting_for_that(reduces: bool):
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    used.grad = torch.ones(2)
    params = [
        SimpleNamespace(_unsharded_param=each, unsharded_accumulated_grad=None)
        for each in (used, unused)
    ]
    seen: list[Any] = []
    group = SimpleNamespace(
        fsdp_params=[*params, SimpleNamespace(unsharded_accumulated_grad=None)],
        reduce_grads=reduces,
        post_backward=lambda: seen.append((used.grad, unused.grad)),
    )
    outer: Any = nn.Sequential(UnitOf211(group), UnitOf211(None))
    private.reduce_unused(outer)
    group.post_backward()
    ((of_used, of_unused),) = seen
    assert of_used.tolist() == [1.0, 1.0]
    assert (of_unused.tolist() if reduces else of_unused) == ([0.0, 0.0] if reduces else None)


def test_schedules_keep_losses_and_post_by_the_names_that_a_proof_patches(alone: None):
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    trains = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    assert isinstance(trains, private.schedule_base())
    assert private.schedule_has_loss(trains)
    assert not private.schedule_has_loss(ScheduleGPipe(stage, 2))
    assert hasattr(private.schedule_base(), private.COMPUTE_LOSS)
    trains.step(torch.ones(2, 2), target=torch.zeros(2, 2))
    assert isinstance(private.schedule_losses(trains), list)
    assert callable(getattr(schedules, private.BATCH_P2P))


def test_leave_modes_hides_what_runs_in_it():
    class Seen(private.TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        torch.zeros(1).add(1)
        before = seen.count
        with private.leave_modes():
            torch.zeros(1).add(1)
    assert before == seen.count > 0


def test_dtensor_propagates_and_asks_by_the_names_that_a_proof_patches():
    assert hasattr(private.sharding_propagator(), private.PROPAGATE)
    assert any(hasattr(each, private.IS_TRACING) for each in private.tracing_modules())


def test_tree_leaves_looks_into_containers():
    assert private.tree_leaves({"a": [1, (2,)]}) == [1, 2]


def test_tree_map_only_changes_one_type_in_containers():
    assert private.tree_map_only(int, str, {"a": [1, (2.0,)]}) == {"a": ["1", (2.0,)]}


def test_load_compiler_and_on_compiling_reach_torch_compile(monkeypatch: pytest.MonkeyPatch):
    private.load_compiler()
    from torch._dynamo.callback import callback_handler as handler

    monkeypatch.setattr(handler, "start_callbacks", [])
    monkeypatch.setattr(handler, "end_callbacks", [])
    seen: list[str] = []
    private.on_compiling(lambda: seen.append("begin"), lambda: seen.append("end"))
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
    assert seen[0] == "begin"
    assert seen[-1] == "end"


def test_has_triton_answers_without_a_gpu():
    assert private.has_triton() is (torch.cuda.is_available() and private.has_triton())


def test_the_flight_recorder_has_each_collective_with_its_number_in_its_group(alone: None):
    group = dist.new_group([0])
    before = len(private.recorded_collectives())
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=group)
    new = private.recorded_collectives()[before:]
    while not all(entry["retired"] for entry in new):  # a thread of gloo's says so, later
        new = private.recorded_collectives()[before:]
    assert [entry["collective_seq_id"] for entry in new] == [1, 2, 3]
    assert {entry["process_group"][0] for entry in new} <= set(private.ranks_by_group())
    assert all(entry["time_created_ns"] > 0 and not entry["is_p2p"] for entry in new)


def test_every_group_has_its_ranks(alone: None):
    dist.new_group([0])
    assert list(private.ranks_by_group().values()) == [[0], [0]]


def test_a_checkpoints_table_of_contents_holds_no_other_class(alone, tmp_path):
    checkpoint.save({"w": torch.ones(3), "n": 7}, checkpoint_id=tmp_path / "saved")
    known = private.table_classes()

    class Known(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.append(f"{module}.{name}")
            return super().find_class(module, name)

    seen: list[str] = []
    with (tmp_path / "saved" / ".metadata").open("rb") as file:
        Known(file).load()
    ours = [each for each in seen if each.startswith("torch.") and each != "torch.float32"]
    assert ours
    assert set(ours) <= known.keys()
