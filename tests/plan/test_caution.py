"""What a plan allows and warns of, what full sharding gathers, and how matrices are split."""

import re

import pytest
from tests.plan.scene import JOB, TINY, job_of, plan_of, refused_of

from paceline.catalog.efficiencies import load_efficiencies
from paceline.errors import JobError
from paceline.plan import Plan, plan_job
from paceline.plan.parallelize import parallelize_plan
from paceline.profile import check_positions
from paceline.report.plan_explain import explain_plan
from paceline.report.plan_markdown import plan_markdown
from paceline.report.plan_text import format_plan, plan_summary
from paceline.units import format_seconds

SMALL = JOB.replace("llama-3-8b", "tinyllama-1.1b").replace("per_node: 8", "per_node: 8, nodes: 2")


def cautions(*overrides: str, text: str = SMALL) -> dict[str, tuple[str, str]]:
    plan = plan_of(text, *overrides)
    return {each.about: (each.what, each.fix) for each in plan.cautions}


def test_a_plan_that_decides_for_itself_warns_of_nothing():
    assert cautions() == {}


def test_a_batch_that_keeps_data_parallelism_from_being_possible_is_named_with_the_nearest():
    """Only the layout showed it: context parallel 2, for a batch of 15 on 2 ranks."""
    what, fix = cautions("train.global_batch=15", text=TINY)["data parallel"]
    assert what.startswith("15 samples do not divide over 2 data ranks: DDP over 2 ranks was not")
    assert fix == "set train.global_batch to 14 or 16"


def test_a_plan_without_a_sample_length_says_which_it_assumes():
    without = SMALL.replace(", seq_len: 4096", "")
    assert without != SMALL
    what, fix = cautions(text=without)["sample length"]
    assert what.endswith("those of samples of 256 tokens")
    assert fix.startswith("set data.seq_len to")
    assert cautions("data.seq_len=512", text=without) == {}


@pytest.mark.parametrize(
    ("kind", "risk"),
    [("fp16", "overflows above 65,504 and loses what is below 6e-8"),
     ("powersgd", "are in no checkpoint")],
)  # fmt: skip
def test_s1_12_a_plan_says_what_a_compression_of_gradients_may_do(kind, risk):
    """Of fp16, the only one that turns small gradients into zeros, a plan said nothing."""
    asked = (f"train.gradient_compression={kind}", "layout.sharding=none", "data.seq_len=1024")
    found = cautions(*asked, "model.preset=gpt2", text=JOB)
    assert risk in found["gradients"][0]
    assert "bf16" in found["gradients"][1]


def test_s1_12_bf16_and_no_compression_are_not_warned_of():
    asked = ("layout.sharding=none", "data.seq_len=1024", "model.preset=gpt2")
    for kind in ("bf16", "none"):
        assert "gradients" not in cautions(f"train.gradient_compression={kind}", *asked, text=JOB)


@pytest.mark.parametrize(
    ("preset", "most"), [("gpt2", 1024), ("bert-large", 512), ("opt-1.3b", 2048)]
)
@pytest.mark.parametrize("engine", ["paceline", "accelerate", "megatron", "torchtune"])
def test_samples_longer_than_the_model_has_positions_are_not_planned(preset, most, engine):
    """They were a warning, and Accelerate's files gave a false reason: gpt2 is a model that
    predicts the next token."""
    asked = (f"model.preset={preset}", f"engine={engine}")
    with pytest.raises(JobError) as refused:
        plan_job(job_of(SMALL, *asked))
    (problem,) = refused.value.problems
    assert problem.code == "M014"
    assert problem.what == f"data.seq_len is 4096, and {preset} has {most} positions"
    assert problem.fix.startswith(f"set data.seq_len to {most} or less")
    assert not list(check_positions(job_of(SMALL, *asked, f"data.seq_len={most}")))


def test_nodes_that_the_catalog_does_not_have_are_named_with_what_is_assumed_of_them():
    """16 GH200 were planned with one 400 Gb/s port for 8 of them, without a word."""
    shape = ("cluster.accelerator=GH200", "cluster.per_node=8")
    what, fix = cautions(*shape)["cluster"]
    assert what == (
        "the catalog has no node of 8 GH200, but of 1; it is assumed that all 8 share the 400 Gb/s "
        "network of 1 and that pcie-5-x16 joins them inside the node"
    )
    assert "NICs of a node carry together, such as 8x400Gb/s; set cluster.topology" in fix
    what, fix = cautions(*shape, "cluster.network=8x400Gb/s")["cluster"]
    assert "network" not in what
    assert fix == "set cluster.topology to a file with what nvidia-smi topo -m prints there"
    for usual in (("cluster.per_node=4",), (shape[0], "cluster.per_node=1")):
        assert "cluster" not in cautions(*usual)


