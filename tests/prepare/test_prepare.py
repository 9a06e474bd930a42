"""Sources become prepared data: what is read, counted, refused, kept and resumed."""

import gzip
import importlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.prepare.conftest import a_chat, a_job, make_tokenizer, problem_of, write_rows
from tokenizers import Tokenizer

from paceline.errors import JobError
from paceline.job import parse_job
from paceline.prepare import fingerprint, open_index, prepared
from paceline.prepare import prepare as module
from paceline.prepare.index import open_arrays


def tokens_of(folder: Path, source) -> np.ndarray:
    return np.fromfile(folder / source.folder / "tokens.bin", "<u2")


def documents_of(folder: Path, source) -> list[list[int]]:
    ends = np.load(folder / source.folder / "ends.npy")
    return [part.tolist() for part in np.split(tokens_of(folder, source), ends[:-1])]


def trained_text(folder: Path, source, tokenizer: Tokenizer) -> str:
    tokens = tokens_of(folder, source)
    bits = np.fromfile(folder / source.folder / "trained.bin", np.uint8)
    trained = np.unpackbits(bits, count=len(tokens)).astype(bool)
    return tokenizer.decode(tokens[trained].tolist(), skip_special_tokens=False)


def test_rows_of_text_become_documents_that_end_with_eos(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{"text": "The quick fox"}, {"text": "What is one?"}])
    job = a_job(tmp_path, tokenizer_folder, "path: a.jsonl, seq_len: 4, held_out: 0")
    folder = prepared(job)
    index = open_index(folder)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    (source,) = index.train
    texts = [tokenizer.decode(part[:-1]) for part in documents_of(folder, source)]
    assert texts == ["The quick fox", "What is one?"]
    assert [part[-1] for part in documents_of(folder, source)] == [eos, eos]
    assert (index.pack, index.eos, index.dtype) == ("windows", eos, "uint16")
    assert source.samples == (source.tokens - 1) // 4
    assert source.targets == source.samples * 4


def test_a_file_of_text_is_one_document_and_keeps_a_special_token_as_text(
    tmp_path, tokenizer_folder
):
    (tmp_path / "a.txt").write_text("one <|endoftext|> two\n")
    (tmp_path / "b.txt").write_text("three\n")
    job = a_job(tmp_path, tokenizer_folder, "path: '*.txt', seq_len: 4, held_out: 0")
    folder = prepared(job)
    (source,) = open_index(folder).train
    assert source.documents == 2
    assert (tokens_of(folder, source) == open_index(folder).eos).sum() == 2


def test_a_long_text_is_tokenized_in_pieces_and_stays_one_document(
    tmp_path, tokenizer_folder, monkeypatch
):
    text = "".join(f"line {number} of a text\n" for number in range(50))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr("paceline.prepare.rows.PIECE", 100)
    job = a_job(tmp_path, tokenizer_folder, "path: a.txt, seq_len: 8, held_out: 0")
    folder = prepared(job)
    (source,) = open_index(folder).train
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert source.documents == 1
    assert tokenizer.decode(tokens_of(folder, source)[:-1].tolist()) == text


def test_conversations_are_trained_on_the_assistants_turns_alone(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [a_chat(), a_chat("Hello?", "I am fine.")])
    job = a_job(tmp_path, tokenizer_folder, "path: a.jsonl, seq_len: 64, held_out: 0")
    folder = prepared(job)
    (source,) = open_index(folder).train
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    text = trained_text(folder, source, tokenizer)
    assert text == "It is three.<|im_end|>I am fine.<|im_end|>"
    assert source.targets == len(tokenizer.encode(text).ids)
    assert open_index(folder).pack == "documents"


@pytest.mark.parametrize(
    ("row", "trained"),
    [
        ({"prompt": "one plus two", "completion": " is three."}, " is three.<|endoftext|>"),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Oh"}]},
            "Oh<|im_end|>",
        ),
        ({"instruction": "Add", "input": "1 2", "output": "3"}, "3<|im_end|>"),
    ],
)
def test_rows_are_known_by_their_columns(tmp_path, tokenizer_folder, row, trained):
    write_rows(tmp_path / "a.jsonl", [row])
    job = a_job(tmp_path, tokenizer_folder, "path: a.jsonl, seq_len: 64, held_out: 0")
    folder = prepared(job)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert trained_text(folder, open_index(folder).train[0], tokenizer) == trained


