"""`rlk generate`: its text is that of models.sample, it comes token by token, and every mistake is one line."""

import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlk_jax import cli, linear_logp, models
from rlk_jax.commands import generate as command
from tests.models.test_tokenizer import change
from tests.models.tiny import CHATML, FAMILIES, SIZES, make_tokenizer
from tests.support.helpers import HANG_S
from tests.test_architecture import ROOT


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Llama and a tokenizer with a chat template."""
    directory = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer(chat_template=CHATML).save_pretrained(directory)
    size = models.load_tokenizer(directory).vocab_size
    fields = {**SIZES, **FAMILIES["llama"], "num_hidden_layers": 1, "vocab_size": size}
    models.save(models.CausalLM(models.config_of(fields), dtype=jnp.float32, rngs=nnx.Rngs(0)), directory)
    return directory


def generate(*arguments):
    """The exit status of the command, run in this process."""
    return cli.main(["generate", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "sampling", "messages"),
    [
        (["--max-new-tokens", "12", "--no-chat"], models.Sampling(0), None),
        (
            ["--max-new-tokens", "12", "--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--min-p", "0.01"],
            models.Sampling(0.9, 50, 0.95, 0.01),
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "17 + 26 ="}],
        ),
    ],
)
def test_the_text_is_that_of_sample(checkpoint, capsys, arguments, sampling, messages):
    if messages:
        arguments = [*arguments, "--system", "Be brief.", "--seed", "5"]
    asked = ["--model", checkpoint, "--prompt", "17 + 26 =", "--dtype", "float32"]
    assert generate(*asked, *arguments) == 0
    printed, said = capsys.readouterr()
    tokenizer, model = models.load_tokenizer(checkpoint), models.load(checkpoint, dtype=jnp.float32)
    prompt = tokenizer.chat(messages) if messages else tokenizer.encode("17 + 26 =")
    keys, padding = jax.random.key(5 if messages else 0)[None], jnp.zeros(1, jnp.int32)
    limits = {"max_new_tokens": 12, "stop_ids": tokenizer.stop_ids}
    found = models.sample(model, jnp.asarray([prompt]), padding, keys, sampling=sampling, **limits)
    count = int(found.lengths[0])
    assert printed == "".join(tokenizer.stream(found.ids[0, :count].tolist())) + "\n" and len(printed) > 4
    assert re.fullmatch(rf"{count} tokens, \d+\.\d tokens/s\n", said)


def read_again(path, checkpoint):
    """Run what docs/models.md does with a record; the last line there asserts that its log-probs are equal."""
    (snippet,) = re.findall(r"```text\n(record = .*?)```", (ROOT / "docs" / "models.md").read_text(), re.DOTALL)
    snippet = snippet.replace("path/to/SmolLM2-135M-Instruct", str(checkpoint)).replace("FILE", str(path))
    names = {"np": np, "jnp": jnp, "models": models, "linear_logp": linear_logp}
    exec(snippet, names)
    assert names["logps"].shape == names["record"]["ids"].shape


@pytest.mark.parametrize(
    ("arguments", "allowed", "temperature"),
    [
        (["--temperature", "0.8", "--top-k", "50", "--top-p", "0.9"], "allowed_ids", 0.8),
        (["--temperature", "2", "--top-p", "0.5"], "allowed_mask", 2),
        pytest.param([], None, 1, marks=pytest.mark.full),
    ],
)
def test_a_record_gives_its_log_probs_again(checkpoint, capsys, tmp_path, arguments, allowed, temperature):
    """They have the bits of linear_logp on the hidden states of the whole sequence. In `make test`, the cases that
    truncate and test_temperature_0_takes_the_largest_logit stand for a temperature of 0.
    """
    path = tmp_path / "record"
    asked = ["--model", checkpoint, "--prompt", "17 + 26 =", "--max-new-tokens", 6, "--kind", "invariant"]
    assert generate(*asked, *arguments, "--record", path) == 0
    record, tokenizer = np.load(path), models.load_tokenizer(checkpoint)
    ids = record["ids"]
    assert capsys.readouterr().out == "".join(tokenizer.stream(ids.tolist())) + "\n" and len(ids) > 1
    assert record["prompt_ids"].tolist() == tokenizer.chat([{"role": "user", "content": "17 + 26 ="}])
    assert record["temperature"] == temperature
    given = {name: record[name] for name in ("allowed_ids", "allowed_mask") if name in record}
    assert list(given) == [x for x in [allowed] if x]
    assert np.all(record["logps"] < 0)
    read_again(path, checkpoint)


def test_a_terminal_shows_what_is_waited_for(checkpoint, capsys, monkeypatch):
    """It stands on stderr, in front of the number of tokens."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    asked = ["--model", checkpoint, "--prompt", "17 + 26 =", "--dtype", "float32", "--max-new-tokens", 2]
    assert generate(*asked) == 0
    printed, said = capsys.readouterr()
    assert re.search(r"loading and compiling\n.*2 tokens", said, re.DOTALL)
    assert printed.strip() and "\x1b" not in printed


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "a\tb\n\\x1b[31m\\r"), (False, "a\tb\n\x1b[31m\r")])
def test_a_terminal_gets_no_control_characters(checkpoint, capsys, monkeypatch, is_terminal, shown):
    tokenizer = models.load_tokenizer(checkpoint)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    command._print_text(tokenizer, tokenizer.encode("a\tb\n\x1b[31m\r"))
    assert capsys.readouterr().out == shown + "\n"


