"""The section `train` of a job file: how to train."""

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.choices import (
    Attention,
    Compression,
    Fp8Recipe,
    Optimizer,
    Precision,
    TokenDispatcher,
)
from paceline.job.section import Auto, Count, Number, Positive, SmallBytes, Whole, section


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


Beta = Annotated[Number, Field(ge=0, lt=1)]


@section
class AdapterSpec:
    """Fine-tuning of low-rank adapters beside a model that stays as it is. Left out, all of the
    model is trained."""

    kind: Literal["lora", "dora", "qlora"] = "lora"
    """`lora` keeps the frozen model in the type of the products (bf16 on accelerators, float32 in
    fp32). `dora` does, too, and trains the length of each output's row of a matrix besides its
    adapter. `qlora` keeps the matrices of the frozen model's blocks in 4 bits (NF4)."""

    rank: Positive = 16
    """Width between the two matrices of an adapter."""

    alpha: Annotated[Number, Field(gt=0)] | Auto = "auto"
    """What an adapter adds is multiplied by alpha / rank; `auto` is twice the rank."""

    scaling: Literal["classic", "rslora"] = "classic"
    """`rslora` divides alpha by the root of the rank, so that large ranks learn as fast as small
    ones."""

    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that is left out in each step."""

    start: str | None = None
    """Folder of a trained adapter to continue from, as peft saves it. Its kind, rank, alpha and
    targets are those asked for here. Left out, what the adapters add is zero at first."""

    targets: Literal["attention", "all"] | list[str] = "attention"
    """Linears that get an adapter: those of attention, all in the blocks, or names such as
    `[query, value]` or `[q_proj, v_proj]`."""


@section
class ObjectiveSpec:
    """What the model is trained towards."""

    kind: Literal["auto", "next_token", "dpo", "classification"] = "auto"
    """`next_token`: the cross entropy of each token that counts. `dpo`: of `data.kind: preference`,
    how far the model prefers the chosen answer to the rejected one, beyond what it did before the
    run (arXiv:2305.18290). `classification`: of `data.kind: classification`, the cross entropy of
    the label, by a new head on a text's last token. `auto` is what `data.kind` is for."""

    beta: Annotated[Number, Field(gt=0)] = 0.1
    """Only with `dpo`: how closely the model stays to what it was; larger is closer."""

    class_weights: list[Annotated[Number, Field(gt=0)]] | None = None
    """Only with `classification`: what a text of each class counts in the loss, one number for each
    of `data.labels`, such as `[1, 1.5, 1]`. The loss is divided by the sum of the weights of the
    global batch, over all ranks. Left out, every text counts once."""


