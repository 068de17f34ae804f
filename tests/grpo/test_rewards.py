"""Reward functions: how they are named, what they are given, and what is said where they are wrong."""

import json

import numpy as np
import pytest

from rlk_jax.grpo import rewards as rewards_module
from rlk_jax.grpo.config import BadInput
from rlk_jax.grpo.prompt_rows import PromptRows, read_rows
from rlk_jax.grpo.rewards import load_rewards
from tests.support import own_modules

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 26?"}]
PROMPTS = ["1+1=", CHAT, "1+2="]
COMPLETIONS = ["2", "43 it is", ""]
COLUMNS = {"answer": ["2", 43, 3.0], "level": [1, None, 2]}

MODULE = """
import functools
import numpy as np
import jax.numpy as jnp

def length(completions, **columns): return [len(x) for x in completions]
def level(prompts, completions, level): return [x or 0 for x in level]
def levelled(completions, *, level=None, width=2): return [width] * len(completions)
def seen(prompts, completions, **columns):
    assert prompts[1][-1]["content"] == "What is 17 + 26?" and list(columns) == ["answer", "level"]
    return np.array([len(columns["answer"])] * len(prompts), np.float64)
def on_a_device(completions): return jnp.arange(len(completions), dtype=jnp.bfloat16)
def of_a_device(completions): return [jnp.float32(0.5), np.int8(3), True]
def careless(prompts, completions, level):
    prompts[1].append("!"), prompts.clear(), level.clear()
    return [1.0] * len(completions)
class Rules:
    @staticmethod
    def brevity(completions): return [-len(x) for x in completions]
twice = functools.partial(levelled, width=4)

def fails(completions, level): return [x + 1 for x in level]
def fails_together(completions): return [1 / (len(completions) % 3)] * len(completions)
def leaves(completions): raise SystemExit
def silent(completions): raise RuntimeError
def talks(completions): raise ValueError("a\\nb")
def short(completions): return [1.0]
def lone(completions): return 1.0
def text(completions): return "123"
def mapping(completions): return {1: 1, 2: 2, 3: 3}
def generated(completions): return (1.0 for _ in completions)
def nan(completions): return np.array([0, np.nan, 0])
def infinite(completions): return [0.0, 0.0, 1e39]
def nothing(completions): return [0.0, None, 0.0]
def textual(completions): return ["1", "2", "3"]
def nested(completions): return np.ones((3, 1))
def by_place(completions, prompts, /): return []
no_signature = dict
number = 3
"""


@pytest.fixture
def here(tmp_path):
    """The current folder, with a module of reward functions; it is forgotten afterwards."""
    with own_modules.imported_from(tmp_path):
        (tmp_path / "mine.py").write_text(MODULE)
        yield tmp_path


def score(spec: str) -> list[list[float]]:
    found = load_rewards(spec).score(PROMPTS, COMPLETIONS, COLUMNS)
    assert found.dtype == np.float32 and found.shape[0] == len(COMPLETIONS)
    return found.T.tolist()


def said(spec: str) -> str:
    """The one line that says what is wrong with these rewards, or with the batch that they are given."""
    with pytest.raises(BadInput) as error:
        score(spec)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        ("length", [1, 8, 0]),
        ("level", [1, 0, 2]),
        ("levelled", [2, 2, 2]),
        ("seen", [3, 3, 3]),
        ("on_a_device", [0, 1, 2]),
        ("of_a_device", [0.5, 3, 1]),
        ("Rules.brevity", [-1, -8, 0]),
        ("twice", [4, 4, 4]),
    ],
)
@pytest.mark.parametrize("module", ["mine", "mine.py", "./mine.py"])
def test_a_function_is_given_what_it_names_and_its_numbers_are_taken(here, module, name, scores):
    assert score(f"{module}:{name}") == [scores]


def test_functions_are_scored_side_by_side_and_added_by_weight(here):
    rewards = load_rewards(" exact , mine:length = -0.25,mine.py:level=2e0,last_number=0")
    assert rewards.names == ("exact", "mine:length", "mine.py:level", "last_number")
    scores = rewards.score(PROMPTS, COMPLETIONS, COLUMNS)
    np.testing.assert_array_equal(scores, [[1, 1, 1, 1], [0, 8, 0, 1], [0, 0, 2, 0]])
    combined = rewards.combined(scores)
    assert combined.dtype == np.float32
    np.testing.assert_array_equal(combined, [1 - 0.25 + 2, -2, 4])


def test_the_sum_of_a_row_does_not_depend_on_the_batch(here):
    rewards = load_rewards("exact=0.1,mine:length=0.7,mine:level=-1.3")
    scores = np.random.default_rng(0).normal(size=(33, 3)).astype(np.float32)
    alone = [rewards.combined(scores[i : i + 1])[0] for i in range(len(scores))]
    np.testing.assert_array_equal(rewards.combined(scores), alone)


def test_an_empty_batch(here):
    rewards = load_rewards("exact,mine:length")
    scores = rewards.score([], [], {"answer": []})
    assert scores.shape == (0, 2) and rewards.combined(scores).shape == (0,)