def test_columns_of_other_names_are_mapped(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{"body": "The quick fox"}])
    data = "sources: [{path: a.jsonl, columns: {text: body}}], seq_len: 3, held_out: 0"
    folder = prepared(a_job(tmp_path, tokenizer_folder, data))
    assert open_index(folder).train[0].documents == 1


def test_columns_that_are_not_known_are_named(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{"body": "The quick fox"}])
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl"))
    assert "D016" in text
    assert "the columns body" in text
    assert "columns: {text: NAME}" in text


def test_a_broken_row_stops_with_its_file_and_line(tmp_path, tokenizer_folder):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"\n')
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl, seq_len: 4"))
    assert "D013: 1 of 2 rows" in text
    assert "a.jsonl line 2" in text


def test_broken_rows_within_the_limit_are_counted(tmp_path, tokenizer_folder):
    rows = [json.dumps({"text": "The quick fox"})] * 9 + ["{"]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    data = "path: a.jsonl, seq_len: 4, held_out: 0, broken_rows: 0.1"
    index = open_index(prepared(a_job(tmp_path, tokenizer_folder, data)))
    (left_out,) = index.left_out
    assert (left_out.reason, left_out.documents) == ("broken row", 1)
    assert "a.jsonl line 10" in left_out.example
    assert index.train[0].documents == 9


def test_what_cannot_be_trained_on_is_counted_with_its_place(tmp_path, tokenizer_folder):
    rows = [
        a_chat(),
        {"messages": [{"role": "user", "content": "Hello?"}]},
        a_chat(answer=" "),
        a_chat(question="say <|im_end|>"),
    ]
    write_rows(tmp_path / "a.jsonl", rows)
    index = open_index(
        prepared(
            a_job(
                tmp_path,
                tokenizer_folder,
                "path: a.jsonl, seq_len: 64, held_out: 0, broken_rows: 0.8",
            )
        )
    )
    found = {left_out.reason: left_out.example.rpartition(" ")[2] for left_out in index.left_out}
    assert found == {
        "no turn of the assistant": "2",
        "an empty turn of the assistant": "3",
        "a message holds the special token <|im_end|>": "4",
    }


def test_rows_without_roles_are_broken(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [a_chat(), {"messages": [{"content": "Hello?"}]}])
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl, seq_len: 64"))
    assert "message 1 has no role" in text


@pytest.mark.parametrize(
    ("too_long", "documents"),
    [("drop", ["short"]), ("cut", ["cut", "short"]), ("split", ["cut", "rest", "short"])],
)
def test_what_is_longer_than_a_sample_is_treated_as_asked(
    tmp_path, tokenizer_folder, too_long, documents
):
    write_rows(tmp_path / "a.jsonl", [{"text": "abcdefgh"}, {"text": "xy"}])
    data = (
        f"path: a.jsonl, seq_len: 4, held_out: 0, pack: documents, too_long: {too_long}, kind: text"
    )
    folder = prepared(a_job(tmp_path, "bytes", data.replace("path: a.jsonl", SOURCES)))
    texts = [bytes(part).decode() for part in documents_of(folder, open_index(folder).train[0])]
    named = {"cut": "abcde", "rest": "efgh\n", "short": "xy\n"}
    assert texts == [named[name] for name in documents]


SOURCES = "sources: [{path: a.jsonl}]"


def test_what_is_longer_than_a_sample_is_refused_with_its_share(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "abcdefgh"}, {"text": "xy"}])
    text = problem_of(a_job(tmp_path, "bytes", SOURCES + ", seq_len: 4, pack: documents"))
    assert "D017: 1 of 2 documents of a are longer" in text
    assert "80.0% of the targets" in text


