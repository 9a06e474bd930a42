"""`paceline data check`: what is found in data files, and what is said of it."""

import gzip
import json
import random

import numpy as np
import pytest
from click.testing import CliRunner
from tests.prepare.conftest import a_chat, write_rows

from paceline.cli.data import command
from paceline.errors import JobError
from paceline.prepare.similar import Fingerprints, place_numbers
from paceline.prepare.words import shingles_of, words_of

WORDS = [f"word{number}" for number in range(4000)]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def a_text(seed: int, length: int = 120) -> list[str]:
    return random.Random(seed).choices(WORDS, k=length)


def texts(count: int, first: int = 0) -> list[dict]:
    return [{"id": n, "text": " ".join(a_text(first + n))} for n in range(count)]


def checked(*arguments: str, code: int | None = None) -> dict:
    result = CliRunner().invoke(
        command, ["check", *arguments, "--json"], catch_exceptions=False, standalone_mode=False
    )
    if code is not None:
        assert result.return_value == code, result.output
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    with pytest.raises(JobError) as caught:
        CliRunner().invoke(command, ["check", *arguments], catch_exceptions=False)
    return str(caught.value)


def findings(data: dict, check: str) -> list[tuple[str, str | None, int | None, str]]:
    return [
        (each["severity"], each["where"]["path"], each["where"]["line"], each["what"])
        for each in data["findings"]
        if each["id"] == f"data-{check}"
    ]


def test_s0_17_data_check_ends_with_0_1_and_2(tmp_path):
    write_rows(tmp_path / "good.jsonl", texts(5))
    assert checked("good.jsonl", code=0)["findings"] == []
    (tmp_path / "schema.json").write_text('{"required": ["text", "language"]}')
    assert checked("good.jsonl", "--schema", "schema.json", code=1)["errors"] == 1
    assert "D001" in refused("nothing.jsonl")
    (tmp_path / "empty").mkdir()
    assert "D001: empty is no file, and no folder" in refused("empty")
    assert JobError.exit_code == 2


@pytest.mark.parametrize(
    "form", ["jsonl", "jsonl.gz", "jsonl.zst", "json", "csv", "parquet", "arrow"]
)
def test_s0_17_each_form_is_checked_with_types_ranges_patterns_lengths_and_enums(tmp_path, form):
    rows = [
        {"id": n, "score": n / 10, "code": f"A-{n}", "kind": "a", "text": f"text {n}"}
        for n in range(10)
    ]
    rows[2]["score"] = 7.5
    rows[3]["code"] = "wrong"
    rows[4]["kind"] = "z"
    rows[5]["text"] = ""
    rules = {
        "id": {"type": "integer"},
        "score": {"type": "number", "maximum": 1},
        "code": {"pattern": "^A-[0-9]+$"},
        "kind": {"enum": ["a", "b"]},
        "text": {"type": "string", "minLength": 1},
    }
    (tmp_path / "schema.json").write_text(json.dumps({"properties": rules, "required": [*rules]}))
    file = write_as(tmp_path / f"rows.{form}", rows)
    data = checked(file, "--schema", "schema.json", code=1)
    first = 2 if form == "csv" else 1
    assert {(line, what.split(": ", 1)[1]) for _, _, line, what in findings(data, "schema")} == {
        (2 + first, "score: maximum 1"),
        (3 + first, 'code: pattern "^A-[0-9]+$"'),
        (4 + first, 'kind: enum ["a","b"]'),
        (5 + first, "text: minLength 1"),
    }
    assert data["columns"]["text"] == {"str": 9, "null": 1}


def write_as(path, rows: list[dict]) -> str:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        path.write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        cells = [list(rows[0]), *(row.values() for row in rows)]
        path.write_text("".join(",".join(map(str, row)) + "\n" for row in cells))
    elif path.suffix in (".parquet", ".arrow"):
        pyarrow = pytest.importorskip("pyarrow")
        table = pyarrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            from pyarrow import parquet

            parquet.write_table(table, path)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
    else:
        path.write_text(lines)
    return path.name


def test_s0_17_exact_and_near_duplicates_are_counted_with_both_places(tmp_path):
    rows = texts(300)
    rows.append({"id": 900, "text": rows[7]["text"]})
    edited = a_text(11)
    edited[60] = "another"
    rows.append({"id": 901, "text": " ".join(edited).upper()})
    write_rows(tmp_path / "a.jsonl", rows)
    data = checked("a.jsonl", code=0)
    assert (data["duplicates"]["exact"], data["duplicates"]["near"]) == (1, 1)
    (exact,), (near,) = (data["duplicates"]["pairs"][kind] for kind in ("exact", "near"))
    assert (exact["row"], exact["like"]) == ("a.jsonl:301", "a.jsonl:8")
    assert (near["row"], near["like"]) == ("a.jsonl:302", "a.jsonl:12")
    assert near["similarity"] == pytest.approx(111 / 121, abs=0.08)  # 5 of 116 shingles differ
    assert checked("a.jsonl", "--near", "0")["duplicates"]["near"] is None
    assert checked("a.jsonl", "--limit", "near-duplicates=0", code=1)["errors"] == 1