def test_a_function_may_change_its_arguments(here):
    assert score("mine:careless,mine:seen,mine:level") == [[1, 1, 1], [3, 3, 3], [1, 0, 2]]
    assert len(CHAT) == 2


@pytest.mark.parametrize(
    ("completion", "answer", "is_right"),
    [
        (" 43\n", "43", True),
        ("43", " 43 ", True),
        ("43", 43, True),
        ("43.0", 43.0, True),
        ("43", 43.0, False),
        ("It is 43", "43", False),
        ("Tokyo", "tokyo", False),
        ("東京", "東京", True),
        ("", "43", False),
        ("7", np.int64(7), True),
    ],
)
def test_exact_compares_texts(completion, answer, is_right):
    assert load_rewards("exact").score(["?"], [completion], {"answer": [answer]}) == [[is_right]]


@pytest.mark.parametrize(
    ("completion", "answer", "is_right"),
    [
        ("17 + 26 = 43", "43", True),
        ("It is 43.", 43, True),
        ("43.0", 43, True),
        ("43.50", "43.5", True),
        ("43", 43.0, True),
        ("0.1", 0.1, True),
        ("42, then 43", 42, False),
        ("$1,234,567.5", 1234567.5, True),
        ("1,000", "1000", True),
        ("1, 2,3", 3, True),
        ("x = -5", -5, True),
        ("+5", 5, True),
        ("8-5", 5, True),
        ("(8)-5", 5, True),
        ("8 - 5", 5, True),
        ("-", 5, False),
        ("none", 0, False),
        ("", 0, False),
        ("72", "48 / 2 = 24, so 48 + 24 = 72\n#### 72", True),
        ("22", 1e22, False),
        ("12345678901234567891", 12345678901234567890, False),
        ("9" * 5000, "9" * 5000, True),
    ],
)
def test_last_number_compares_numbers(completion, answer, is_right):
    assert load_rewards("last_number").score(["?"], [completion], {"answer": [answer]}) == [[is_right]]


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("nowhere:f", "reward: cannot load 'nowhere:f': No module named 'nowhere'"),
        ("absent.py:f", "reward: cannot load 'absent.py:f': FileNotFoundError: "),
        ("mine:nowhere", "reward: cannot load 'mine:nowhere': module 'mine' has no attribute 'nowhere'"),
        ("mine:number", "reward: 'mine:number' is not callable"),
        ("mine:length=much", "the weight of reward mine:length must be a finite number, got 'much'"),
        ("mine:length=", "the weight of reward mine:length must be a finite number, got ''"),
        ("exact=nan", "the weight of reward exact must be a finite number, got 'nan'"),
        ("exact=-inf", "the weight of reward exact must be a finite number, got '-inf'"),
        ("exact=1e39", "the weight of reward exact must be a finite number, got '1e39'"),
        ("exact,mine:length,exact=2", "reward exact is there twice"),
        ("mine.py:length,./mine.py:length=2", "reward ./mine.py:length is there twice"),
        ("mine:by_place", "reward mine:by_place takes completions, prompts by position only"),
        ("mine:no_signature", "reward mine:no_signature does not say which arguments it takes: "),
        ("sys:intern", "reward sys:intern has no file whose change a resumed run could notice"),
    ],
)
def test_a_specification_that_cannot_work(here, spec, line):
    assert said(spec).startswith(line)


@pytest.mark.parametrize("part", ["", "exactly", "mine:", ":length", "mine:=2", "=2"])
@pytest.mark.parametrize("spec", ["{}", "last_number,{}", "mine:length=2,{},last_number"])
def test_a_specification_that_does_not_read_so(here, spec, part):
    known = "module:function, path/file.py:function, exact or last_number"
    line = f"a reward reads {known}, with =0.5 behind it for a weight, got {part!r}"
    assert said(spec.format(part)) == line


def test_a_source_that_is_gone(here, monkeypatch):
    (here / "gone.py").write_text("def f(completions): return []")
    load_rewards("gone:f")
    (here / "gone.py").unlink()
    assert said("gone:f").startswith("cannot read the source of reward gone:f: ")


FIRST = "(in row 1 of the batch: prompt '1+1=', completion '2')"
SECOND = "(in row 2 of the batch: prompt 'What is 17 + 26?', completion '43 it is')"
TOGETHER = "(in this batch of 3, and for no row of it alone)"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fails", f"raised TypeError: unsupported operand type(s) for +: 'NoneType' and 'int' {SECOND}"),
        ("fails_together", f"raised ZeroDivisionError: division by zero {TOGETHER}"),
        ("leaves", f"raised SystemExit: SystemExit without a word {FIRST}"),
        ("silent", f"raised RuntimeError: RuntimeError without a word {FIRST}"),
        ("talks", f"raised ValueError: a {FIRST}"),
        ("short", "must return a number for each completion: 3, got 1"),
        ("lone", "must return a list of numbers, got float"),
        ("text", "must return a list of numbers, got str"),
        ("mapping", "must return a list of numbers, got dict"),
        ("generated", "must return a list of numbers, got generator"),
        ("nan", f"must return finite numbers, got np.float64(nan) {SECOND}"),
        ("infinite", "must return finite numbers, got 1e+39 (in row 3 of the batch: prompt '1+2=', completion '')"),
        ("nothing", f"must return finite numbers, got None {SECOND}"),
        ("textual", f"must return finite numbers, got '1' {FIRST}"),
        ("nested", f"must return finite numbers, got array([1.]) {FIRST}"),
    ],
)
def test_what_a_function_does_wrong_is_one_line(here, name, line):
    assert said(f"mine:length,mine:{name}") == f"reward mine:{name} {line}"


