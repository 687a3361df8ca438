import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from alpaca_ppo.rewards import ModelReward, RewardBatch, RewardError, build_reward
from tests.data.tokenizers import byte_tokenizer, chat_tokenizer, framing_tokenizer
from tests.tiny_models import (
    ARCHITECTURES,
    BOS,
    EOS,
    MAX_POSITIONS,
    MIXTURES,
    PAD,
    SMALLEST,
    tiny_causal_lm,
    tiny_config,
    tiny_sequence_classifier,
    tiny_tokenizer,
)

WORDS = ["one", "two", "three", "user", "assistant", "system", "named"]
ONE, TWO, THREE, USER, ASSISTANT = range(4, 9)
# Of different lengths: one ends with eos, one has eos inside, one is a single token.
PROMPTS = ["one two", "three", "two <eos> one three", "one"]
COMPLETIONS = [" three", " two one <eos>", " two", ""]


def score(model, tokenizer, prompts=PROMPTS, completions=COMPLETIONS, **options):
    scorer = build_reward(model, reward_processing_classes=tokenizer, **options)
    rows = [{"prompt": prompt} for prompt in prompts]
    return scorer(prompts, completions, [[1]] * len(prompts), rows).rewards


def alone(model, sequences):
    """Each sequence's score in its own batch, without padding."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[:, 0] for ids in sequences]).float()


def ids_of(tokenizer):
    return [tokenizer(p + c)["input_ids"] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


@pytest.mark.parametrize("padding_free", [True, False])
def test_no_rows_have_no_scores(padding_free):
    model = tiny_sequence_classifier("llama")
    source = ModelReward(model, tiny_tokenizer(WORDS), name="model", batch_size=2, padding_free=padding_free)
    assert source(RewardBatch([], [], [], [])) == []


def test_the_chat_template_gets_the_tools_and_arguments_in_the_columns_of_a_row():
    model, tokenizer = tiny_sequence_classifier("llama"), chat_tokenizer(WORDS)
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }} {% endfor %}{{ more }} " + tokenizer.chat_template
    messages = [{"role": "user", "content": "one"}]
    rows = [
        {"prompt": messages, "tools": '[{"name": "two"}]', "chat_template_kwargs": {"more": "three"}},
        {"prompt": messages, "tools": None, "chat_template_kwargs": None},
    ]
    scorer = build_reward(model, reward_processing_classes=tokenizer)
    scores = scorer([messages] * 2, ["two"] * 2, [[1]] * 2, rows).rewards
    turns = [BOS, USER, ONE, EOS, BOS, ASSISTANT, TWO, EOS]
    assert_close(scores, alone(model, [[TWO, THREE, *turns], turns]))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("pad_token_id", [PAD, EOS, None])
def test_a_row_is_scored_the_same_in_any_batch(arch, pad_token_id, batch_size):
    model = tiny_sequence_classifier(arch, pad_token_id=pad_token_id)
    tokenizer = tiny_tokenizer(WORDS)
    expected = alone(model, ids_of(tokenizer))
    assert_close(score(model, tokenizer, batch_size=batch_size), expected, atol=1e-5, rtol=1e-5)
    assert expected.unique().numel() == len(PROMPTS)
    assert model.config.pad_token_id == pad_token_id


@pytest.mark.parametrize(("end", "end_id"), [(" <eos>", EOS), (" <pad>", PAD), (" two", TWO)])
def test_without_a_pad_token_the_score_is_read_at_the_very_last_token(end, end_id):
    model = tiny_sequence_classifier("gpt2", pad_token_id=None)
    with torch.no_grad():
        hidden = model.transformer(torch.tensor([[ONE, end_id]])).last_hidden_state
        expected = model.score(hidden)[0, -1]
    rewards = score(model, tiny_tokenizer(WORDS), ["one", "one"], [end, " two three one"])
    assert_close(rewards[:1], expected, atol=1e-5, rtol=1e-5)


def test_the_tokenizers_pad_token_does_not_matter():
    model = tiny_sequence_classifier("llama", pad_token_id=PAD)
    tokenizer = tiny_tokenizer(WORDS)
    expected = alone(model, ids_of(tokenizer))
    tokenizer.pad_token = "three"
    assert_close(score(model, tokenizer), expected, atol=1e-5, rtol=1e-5)


def test_a_pad_id_outside_the_vocabulary_counts_as_no_pad_id():
    model = tiny_sequence_classifier("llama", pad_token_id=None)
    tokenizer = tiny_tokenizer(WORDS)
    expected = score(model, tokenizer)
    model.config.pad_token_id = -1
    assert_close(score(model, tokenizer), expected)


def test_a_byte_tokenizer_without_pad_token_scores_any_text():
    tokenizer = byte_tokenizer()
    model = tiny_sequence_classifier("gpt2", vocab_size=len(tokenizer), pad_token_id=None)
    prompts, completions = ["日本語 ", "Où ?"], ["🎵", " là"]
    expected = alone(
        model, [[b for b in tokenizer(p + c)["input_ids"]] for p, c in zip(prompts, completions, strict=True)]
    )
    assert len(tokenizer("日本語 🎵")["input_ids"]) == len("日本語 🎵".encode())
    assert_close(score(model, tokenizer, prompts, completions), expected, atol=1e-5, rtol=1e-5)


def test_an_encoder_is_scored_with_its_mask():
    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=1
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in model.parameters():
        # With the small default initialization, attention to padding would not change the scores visibly.
        parameter.data.normal_(0.0, 0.3)
    tokenizer = tiny_tokenizer(WORDS)
    assert_close(score(model, tokenizer), alone(model, ids_of(tokenizer)), atol=1e-5, rtol=1e-5)


def test_text_gets_the_special_tokens_of_the_reward_models_tokenizer():
    model = tiny_sequence_classifier("llama")
    tokenizer = framing_tokenizer(WORDS, frame="<bos> $A")
    assert_close(score(model, tokenizer, ["one"], [" two"]), alone(model, [[BOS, ONE, TWO]]), atol=1e-5, rtol=1e-5)


def test_messages_go_through_the_reward_models_chat_template():
    model = tiny_sequence_classifier("llama")
    messages = [{"role": "user", "content": "one"}]
    rewards = score(model, chat_tokenizer(WORDS), [messages, messages], ["two", "three three three"])
    expected = alone(
        model,
        [
            [BOS, USER, ONE, EOS, BOS, ASSISTANT, TWO, EOS],
            [BOS, USER, ONE, EOS, BOS, ASSISTANT, THREE, THREE, THREE, EOS],
        ],
    )
    assert_close(rewards, expected, atol=1e-5, rtol=1e-5)


def test_a_text_prompt_with_a_message_completion_is_a_conversation():
    model = tiny_sequence_classifier("llama")
    rewards = score(model, chat_tokenizer(WORDS), ["one"], [[{"role": "assistant", "content": "two"}]])
    expected = alone(model, [[BOS, USER, ONE, EOS, BOS, ASSISTANT, TWO, EOS]])
    assert_close(rewards, expected, atol=1e-5, rtol=1e-5)


def passes(lengths, *, equal_passes=False, packs=True, **options):
    """The shape of the input of each forward pass over texts of so many tokens."""
    model, shapes = tiny_sequence_classifier("llama", **SMALLEST), []
    source = ModelReward(model, tiny_tokenizer(), name="model", **options)
    source.prepare(equal_passes=equal_passes, packs_everywhere=lambda able: able and packs)
    model.register_forward_pre_hook(
        lambda module, args, keywords: shapes.append(tuple(keywords["input_ids"].shape)), with_kwargs=True
    )
    texts = [" ".join(["w5"] * length) for length in lengths]
    source(RewardBatch(texts, [""] * len(texts), [[1]] * len(texts), {}))
    return shapes


def test_a_pass_has_the_tokens_of_so_many_longest_rows():
    # One row of 5 tokens has room for 3 + 1, or for one row that is 3 wide; two have room for 10.
    lengths = [3, 1, 5, 3]
    assert passes(lengths, batch_size=1) == [(1, 5), (1, 3), (1, 4)]
    # Also where another rank cannot lay rows end to end.
    assert passes(lengths, batch_size=1, packs=False) == [(1, 5), (1, 3), (1, 3), (1, 1)]
    assert passes(lengths, batch_size=2) == [(1, 8), (1, 4)]
    assert passes(lengths, batch_size=2, packs=False) == [(2, 5), (2, 3)]
    assert passes([1] * 7 + [7], batch_size=2) == [(1, 14)]


def test_ranks_in_lockstep_make_as_many_passes_as_their_equal_rows_need_and_so_do_rows_with_padding():
    assert passes([1] * 7 + [7], batch_size=3, equal_passes=True) == [(1, 9), (1, 3), (1, 2)]
    assert passes([9, 1] * 4, batch_size=3, padding_free=False) == [(3, 9), (3, 9), (2, 1)]


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *MIXTURES])
def test_rows_end_to_end_are_scored_as_rows_of_their_own(arch):
    # The pad id within a row, at its end, and alone.
    texts = ["w10 w11 w12 w13 w14", "w10 w11 w12", "w10", "one <pad> two", "one two <pad> <pad>", "<pad>"]
    tokenizer = tiny_tokenizer(WORDS)
    for pad_token_id in (PAD, None):
        model = tiny_sequence_classifier(arch, pad_token_id=pad_token_id)
        with torch.no_grad():
            expected = [float(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits) for text in texts]
        inputs = []
        model.register_forward_pre_hook(
            lambda module, args, keywords, kept=inputs: kept.append(keywords["input_ids"]), with_kwargs=True
        )
        found = score(model, tokenizer, texts, [""] * len(texts))
        assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
        # BLOOM's attention is its own, so that its rows stay side by side.
        assert len(inputs[-1]) == (len(texts) if arch == "bloom" else 1)


class MeanScore(LlamaForSequenceClassification):
    """A classifier that reads its score in another way: as the mean over the tokens."""

    def forward(self, input_ids, attention_mask=None, **keywords):
        hidden = self.model(input_ids, attention_mask=attention_mask, **keywords).last_hidden_state
        is_mask = attention_mask is not None and attention_mask.shape == input_ids.shape
        weights = attention_mask if is_mask else torch.ones_like(input_ids)
        logits = self.score(hidden) * weights.unsqueeze(-1)
        return SequenceClassifierOutput(logits=logits.sum(dim=1) / weights.sum(dim=1, keepdim=True))


class Closed(LlamaForSequenceClassification):
    """A classifier that takes no keyword besides these."""

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("kind", [MeanScore, Closed])
def test_a_classifier_that_cannot_be_given_rows_end_to_end_gets_them_with_padding(kind):
    torch.manual_seed(0)
    model = kind(tiny_config("llama", num_labels=1)).eval()
    tokenizer = tiny_tokenizer(WORDS)
    expected = alone(model, ids_of(tokenizer))
    assert expected.unique().numel() == len(PROMPTS)
    assert_close(score(model, tokenizer), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_key_value_cache_is_off_while_scoring(arch):
    model = tiny_sequence_classifier(arch)
    caches = []
    model.register_forward_hook(lambda module, inputs, output: caches.append(output.past_key_values))
    before = model.config.to_dict()
    score(model, tiny_tokenizer(WORDS))
    assert set(caches) == {None}
    assert model.config.to_dict() == before


def test_dropout_is_off_while_scoring_and_the_mode_is_restored():
    model = tiny_sequence_classifier("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    expected = score(model, tiny_tokenizer(WORDS))
    model.train()
    model.transformer.h[0].eval()
    assert_close(score(model, tiny_tokenizer(WORDS)), expected)
    assert model.training and model.score.training and not model.transformer.h[0].mlp.training


def test_half_precision_scores_come_out_in_float32():
    model = tiny_sequence_classifier("llama", dtype=torch.bfloat16)
    rewards = score(model, tiny_tokenizer(WORDS))
    assert rewards.dtype == torch.float32 and not rewards.requires_grad


def saved(tmp_path, model, tokenizer=None):
    folder = tmp_path / "my-reward"
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_folder_is_loaded_in_float32_with_its_own_tokenizer(tmp_path):
    model = tiny_sequence_classifier("llama", dtype=torch.bfloat16)
    folder = saved(tmp_path, model, framing_tokenizer(WORDS, frame="<bos> $A"))
    scorer = build_reward([lambda completions: [1.0] * len(completions), folder], reward_weights=[1.0, 2.0])
    result = scorer(["one"], [" two"], [[1]], [{"prompt": "one"}])
    loaded = scorer.sources[1].model
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    expected = alone(loaded, [[BOS, ONE, TWO]])
    assert_close(result.by_source["my-reward"], expected, atol=1e-5, rtol=1e-5)
    assert_close(result.rewards, 1.0 + 2.0 * expected, atol=1e-5, rtol=1e-5)


def test_the_scorer_moves_its_models():
    model = tiny_sequence_classifier("llama")
    scorer = build_reward([model, lambda completions: []], reward_processing_classes=tiny_tokenizer(WORDS))
    assert scorer.to("meta") is scorer
    assert next(model.parameters()).device.type == "meta"


def test_a_language_model_is_refused(tmp_path):
    folder = saved(tmp_path, tiny_causal_lm("llama"), tiny_tokenizer(WORDS))
    with pytest.raises(ValueError, match=r"my-reward has no weights for score\.weight, which would be random"):
        build_reward(folder)


def test_a_classifier_of_several_labels_is_refused():
    model = tiny_sequence_classifier("llama")
    model.config.num_labels = 3
    with pytest.raises(ValueError, match="'LlamaForSequenceClassification' has num_labels 3"):
        build_reward(model, reward_processing_classes=tiny_tokenizer(WORDS))


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    model = tiny_sequence_classifier("llama")
    with pytest.raises(ValueError, match="'LlamaForSequenceClassification' was built in memory and has no tokenizer"):
        build_reward(model)
    with pytest.raises(ValueError, match="my-reward' has no tokenizer in its folder"):
        build_reward(saved(tmp_path, model))


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_a_text_longer_than_the_context_is_refused_and_not_cut(arch):
    prompts = ["one", "one " * MAX_POSITIONS]
    message = f"takes 1 to {MAX_POSITIONS} tokens but got {MAX_POSITIONS + 1}; .*, on row 1"
    with pytest.raises(RewardError, match=message):
        score(tiny_sequence_classifier(arch), tiny_tokenizer(WORDS), prompts, [" two", "two"])


def test_a_text_longer_than_the_tokenizers_limit_is_refused():
    tokenizer = tiny_tokenizer(WORDS)
    tokenizer.model_max_length = 2
    with pytest.raises(RewardError, match="takes 1 to 2 tokens but got 3"):
        score(tiny_sequence_classifier("bloom"), tokenizer, ["one two"], [" three"])


def test_an_empty_text_is_refused():
    with pytest.raises(RewardError, match="got 0"):
        score(tiny_sequence_classifier("llama"), tiny_tokenizer(WORDS), [""], [""])


def test_a_name_that_is_neither_a_function_nor_a_model_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "run/final/policy").mkdir(parents=True)
    for name in ("./no/such", "rewards.polite", str(tmp_path / "run")):
        with pytest.raises(ValueError, match=f"entry of reward_funcs, .* module:function.* is '{name}', "):
            build_reward(name)


def test_an_adapter_is_refused_as_a_full_reward_model(tmp_path):
    peft = get_peft_model(tiny_sequence_classifier("llama"), LoraConfig(r=2, task_type="SEQ_CLS"))
    peft.save_pretrained(tmp_path / "adapter")
    message = r"reward_model_name_or_path \(or an entry of reward_funcs.*is '.*adapter', .*; pass it as reward_adapter"
    with pytest.raises(ValueError, match=message):
        build_reward(str(tmp_path / "adapter"))