PODS = ("engine=megatron", "cluster.accelerator=H100-SXM", "kubernetes.image=registry/train:1")


@pytest.mark.parametrize("network", ["auto", "8x400Gb/s InfiniBand"])
def test_pods_without_an_rdma_device_are_planned_over_tcp(network):
    """The plan was of InfiniBand, and the objects had no device for it."""
    asked = (*PODS, f"cluster.network={network}")
    plan = plan_of(SMALL, *asked)
    assert (plan.cluster.network_link, plan.cluster.network_bytes_per_s) == ("ethernet-100", 12.5e9)
    what, fix = cautions(*asked)["network"]
    assert ("not cluster.network" in what) == (network != "auto")
    assert what.endswith("the rate of their network is not known, 100 Gb/s a node are assumed")
    assert fix.startswith("set kubernetes.rdma_resource to")
    with_device = plan_of(SMALL, *asked, "kubernetes.rdma_resource=rdma/hca")
    assert with_device.cluster.network_link == "infiniband-ndr"
    assert (with_device.estimate.step_s or 0) < (plan.estimate.step_s or 0)


def test_a_declared_network_of_pods_without_rdma_is_theirs():
    asked = (*PODS, "cluster.network=25GbE")
    assert plan_of(SMALL, *asked).cluster.network_bytes_per_s == 25e9 / 8
    assert "network" not in cautions(*asked)


def test_host_memory_that_is_assumed_is_named_where_something_is_offloaded_and_can_be_set():
    offloads = ("cluster.nodes=1", "cluster.per_node=1", "cluster.accelerator=RTX-4090")
    large = JOB.replace("llama-3-8b", "llama-2-7b")
    what, fix = cautions(*offloads, text=large)["host memory"]
    assert what.startswith("a node is assumed to have 256 GiB of host memory: as much for each")
    assert fix == "set cluster.host_memory to what a node has"
    declared = plan_of(large, *offloads, "cluster.host_memory=128GiB")
    assert "host memory" not in {each.about for each in declared.cautions}
    assert "of 128 GiB (declared)" in format_plan(declared)
    problem = refused_of(large, *offloads, "cluster.host_memory=64GiB", "layout.offload=cpu")
    assert "has 64 GiB (declared)" in problem.what
    assert "cluster.host_memory" not in problem.fix
    larger = refused_of(large, *offloads, "model.preset=llama-2-70b", "layout.offload=cpu")
    assert larger.fix.endswith("or set cluster.host_memory, where a node has more")


STAGES = ("layout.pipeline=4", "layout.tensor=2", "layout.data=2", "layout.micro_batch=1")


def _idle(plan: Plan) -> str:
    return f"{plan.estimate.terms['pipeline'] / plan.estimate.step_s:.0%}"


@pytest.mark.parametrize("batch", [8, 10])
def test_s1_7_a_bubble_above_a_fifth_is_the_time_line_s_and_each_fix_is_what_it_says(batch):
    """43 % was warned of where the same plan's time line had 24 %, and the batch that was named was
    another than the one that came below a fifth."""
    given = (*STAGES, "layout.schedule=1f1b")
    plan = plan_of(SMALL, *given, f"train.global_batch={batch}")
    (caution,) = (each for each in plan.cautions if each.about == "bubble")
    number = plan.layout.accumulation
    assert caution.what == (
        f"4 pipeline stages with {number} micro-batches stand still or send for {_idle(plan)} of "
        "the step"
    )
    opened, larger = caution.fix.split("; or ")
    freed = plan_of(SMALL, *STAGES, f"train.global_batch={batch}")
    assert opened.startswith("leave layout.schedule at auto (")
    assert f": {_idle(freed)}, " in opened
    assert freed.estimate.step_s < plan.estimate.step_s
    named = re.match(r"set train.global_batch to (\d+) \(\d+ micro-batches: \d+%\)", larger)
    filled = plan_of(SMALL, *given, f"train.global_batch={named[1]}")
    assert "bubble" not in [each.about for each in filled.cautions]


