"""Of a long answer little more is tokenized than there are columns for, and these are the same tokens."""

import random

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from alpaca_ppo.environments.conversation import tool_message
from alpaca_ppo.environments.kinds import make_kinds
from tests.data.tokenizers import LLAMA_3
from tests.environments.chat import WITH_TOOLS, conversation
from tests.environments.test_episodes import Played, call

COLUMNS = 300
WORDS = ["alpaca", "llama", "of", "Peru", "wool", "incommensurability", "a", "mountains"]
LONG = " ".join(random.Random(5).choices(WORDS, k=170_000))


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **keywords):
        self.characters += len(text)
        return self.tokenizer(text, **keywords)


@pytest.fixture(scope="module")
def pieces():
    """Byte-level, with pieces of words and of white space that have up to 32 characters."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False)
    tokenizer.train_from_iterator([LONG[:2000], " " * 32 + "x"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def of_template(pieces, template):
    pieces.chat_template = template.replace("<|im_end|>", "<eos>").replace("<|eot_id|>", "<eos>")
    return conversation(Counting(pieces))


@pytest.mark.parametrize("template", [WITH_TOOLS, LLAMA_3], ids=["as it is", "stripped"])
@pytest.mark.parametrize(
    "text",
    [
        "short",
        " " * 9000 + LONG[:9000],
        LONG[:500] + " " * 40_000 + LONG[:9000],
        " " * 40_000,
        "\n".join(LONG[:40_000]),
    ],
    ids=["short", "after space", "around space", "space", "lines"],
)
def test_the_first_columns_are_the_tokens_of_the_whole(pieces, template, text):
    chat, results = of_template(pieces, template), [tool_message("get", said, 0) for said in (text, "second")]
    whole, written = (chat.reply_ids(results, stopped_by_token=True, columns=columns) for columns in (None, COLUMNS))
    assert written[:COLUMNS] == whole[:COLUMNS]
    assert len(written) < 20 * COLUMNS


def test_of_a_million_characters_few_are_read_and_the_first_columns_are_the_same(pieces):
    chat, results = of_template(pieces, WITH_TOOLS), [tool_message("get", LONG, 0)]
    assert len(LONG) > 1_000_000
    written = chat.reply_ids(results, stopped_by_token=True, columns=COLUMNS)
    # Eight characters a column and a few more, once to see whether they are enough and once in the message.
    assert chat.tokenizer.characters < 20 * COLUMNS
    assert written[:COLUMNS] == chat.reply_ids(results, stopped_by_token=True)[:COLUMNS]


def test_an_episode_cuts_what_the_policy_reads_and_keeps_the_message():
    def get() -> str:
        """Gets."""
        return "x" * 100_000

    played = Played(make_kinds([get], None), response_len=500)
    first = played.say("I get it." + call("get"))
    assert 500 < len(first) < 8000
    assert played.episode.messages[-1]["content"] == get()
    played.end()
