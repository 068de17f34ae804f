"""The tokens that files beside tokenizer.json name and describe are those of transformers."""

import pytest
import tokenizers
from transformers import AutoTokenizer

from rlk_jax.models import load_tokenizer
from tests.models.test_tokenizer import change
from tests.models.tiny import make_tokenizer

NAMES = """{% for x in [bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token, image_token,
boi_token, extra_special_tokens, additional_special_tokens, add_bos_token] %}
{{ x if x is defined else 'none' }}|{% endfor %}{{ messages[0].content }}"""
TEXT = "17 <new> + <|im_start|> 26 <s>[PAD] <|im_end|> x"
NEW = {"content": "<new>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
LOOSE = {**NEW, "content": "<|im_start|>", "lstrip": True, "rstrip": True}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FILES = {
    "bos and eos in the map alone": {
        CONFIG: {"bos_token": None, "eos_token": None},
        MAP: {"bos_token": "<s>", "eos_token": {**NEW, "content": "<|im_end|>"}},
    },
    "the map has the last word": {MAP: {"bos_token": "<unk>"}},
    "the map is not read": {CONFIG: {"added_tokens_decoder": {}}, MAP: {"bos_token": "<unk>", "sep_token": "<s>"}},
    "names of the standard": {CONFIG: {"sep_token": "<s>", "cls_token": "<unk>", "mask_token": "<|im_end|>"}},
    "names of the model": {
        CONFIG: {"image_token": "<s>", "add_bos_token": True},
        MAP: {"image_token": "<unk>", "boi_token": "<s>"},
    },
    "a name of the model that is new": {CONFIG: {"image_token": "<new>"}},
    "extra names": {CONFIG: {"extra_special_tokens": {"image_token": "<new>", "boi_token": "<s>"}}},
    "extra tokens": {CONFIG: {"extra_special_tokens": ["<new>", "17"]}},
    "additional tokens": {CONFIG: {"additional_special_tokens": ["<new>"]}},
    "additional tokens in the map": {MAP: {"additional_special_tokens": ["<new>"]}},
    "extra names, additional tokens": {
        CONFIG: {"extra_special_tokens": {"image_token": "<s>"}, "additional_special_tokens": ["<new>"]}
    },
    "flags": {CONFIG: {"added_tokens_decoder": {"3": LOOSE}}},
    "flags of a named one": {
        CONFIG: {"added_tokens_decoder": {"2": {**LOOSE, "content": "<|im_end|>", "special": False}}}
    },
    "a new one": {CONFIG: {"added_tokens_decoder": {"999": NEW, "400": {**NEW, "content": "<old>"}}}},
    "a new one, normalized": {CONFIG: {"added_tokens_decoder": {"999": {**NEW, "normalized": True, "special": False}}}},
    "a new one, special by its name": {
        CONFIG: {"sep_token": "<new>", "added_tokens_decoder": {"999": {**NEW, "special": False}}}
    },
    "an old one whose id is taken": {ADDED: {"<new>": 3}},
    "old ones": {ADDED: {"<new>": 999, "<old>": 400}},
    "old ones, special": {ADDED: {"<new>": 999}, MAP: {"sep_token": "<new>"}},
    "old ones that are not read": {CONFIG: {"added_tokens_decoder": {}}, ADDED: {"<new>": 999}},
    "lists of both files": {
        CONFIG: {"extra_special_tokens": ["<new>", "17"]},
        MAP: {"extra_special_tokens": ["<old>", {"content": "<new>", "lstrip": True}]},
    },
    "lists of both files, one by its older name": {
        CONFIG: {"extra_special_tokens": ["<new>"]},
        MAP: {"additional_special_tokens": ["<old>", "17"]},
    },
    "a pad of its own": {CONFIG: {"pad_token": "[PAD]"}},
    "an end of its own": {CONFIG: {"eos_token": "[PAD]"}},
    "a name for a part of text": {CONFIG: {"cls_token": "17"}},
    "a named object": {CONFIG: {"sep_token": {**NEW, "rstrip": True, "__type": "AddedToken"}}},
}


@pytest.fixture
def saved(tmp_path):
    """The directory of a tokenizer with settings of older files; its template writes the tokens that have names."""
    make_tokenizer(chat_template=NAMES).save_pretrained(tmp_path)
    change(tmp_path / CONFIG, extra_special_tokens=None, tokenizer_class="PreTrainedTokenizerFast")
    return tmp_path


def assert_as_transformers(directory):
    """Ids, texts and chats."""
    gold, found = AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)
    ids = found.encode(TEXT)
    assert ids == gold(TEXT)["input_ids"] and found.vocab_size == len(gold)
    assert found.decode(ids) == gold.decode(ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": TEXT}]
    assert found.chat_text(chat) == gold.apply_chat_template(chat, tokenize=False)
    assert found.chat(chat) == gold.apply_chat_template(chat, return_dict=False)
    assert found.stop_ids == (gold.eos_token_id,)
    assert found.pad_id == (gold.eos_token_id if gold.pad_token is None else gold.pad_token_id)


@pytest.mark.parametrize("what", FILES)
def test_tokens_of_files_are_those_of_transformers(what, saved):
    assert_as_transformers(saved)
    for name, fields in FILES[what].items():
        change(saved / name, **fields)
    assert_as_transformers(saved)


def test_the_digest_follows_what_decides_ids(saved):
    """And nothing else: files that are not read change none."""
    digests = [load_tokenizer(saved).digest]
    for what in ("the map is not read", "old ones that are not read"):
        for name, fields in FILES[what].items():
            change(saved / name, **fields)
        assert load_tokenizer(saved).digest == digests[0]
    changes = {"image_token": "<s>"}, {"added_tokens_decoder": {"3": LOOSE}}, {"added_tokens_decoder": None}
    for fields in changes:
        change(saved / CONFIG, **fields)
        digests.append(load_tokenizer(saved).digest)
    assert len(set(digests)) == 4


def test_a_pad_that_training_left_behind(saved):
    backend = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    backend.enable_padding(pad_token="<unk>")
    backend.save(str(saved / "tokenizer.json"))
    gold, chat = AutoTokenizer.from_pretrained(saved), [{"role": "user", "content": "17"}]
    assert load_tokenizer(saved).chat_text(chat) == gold.apply_chat_template(chat, tokenize=False)
    assert load_tokenizer(saved).pad_id == gold.pad_token_id == 0


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (CONFIG, {"bos_token": 3}, "has a token that is none: 3."),
        (CONFIG, {"extra_special_tokens": [3]}, "has a token that is none: 3."),
        (CONFIG, {"image_token": {"lstrip": True}}, "has a token that is none: {'lstrip': True}."),
        (MAP, {"eos_token": ["<s>"]}, "has a token that is none: ['<s>']."),
        (CONFIG, {"added_tokens_decoder": {"3": "x", "4": 5}}, "has a token that is none: 5."),
        (
            CONFIG,
            {"added_tokens_decoder": {"3": {"content": "x", "lstrip": 1}}},
            "has a token that is none: {'content': 'x', 'lstrip': 1}.",
        ),
        (CONFIG, {"added_tokens_decoder": []}, "has an added_tokens_decoder that is no object of tokens by their ids."),
        (
            CONFIG,
            {"added_tokens_decoder": {"x": NEW}},
            "has an added_tokens_decoder that is no object of tokens by their ids.",
        ),
        (ADDED, {"<new>": "3"}, "has a token whose id is no integer."),
    ],
    ids=str,
)
def test_tokens_that_are_none(name, fields, message, saved):
    change(saved / name, **fields)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(saved)
    assert str(caught.value) == f"{saved / name} {message}"
