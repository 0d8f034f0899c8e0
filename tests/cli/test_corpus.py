"""The text: complete, reproducible, and never the same in both parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pycomm.tools.cli.demo.model import Corpus, random_starts, read_corpus, source_files, windows


def library(root: Path, num_files: int) -> Path:
    for number in range(num_files):
        (root / f"m{number:02d}.py").write_text(f"file {number:02d}")
    for folder in ("site-packages", "test", "email/tests"):
        (root / folder).mkdir(parents=True)
        (root / folder / "a.py").write_text("not this")
    (root / "m00.txt").write_text("nor this")
    return root


def test_the_standard_library_is_there() -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 5_000_000
    assert len(corpus.validation) > 200_000
    assert corpus.train.dtype == torch.uint8


def test_files_are_split_and_tests_left_out(tmp_path: Path) -> None:
    corpus = read_corpus(library(tmp_path, 25))
    train, validation = bytes(corpus.train.tolist()).decode(), bytes(corpus.validation.tolist()).decode()
    assert validation == "file 09\nfile 19"
    assert train.split("\n") == [f"file {i:02d}" for i in range(25) if i % 10 != 9]


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="9 .py files below"):
        source_files(library(tmp_path, 9))
    with pytest.raises(ValueError, match="context is 8"):
        random_starts(torch.zeros(8, dtype=torch.uint8), 8, (1,), 0)


def test_windows_reach_both_ends_and_targets_are_one_further() -> None:
    text = torch.arange(10, dtype=torch.uint8)
    corpus = Corpus(text, text)
    starts = random_starts(corpus.train, 8, (100,), seed=1)
    assert set(starts.tolist()) == {0, 1}
    assert torch.equal(starts, random_starts(corpus.train, 8, (100,), seed=1))
    inputs, targets = windows(text, torch.tensor([0, 1]), 8)
    assert inputs.tolist() == [list(range(8)), list(range(1, 9))]
    assert targets.tolist() == [list(range(1, 9)), list(range(2, 10))]
