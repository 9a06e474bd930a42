import random

import pytest
import xxhash

from paceline.record.checkpoints import (
    MANIFEST,
    FileRecord,
    Manifest,
    checkpoint_name,
    commit,
    damaged_in,
    find_damage,
    hash_file,
    read_manifest,
    verify_checkpoint,
)
from paceline.record.tensors import TENSORS, Piece, TensorRecord, encode_tensors, read_tensors

NAMES = [f"model/layer.{number}.weight" for number in range(6)]


def write(folder, step=50):
    """Two files that hold three tensors each, of lengths that differ."""
    tmp, final = folder / f"{checkpoint_name(step)}.ab12.tmp", folder / checkpoint_name(step)
    tmp.mkdir(parents=True)
    draw, table = random.Random(step), {}
    for number in range(2):
        file, content = f"__{number}_0.distcp", b""
        for index, name in enumerate(NAMES[number * 3 : number * 3 + 3]):
            values = draw.randbytes(100 + 50 * index)
            piece = Piece(
                file=file,
                start=len(content),
                length=len(values),
                offset=(0,),
                shape=(len(values),),
                xxh3_128=xxhash.xxh3_128_hexdigest(values),
            )
            table[name] = TensorRecord(size=(len(values),), dtype="uint8", pieces=(piece,))
            content += values
        (tmp / file).write_bytes(content)
    (tmp / TENSORS).write_bytes(encode_tensors(table))
    files = {path.name: hash_file(path) for path in tmp.iterdir()}
    commit(tmp, final, Manifest(step=step, world_size=2, files=files))
    return final


def test_every_flipped_bit_names_the_tensor_it_is_in(tmp_path):
    path = write(tmp_path)
    owners = [(p, name) for name, each in read_tensors(path).items() for p in each.pieces]
    for piece, name in owners:
        for at in (piece.start, piece.start + piece.length // 2, piece.start + piece.length - 1):
            whole = (path / piece.file).read_bytes()
            broken = bytearray(whole)
            broken[at] ^= 8
            (path / piece.file).write_bytes(broken)
            problem = verify_checkpoint(path)
            assert problem.code == "C005"
            assert problem.what.endswith(f"its hash differs; damaged: {name}")
            assert damaged_in(path, piece.file) == [name]
            (path / piece.file).write_bytes(whole)
    assert verify_checkpoint(path) is None


def test_a_tail_that_is_gone_or_zero_names_what_was_in_it(tmp_path):
    path = write(tmp_path)
    file = path / "__0_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:120])
    problem = verify_checkpoint(path)
    assert problem.code == "C004"
    assert problem.what.endswith(f"450 were written; damaged: {NAMES[1]}, {NAMES[2]}")
    file.write_bytes(whole[:300] + bytes(150))
    assert verify_checkpoint(path).what.endswith(f"damaged: {NAMES[2]}")


def test_swapped_files_say_whose_bytes_they_have(tmp_path):
    path = write(tmp_path)
    one, two = path / "__0_0.distcp", path / "__1_0.distcp"
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    told = [problem.what for problem in find_damage(path)]
    assert (
        "__0_0.distcp in step-00000050 is not what was written: it has the bytes of __1" in told[0]
    )
    assert len(told) == 2


def test_a_missing_file_names_what_it_held_and_counts_the_rest(tmp_path):
    path = write(tmp_path)
    (path / "__1_0.distcp").unlink()
    assert verify_checkpoint(path).what == (
        f"__1_0.distcp is missing in step-00000050; damaged: {', '.join(NAMES[3:])}"
    )


def test_without_a_table_that_can_be_trusted_only_the_file_is_named(tmp_path):
    path = write(tmp_path)
    (path / TENSORS).write_bytes(b"{}")
    broken = bytearray((path / "__0_0.distcp").read_bytes())
    broken[5] ^= 1
    (path / "__0_0.distcp").write_bytes(broken)
    problems = list(find_damage(path))
    assert [problem.code for problem in problems] == ["C005", "C004"]
    assert "damaged" not in problems[0].what


def test_a_checkpoint_of_the_first_form_is_still_read(tmp_path):
    tmp, final = tmp_path / "step-00000007.tmp", tmp_path / "step-00000007"
    tmp.mkdir()
    (tmp / "__0_0.distcp").write_bytes(b"old")
    record = FileRecord(size=3, xxh3_128=xxhash.xxh3_128_hexdigest(b"old"))
    commit(tmp, final, Manifest(step=7, world_size=1, files={"__0_0.distcp": record}, format=1))
    encoded = (final / MANIFEST).read_text()
    assert '"format":1' in encoded
    assert read_manifest(final).format == 1
    assert verify_checkpoint(final) is None
    assert read_tensors(final) is None


@pytest.mark.parametrize("seed", range(3))
def test_any_damage_of_any_file_is_refused(tmp_path, seed):
    path, draw = write(tmp_path), random.Random(seed)
    for _ in range(100):
        file = draw.choice(sorted(path.iterdir()))
        whole = file.read_bytes()
        broken = bytearray(whole)
        start = draw.randrange(len(whole))
        end = draw.randrange(start, len(whole)) + 1
        broken[start:end] = draw.choice([b"", bytes(end - start), draw.randbytes(end - start)])
        if broken == whole:
            continue
        file.write_bytes(broken)
        assert verify_checkpoint(path) is not None, (file.name, start, end)
        file.write_bytes(whole)