def test_a_record_of_no_tokens_is_empty(checkpoint, tmp_path):
    path = tmp_path / "record.npz"
    asked = ["--model", checkpoint, "--prompt", "17", "--max-new-tokens", 0, "--kind", "invariant"]
    assert generate(*asked, "--record", path) == 0
    assert np.load(path)["ids"].shape == np.load(path)["logps"].shape == (0,)
    read_again(path, checkpoint)


def test_a_record_that_is_cut_off_leaves_the_old_one(tmp_path, monkeypatch):
    def write_half(file, **arrays):
        file.write(b"half")
        raise OSError("No space left on device")

    path = tmp_path / "record"
    path.write_bytes(b"old")
    monkeypatch.setattr(np, "savez", write_half)
    with pytest.raises(OSError, match="No space"):
        command._Record([1], 1.0).write(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # Jobs in the background of a shell ignore it.
from rlk_jax.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def endless(checkpoint, tmp_path_factory):
    """Like the checkpoint, but its completions end at a token that is never drawn."""
    directory = shutil.copytree(checkpoint, tmp_path_factory.mktemp("endless"), dirs_exist_ok=True)
    change(directory / "config.json", eos_token_id=0, max_position_embeddings=10**7)
    change(directory / "generation_config.json", eos_token_id=0)
    return directory


def started(directory) -> subprocess.Popen[str]:
    """The command in a process of its own, asked for text that would take an hour."""
    asked = ["--model", directory, "--prompt", "17", "--temperature", 5, "--max-new-tokens", 10**6]
    return subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, "generate", *map(str, asked)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_text_comes_before_the_end_and_ctrl_c_ends_it(endless):
    """The first characters are there at once."""
    with started(endless) as process:
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and said == "\n"


@pytest.mark.full
def test_a_reader_may_stop_early(endless):
    """The text ends with it, quietly, with the status of a process which SIGPIPE has ended. In `make test`,
    test_cli.py::test_a_reader_that_is_gone_ends_a_command_quietly has all commands.
    """
    with started(endless) as process:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=HANG_S) == 141 and process.stderr.read() == ""


ASKED = {"--prompt": "17 + 26 =", "--max-new-tokens": 3, "--dtype": "float32"}


def assert_refused(capsys, directory, message, **changes):
    """The command says one line, and prints no text."""
    given = {**ASKED, "--model": directory, **{f"--{name.replace('_', '-')}": x for name, x in changes.items()}}
    arguments = [str(part) for option, x in given.items() for part in ((option,) if x is True else (option, x))]
    assert generate(*arguments) == 2
    printed, said = capsys.readouterr()
    assert not printed and said == f"rlk generate: error: {message}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "--prompt is empty"),
        ({"model": "/nowhere"}, "--model /nowhere is no directory"),
        ({"seed": -1}, "--seed must be at least 0 and less than 4294967296, got -1"),
        ({"seed": 2**32}, "--seed must be at least 0 and less than 4294967296, got 4294967296"),
        ({"record": "/nowhere/record"}, "--record: cannot write to /nowhere/record"),
        ({"record": "/"}, "--record: cannot write to /"),
        ({"record": "/dev/null"}, "--record: cannot write to /dev/null"),
        ({"record": f"{__file__}/record"}, f"--record: cannot write to {__file__}/record"),
        ({"max_new_tokens": -1}, "--max-new-tokens must be an integer of at least 0, got -1."),
        ({"temperature": -0.5}, "--temperature must be 0 or a positive finite number, got -0.5."),
        ({"temperature": "nan"}, "--temperature must be 0 or a positive finite number, got nan."),
        ({"top_k": 0}, "--top-k must be a positive integer, got 0."),
        ({"top_p": 1.5}, "--top-p must be greater than 0 and at most 1, got 1.5."),
        ({"min_p": 0}, "--min-p must be greater than 0 and at most 1, got 0.0."),
        (
            {"no_chat": True, "system": "Be brief."},
            "--system is a message of a chat, and the prompt is given to the model as it stands",
        ),
        ({"kind": "invariant"}, "--dtype must be bfloat16 or float16, got dtype('float32')."),
    ],
)
def test_mistakes_in_options(checkpoint, capsys, changes, message):
    assert_refused(capsys, checkpoint, message, **changes)


