"""Sets of options: what `PPOConfig` accepts trains two steps, and whatever else they need is there."""

import shutil
import typing
from typing import Any

from accelerate.state import AcceleratorState
from hypothesis import strategies as st
from peft import LoraConfig

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.fields import Option, options_of
from tests.fuzz.oracle import fuzz
from tests.option_types import choices, kinds
from tests.tiny_models import SMALLEST, tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer
from tests.tiny_runs import count_even, prompts, tiny_config, tiny_trainer
from tests.trainer.test_accepted_options import MayLeaveHoles

# What two tiny steps have not: servers, GPUs, launchers, other models, messages, time to wait, and other templates.
LEFT_OUT = """
    output_dir report_to hub_model_id deepspeed fsdp load_in_4bit use_cpu model_init_kwargs chat_template_kwargs
    vllm_python vllm_urls vllm_dtype vllm_gpu_memory_utilization vllm_args reward_adapter teacher_model_name_or_path
    tool_timeout prompt_column prompt_template user_template system_prompt overwrite_output_dir ddp_timeout
    total_epochs total_episodes max_steps trust_remote_code
""".split()
TEXTS = {
    "reference": ["auto", "adapter_off", "copy", "copy_offloaded", "none"],
    "metric_for_best_model": ["eval/scores", "eval/count_odd"],
    "eval_success_by": ["scores", "rewards", "count_even", "count_odd"],
    "eval_opponent": ["reference", "column:answer"],
    "eval_judge": ["scores", "count_even", "count_odd"],
    "lam_policy": [0.0, 0.5, 1.0, "adaptive"],
    # With larger ones, weights diverge, which ends a run.
    "learning_rate": [0.0, 1e-9, 1e-4, 0.1],
    "critic_learning_rate": [0.0, 1e-9, 1e-4, 0.1],
    "critic_epochs": ["auto", 1, 2, 3],
    "weight_decay": [0.0, 0.1, 1.0],
    "risk_level": [0.3, "0.5", "upper:0.2", "neutral"],
    "run_name": ["a run"],
    # None that holds, which would end the run.
    "stop_at": ["eval/scores < -1e9", "objective/scores > 1e9"],
    "critic_width": [64, 128],
}
LISTS = {
    "truncate_tokens": [["w20"], [20, 21]],
    "stop_strings": [["w2"], ["w30 w31", "9"]],
    "reward_weights": [[0.5], [0.0], [-2.0]],
    "value_support": [[-9.0, 9.0], [0.0, 0.5]],
    "critic_layers": [[1]],
    "stop_on": [["error"], ["warning"], []],
    "ignore_changes": [["data"], []],
}
OPTIONS = {name: option for name, option in options_of(PPOConfig).items() if name not in LEFT_OUT}


def values(option: Option) -> st.SearchStrategy[Any]:
    """Values of the option's type within its bounds, the ends of which are likely; of numbers mostly small ones."""
    if option.name in TEXTS | LISTS:
        return st.sampled_from((TEXTS | LISTS)[option.name])
    if option.registry is not None:
        return st.sampled_from([name for name in option.registry.built_in if name != "vllm"])
    if choices(option):
        return st.sampled_from(choices(option))
    found = []
    low, high = option.bounds.get("ge", option.bounds.get("gt")), option.bounds.get("le", option.bounds.get("lt"))
    for kind in kinds(option):
        if kind is bool:
            found.append(st.booleans())
        elif kind is int:
            found.append(st.integers(low or 0, 6))
        elif kind is float:
            ends = [e for e, key in ((low, "ge"), (high, "le")) if key in option.bounds]
            scale = [1e-9, 1e-4, 0.1, 0.5, 0.9, 1.0, 1.5, 3.0, 10.0]
            fits = [s for s in scale if option.accepts(s)]
            found.append(st.sampled_from([*map(float, ends), *fits]))
        elif typing.get_origin(kind) is typing.Literal:
            found.append(st.sampled_from(typing.get_args(kind)))
        else:
            raise AssertionError(f"{option.name} has values of {kind}: give some in TEXTS or LISTS")
    return st.one_of(found)


def count_odd(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(token % 2 for token in ids)) for ids in completion_ids]


@st.composite
def option_sets(draw: Any) -> dict[str, Any]:
    """Five to twenty options with values; what the configuration refuses beside the others is left out."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), min_size=5, max_size=20, unique=True))
    drawn = [(name, draw(values(OPTIONS[name]))) for name in names]
    accepted: dict[str, Any] = {}
    # Twice, because an option may need one that comes after it.
    for name, value in drawn * 2:
        try:
            configuration("unused", accepted | {name: value})
        except ValueError:
            continue
        accepted[name] = value
    return accepted


def configuration(folder: Any, given: dict[str, Any]) -> PPOConfig:
    small = {"response_len": 3, "rollout_batch_size": 4, "total_episodes": None, "max_steps": 2, "eval_steps": 1}
    return tiny_config(folder, **{**small, **given})


@fuzz(15, given=option_sets())
def test_a_set_of_options_that_is_accepted_trains_two_steps(given, tmp_path):
    if given.get("init_value_with_reward"):
        # The reward is then a model, not a function.
        given = {name: value for name, value in given.items() if name not in ("reward_retries", "failed_rewards")}
    args = configuration(tmp_path, given)
    # Another draw may have another bf16.
    AcceleratorState._reset_state(reset_partial_state=True)
    needs_lora = args.critic_layout == "adapter" or args.reference == "adapter_off" or args.dtype == "bfloat16"
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    scorer = tiny_sequence_classifier("llama", **SMALLEST)
    arguments = {
        "args": args,
        "model": tiny_causal_lm("llama", **SMALLEST),
        "metric_funcs": count_odd,
        "eval_dataset": prompts(6).add_column("answer", ["w5"] * 6),
        "reward_funcs": scorer if args.init_value_with_reward else count_even,
        "reward_processing_classes": tiny_tokenizer() if args.init_value_with_reward else None,
        "peft_config": lora if needs_lora else None,
    }
    try:
        trainer = tiny_trainer(tmp_path, trainer_class=MayLeaveHoles, trainer_arguments=arguments)
        stats = trainer.train()
        assert trainer.state.global_step == 2 or given.get("stop_on")
        assert stats
    finally:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
