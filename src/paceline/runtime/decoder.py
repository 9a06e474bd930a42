"""The built-in decoder-only transformer, exactly as a `DecoderShape` describes it.

Llama-like: RMSNorm before each half of a block, rotary positions (rotate-half), grouped queries,
SwiGLU, no biases except an optional one on the query, key and value projections.

Letters in tensor names:
    B  samples in a micro-batch        H  width of the residual stream
    S  tokens in a sample              N  query heads (K: key and value heads)
    V  size of the vocabulary          D  width of one head

Leaves out: dropout, key/value caches and generation; a loss (the trainer computes it).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.profile import DecoderShape
from paceline.runtime.strategy.context.attention import attention
from paceline.runtime.strategy.context.documents import Documents, current

INIT_STD = 0.02
"""Standard deviation of initial weights. Source: GPT-2, section 2.3, and Llama's reference code."""


class Decoder(nn.Module):
    """A decoder of the given shape; initial weights are drawn from torch's global generator.

    Built on the meta device it holds no memory: `to_empty(device=...)`, then `reset_parameters()`
    draws the weights there.
    """

    def __init__(self, shape: DecoderShape, seq_len: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        rotary = Rotary(seq_len, shape.head_dim, shape.rope_theta)
        self.rotary = rotary
        self.blocks = nn.ModuleList(Block(shape, rotary) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)
        self.reset_parameters()

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits, `logits_BSV`, of the token after each position."""
        hidden_BSH = self.embedding(tokens_BS)
        for block in self.blocks:
            hidden_BSH = block(hidden_BSH)
        logits_BSV: Tensor = self.output(self.norm(hidden_BSH))
        return logits_BSV

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every weight again and recompute the rotary tables.

        The two projections that write to the residual stream are scaled down by the square root
        of the number of writes, 2 per block, so that its variance does not grow with depth.
        Source: GPT-2, section 2.3.
        """
        ends = isinstance(self.embedding, nn.Embedding), isinstance(self.output, nn.Linear)
        if self.shape.tied_embeddings and all(ends):  # a pipeline stage may have one end, or none
            self.output.weight = self.embedding.weight  # here, because `to_empty` unties
        self.rotary.reset_parameters()
        residual_std = INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)
            else:
                writes_residual = name.endswith(("attention.output.weight", "ffn.down.weight"))
                nn.init.normal_(parameter, std=residual_std if writes_residual else INIT_STD)


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy of the stream and added to it."""

    def __init__(self, shape: DecoderShape, rotary: "Rotary") -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.attention = Attention(shape, rotary)
        self.ffn_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        hidden_BSH = hidden_BSH + self.attention(self.attention_norm(hidden_BSH))
        hidden_BSH = hidden_BSH + self.ffn(self.ffn_norm(hidden_BSH))
        return hidden_BSH


class Attention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share a key and value head."""

    def __init__(self, shape: DecoderShape, rotary: "Rotary") -> None:
        super().__init__()
        self.shape = shape
        self.attend = attention  # replaced where a sample's tokens are on several ranks
        self.rotary = rotary  # one module shared by all blocks: it holds no parameters
        query_width = shape.heads * shape.head_dim
        kv_width = shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.hidden, query_width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.hidden, kv_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.hidden, kv_width, bias=shape.qkv_bias)
        self.output = nn.Linear(query_width, shape.hidden, bias=False)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        heads = (-1, self.shape.head_dim)
        query_BNSD = self.query(hidden_BSH).unflatten(-1, heads).transpose(1, 2)
        key_BKSD = self.key(hidden_BSH).unflatten(-1, heads).transpose(1, 2)
        value_BKSD = self.value(hidden_BSH).unflatten(-1, heads).transpose(1, 2)
        mixed_BNSD = self.attend(
            self.rotary.rotate(query_BNSD), self.rotary.rotate(key_BKSD), value_BKSD
        )
        output_BSH: Tensor = self.output(mixed_BNSD.transpose(1, 2).flatten(2))
        return output_BSH


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, hidden_BSH: Tensor) -> Tensor:
        output_BSH: Tensor = self.down(F.silu(self.gate(hidden_BSH)) * self.up(hidden_BSH))
        return output_BSH


