"""Tokenizer, chat template and detokenizer."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from common.errors import UserError
from common.models.config import ModelConfig
from common.models.gguf_import import import_gguf
from common.text.tokenizer import Tokenizer
from tests.common import tiny_gguf

HARD = [
    "👩‍👩‍👧‍👦 family",
    "中文字符 mixed 日本語",
    "e\u0301n\u0303 مرحبا",
    "  two  spaces\n\n",
    " 𐍈𝔘 hi",
    " ∈ A",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Tiny models with a byte-level tokenizer (llama), and with one that falls back to bytes (gemma3)."""
    parent = tmp_path_factory.mktemp("made")
    for kind in ("llama", "gemma3"):
        tiny_gguf.write(parent / f"{kind}.gguf", kind)
        import_gguf(parent / f"{kind}.gguf", parent / kind)
    return {kind: parent / kind for kind in ("llama", "gemma3")}


@pytest.fixture(params=["llama", "gemma3"])
def folder(request, made, tmp_path) -> Path:
    return Path(shutil.copytree(made[request.param], tmp_path / "model"))


@pytest.fixture
def llama_folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made["llama"], tmp_path / "model"))


def change(path: Path, **fields) -> None:
    content = json.loads(path.read_text())
    content.update(fields)
    path.write_text(
        json.dumps({key: value for key, value in content.items() if value is not ...})
    )


MARK = {"content": "<mark>", "lstrip": True, "rstrip": False, "normalized": False}
BESIDE = {
    "a token with a name": {"pad_token": "<mark>"},
    "an object with a name": {"pad_token": {**MARK, "special": False, "__type": "AddedToken"}},
    "a name of the model's own": {"extra_special_tokens": {"mark_token": "<mark>"}},
    "a token without a name": {"extra_special_tokens": ["<mark>"]},
    "the older list": {"additional_special_tokens": ["<mark>"]},
    "the older list beside an empty newer one": {
        "extra_special_tokens": {},
        "additional_special_tokens": ["<mark>"],
    },
    "the older list beside names": {
        "extra_special_tokens": {"end_token": "<|im_end|>"},
        "additional_special_tokens": ["<mark>"],
    },
    "the older list in the older file": {
        "special_tokens_map.json": {"additional_special_tokens": ["<mark>"]}
    },
    "the oldest file": {"added_tokens.json": {"<mark>": 300}},
    "the oldest file and a name": {
        "added_tokens.json": {"<mark>": 300},
        "special_tokens_map.json": {"pad_token": "<mark>"},
    },
    "the oldest file beside a newer list": {
        "added_tokens.json": {"<mark>": 300},
        "added_tokens_decoder": {},
    },
    "a listed token": {"added_tokens_decoder": {"300": {**MARK, "special": True}}},
    "a listed token that is not special": {
        "added_tokens_decoder": {"300": {**MARK, "special": False}}
    },
    "a listed token with a name": {
        "pad_token": "<mark>",
        "added_tokens_decoder": {"300": {**MARK, "special": False}},
    },
}