def test_s0_17_near_duplicates_are_the_same_when_hashes_are_sorted_in_parts(tmp_path, monkeypatch):
    texts = [" ".join(a_text(n % 150, 40)) + f" {n}" for n in range(600)]

    def found(folder):
        folder.mkdir()
        kept = Fingerprints(folder, near=True)
        for at in range(0, 600, 100):
            words = words_of(texts[at : at + 100])
            kept.add(
                text=np.arange(at + 1, at + 101, dtype=np.uint64),
                label=np.zeros(100, np.uint64),
                place=place_numbers(0, list(range(at, at + 100))),
                words=words.hashes,
                starts=words.starts,
            )
        similar = kept.compare(num_train=500, threshold=0.8)
        return similar.near, similar.leaked_near

    whole = found(tmp_path / "whole")
    monkeypatch.setattr("paceline.prepare.similar._AT_ONCE", 64)
    assert found(tmp_path / "parts") == whole == (350, 100)


def test_s0_17_rows_that_are_too_short_to_be_nearly_alike_are_counted(tmp_path):
    short = ["one two three four five", "one two three four six", "One, two three four FIVE!"]
    long = [f"{' '.join(a_text(40))} {end}" for end in "mn"]
    thirteen = ["a b c d e f g h i j k l m"]
    write_rows(tmp_path / "a.jsonl", [{"text": text} for text in (*short, *thirteen, *long)])
    data = checked("a.jsonl")["duplicates"]
    assert (data["short"], data["short_words"]) == (3, 13)
    assert data["near"] == 2  # the first in other letters, and the last but one word
    assert checked("a.jsonl", "--near", "0.5")["duplicates"]["short_words"] == 7
    assert checked("a.jsonl", "--near", "0.99")["duplicates"]["short_words"] == 203
    for near in ("0.995", "1"):  # more words than are counted apart: no count is no false one
        data = checked("a.jsonl", "--near", near)["duplicates"]
        assert (data["short"], data["short_words"]) == (None, None)


def test_shingles_of_a_short_text_are_one_and_languages_without_spaces_have_words():
    words = words_of(["one two", "", "Ein Satz mit fünf Wörtern, genau!", "日本語の文章"])
    assert np.diff(words.starts).tolist() == [2, 0, 6, 6]
    _, edges = shingles_of(words.hashes, words.starts)
    assert np.diff(edges).tolist() == [1, 0, 2, 2]
    assert words.num_letters.tolist()[2:8] == [3, 4, 3, 4, 7, 5]


def test_s0_17_leakage_between_train_and_eval_is_exact_and_near(tmp_path):
    write_rows(tmp_path / "train.jsonl", texts(50))
    edited = a_text(20)
    edited[0] = "changed"
    evals = [*texts(3), {"id": 1, "text": " ".join(edited)}, *texts(5, first=500)]
    write_rows(tmp_path / "eval.jsonl", evals)
    data = checked("train.jsonl", "--eval", "eval.jsonl", code=1)
    said = {what.split(";")[0] for _, _, _, what in findings(data, "leakage")}
    assert said == {
        "3 of 9 evaluation rows are exactly rows that are trained on",
        "1 of 9 evaluation rows is nearly rows that are trained on",
    }
    assert findings(data, "leakage")[0][:3] == ("error", "eval.jsonl", 1)
    (near,) = data["duplicates"]["pairs"]["leaked_near"]
    assert (near["row"], near["like"]) == ("eval.jsonl:4", "train.jsonl:21")
    assert data["duplicates"]["near"] == 0
    assert "is on both sides" in refused("train.jsonl", "--eval", "train.jsonl")


