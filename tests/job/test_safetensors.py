"""Headers of safetensors files that are wrong: what is wrong, of which tensor, in which file."""

import json
import struct

import pytest

from paceline.errors import JobError
from paceline.job.safetensors import stored_tensors


def entry(begin=0, end=4, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def written(path, header, data=b"\0" * 4):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def test_tensors_are_found_in_any_order_of_the_header(tmp_path):
    header = {"b": entry(4, 8), "empty": entry(4, 4, (0,)), "a": entry(), "__metadata__": {}}
    found = stored_tensors([written(tmp_path / "x.safetensors", header, b"\0" * 8)], where="here")
    start = found["a"].start
    assert (found["empty"].start, found["b"].start) == (start + 4, start + 4)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ([1], "its header is JSON, but no object of names and tensors"),
        (b"{oops", "its header is no JSON: Expecting property name"),
        ({"w": {"shape": [1], "data_offsets": [0, 4]}}, 'gives w as {"shape": [1], "data'),
        ({"w": 7}, "its header gives w as 7, and not as dtype, shape and data_offsets"),
        ({"w": entry() | {"data_offsets": [0]}}, "its header gives w as"),
        ({"w": entry(shape=("1",))}, "its header gives w as"),
        ({"w": entry(shape=(-1, -1))}, "its header gives w as"),
        ({"w": entry(4, 0)}, "its header gives w as"),
        ({"w": entry(0, 8)}, "w has 8 bytes, which its shape (1,) does not"),
        ({"w": entry(4, 8)}, "w lies up to"),
        ({"v": entry(), "w": entry()}, "w begins at byte"),
    ],
)
def test_a_header_that_is_wrong_is_told_with_its_tensor_file_and_fix(header, said, tmp_path):
    path = written(tmp_path / "x.safetensors", header)
    with pytest.raises(JobError) as caught:
        stored_tensors([path], where="model.pretrained")
    (problem,) = caught.value.problems
    assert problem.what.startswith("x.safetensors is not a whole safetensors file: ")
    assert said in problem.what
    assert (problem.where, problem.fix) == (
        f"model.pretrained: {tmp_path}",
        "download the file again, or use an earlier checkpoint",
    )


def test_a_file_too_short_for_a_header_is_told_with_its_size(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"abc")
    with pytest.raises(JobError, match="it has 3 bytes, too few for a header"):
        stored_tensors([tmp_path / "x.safetensors"], where="here")
