"""Arguments of the chat template, prompts that are cut, and datasets that are refused."""

import pytest
from datasets import Dataset

from alpaca_ppo.data import prepare_prompts
from tests.data.test_prompts import ASSISTANT, ONE, THREE, TWO, USER, WORDS, prepare
from tests.data.tokenizers import chat_tokenizer, framing_tokenizer
from tests.tiny_models import BOS, EOS

THINKING = "{% if add_generation_prompt and not enable_thinking | default(true) %} three {% endif %}"
CHAT = {"prompt": [{"role": "user", "content": "one two"}]}


def test_the_chat_template_gets_its_arguments():
    tokenizer = chat_tokenizer(WORDS)
    tokenizer.chat_template += THINKING
    default = prepare([CHAT], tokenizer)
    assert default[0]["input_ids"] == [BOS, USER, ONE, TWO, EOS, BOS, ASSISTANT]
    without = prepare([CHAT], tokenizer, chat_template_kwargs={"enable_thinking": False})
    # As Qwen3's template writes an empty section of thoughts.
    assert without[0]["input_ids"] == [BOS, USER, ONE, TWO, EOS, BOS, ASSISTANT, THREE]
    assert without.fingerprint != default.fingerprint


def test_a_column_that_is_a_field_of_the_prompt_is_text_whatever_its_name():
    rows = [{"question": "one", "tools": "two"}]
    prompts = prepare(rows, chat_tokenizer(WORDS), user_template="{question} {tools}")
    assert prompts[0]["input_ids"] == [BOS, USER, ONE, TWO, EOS, BOS, ASSISTANT]
    with pytest.raises(ValueError, match="column 'tools' is 'two'; make it a list of JSON schemas"):
        prepare(rows, chat_tokenizer(WORDS), user_template="{question}")


def test_a_long_text_loses_its_beginning_but_not_its_bos():
    rows = [{"prompt": "one two three one"}, {"prompt": "two"}]
    prompts = prepare(rows, query_len=3, overlong="truncate")
    assert [prompts[i]["input_ids"] for i in range(2)] == [[TWO, THREE, ONE], [TWO]]
    assert (prompts.num_dropped, prompts.num_cut) == (0, 1)
    assert str(prompts) == "2 prompts (0 dropped as overlong, 1 without their beginning)"
    assert prompts[0]["row"]["prompt"] == "one two three one"
    framed = prepare(rows, framing_tokenizer(WORDS, frame="<bos> $A"), query_len=3, overlong="truncate")
    assert framed[0]["input_ids"] == [BOS, THREE, ONE]
    # Room for the bos alone: nothing of the text is left beside it.
    alone = prepare(rows, framing_tokenizer(WORDS, frame="<bos> $A"), query_len=1, overlong="truncate")
    assert alone[0]["input_ids"] == [BOS]


def test_a_long_conversation_keeps_what_the_template_writes_before_an_answer():
    prompts = prepare([CHAT], chat_tokenizer(WORDS), query_len=5, overlong="truncate")
    # Whole: bos user one two eos bos assistant.
    assert prompts[0]["input_ids"] == [BOS, TWO, EOS, BOS, ASSISTANT]


@pytest.mark.parametrize("column", ["image", "images", "pixel_values", "video", "videos"])
def test_a_column_of_images_is_refused_by_name(column):
    with pytest.raises(ValueError, match=rf"has a column '{column}', but the policy reads only text"):
        prepare([{"prompt": "one", column: "a.png"}])


def test_a_stream_is_refused_with_a_way_round_it_that_works():
    stream = Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}]).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"is a IterableDataset; .*Dataset.from_list\(list\(stream.take\(10000\)\)"):
        prepare_prompts(stream, chat_tokenizer(WORDS), query_len=4)
    taken = Dataset.from_list(list(stream.take(10000)), features=stream.features)
    assert len(prepare_prompts(taken, chat_tokenizer(WORDS), query_len=4)) == 2
