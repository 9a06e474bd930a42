import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.ranks import run_ranks
from tests.runtime.tiny import SEQ_LEN, SHAPE, build, layout_of, train_steps
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paceline.errors import CheckpointError
from paceline.job import CheckpointSpec
from paceline.parallel.layout import Layout
from paceline.profile.hf_names import hf_config_of
from paceline.record.checkpoints import verify_checkpoint
from paceline.record.conversion import Conversion
from paceline.runtime.checkpoint import Checkpointer, export
from paceline.runtime.checkpoint.state_files import StateFiles, digest_of, write_state
from paceline.runtime.decoder import Decoder
from paceline.runtime.digest import state_digest
from paceline.runtime.state import FROZEN_STATE

pytestmark = pytest.mark.ranks

LAYOUTS = {
    "ddp": layout_of(2, "none"),
    "zero1": layout_of(2, "zero1"),
    "fsdp2": layout_of(2, "full"),
    "hsdp": Layout(data=4, sharding="hybrid", shard=2, micro_batch=2, accumulation=1),
    "tensor": Layout(data=1, sharding="none", tensor=2, micro_batch=8, accumulation=1),
}


def save(rank, world, folder, name):
    layout = LAYOUTS[name]
    model, optimizer = build(layout)
    if name != "tensor":
        train_steps(model, optimizer, layout, rank, range(2))
    Checkpointer(folder, CheckpointSpec()).save(2, model, optimizer, layout=layout.name)
    return state_digest(model, optimizer)


def restore(rank, world, folders, name):
    digests = []
    for folder in folders:
        model, optimizer = build(LAYOUTS[name], seed=9)
        Checkpointer(folder, CheckpointSpec()).restore_newest(model, optimizer)
        digests.append(state_digest(model, optimizer))
    return digests


def read_digest(path):
    files = StateFiles(path)
    return digest_of({name: lambda name=name: files.value(name) for name in files.names})


