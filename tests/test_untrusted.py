"""Readers of untrusted data: special files, JSON of another shape, text for a terminal."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycomm import untrusted
from pycomm.agreement import results_in
from pycomm.untrusted import COUNT, ListOf, MapOf, Number, OneOf

SHAPE = {"ask": OneOf("push", "pull"), "number": COUNT, "rate?": Number(0), "parts": ListOf({"name": str})}
GOOD: dict[str, Any] = {"ask": "push", "number": 3, "rate": 0.5, "parts": [{"name": "a", "more": [1]}], "else": None}
EVIL = "\x1b]0;owned\x07"


@pytest.mark.timeout(20)
def test_what_has_the_shape_is_returned() -> None:
    assert untrusted.parse(json.dumps(GOOD), SHAPE, "it") == GOOD
    without = {key: value for key, value in GOOD.items() if key != "rate"}
    assert untrusted.parse(json.dumps(without), SHAPE, "it") == without
    assert untrusted.parse('{"a": 1, "b": 2}', MapOf(COUNT), "it") == {"a": 1, "b": 2}
    assert untrusted.parse("[null, true]", ListOf(OneOf(None, bool)), "it") == [None, True]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ask": "stop"}, 'f is malformed: ask is "stop", wanted "push" or "pull"'),
        ({"number": -1}, "f is malformed: number is -1, wanted an integer >= 0"),
        ({"number": True}, "number is true, wanted an integer"),
        ({"number": 1.5}, r"number is 1\.5, wanted an integer"),
        ({"number": 10**30}, "number is an integer beyond 64 bits, wanted"),
        ({"rate": float("nan")}, "rate is NaN, wanted a finite number >= 0"),
        ({"rate": "x" * 1000}, r"rate is .{80}\.\.\., wanted"),
        ({"parts": {}}, "parts is an object, wanted a list"),
        ({"parts": [{"name": "a"}, {"name": 5}]}, r"f is malformed: parts\[1\]\.name is 5, wanted a string"),
        ({"parts": [[]]}, r"parts\[0\] is a list, wanted an object"),
        ({"parts": [{}]}, r"f is malformed: it has no 'parts\[0\]\.name'"),
    ],
)
def test_what_has_not_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        untrusted.parse(json.dumps({**GOOD, **change}), SHAPE, "f")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "f is nested too deeply"),
        ("{" * 50, "f is not valid JSON"),
        (b"\xff\xfe\x00", "f is not valid JSON"),
        ("", "f is not valid JSON"),
        ("9" * 10_000, "f is not valid JSON"),
        ("[]", "f is malformed: it is a list, wanted an object"),
    ],
)
def test_what_is_no_json_is_an_error(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        untrusted.parse(text, SHAPE, "f")


@pytest.mark.timeout(20)
def test_keys_have_a_shape_too() -> None:
    assert untrusted.parse('{"a": 1}', MapOf(COUNT), "it") == {"a": 1}
    untrusted.require({3: "a"}, MapOf(str, key=COUNT), "it")
    for key, shown in ((-3, "-3"), ("3", '"3"'), (b"", "a bytes")):
        with pytest.raises(ValueError, match=f"f is malformed: a key of it is {shown}, wanted an integer >= 0"):
            untrusted.require({key: "a"}, MapOf(str, key=COUNT), "f")


@pytest.mark.timeout(20)
def test_what_is_printed_is_what_the_shape_names() -> None:
    value = {"ask": "push", "number": 3, "parts": [{"name": "a\x1b[2J\nb", "more": "\x07"}], "else": "\x07"}
    assert untrusted.printable(value, SHAPE) == {
        "ask": "push",
        "number": 3,
        "parts": [{"name": "a\\x1b[2J\\nb"}],
    }
    assert untrusted.printable({"a\t": [None, "\r"]}, MapOf(ListOf(OneOf(None, str)))) == {"a\\t": [None, "\\r"]}


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@pytest.mark.timeout(60)
@given(value=VALUES | st.fixed_dictionaries({"ask": VALUES, "number": VALUES, "parts": VALUES}))
def test_whatever_comes_is_an_error_or_has_the_shape(value: Any) -> None:
    try:
        found = untrusted.parse(json.dumps(value), SHAPE, "it")
    except ValueError:
        return
    assert found["ask"] in ("push", "pull")
    assert found["number"] >= 0
    assert all(isinstance(part["name"], str) for part in found["parts"])


@pytest.mark.timeout(20)
def test_texts_for_a_terminal_lose_their_control_characters() -> None:
    assert (
        untrusted.escaped("a\x1b]0;owned\x07\x9b31m\u202e\ud800é\n\tb")
        == "a\\x1b]0;owned\\x07\\x9b31m\\u202e\\ud800é\n\tb"
    )


@pytest.mark.timeout(20)
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert untrusted.read_file(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(ValueError, match="file has more than 4 bytes"):
        untrusted.read_file(tmp_path / "file", most=4)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "a FIFO"), (tmp_path / "link", "a FIFO"), ("/dev/zero", "a device")):
        with pytest.raises(ValueError, match=f"{path} is {kind}, wanted a regular file"):
            untrusted.open_file(path)
        with pytest.raises(ValueError, match=f"{path} is {kind}, wanted a regular file"):
            untrusted.open_output(path)
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder, wanted a regular file"):
        untrusted.open_output(tmp_path)
    with pytest.raises((ValueError, OSError), match="directory|folder"):
        untrusted.open_file(tmp_path)
    with pytest.raises(ValueError, match=r"'a\\x00b' is not a path"):
        untrusted.open_file("a\0b")
    with pytest.raises(OSError, match="/proc/self/mem"):
        untrusted.read_file("/proc/self/mem", most=5)


@pytest.mark.timeout(20)
def test_files_are_made_in_the_place_of_whatever_was_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    for _ in range(2):
        with untrusted.create_file(tmp_path / "file") as file:
            file.write(b"12")
        with untrusted.open_output(tmp_path / "file") as file:
            file.write(b"3")
        assert (tmp_path / "file").read_bytes() == b"32"
        (tmp_path / "file").rename(tmp_path / "elsewhere")
        (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere").read_bytes() == b"32"


@pytest.mark.timeout(20)
def test_what_others_may_have_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    untrusted.require_own_folder(tmp_path)
    untrusted.open_file(path, own=True).close()
    path.chmod(0o662)
    with pytest.raises(ValueError, match="file can be written by other users"):
        untrusted.open_file(path, own=True)
    tmp_path.chmod(0o1777)
    with pytest.raises(ValueError, match="can be written by other users"):
        untrusted.require_own_folder(tmp_path)
    with pytest.raises(ValueError, match="file is a regular file, wanted a folder"):
        untrusted.require_own_folder(path)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="link is a link, wanted a folder"):
        untrusted.require_own_folder(tmp_path / "link")


@pytest.mark.timeout(20)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    os.chown(path, 12345, 12345)
    with pytest.raises(ValueError, match=r"file belongs to another user \(12345\)"):
        untrusted.open_file(path, own=True)


@pytest.mark.timeout(20)
def test_what_other_ranks_write_cannot_reach_the_terminal() -> None:
    """Reports of failures and notes about them come from a store that others may reach."""
    report = json.dumps({"problem": f"no\n{EVIL}", "kind": "ValueError", "value": None}).encode()
    with pytest.raises(ValueError, match=r"rank 0 could not begin: no\n\\x1b\]0;owned\\x07"):
        results_in([report], "begin")
