"""Ways found from a model's structure, for kinds nothing is known of.

Reads names and shapes: the list of blocks, in it modules whose linears are a query, key and value
with an output, or an up (and a gate) with a down. What fits neither is named, not guessed.

Leaves out: linears that are several in one, whose order cannot be seen, and attributes that count
heads: a model that needs them says so in `Ways`.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from paceline.errors import PlanError, Problem
from paceline.profile.ways import Way, Ways
from paceline.runtime._torch_private import parameters_of
from paceline.runtime.strategy.tensor.fused import in_features, out_features

QUERIES = ("q_proj", "query", "q", "wq", "to_q", "q_lin", "query_proj")
KEYS = ("k_proj", "key", "k", "wk", "to_k", "k_lin", "key_proj")
VALUES = ("v_proj", "value", "v", "wv", "to_v", "v_lin", "value_proj")
OUTPUTS = ("o_proj", "out_proj", "output", "out", "o", "wo", "to_out", "out_lin", "dense", "proj")
UPS = ("up_proj", "up", "w3", "fc1", "c_fc", "fc_in", "dense_h_to_4h", "w1", "gate_proj", "gate")
DOWNS = ("down_proj", "down", "w2", "fc2", "c_proj", "fc_out", "dense_4h_to_h")
"""What linears are called in the decoders of transformers, Meta's Llama, nanoGPT and diffusers."""

POINTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity)
"""What may stand between two matrices whose features are split."""


def generic_ways(model: nn.Module, *, splits_tensors: bool = True) -> Ways:
    """Ways of a decoder, from its structure.

    Args:
        splits_tensors: Whether every matrix must be placed. Otherwise one that fits no pattern
            leaves the table of matrices empty: pipeline stages need the blocks and the ends only.

    Raises:
        PlanError: `L020`, a matrix that must be placed fits no pattern; it is named. There is no
            list of blocks.
    """
    blocks_name, blocks = _blocks(model, "layout.tensor" if splits_tensors else "layout.pipeline")
    block = blocks[0]
    table: dict[str, Way] = {}
    attention: str | None = None
    unplaced: list[Problem] = []
    for name, container in block.named_modules():
        linears = {
            own: child for own, child in container.named_children() if isinstance(child, nn.Linear)
        }
        if not linears:
            continue
        found = _attention(linears) or _feed_forward(linears) or _sequence(container, linears)
        if found is None:
            unplaced.append(_unplaced(blocks_name, name, list(linears)))
            continue
        if len(found) == 4 and "row" in found.values() and _attention(linears):
            attention = name
        prefix = f"*.{name}." if name else "*."
        table |= {f"{prefix}{own}": way for own, way in found.items()}
    first, last, ends, misfits = _ends(model, blocks_name)
    unplaced += misfits
    if unplaced and splits_tensors:
        raise PlanError(unplaced[0])
    return Ways(
        blocks=blocks_name,
        first=first,
        last=last,
        tensor={} if unplaced else {**table, **ends},
        attention=attention,
    )


def _blocks(model: nn.Module, where: str) -> tuple[str, Sequence[nn.Module]]:
    lists = [
        (name, list(module.children()))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    if not lists:
        raise PlanError.of(
            code="L020",
            what=f"{type(model).__name__} has no list of equal blocks (an nn.ModuleList)",
            where=where,
            fix=f"give the model `paceline_ways`, or set {where} = 1",
        )
    return max(lists, key=lambda found: sum(p.numel() for b in found[1] for p in b.parameters()))


def _attention(linears: dict[str, nn.Linear]) -> dict[str, Way] | None:
    """Query, key and value are columns, the output is the row that takes as much as the query."""
    columns = [_one_of(linears, names) for names in (QUERIES, KEYS, VALUES)]
    output = _one_of(linears, OUTPUTS)
    if output is None or None in columns or len(linears) != 4:
        return None
    query = columns[0]
    if query is None or in_features(linears[output]) != out_features(linears[query]):
        return None
    return {own: "row" if own == output else "column" for own in linears}


def _feed_forward(linears: dict[str, nn.Linear]) -> dict[str, Way] | None:
    """One or two columns of the same width, and the row that takes it."""
    down = _one_of(linears, DOWNS)
    ups = [own for own in linears if own != down]
    if down is None or not 1 <= len(ups) <= 2 or any(own not in UPS for own in ups):
        return None
    if any(out_features(linears[own]) != in_features(linears[down]) for own in ups):
        return None
    return {own: "row" if own == down else "column" for own in linears}


def _sequence(container: nn.Module, linears: dict[str, nn.Linear]) -> dict[str, Way] | None:
    """An `nn.Sequential` of linear, what works on one feature at a time, linear."""
    if not isinstance(container, nn.Sequential) or len(linears) != 2:
        return None
    if not all(isinstance(child, (nn.Linear, *POINTWISE)) for child in container):
        return None
    (up, first), (down, second) = linears.items()
    return {up: "column", down: "row"} if out_features(first) == in_features(second) else None


def _one_of(linears: dict[str, nn.Linear], names: tuple[str, ...]) -> str | None:
    found = [own for own in linears if own in names]
    return found[0] if len(found) == 1 else None


def _ends(
    model: nn.Module, blocks_name: str
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Way], list[Problem]]:
    """What is before the blocks and after them; the token embedding and the head are split. Last,
    the linears that are no head.

    Embeddings are before, all other modules after. The head is the only linear there, as wide as
    the vocabulary.
    """
    outside = [
        (name, module)
        for name, module in model.named_modules()
        if parameters_of(module) and not name.startswith(f"{blocks_name}.")
    ]
    embeddings = [(name, module) for name, module in outside if isinstance(module, nn.Embedding)]
    after = [(name, module) for name, module in outside if not isinstance(module, nn.Embedding)]
    ways: dict[str, Way] = {}
    heads = list(_linears(after))
    rows = {name: out_features(head) for name, head in heads}
    for name, embedding in embeddings:
        if embedding.num_embeddings in rows.values():
            ways[name] = "embedding"
    if is_placed := len(heads) == 1 and bool(ways):
        ways[heads[0][0]] = "head"
    misfits = [_unplaced("", "", [name for name, _ in heads])] if heads and not is_placed else []
    return tuple(name for name, _ in embeddings), tuple(name for name, _ in after), ways, misfits


def _linears(modules: list[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in modules:
        if isinstance(module, nn.Linear):
            yield name, module


def _unplaced(blocks_name: str, name: str, linears: list[str]) -> Problem:
    place = ".".join(part for part in (blocks_name and f"{blocks_name}.0", name) if part)
    return Problem(
        code="L020",
        what=f"{place or 'the model'} has linears {', '.join(linears)}, which are neither a query, "
        "key, value and output nor an up (and gate) and down by their names and widths",
        where="layout.tensor",
        fix="say what each is in `paceline_ways`, or set layout.tensor = 1",
    )
