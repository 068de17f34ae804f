"""Vocabulary, arithmetic prompts, prompt files and the split."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk_jax.grpo import tasks
from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.tasks import (
    Examples,
    arithmetic_task,
    completion_mask,
    exact_answer_reward,
    load_prompts,
    load_task,
)
from rlk_jax.grpo.vocabulary import EOS, PAD, VOCAB_SIZE, Characters
from tests.grpo import tiny

FORM = '; a line reads {"prompt": "2+2=", "answer": "4"}'
STRANGE = [("Zeile\n\tzwei\x00?", "ja\n"), ("日本の首都", "東京"), ("e\u0301 or é", "🦄"), ("plain", "text\u2028")]
"""Prompts and answers with line ends, control characters and characters of one to four bytes."""


ASCII = Characters()


def texts(examples: Examples, characters: Characters = ASCII) -> list[tuple[str, str]]:
    rows = zip(np.asarray(examples.prompt_ids), np.asarray(examples.answer_ids), strict=True)
    return [(characters.decode(prompt), characters.decode(answer)) for prompt, answer in rows]


def write_lines(path, lines) -> None:
    path.write_text("".join(line + "\n" for line in lines))


def write_pairs(path, pairs) -> None:
    write_lines(path, [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs])


@given(st.lists(st.text()))
def test_every_text_survives_encoding(some):
    characters = Characters.of(some)
    for text in some:
        ids = characters.encode(text)
        assert all(EOS < i < characters.size for i in ids)
        assert characters.decode([PAD, *ids, EOS, 5, 6]) == text


def test_other_characters_have_ids_behind_those_of_printable_ascii():
    """Ids of printable ASCII must not change: the bits of arithmetic runs depend on them."""
    characters = Characters.of(["é\n", "日é~", " "])
    assert VOCAB_SIZE == 97
    assert characters.encode(" 0~\né日") == [2, 18, 96, 97, 98, 99]
    assert characters.size == 100
    assert characters == Characters.of("日\né")
    assert Characters.of(["2+2=", "4"]).size == arithmetic_task(4).vocab_size == VOCAB_SIZE


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
    assert task.digests == again.digests != arithmetic_task(4).digests


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
        ("[1]", "a JSON array, where each line must hold one object of its own"),
        ('"a"', "expected an object, got a string"),
        ("7", "expected an object, got a number"),
        ('{"prompt": "a"}', '"answer" is missing'),
        ('{"answer": "a"}', '"prompt" is missing'),
        ('{"prompt": "", "answer": "b"}', '"prompt" must not be empty'),
        ('{"prompt": "a", "answer": ""}', '"answer" must not be empty'),
        ('{"prompt": "a", "answer": 3}', '"answer" must be a string, got a number'),
        ('{"prompt": ["a"], "answer": "b"}', '"prompt" must be a string, got an array'),
        ('{"prompt": "a", "answer": {}}', '"answer" must be a string, got an object'),
        ('{"prompt": "a", "answer": true}', '"answer" must be a string, got a boolean'),
        ('{"prompt": "a", "answer": null}', '"answer" must be a string, got null'),
        (
            '{"prompt": "a\\ud83d", "answer": "b"}',
            "\"prompt\" holds '\\ud83d', a lone surrogate, which is no character",
        ),
    ],
)
def test_bad_line_is_named_with_its_file_and_number(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    write_lines(path, ['{"prompt": "a", "answer": "b"}', line])
    with pytest.raises(BadInput) as error:
        load_prompts(path)
    assert str(error.value).startswith(f"{path}, line 2: {message}")
    assert str(error.value).endswith(FORM)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_named_at_its_first_line(tmp_path, indent):
    path = tmp_path / "array.jsonl"
    path.write_text(json.dumps([{"prompt": name, "answer": name} for name in "ab"], indent=indent))
    with pytest.raises(BadInput) as error:
        load_prompts(path)
    assert str(error.value) == f"{path}, line 1: a JSON array, where each line must hold one object of its own{FORM}"


@pytest.mark.parametrize("is_ascii", [False, True])
def test_prompts_of_any_characters_are_taken(tmp_path, is_ascii):
    path = tmp_path / "strange.jsonl"
    lines = [json.dumps({"prompt": p, "answer": a}, ensure_ascii=is_ascii) for p, a in STRANGE]
    path.write_bytes("\n".join(lines).encode())
    task, characters = load_prompts(path), Characters.of(text for pair in STRANGE for text in pair)
    assert sorted(texts(task.train, characters) + texts(task.heldout, characters)) == sorted(STRANGE)
    assert task.vocab_size == characters.size == VOCAB_SIZE + len("\n\t\x00日本の首都東京\u0301é🦄\u2028")
    steps = tiny.build_steps(config := tiny.config(prompts=str(path)), task, tiny.make_mesh(config))
    params = jax.eval_shape(steps.initial_state).params
    assert params["embed"]["embedding"].shape[0] == params["lm_head"]["kernel"].shape[1] == task.vocab_size


def test_the_digest_tells_other_characters_apart(tmp_path):
    digests, path = set(), tmp_path / "pairs.jsonl"
    answers = ["é", "è", "e\u0301", "\\u00e9", "\n", "\\n"]
    for answer in answers:
        write_pairs(path, [("a", answer), ("b", "b")])
        digests.add(load_prompts(path).digests["prompts_digest"])
    assert len(digests) == len(answers)


def test_vocab_size_must_hold_the_characters_of_the_file(tmp_path):
    path = tmp_path / "strange.jsonl"
    write_pairs(path, [("é", "a"), ("b", "b")])
    with pytest.raises(BadInput) as error:
        load_task(tiny.config(prompts=str(path), vocab_size=97))
    assert str(error.value) == f"vocab_size must be at least 98 for the characters of {path}, got 97"
    for given_size, size in ((None, 98), (98, 98), (300, 300)):
        assert load_task(tiny.config(prompts=str(path), vocab_size=given_size)).vocab_size == size


def test_longer_prompts_are_left_out(tmp_path):
    path = tmp_path / "long.jsonl"
    short = [("ab", "x"), ("cd", "y" * 9), ("e", "z")]
    write_pairs(path, [*short, ("é" * 3, "1"), ("é" * 3, "2")])
    task = load_prompts(path, max_prompt_tokens=2)
    assert sorted(texts(task.train) + texts(task.heldout)) == sorted(short)
    assert (task.dropped, task.longest[:3], task.vocab_size) == (2, ("ab", 2, 9), VOCAB_SIZE)
    assert task.train.prompt_ids.shape[1] == 2
    assert load_prompts(path, max_prompt_tokens=3).dropped == load_prompts(path).dropped == 0
    with pytest.raises(BadInput, match="needs at least 2 different prompts of at most 1 tokens to hold one out, found"):
        load_prompts(path, max_prompt_tokens=1)


def test_prompts_that_do_not_fit_into_memory_are_one_line(tmp_path, monkeypatch):
    def full(shape, *_):
        raise MemoryError(f"Unable to allocate 32. TiB for an array with shape {shape}")

    path = tmp_path / "long.jsonl"
    write_pairs(path, [("\n" * 2000, "a"), ("b", "b")])
    monkeypatch.setattr(tasks.np, "full", full)
    with pytest.raises(BadInput) as error:
        load_prompts(path)
    reason, longest, _ = str(error.value).split("; ")
    assert reason == "out of memory: Unable to allocate 32. TiB for an array with shape (1, 2000)"
    assert longest.startswith("the longest prompt has 2000 tokens ('" + "\\n" * 20 + "'…)")
    assert "\n" not in str(error.value)


def test_file_that_cannot_be_split_or_read(tmp_path):
    path = tmp_path / "short.jsonl"
    write_lines(path, ['{"prompt": "a", "answer": "b"}'] * 2)
    with pytest.raises(BadInput, match="needs at least 2 different prompts to hold one out, found 1"):
        load_prompts(path)
    with pytest.raises(BadInput, match="cannot read file"):
        load_prompts(tmp_path / "absent.jsonl")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="cannot read file"):
        load_prompts(path)
