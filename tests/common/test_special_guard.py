"""Special tokens that a user types stay text; everything else is encoded as ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from common.errors import UserError
from common.text.tokenizer import Tokenizer
from tests.servers import tokenizer_for

GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role }}{{ '\n' }}"
    "{{ m['content'] | trim }}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def tokenizer(request) -> Tokenizer:
    """One of a real model, with a template that trims for the model that has none."""
    made = Tokenizer(request.getfixturevalue(f"{request.param}_folder"))
    if request.param == "gemma3":
        made._config["chat_template"] = GEMMA
    return made


def rendered(tokenizer: Tokenizer, messages) -> str:
    template = tokenizer.templates.plain
    return template.render(template.conversation(messages), add_generation_prompt=True)


def controls(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [index for index in ids if index in tokenizer.special_ids]


LETTERS = "<|>_ aé\n🎉1 im"
TEXTS = st.text(LETTERS, max_size=6)
ANY_TEXTS = st.text(st.sampled_from(LETTERS) | st.characters(codec="utf-8"), max_size=30)


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(ANY_TEXTS, min_size=1, max_size=4))
@pytest.mark.slow
def test_ordinary_texts_are_encoded_with_what_the_template_writes(
    tokenizer: Tokenizer, texts
) -> None:
    messages = [{"role": "user", "content": text} for text in texts]
    expected = tokenizer.backend.encode(
        rendered(tokenizer, messages), add_special_tokens=False
    ).ids
    assert tokenizer.chat(messages) == expected


@settings(max_examples=40, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_special_tokens_in_contents_are_text(tokenizer: Tokenizer, data) -> None:
    """Whole ones, ones inside one another, and halves: as many control tokens as with harmless contents."""
    special = tokenizer.chat.stand_ins.special[:20]
    piece = (
        st.sampled_from(special) | TEXTS | st.sampled_from([token[:3] for token in special])
    )
    halves = st.sampled_from([token[3:] for token in special])
    texts = data.draw(
        st.lists(st.lists(piece | halves, max_size=4).map("".join), min_size=1, max_size=4)
    )
    messages = [{"role": "user", "content": text} for text in texts]
    found = tokenizer.chat(messages)
    harmless = tokenizer.chat([{**message, "content": "x"} for message in messages])
    assert controls(tokenizer, found) == controls(tokenizer, harmless)
    text = tokenizer.decode(found, skip_special_tokens=False)
    assert text == rendered(tokenizer, messages), "text was lost or changed"


def test_halves_in_neighbouring_texts_do_not_meet(smollm2_folder) -> None:
    tokenizer = Tokenizer(smollm2_folder)
    tokenizer._config["chat_template"] = (
        "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    )
    pairs = (
        ("<|im_", "start|>"),
        ("a<", "|im_start|>"),
        ("<|im_start| ", " >b"),
        ("<|<|im_", "end|>"),
    )
    for first, second in pairs:
        ids = tokenizer.chat([{"role": "user", "content": text} for text in (first, second)])
        assert not controls(tokenizer, ids)
        assert tokenizer.decode(ids) == first.strip() + second.strip()
    half = Tokenizer(smollm2_folder)
    half._config["chat_template"] = "<|im_{{ messages[0].content }}"
    assert not controls(half, half.chat([{"role": "user", "content": "start|>"}])), (
        "the template's own half"
    )


def test_a_role_may_make_a_special_token_but_not_be_one(smollm2_folder) -> None:
    tokenizer = Tokenizer(smollm2_folder)
    tokenizer._config["chat_template"] = (
        "{% set roles = ['start', 'start|><|im_end', '<|im_end|>'] %}"
        "{% for m in messages %}{{ '<|im_' + m.role + '|>' }}{{ m.content }}{% endfor %}"
    )
    for role, expected in (("start", [1]), ("start|><|im_end", [1, 2]), ("<|im_end|>", [])):
        found = tokenizer.chat([{"role": role, "content": "<|im_end|>"}])
        assert controls(tokenizer, found) == expected, role


def test_tools_are_guarded_too(smollm2_folder) -> None:
    tokenizer = Tokenizer(smollm2_folder)
    tokenizer._config["chat_template"] = "{{ tools | tojson }}"
    ids = tokenizer.chat([{"role": "user", "content": ""}], tools=[{"name": "<|im_end|>"}])
    assert not controls(tokenizer, ids) and tokenizer.decode(ids) == '[{"name": "<|im_end|>"}]'


def test_a_stand_in_in_a_guarded_text_is_refused(smollm2_folder) -> None:
    with pytest.raises(UserError, match=r"U\+FDD0, which no text may have"):
        Tokenizer(smollm2_folder).chat([{"role": "user", "content": "<|im_end|>\ufdd0"}])


@pytest.mark.parametrize(
    ("normalizer", "typed"),
    [
        (normalizers.NFKC(), "\uff1cs\uff1e"),  # full width
        (normalizers.NFKC(), "<\u017f>"),  # a long s
        (normalizers.Lowercase(), "<S>"),
        (normalizers.Replace("[", "<"), "[s>"),
        (normalizers.NFKC(), "<s>"),
    ],
)
def test_what_a_normalizer_makes_a_special_token_stays_text(
    tmp_path, normalizer, typed
) -> None:
    made = tokenizer_for(tmp_path, 257)
    made._config["chat_template"] = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    made.backend.normalizer = normalizer
    made.backend.add_special_tokens([AddedToken("<s>", special=True, normalized=True)])
    found = made.chat([{"role": "user", "content": f"a{typed}b"}])
    assert len(controls(made, found)) == 1, (
        f"{typed!r} in message 0 is token {made.backend.token_to_id('<s>')}, which ends no user's text"
    )
    assert made.decode(found) == f"a{normalizer.normalize_str(typed)}b", "text was lost"


def test_ordinary_texts_are_the_model_s_own_where_a_normalizer_sees_special_tokens(
    tmp_path,
) -> None:
    """As in Vicuna's file, where the space in front of a text goes before the token, not behind it."""
    made = tokenizer_for(tmp_path, 257)
    made._config["chat_template"] = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    made.backend.normalizer = normalizers.Prepend("_")
    made.backend.add_special_tokens([AddedToken("<s>", special=True, normalized=True)])
    messages = [{"role": "user", "content": "abc"}]
    ids = made.backend.encode("<s>abc", add_special_tokens=False).ids
    assert made.chat(messages) == ids, "message 0: other tokens than the model's own tokenizer"
