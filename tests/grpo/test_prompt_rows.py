"""Files of prompts with columns: what is read from them, and which line is wrong in which way."""

import json

import pytest

from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.prompt_rows import read_rows

FORM = '; a line reads {"prompt": "2+2=", "answer": "4"} or '
FORM += '{"prompt": [{"role": "user", "content": "2+2="}], "answer": "4"}'
CHAT = [{"role": "system", "content": ""}, {"role": "user", "content": "日本の首都?", "name": "é"}]


def chat(message: str) -> str:
    """A line whose prompt has a good message and then this one, which is JSON."""
    return '{"prompt": [{"role": "user", "content": "a"}, ' + message + "]}"


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_texts_and_chats_are_read_with_their_columns(tmp_path, bom, end):
    lines = [
        {"prompt": "2+2=", "answer": 4, "note": "\u2028"},
        {"prompt": CHAT, "hints": [None, {"a": 0.5}], "answer": "東京"},
        {"answer": None, "prompt": "2+2="},
    ]
    first, *others = [json.dumps(line, ensure_ascii=False) for line in lines]
    path = tmp_path / "rows.jsonl"
    path.write_bytes((bom + end.join([first, "", "  \t", *others])).encode())
    rows = read_rows(path)
    assert rows.prompts == ["2+2=", CHAT, "2+2="]
    assert list(rows.columns) == ["answer", "note", "hints"]
    assert rows.columns == {
        "answer": [4, "東京", None],
        "note": ["\u2028", None, None],
        "hints": [None, [None, {"a": 0.5}], None],
    }
    assert rows.lines == [1, 4, 5]
    assert rows.lacking == {"answer": [], "note": [4, 5], "hints": [1, 5]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: "),
        ("[1]", "a JSON array, where each line must hold one object of its own"),
        ("7", "expected an object, got a number"),
        ('{"answer": "a"}', '"prompt" is missing'),
        ('{"prompt": ""}', '"prompt" must not be empty'),
        ('{"prompt": []}', '"prompt" must not be empty'),
        ('{"prompt": 3}', '"prompt" must be a string or an array of chat messages, got a number'),
        ('{"prompt": null}', '"prompt" must be a string or an array of chat messages, got null'),
        ('{"prompt": "a\\ud83d"}', "\"prompt\" holds '\\ud83d', a lone surrogate, which is no character"),
        ('{"prompt": "a", "hint": [{"b": "\\udfff"}]}', "\"hint\" holds '\\udfff', a lone surrogate"),
        (chat('"b"'), 'message 2 of "prompt": expected an object with "role" and "content", got a string'),
        (chat('{"content": "b"}'), 'message 2 of "prompt": "role" is missing'),
        (chat('{"role": "", "content": "b"}'), 'message 2 of "prompt": "role" must not be empty'),
        (chat('{"role": "user"}'), 'message 2 of "prompt": "content" is missing'),
        (
            chat('{"role": "user", "content": [{"type": "text"}]}'),
            'message 2 of "prompt": "content" must be a string, got an array',
        ),
        (
            chat('{"role": "user", "content": "b", "tool_calls": []}'),
            'message 2 of "prompt": "tool_calls" must be a string, got an array',
        ),
        (chat('{"role": "user", "content": "\\ud83d"}'), 'message 2 of "prompt": "content" holds \'\\ud83d\', a lone'),
        ('{"prompt": "a", "prompts": 1}', '"prompts" is what reward functions are given anyway; give the column'),
        ('{"prompt": "a", "completions": 1}', '"completions" is what reward functions are given anyway; give the'),
    ],
)
def test_bad_row_is_named_with_its_file_and_line(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(BadInput) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}, line 3: {message}")
    assert str(error.value).endswith(FORM)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "\ufeff\n \n"])
def test_a_file_without_rows(tmp_path, text):
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        read_rows(path)
    assert str(error.value) == f"{path}: there is no line with a prompt{FORM}"


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(BadInput, match=r"cannot read file .*absent\.jsonl: .*No such file"):
        read_rows(tmp_path / "absent.jsonl")
    (path := tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(BadInput, match=r"cannot read file .*latin: 'utf-8' codec"):
        read_rows(path)
