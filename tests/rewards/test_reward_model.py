import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, BertConfig, LlamaForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput

from alpaca_ppo.rewards import ModelReward, RewardBatch, RewardError, build_reward, reward_model
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


def test_every_module_keeps_its_own_mode():
    model = tiny_sequence_classifier("llama").train()
    model.model.layers[0].eval()
    score(model, tiny_tokenizer(WORDS))
    assert model.training and model.score.training and not model.model.layers[0].mlp.training


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


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *MIXTURES])
def test_rows_without_padding_are_scored_as_rows_of_their_own(arch):
    # BLOOM's attention is its own.
    packs = arch != "bloom"
    # Gemma 2's attention computes in float32 anyway, and so do the experts of a mixture.
    dtype = torch.float32 if arch in ("gemma2", *MIXTURES) else torch.float64
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
    sequences = [torch.arange(10, 10 + length) for length in (7, 3, 1, 3)]
    # The pad id within a row, at its end, and alone.
    sequences += [torch.tensor(ids) for ids in ([ONE, PAD, TWO], [ONE, TWO, PAD, PAD], [PAD])]
    for pad_token_id in (PAD, None):
        model = tiny_sequence_classifier(arch, pad_token_id=pad_token_id, dtype=dtype)
        source = ModelReward(model, tiny_tokenizer(WORDS), name="model", batch_size=2)
        assert source._packs == packs
        with torch.no_grad():
            # Not in float32, as `alone` is.
            expected = [model(input_ids=ids.unsqueeze(0)).logits[0, 0] for ids in sequences]
            found = (reward_model._score_packed if packs else reward_model._score_padded)(model, sequences)
        assert_close(found, torch.stack(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bloom"])
def test_the_order_of_rows_does_not_matter(arch):
    model, tokenizer = tiny_sequence_classifier(arch), tiny_tokenizer(WORDS)
    scores = score(model, tokenizer)
    backwards = score(model, tokenizer, PROMPTS[::-1], COMPLETIONS[::-1])
    assert_close(backwards.flip(0), scores, atol=1e-6, rtol=1e-6)


def grouped(lengths, *, packs=True, equal_passes=False, **options):
    model = tiny_sequence_classifier("llama", **SMALLEST)
    source = ModelReward(model, tiny_tokenizer(), name="model", **options)
    source.prepare(equal_passes=equal_passes)
    return source._groups(lengths, packs=packs)


def test_a_pass_has_the_tokens_of_so_many_longest_rows():
    # One row of 5 tokens has room for 3 + 1, or for one row that is 3 wide; two have room for 10.
    lengths = [3, 1, 5, 3]
    assert grouped(lengths, batch_size=1) == [[2], [0], [3, 1]]
    assert grouped(lengths, batch_size=1, packs=False) == [[2], [0], [3], [1]]
    assert grouped(lengths, batch_size=2) == [[2, 0], [3, 1]]
    assert grouped(lengths, batch_size=2, packs=False) == [[2, 0], [3, 1]]
    assert grouped([1] * 7 + [7], batch_size=2) == [[7, 0, 1, 2, 3, 4, 5, 6]]


def test_a_model_that_some_rank_cannot_pack_is_padded(monkeypatch):
    source = ModelReward(tiny_sequence_classifier("llama"), tiny_tokenizer(), name="model", batch_size=2)
    asked = []
    source.prepare(equal_passes=False, packs_everywhere=lambda packs: bool(asked.append(packs)))
    monkeypatch.setattr(reward_model, "_score_packed", None)
    assert source(RewardBatch(["w5 w6"] * 2, ["w7", ""], [[1]] * 2, {})) and asked == [True]


def test_ranks_in_lockstep_make_as_many_passes_as_their_equal_rows_need_and_so_do_rows_with_padding():
    for options in ({"equal_passes": True}, {"padding_free": False}):
        assert grouped([1] * 7 + [7], batch_size=3, **options) == [[7, 0, 1], [2, 3, 4], [5, 6]]
        assert grouped([9, 1] * 4, batch_size=3, **options) == [[0, 2, 4], [6, 1, 3], [5, 7]]


def test_a_batch_costs_what_its_own_tokens_cost():
    torch.manual_seed(0)
    lengths = (12 + 20 * torch.randn(12).exp()).long().clamp(max=200).tolist()
    sequences = [torch.arange(length) % 60 for length in lengths]
    model = tiny_sequence_classifier("llama", pad_token_id=63)

    def flops(sequences, **options):
        source = ModelReward(model, tiny_tokenizer(), name="model", batch_size=4, **options)
        source._tokenize = lambda batch: sequences
        source.prepare(equal_passes=False)
        rows = ["text"] * len(sequences)
        with FlopCounterMode(display=False) as counter:
            source(RewardBatch(rows, rows, [[1]] * len(rows), {}))
        return counter.get_total_flops()

    packed, own = flops(sequences), sum(flops([ids]) for ids in sequences)
    assert packed <= 1.02 * own
    assert flops(sequences, padding_free=False) > 1.3 * packed


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
    assert_close(score(model, tiny_tokenizer(WORDS)), expected)
    assert model.training


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


def test_a_loaded_model_in_memory_finds_its_tokenizer(tmp_path):
    folder = saved(tmp_path, tiny_sequence_classifier("llama"), tiny_tokenizer(WORDS))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert_close(score(model, None), score(model, tiny_tokenizer(WORDS)))


def test_the_scorer_moves_its_models():
    model = tiny_sequence_classifier("llama")
    scorer = build_reward([model, lambda completions: []], reward_processing_classes=tiny_tokenizer(WORDS))
    assert scorer.to("meta") is scorer
    assert next(model.parameters()).device.type == "meta"


def test_a_language_model_is_refused(tmp_path):
    folder = saved(tmp_path, tiny_causal_lm("llama"), tiny_tokenizer(WORDS))
    with pytest.raises(ValueError, match="my-reward' has num_labels 2; use a sequence classifier with num_labels=1"):
        build_reward(folder)


def test_a_language_model_that_claims_one_label_is_refused_for_its_random_head(tmp_path):
    model = tiny_causal_lm("llama")
    model.config.num_labels = 1
    folder = saved(tmp_path, model, tiny_tokenizer(WORDS))
    message = r"lacks the weights \['score.weight'\], which would be random"
    with pytest.raises(ValueError, match=message):
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


def test_messages_without_a_chat_template_are_refused():
    with pytest.raises(
        RewardError, match="without a chat template, but got messages; set tokenizer.chat_template, on row 0"
    ):
        score(tiny_sequence_classifier("llama"), tiny_tokenizer(WORDS), [[{"role": "user", "content": "one"}]], ["two"])


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
    for name in ("./no/such", str(tmp_path / "none")):
        with pytest.raises(ValueError, match=f"cannot load a reward model from '{name}' .* is module:function") as e:
            build_reward(name)
        assert isinstance(e.value.__cause__, OSError)


def test_an_adapter_is_refused_as_a_full_reward_model(tmp_path):
    peft = get_peft_model(tiny_sequence_classifier("llama"), LoraConfig(r=2, task_type="SEQ_CLS"))
    peft.save_pretrained(tmp_path / "adapter")
    message = r"reward_model_name_or_path \(or an entry of reward_funcs\) is '.*adapter', .*; pass it as reward_adapter"
    with pytest.raises(ValueError, match=message):
        build_reward(str(tmp_path / "adapter"))
