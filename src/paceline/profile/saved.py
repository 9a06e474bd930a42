"""What a block keeps in memory between its forward and its backward pass, for one token.

What is kept depends on the kernels: an unfused RMSNorm keeps a float32 copy, attention without a
flash kernel keeps its scores, autocast casts a linear's input once for each linear. `Kernels` says
which; `saved_bytes` counts. Letters: H hidden, N query heads, K kv heads, D head width, F
feed-forward width, S tokens, c bytes of the type that is multiplied in.

    ===========================  ==================  ==============================  ==========
    operation                    saves               type                            divided by
    ===========================  ==================  ==============================  ==========
    norm, twice                  H  its input        `norm_bytes`                    sequence
    query, key, value            H  their input      c, `attention_casts` times      sequence
    attention (flash)            ND + K(D+Dv)        c: query, key, value            tensor
                                 N Dv its output     c: input of the output matrix   tensor
                                 N  log-sum-exp      float32                         tensor
    attention (unfused)          N S scores          `score_bytes` a score           tensor
    gate and up, or up           H  their input      c, `ffn_casts` times            sequence
    activation function          F  once for each    c, `gated_copies` or            tensor
                                 tensor it keeps     `plain_copies` times, ReLU one less
    norms of query and key       ND + KD             `norm_bytes`                    tensor
    dropout, twice               H  mask             1 byte, where there is dropout  sequence
    ===========================  ==================  ==============================  ==========

Arithmetic only, so that a `Block` may be a column of models (see `block.py`).

Source: Korthikanti et al., arXiv:2205.05198, section 4.1 (34 s b h + 5 a s^2 b: the row `megatron`
of the tests); torch 2.13 read off with `torch.autograd.graph.saved_tensors_hooks`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.profile.block import Block, Value, matrices, second_shares

FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """What of a block selective recompute does again besides the scores: 1 or 0 each.

    Source: megatron-core 0.16, transformer/transformer_config.py, `recompute_modules`.
    """

    norms: Value = 0
    """`layernorm`: what the two norms give is not kept."""

    ffn: Value = 0
    """`mlp`: of the dense feed-forward only its input is kept."""

    experts: Value = 0
    """`moe`: of routed and shared experts only their input is kept."""

    shared: Value = 0
    """`shared_experts`."""

    activation: Value = 0
    """`moe_act`: what the routed experts' activation function gives is not kept."""

    latents: Value = 0
    """`mla_up_proj`: query, key and value, as widened from latents, are not kept."""


_MODULES = {
    "layernorm": "norms",
    "mlp": "ffn",
    "moe": "experts",
    "shared_experts": "shared",
    "moe_act": "activation",
    "mla_up_proj": "latents",
}


