"""What the constructor refuses, before any training, and what it builds by default."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, Gemma3Config

import alpaca_ppo
from alpaca_ppo.distributed.accelerator import make_accelerator
from alpaca_ppo.environments.kinds import make_kinds
from alpaca_ppo.models import build_actor_critic, load_causal_lm, load_sequence_classifier
from alpaca_ppo.models.reference import make_reference
from alpaca_ppo.trainer.setup import build_scorer, make_prompts
from tests.data.tokenizers import PHI_3, turn_tokenizer
from tests.tiny_models import EOS, tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import count_even, prompts, tiny_config, tiny_trainer


def refused(tmp_path, message, *, model=None, arguments=None, **overrides):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(tmp_path, model=model, trainer_arguments=arguments, **overrides)


def test_a_model_without_a_name_needs_a_tokenizer(tmp_path):
    refused(tmp_path, "processing_class is None", arguments={"processing_class": None})


def test_the_critic_has_one_starting_point(tmp_path):
    classifier = tiny_sequence_classifier("llama")
    refused(tmp_path, "leave one of them out", arguments={"value_model": classifier}, init_value_with_reward=True)
    refused(tmp_path, "no reward source is a model", init_value_with_reward=True)
    refused(
        tmp_path,
        "critic_layout 'shared' .*leave value_model out",
        arguments={"value_model": classifier},
        critic_layout="shared",
    )


def test_the_reference_reads_the_policys_tokens(tmp_path):
    other = tiny_causal_lm("llama", vocab_size=80)
    refused(tmp_path, r"the reference's vocabulary is 80", arguments={"ref_model": other})


def test_a_critic_has_one_label_and_a_linear_score():
    with pytest.raises(ValueError, match="num_labels 3"):
        classifier = tiny_sequence_classifier("llama")
        classifier.config.num_labels = 3
        load_sequence_classifier(classifier)
    classifier = tiny_sequence_classifier("llama")
    classifier.score = torch.nn.Sequential(classifier.score)
    with pytest.raises(ValueError, match="head Sequential; .* one linear head `score`"):
        load_sequence_classifier(classifier)


def test_a_policy_that_nothing_stops_is_refused(tmp_path):
    model, tokenizer = tiny_causal_lm("llama"), tiny_tokenizer()
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    refused(tmp_path, "set processing_class.eos_token", model=model, arguments={"processing_class": tokenizer})


def chat_prompts(tokenizer):
    rows = [{"prompt": [{"role": "user", "content": f"w{10 + i}"}]} for i in range(40)]
    return {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}


def test_what_ends_a_turn_of_the_chat_template_ends_a_response(tmp_path):
    phi = turn_tokenizer(PHI_3, special=["<|user|>", "<|assistant|>", "<|end|>"])
    trainer = tiny_trainer(tmp_path / "a", trainer_arguments=chat_prompts(phi), query_len=8, response_len=20)
    assert trainer.sampling_params.stop_token_ids == (EOS, 6)
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    ended = (rollouts["responses"] == 6).any(dim=1)
    assert ended.any() and rollouts["stopped"][ended].all()
    assert (rollouts["responses"].gather(1, rollouts["response_mask"].sum(1, keepdim=True) - 1)[ended] == 6).all()
    # Prompts of text do not use the template.
    trainer = tiny_trainer(tmp_path / "b", trainer_arguments={"processing_class": phi})
    assert trainer.sampling_params.stop_token_ids == (EOS,)
    trainer = tiny_trainer(
        tmp_path / "c", trainer_arguments={"eval_dataset": chat_prompts(phi)["train_dataset"], "processing_class": phi}
    )
    assert trainer.sampling_params.stop_token_ids == (EOS, 6)
    # The template gets the arguments of the run.
    phi.chat_template = PHI_3.replace("<|end|>", "{{ mark }}")
    given = {"chat_template_kwargs": {"mark": "<|end|>"}, "query_len": 8}
    trainer = tiny_trainer(tmp_path / "d", trainer_arguments=chat_prompts(phi), **given)
    assert trainer.sampling_params.stop_token_ids == (EOS, 6)


def test_a_turn_end_that_the_user_or_the_model_names_is_left_to_them(tmp_path):
    arguments = chat_prompts(turn_tokenizer(PHI_3, special=["<|user|>", "<|assistant|>", "<|end|>"]))
    sizes = {"query_len": 8, "truncate_after": 3, "truncate_tokens": ["<|end|>"]}
    chosen = tiny_trainer(tmp_path / "a", trainer_arguments=arguments, **sizes).sampling_params
    assert (chosen.stop_token_ids, chosen.truncate_token_ids, chosen.truncate_after) == ((EOS,), (6,), 3)
    model = tiny_causal_lm("llama")
    model.generation_config.eos_token_id = [EOS, 6]
    assert tiny_trainer(
        tmp_path / "b", model=model, trainer_arguments=arguments, query_len=8
    ).sampling_params.stop_token_ids == (EOS, 6)


def test_prompts_and_responses_must_fit_the_models_positions(tmp_path):
    refused(tmp_path, r"query_len \(4\) \+ response_len \(600\) is more than .* \(512\)", response_len=600)
    tiny_trainer(tmp_path, model=tiny_causal_lm("bloom"), response_len=600)


def longrope(build=tiny_causal_lm, *, short=1.0, original=7):
    """A Phi-3 whose rotations are four times slower in rows longer than `original`."""
    rope = {"rope_type": "longrope", "short_factor": [short] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    return build("phi3", rope_parameters=rope, original_max_position_embeddings=original)


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 4.0}
    return tiny_causal_lm("llama", rope_parameters=rope, max_position_embeddings=7)


@pytest.mark.parametrize("make", [longrope, dynamic])
def test_rows_must_not_cross_the_length_at_which_their_rotations_change(make, tmp_path):
    # Of four and five tokens the model reads all but the last: 8 positions.
    refused(tmp_path, r"rows of 9 tokens cross 7, where .* lower query_len \+ response_len to 8$", model=make())


def test_rows_up_to_the_switch_or_with_one_set_of_factors_are_sampled_as_they_are_trained(tmp_path):
    for model in ({"original": 8}, {"short": 4.0}):
        tiny_trainer(tmp_path / str(model), model=longrope(**model)).check_sampler()


def test_critic_and_reference_must_not_cross_the_length_either(tmp_path):
    refused(tmp_path, r"frequencies of the reference \(phi3\) change", arguments={"ref_model": longrope()})
    refused(
        tmp_path,
        r"frequencies of the critic \(phi3\) change",
        arguments={"value_model": longrope(tiny_sequence_classifier)},
    )


def test_an_evaluation_without_prompts_is_refused(tmp_path):
    long = Dataset.from_list([{"prompt": "w10 w11 w12 w13 w14 w15"}] * 2)
    refused(tmp_path, r"all 2 prompts .* query_len \(4\)", arguments={"eval_dataset": long})
    with pytest.raises(ValueError, match="eval_dataset is None"):
        tiny_trainer(tmp_path).evaluate()


def test_a_reference_of_the_users_own_is_what_kl_is_measured_against(tmp_path):
    other = tiny_causal_lm("llama", seed=1)
    trainer = tiny_trainer(tmp_path, trainer_arguments={"ref_model": other})
    stats = trainer.step(trainer.prompt_batches(0))
    assert stats["objective/kl_sum_seq"] > 0.1


def test_a_reference_in_memory_stays_as_it_is(tmp_path):
    other = tiny_causal_lm("llama", seed=1, attention_dropout=0.5)
    trainer = tiny_trainer(tmp_path, trainer_arguments={"ref_model": other})
    assert trainer.collector.reference.policy.model is not other
    assert [layer.self_attn.attention_dropout for layer in other.model.layers] == [0.5, 0.5]


def test_models_of_text_and_images_are_policy_and_reference(tmp_path):
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=text, vision_config={**images, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    policy, other = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    reference = make_reference(build_actor_critic(policy, critic_layout=None), other, tiny_config(tmp_path))
    assert reference.policy.model is not other


def test_models_load_from_folders_in_float32_whatever_the_checkpoint_holds(tmp_path):
    tiny_causal_lm("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "policy")
    tiny_sequence_classifier("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "value")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    trainer = alpaca_ppo.PPOTrainer(
        model=str(tmp_path / "policy"),
        reward_funcs=count_even,
        args=tiny_config(tmp_path / "run"),
        train_dataset=prompts(),
        value_model=str(tmp_path / "value"),
        ref_model=str(tmp_path / "policy"),
    )
    assert {p.dtype for p in trainer.actor_critic.parameters()} == {torch.float32}
    stats = trainer.step(trainer.prompt_batches(0))
    assert stats["objective/kl_sum_seq"] == pytest.approx(0.0, abs=1e-5)


def test_an_unknown_public_name_is_an_attribute_error_that_lists_the_known():
    with pytest.raises(AttributeError, match="PPOTrainer"):
        _ = alpaca_ppo.PPOTrainr


def test_an_optimizer_that_leaves_out_the_critic_is_refused(tmp_path):
    model = tiny_causal_lm("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    refused(tmp_path, "the optimizer leaves out", model=model, arguments={"optimizers": (optimizer, None)})


def test_an_accelerator_of_another_precision_is_refused(tmp_path):
    refused(tmp_path, "bf16 is True but the accelerator", arguments={"accelerator": Accelerator(cpu=True)}, bf16=True)
    tracked = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    refused(tmp_path, "log_with .* without trackers; call", arguments={"accelerator": tracked})
    # Accelerate's state of this process has no bf16.
    refused(tmp_path, "bf16 is True and use_cpu is True, but this process already has an Accelerator", bf16=True)
    trainer = tiny_trainer(tmp_path, trainer_arguments={"accelerator": Accelerator(cpu=True)})
    assert "objective/scores" in trainer.step(trainer.prompt_batches(0))


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_a_precision_that_there_is_not_is_refused_before_models_are_loaded(precision, tmp_path, monkeypatch):
    monkeypatch.setattr("alpaca_ppo.models.factory.make_actor_critic", None)
    for bf16 in (False, True):
        own = SimpleNamespace(mixed_precision=precision)
        refused(tmp_path, f"mixed_precision is '{precision}'; ", arguments={"accelerator": own}, bf16=bf16)
    # As `accelerate launch` passes on --mixed_precision, or that of its configuration.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    for bf16 in (False, True):
        refused(tmp_path, f"mixed_precision is '{precision}'; ", bf16=bf16)


def test_bf16_of_the_launcher_alone_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    refused(tmp_path, "bf16 is False but the accelerator's mixed_precision is 'bf16'; use bf16: true")
    # What the launcher says without a precision in its configuration.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert tiny_trainer(tmp_path).accelerator.mixed_precision == "no"


def test_a_step_beyond_the_schedule_and_a_rollout_without_prompts_are_refused(tmp_path):
    trainer = tiny_trainer(tmp_path)
    with pytest.raises(ValueError, match="step 2 is outside the schedule of 2 steps"):
        trainer.prompt_batches(2)
    with pytest.raises(ValueError, match="prompt_batches is empty on every process"):
        trainer.rollout([])


def test_a_folder_without_the_head_it_needs_is_refused(tmp_path):
    tiny_sequence_classifier("llama").save_pretrained(tmp_path / "classifier")
    tiny_causal_lm("llama").save_pretrained(tmp_path / "policy")
    with pytest.raises(ValueError, match="has no weights for lm_head.weight"):
        load_causal_lm(str(tmp_path / "classifier"))
    with pytest.raises(ValueError, match="has no weights for score.weight"):
        load_sequence_classifier(str(tmp_path / "policy"))


def test_processes_wait_for_one_another_as_long_as_ddp_timeout_says(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr("alpaca_ppo.distributed.accelerator.Accelerator", lambda **settings: asked.update(settings))
    monkeypatch.setattr("alpaca_ppo.distributed.accelerator.limit_threads", lambda accelerator: None)
    make_accelerator(tiny_config(tmp_path, ddp_timeout=77))
    assert [handler.to_kwargs() for handler in asked["kwargs_handlers"]] == [{"timeout": timedelta(seconds=77)}]


def exact(completions, answers, trainer_state, log_metric, tolerance=0.0):
    raise AssertionError("nothing is scored before the constructor has ended")


def test_a_function_that_needs_a_column_the_dataset_lacks_is_refused_before_a_model_is_loaded(tmp_path):
    rows = [{"prompt": f"w{10 + i}", "answer": "w1", "level": i} for i in range(4)]
    # There is no such model: had it been loaded, the error would be about it.
    given = {"model": "no/such-model", "reward_funcs": exact, "train_dataset": Dataset.from_list(rows)}
    expected = (
        r"reward source 'exact' requires \['answers'\], but the train set has \['prompts', 'completions', "
        r"'completion_ids', 'answer', 'level'\]; rename either"
    )
    refused(tmp_path, expected, arguments=given)
    whole = Dataset.from_list([row | {"answers": "w1"} for row in rows])
    lacking = {"train_dataset": whole, "eval_dataset": {"hard": Dataset.from_list(rows)}}
    refused(tmp_path, r"'exact' requires .*, but the eval set 'hard' has", arguments=given | lacking)
    # A metric measures eval sets alone.
    of_metric = {"reward_funcs": count_even, "metric_funcs": [exact], "eval_dataset": Dataset.from_list(rows)}
    refused(tmp_path, r"'exact' requires .*, but the eval set has", arguments=given | of_metric)
    of_metric |= {"model": tiny_causal_lm("llama"), "eval_dataset": whole, "train_dataset": Dataset.from_list(rows)}
    tiny_trainer(tmp_path, trainer_arguments=of_metric)


class Dealer:
    def reset(self, **row):
        return "w10"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def test_environments_make_the_prompts_where_there_are_none_whatever_their_column_is_called():
    args, kinds = (
        tiny_config("unused", prompt_column="question", total_episodes=None, max_steps=1),
        make_kinds(None, Dealer),
    )
    given = [None, Dataset.from_list([{"level": 1}]), Dataset.from_list([{"question": "w10"}])]
    blank = [make_prompts(dataset, tiny_tokenizer(), args, kinds).any_blank for dataset in given]
    assert blank == [True, True, False]
    # Tools alone make no prompts.
    with pytest.raises(ValueError, match="has no column 'question'"):
        make_prompts(given[1], tiny_tokenizer(), args, make_kinds([add], None))


def test_a_subclass_that_scores_in_another_way_may_give_functions_what_the_dataset_lacks(tmp_path):
    class Retrieving(alpaca_ppo.PPOTrainer):
        def _score(self, samples, rows):
            return super()._score(samples, [row | {"answers": "w1"} for row in rows])

    tiny_trainer(tmp_path, trainer_class=Retrieving, trainer_arguments={"reward_funcs": exact})


def test_tokenizers_of_metric_functions_are_counted(tmp_path):
    with pytest.raises(ValueError, match="metric_processing_classes has 2 entr"):
        build_scorer(count_even, [None, None], tiny_config(tmp_path), torch.device("cpu"), measures=True)


def test_a_function_that_transforms_rows_may_make_the_columns_of_prompts_and_rewards(tmp_path):
    def rate(completions, answer, **columns):
        return [float(number) for number in answer]

    rows = Dataset.from_list([{"q": "w10", "a": 3}, {"q": "w11", "a": 3}])
    made = rows.with_transform(lambda batch: {"prompt": batch["q"], "answer": batch["a"]})
    given = {"train_dataset": made, "eval_dataset": made, "reward_funcs": rate, "metric_funcs": rate}
    trainer = tiny_trainer(tmp_path, trainer_arguments=given)
    assert trainer.evaluate()["eval/scores"] == 3.0
    dropped = prompts(4).with_transform(lambda batch: {"q": batch["prompt"]})
    refused(tmp_path, r"no column 'prompt'; its columns are \['q'\]", arguments={"train_dataset": dropped})