@pytest.mark.parametrize("known", [False, True], ids=["new", "in tokenizer.json"])
@pytest.mark.parametrize("fields", BESIDE.values(), ids=BESIDE)
def test_tokens_beside_tokenizer_json_are_those_of_transformers(
    fields: dict[str, Any], known: bool, llama_folder: Path
) -> None:
    path = llama_folder / "tokenizer.json"
    backend = Backend.from_file(str(path))
    if known:
        backend.add_tokens([AddedToken("<mark>", normalized=False, rstrip=True)])
        backend.save(str(path))
    change(llama_folder / "config.json", vocab_size=backend.get_vocab_size() + 1)
    for name in [name for name in fields if name.endswith(".json")]:
        (llama_folder / name).write_text(json.dumps(fields[name]))
    fields = {name: value for name, value in fields.items() if not name.endswith(".json")}
    change(llama_folder / "tokenizer_config.json", **fields)
    ours = Tokenizer(llama_folder)
    theirs = transformers.AutoTokenizer.from_pretrained(str(llama_folder))
    for text in ("a <mark> b", "<mark><mark>", "</mark>", "<mark"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_a_token_that_the_model_has_no_row_for_is_not_added(llama_folder: Path) -> None:
    size = Tokenizer(llama_folder).vocab_size
    change(llama_folder / "config.json", vocab_size=size)
    change(llama_folder / "tokenizer_config.json", pad_token="<mark>")
    ours = Tokenizer(llama_folder)
    assert ours.vocab_size == size and max(ours.encode("a <mark>")) < size


@pytest.mark.parametrize("id", [-1, 10**6, 1 << 32, 10**30])
def test_an_id_outside_of_the_vocabulary_has_no_text(folder, id):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("ab")
    assert tokenizer.decode([*ids, id]) == tokenizer.decode(ids)


def test_bos_follows_the_files(folder):
    tokenizer = Tokenizer(folder)
    gemma = tokenizer.bos_token_id == 2
    assert (tokenizer.encode("ab")[0] == tokenizer.bos_token_id) == gemma
    change(folder / "tokenizer_config.json", add_bos_token=not gemma)
    assert (Tokenizer(folder).encode("ab")[0] == tokenizer.bos_token_id) != gemma
    change(folder / "tokenizer_config.json", add_bos_token=...)  # then tokenizer.json decides
    assert (Tokenizer(folder).encode("ab")[0] == tokenizer.bos_token_id) == gemma


def test_eos_ids_are_those_of_the_model_and_the_tokenizers_own(llama_folder):
    change(
        llama_folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>"}
    )  # token 2
    change(llama_folder / "generation_config.json", eos_token_id=[2, 0])
    change(llama_folder / "config.json", eos_token_id=1)
    ids = {}
    for name in ("generation_config.json", "config.json"):
        ids[name] = ModelConfig.from_folder(llama_folder).eos_token_ids
        change(llama_folder / name, eos_token_id=None)
    assert ids == {"generation_config.json": (2, 0), "config.json": (1, 2)}
    assert ModelConfig.from_folder(llama_folder).eos_token_ids == (2,)
    change(llama_folder / "tokenizer_config.json", eos_token=None)
    assert ModelConfig.from_folder(llama_folder).eos_token_ids == ()


@pytest.mark.parametrize("decoder", [True, False], ids=["new config", "old config"])
def test_special_tokens_of_all_files_reach_the_template(llama_folder, decoder):
    """Which of two names counts depends on the version of the files, as in `transformers`."""
    special = json.loads((llama_folder / "tokenizer.json").read_text())["added_tokens"]
    known = {str(each.pop("id")): each for each in map(dict, special)}
    fields = {"bos_token": ..., "eos_token": "<|im_end|>"}
    fields |= {"extra_special_tokens": {"image_token": "<|im_start|>"}}
    fields |= {"chat_template": "{{ bos_token }}/{{ eos_token }}/{{ image_token }}"}
    fields |= {"added_tokens_decoder": known} if decoder else {}
    change(llama_folder / "tokenizer_config.json", **fields)
    names = {
        "bos_token": {"content": "<|im_start|>", "lstrip": False},
        "eos_token": "<|endoftext|>",
    }
    (llama_folder / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer(llama_folder)
    found = tokenizer.templates.plain.render(
        [{"role": "user", "content": "a"}], add_generation_prompt=False
    )
    assert found.split("/") == [
        "<|im_start|>",
        "<|im_end|>" if decoder else "<|endoftext|>",
        "<|im_start|>",
    ]
    assert tokenizer.backend.token_to_id("<|im_start|>") == tokenizer.bos_token_id
    if not decoder:
        theirs = transformers.AutoTokenizer.from_pretrained(llama_folder)
        assert found == theirs.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False
        )


def test_a_prompt_that_begins_a_text_itself_is_not_begun_twice(folder):
    tokenizer = Tokenizer(folder)
    bos = tokenizer.bos_token_id
    change(folder / "tokenizer_config.json", add_bos_token=True)
    for tokenizer in (tokenizer, Tokenizer(folder)):  # noqa: B020
        begin = tokenizer.backend.id_to_token(bos)
        plain = tokenizer.encode("ab", add_special_tokens=False)
        assert bos not in plain
        for times in (1, 2, 3):  # those that the prompt has stay as many
            assert tokenizer.encode(begin * times + "ab") == [bos] * times + plain
            assert (
                tokenizer.encode(begin * times + "ab", add_special_tokens=False)
                == [bos] * times + plain
            )


def test_a_chat_gets_special_tokens_once(folder):
    change(folder / "tokenizer_config.json", add_bos_token=True)
    tokenizer = Tokenizer(folder)
    begin = tokenizer.backend.id_to_token(tokenizer.bos_token_id)
    for template, count in (
        ("{{ messages[0].content }}", 0),
        (begin + "{{ messages[0].content }}", 1),
    ):
        change(folder / "tokenizer_config.json", chat_template=template)
        tokenizer = Tokenizer(folder)
        for text in ("ab", begin):  # a user's is ordinary text
            messages = [{"role": "user", "content": text}]
            plain, more = (
                tokenizer.chat(messages, add_special_tokens=more) for more in (False, True)
            )
            assert plain.count(tokenizer.bos_token_id) == count
            assert more == ([] if count else [tokenizer.bos_token_id]) + plain


@pytest.mark.parametrize("token", [5, {"content": 5}, ["a"]], ids=str)
def test_a_special_token_of_the_wrong_type_is_named(llama_folder, token):
    change(llama_folder / "tokenizer_config.json", bos_token=token)
    with pytest.raises(
        UserError, match=r"bos_token of .*tokenizer_config.json is .* but must be a string"
    ):
        Tokenizer(llama_folder)


def test_published_truncation_and_padding_are_switched_off(llama_folder):
    backend = Backend.from_file(str(llama_folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    backend.save(str(llama_folder / "tokenizer.json"))
    assert len(Tokenizer(llama_folder).encode("x" * 20)) == 20


def test_unusable_files_are_named(llama_folder):
    path, config = llama_folder / "tokenizer.json", llama_folder / "tokenizer_config.json"
    change(llama_folder / "config.json", vocab_size=200)
    with pytest.raises(
        UserError,
        match=r"tokenizer\.json has 300 tokens, but the model of config\.json has 200",
    ):
        Tokenizer(llama_folder)
    change(llama_folder / "config.json", vocab_size=512)
    change(config, chat_template=[{"name": "default"}, "x"])
    with pytest.raises(UserError, match="has no chat template"):
        Tokenizer(llama_folder).chat(MESSAGES)
    template = llama_folder / "chat_template.jinja"
    template.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer(llama_folder).chat(MESSAGES)
    with template.open("wb") as file:
        file.truncate(50_000_000)
    with pytest.raises(
        UserError, match=r"chat_template\.jinja has 50000000 bytes, .* at most 262144"
    ):
        Tokenizer(llama_folder).chat(MESSAGES)
    config.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer(llama_folder)
    for content in (b"\xff\xfe", b"[]", b"null", b"{"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"tokenizer\.json cannot be used"):
            Tokenizer(llama_folder)


@pytest.mark.parametrize("text", [text * (1 + 3000 // len(text)) for text in HARD])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_long_texts_have_the_ids_and_the_words_that_the_library_gives_short_ones(
    made, kind, text
):
    tokenizer = Tokenizer(made[kind])
    text = f"<|im_start|>{text}<bos>{text}"
    for either in (True, False):
        found = tokenizer.encode(text, either)
        assert found == tokenizer.backend.encode(text, add_special_tokens=either).ids
        assert len(found) > 2000
        assert tokenizer.decode(found, either) == tokenizer.backend.decode(
            found, skip_special_tokens=either
        )


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_a_long_text_holds_nobody_up(made, way):
    """Not even one of some threads that the system runs seldom: the best of five tries counts."""
    tokenizer, text = Tokenizer(made["llama"]), " ".join(map(str, range(60_000)))
    given = text if way == "encode" else tokenizer.encode(text) * 4
    shares = []
    while len(shares) < 5 and not any(share < 1 / 2 for share in shares):
        shares.append(longest_pause(partial(getattr(tokenizer, way), given)))
    assert min(shares) < 1 / 2, f"another thread stood still for {shares} of the time"


def longest_pause(call):
    """The part of a call's time for which another thread stands still at most."""
    with ThreadPoolExecutor(1) as threads:
        times = [time.perf_counter()]
        done = threads.submit(call)
        while not done.done():
            times.append(
                time.perf_counter()
            )  # the first too late where the lock is taken at once
            time.sleep(0.002)
        times.append(time.perf_counter())
    return max(late - early for early, late in pairwise(times)) / (times[-1] - times[0])


MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("place", ["config", "named", "jinja", "json"])
def test_templates_are_found_where_authors_put_them(llama_folder, place):
    config, template = (
        llama_folder / "tokenizer_config.json",
        "{{ bos_token }}{{ messages[0].content }}",
    )
    change(config, chat_template=..., bos_token={"content": "<|im_start|>"})
    if place == "config":
        change(config, chat_template=template)
    elif place == "named":
        named = {"tool_use": "wrong", "default": template}
        change(config, chat_template=[{"name": k, "template": v} for k, v in named.items()])
    elif place == "jinja":
        change(config, chat_template="wrong")
        (llama_folder / "chat_template.jinja").write_text(template)
    else:
        (llama_folder / "chat_template.json").write_text(
            json.dumps({"chat_template": template})
        )
    tokenizer = Tokenizer(llama_folder)
    assert tokenizer.decode(tokenizer.chat(MESSAGES), False) == "<|im_start|>hello"


def test_smollm2_chat_equals_transformers(smollm2_folder):
    ours, theirs = (
        Tokenizer(smollm2_folder),
        transformers.AutoTokenizer.from_pretrained(smollm2_folder),
    )
    for messages in (MESSAGES, [{"role": "system", "content": "Be brief."}, *MESSAGES]):
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert ours.chat(messages) == expected
    assert ours.vocab_size == 49_152
    assert theirs.decode(ours.chat(MESSAGES)).endswith("<|im_start|>assistant\n")


def test_the_most_characters_of_a_token(llama_folder):
    def most(normalizer: dict[str, object] | None) -> int | None:
        change(llama_folder / "tokenizer.json", normalizer=normalizer)
        return Tokenizer(llama_folder).characters_per_token

    longest = max(map(len, Tokenizer(llama_folder).backend.get_vocab()))
    assert most(None) == longest
    assert most({"type": "NFC"}) == 4 * longest, "letters and accents may become one character"


@pytest.mark.parametrize("kind", ["normalizer", "decoder"])
def test_steps_that_fill_any_memory_are_refused(llama_folder, kind):
    def steps(text: str, content: str, times: int) -> dict[str, object]:
        one = {"type": "Replace", "pattern": {"String": text}, "content": content}
        return {kind: {"type": "Sequence", f"{kind}s": [one] * times}}

    change(llama_folder / "tokenizer.json", **steps("a", 1000 * "a", 3))
    with pytest.raises(
        UserError, match=rf"the {kind} of .* up to 1,000,000,000 times as long"
    ):
        Tokenizer(llama_folder)
    change(llama_folder / "tokenizer.json", **steps(" ", "\u2581", 1))
    Tokenizer(llama_folder)