def test_stages_that_wait_for_messages_are_given_a_faster_network_and_others_are_not():
    given = ("layout.pipeline=4", "layout.tensor=4", "layout.data=1", "cluster.accelerator=A100-80")
    slow = plan_of(JOB, *given, "cluster.nodes=2", "cluster.network=10 Gb/s")
    (caution,) = (each for each in slow.cautions if each.about == "bubble")
    assert caution.fix.startswith("take a faster network (cluster.network): most of it is waiting")
    plan = plan_of(SMALL, *STAGES, "layout.schedule=1f1b", "train.global_batch=8")
    (caution,) = (each for each in plan.cautions if each.about == "bubble")
    assert "network" not in caution.fix


def test_stages_that_the_search_fills_are_not_warned_of():
    assert "bubble" not in cautions(*STAGES, "train.global_batch=16")


def test_s1_6_tensor_ranks_on_several_nodes_are_warned_of_where_the_job_fixes_them():
    text = SMALL.replace("tinyllama-1.1b", "llama-2-7b")
    what, fix = cautions("layout.tensor=16", text=text)["tensor"]
    assert what.startswith("the 16 tensor ranks are on several nodes of 8")
    freed = plan_of(text)
    assert fix == (
        f"leave layout.tensor at auto: {freed.layout_name}, "
        f"{format_seconds(freed.estimate.step_s)} a step"
    )
    assert "tensor" not in cautions("layout.tensor=8", text=text)


def test_model_parallelism_that_data_parallelism_beats_is_named_with_both_times():
    what, fix = cautions("layout.tensor=4")["data parallel"]
    assert what.startswith("layout.tensor 4 is fixed by the job; data parallelism alone (")
    assert fix == "leave layout.tensor at auto"
    # What no data parallelism holds, and what the search chose itself, is not warned of.
    assert "data parallel" not in cautions("model.preset=llama-3-70b", "layout.tensor=8")


def test_what_else_the_job_fixes_is_named_where_data_parallelism_alone_needs_it_open():
    given = ("model.preset=llama-3-8b", "layout.tensor=8", "layout.sharding=none")
    _, fix = cautions(*given)["data parallel"]
    assert fix == "leave layout.sharding and layout.tensor at auto"
    assert cautions(given[0]) == {}
    # A micro-batch that data parallelism can have too stays as it is.
    given = ("model.preset=llama-3-8b", "layout.tensor=8", "layout.micro_batch=1")
    what, fix = cautions(*given)["data parallel"]
    assert "micro-batch 1)" in what
    assert fix == "leave layout.tensor at auto"


def test_s1_4_units_are_those_of_the_engine_and_the_fix_is_one_that_helps():
    asked = ("layout.sharding=full", "layout.tensor=1", "layout.pipeline=1")
    whole = plan_of(JOB, *asked, "engine=accelerate")
    assert [unit.name for unit in whole.units] == ["embedding + output matrix", "decoder block"]
    (caution,) = (each for each in whole.cautions if each.about == "gather")
    assert "fully_shard" in caution.fix
    apart = plan_of(JOB, *asked, "engine=torchtitan")
    names = [unit.name for unit in apart.units]
    assert names == ["final norm + output matrix", "embedding", "decoder block"]
    assert apart.units[1].num_bytes == 2 * 128256 * 4096
    assert not [each for each in apart.cautions if each.about == "gather"]
    # DeepSpeed gathers parameter by parameter: there are no units.
    assert not plan_of(JOB, *asked, "engine=deepspeed").units
    # Another sharding that fits is the fix, and has no warning.
    (caution,) = (each for each in plan_of(JOB, *asked).cautions if each.about == "gather")
    assert caution.fix.startswith("leave layout.sharding at auto: ")
    assert not plan_of(JOB, *asked[1:]).cautions


def test_s1_4_a_fix_of_a_large_unit_is_one_that_the_model_has():
    """Falcon's 71 heads have no half, and a tied output matrix cannot stand apart."""
    asked = ("layout.sharding=full", "engine=accelerate", "cluster.nodes=2")
    for model, has in (("falcon-7b", "more memory"), ("llama-3.2-1b", "layout.tensor to 2")):
        small = ("cluster.accelerator=T4", "train.precision=fp16", f"model.preset={model}")
        plan = plan_of(JOB, *asked, *small, "layout.tensor=1", "layout.micro_batch=1")
        (caution,) = (each for each in plan.cautions if each.about == "gather")
        assert has in caution.fix
        assert "fully_shard" not in caution.fix


