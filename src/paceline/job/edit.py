"""One field of a job file set to another value, everything else as the person wrote it."""

import yaml


def with_value(text: str, field: str, value: str) -> str:
    """The text of a job file with a dotted field set; comments and order stay.

    Args:
        text: YAML, a mapping.
        field: Such as `train.bucket`.
        value: As it is written in YAML.

    Raises:
        ValueError: The field is inside of something that is no mapping.

    >>> with_value("train: {steps: 5}  # short", "train.bucket", "4MiB")
    'train: {steps: 5, bucket: 4MiB}  # short'
    """
    node, names = yaml.compose(text, Loader=yaml.SafeLoader), field.split(".")
    if node is None:
        return _inserted(text, None, names, value)
    for depth, name in enumerate(names):
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{'.'.join(names[:depth])} is no mapping")
        children = {key.value: child for key, child in node.value}
        if name not in children:
            return _inserted(text, node, names[depth:], value)
        node = children[name]
    return text[: node.start_mark.index] + value + text[node.end_mark.index :]


def _inserted(text: str, node: yaml.MappingNode | None, names: list[str], value: str) -> str:
    """The first key of a mapping, or the last of one in braces."""
    *sections, last = names
    entry = "".join(f"{name}: {{" for name in sections) + f"{last}: {value}" + "}" * len(sections)
    if node is None:
        return f"{text}{entry}\n"
    if node.flow_style:
        end = node.end_mark.index - 1
        return f"{text[:end].rstrip()}{', ' if node.value else ''}{entry}{text[end:]}"
    start = node.start_mark
    return f"{text[: start.index]}{entry}\n{' ' * start.column}{text[start.index :]}"
