"""The file of a run's samples: what is kept when a run goes on, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from genesis.errors import DataError
from genesis.train.metrics import SAMPLES_NAME, Sample, append_samples, keep_samples, read_samples


def test_samples_come_back_and_are_cut(tmp_path: Path) -> None:
    found = [Sample(5, "a\n\u2028", "b\x1b"), Sample(5, "", ""), Sample(10, "ü", "\ud800")]
    append_samples(tmp_path, found[:2])
    append_samples(tmp_path, found[2:])
    assert list(read_samples(tmp_path)) == found
    with open(tmp_path / SAMPLES_NAME, "ab") as file:
        file.write(b'{"step": 15, "pro')  # a crash in the middle of a line
    assert list(read_samples(tmp_path)) == found
    keep_samples(tmp_path, 9)
    assert list(read_samples(tmp_path)) == found[:2]
    append_samples(tmp_path, found[2:])
    assert list(read_samples(tmp_path)) == found
    keep_samples(tmp_path, None)
    assert not (tmp_path / SAMPLES_NAME).exists() and list(read_samples(tmp_path)) == []
    keep_samples(tmp_path, 3)


@pytest.mark.parametrize("line", ["{}", "[]", "no", '{"step": "1", "prompt": "", "text": ""}',
                                  '{"step": 1, "prompt": null, "text": ""}'])  # fmt: skip
def test_what_is_no_sample_is_named(tmp_path: Path, line: str) -> None:
    append_samples(tmp_path, [Sample(1, "a", "b")])
    with open(tmp_path / SAMPLES_NAME, "a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"samples\.jsonl:2"):
        list(read_samples(tmp_path))
