"""Text in and out: whatever the runs, a stream says what the whole says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.workers.tokenizers import CALL, END, LATIN, byte_fallback, byte_level
from verifier.errors import BadRequest, CheckpointError
from workers.template import ChatTemplate
from workers.text import StopStrings, Text

KINDS = {"byte level": byte_level, "byte fallback": byte_fallback}
SOUP = "日本語 é 😀👩‍👩‍👧   the  naïve\n\t" + CALL
CHATML = (
    "{%- for message in messages %}\n"
    "{% generation %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endgeneration %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def split(items: Sequence[int] | str, cuts: Sequence[int]) -> list[Sequence[int] | str]:
    """``items`` in runs that end at ``cuts``."""
    ends = sorted(cut % (len(items) + 1) for cut in cuts)
    return [items[start:end] for start, end in zip([0, *ends], [*ends, len(items)], strict=True)]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    id = tokenizer.token_to_id(token)
    assert id is not None
    return id


def streamed(text: Text, ids: Sequence[int], cuts: Sequence[int] = (), *, continues: bool = False) -> list[str]:
    detokenizer = text.detokenizer(continues=continues)
    runs = [[int(id) for id in run] for run in split(ids, cuts)]
    return [*(detokenizer.push(run) for run in runs), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_runs_join_to_the_whole(kind: str, data: st.DataObject, cuts: list[int]) -> None:
    """Random ids: mostly invalid UTF-8, with special tokens, added tokens and a padded vocabulary's unused ids."""
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=30))
    assert "".join(streamed(Text(tokenizer), ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@given(
    source=st.text(alphabet=st.sampled_from(SOUP) | st.characters(exclude_categories=["Cs"])),
    cuts=st.lists(st.integers(0, 99)),
)
@example(source=SOUP, cuts=list(range(99)))
@example(source="  two spaces first", cuts=[1])
def test_text_comes_back(kind: str, source: str, cuts: list[int]) -> None:
    tokenizer = KINDS[kind]()
    text = Text(tokenizer)
    ids = text.encode(source)
    pieces = streamed(text, ids, cuts)
    assert "".join(pieces) == tokenizer.decode(ids) == source
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in source
    assert text.decode(ids) == source


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_appears_with_its_last_byte(kind: str) -> None:
    """Not before it, as half a character, and not long after it."""
    text = Text(KINDS[kind]())
    ids = text.encode("😀x")
    pieces = streamed(text, ids, list(range(len(ids))))
    assert [piece for piece in pieces if piece] in (["😀", "x"], ["😀x"])


def test_invalid_bytes_become_text_as_soon_as_they_are_certain() -> None:
    """A detokeniser that waits while its text ends in U+FFFD would wait for ever here."""
    tokenizer = byte_level()
    start_of_three = id_of(tokenizer, "æ")  # byte E6, which two more have to follow
    detokenizer = Text(tokenizer).detokenizer()
    assert [detokenizer.push([start_of_three]) for _ in range(4)] == ["", "\ufffd", "\ufffd", "\ufffd"]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_added_tokens_are_text_and_special_ones_are_not() -> None:
    text = Text(byte_level())
    assert text.decode(text.encode(f"a{CALL}b{LATIN}{END}c")) == f"a{CALL}b{LATIN}c"


def test_a_continued_text_keeps_its_leading_space() -> None:
    """A completion's prompt and answer are put together by the client; without the space words would run together."""
    tokenizer = byte_fallback()
    ids = [id_of(tokenizer, piece) for piece in ("▁the", "▁the")]
    assert "".join(streamed(Text(tokenizer), ids)) == "the the"
    assert "".join(streamed(Text(tokenizer), ids, continues=True)) == " the the"


def test_an_unknown_decoder_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE())
    with pytest.raises(CheckpointError, match="missing"):
        Text(tokenizer)
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        Text(tokenizer)


def cut_char_by_char(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The definition: read on until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(
    text=st.text("ab\n", max_size=14),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 20), max_size=8),
)
@example(text="aab", stops=["ab"], cuts=[2])
@example(text="xabc", stops=["abc", "b"], cuts=[])
@example(text="ababac", stops=["abac"], cuts=[1, 2, 3, 4, 5])
def test_stops_cut_the_same_in_any_runs(text: str, stops: list[str], cuts: list[int]) -> None:
    """Inside a run, across runs, overlapping, several at once."""
    expected, expected_stop = cut_char_by_char(text, stops)
    stopper = StopStrings(stops)
    shown, given_text = "", ""
    for run in split(text, cuts):
        given_text += str(run)
        piece, stopped = stopper.push(str(run))
        shown += piece
        longest_held = max(map(len, stops), default=1) - 1
        assert stopped or given_text.startswith(shown)
        assert stopped or len(given_text) - len(shown) <= longest_held
    assert shown + stopper.flush() == expected
    assert stopper.push("more") == (("", True) if expected_stop else ("more", False)) or stops