def test_a_document_is_held_out_by_its_content(tmp_path):
    rows = [{"text": f"document {number}"} for number in range(200)]
    write_rows(tmp_path / "a.jsonl", rows)
    write_rows(tmp_path / "b.jsonl", [*rows[::-1], {"text": "one more"}])
    data = "sources: [{path: %s}], seq_len: 4, held_out: 0.1"
    found = []
    for name in ("a.jsonl", "b.jsonl"):
        folder = prepared(a_job(tmp_path, "bytes", data % name))
        (source,) = open_index(folder).held_out
        found.append({bytes(part).decode() for part in documents_of(folder, source)})
        assert (
            open_index(folder).train[0].documents + source.documents == len(rows) + len(found) - 1
        )
    assert found[0] <= found[1]
    assert 5 < len(found[0]) < 40


def test_held_out_files_of_their_own(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "one two three"}])
    write_rows(tmp_path / "b.jsonl", [{"text": "four five"}])
    data = "sources: [{path: a.jsonl}], held_out_path: b.jsonl, seq_len: 4"
    index = open_index(prepared(a_job(tmp_path, "bytes", data)))
    assert [source.name for source in index.held_out] == ["b"]
    assert [source.documents for source in (*index.train, *index.held_out)] == [1, 1]


def test_a_file_is_not_trained_on_and_held_out(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "one two three"}])
    data = "sources: [{path: '*.jsonl'}], held_out_path: a.jsonl, seq_len: 4"
    assert "a.jsonl is trained on and held out" in problem_of(a_job(tmp_path, "bytes", data))


@pytest.mark.parametrize(("pack", "fix"), [("windows", "lower"), ("documents", "raise")])
def test_where_nothing_fits_seq_len_is_changed_the_right_way(tmp_path, pack, fix):
    write_rows(tmp_path / "a.jsonl", [{"text": "one two three"}])
    data = f"sources: [{{path: a.jsonl}}], pack: {pack}, held_out: 0"
    data += ", seq_len: 99" if pack == "windows" else ", seq_len: 4, too_long: drop"
    assert f"fix: {fix} data.seq_len" in problem_of(a_job(tmp_path, "bytes", data))


@pytest.mark.parametrize(
    ("kind", "fix"),
    [("tokens", "{tokens: NAME}"), ("preference", "{chosen: NAME, rejected: NAME}")],
)
def test_columns_that_are_not_found_are_those_of_the_kind(tmp_path, tokenizer_folder, kind, fix):
    write_rows(tmp_path / "a.jsonl", [{"one": "two"}])
    data = f"kind: {kind}, path: a.jsonl, held_out: 0"
    assert f"columns: {fix}" in problem_of(a_job(tmp_path, tokenizer_folder, data))


def test_a_single_text_is_held_out_by_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 80 + "y" * 20)
    data = "sources: [{path: a.txt}], seq_len: 4, held_out: 0.2"
    folder = prepared(a_job(tmp_path, "bytes", data))
    (train,), (held_out,) = open_index(folder).train, open_index(folder).held_out
    assert set(tokens_of(folder, train).tolist()) == {ord("x"), ord("y")}
    assert bytes(tokens_of(folder, held_out).tolist()).decode() == "y" * 19 + "\n"


def test_the_same_job_finds_what_was_prepared_and_other_settings_do_not(tmp_path, monkeypatch):
    write_rows(tmp_path / "a.jsonl", [{"text": "one two three"}])
    job = a_job(tmp_path, "bytes", SOURCES + ", seq_len: 4, held_out: 0")
    folder = prepared(job)
    other = a_job(tmp_path, "bytes", SOURCES + ", seq_len: 5, held_out: 0")
    assert prepared(other) != folder
    monkeypatch.setattr(module, "_prepare", None)  # nothing is prepared again
    assert prepared(job) == folder


def test_an_edit_of_equal_size_makes_other_data(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "one two three"}])
    job = a_job(tmp_path, "bytes", SOURCES + ", seq_len: 4, held_out: 0")
    before = fingerprint(prepared(job))
    write_rows(tmp_path / "a.jsonl", [{"text": "one two thrxe"}])
    assert fingerprint(prepared(job)) != before