def asked(source, out, form, **more):
    return Conversion(
        source=str(source), out=str(out), source_form="paceline", form=form, step=2, **more
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each layout, and the digest that its ranks had."""
    root = tmp_path_factory.mktemp("saved")
    found = {}
    for name, layout in LAYOUTS.items():
        digests = run_ranks(save, layout.num_ranks, root / name, name)
        assert digests == [digests[0]] * layout.num_ranks
        found[name] = root / name / "step-00000002", digests[0]
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_digest_read_from_files_is_the_one_the_ranks_had(saved, name):
    path, digest = saved[name]
    assert read_digest(path) == digest


@pytest.mark.parametrize(
    "name",
    [
        # `test_checkpoint.py` restores into these two.
        *(pytest.param(each, marks=pytest.mark.repeat) for each in ("ddp", "fsdp2")),
        "hsdp",
    ],
)
def test_every_layouts_checkpoint_is_the_same_state_under_every_other(saved, name):
    folders = [saved[each][0].parent for each in ("ddp", "zero1", "fsdp2", "hsdp")]
    expected = [saved[each][1] for each in ("ddp", "zero1", "fsdp2", "hsdp")]
    for digests in run_ranks(restore, LAYOUTS[name].num_ranks, folders, name):
        assert digests == expected


def test_a_checkpoint_for_another_number_of_ranks_is_the_same_state(saved, tmp_path):
    path, digest = saved["fsdp2"]
    done = export.convert(asked(path, tmp_path, "paceline", ranks=3))
    assert done.before == done.after == digest
    again = tmp_path / "step-00000002"
    assert verify_checkpoint(again) is None
    assert len(list(again.glob("*.distcp"))) == 3
    for digests in run_ranks(restore, 2, [tmp_path], "ddp"):
        assert digests == [digest]


def test_a_file_of_torch_holds_model_and_optimizer(saved, tmp_path):
    path, digest = saved["ddp"]
    done = export.convert(asked(path, tmp_path / "all.pt", "torch"))
    assert done.before == done.after == digest
    held = torch.load(tmp_path / "all.pt")
    assert held["step"] == 2
    assert held["optimizer"]["state"]["norm.weight"].keys() >= {"exp_avg", "exp_avg_sq"}
    torch.manual_seed(1)
    Decoder(SHAPE, SEQ_LEN).load_state_dict(held["model"], strict=False)


@pytest.mark.parametrize("limit", [10**9, 20_000])
def test_hugging_face_computes_the_same_from_what_was_exported(saved, tmp_path, limit):
    transformers = pytest.importorskip("transformers")
    path, _ = saved["fsdp2"]
    config = hf_config_of(SHAPE, SEQ_LEN)
    done = export.convert(
        asked(path, tmp_path / "hf", "safetensors", config=config, max_shard_bytes=limit)
    )
    assert done.before == done.after
    files = sorted(Path(file).name for file in done.files)
    assert ("model.safetensors" in files) == (limit == 10**9)
    if limit < 10**9:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) <= set(files)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ours = Decoder(SHAPE, SEQ_LEN)
    state = StateFiles(path)
    held = {n.removeprefix("model/"): state.value(n) for n in state.names if n[0] == "m"}
    ours.load_state_dict(held, strict=False)
    tokens = torch.randint(0, SHAPE.vocab, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, ours.eval()(tokens), atol=2e-5)


def test_weights_from_hugging_face_begin_a_run_and_go_back_the_same(saved, tmp_path):
    pytest.importorskip("safetensors")
    path, _ = saved["fsdp2"]
    config = hf_config_of(SHAPE, SEQ_LEN)
    out = asked(path, tmp_path / "hf", "safetensors", config=config)
    weights = export.convert(out).before
    into = replace(
        out, source=out.out, out=str(tmp_path / "start"), source_form="safetensors", form="paceline"
    )
    done = export.convert(replace(into, step=0))
    assert done.before == done.after
    assert "built-in decoder" in done.notes[0]
    ((digest,), _) = run_ranks(restore, 2, [tmp_path / "start"], "ddp")
    back = replace(
        out, source=str(tmp_path / "start/step-00000000"), out=str(tmp_path / "back"), step=0
    )
    assert export.convert(back).after == weights
    assert digest == read_digest(tmp_path / "start/step-00000000")


def load_file(path):
    return pytest.importorskip("safetensors.torch").load_file(path)


def test_pickled_weights_become_safetensors_and_nothing_in_them_is_run(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    shared = torch.randn(4, 6)
    state = {"transformer.wte.weight": shared, "lm_head.weight": shared}
    torch.save(state, folder / "pytorch_model.bin")
    want = replace(asked(folder, tmp_path / "new", "safetensors"), source_form="torch")
    done = export.convert(want)
    assert done.before == done.after
    found = load_file(tmp_path / "new/model.safetensors")
    assert all(torch.equal(found[name], shared) for name in state)
    for content in (print, "text", [1]):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"C015.*builtins\.print|C012.*has no weights"):
            export.convert(replace(want, out=str(tmp_path / "other")))


def test_experts_are_written_apart_and_read_by_transformers_again(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tests.runtime.equality import CONFIGS

    from paceline.runtime.huggingface import build_hf

    torch.manual_seed(3)
    model = build_hf(CONFIGS["mixtral"])
    (tmp_path / "old").mkdir()
    torch.save(model.state_dict(), tmp_path / "old/pytorch_model.bin")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    done = export.convert(
        replace(
            asked(tmp_path / "old", tmp_path / "new", "safetensors"),
            source_form="torch",
            config=CONFIGS["mixtral"],
            beside=(str(tokenizer),),
        )
    )
    assert done.before == done.after
    assert str(tmp_path / "new/tokenizer.json") in done.files
    names = load_file(tmp_path / "new/model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model.eval()(tokens))


def test_weights_of_another_size_than_config_json_says_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "old")
    told = json.loads((tmp_path / "old/config.json").read_text())
    want = replace(
        asked(tmp_path / "old", tmp_path / "new", "safetensors"), source_form="safetensors"
    )
    with pytest.raises(CheckpointError, match=r"M013.*lm_head.weight \(64 x 16, not 64 x 32\)"):
        export.convert(replace(want, config=told | {"hidden_size": 32, "head_dim": 16}))
    assert not (tmp_path / "new").exists()
    assert export.convert(replace(want, config=told)).notes
    unknown = export.convert(replace(want, config=told | {"architectures": ["Unknown"]}))
    assert any("not checked: names and shapes" in note for note in unknown.notes)


def test_a_run_of_adapters_is_named_where_deepspeed_needs_a_whole_model(tmp_path):
    values = {"model/a.lora_A": partial(torch.ones, 2, 3), FROZEN_STATE: "digest".upper}
    source = write_state(tmp_path, values, 2)
    with pytest.raises(CheckpointError, match=r"C012.*run of adapters(.|\n)*safetensors --merge"):
        export.convert(asked(source, tmp_path / "zero", "deepspeed"))
    assert export.convert(asked(source, tmp_path / "kept", "dcp")).tensors == 2


def copy_and_lose(rank, world, folder, store):
    layout = layout_of(world, "full")
    model, optimizer = build(layout)
    policy = CheckpointSpec(copy_to=store, copy_keep=2, compress="always")
    keeper = Checkpointer(folder / "run" / "checkpoints", policy)
    told = []
    for step in (1, 2, 3):
        train_steps(model, optimizer, layout, rank, range(step, step + 1))
        keeper.start(step, model, optimizer)
        keeper.wait()
        keeper.wait_for_copies()
        told += [(each.step, type(each).__name__) for each in keeper.take_copies()]
    digest = state_digest(model, optimizer)
    torch.distributed.barrier()
    if rank == 0:
        for shard in keeper.folder.glob("step-*/__*.distcp"):
            shard.write_bytes(shard.read_bytes()[:-1])
    torch.distributed.barrier()
    fresh, optimizer = build(layout, seed=9)
    restored = keeper.restore_newest(fresh, optimizer)
    same = state_digest(fresh, optimizer) == digest
    return told, restored.step, same, [problem.code for _, problem in restored.refused]


def test_a_run_that_lost_its_checkpoints_goes_on_from_a_copy(tmp_path):
    pytest.importorskip("fsspec")
    pytest.importorskip("zstandard")
    store = f"file://{tmp_path}/store"
    first, second = run_ranks(copy_and_lose, 2, tmp_path, store)
    assert first[0] == [(step, "CheckpointCopied") for step in (1, 2, 3)]
    assert second[0] == []
    assert first[1:] == second[1:] == (3, True, ["C004"] * 3)
    copies = sorted(path.name for path in (tmp_path / "store/run").iterdir())
    assert copies == ["step-00000002", "step-00000003"]


def copy_to_nowhere(rank, world, folder):
    model, optimizer = build(layout_of(world, "none"))
    store = folder / "store"
    store.write_text("a file where a folder should be")
    keeper = Checkpointer(folder / "run" / "c", CheckpointSpec(copy_to=f"file://{store}"))
    outcomes = []
    for step in (1, 2):
        keeper.start(step, model, optimizer)
        outcomes.append(keeper.wait().step)
        keeper.wait_for_copies()
        outcomes += [(each.step, type(each).__name__) for each in keeper.take_copies()]
        if step == 1:
            store.unlink()
    return outcomes


def test_a_copy_that_fails_stops_nothing_and_is_tried_again_with_the_next(tmp_path):
    pytest.importorskip("fsspec")
    (outcomes,) = run_ranks(copy_to_nowhere, 1, tmp_path)
    assert outcomes == [
        1,
        (1, "CheckpointCopyFailed"),
        2,
        (1, "CheckpointCopied"),
        (2, "CheckpointCopied"),
    ]


def fsdp2_of_torch(rank, world, folder, back):
    """A model under FSDP2 with torch's own optimizer: its digest, and that of what it loads."""
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(4)
    model = Decoder(SHAPE, SEQ_LEN)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if back is None:
        for _ in range(3):
            sum(each.square().sum() for each in model.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()
    mine, states = get_state_dict(model, optimizer)
    once = {name: mine[name] for name, _ in model.named_parameters()}  # the embedding is tied
    held = {"model": once, "optimizer": states}
    if back is None:
        dcp.save(held, checkpoint_id=folder)
    else:
        planner = DefaultLoadPlanner(allow_partial_load=True)  # its options are the job's own
        dcp.load(held, checkpoint_id=back, planner=planner)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=held["model"],
            optim_state_dict=held["optimizer"],
            options=StateDictOptions(strict=False),
        )
    return state_digest(model, optimizer)


def test_s3_8_a_checkpoint_of_fsdp2_goes_on_here_and_back_with_its_optimizer(tmp_path):
    digest, _ = run_ranks(fsdp2_of_torch, 2, tmp_path / "dcp", None)
    theirs = replace(asked(tmp_path / "dcp", tmp_path / "ours", "paceline"), source_form="dcp")
    done = export.convert(theirs)
    assert done.before == done.after == digest
    assert verify_checkpoint(tmp_path / "ours/step-00000003") is None
    assert run_ranks(restore, 2, [tmp_path / "ours"], "ddp") == [[digest], [digest]]
    export.convert(asked(tmp_path / "ours/step-00000003", tmp_path / "again", "dcp"))
    assert run_ranks(fsdp2_of_torch, 2, None, tmp_path / "again") == [digest, digest]