def test_only_what_may_become_a_stop_is_held_back() -> None:
    stopper = StopStrings(["<END>", "\n\n"])
    assert stopper.push("a <EN") == ("a ", False)
    assert stopper.push("V") == ("<ENV", False)
    assert stopper.push("\n") == ("", False)
    assert stopper.push("b") == ("\nb", False)
    assert stopper.push("c\n\nd<END>") == ("c", True)
    assert stopper.push("e") == ("", True)
    assert stopper.flush() == ""


def test_chat_template() -> None:
    template = ChatTemplate(CHATML, {})
    messages = [{"role": "user", "content": " hi <b> "}, {"role": "assistant", "content": "yo"}]
    expected = "<|im_start|>user\nhi <b><|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages) == expected


def test_what_templates_may_use() -> None:
    source = (
        "{{ bos_token }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render([{"content": "<é>"}, {"content": "no"}])
    assert rendered == '<s>{"content": "<é>"}4True'


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[5].content.strip() }}", "{{ messages.pop() }}"],
)
def test_a_template_that_refuses_is_the_client_s_mistake(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


def test_half_a_surrogate_pair_is_the_client_s_mistake() -> None:
    """The tokenizers library answers with a TypeError, which would have been a 500."""
    with pytest.raises(BadRequest, match="prompt"):
        Text(byte_level()).encode("a\ud83d")


def test_without_a_template_a_conversation_is_refused() -> None:
    with pytest.raises(BadRequest, match="no chat template"):
        Text(byte_level()).chat_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("place", ["settings", "settings list", "jinja file", "json file"])
def test_load_finds_the_template(tmp_path: Path, place: str) -> None:
    settings: dict[str, object] = {"eos_token": {"content": END}}
    source = "{{ messages[0].content }}{{ eos_token }}"
    byte_level().save(str(tmp_path / "tokenizer.json"))
    if place == "settings":
        settings["chat_template"] = source
    elif place == "settings list":
        settings["chat_template"] = [{"name": "tool_use", "template": "-"}, {"name": "default", "template": source}]
    elif place == "jinja file":
        (tmp_path / "chat_template.jinja").write_text(source)
    else:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    text = Text.load(tmp_path)
    end = id_of(byte_level(), END)
    assert text.chat_ids([{"role": "user", "content": "hello"}]) == [*text.encode("hello"), end]


def test_load_ignores_what_training_cut_and_padded_to(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Text.load(tmp_path).encode("hello world") == byte_level().encode("hello world").ids


def test_load_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Text.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Text.load(tmp_path)


@pytest.mark.slow
def test_the_default_model_s_text_is_transformers_own() -> None:
    """Its template and its tokenizer, digits included."""
    from transformers import AutoTokenizer

    from verifier.default_model import default_model_path

    folder = default_model_path()
    theirs, ours = AutoTokenizer.from_pretrained(folder), Text.load(folder)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1234 * 5678?\n日本語 😀"},
        {"role": "assistant", "content": "7006652."},
        {"role": "user", "content": "And in words?  "},
    ]
    ids = ours.chat_ids(messages)
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert "".join(streamed(ours, ids, list(range(0, len(ids), 3)))) == ours.decode(ids)