@pytest.fixture
def damaged(checkpoint, tmp_path):
    """A checkpoint that a test may spoil."""
    return shutil.copytree(checkpoint, tmp_path / "damaged")


def test_a_checkpoint_without_a_tokenizer(damaged, capsys):
    (damaged / "tokenizer.json").unlink()
    message = f"{damaged} has no tokenizer.json: it comes with a checkpoint, beside config.json."
    assert_refused(capsys, damaged, message)


def test_a_checkpoint_without_a_chat_template(damaged, capsys):
    (damaged / "chat_template.jinja").unlink()
    message = "this checkpoint has no chat template: give the prompt as text."
    assert_refused(capsys, damaged, message, chat=True)
    assert generate(*(x for option in ASKED.items() for x in option), "--model", damaged) == 0


def test_a_model_that_is_not_supported(damaged, capsys):
    change(damaged / "config.json", model_type="mamba")
    families, path = ", ".join(models.config.FAMILIES), damaged / "config.json"
    assert_refused(capsys, damaged, f"{path}: model_type 'mamba' is not among {families}.")


def test_weights_that_are_cut_off(damaged, capsys):
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(models.UnsupportedModel, match=f"^{path} is damaged: .*") as error:
        models.load(damaged)
    assert_refused(capsys, damaged, str(error.value))


def test_a_prompt_without_tokens(damaged, capsys):
    make_tokenizer(adds_bos=False).save_pretrained(damaged)
    change(damaged / "tokenizer.json", normalizer={"type": "Strip", "strip_left": True, "strip_right": True})
    (damaged / "chat_template.jinja").unlink()
    message = "prompt_ids must be [B, P] with at least one token, got shape (1, 0)."
    assert_refused(capsys, damaged, message, prompt="  ")


def test_a_prompt_with_a_token_that_the_model_does_not_have(damaged, capsys):
    make_tokenizer(extra_special_tokens=["<image>"], chat_template=CHATML).save_pretrained(damaged)
    size = models.load_tokenizer(damaged).model_rows
    message = f"the text has token {size}, '<image>', of a model of {size} tokens."
    assert_refused(capsys, damaged, message, prompt="<image>")


@pytest.mark.parametrize("given", [{"prompt": "\udcff"}, {"system": "\udcff"}, {"prompt": "\udcff", "no_chat": True}])
def test_a_lone_surrogate(checkpoint, capsys, given):
    """Python reads the byte FF of a command line as one."""
    assert_refused(capsys, checkpoint, r"the text holds '\udcff', a lone surrogate, which is no character.", **given)


def test_a_stop_token_that_the_model_does_not_have(damaged, capsys):
    change(damaged / "generation_config.json", eos_token_id=10**6)
    size = models.load(damaged).config.vocab_size
    message = f"{damaged}: generation_config.json ends completions at token 1000000 of a model of {size} tokens."
    assert_refused(capsys, damaged, message)


def test_more_tokens_than_the_model_was_made_for_are_a_warning(damaged, capsys):
    """As for `rlk grpo`. As many as it was made for are none."""
    asked = ["--model", damaged, "--prompt", "17", "--no-chat", "--dtype", "float32", "--max-new-tokens"]
    tokens = len(models.load_tokenizer(damaged).encode("17")) + 2
    change(damaged / "config.json", max_position_embeddings=tokens)
    made = f"prompt and completion have up to {tokens + 1} tokens, and the model was made for {tokens}"
    for count, lines in ((2, []), (3, [f"rlk generate: warning: {made}"])):
        assert generate(*asked, count) == 0
        assert capsys.readouterr().err.splitlines()[:-1] == lines


def test_too_little_memory(damaged, capsys):
    change(damaged / "config.json", max_position_embeddings=10**13)
    assert generate("--model", damaged, "--prompt", "17", "--max-new-tokens", 10**12) == 2
    said = capsys.readouterr().err
    assert said.startswith("rlk generate: error: out of memory: ") and said.count("\n") == 1


@pytest.mark.parametrize("package", ["flax", "safetensors", "tokenizers", "jinja2"])
def test_missing_package_says_what_to_install(capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    message = f'the command needs {package}, of rlk-jax\'s extra `grpo`: pip install "rlk-jax[grpo]"'
    assert_refused(capsys, "/nowhere", message)