class Rotary(nn.Module):
    """Rotary positions, rotate-half form as in Hugging Face's Llama.

    The tables stay float32 in every precision (a bfloat16 angle is wrong by whole radians at
    position 1000): they are buffers of a module, and not an argument of the blocks, because FSDP2
    casts floating arguments. They are not saved, as they follow from the shape. The module is not
    called but asked to `rotate`: torch's CommDebugMode fails on a module called in many places.
    """

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, seq_len: int, head_dim: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        self.seq_len = seq_len
        self.spans: tuple[range, ...] = (range(seq_len),)
        self.register_buffer("cos_SD", torch.empty(seq_len, head_dim), persistent=False)
        self.register_buffer("sin_SD", torch.empty(seq_len, head_dim), persistent=False)

    def keep_tokens(self, spans: tuple[range, ...]) -> None:
        """Keep the rows of these positions only: the tokens of each sample that this rank has, in
        the order in which it has them."""
        self.spans = spans
        num_tokens, head_dim = sum(map(len, spans)), self.cos_SD.shape[1]
        self.cos_SD = self.cos_SD.new_empty(num_tokens, head_dim)
        self.sin_SD = self.sin_SD.new_empty(num_tokens, head_dim)
        self.reset_parameters()

    def rotate(self, heads_BNSD: Tensor) -> Tensor:
        """Query or key heads, turned by their position."""
        seq_len, half = heads_BNSD.shape[-2], heads_BNSD.shape[-1] // 2
        num_tokens = self.cos_SD.shape[0]
        if seq_len != num_tokens and num_tokens < self.seq_len:
            raise JobError.of(
                code="L009",
                what=f"{seq_len} tokens on this rank; it was given the positions of "
                f"{num_tokens}, its share of samples of {self.seq_len}",
                where="layout.context",
                fix=f"give it samples of {self.seq_len} tokens, or set layout.context to 1",
            )
        left, right = heads_BNSD[..., :half], heads_BNSD[..., half:]
        turned_BNSD = torch.cat((-right, left), dim=-1)
        cos, sin = self.cos_SD[:seq_len], self.sin_SD[:seq_len]
        if (documents := current()) is not None:
            key = ("rotary", self.theta, half, heads_BNSD.device)
            cos, sin = documents.keep(key, lambda: self._restarting(documents))
        rotated_BNSD = heads_BNSD * cos + turned_BNSD * sin
        return rotated_BNSD.to(heads_BNSD.dtype)

    def _restarting(self, documents: Documents) -> tuple[Tensor, Tensor]:
        """The tables of packed samples, `cos_B1SD` and `sin_B1SD`: rows of those of whole samples,
        which a context rank has not got."""
        device = self.cos_SD.device
        angles_SD = self._angles(torch.arange(self.seq_len, device=device, dtype=torch.float32))
        rows_B1S = documents.positions(device).unsqueeze(1)
        return angles_SD.cos()[rows_B1S], angles_SD.sin()[rows_B1S]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Compute the tables, on whatever device they are."""
        device = self.cos_SD.device
        positions = torch.cat(
            [
                torch.arange(span.start, span.stop, device=device, dtype=torch.float32)
                for span in self.spans
            ]
        )
        angles = self._angles(positions)
        self.cos_SD.copy_(angles.cos())
        self.sin_SD.copy_(angles.sin())

    def _angles(self, positions: Tensor) -> Tensor:
        """The angle by which each pair of a head is turned at these positions, in one more
        dimension."""
        head_dim = self.cos_SD.shape[1]
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
        angles = positions.unsqueeze(-1) * self.theta ** -(exponents / head_dim)
        return torch.cat((angles, angles), dim=-1)