def test_a_killed_preparation_is_resumed_file_by_file(tmp_path, monkeypatch):
    for name in "abc":
        write_rows(tmp_path / f"{name}.jsonl", [{"text": f"document {name}"}] * 5)
    data = "sources: [{path: '*.jsonl', name: all}], seq_len: 4, held_out: 0.3"
    job = a_job(tmp_path, "bytes", data)
    made = []
    make_part = module.make_part

    def stops_at_c(folder, file, *rest):
        made.append(Path(file).name)
        if file.endswith("c.jsonl"):
            raise KeyboardInterrupt
        return make_part(folder, file, *rest)

    monkeypatch.setattr(module, "make_part", stops_at_c)
    with pytest.raises(KeyboardInterrupt):
        prepared(job)
    assert made == ["a.jsonl", "b.jsonl", "c.jsonl"]
    made.clear()
    monkeypatch.setattr(
        module, "make_part", lambda *given: made.append(given[1]) or make_part(*given)
    )
    folder = prepared(job)
    assert [Path(file).name for file in made] == ["c.jsonl"]
    (source,) = open_index(folder).train
    monkeypatch.setattr(module, "make_part", make_part)
    clean = tmp_path / "clean"
    fresh = a_job(tmp_path, "bytes", f"{data}, cache: {clean}")
    again = prepared(fresh)
    assert (again / "index.json").read_bytes() == (folder / "index.json").read_bytes()
    assert tokens_of(again, source).tolist() == tokens_of(folder, source).tolist()
    assert not list(clean.glob("*.parts"))


def test_processes_write_the_same_bytes(tmp_path, tokenizer_folder, monkeypatch):
    rows = [a_chat(f"What is {number}?", f"It is {number}.") for number in range(300)]
    write_rows(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr("paceline.prepare.tokenize._SMALL", 0)
    monkeypatch.setattr("paceline.prepare.tokenize._MOST_ROWS", 64)
    folders = [
        prepared(
            a_job(tmp_path, tokenizer_folder, f"path: a.jsonl, seq_len: 64, cache: c{count}"),
            processes=count,
        )
        for count in (1, 2)
    ]
    names = ["index.json", "train/0/tokens.bin", "train/0/trained.bin", "train/0/ends.npy"]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_compressed_rows_are_read(tmp_path):
    import zstandard

    line = json.dumps({"text": "one two three"}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(line * 2))
    data = "sources: [{path: '*.jsonl.*', name: all}], seq_len: 4, held_out: 0"
    assert open_index(prepared(a_job(tmp_path, "bytes", data))).train[0].documents == 3


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{"text": "one"}])
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl", "vocab: 300"))
    assert "D011" in text
    assert "the model's vocabulary is 300" in text


def test_an_unknown_tokenizer_is_an_error(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "one"}])
    assert "D010" in problem_of(a_job(tmp_path, "no-such-folder", "path: a.jsonl"))


@pytest.mark.parametrize(
    ("files", "kind", "words"),
    [
        ({"a.jsonl": '{"text": "one"}\n', "b.txt": "two"}, "auto", "b.txt holds text, and"),
        ({"a.txt": "two", "b.jsonl": '{"text": "one"}\n'}, "auto", "b.jsonl holds rows, and"),
        ({"a.jsonl": '{"text": "one"}\n', "b.bin": "abcd"}, "auto", "b.bin holds tokens, and"),
        ({"a.bin": "abcd"}, "text", "a.bin holds tokens, and data.kind is text"),
        (
            {"a.jsonl": '{"text": "one"}\n' * 200, "b.jsonl": '{"prompt": "one"}\n'},
            "auto",
            "no row of .*b.jsonl can be read as those of .*a.jsonl: .* line 1: it has no text",
        ),
    ],
)
def test_a_source_of_several_kinds_is_refused_by_file_name(
    tmp_path, tokenizer_folder, files, kind, words
):
    (tmp_path / "d").mkdir()
    for name, text in files.items():
        (tmp_path / "d" / name).write_text(text)
    job = a_job(tmp_path, tokenizer_folder, f"path: d, kind: {kind}, seq_len: 4")
    assert re.search(rf"D016: .*{words}", problem_of(job))


