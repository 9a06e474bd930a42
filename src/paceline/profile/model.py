"""What any model costs: one `ModelProfile`, the same for every layout."""

from dataclasses import dataclass, replace

from paceline.profile.block import Block, MeasuredCosts, block_flops, block_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Low-rank adapters that are trained while the model itself stays as it is."""

    rank: int
    """Width between the two matrices of an adapter."""

    matrices: tuple[str, ...]
    """Matrices with an adapter, by their name in `profile.block`."""

    num_parameters: int
    """Parameters of all adapters: the only ones that are trained."""

    targets: tuple[str, ...] = ()
    """Linears with an adapter, by our names for them: `query`, `gate_up`."""

    num_block_parameters: tuple[int, ...] = ()
    """Parameters of the adapters in one block of each kind, as `ModelProfile.blocks` has them."""

    scaled_columns: float = 0.0
    """Outputs of a block's linears that DoRA scales, on average: of those that tensor ranks split
    by outputs. They are kept as they are before."""

    scaled_rows: float = 0.0
    """Outputs of those that are split by inputs, or not at all."""

    num_quantised_parameters: int = 0
    """Frozen parameters that are kept quantised: the matrices of all blocks with QLoRA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Costs of a model that no layout changes. None is unknown, and stays so."""

    name: str
    """For people: a preset's name, the family of a config.json, or `7B`."""

    blocks: tuple[Block, ...]
    """Kinds of blocks, in the order they are applied."""

    num_embedding_parameters: int
    """Before the first block: token and position embeddings, or the projection of patches."""

    num_head_parameters: int
    """After the last block: final norm and output matrix; a tied output matrix is not counted."""

    head_inputs: int
    """Width that enters the output matrix."""

    head_outputs: int
    """Width of the output: the vocabulary, or the number of classes. 0 is unknown."""

    tied: bool
    """Whether the output matrix is the token embedding. A pipeline then holds it at both ends."""

    seq_len: int | None
    """Tokens in one sample; None where a sample is not a row of tokens."""

    head_tokens: int | None = None
    """Tokens of a sample that enter the output matrix; None is all, a classifier has one."""

    is_built_in: bool = False
    """Whether our own runtime takes its own decoder for it, and not transformers' class."""

    caps_logits: bool = False
    """Whether logits go through a tangent."""

    adapter: Adapter | None = None
    """Set when only adapters are trained."""

    outside: MeasuredCosts | None = None
    """What a helper process measured outside the blocks of a module whose inside is not known."""

    assumed: tuple[str, ...] = ()
    """What was assumed where little was said, one phrase each."""

    @property
    def num_blocks(self) -> int:
        """Repeated blocks of all kinds."""
        return sum(block.count for block in self.blocks)

    @property
    def num_parameters(self) -> int:
        """Parameters exactly as the module counts them, tied ones once, adapters left out."""
        in_blocks = sum(block.count * block_parameters(block) for block in self.blocks)
        return in_blocks + self.num_root_parameters

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that get a gradient: all of them, or those of the adapters."""
        return self.num_parameters if self.adapter is None else self.adapter.num_parameters

    @property
    def lacks_adapters(self) -> bool:
        """Whether adapters are beside linears of some kinds of blocks, and beside none of others:
        a pipeline's stage of the others would have nothing to train."""
        return self.adapter is not None and 0 in self.adapter.num_block_parameters

    def frozen_block_bytes(self, unquantised: float, quantised: float) -> float:
        """Bytes of a frozen parameter in the blocks, on average.

        Args:
            unquantised: Of a parameter that is not quantised: 2 in 16 bits, 4 in fp32.
            quantised: Of one that is.
        """
        inside = self.num_parameters - self.num_root_parameters
        num = 0 if self.adapter is None else self.adapter.num_quantised_parameters
        return unquantised + (quantised - unquantised) * num / max(inside, 1)

    @property
    def num_root_parameters(self) -> int:
        """Parameters outside the blocks: one unit of full sharding, which stays gathered from the
        forward to the end of the backward pass."""
        return self.num_embedding_parameters + self.num_head_parameters

    @property
    def num_block_parameters(self) -> int:
        """Parameters of the largest block; 0 when the model has no repeated blocks."""
        return max((block_parameters(block) for block in self.blocks), default=0)

    @property
    def forward_flops_per_sample(self) -> float | None:
        """FLOPs of one sample's forward pass: matrices and attention, the embedding's lookup not.

        None when a part of it is unknown.
        """
        if self.outside is not None:
            return self._measured_flops(self.outside)
        if self.seq_len is None or any(block.measured is not None for block in self.blocks):
            return None
        inside = sum(block.count * block_flops(block, self.seq_len) for block in self.blocks)
        head_tokens = self.seq_len if self.head_tokens is None else self.head_tokens
        return float(inside + 2.0 * self.head_inputs * self.head_outputs * head_tokens)

    def _measured_flops(self, outside: MeasuredCosts) -> float | None:
        costs = [(block.count, block.measured) for block in self.blocks]
        flops = [
            (count, None if each is None else each.forward_flops)
            for count, each in (*costs, (1, outside))
        ]
        if any(each is None for _, each in flops):
            return None
        return sum(count * (each or 0.0) for count, each in flops)


def as_classifier(profile: ModelProfile, num_labels: int) -> ModelProfile:
    """A model of tokens with a head for classes in place of the one for tokens.

    An encoder has a dense layer before it, and its head sees one token of a sample; a decoder's
    sees all of them. Source: transformers 5.23, `modeling_layers.py` and each family's
    `...ForSequenceClassification`.
    """
    inputs = profile.head_inputs
    is_encoder = not any(block.causal for block in profile.blocks)
    if is_encoder:
        num_parameters = inputs * (inputs + 1) + num_labels * (inputs + 1)
    else:
        matrix = 0 if profile.tied else inputs * profile.head_outputs
        rest = profile.num_head_parameters - matrix
        # The final norm has a weight and a bias at most: what is more is the bias of the logits.
        norm = rest - profile.head_outputs if rest > 2 * inputs else rest
        num_parameters = norm + num_labels * inputs
    return replace(
        profile,
        num_head_parameters=num_parameters,
        head_outputs=num_labels,
        tied=False,
        head_tokens=1 if is_encoder else None,
    )
