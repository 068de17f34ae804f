"""Vocabulary, arithmetic prompts, prompt files and the split."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.tasks import Examples, arithmetic_task, completion_mask, exact_answer_reward, load_prompts
from rlk_jax.grpo.vocabulary import EOS, PAD, VOCAB_SIZE, decode, encode


def texts(examples: Examples) -> list[tuple[str, str]]:
    rows = zip(np.asarray(examples.prompt_ids), np.asarray(examples.answer_ids), strict=True)
    return [(decode(prompt), decode(answer)) for prompt, answer in rows]


def write_lines(path, lines) -> None:
    path.write_text("".join(line + "\n" for line in lines))


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_every_printable_text_survives_encoding(text):
    ids = encode(text)
    assert all(EOS < i < VOCAB_SIZE for i in ids)
    assert decode([PAD, *ids, EOS, 5, 6]) == text


def test_arithmetic_answers_are_right_and_complete():
    task = arithmetic_task(12)
    pairs = texts(task.train) + texts(task.heldout)
    assert len(pairs) == len(set(pairs)) == 13 * 13
    for prompt, answer in pairs:
        left, right = prompt.removesuffix("=").split("+")
        assert int(answer) == int(left) + int(right)


@pytest.mark.parametrize("max_operand", [4, 9, 69])
def test_heldout_sums_are_never_trained_on_in_either_order(max_operand):
    task = arithmetic_task(max_operand)
    train, heldout = (
        {frozenset(prompt.removesuffix("=").split("+")) for prompt, _ in texts(examples)}
        for examples in (task.train, task.heldout)
    )
    assert heldout
    assert not train & heldout


def test_prompts_are_padded_on_the_left_and_answers_end_with_eos():
    train = arithmetic_task(12).train
    slots = np.arange(train.prompt_ids.shape[1])
    np.testing.assert_array_equal(np.asarray(train.prompt_ids) == PAD, slots < np.asarray(train.padding)[:, None])
    assert len(set(np.asarray(train.padding).tolist())) > 1
    assert ((np.asarray(train.answer_ids) == EOS).sum(axis=1) == 1).all()


def test_completion_mask_ends_with_the_first_eos():
    ids = np.array([[5, EOS, PAD, PAD], [5, 6, 7, 8], [EOS, EOS, 5, EOS]])
    np.testing.assert_array_equal(completion_mask(ids), [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ([5, 6, EOS, PAD], True),
        ([5, 6, EOS, 9], True),  # What follows EOS does not count.
        ([5, 6, PAD, PAD], False),
        ([5, 6, 7, EOS], False),
        ([5, EOS, 6, EOS], False),
    ],
)
def test_reward_is_the_exact_answer_and_eos(completion, reward):
    assert exact_answer_reward(np.array([completion]), np.array([[5, 6, EOS, PAD]])) == [reward]


def test_prompt_file_is_split_without_losing_a_line(tmp_path):
    path = tmp_path / "capitals.jsonl"
    lines = [json.dumps({"prompt": f"capital {i}?", "answer": f"city {i}", "note": 1}) for i in range(20)]
    write_lines(path, [*lines, "", json.dumps({"prompt": "capital 3?", "answer": "town"})])
    task, again = load_prompts(path), load_prompts(path)
    train, heldout = texts(task.train), texts(task.heldout)
    assert len(train) + len(heldout) == 21
    assert not {prompt for prompt, _ in train} & {prompt for prompt, _ in heldout}
    assert task.digest == again.digest != arithmetic_task(4).digest


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("note", ["", "\u2028", "\x85"])
def test_prompt_file_as_editors_write_it(tmp_path, bom, end, note):
    path = tmp_path / "edited.jsonl"
    lines = [json.dumps({"prompt": name, "answer": name, "note": note}, ensure_ascii=False) + end for name in "ab"]
    path.write_bytes((bom + "".join(lines)).encode())
    task = load_prompts(path)
    assert sorted(texts(task.train) + texts(task.heldout)) == [("a", "a"), ("b", "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: "),
        ("[" * 100_000, "not JSON: nested too deep"),
        ("[1]", 'expected an object {"prompt": ..., "answer": ...}'),
        ('{"prompt": "a"}', '"answer" must be a non-empty string'),
        ('{"prompt": "", "answer": "b"}', '"prompt" must be a non-empty string'),
        ('{"prompt": "a", "answer": 3}', '"answer" must be a non-empty string'),
        ('{"prompt": "\\u00e9", "answer": "b"}', "character 'é' is not printable ASCII"),
    ],
)
def test_bad_line_is_named_with_its_file_and_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    write_lines(path, ['{"prompt": "a", "answer": "b"}', line])
    with pytest.raises(BadInput) as error:
        load_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2: {message}")
    assert "\n" not in str(error.value)


def test_file_that_cannot_be_split_or_read(tmp_path):
    path = tmp_path / "short.jsonl"
    write_lines(path, ['{"prompt": "a", "answer": "b"}'] * 2)
    with pytest.raises(BadInput, match="needs at least 2 different prompts to hold one out, found 1"):
        load_prompts(path)
    with pytest.raises(BadInput, match="cannot read prompts file"):
        load_prompts(tmp_path / "absent.jsonl")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="cannot read prompts file"):
        load_prompts(path)