def modules_of(names: Collection[str]) -> Modules:
    """The modules of Megatron's names; `core_attn` is attention, which `Modules` leaves out.

    >>> modules_of(["core_attn", "moe"]).experts
    1
    """
    return Modules(**{ours: int(name in names) for name, ours in _MODULES.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which tensors the operations of one software stack keep, and in what type."""

    compute_bytes: int
    """c: inputs and outputs of matrices and attention."""

    stream_bytes: int
    """One element of the residual stream."""

    norm_bytes: Value
    """Kept by a norm for each element of its input."""

    norm_scalars: int = 1
    """Float32 numbers a norm keeps for each token: 1/rms, or mean and 1/std."""

    attention_casts: int = 1
    """Copies of the attention's input: 3 under autocast, which casts for each linear."""

    ffn_casts: int = 1
    """Copies of the feed-forward's input: 2 under autocast with a gate."""

    gated_copies: Value = 4
    """Tensors of width F that a gated feed-forward keeps. 4: silu's input, both factors, the
    product. 3 where silu and product are one kernel, 2 where the product is recomputed."""

    plain_copies: Value = 2
    """Tensors of width F that a feed-forward without a gate keeps: the activation function's input
    and output."""

    score_bytes: Value = 0
    """Kept for each score of attention: 0 with a flash kernel. 5 without: softmax (2), dropout's
    output (2) and mask (1)."""

    dropout_bytes: Value = 0
    """Mask kept for each element after attention and after the feed-forward."""

    second_products: Value = 0
    """1 where selective recompute keeps what every second matrix gives, not what all give."""

    modules: Modules = field(default_factory=Modules)
    """What selective recompute does again, where it does not do all that is cheap."""

    written: Value = 0
    """1 where the model is transformers' own code: what `Block.written` says is kept."""

    routed_ends: Value = 2
    """Tensors as wide as the stream kept of each token-copy: its expert's input and output."""

    logit_bytes: Value = 4
    """Kept for each logit until the loss goes backward: the log-softmax."""

    loss_peak_bytes: Value = 8
    """Besides, at the moment the loss goes backward: gradients of log-softmax and of logits."""


class SavedBytes(NamedTuple):
    """Bytes for one token and one block, by what divides them."""

    tensor: float
    """Divided by the tensor degree."""

    sequence: float
    """Divided by the tensor degree only with sequence parallelism."""

    routed: float
    """For one token-copy inside the routed experts: times the experts of a token."""

    routed_ends: float
    """For one token-copy before and after its expert, as wide as the residual stream; not divided
    where tensor ranks share the width of each expert."""

    peak: float
    """Alive besides while this one block goes backward: gradients inside it (divided by tensor)."""


def saved_bytes(block: Block, kernels: Kernels, seq_len: Value) -> SavedBytes:
    """Bytes one token leaves for the backward pass in one block.

    Args:
        seq_len: Tokens that attention looks at, for the scores of unfused attention.
    """
    c, h = kernels.compute_bytes, block.hidden
    ways = 1 + block.gated
    copies = _activated(block, kernels)
    has_attention = (block.heads > 0) * 1
    has_ffn = (block.ffn + block.shared_ffn + block.experts > 0) * 1
    query = block.heads * block.head_dim
    capped = kernels.written * block.written.capped
    # Keys and values are laid out for every head where scores are written.
    latent = ((block.kv_rank > 0) + capped > 0) * 1
    shared_key_value = block.kv_heads * (block.head_dim + block.value_dim)
    own_key_value = block.heads * (block.head_dim + block.value_dim)
    key_value = (1 - latent) * shared_key_value + latent * own_key_value
    # Latents are kept for their norm, and after it for the matrix that widens them.
    norm_bytes = _norm_bytes(block, kernels, kernels.stream_bytes)
    latents = (c + norm_bytes) * (block.query_rank + block.kv_rank)
    seen = block.window + (block.window == 0) * seq_len
    # Capped: the tangent, the softmax in float32 and its narrow copy, of all scores.
    scores = kernels.score_bytes * block.heads * seen
    scores = scores + capped * (2 * c + FLOAT32) * block.heads * seq_len
    flash = (kernels.score_bytes == 0) * (1 - capped) * FLOAT32 * block.heads
    cross = c * 4 * block.cross_heads * block.head_dim
    norm = norm_bytes * h + FLOAT32 * kernels.norm_scalars
    dropped = kernels.written * (block.written.drops - kernels.dropout_bytes)
    attention_inputs, ffn_inputs = entered(block, kernels)
    normed = block.query_key_norm * (query + block.kv_heads * block.head_dim)
    tensor = (
        c * (query + key_value + block.heads * block.value_dim)
        + _norm_bytes(block, kernels, c) * normed
        + flash
        + scores
        + cross
        + c * copies * (block.ffn + block.shared_ffn)
    )
    has_cross = (block.cross_heads > 0) * 1
    sequence = (
        (has_attention + has_ffn + has_cross) * (norm + (kernels.dropout_bytes + dropped) * h)
        + c * (attention_inputs + ffn_inputs) * h
        + has_cross * 2 * c * h
        + norm_bytes * block.extra_norm_width
        - block.parallel * (norm + c * h)
        + latents
        + FLOAT32 * 2 * block.experts
    )
    # A copy of a token: its permuted input, what the expert keeps, and its output to be weighted.
    has_experts = (block.experts > 0) * 1
    routed = has_experts * c * copies * block.expert_ffn
    width = block.ffn + block.shared_ffn + block.experts_per_token * block.expert_ffn
    peak = c * (ways + 1) * width + kernels.stream_bytes * 2 * h
    # The softmax of capped scores: two gradients in float32, at another time.
    more = capped * 2 * FLOAT32 * block.heads * seq_len - peak
    peak = peak + (abs(more) + more) / 2
    return SavedBytes(
        tensor=tensor,
        sequence=sequence,
        routed=routed,
        routed_ends=has_experts * kernels.routed_ends * c * h,
        peak=peak,
    )


def entered(block: Block, kernels: Kernels) -> tuple[Value, Value]:
    """Inputs of a block's attention and feed-forward that are kept: one each, or under autocast a
    cast for each matrix that takes it."""
    apart = 1 - kernels.written * block.written.joined
    has_attention = (block.heads > 0) * 1
    attention = has_attention * (1 + (kernels.attention_casts - 1) * apart)
    gate = block.gated * apart
    parts = (block.ffn > 0) * (1 + gate) + (block.shared_ffn > 0) * (1 + gate) + (block.experts > 0)
    is_each, is_kept = (kernels.ffn_casts > 1) * 1, (kernels.ffn_casts > 0) * (parts > 0)
    return attention, is_kept * (1 + is_each * (parts - 1))


def _norm_bytes(block: Block, kernels: Kernels, width: Value) -> Value:
    """Kept by a norm for each element of an input of so many bytes an element."""
    chain = kernels.written * block.written.norm
    written = FLOAT32 + (chain > 1) * FLOAT32 + (chain == 1) * width
    return kernels.norm_bytes + (chain > 0) * (written - kernels.norm_bytes)


def _activated(block: Block, kernels: Kernels) -> Value:
    """Tensors of the feed-forward's width that are kept."""
    plain = kernels.plain_copies - block.relu + kernels.written * block.written.activation
    return block.gated * kernels.gated_copies + (1 - block.gated) * plain


def saved_outputs(block: Block, kernels: Kernels, seq_len: Value) -> SavedBytes:
    """Outputs of matrices (or of every second one) and of flash attention, and the block's input;
    the rest is cheap.

    Source: `create_selective_checkpoint_contexts` of torch 2.13, saving `mm` and attention.
    """
    outputs_only = replace(
        kernels,
        written=0,
        norm_bytes=0,
        norm_scalars=0,
        attention_casts=0,
        ffn_casts=0,
        gated_copies=2,
        plain_copies=1,
        score_bytes=0,
        dropout_bytes=0,
    )
    # A matrix's output is kept also where ReLU's is not; the shared input of both parts is not.
    inside = saved_bytes(replace(block, relu=False, parallel=False), outputs_only, seq_len)
    has_attention = (block.heads > 0) * 1
    has_cross = (block.cross_heads > 0) * 1
    has_ffn = (block.ffn + block.shared_ffn + block.experts > 0) * 1
    written = (has_attention + has_cross + has_ffn) * kernels.compute_bytes * block.hidden
    column = whole = 0.0
    for matrix, share in zip(matrices(block), second_shares(block), strict=True):
        again = kernels.second_products * kernels.compute_bytes * share * matrix.outputs
        column = column + (again if matrix.split == "column" else 0)
        whole = whole + (again if matrix.split != "column" else 0)
    sequence = inside.sequence + kernels.stream_bytes * block.hidden + written - whole
    return inside._replace(sequence=sequence, tensor=inside.tensor - column)


def without_modules(block: Block, kernels: Kernels, seq_len: Value) -> SavedBytes:
    """Bytes one token leaves in one block whose scores and `kernels.modules` are computed again."""
    m, c, h = kernels.modules, kernels.compute_bytes, block.hidden
    whole = saved_bytes(block, replace(kernels, score_bytes=0), seq_len)
    copies = _activated(block, kernels)
    shared = m.shared + m.experts - m.shared * m.experts
    latent = (block.kv_rank > 0) * block.heads * (2 * block.head_dim + block.value_dim)
    tensor = c * (copies * (m.ffn * block.ffn + shared * block.shared_ffn) + m.latents * latent)
    normed = sum(entered(block, kernels))
    activation = m.activation * (1 - m.experts) * c * (block.experts > 0) * block.expert_ffn
    return whole._replace(
        tensor=whole.tensor - tensor,
        sequence=whole.sequence - m.norms * c * h * normed,
        routed=whole.routed * (1 - m.experts) - activation,
        routed_ends=whole.routed_ends * (1 - m.experts),
    )


def saved_input(block: Block, kernels: Kernels) -> SavedBytes:
    """Bytes of a block of which only the input is kept, until the block is computed again.

    Source: checkpointing, Chen et al., arXiv:1604.06174.
    """
    kept = kernels.stream_bytes * block.hidden
    return SavedBytes(tensor=0.0, sequence=kept, routed=0.0, routed_ends=0.0, peak=0.0)


def deferred_bytes(block: Block, kernels: Kernels) -> SavedBytes:
    """Bytes one token leaves for the gradients of a block's matrices, where they are computed after
    those of its input: the gradient of each matrix's output, and of each norm's.

    Source: Qi et al., arXiv:2401.10241, section 2.3 (M_W); torch 2.13 `stage_backward_input`.
    """
    c = kernels.compute_bytes
    column = sum(
        each.outputs for each in matrices(block) if each.split == "column" and not each.is_routed
    )
    whole = sum(
        each.outputs for each in matrices(block) if each.split != "column" and not each.is_routed
    )
    inside = sum(
        each.outputs for each in matrices(block) if each.is_routed and each.split == "column"
    )
    after = sum(each.outputs for each in matrices(block) if each.is_routed and each.split == "row")
    has_ffn = (block.ffn + block.shared_ffn + block.experts > 0) * 1
    norms = (block.heads > 0) * 1 + (block.cross_heads > 0) + has_ffn
    normed = kernels.stream_bytes * norms * block.hidden
    return SavedBytes(
        tensor=c * column,
        sequence=c * whole + normed,
        routed=c * inside,
        routed_ends=c * after,
        peak=0.0,
    )


class OutsideBytes(NamedTuple):
    """Bytes for one token outside the blocks."""

    kept: float
    """Until the backward pass: final norm, the output matrix's input, token ids and targets."""

    logits: float
    """Bytes of tensors that are as wide as the vocabulary, which tensor parallelism divides."""

    loss_peak: float
    """Alive besides while the loss goes backward; divided as the logits are."""


def outside_bytes(head_inputs: Value, head_outputs: Value, kernels: Kernels) -> OutsideBytes:
    """Bytes one token keeps in the head, the loss and the embedding."""
    norm = kernels.norm_bytes * head_inputs + FLOAT32 * kernels.norm_scalars
    ids = 2 * 8
    return OutsideBytes(
        kept=norm + kernels.compute_bytes * head_inputs + ids,
        logits=kernels.logit_bytes * head_outputs,
        loss_peak=kernels.loss_peak_bytes * head_outputs,
    )