@section
class TrainSpec:
    """How to train."""

    global_batch: Positive
    """Samples in one optimizer step, over all ranks and accumulation."""

    # A job that was read has steps: `spec.length` makes them of epochs and tokens.
    steps: Positive = Field(default=0, json_schema_extra=_without_default)
    """Optimizer steps in the whole run. A job gives one of `steps`, `epochs` and `tokens`."""

    epochs: Annotated[Number, Field(gt=0)] | None = None
    """In place of `steps`: how many times all samples together are read. Sources with weights are
    read more or less often than that; `paceline plan` prints how often. The data are prepared to be
    counted."""

    tokens: Count | None = None
    """In place of `steps`: tokens that are read, such as `10B`. A step reads `global_batch` x
    `data.seq_len`, padding included."""

    optimizer: Optimizer = "adamw"
    """`adamw` keeps two float32 moments for each parameter, `adamw-8bit` two of a byte, `muon` and
    `sgd` one float32 momentum, `adafactor` a row and a column of each matrix."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Not used by `sgd` and `adafactor`: decay of Adam's two moments. The defaults are those of
    GPT-3 (arXiv:2005.14165, appendix B) and Llama."""

    eps: Annotated[Number, Field(gt=0)] = 1e-8
    """Not used by `sgd` and `adafactor`: added to the root of Adam's second moment."""

    learning_rate: Annotated[Number, Field(gt=0)] = 3e-4
    """Peak learning rate, reached after the warm-up."""

    warmup_steps: Whole = 0
    """Steps over which the learning rate rises linearly from zero."""

    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls from the warm-up's end to the last step. `wsd` (warm-up, stable,
    decay) stays at the peak and falls linearly over the last `decay_steps`."""

    decay_steps: Positive | Auto = "auto"
    """Only with `wsd`: steps over which the learning rate falls. `auto` is a tenth of the run
    (MiniCPM, arXiv:2404.06395, section 4.3)."""

    final_learning_rate: Annotated[Number, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a share of the peak. Not used by `constant`."""

    weight_decay: Annotated[Number, Field(ge=0)] = 0.1
    """Decoupled weight decay, on matrices only (not on norms, biases or other vectors)."""

    clip_norm: Annotated[Number, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. null is no clipping."""

    adapter: AdapterSpec | None = None
    """Train adapters (LoRA, DoRA, QLoRA) instead of the whole model."""

    loss_chunk: Whole = 0
    """Tokens whose logits exist at a time in the built-in trainer's loss: their gradients are made
    at once, and the next ones take their place. 256 to 1,024 saves most of the memory of a large
    vocabulary, and sums are made in another order. 0 keeps the logits of a whole micro-batch."""

    router_loss: Annotated[Number, Field(ge=0)] | Auto = "auto"
    """What the balancing loss of routed experts is multiplied by: for each sample, the one that
    transformers defines. `auto` is the `router_aux_loss_coef` of a config.json that sets
    `output_router_logits`, and else 0, which is none; for Megatron, of any config.json that has
    it. From scratch, 0.001 to 0.01 is usual."""
    objective: ObjectiveSpec | None = None
    """What the built-in trainer's loss is. Left out, it follows from `data.kind`."""

    precision: Literal["auto", Precision] = "auto"
    """Type of the matrix multiplications. Parameters, reductions and optimizer state stay float32,
    unless the engine keeps them otherwise. `auto` is bf16 where the accelerator has it, else fp16
    with a loss scaler where it has that, and fp32 on a CPU."""

    states: Literal["auto", "bf16"] = "auto"
    """Type of parameters, gradients and optimizer state, where the engine has a choice (MLX): in
    `bf16` AdamW holds 8 bytes a parameter instead of 16, and an update that is smaller than about
    1/256 of a parameter is lost in rounding. `auto` leaves it to the engine: float32 with MLX."""

    fp8_recipe: Literal["auto", Fp8Recipe] = "auto"
    """How numbers are scaled with `precision: fp8`, where the engine has a choice: one scale for
    each tensor (`tensorwise`), one for each row (`rowwise`), or one for each 32 numbers (`mxfp8`,
    which needs Blackwell or MI350). `auto` leaves it to the engine."""

    async_tensor: bool = False
    """Hide tensor parallelism's gathers and scatters behind its matrices, piece by piece, where the
    engine can be asked for it (torchtitan)."""

    token_dispatcher: Literal["auto", TokenDispatcher] = "auto"
    """How tokens reach routed experts on other ranks, where the engine has a choice (Megatron,
    Megatron Bridge): `alltoall` sends one copy for each expert; `deepep` sends one to each node
    that has some of them, and needs DeepEP on the nodes. `auto` is `alltoall` there."""

    async_expert: bool = False
    """Hide the exchange of tokens with routed experts behind another micro-batch, where the engine
    can be asked for it (Megatron, Megatron Bridge). Takes several micro-batches, an interleaved
    schedule in a pipeline, and no full recompute."""

    optimizer_in_backward: bool = False
    """Step the optimizer of each parameter in the backward pass as soon as its gradient is there,
    and free the gradient, where the engine can be asked for it (torchtune): no gradients are held.
    Takes one micro-batch a step and `clip_norm: null`."""

    attention: Literal["auto", Attention] = "auto"
    """Kernel of attention, where the engine has a choice: `flash` is FlashAttention 2, `fused`
    cuDNN's, `flex` PyTorch's FlexAttention, and `unfused` writes its scores to memory. `auto`
    leaves it to the engine. torchtitan has `flash` and `flex`; Megatron, Megatron Bridge,
    DeepSpeed, Accelerate and FSDP1 have the others."""

    compile: bool = False
    """Compile each block with `torch.compile`, which takes a minute or so before the first step.
    Needs a C++ compiler on a CPU, Triton on a GPU."""

    deterministic: bool | Auto = "auto"
    """Whether a step that is repeated gives the same bits, so that a run that recovered ends as an
    undisturbed one would. Operations without a deterministic kernel then raise, and attention's
    backward pass and scatters take slower kernels. `auto` is true on CPUs and false on GPUs, where
    the run's record says `numeric`: repeated steps equal the first ones to rounding."""

    gradient_compression: Compression = "none"
    """Only with `layout.sharding: none`: how gradients are sent. `bf16` halves the bytes and rounds
    to 8 bits. `fp16` halves them too, and overflows above 65,504: prefer `bf16`. `powersgd` sends
    matrices as two thin ones and adds what they miss to the next step; what is carried over is not
    in checkpoints."""

    powersgd_rank: Positive = 4
    """Only with `powersgd`: columns of the thin matrices."""

    powersgd_start: Whole = 10
    """Only with `powersgd`: steps that are sent uncompressed first."""

    bucket: SmallBytes | Auto = "auto"
    """Only with `layout.sharding: none`: gradients that are reduced together, such as `25 MiB`,
    which is `auto`."""

    static_graph: bool = False
    """Only with DDP: a promise that every step runs the same operations, which lets DDP learn in
    the first step what it needs."""

    seed: Annotated[Whole, Field(lt=2**63)] = 0
    """Seed of the initial weights, the order of the samples and dropout."""

    max_refused_steps: Positive = 10
    """Stop after this many refused steps in a row. A step is refused, by a vote of all ranks, when
    a loss or the gradient norm is not finite."""
