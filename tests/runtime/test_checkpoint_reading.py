import msgspec
import pytest
import xxhash
from tests.ranks import run_ranks
from tests.runtime.tiny import build, layout_of, train_steps

from paceline.errors import CheckpointError
from paceline.job import CheckpointSpec
from paceline.record import checkpoints
from paceline.record.checkpoints import read_manifest
from paceline.record.tensors import TENSORS, Piece, TensorRecord, hashed_places, read_tensors
from paceline.runtime.checkpoint import Checkpointer, _read
from paceline.runtime.digest import state_digest

pytestmark = pytest.mark.ranks


def saved(rank, world, folder, sharding):
    layout = layout_of(world, sharding)
    model, optimizer = build(layout)
    train_steps(model, optimizer, layout, rank, range(1))
    Checkpointer(folder, CheckpointSpec()).save(1, model, optimizer)
    return state_digest(model, optimizer)


def restored(rank, world, folder, sharding, *, other_frames=False):
    if other_frames:
        _read.frame_of = lambda shape, dtype: (b"another version's", b"")
    if rank > 0:  # they are told by rank 0 what is there
        checkpoints.list_checkpoints = None
        checkpoints.read_manifest = None
    model, optimizer = build(layout_of(world, sharding), seed=9)
    result = Checkpointer(folder, CheckpointSpec()).restore_newest(model, optimizer)
    return result.step, state_digest(model, optimizer)


def refused(rank, world, folder, sharding):
    model, optimizer = build(layout_of(world, sharding), seed=9)
    try:
        Checkpointer(folder, CheckpointSpec()).restore_newest(model, optimizer)
    except CheckpointError as error:
        return str(error)
    return None


def restored_in_other_frames(rank, world, folder, sharding):
    return restored(rank, world, folder, sharding, other_frames=True)


def commit_again(path, files):
    """Have a checkpoint's manifest list these files."""
    manifest = read_manifest(path)
    encoded = msgspec.json.encode({**msgspec.to_builtins(manifest), "format": 1, "files": files})
    (path / "manifest.json").write_bytes(encoded)
    (path / "COMMIT").write_text(xxhash.xxh3_128_hexdigest(encoded))


def make_form_1(path):
    files = dict(msgspec.to_builtins(read_manifest(path).files))
    del files[TENSORS]
    (path / TENSORS).unlink()
    commit_again(path, files)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.repeat), 2])
def test_a_checkpoint_of_form_1_is_read_and_its_damage_found(tmp_path, world):
    (digest,) = run_ranks(saved, 1, tmp_path, "none")
    path = tmp_path / "step-00000001"
    make_form_1(path)
    assert run_ranks(restored, world, tmp_path, "full") == [(1, digest)] * world
    flip(path / "__0_0.distcp", -1)
    (reason, *others) = run_ranks(refused, world, tmp_path, "full")
    assert reason.startswith("C005: __0_0.distcp in step-00000001 is not what was written")
    assert others == [reason] * (world - 1)


def test_records_that_another_version_of_torch_framed_are_read(tmp_path):
    (digest,) = run_ranks(saved, 1, tmp_path, "none")
    assert run_ranks(restored_in_other_frames, 2, tmp_path, "full") == [(1, digest)] * 2


def test_damage_in_a_tensor_that_every_rank_reads_a_part_of_is_named(tmp_path):
    run_ranks(saved, 1, tmp_path, "none")
    path = tmp_path / "step-00000001"
    table = read_tensors(path)
    name, piece = max(
        ((name, piece) for name, record in table.items() for piece in record.pieces),
        key=lambda each: each[1].length,
    )
    flip(path / piece.file, piece.start + piece.length // 2)
    reasons = run_ranks(refused, 2, tmp_path, "full")
    assert reasons[0].startswith("C005")
    assert f"damaged: {name}" in reasons[0]
    assert reasons[1] == reasons[0]


def test_a_disk_that_reads_damage_once_is_not_trusted(tmp_path):
    run_ranks(saved, 1, tmp_path, "none")
    (reason,) = run_ranks(refused_once, 1, tmp_path)
    assert "read again it is right" in reason


def refused_once(rank, world, folder):
    fill = _read._fill

    def fill_wrong(descriptor, start, memory, digest):
        fill(descriptor, start, memory, digest)
        digest.update(b"more")

    _read._fill = fill_wrong
    return refused(rank, world, folder, "none")


def test_a_file_that_its_parts_do_not_cover_is_compared_whole():
    def piece(start, length):
        return Piece(
            file="a", start=start, length=length, offset=(0,), shape=(1,), xxh3_128=f"{start}"
        )

    def table(*pieces):
        return {"t": TensorRecord(size=(1,), dtype="float32", pieces=pieces)}

    files = {"a": (10, "whole")}
    covering = hashed_places(table(piece(4, 6), piece(0, 4)), files)
    assert covering == {("a", 0, 4): "0", ("a", 4, 6): "4"}
    for gaps in (table(piece(0, 4)), table(piece(0, 4), piece(5, 5)), table(piece(1, 9))):
        assert hashed_places(gaps, files) == {("a", 0, 10): "whole"}