def test_s1_4_tensor_ranks_are_no_fix_for_experts_that_they_do_not_split():
    asked = ("model={preset: mixtral-8x7b}", "layout.sharding=full", "layout.pipeline=1")
    plan = plan_of(JOB, *asked, "layout.tensor=1", "engine=accelerate", "cluster.nodes=8")
    (caution,) = (each for each in plan.cautions if each.about == "gather")
    assert "the experts of moe" in caution.what
    assert "layout.tensor" not in caution.fix
    assert "expert ranks split the experts" in caution.fix


def test_s1_4_the_units_of_full_sharding_are_listed_and_a_large_one_is_warned_of():
    plan = plan_of(JOB, "layout.sharding=full", "layout.tensor=1", "layout.pipeline=1")
    root, block = plan.units
    assert (root.count, block.count) == (1, 32)
    assert root.num_bytes == 2 * (2 * 128256 * 4096 + 4096)
    each = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert block.num_bytes == 2 * each
    (caution,) = [each for each in plan.cautions if each.about == "gather"]
    assert (
        "one all-gather, of embedding + output matrix, takes 1.96 GiB (decoder block: 416 MiB)"
        in caution.what
    )
    assert "(decoder block: 416 MiB). The plan fits" in caution.what
    assert not plan_of(JOB, "layout.sharding=zero1").units
    split = plan_of(JOB, "layout.sharding=full", "layout.tensor=2", "layout.pipeline=1")
    assert "gather" not in [each.about for each in split.cautions]


def test_s1_4_quantised_blocks_are_gathered_in_four_bits_and_only_adapters_are_reduced():
    asked = ("layout.sharding=full", "layout.tensor=1", "layout.pipeline=1", "cluster.nodes=2")
    slow = (*asked, "cluster.network=10Gb/s", "layout.recompute=full", "layout.micro_batch=1")
    whole, lora, qlora = (
        plan_of(JOB, *slow, *adapter)
        for adapter in (
            (),
            ("train.adapter={kind: lora, rank: 8}",),
            ("train.adapter={kind: qlora, rank: 8}",),
        )
    )
    sizes = [plan.units[1].num_bytes for plan in (whole, lora, qlora)]
    each = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert sizes[:2] == [2 * (each + 2 * 4096)] * 2
    assert sizes[2] == pytest.approx(36 / 64 * each, rel=1e-3)
    comm = [plan.estimate.terms["data"] for plan in (whole, lora, qlora)]
    assert comm[0] > 1.2 * comm[1] > 2 * comm[2]


def test_s1_4_blocks_of_two_kinds_of_attention_and_one_size_are_one_row_of_units():
    asked = ("layout.sharding=full", "layout.tensor=1", "layout.pipeline=1")
    plan = plan_of(JOB, "model.preset=gemma-2-9b", *asked)
    assert [(unit.name, unit.count) for unit in plan.units][1:] == [("decoder block", 42)]


def test_s3_5_the_gathered_unit_of_an_offloaded_model_is_priced_and_named():
    fixed = ("layout.sharding=full", "layout.offload=cpu", "layout.tensor=1", "layout.pipeline=1")
    plan = plan_of(JOB, *fixed, "engine=accelerate", "train.global_batch=8")
    root, block = plan.units
    assert plan.estimate.memory.parts["gathered"] >= root.num_bytes + block.num_bytes
    (caution,) = [each for each in plan.cautions if each.about == "gather"]
    assert "of embedding + output matrix" in caution.what
    assert caution.fix.startswith("leave layout.sharding at auto: ZeRO-2")


def test_an_efficiency_that_nobody_measured_is_said():
    what, fix = cautions("cluster.accelerator=L4", "cluster.per_node=8")["efficiency"]
    assert what.startswith("no run on L4 in bf16 was measured")
    assert "paceline calibrate" in fix
    assert not plan_of(TINY).cautions
    constants = load_efficiencies()
    assert constants.source_of("H100-SXM", "bf16") == constants.family_of("H100-SXM")


