"""Options that are mappings of arguments, shares of steps, or words of other libraries."""

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.parser import parse_args
from alpaca_ppo.config.script_arguments import LoraArguments


def parsed(tmp_path, text, *flags, cls=PPOConfig):
    (tmp_path / "run.yaml").write_text(text)
    return parse_args([cls], ["--config", str(tmp_path / "run.yaml"), *flags])[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_init_kwargs": {"torch_dtype": "bfloat16"}}, "has 'torch_dtype'.*; set the option dtype"),
        ({"model_init_kwargs": {"device_map": "auto"}}, "'device_map'.*; Accelerate places the weights"),
        ({"model_init_kwargs": {"revision": "main"}}, "'revision'.* download it .* and name the folder"),
        ({"model_init_kwargs": {"token": "secret"}}, "'token'.*set HF_TOKEN"),
        ({"model_init_kwargs": {"use_safetensors": False}}, "the run sets it itself"),
        ({"model_init_kwargs": {"hook": print}}, "model_init_kwargs is {'hook': .*; it should be a valid JSON value"),
        ({"model_init_kwargs": {1: 2}}, "model_init_kwargs is {1: 2}"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs has 'tokenize'.*the run sets it"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "set processing_class.chat_template"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**options)


def test_a_secret_is_not_repeated():
    with pytest.raises(ValueError) as error:
        PPOConfig(model_init_kwargs={"token": "hf_secret"})
    assert "hf_secret" not in str(error.value)


def test_whole_numbers_of_warm_up_steps_stay_integers(tmp_path):
    args = parsed(tmp_path, "lr_scheduler_type: linear", "--warmup_steps", "5", "--critic_lr_warmup_steps", "3")
    assert [(type(v), v) for v in (args.warmup_steps, args.critic_lr_warmup_steps)] == [(int, 5), (int, 3)]
    assert parsed(tmp_path, "{lr_scheduler_type: linear, warmup_steps: 0.25}").warmup_steps == 0.25


@pytest.mark.parametrize("flags", [("--lora_target_modules", "all-linear"), ()])
def test_all_linear_is_the_word_of_peft_in_file_and_flags(tmp_path, flags):
    text = "use_peft: true" if flags else "{use_peft: true, lora_target_modules: all-linear}"
    assert parsed(tmp_path, text, *flags, cls=LoraArguments).peft_config("CAUSAL_LM").target_modules == "all-linear"
    # It contains every other name.
    both = LoraArguments(use_peft=True, lora_target_modules=["all-linear", "q_proj"])
    assert both.peft_config("CAUSAL_LM").target_modules == "all-linear"
