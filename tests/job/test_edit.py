"""A field set in a job file that keeps its comments and its order."""

import pytest

from paceline.job.edit import with_value


@pytest.mark.parametrize(
    ("text", "then"),
    [
        ("train: {steps: 5}  # short\n", "train: {steps: 5, bucket: 4MiB}  # short\n"),
        ("train: {}\n", "train: {bucket: 4MiB}\n"),
        (
            "train:\n  steps: 5\n  bucket: 1MiB  # old\nplan: {}\n",
            "train:\n  steps: 5\n  bucket: 4MiB  # old\nplan: {}\n",
        ),
        ("train:\n  # why\n  steps: 5\n", "train:\n  # why\n  bucket: 4MiB\n  steps: 5\n"),
        ("name: x\n", "train: {bucket: 4MiB}\nname: x\n"),
        ("", "train: {bucket: 4MiB}\n"),
    ],
)
def test_the_rest_of_the_file_stays_as_it_was(text, then):
    assert with_value(text, "train.bucket", "4MiB") == then


def test_a_section_that_is_none_is_refused():
    with pytest.raises(ValueError, match="train is no mapping"):
        with_value("train: 5\n", "train.bucket", "4MiB")