@pytest.mark.parametrize(
    ("accelerator", "whose"),
    [
        ("H100-PCIe", "share of its peak that an H100 reaches"),
        ("GH200", "share of its peak that an H200 reaches"),
        ("TPU-v6e", "share of its peak that is often quoted for a TPU"),
    ],
)
def test_an_efficiency_of_another_card_of_the_family_is_said_too(accelerator: str, whose: str):
    what, _ = cautions(f"cluster.accelerator={accelerator}", "model={preset: gpt2-large}")[
        "efficiency"
    ]
    assert what.startswith(f"no run on {accelerator} in bf16 was measured")
    assert what.endswith(whose)
    assert "efficiency" not in cautions("cluster.accelerator=B300")


def test_a_warning_is_on_the_screen_and_in_markdown():
    plan = plan_of(SMALL, "layout.tensor=4")
    short = plan_summary(plan)
    assert short[5].startswith("run ")
    assert short[6].startswith("warning     data parallel: layout.tensor 4 is fixed")
    assert short[-1].strip() == "fix: leave layout.tensor at auto"
    assert "warning     data parallel: layout.tensor 4 is fixed" in format_plan(plan)
    assert "**Warning (data parallel):**" in plan_markdown(plan)


def test_s1_8_the_explanation_has_the_ranks_of_a_group_along_every_split_axis():
    plan = plan_of(SMALL, "layout.tensor=4")
    text = explain_plan(plan)
    others = plan.layout.num_ranks // 4
    assert f"tensor ranks  {others} groups; the first is 0 1 2 3, on 1 node" in text
    assert "data ranks  4 groups; the first is 0 4 " in text
    assert "pipeline ranks" not in text


def test_s1_6_the_parallelize_plan_names_each_module_in_pytorchs_words():
    plan = plan_of(SMALL, "layout.tensor=4")
    assert plan.parallelize["*.attention.query"] == "colwise"
    assert plan.parallelize["*.ffn.down"] == "rowwise"
    assert plan.parallelize["all else"].startswith("sequence")
    assert "parallelize, over 4 tensor ranks" in explain_plan(plan)
    assert not plan_of(SMALL, "layout.tensor=1").parallelize


def test_a_family_of_transformers_has_its_own_names():
    job = job_of(JOB, "model={hf_config: gpt2}", "layout.tensor=2")
    plan = plan_of(JOB, "model={hf_config: gpt2}", "layout.tensor=2")
    named = parallelize_plan(job, plan.layout, plan.profile)
    assert named["*.attn.c_attn"] == "colwise"
    assert "transformer.ln_f" not in named
    job = job_of(JOB, "model={hf_config: gpt2}", "layout.tensor=2", "engine=nanotron")
    assert not parallelize_plan(job, plan.layout, plan.profile)


@pytest.mark.parametrize(
    ("engine", "column", "row"),
    [
        ("megatron", "decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2"),
        ("torchtitan", "layers.*.feed_forward.w1", "layers.*.feed_forward.w2"),
        ("accelerate", "model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj"),
    ],
)
def test_another_engines_parallelize_plan_is_its_own(engine, column, row):
    sharding = "zero1" if engine == "megatron" else "full"
    layout = ("layout.tensor=4", f"layout.sharding={sharding}")
    plan = plan_of(SMALL, f"engine={engine}", *layout)
    assert (plan.parallelize[column], plan.parallelize[row]) == ("colwise", "rowwise")
    assert plan.parallelize["all else"].startswith("sequence") == (engine != "accelerate")
    assert not any("expert" in name for name in plan.parallelize)
    assert f"  {column} " in explain_plan(plan)


@pytest.mark.parametrize("engine", ["megatron", "torchtitan"])
@pytest.mark.parametrize("expert", [1, 8])
def test_experts_are_split_within_or_among_the_ranks(engine, expert):
    sharding = "zero1" if engine == "megatron" else "full"
    layout = ("layout.tensor=2", f"layout.expert={expert}", f"layout.sharding={sharding}")
    text = SMALL.replace("tinyllama-1.1b", "qwen3-30b-a3b")
    plan = plan_of(text, f"engine={engine}", *layout)
    found = {way for name, way in plan.parallelize.items() if "experts" in name}
    assert found == ({"by expert"} if expert > 1 else {"colwise", "rowwise"})
    assert not any("feed_forward" in name or ".mlp.linear" in name for name in plan.parallelize)


DEEPSEEK = """\
name: moe
model: {preset: deepseek-v3}
data: {path: x, seq_len: 4096}
cluster: {accelerator: H800, nodes: 256, per_node: 8}
train: {global_batch: 15360, steps: 1000, precision: fp8}
layout: {pipeline: 16, expert: 64, tensor: 1, sharding: zero1}
engine: megatron
"""


