"""What is observed when an option is set, for those options that no other test would miss."""

import threading
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode

from alpaca_ppo import PPOConfig
from alpaca_ppo.cli.train import run_training
from alpaca_ppo.environments.episode import EnvironmentFailure
from alpaca_ppo.trainer import from_arguments
from alpaca_ppo.trainer.setup import make_prompts
from tests.data.tokenizers import CHATML, turn_tokenizer
from tests.environments.test_games import Silent, play
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_trainer


class Passes:
    """The shape of the token ids in each forward pass of a step, by whether gradients are computed."""

    def __init__(self, trainer: Any) -> None:
        self.learning: list[torch.Size] = []
        self.rollout: list[torch.Size] = []
        self.embed = torch.nn.functional.embedding
        # Not a hook: what a model with hooks can do is tried anew in each step.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "embedding", self.record)
            trainer.step(trainer.prompt_batches(0))

    def record(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        (self.learning if torch.is_grad_enabled() else self.rollout).append(ids.shape)
        return self.embed(ids, *args, **kwargs)


def learning_rows(trainer):
    return max(rows for rows, _ in Passes(trainer).learning)


def learning_tokens(trainer):
    return max(rows * tokens for rows, tokens in Passes(trainer).learning)


def rollout_rows(trainer):
    return max(rows for rows, _ in Passes(trainer).rollout)


def longest_response(trainer):
    return trainer.rollout(trainer.prompt_batches(0))["responses"].shape[1]


def first_prompt(trainer):
    return len(trainer.train_prompts[0]["input_ids"])


def logged_rollouts(trainer):
    trainer.train()
    return sum(len(path.read_text().splitlines()) for path in trainer.run_log.output_dir.glob("rollouts/*.jsonl"))


def has_report(trainer):
    trainer.train()
    return (trainer.run_log.output_dir / "report.html").exists()


def recorded_steps(trainer):
    trainer.train()
    return len(metric_lines(trainer.run_log.output_dir))


def calls_of_generate(trainer):
    calls, generate = [], trainer.actor_critic.policy.model.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return generate(*args, **kwargs)

    trainer.actor_critic.policy.model.generate = counted
    trainer.rollout(trainer.prompt_batches(0))
    return bool(calls)


def evaluation_sampling(name):
    def observe(trainer):
        seen, generate = [], trainer._generate

        def record(batch: Any, params: Any) -> Any:
            seen.append(getattr(params, name))
            return generate(batch, params)

        trainer._generate = record
        trainer.evaluate()
        return seen[0]

    return observe


def precision(trainer):
    seen: list[Any] = []
    layer = trainer.actor_critic.policy.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    trainer.step(trainer.prompt_batches(0))
    return seen[-1]


class Products(TorchDispatchMode):
    """The most rows of a matrix that has a column for each of the 64 tokens of the vocabulary."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default and result.shape[1] == 64:
            self.most = max(self.most, len(result))
        return result


def logits_at_once(trainer):
    with Products() as products:
        trainer.step(trainer.prompt_batches(0))
    return products.most


PADDED = {"padding_free": False}


@pytest.mark.parametrize(
    ("name", "value", "observe", "before", "after", "others"),
    [
        ("num_logged_rollouts", 3, logged_rollouts, 8, 3, {"max_steps": 1, "total_episodes": None}),
        ("report", True, has_report, False, True, {"max_steps": 1, "total_episodes": None}),
        # 40 prompts in steps of 10: one epoch, and two.
        ("total_epochs", 2, recorded_steps, 4, 8, {"total_episodes": None}),
        ("max_steps", 2, recorded_steps, 4, 2, {"total_episodes": None}),
        ("response_len", 7, longest_response, 5, 7, {}),
        # The fourth prompt has four words; the template adds one in front of the first, which has one.
        ("prompt_template", "w9 {prompt}", first_prompt, 1, 2, {}),
        ("rollout_per_device_batch_size", 2, rollout_rows, 4, 2, PADDED),
        # Four rows in micro-batches of at most three: two and two.
        ("step_per_device_batch_size", 1, learning_rows, 2, 1, PADDED),
        ("padding_free", False, learning_rows, 1, 2, {}),
        ("generation_backend", "generate", calls_of_generate, False, True, {}),
        ("eval_top_k", 2, evaluation_sampling("top_k"), None, 2, {"eval_temperature": 1.0}),
        ("eval_top_p", 0.5, evaluation_sampling("top_p"), None, 0.5, {"eval_temperature": 1.0}),
        ("logprob_chunk_size", 5, logits_at_once, 8, 5, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_option_changes_what_a_run_does(tmp_path, name, value, observe, before, after, others):
    def run(folder, **settings):
        given = {"eval_dataset": prompts(4)} if name.startswith("eval") else {}
        return observe(tiny_trainer(tmp_path / folder, trainer_arguments=given, **others, **settings))

    assert [run("before"), run("after", **{name: value})] == [before, after]


def test_bf16_computes_in_half_precision_and_keeps_the_weights(tmp_path):
    AcceleratorState._reset_state(True)
    trainer = tiny_trainer(tmp_path, bf16=True)
    assert precision(trainer) == torch.bfloat16 and {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    AcceleratorState._reset_state(True)


def test_a_micro_batch_has_at_most_as_many_tokens_as_it_may(tmp_path):
    assert learning_tokens(tiny_trainer(tmp_path / "default")) > 9
    assert learning_tokens(tiny_trainer(tmp_path / "few", max_tokens_per_micro_batch=9)) <= 9


def test_prompts_come_from_the_column_that_is_named(tmp_path):
    rows = Dataset.from_list([{"prompt": "w10", "question": "w11 w12"}])
    given, sizes = {"train_dataset": rows}, {"rollout_batch_size": 1, "step_batch_size": 1}
    trainer = tiny_trainer(tmp_path, prompt_column="question", trainer_arguments=given, **sizes)
    assert first_prompt(trainer) == 2


@pytest.mark.parametrize(
    ("settings", "lengths"),
    [({"query_len": 3}, [3, 1]), ({"query_len": 2}, [1]), ({"query_len": 2, "overlong_prompts": "truncate"}, [2, 1])],
)
def test_overlong_prompts_are_dropped_cut_or_an_error(settings, lengths):
    rows = Dataset.from_list([{"prompt": "w10 w11 w12"}, {"prompt": "w10"}])
    made = make_prompts(rows, tiny_tokenizer(), PPOConfig(**settings), {})
    assert [len(made[i]["input_ids"]) for i in range(len(made))] == lengths
    with pytest.raises(ValueError, match="query_len"):
        make_prompts(rows, tiny_tokenizer(), PPOConfig(query_len=2, overlong_prompts="error"), {})


def test_a_call_that_hangs_ends_the_run_after_the_time_that_it_may_take(tmp_path):
    released = threading.Event()

    class Hangs(Silent):
        def reset(self, **row: Any) -> None:
            released.wait(30)

    one = {"rollout_batch_size": 1, "step_batch_size": 1, "total_episodes": 1}
    given = {"reward_funcs": count_even}
    with pytest.raises(EnvironmentFailure, match="tool_timeout"):
        play(tmp_path, Hangs, tool_timeout=0.1, trainer_arguments=given, **one).train()
    released.set()


def test_a_reward_function_that_has_raised_is_called_again(tmp_path):
    calls: list[int] = []

    def fails_once(completions: list[str], **columns: Any) -> list[float]:
        calls.append(1)
        if len(calls) == 1:
            raise TimeoutError("the judge is away")
        return [0.0 for _ in completions]

    trainer = tiny_trainer(tmp_path, reward_retries=1, trainer_arguments={"reward_funcs": fails_once})
    trainer.rollout(trainer.prompt_batches(0))
    assert len(calls) > 1


def test_the_chat_template_gets_the_arguments_of_the_run(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% if think %}w9 {% endif %}{% endfor %}"
    given = {
        "train_dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "w10"}]}]),
        "processing_class": tokenizer,
    }
    trainer = tiny_trainer(tmp_path, chat_template_kwargs={"think": True}, trainer_arguments=given)
    assert first_prompt(trainer) == 2


def test_columns_become_the_messages_of_system_and_user(tmp_path):
    tokenizer = turn_tokenizer(CHATML, special=["<|im_start|>", "<|im_end|>"])
    rows = Dataset.from_list([{"question": "w10", "input": "w11"}])
    template = {"user_template": "{question} {input}", "system_prompt": "w12"}
    (item,) = make_prompts(rows, tokenizer, PPOConfig(**template), {})
    user = {"role": "user", "content": "w10 w11"}
    assert item["row"]["prompt"] == [{"role": "system", "content": "w12"}, user]
    (item,) = make_prompts(rows, tokenizer, PPOConfig(user_template=template["user_template"]), {})
    assert item["row"]["prompt"] == [user]


def test_a_run_is_recorded_in_its_folder_under_its_name_and_replaces_another_only_if_told(tmp_path, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(Accelerator, "init_trackers", lambda self, project, init_kwargs: asked.append(init_kwargs))
    run = {"total_epochs": None, "total_episodes": None, "max_steps": 1, "save_steps": 1}
    tiny_trainer(tmp_path / "a", report_to=["tensorboard"], run_name="mine", **run).train()
    assert asked[0]["wandb"]["name"] == "mine"
    with pytest.raises(ValueError, match="output_dir"):
        tiny_trainer(tmp_path / "a", **run).train()
    tiny_trainer(tmp_path / "a", overwrite_output_dir=True, **run).train()
    assert len(metric_lines(tmp_path / "a")) == 1


class Given(Exception):
    """What the command gives the trainer."""


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The arguments that `PPOTrainer` gets from the command with further flags."""

    def stop(**arguments: Any) -> Any:
        raise Given(arguments)

    tiny_causal_lm("llama").save_pretrained(tmp_path / "policy")
    tiny_tokenizer().save_pretrained(tmp_path / "policy")
    (tmp_path / "data").mkdir()
    for split, count in (("train", 3), ("test", 5)):
        prompts(count).to_parquet(tmp_path / f"data/{split}-00000-of-00001.parquet")
    monkeypatch.setattr(from_arguments, "PPOTrainer", stop)
    flags = ["--model_name_or_path", str(tmp_path / "policy"), "--dataset_name", str(tmp_path / "data")]

    def arguments(*more: str) -> dict[str, Any]:
        with pytest.raises(Given) as caught:
            run_training([*flags, "--reward_funcs", "builtins:len", "--output_dir", str(tmp_path / "run"), *more])
        return caught.value.args[0]

    return arguments


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [(("--lora_r", "5"), "r", 5), (("--lora_alpha", "7"), "lora_alpha", 7), (
        ("--lora_target_modules", "q_proj"), "target_modules", {"q_proj"},
    )],
)  # fmt: skip
def test_the_command_makes_adapters_as_it_is_told(given, flags, name, value):
    assert getattr(given("--use_peft", *flags)["peft_config"], name) == value


def test_the_command_takes_critic_and_prompts_from_where_it_is_told(given):
    chosen = given("--value_model_name_or_path", "gpt2", "--dataset_train_split", "test")
    assert chosen["value_model"] == "gpt2" and len(chosen["train_dataset"]) == 5
