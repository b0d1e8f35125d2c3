"""From sources to a run's data: split, tokenizer, baseline, fingerprints, and what stops a changed run."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from genesis.data import pipeline
from genesis.data.corpus import Corpus
from genesis.data.loader import PackedLoader
from genesis.data.pipeline import Prepared, gzip_bytes
from genesis.data.tokenizer import train_bpe
from genesis.errors import DataError
from genesis.train.config import WeightedSource
from tests.data.helpers import TEXTS, prepared, raised, run_python, write_corpus

PREPARE = """
import json, sys
from pathlib import Path
from genesis.data.loader import PackedLoader
from tests.data.helpers import prepared
data = prepared(Path(sys.argv[1]), Path(sys.argv[2]))
loader = PackedLoader(data.train, batch_size=2, seq_len=32, seed=3)
print(json.dumps([loader.state(), loader.batch(2, 1).input_ids.tolist(), data.held_out.gzip_bits_per_byte]))
"""


def loader_of(data: Prepared) -> PackedLoader:
    return PackedLoader(data.train, batch_size=2, seq_len=32, seed=3)


def names(data: Prepared) -> tuple[set[str], set[str]]:
    assert data.held_out
    train, held_out = data.train.index, data.held_out.tokens.index
    return {train.name(n) for n in range(len(train))}, {held_out.name(n) for n in range(len(held_out))}


def text_of(name: str) -> str:
    return TEXTS[int(Path(name).stem)]


def test_the_documents_are_divided_and_the_held_out_bytes_are_exact(corpus_folder: Path, tmp_path: Path) -> None:
    data = prepared(corpus_folder, tmp_path / "cache")
    train, held_out = names(data)
    assert len(train) + len(held_out) == len(train | held_out) == len(TEXTS)
    assert 2 <= len(held_out) <= 16
    assert data.held_out and data.held_out.tokens.total_bytes == sum(len(text_of(name).encode()) for name in held_out)
    ids = data.tokenizer.encode(text_of(data.train.index.name(4))).tolist()
    start, length = int(data.train.starts[4]), int(data.train.lengths[4])
    assert data.train.stream[start : start + length].tolist() == [0, *ids, 0]


def test_the_tokenizer_learns_from_the_training_documents_only(tmp_path: Path) -> None:
    # Each text has a word of its own, which becomes a token only where the text is trained on.
    words = [f"{chr(97 + n)}{chr(110 - n)}qx" for n in range(14)]
    folder = write_corpus(tmp_path / "corpus", [f"{word} " * (20 + n) for n, word in enumerate(words)])
    data = prepared(folder, tmp_path / "cache", vocab_size=1000, eval_fraction=0.4)
    train, held_out = names(data)
    for group, is_known in ((train, True), (held_out, False)):
        assert {len(data.tokenizer.encode(f" {words[int(Path(name).stem)]}")) == 1 for name in group} == {is_known}
    expected = train_bpe(((folder / name).read_text() for name in sorted(train)), vocab_size=1000)
    assert data.tokenizer.files() == expected.files()


def test_the_baseline_is_gzip_on_each_held_out_file_alone(corpus_folder: Path, tmp_path: Path) -> None:
    data = prepared(corpus_folder, tmp_path / "cache")
    texts = [text_of(name).encode() for name in names(data)[1]]
    compressed = 0
    for text in texts:
        gzip = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
        compressed += len(gzip.compress(text) + gzip.flush())
    assert data.held_out and data.held_out.gzip_bits_per_byte == 8 * compressed / sum(map(len, texts))


def test_the_baseline_compresses_as_well_as_gzip_can() -> None:
    text = Path(argparse.__file__).read_text("utf-8")
    sizes = [len(zlib.compress(text.encode(), level)) for level in (6, 9)]
    header_and_checksum = 18 - 6
    assert gzip_bytes([text]) == sizes[1] + header_and_checksum < sizes[0] + header_and_checksum
    lines = text.splitlines(keepends=True)  # as records of one file, of which none pays for a header
    assert gzip_bytes(lines) == gzip_bytes([text]) < sum(gzip_bytes([line]) for line in lines) / 2


def test_a_second_start_makes_nothing(corpus_folder: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    settings: dict[str, Any] = {"progress": lambda *step: steps.append(step)}
    first = prepared(corpus_folder, tmp_path / "cache", **settings)
    assert {stage for stage, _, _ in steps} == {"train a tokenizer", "tokenize"}
    assert all(0 <= done <= total for _, done, total in steps)
    assert (first.report.tokenizer, first.report.tokens) == ("made", "made")
    steps.clear()
    second = prepared(corpus_folder, tmp_path / "cache", **settings)
    assert (second.report.tokenizer, second.report.tokens, steps) == ("found", "found", [])
    assert loader_of(first).state() == loader_of(second).state()


def test_a_damaged_tokenizer_in_the_cache_is_trained_again(corpus_folder: Path, tmp_path: Path) -> None:
    first = prepared(corpus_folder, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").glob("tokenizer-*")
    entry.write_bytes(b"{}")
    second = prepared(corpus_folder, tmp_path / "cache")
    assert second.report.tokenizer == "rebuilt"
    assert second.tokenizer.fingerprint == first.tokenizer.fingerprint


def test_named_held_out_sources(corpus_folder: Path, tmp_path: Path) -> None:
    held_out = write_corpus(tmp_path / "eval", ["a new text\n", TEXTS[3], TEXTS[4]])
    (held_out / "bad.jsonl").write_text("{\n")
    data = prepared(
        corpus_folder, tmp_path / "cache", eval_sources=[str(held_out)], eval_fraction=None, on_error="skip"
    )
    assert len(data.train) == len(TEXTS) and data.held_out and len(data.held_out.tokens) == 3
    assert data.report.shared_documents == 2
    assert data.held_out.defects.counts == {"bad JSON": 1} and data.report.defects.counts == {}


def test_sets_of_held_out_sources(corpus_folder: Path, tmp_path: Path) -> None:
    held_out = write_corpus(tmp_path / "eval", ["a new text\n", "another\n", TEXTS[3], "last"])
    (held_out / "sub").mkdir()
    (held_out / "sub" / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n")

    def sets(**sources: Any) -> dict[str, int]:
        data = prepared(corpus_folder, tmp_path / "cache", eval_sources=sources, eval_fraction=None)
        assert data.held_out is not None and len(data.train) == len(TEXTS)
        found = data.held_out.sets
        assert sum(each.num_targets for each in found.values()) == data.held_out.tokens.num_targets
        return {name: each.total_bytes for name, each in found.items()}

    one, two, three = (str(held_out / f"00{n}.txt") for n in (0, 1, 3))
    assert sets(b=[one], a=[two, f"{held_out}/003.*"]) == {"b": 11, "a": 12}
    os.symlink(one, tmp_path / "link.txt")
    for sources, where, what in (
        ({"a": [one, two], "b": [str(held_out)]}, "data.eval.b", "is also in data.eval.a"),
        ({"a": [one], "b": [str(tmp_path / "link.txt")]}, "data.eval.b", "is also in data.eval.a"),
        ({"a": [one], "b": [f"{three}x"]}, "data.eval.b", "matches no file"),
        ({"a": [one], "b": [str(held_out / "sub")]}, "", "no sample of data.eval.b"),
    ):
        with pytest.raises(DataError, match=what) as caught:
            sets(**sources)
        assert caught.value.exit_code == 4 and caught.value.where == where


@pytest.mark.parametrize("fraction", [0.0, None])
def test_nothing_is_held_out_where_nothing_is_asked_for(
    corpus_folder: Path, tmp_path: Path, fraction: float | None
) -> None:
    data = prepared(corpus_folder, tmp_path / "cache", eval_fraction=fraction)
    assert data.held_out is None and len(data.train) == len(TEXTS)


def test_a_given_tokenizer_is_used(corpus_folder: Path, tmp_path: Path) -> None:
    other = train_bpe(["other text " * 9], vocab_size=270)
    other.save(tmp_path / "tokenizer")
    data = prepared(corpus_folder, tmp_path / "cache", tokenizer_path=tmp_path / "tokenizer")
    assert data.report.tokenizer == "given" and data.tokenizer.fingerprint == other.fingerprint


def test_sources_of_which_nothing_is_left_are_an_error(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus", ["", "\n"])
    with pytest.raises(DataError, match=r"no usable document; left out: 2.*000\.txt:1: the file is empty"):
        prepared(folder, tmp_path / "cache", on_error="skip")


def test_the_end_of_a_single_text_file_is_held_out_from_a_line_on(tmp_path: Path) -> None:
    lines = [f"line {n} of a single file\n" for n in range(100)]
    folder = write_corpus(tmp_path / "corpus", ["".join(lines)])
    data = prepared(folder, tmp_path / "cache", eval_fraction=0.05, train_sources=[str(folder / "000.txt")])
    assert data.held_out is not None
    tail = "".join(lines[95:])
    assert [len(data.train), len(data.held_out.tokens)] == [1, 1]
    assert data.held_out.tokens.total_bytes == len(tail)
    assert data.train.total_bytes == len("".join(lines[:95]))
    assert data.held_out.tokens.index.name(0) == data.report.tail == f"{folder}/000.txt:96"
    tokens = data.held_out.tokens
    ids = tokens.stream[tokens.starts[0] : tokens.starts[0] + tokens.lengths[0]]
    assert data.tokenizer.decode(ids.tolist()) == tail
    assert prepared(folder, tmp_path / "cache", eval_fraction=0.05).report.tokens == "found"


@pytest.mark.parametrize(
    "text,tail",
    [
        ("one two three four five six seven eight nine ten", "nine ten"),
        ("a\n" + "x" * 50 + " " + "y" * 12, "y" * 12),
        ("a\nb\n\n\n\n\n\n\n", "b\n\n\n\n\n\n\n"),
    ],
)
def test_a_single_text_without_lines_is_cut_before_a_word(tmp_path: Path, text: str, tail: str) -> None:
    folder = write_corpus(tmp_path / "corpus", [text])
    corpus = Corpus([str(folder)], on_error="fail", max_line_bytes=1024)
    corpus.hold_out_tail(0.2)
    if tail.startswith("b"):
        with pytest.raises(DataError, match="its last 20%"):
            list(corpus.documents())
    else:
        assert [document.text for document in corpus.documents()] == [text.removesuffix(tail), tail]


@pytest.mark.parametrize("texts", [["alone"], ["twice", "twice"]])
def test_one_document_without_lines_or_copies_of_one_cannot_be_divided(tmp_path: Path, texts: list[str]) -> None:
    folder = write_corpus(tmp_path / "corpus", texts)
    with pytest.raises(DataError, match=r"only.* document.*data\.eval"):
        prepared(folder, tmp_path / "cache")


def test_files_that_are_no_text_are_counted_and_not_read(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "corpus")
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a record"}\n'))
    (folder / "shot.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (folder / "mislabelled.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (folder / "table.psv").write_bytes(b"a|b\n1|2\n")
    data = prepared(folder, tmp_path / "cache", train_sources=[str(folder)])
    assert str(data.report.files) == "files read: 40 text, 1 jsonl.gz; not read: 2 png, 1 table"
    assert len(data.train) + len(data.held_out.tokens if data.held_out else []) == 41


def test_sources_without_any_text_say_what_was_found(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"GIF89a\x01\0")
    with pytest.raises(DataError, match=r"of data\.train hold no text; not read: 1 gif.*UTF-8 text, JSONL"):
        prepared(folder, tmp_path / "cache")
    (folder / "a.txt").rename(folder / "a.gif")
    with pytest.raises(DataError, match=r"the sources hold no text; not read: 1 gif.*UTF-8 text, JSONL"):
        prepared(folder, tmp_path / "cache", train_sources=[str(folder)])


def test_a_large_corpus_trains_its_tokenizer_on_a_sample(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepared(corpus_folder, tmp_path / "cache")
    for limit, least in ((sum(map(len, TEXTS)) // 3, 3), (1, 1)):
        monkeypatch.setattr(pipeline, "MAX_BPE_BYTES", limit)
        index = whole.train.index
        chosen = pipeline._sample(index, index.text_bytes > 0)
        assert least <= chosen.sum() < len(index) * 0.7
        assert prepared(corpus_folder, tmp_path / "cache").tokenizer.vocab_size <= 320


def test_a_corpus_of_just_the_most_bytes_trains_its_tokenizer_on_nothing_held_out(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = prepared(corpus_folder, tmp_path / "cache").train.index
    is_training = index.text_bytes > index.text_bytes.min()
    assert 0 < is_training.sum() < len(index)
    monkeypatch.setattr(pipeline, "MAX_BPE_BYTES", int(index.text_bytes[is_training].sum()))
    assert pipeline._sample(index, is_training).tolist() == is_training.tolist()


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\n")


def test_one_byte_more_in_the_data_stops_a_resumed_run(corpus_folder: Path, tmp_path: Path) -> None:
    data = prepared(corpus_folder, tmp_path / "cache")
    state = json.loads(json.dumps(loader_of(data).state()))
    for group in names(data):
        path = Path(min(group))
        content = path.read_bytes()
        append(path)
        changed = loader_of(prepared(corpus_folder, tmp_path / "cache"))
        assert raised(partial(changed.load_state, state)) == "DataError 4"
        path.write_bytes(content)
    held_out = write_corpus(tmp_path / "eval", ["held out"])
    settings: dict[str, Any] = {"eval_sources": [str(held_out)], "eval_fraction": None}
    named = loader_of(prepared(corpus_folder, tmp_path / "cache", **settings)).state()
    append(held_out / "000.txt")
    changed = loader_of(prepared(corpus_folder, tmp_path / "cache", **settings))
    assert raised(partial(changed.load_state, named)) == "DataError 4"
    (corpus_folder / "new.txt").write_text("one document more")
    more = loader_of(prepared(corpus_folder, tmp_path / "cache"))
    assert raised(partial(more.load_state, state)) == "DataError 4"
    (corpus_folder / "new.txt").unlink()
    restored = loader_of(prepared(corpus_folder, tmp_path / "cache"))
    assert raised(partial(restored.load_state, state)) == ""


def test_another_tokenizer_stops_a_resumed_run(corpus_folder: Path, tmp_path: Path) -> None:
    data = prepared(corpus_folder, tmp_path / "cache")
    data.tokenizer.save(tmp_path / "same")
    train_bpe(TEXTS[:5], vocab_size=300).save(tmp_path / "other")
    state = loader_of(data).state()
    for name, expected in (("same", ""), ("other", "ModelError 5")):
        loader = loader_of(prepared(corpus_folder, tmp_path / "cache", tokenizer_path=tmp_path / name))
        assert raised(partial(loader.load_state, state)) == expected


def test_two_processes_with_caches_of_their_own_prepare_the_same(corpus_folder: Path, tmp_path: Path) -> None:
    first = run_python(PREPARE, corpus_folder, tmp_path / "one", PYTHONHASHSEED="1", RAYON_NUM_THREADS="1")
    second = run_python(PREPARE, corpus_folder, tmp_path / "two", PYTHONHASHSEED="2", RAYON_NUM_THREADS="3")
    assert first == second


def test_no_clock_and_no_file_time_plays_a_part(
    corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepared(corpus_folder, tmp_path / "cache")
    for path in corpus_folder.iterdir():
        os.utime(path, (4e9, 4e9))

    def asked() -> NoReturn:
        raise AssertionError("a clock was asked")

    with monkeypatch.context() as patch:
        for name in ("time", "time_ns", "monotonic", "perf_counter", "localtime", "gmtime"):
            patch.setattr(time, name, asked)
        found = prepared(corpus_folder, tmp_path / "cache")
        again = prepared(corpus_folder, tmp_path / "other")
    assert (found.report.tokens, again.report.tokens) == ("found", "made")
    assert loader_of(found).state() == loader_of(again).state() == loader_of(data).state()
    for kind in ("tokens", "tokenizer", "gzip"):
        (first,) = (tmp_path / "cache").glob(f"{kind}-*")
        assert first.read_bytes() == (tmp_path / "other" / first.name).read_bytes()


def test_importing_the_data_package_does_not_import_the_tokenizers_library() -> None:
    program = "import json, sys, genesis.data; print(json.dumps('tokenizers' in sys.modules))"
    assert run_python(program) is False


def test_an_epoch_has_the_documents_of_a_source_as_often_as_its_weight_says(tmp_path: Path) -> None:
    few, many = write_corpus(tmp_path / "few", TEXTS[:10]), write_corpus(tmp_path / "many", TEXTS[10:])
    sources: list[Any] = [str(few), WeightedSource(path=f"{many}/*", weight=3)]
    plain = prepared(few, tmp_path / "cache", train_sources=[str(few), str(many)])
    data = prepared(few, tmp_path / "cache", train_sources=sources)
    names = [data.train.index.name(document) for document in data.train.documents]
    weights = data.train.weights
    assert weights is not None
    assert weights.tolist() == [1.0 if name.startswith(f"{few}/") else 3.0 for name in names]
    assert set(weights.tolist()) == {1.0, 3.0}
    loader = PackedLoader(data.train, batch_size=2, seq_len=64, seed=0)
    seen = sum(loader.batch(0, number).num_targets for number in range(loader.num_batches(0)))
    assert seen == int((weights * data.train.target_counts).sum())
    # Held-out documents are measured once each, and weights are part of what a resumed run must find again.
    assert data.held_out is not None and data.held_out.tokens.weights is None
    assert plain.train.weights is None and plain.train.data_fingerprint != data.train.data_fingerprint
    ones: list[Any] = [WeightedSource(path=str(few)), str(many)]
    assert prepared(few, tmp_path / "cache", train_sources=ones).train.data_fingerprint == plain.train.data_fingerprint