def test_a_collective_that_takes_much_of_the_step_is_named_with_what_shortens_it():
    plain = plan_of(DEEPSEEK)
    found = {each.about: (each.what, each.fix) for each in plain.cautions}
    what, fix = found["collective"]
    share = plain.estimate.terms["expert"] / plain.estimate.step_s
    assert what == (
        "the exchange of tokens with their experts between nodes takes "
        f"{format_seconds(plain.estimate.terms['expert'])} of a step of "
        f"{format_seconds(plain.estimate.step_s)} ({share:.0%})"
    )
    changes, _, rest = fix.removeprefix("set ").partition(": ")
    asked = plan_of(DEEPSEEK, *(each.replace(" to ", "=") for each in changes.split(" and ")))
    assert changes.startswith("train.token_dispatcher to deepep")
    assert rest.startswith(f"{format_seconds(asked.estimate.step_s)} a step, estimated")
    assert asked.estimate.step_s < plain.estimate.step_s
    assert share > 0.25


def test_a_collective_of_a_degree_that_the_job_fixes_is_the_jobs_to_change():
    """The fix was to take accelerators with more memory, whatever was fixed."""
    asked = ("layout.tensor=8", "data.seq_len=1024", "cluster.accelerator=H100-PCIE")
    what, fix = cautions(*asked, text=JOB)["collective"]
    assert what.startswith("the sum of each block over tensor ranks inside a node")
    assert fix == "leave layout.tensor at auto, which the search weighs"


def test_muons_products_are_part_of_what_its_step_is_made_of():
    explained = " ".join(explain_plan(plan_of(SMALL, "train.optimizer=muon")).split())
    products = "the matrix products that make each hidden gradient orthogonal"
    assert f"at memory bandwidth, and {products}" in explained
    assert products not in " ".join(explain_plan(plan_of(SMALL)).split())


@pytest.mark.parametrize("hidden", [False, True])
def test_an_exchange_that_makes_the_step_longer_is_named_with_both_times(hidden):
    asked = ("train.token_dispatcher=deepep", f"train.async_expert={hidden}")
    with_it = plan_of(FEW_EXPERTS, *asked)
    slower = [each for each in with_it.cautions if ", without" in each.what]
    changes = slower[0].fix.removeprefix("set ").split(" and ")
    without = plan_of(FEW_EXPERTS, *asked, *(each.replace(" to ", "=") for each in changes))
    assert slower[0].what.startswith("with train.token_dispatcher deepep")
    assert slower[0].what.endswith(
        f" a step takes {format_seconds(with_it.estimate.step_s)}, "
        f"without {format_seconds(without.estimate.step_s)}"
    )
    assert not [each for each in without.cautions if ", without" in each.what]


FEW_EXPERTS = """\
name: few
model: {preset: qwen3-30b-a3b}
data: {path: x, seq_len: 2048}
cluster: {accelerator: H100-SXM, nodes: 2, per_node: 4}
train: {global_batch: 64, steps: 1000}
engine: megatron
"""


def test_an_exchange_that_helps_is_not_named():
    what = [each.what for each in plan_of(DEEPSEEK, "train.token_dispatcher=deepep").cautions]
    assert not [each for each in what if ", without" in each]


def test_a_slow_network_is_named_where_gradients_take_most_of_the_step():
    alone = ("layout.sharding=none", "layout.pipeline=1", "layout.tensor=1", "layout.context=1")
    found = cautions("cluster.network=1GbE", *alone)
    what, fix = found["collective"]
    assert what.startswith("the gathering of parameters and reduction of gradients between nodes")
    assert fix.startswith("raise train.global_batch (64)")
    assert fix.endswith("take a faster network (cluster.network)")
    assert "collective" not in cautions(*alone)


def test_a_plan_over_rdma_names_the_pods_that_do_not_have_it():
    both = SMALL + "slurm: {partition: gpu}\nkubernetes: {image: 'registry/x:1'}\n"
    what, fix = cautions(text=both)["network"]
    assert what.startswith("the plan counts on infiniband-ndr, which the pods of the section")
    assert fix.endswith("`paceline run --on kubernetes` plans again, over TCP")
    assert "network" not in cautions("kubernetes.rdma_resource=rdma/hca", text=both)