def test_s0_17_the_splits_of_a_folder_are_told_apart_by_name_and_compared(tmp_path):
    (tmp_path / "data/val").mkdir(parents=True)
    write_rows(tmp_path / "data/train.jsonl", texts(20))
    write_rows(tmp_path / "data/latest-reviews.jsonl", texts(5, first=50))
    write_rows(tmp_path / "data/my_test-00000-of-00001.jsonl", [*texts(3), *texts(2, first=90)])
    write_rows(tmp_path / "data/val/part-0.jsonl", texts(5, first=500))
    data = checked("data", code=1)
    assert (data["rows"], data["eval_rows"]) == (25, 10)
    (leak,) = findings(data, "leakage")
    assert leak[3].startswith("3 of 10 evaluation rows are exactly rows that are trained on")
    said = CliRunner().invoke(command, ["check", "data", "--near", "0"]).output
    assert "note: data/my_test-00000-of-00001.jsonl, data/val/part-0.jsonl: evaluated on" in said
    each = checked(*(str(file) for file in sorted((tmp_path / "data").rglob("*.jsonl"))))
    assert (each["rows"], each["eval_rows"]) == (35, 0)
    assert checked("data/val", code=0)["rows"] == 5


def test_s0_17_token_lengths_are_counted_against_seq_len(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "x" * 50}])
    data = checked("a.jsonl", "--tokenizer", "bytes", "--seq-len", "10")
    assert (data["lengths"]["median"], data["lengths"]["longest"]) == (3, 50)
    (finding,) = findings(data, "too-long")
    assert finding[2] == 2
    with_own = checked("a.jsonl", "--tokenizer", str(tokenizer_folder), "--seq-len", "200")
    assert with_own["lengths"]["longest"] <= 50
    assert findings(with_own, "too-long") == []
    assert "D010" in refused("a.jsonl", "--tokenizer", "missing")


def test_s0_17_a_jobs_data_are_measured_as_the_job_makes_them(tmp_path, tokenizer_folder):
    long = a_chat("What?", "It is three. " * 40)
    write_rows(tmp_path / "a.jsonl", [a_chat(), long, {"messages": [{"role": "wizard"}]}])
    (tmp_path / "job.yaml").write_text(
        "model:\n  decoder: {layers: 1, hidden: 8, heads: 1, vocab: 512}\n"
        f"  tokenizer: {tokenizer_folder}\ntrain: {{global_batch: 2, steps: 3}}\n"
        "data: {path: a.jsonl, seq_len: 64, held_out: 0}\n"
    )
    data = checked("--job", "job.yaml", code=1)
    assert [each[:3] for each in findings(data, "too-long")] == [("error", "a.jsonl", 2)]
    assert [each[2] for each in findings(data, "broken-rows")] == [3]
    dropped = checked(
        "--job", "job.yaml", "--set", "data.too_long=drop", "--limit", "broken-rows=1"
    )
    assert dropped["errors"] == 0


def test_s0_17_classes_have_an_imbalance_and_equal_texts_other_labels_a_conflict(tmp_path):
    rows = [{"text": " ".join(a_text(n)), "label": "yes" if n else "no"} for n in range(40)]
    write_rows(tmp_path / "a.jsonl", [*rows, {**rows[5], "label": "no"}])
    data = checked("a.jsonl")
    assert data["classes"] == {"yes": 39, "no": 2}
    assert data["imbalance"] == 19.5
    assert "19.5 to 1" in findings(data, "imbalance")[0][3]
    assert findings(data, "label-conflicts")[0][1:3] == ("a.jsonl", 41)


def test_s0_17_broken_empty_and_odd_rows_are_named_by_file_and_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "one"}\n{"text": \n\n[1]\n{"text": "\xff\xfe"}\n{"text": " "}\n{"text": 5}\n'
    )
    data = checked("a.jsonl", code=1)
    assert {line for _, _, line, _ in findings(data, "broken-rows")} == {2, 4, 5}
    assert findings(data, "empty-rows")[0][2] == 6
    assert "`text` holds" in findings(data, "mixed-types")[0][3]
    assert data["rows"] == 3


def test_s0_17_a_quote_that_is_never_closed_is_named_by_the_line_that_opens_it(tmp_path):
    (tmp_path / "a.csv").write_text('id,text\n1,hello\n2,"open\n3,fine\n4,ok\n')
    assert [line for _, _, line, _ in findings(checked("a.csv", code=1), "broken-rows")] == [3]


def test_s0_17_a_column_that_stands_twice_in_a_line_is_a_broken_row(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "one", "n": {"text": "\\"text\\""}}\n{"text": "a", "text": "b"}\n'
    )
    ((_, _, line, what),) = findings(checked("a.jsonl", code=1), "broken-rows")
    assert line == 2
    assert "the column text stands twice: the last one counts" in what


