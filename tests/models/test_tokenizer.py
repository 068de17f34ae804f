"""Tokenizers and chat templates give the ids of transformers, and every mistake is one line."""

import json
import random
import re

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer

from rlk_jax.models import load_tokenizer
from tests.models.tiny import CHATML, make_tokenizer

LLAMA3 = """{{- bos_token }}
{%- if strftime_now is defined %}{%- set date = strftime_now('%Y') %}{%- else %}{%- set date = 'none' %}{%- endif %}
{%- if tools is not none %}{{ 'TOOLS' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'note' %}{% continue %}{% endif %}
    {%- if message.content == 'stop' %}{% break %}{% endif %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>' + date + '\n' + message.content | trim + eos_token }}
    {{- message | tojson }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must\n alternate') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<|im_start|>' + role + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"""
GENERATION = """{{ bos_token }}{% set said = 'nothing' %}{% for message in messages %}
{% if message.role == 'assistant' %}
    {%- generation %}{% set said = message.content %}
    {{ loop.index }}{{ said }}{{ eos_token }}
    {%- endgeneration -%}
{% else %}{{ message.content }}{% endif %}{{ said }}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama 3": LLAMA3, "gemma": GEMMA, "generation": GENERATION}
TEXTS = ["17 + 26 = 43", " two  spaces\n", "Zürich 北京 🧮", "", "<|im_start|>user", "naïve <s> text"]
USER = {"role": "user", "content": "Was ist 17 + 26? 🧮 <b>&'\"</b> "}
CHATS = [
    [USER],
    [USER, {"role": "assistant", "content": " 43"}, {"role": "user", "content": "stop"}],
]


@pytest.fixture
def saved(tmp_path):
    """The directory of a tokenizer with the template of ChatML."""
    make_tokenizer(chat_template=CHATML).save_pretrained(tmp_path)
    return tmp_path


def change(path, **changes) -> None:
    """Change fields of a JSON file, which may be new; None removes one."""
    fields = {**(json.loads(path.read_text()) if path.exists() else {}), **changes}
    path.write_text(json.dumps({name: x for name, x in fields.items() if x is not None}))


@pytest.mark.parametrize("adds_bos", [True, False])
def test_ids_and_texts_are_those_of_transformers(adds_bos, tmp_path):
    gold = make_tokenizer(adds_bos)
    gold.save_pretrained(tmp_path)
    found = load_tokenizer(tmp_path)
    assert found.vocab_size == len(gold) and not found.has_chat_template
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == gold(text)["input_ids"] and (ids[:1] == [1]) == adds_bos
        assert found.decode(ids) == gold.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_those_of_transformers(name, messages, tmp_path):
    gold = make_tokenizer(chat_template=TEMPLATES[name])
    gold.save_pretrained(tmp_path)
    found = load_tokenizer(tmp_path)
    asked = {"add_generation_prompt": True}
    assert found.has_chat_template
    assert found.chat_text(messages) == gold.apply_chat_template(messages, tokenize=False, **asked)
    ids = found.chat(messages)
    assert ids == gold.apply_chat_template(messages, return_dict=False, **asked)
    assert ids.count(1) == (name != "chatml"), "the template's own <s>, and no second one"


def test_where_a_template_may_stand(saved):
    text = load_tokenizer(saved).chat_text([USER])
    (saved / "chat_template.jinja").unlink()
    settings = saved / "tokenizer_config.json"
    change(settings, chat_template=CHATML)
    assert load_tokenizer(saved).chat_text([USER]) == text
    several = [{"name": "tools", "template": "none"}, {"name": "default", "template": CHATML}]
    change(settings, chat_template=several)
    assert load_tokenizer(saved).chat_text([USER]) == text
    change(settings, chat_template=several[:1])
    assert not load_tokenizer(saved).has_chat_template
    change(settings, chat_template=3)
    with pytest.raises(ValueError, match=r"chat_template of tokenizer_config.json is int, not a text."):
        load_tokenizer(saved)


def test_additional_templates(saved):
    """One of another name is for chats with tools. transformers takes no text of tokenizer_config.json beside it."""
    folder = saved / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("tools")
    gold, found = AutoTokenizer.from_pretrained(saved), load_tokenizer(saved)
    assert found.chat_text([USER]) == gold.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    (saved / "chat_template.jinja").unlink()
    change(saved / "tokenizer_config.json", chat_template=CHATML)
    assert set(AutoTokenizer.from_pretrained(saved).chat_template) == {"tool_use"}
    assert not load_tokenizer(saved).has_chat_template
    path = folder / "default.jinja"
    path.write_text("default")
    with pytest.raises(ValueError, match=f"^{path} is not supported: the chat template is chat_template.jinja.$"):
        load_tokenizer(saved)


def test_special_tokens_that_are_split(saved):
    change(saved / "tokenizer_config.json", split_special_tokens=False)
    load_tokenizer(saved)
    change(saved / "tokenizer_config.json", split_special_tokens=True)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json has split_special_tokens, which is not supported\.$"):
        load_tokenizer(saved)


def test_a_lone_surrogate(saved):
    """Shells and JSON can hold one."""
    found = load_tokenizer(saved)
    message = r"^the text holds '\\udcff', a lone surrogate, which is no character\.$"
    for give in (found.encode, lambda text: found.chat([{"role": "user", "content": text}])):
        with pytest.raises(ValueError, match=message):
            give("17 \udcff")


FAILING = {
    "of its own": (GEMMA, "System role not supported"),
    "in lines": ("{{ raise_exception('a\n  b') }}", "a$"),
    "of its own, silent": ("{{ raise_exception('') }}", "TemplateError without a word$"),
    "syntax": ("{% for %}", "Expected|unexpected|expected"),
    "unknown tag": ("{% answer %}", "unknown tag 'answer'"),
    "open block": ("{% generation %}", "Unexpected end of template"),
    "arithmetic": ("{{ messages[0].content + 1 }}", "can only concatenate str"),
    "long loop": ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
    "internals": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__' of 'str' object"),
    "internals by name": ("{{ (''|attr('__class__')).x }}", "access to attribute '__class__'"),
    "internals of a function": ("{{ raise_exception.__globals__['json'] }}", "access to attribute '__globals__'"),
    "internals by format": ("{{ '{0.__class__.__mro__}'.format('') }}", "access to attribute '__class__'"),
    "changes": ("{{ messages.append(1) }}", "is not safely callable|append"),
}


@pytest.mark.parametrize("what", FAILING)
def test_templates_that_fail_or_reach_out_are_one_line(what, saved):
    template, message = FAILING[what]
    (saved / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"^the chat template fails: .*({message})") as caught:
        load_tokenizer(saved).chat([{"role": "system", "content": "x"}])
    assert "\n" not in str(caught.value)


BAD_CHATS = {
    "text": ("hello", "a chat is a list of messages, not str."),
    "one message": (USER, "a chat is a list of messages, not dict."),
    "none": ([], "a chat needs at least one message."),
    "no object": ([USER, "hello"], "message 1 of a chat is an object with role and content, not str."),
    "no role": ([{"content": "x"}], "message 0 of a chat has no role."),
    "no content": ([USER, {"role": "user"}], "message 1 of a chat has no content."),
    "role": ([{"role": 3, "content": "x"}], "role of message 0 of a chat is a text, not int."),
    "content": ([{"role": "user", "content": None}], "content of message 0 of a chat is a text, not NoneType."),
}


@pytest.mark.parametrize("what", BAD_CHATS)
def test_messages_that_are_none(what, saved):
    messages, message = BAD_CHATS[what]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_tokenizer(saved).chat(messages)


def test_a_chat_without_a_template(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^this checkpoint has no chat template: give the prompt as text\.$"):
        load_tokenizer(tmp_path).chat([USER])


def test_directories_without_a_whole_tokenizer(saved):
    path = saved / "tokenizer.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(ValueError, match=f"^{path} is damaged: [^\n]*$"):
        load_tokenizer(saved)
    path.unlink()
    with pytest.raises(ValueError, match=f"^{saved} has no tokenizer.json: "):
        load_tokenizer(saved)


@pytest.mark.parametrize(("text", "message"), [("{", "is no JSON: "), ("[]", "must hold an object, got a list.")])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "config.json"])
def test_damaged_files_beside_it(name, text, message, saved):
    (saved / name).write_text(text)
    with pytest.raises(ValueError, match=f"^{saved / name} {message}"):
        load_tokenizer(saved)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja"]
)
def test_files_beside_it_that_are_no_text(name, saved):
    (saved / name).write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=f"^{saved / name} is no UTF-8: [^\n]*$"):
        load_tokenizer(saved)


def test_tokens_that_end_a_completion(saved):
    assert load_tokenizer(saved).stop_ids == (2,)
    settings = saved / "tokenizer_config.json"
    change(settings, eos_token={"content": "<unk>", "lstrip": False})
    assert load_tokenizer(saved).stop_ids == (0,)
    change(saved / "config.json", eos_token_id=7)
    assert load_tokenizer(saved).stop_ids == (7,)
    change(saved / "generation_config.json", eos_token_id=[9, 2, 9])
    assert load_tokenizer(saved).stop_ids == (2, 9)
    (saved / "generation_config.json").write_text('{"eos_token_id": []}')
    assert load_tokenizer(saved).stop_ids == (7,)
    for bad in ("2", [2, "3"], -1, True):
        change(saved / "generation_config.json", eos_token_id=bad)
        with pytest.raises(ValueError, match=f"has an eos_token_id that is no token: {re.escape(repr(bad))}.$"):
            load_tokenizer(saved)


def test_a_completion_has_its_text_and_its_end(saved):
    """In a chat the end is the template's, else the eos_token where it ends a completion, else the first that does. No
    <s> stands in front.
    """
    change(saved / "tokenizer_config.json", eos_token="<s>")
    change(saved / "generation_config.json", eos_token_id=[0, 1, 2])
    found = load_tokenizer(saved)
    for text in (TEXTS[0], TEXTS[2]):
        *ids, end = found.completion(text)
        assert found.decode(ids) == text and end == 1
        assert found.completion(text, [USER]) == [*ids, 2]
    change(saved / "generation_config.json", eos_token_id=[2, 3])
    assert load_tokenizer(saved).completion(TEXTS[0])[-1] == 2


def test_a_completion_that_ends_before_its_end(saved):
    message = "^the completion holds '<|im_end|>', which ends it: leave it out, as it is added at the end.$"
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        load_tokenizer(saved).completion("43<|im_end|>")


def test_no_token_that_ends_a_completion(saved):
    change(saved / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ValueError, match=f"^{saved} names no token that ends a completion: there is no eos_token_id"):
        load_tokenizer(saved)


def test_the_token_that_fills_rows(saved):
    assert load_tokenizer(saved).pad_id == 2, "the one that ends a completion"
    change(saved / "config.json", pad_token_id=-1)
    assert load_tokenizer(saved).pad_id == 2
    change(saved / "config.json", pad_token_id=4)
    assert load_tokenizer(saved).pad_id == 4
    change(saved / "tokenizer_config.json", pad_token="<unk>")
    assert load_tokenizer(saved).pad_id == 0


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "eos_token"])
def test_a_token_that_ends_a_completion_is_one_of_the_model(name, saved):
    """A model may have more tokens than its tokenizer, or fewer."""
    size = load_tokenizer(saved).vocab_size
    change(saved / "config.json", vocab_size=size + 9)
    change(saved / "generation_config.json", eos_token_id=[2, size + 8])
    assert load_tokenizer(saved).stop_ids == (2, size + 8)
    for other in ("generation_config.json", "config.json"):
        change(saved / other, eos_token_id=[2, 9] if other == name else None)
    stop = 2 if name == "eos_token" else 9
    change(saved / "config.json", vocab_size=stop)
    message = f"^{saved}: {name} ends completions at token {stop} of a model of {stop} tokens.$"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(saved)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_pad_that_the_model_does_not_have(name, saved):
    change(saved / "config.json", vocab_size=32)
    change(saved / name, pad_token_id=31)
    assert load_tokenizer(saved).pad_id == 31
    change(saved / name, pad_token_id=32)
    assert load_tokenizer(saved).pad_id == 2, "the one that ends a completion"


def test_texts_with_tokens_that_the_model_does_not_have(saved):
    """The image token of Gemma 3 1B is one."""
    backend = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    rows = backend.get_vocab_size()
    backend.add_special_tokens(["<image>"])
    backend.save(str(saved / "tokenizer.json"))
    change(saved / "config.json", vocab_size=rows)
    found = load_tokenizer(saved)
    assert found.encode("17") and found.vocab_size == rows + 1
    message = f"^the text has token {rows}, '<image>', of a model of {rows} tokens.$"
    with pytest.raises(ValueError, match=message):
        found.encode("17 <image>")
    with pytest.raises(ValueError, match=message):
        found.chat([{"role": "user", "content": "17 <image>"}])
    change(saved / "config.json", vocab_size=rows + 1)
    assert load_tokenizer(saved).encode("17 <image>")[-1] == rows


def test_the_digest_follows_what_decides_ids(saved):
    digests = [load_tokenizer(saved).digest, load_tokenizer(saved).digest]
    assert digests[0] == digests.pop()
    path = saved / "chat_template.jinja"
    for alter in (
        lambda: path.write_text(path.read_text() + " "),
        lambda: change(saved / "tokenizer_config.json", bos_token="<unk>"),
        lambda: change(saved / "config.json", eos_token_id=7),
        lambda: change(saved / "config.json", pad_token_id=8),
        lambda: change(saved / "tokenizer.json", version="1.0", truncation=None, normalizer={"type": "NFC"}),
    ):
        alter()
        digests.append(load_tokenizer(saved).digest)
    assert len(set(digests)) == 6


def test_texts_are_neither_cut_nor_filled(saved):
    """A tokenizer.json may hold how its author's training cut and filled texts."""
    gold = load_tokenizer(saved).encode("the user is an assistant")
    backend = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    backend.save(str(saved / "tokenizer.json"))
    assert load_tokenizer(saved).encode("the user is an assistant") == gold


def byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer as SentencePiece makes them: ▁ for a space, and bytes for what it does not know."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ü"]
    backend = tokenizers.Tokenizer(BPE({x: i for i, x in enumerate(pieces)}, [("▁", "a")], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(pieces[:3])
    return backend


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_streamed_text_is_the_text(kind, saved):
    if kind == "byte fallback":
        byte_fallback().save(str(saved / "tokenizer.json"))
        change(saved / "tokenizer_config.json", eos_token="</s>")
    found, draw = load_tokenizer(saved), random.Random(0)
    ids = found.backend.encode("Zürich 北京 🧮 a b", add_special_tokens=False).ids
    pieces = list(found.stream([1, *ids, 2]))
    assert "".join(pieces) == found.decode(ids) and len(pieces) > 8
    assert not any("\ufffd" in piece for piece in pieces), "no part of a character is shown"
    for n in range(len(ids)):
        assert found.decode(ids).startswith("".join(found.stream(ids[:n])))
    for _ in range(200):  # bytes that are no text
        ids = [draw.randrange(found.vocab_size) for _ in range(30)]
        said = "".join(found.stream(ids))
        assert kind == "byte fallback" or found.decode(ids).startswith(said)


def test_a_stream_does_not_wait_for_its_end(saved):
    """A model asks for the next token after it has shown the last one."""
    found, asked = load_tokenizer(saved), list[int]()

    def tokens():
        for token in found.encode("17 + 26 = 43"):
            asked.append(token)
            yield token

    first = next(found.stream(tokens()))
    assert first and len(asked) < 4