def test_text_may_be_in_files_and_in_rows_where_the_job_says_text(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "d" / "b.jsonl", [{"text": "one two three"}])
    (tmp_path / "d" / "a.txt").write_text("two three")
    job = a_job(tmp_path, tokenizer_folder, "path: d, kind: text, seq_len: 4, held_out: 0")
    assert open_index(prepared(job)).train[0].documents == 2


def test_a_row_with_a_token_beyond_the_vocabulary_is_broken(tmp_path, tokenizer_folder):
    write_rows(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 600]}])
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl, seq_len: 2"))
    assert re.search(
        r"a.jsonl line 2: it holds the token 600, and token numbers are below \d+", text
    )


@pytest.mark.parametrize("weights", ["null", "drawn"])
def test_another_tokenizer_than_the_pretrained_models_is_refused(tmp_path, weights):
    own = make_tokenizer(tmp_path / "model") / "tokenizer.json"
    fields = json.loads(own.read_text())
    highest = max(fields["model"]["vocab"].values())
    fields["model"]["vocab"] = {  # all but the special tokens, the other way round
        token: number if number < 3 else highest + 3 - number
        for token, number in fields["model"]["vocab"].items()
    }
    (tmp_path / "other.json").write_text(json.dumps(fields))
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "vocab_size": 512}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    write_rows(tmp_path / "a.jsonl", [{"text": "one two three"}])
    text = f"""
model: {{pretrained: model, tokenizer: other.json, weights: {weights}}}
train: {{global_batch: 2, steps: 3}}
data: {{path: a.jsonl, pack: documents, seq_len: 64, held_out: 0}}
"""
    job = parse_job(text, source="job.yaml", folder=tmp_path)
    if weights == "drawn":
        assert prepared(job)
    else:
        assert re.search("D011: .*tokens of the pretrained model have another", problem_of(job))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [{"role": "user", "content": 5}]},
            "the content of message 1 is int, not text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}]},
            "the content of message 1 is list, not text",
        ),
        ({"instruction": None, "output": "yes"}, "its instruction or input is not text"),
    ],
)
def test_what_is_no_text_is_not_trained_on_as_its_printed_form(
    tmp_path, tokenizer_folder, row, words
):
    write_rows(tmp_path / "a.jsonl", [row])
    text = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.jsonl, seq_len: 64"))
    assert "D013" in text
    assert f"a.jsonl line 1: {words}" in text


def test_parts_of_text_are_one_text(tmp_path, tokenizer_folder):
    question = [{"type": "text", "text": "What is "}, {"type": "text", "text": "one plus two?"}]
    write_rows(tmp_path / "a.jsonl", [a_chat()])
    write_rows(tmp_path / "b.jsonl", [a_chat(question)])
    found = []
    for name in "ab":
        data = f"path: {name}.jsonl, seq_len: 64, held_out: 0"
        folder = prepared(a_job(tmp_path, tokenizer_folder, data))
        found.append(tokens_of(folder, open_index(folder).train[0]).tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "text\none\nh\xe4llo\n".encode("latin-1"), "a.csv line 3: it is not UTF-8"),
        ("a.jsonl.zst", b"no archive", "a.jsonl.zst cannot be read"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "one"}\n', mtime=0)[:-12] + bytes(12),
            "cannot be read",
        ),
    ],
    ids=["csv that is not UTF-8", "zst that is none", "gz that is cut off"],
)
def test_bytes_that_cannot_be_read_are_named(tmp_path, tokenizer_folder, name, content, words):
    (tmp_path / name).write_bytes(content)
    assert words in problem_of(a_job(tmp_path, tokenizer_folder, f"path: {name}, seq_len: 4"))


@pytest.mark.parametrize("eos", ["<|nowhere|>", 5])
def test_a_completion_without_a_token_that_ends_it_is_refused(tmp_path, eos):
    folder = make_tokenizer(tmp_path / "tokenizer")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    write_rows(tmp_path / "a.jsonl", [{"prompt": "one", "completion": "two"}])
    text = problem_of(a_job(tmp_path, folder, "path: a.jsonl, seq_len: 8"))
    assert "names no eos_token that it has" in text