def test_columns_that_are_missing_or_of_another_length(here):
    rewards = load_rewards("mine:level,exact")
    with pytest.raises(BadInput) as error:
        rewards.score(["?"], ["a"], {"answer": ["a"], "note": [1]})
    assert str(error.value) == "reward mine:level needs level; columns of the prompts: answer, note"
    with pytest.raises(BadInput) as error:
        load_rewards("exact").check_rows(PromptRows(["?"], {}, [1], {}), here / "rows.jsonl")
    assert str(error.value) == "reward exact needs answer; columns of the prompts: none"
    with pytest.raises(BadInput, match=r"must have one value for each completion, got {'prompts': 2, 'completions': 1"):
        rewards.score(["?", "!"], ["a"], {"answer": ["a"], "level": [1]})


@pytest.mark.parametrize(
    ("name", "rows", "where"),
    [
        ("mine:level", [{"level": 1}, {}], 'line 2: "level" is missing'),
        ("mine:level", [{}, {"level": 1}, {}, {}], 'line 1: "level" is missing (and in 2 lines behind it)'),
        ("exact", [{"answer": 1}, {}], 'line 2: "answer" is missing'),
    ],
)
def test_a_column_that_rows_lack_is_named_before_a_run(here, name, rows, where):
    """Functions that can do without it get None, and so do those to which a row says null."""
    path = here / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "?", **row}) for row in rows))
    with pytest.raises(BadInput) as error:
        load_rewards(f"mine:length,{name}").check_rows(read_rows(path), path)
    column = name.removeprefix("mine:").replace("exact", "answer")
    assert str(error.value) == f"{path}, {where}; reward {name} needs it, for its argument {column} has no default"
    load_rewards("mine:levelled,mine:seen").check_rows(read_rows(path), path)
    path.write_text(json.dumps({"prompt": "?", "level": None}))
    load_rewards("mine:level").check_rows(read_rows(path), path)


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("exact", "null", '"answer" must be a string or a number, got null'),
        ("exact", "true", '"answer" must be a string or a number, got a boolean'),
        ("exact", "[1]", '"answer" must be a string or a number, got an array'),
        ("exact", '" "', '"answer" must not be empty'),
        ("exact", "Infinity", '"answer" must be finite, got inf'),
        ("last_number", "{}", '"answer" must be a string or a number, got an object'),
        ("last_number", '"none"', '"answer" holds no number'),
    ],
)
def test_an_answer_that_cannot_be_read_is_named_before_a_run_and_in_it(tmp_path, name, answer, reason):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": 1}}\n\n{{"prompt": "b", "answer": {answer}}}\n')
    rows, rewards = read_rows(path), load_rewards(name)
    with pytest.raises(BadInput) as error:
        rewards.check_rows(rows, path)
    assert str(error.value) == f"{path}, line 3: {reason}; reward {name} reads it"
    with pytest.raises(BadInput) as error:
        rewards.score(rows.prompts, ["x", "y"], rows.columns)
    where = "(in row 2 of the batch: prompt 'b', completion 'y')"
    assert str(error.value) == f"reward {name} raised ValueError: {reason} {where}"


def test_good_rows_pass(here):
    path = here / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "?", "answer": x, "level": 1}) for x in ("4", 4, 4.5)))
    load_rewards("exact,last_number,mine:level,mine:seen").check_rows(read_rows(path), path)


def test_the_digest_tells_other_functions_sources_and_weights_apart(here, monkeypatch):
    (here / "other.py").write_text("from mine import length, level")

    def digest(spec: str) -> str:
        return load_rewards(spec).digest

    specs = ["exact", "last_number", "exact=2", "mine:length", "mine:level", "other:length", "exact,mine:length"]
    digests = [digest(spec) for spec in specs]
    assert len({*digests}) == len(specs)
    assert digests == [digest(spec) for spec in specs]
    assert digest("exact=1") == digest("exact") and digest("./mine.py:length") == digest("mine:length")
    (here / "mine.py").write_text(MODULE + "\n")
    changed = [digest(spec) for spec in specs]
    assert [x == y for x, y in zip(digests, changed, strict=True)] == [True, True, True, False, False, False, False]
    monkeypatch.setattr(rewards_module, "installed_version", lambda _: "9.9")
    assert digest("exact") != digests[0]


def test_arrays_of_columns_are_taken(here):
    found = load_rewards("exact,mine:length").score(np.array(["?"]), ["4"], {"answer": np.array([4])})
    np.testing.assert_array_equal(found, [[1, 1]])
