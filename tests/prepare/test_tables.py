"""Rows of parquet, arrow, csv and tsv files, and folders as `datasets` saves them."""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tests.prepare.conftest import a_chat, a_job, write_rows

from paceline.errors import JobError
from paceline.prepare import open_index, prepared

ROWS = [{"text": f"The quick fox, {number}", "id": number} for number in range(5)]
TABLE = pyarrow.Table.from_pylist(ROWS)


def write_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(TABLE, path, row_group_size=2)


def write_arrow_file(path: Path) -> None:
    with pyarrow.ipc.new_file(path, TABLE.schema) as file:
        file.write_table(TABLE, max_chunksize=2)


def write_saved_folder(path: Path) -> None:
    """As `Dataset.save_to_disk(path, num_shards=2)` of datasets 5.2 does: arrow streams, and two
    files of JSON."""
    path.mkdir()
    names = [f"data-0000{number}-of-00002.arrow" for number in (0, 1)]
    for name, part in zip(names, (TABLE.slice(0, 3), TABLE.slice(3)), strict=True):
        with pyarrow.ipc.new_stream(path / name, TABLE.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (path / "state.json").write_text(json.dumps(state, indent=2))
    (path / "dataset_info.json").write_text(json.dumps({"citation": ""}, indent=2))


def write_table(path: Path) -> None:
    with path.open("w", newline="") as file:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        writer = csv.DictWriter(file, ["text", "id"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


def tokens_in(folder: Path, name: str) -> list[int]:
    data = f"sources: [{{path: {name}, name: all}}], seq_len: 4, held_out: 0"
    ready = prepared(a_job(folder, "bytes", data))
    (source,) = open_index(ready).train
    assert source.documents == len(ROWS)
    return np.fromfile(ready / source.folder / "tokens.bin", "<u2").tolist()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.parquet", write_parquet),
        ("a.arrow", write_arrow_file),
        ("a.feather", write_arrow_file),
        ("saved", write_saved_folder),
        ("a.csv", write_table),
        ("a.tsv", write_table),
    ],
)
def test_a_table_has_the_tokens_of_the_same_rows_as_jsonl(tmp_path, name, write):
    write_rows(tmp_path / "rows.jsonl", ROWS)
    write(tmp_path / name)
    assert tokens_in(tmp_path, name) == tokens_in(tmp_path, "rows.jsonl")


def test_conversations_are_read_from_parquet(tmp_path, tokenizer_folder):
    chats = [a_chat(), a_chat("Hello?", "I am fine.")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "a.parquet")
    write_rows(tmp_path / "a.jsonl", chats)
    found = []
    for name in ("a.parquet", "a.jsonl"):
        data = f"path: {name}, seq_len: 64, held_out: 0"
        ready = prepared(a_job(tmp_path, tokenizer_folder, data))
        (source,) = open_index(ready).train
        found.append((ready / source.folder / "tokens.bin").read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_is_refused_by_name(tmp_path, name):
    write = write_parquet if name == "a.parquet" else write_arrow_file
    write(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(JobError, match=rf"D002: .*{name} cannot be read"):
        tokens_in(tmp_path, name)


def test_a_folder_of_several_splits_is_refused_with_their_names(tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    for split in ("test", "train"):
        write_saved_folder(tmp_path / "all" / split)
    with pytest.raises(JobError, match="D016: all holds the splits test, train") as caught:
        tokens_in(tmp_path, "all")
    assert caught.value.problems[0].fix.endswith("all/train")
    assert tokens_in(tmp_path, "all/train")