def test_s0_17_a_truncated_file_is_an_error_and_the_others_are_read(tmp_path):
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in texts(2000)).encode())
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "d" / "not.parquet").write_bytes(b"PAR1 no parquet at all")
    (tmp_path / "d" / "none.jsonl").write_text("")
    (tmp_path / "d" / "README.md").write_text("about")
    write_rows(tmp_path / "d" / "good.jsonl", texts(3, first=9000))
    data = checked("d", code=1)
    broken = {path: what for _, path, _, what in findings(data, "broken-files")}
    assert set(broken) == {"d/cut.jsonl.gz", "d/not.parquet"}
    assert "cannot be read" in broken["d/cut.jsonl.gz"]
    assert findings(data, "empty-files")[0][1] == "d/none.jsonl"
    assert data["rows"] >= 3
    assert not any("README" in file for file in data["files"])


def test_s0_17_data_without_any_row_are_an_error(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    assert findings(checked("none.jsonl", code=1), "empty-files")[0][0] == "error"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz"])
def test_text_of_another_encoding_is_named_with_the_command_that_converts_it(encoding, name):
    text = '{"text": "hi"}\n'.encode(encoding)
    with open(name, "wb") as file:
        file.write(gzip.compress(text) if name.endswith(".gz") else text)
    ((_, path, _, what),) = findings(checked(name), "broken-files")
    assert path == name
    assert f"is {encoding.upper()} text" in what
    assert f"iconv -f {encoding.upper()} -t UTF-8 {name}" in what


def test_a_line_longer_than_is_read_into_memory_is_broken_and_the_next_is_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("paceline.prepare.rows.MOST_OF_A_LINE", 1 << 20)
    long = json.dumps({"text": "x" * (3 << 20)})
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{long}\n{{"text": "b"}}\n')
    data = checked("a.jsonl")
    assert data["rows"] == 2
    assert findings(data, "broken-rows")[0][2:] == (
        2,
        "1 of 3 rows cannot be read (33.33%): the line is longer than 1 MiB",
    )


def test_s0_17_blank_lines_are_counted_and_other_encodings_named_in_plain_words(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n \n{"text": "caf\xe9"}\n')
    data = checked("a.jsonl")
    assert (data["rows"], data["blank_lines"]) == (1, 2)
    assert findings(data, "broken-rows")[0][2:] == (
        4,
        "1 of 2 rows cannot be read (50.00%): it is not UTF-8",
    )


def test_s0_17_keys_and_personal_data_are_found_and_never_shown(tmp_path):
    key, card = "AKIA" + "Q" * 16, "4111 1111 1111 1111"
    rows = [
        {"text": f"use {key} now"},
        {"text": f"call +49 30 901820 or pay with {card}"},
        {"text": "mail ada@lovelace.org, IBAN DE89 3704 0044 0532 0130 00"},
        {"text": "AKIAIOSFODNN7EXAMPLE, user@example.com, 2024-01-02, 1234567890123456, v1.2.3"},
    ]
    write_rows(tmp_path / "a.jsonl", rows)
    data = checked("a.jsonl", code=1)
    assert [each[:3] for each in findings(data, "secrets")] == [("error", "a.jsonl", 1)]
    kinds = {(line, what.partition("holds ")[2]) for _, _, line, what in findings(data, "personal")}
    assert kinds == {
        (2, "a phone number (25.00%)"),
        (2, "a card number (25.00%)"),
        (3, "an e-mail address (25.00%)"),
        (3, "a bank account (IBAN) (25.00%)"),
    }
    assert key not in json.dumps(data)
    assert card not in json.dumps(data)


def test_s0_17_damaged_and_repeated_texts_are_found(tmp_path):
    rows = [
        {"text": "caf\u00c3\u00a9"},
        {"text": "a \ufffd b"},
        {"text": "bell \x07"},
        {"text": "same line of menu\n" * 20},
        {"text": "12 34 56 78 " * 20},
        {"text": " ".join(["plain", "prose", "is", "good"] * 20)},
    ]
    write_rows(tmp_path / "a.jsonl", rows)
    found = {line for _, _, line, _ in findings(checked("a.jsonl"), "text-quality")}
    assert found == {1, 2, 3, 4, 5}


def test_s0_17_columns_that_are_not_there_are_refused_with_the_nearest(tmp_path):
    write_rows(tmp_path / "a.jsonl", texts(2))
    assert "did you mean `text`?" in refused("a.jsonl", "--columns", "txet")
    assert "D022: no row has a column `class`" in refused("a.jsonl", "--label", "class")


def test_s0_17_rows_of_numbers_are_compared_by_all_columns(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,label\n1,2,a\n3,4,b\n1,2,b\n")
    data = checked("a.csv")
    assert data["compared"] == []
    assert data["duplicates"]["exact"] == 1
    assert findings(data, "label-conflicts")[0][2] == 4


def test_s0_17_token_files_are_checked_by_documents(tmp_path):
    tokens = np.random.default_rng(0).integers(1, 60000, 400).astype("<u2")
    np.concatenate([tokens, tokens]).tofile(tmp_path / "a.bin")
    lengths = np.asarray([400, 400], "<i4")
    header = b"MMIDIDX\x00\x00" + np.asarray([1], "<u8").tobytes() + b"\x08"
    header += np.asarray([2, 3], "<u8").tobytes()
    (tmp_path / "a.idx").write_bytes(header + lengths.tobytes() + b"\0" * 40)
    data = checked("a.bin")
    assert (data["rows"], data["duplicates"]["exact"], data["lengths"]["longest"]) == (2, 1, 400)
    (tmp_path / "odd.bin").write_bytes(b"123")
    assert "odd" in findings(checked("odd.bin", code=1), "broken-files")[0][3]


def test_a_schema_that_is_none_is_refused_with_what_to_give(tmp_path):
    write_rows(tmp_path / "a.jsonl", texts(1))
    for text in ('{"type": "objekt"}', '{"propertys": {}}', "[1]", "{", '{"$ref": "http://a/b"}'):
        (tmp_path / "s.json").write_text(text)
        assert "D022: s.json is no JSON Schema" in refused("a.jsonl", "--schema", "s.json")


def test_the_page_and_the_text_hold_every_finding(tmp_path):
    write_rows(tmp_path / "a.jsonl", [*texts(3), {"id": 1, "text": "<b> hf_" + "a" * 34}])
    arguments = ["check", "a.jsonl", "--html", "page.html"]
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    assert result.return_value == 1
    assert "error: data-secrets: a.jsonl:4: 1 of 4 rows holds a Hugging Face token" in result.stdout
    assert "1 error, 0 warnings" in result.stdout
    page = (tmp_path / "page.html").read_text()
    assert "holds a Hugging Face token" in page
    assert "a.jsonl:4" in page
    assert "hf_aaa" not in page + result.stdout


def test_reasons_for_broken_rows_count_together_against_their_limit(tmp_path):
    lines = [json.dumps(row) for row in texts(300)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{a", "[1]", '{"a": "b', ""]))
    assert checked("a.jsonl", code=0)["errors"] == 0  # 3 of 303
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{a", "[1]", "[1]", '{"a": "b', ""]))
    assert {each[0] for each in findings(checked("a.jsonl", code=1), "broken-rows")} == {"error"}


def test_a_json_value_a_column_named_twice_and_an_empty_name_are_not_passed_over(tmp_path):
    (tmp_path / "a.json").write_text('{"text": "one row"}')
    assert "no list of rows" in findings(checked("a.json", code=1), "broken-files")[0][3]
    (tmp_path / "a.csv").write_text("a,a\n1,2\n")
    assert "column a twice" in findings(checked("a.csv", code=1), "broken-rows")[0][3]
    result = CliRunner().invoke(command, ["check", ""])
    assert result.exit_code == 2
    assert "it is empty" in result.output


def test_the_answer_is_printed_where_it_cannot_be_kept(tmp_path, monkeypatch):
    write_rows(tmp_path / "d" / "a.jsonl", texts(2))
    write_rows(tmp_path / "d" / "b.jsonl", texts(2, first=50))
    paths = ("d/a.jsonl", "d/b.jsonl")

    def unreadable(files, cache):
        raise JobError.of(code="D002", what="b cannot be read", where="b", fix="")

    monkeypatch.setattr("paceline.prepare.checked.contents_of", unreadable)
    result = CliRunner().invoke(command, ["check", *paths], standalone_mode=False)
    assert result.return_value == 0
    assert "note: the result is not kept for plan and preflight: b cannot be read" in result.stderr
    assert "4 rows" in result.stdout


def test_s4_22_the_results_of_a_program_that_is_not_known_are_of_no_known_form(tmp_path):
    write_rows(tmp_path / "a.jsonl", texts(1))
    (tmp_path / "dbt.json").write_text('{"results": [{"status": "fail", "unique_id": "x"}]}')
    told = refused("a.jsonl", "--quality-report", "dbt.json")
    assert "it has none of the forms that are known" in told


def test_a_job_file_is_no_data_file(tmp_path):
    """It was read as one row of text, and nothing was found in it."""
    (tmp_path / "job.yaml").write_text("data: {path: data/*.jsonl}\n")
    result = CliRunner().invoke(command, ["check", "job.yaml"])
    assert result.exit_code == 2
    assert "Check a job's data with --job job.yaml." in result.output