def test_conversations_without_a_template_are_refused(tmp_path):
    folder = make_tokenizer(tmp_path / "plain", template=None)
    write_rows(tmp_path / "a.jsonl", [a_chat()])
    assert "D012" in problem_of(a_job(tmp_path, folder, "path: a.jsonl"))


def test_a_disk_that_is_too_small_is_named_before_the_start(tmp_path, monkeypatch):
    write_rows(tmp_path / "a.jsonl", [{"text": "one"}])
    monkeypatch.setattr("paceline.prepare.refuse._BYTES_A_BYTE", {"uint16": 1e18})
    assert "D015" in problem_of(a_job(tmp_path, "bytes", SOURCES))
    assert not list((tmp_path / ".paceline" / "data").glob("*.parts"))


def test_files_of_a_storage_are_streamed(tmp_path, tokenizer_folder):
    import fsspec

    files = fsspec.filesystem("memory")
    line = json.dumps({"text": "The quick fox"}).encode() + b"\n"
    files.pipe("/bucket/a.jsonl", line * 3)
    data = "sources: [{path: 'memory://bucket/*.jsonl', name: far}], seq_len: 4, held_out: 0"
    first = prepared(a_job(tmp_path, tokenizer_folder, data))
    assert open_index(first).train[0].documents == 3
    files.pipe("/bucket/a.jsonl", line * 4)
    assert prepared(a_job(tmp_path, tokenizer_folder, data)) != first


def test_a_cache_that_cannot_be_made_is_refused(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "one two three"}])
    (tmp_path / "file").write_text("")
    told = problem_of(
        a_job(tmp_path, "bytes", "sources: [{path: a.jsonl}], seq_len: 4, cache: file")
    )
    assert "prepared data cannot be kept in" in told


def test_damaged_prepared_data_name_the_folder_to_delete_and_are_made_again(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": "one two three"}] * 9)
    job = a_job(tmp_path, "bytes", "kind: text, path: a.jsonl, seq_len: 4, held_out: 0")
    folder = prepared(job)
    (folder / "train/0/tokens.bin").write_bytes(b"12")
    with pytest.raises(JobError) as caught:
        prepared(job)
    (problem,) = caught.value.problems
    assert problem.code == "D020"
    assert f"delete {folder} and" in problem.fix
    shutil.rmtree(folder)
    open_arrays(prepared(job), open_index(folder), open_index(folder).train[0])


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("package", "R010: s3://bucket/a.jsonl is read through s3fs_of_nobody, which is not"),
        (ValueError("no such protocol"), "D002: s3://bucket/a.jsonl cannot be read: no such"),
        (RuntimeError("no route"), "D002: s3://bucket/a.jsonl cannot be read: no route"),
    ],
)
def test_a_storage_that_cannot_be_asked_is_named(tmp_path, monkeypatch, error, told):
    def url_to_fs(url):
        if error != "package":
            raise error
        try:
            importlib.import_module("s3fs_of_nobody")
        except ImportError as missing:
            raise ImportError("Install it") from missing

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    data = "sources: [{path: 's3://bucket/a.jsonl'}], seq_len: 4"
    assert told in problem_of(a_job(tmp_path, "bytes", data))


@pytest.mark.parametrize("value", [{"data": [{"text": "one"}]}, ["one", "two"]])
def test_json_without_rows_is_text_only_where_that_is_asked_for(tmp_path, tokenizer_folder, value):
    (tmp_path / "a.json").write_text(json.dumps(value))
    told = problem_of(a_job(tmp_path, tokenizer_folder, "path: a.json, held_out: 0"))
    assert told.startswith(f"D016: {tmp_path / 'a.json'} holds JSON that is no list of rows")
    data = "kind: text, path: a.json, seq_len: 2, held_out: 0"
    assert open_index(prepared(a_job(tmp_path, tokenizer_folder, data))).train[0].documents == 1
