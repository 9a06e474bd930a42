import ast

from tests.render.plans import rendered
from tests.render.test_megatron import FULL, THREE_WAYS, llama, what


def calls(files) -> dict[str, dict[str, object]]:
    """Class -> its keywords and their values, of the recipe."""
    found: dict[str, dict[str, object]] = {}
    for node in ast.walk(ast.parse(files["recipe.py"])):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            values: dict[str, object] = {}
            for word in node.keywords:
                try:
                    values[word.arg or ""] = ast.literal_eval(word.value)
                except ValueError:
                    values[word.arg or ""] = ast.unparse(word.value)
            found[node.func.id] = values
    return found


def test_three_ways_to_split_and_the_distributed_optimizer(check_golden):
    found = rendered("megatron-bridge", **llama(layout=THREE_WAYS))
    assert what(found) == set()
    check_golden("megatron-bridge/three-ways", found)


def test_full_sharding_is_megatrons_fsdp(check_golden):
    found = rendered("megatron-bridge", **llama(layout=FULL, engine="paceline"))
    assert what(found) == set()
    said = calls(found.files)
    assert said["DistributedDataParallelConfig"]["use_megatron_fsdp"] is True
    assert said["DistributedInitConfig"]["use_megatron_fsdp"] is True
    assert said["CheckpointConfig"]["ckpt_format"] == "fsdp_dtensor"
    check_golden("megatron-bridge/fsdp", found)


def test_both_megatrons_are_given_the_same_numbers():
    changes = llama(layout=THREE_WAYS)
    said = calls(rendered("megatron-bridge", **changes).files)
    lines = rendered("megatron", **changes).files["arguments.txt"].splitlines()
    flags = dict(line.split(" ", 1) for line in lines if line.startswith("--") and " " in line)
    model, train = said["GPTModelProvider"], said["TrainingConfig"]
    assert str(model["num_layers"]) == flags["--num-layers"]
    assert str(model["tensor_model_parallel_size"]) == flags["--tensor-model-parallel-size"]
    assert (
        str(model["virtual_pipeline_model_parallel_size"])
        == flags["--num-virtual-stages-per-pipeline-rank"]
    )
    assert str(train["global_batch_size"]) == flags["--global-batch-size"]
    least = float(str(said["OptimizerConfig"]["min_lr"]))
    assert least == float(flags["--min-lr"]) == 3e-5
    assert said["SchedulerConfig"]["lr_warmup_iters"] == int(flags["--lr-warmup-iters"])
    # There is one word for the end of a document besides the plan's.
    assert model["vocab_size"] == int(flags["--vocab-size"]) + 1


def test_only_the_newest_checkpoints_are_kept():
    changes = llama(layout=THREE_WAYS, checkpoint={"keep_last": 5})
    said = calls(rendered("megatron-bridge", **changes).files)
    assert said["CheckpointConfig"]["most_recent_k"] == 5
