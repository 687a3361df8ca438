"""Estimators, losses, critic heads and backends that a user registers, through runs of the trainer."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from alpaca_ppo import functional
from alpaca_ppo.functional import AdvantageInputs, Advantages, Loss
from alpaca_ppo.generation import register_generation_backend
from alpaca_ppo.generation.backends import GenerateBackend
from alpaca_ppo.models import CriticHead, HeadLinear, HeadOutputs, load_critic, register_critic_head
from tests.registered import temporary_choices
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import metric_lines, tiny_trainer, weights


class GaussianHead(CriticHead):
    """Mean and log-variance of the return, learned by the likelihood of a normal distribution."""

    def __init__(self, hidden_size: int, *, min_log_variance: float = -4.0) -> None:
        super().__init__(hidden_size)
        self.min_log_variance = min_log_variance
        self.linear = HeadLinear(hidden_size, 2)

    @classmethod
    def from_config(cls, args: Any, hidden_size: int) -> "GaussianHead":
        return cls(hidden_size, min_log_variance=-float(args.num_atoms))

    def settings(self) -> dict[str, Any]:
        return {"min_log_variance": self.min_log_variance}

    def read(self, states: Tensor, taus: Tensor | None) -> HeadOutputs:
        predictions = self.linear(states)
        return HeadOutputs(predictions[:, 0], predictions[:, 0], predictions)

    def loss(self, predictions: Tensor, batch: Any, args: Any) -> Loss:
        mean, log_variance = predictions[..., 0], predictions[..., 1].clamp_min(self.min_log_variance)
        losses = 0.5 * (log_variance + (batch["returns"] - mean).square() / log_variance.exp())
        mask = batch["response_mask"]
        loss = functional.aggregate_loss(losses, mask, args.loss_agg_mode, denominator=batch["denominator"])
        return Loss(loss, {"log_variance": functional.masked_mean(log_variance.detach(), mask)})


@pytest.mark.parametrize("layout", ["separate", "adapter"])
def test_a_new_critic_is_one_class_that_trains_is_saved_and_loads_again(layout, tmp_path):
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = {"peft_config": lora} if layout == "adapter" else {}
    settings = {"critic": "gaussian", "num_atoms": 3, "critic_layout": layout, "learning_rate": 1e-2}
    tiny_causal_lm("llama").save_pretrained(tmp_path / "base")
    folder = str(tmp_path / "run" / "final" / "value")
    with temporary_choices():
        register_critic_head("gaussian")(GaussianHead)
        arguments["model"] = str(tmp_path / "base")
        trainer = tiny_trainer(tmp_path / "run", trainer_arguments=arguments, **settings)
        before = weights(trainer)
        trainer.train()
        after = weights(trainer)
        assert not torch.equal(after["critic.head.linear.weight"], before["critic.head.linear.weight"])
        first, last = metric_lines(tmp_path / "run")[0], metric_lines(tmp_path / "run")[-1]
        assert last["ppo/loss/value"] < first["ppo/loss/value"] and "ppo/val/log_variance" in last
        critic = load_critic(folder)
        assert isinstance(critic.head, GaussianHead) and critic.head.min_log_variance == -3.0
        assert torch.equal(critic.head.linear.weight, after["critic.head.linear.weight"])
        ids = torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            own = trainer.actor_critic
            with own.critic_active():
                backbone = own.policy.model.base_model if own.critic.backbone is None else own.critic.backbone
                expected = own.critic.head(backbone(input_ids=ids).last_hidden_state[0])
            actual = critic.head(critic.backbone(input_ids=ids).last_hidden_state[0])
        torch.testing.assert_close(actual, expected)
        with pytest.raises(ValueError, match="risk_level is '0.5', but the 'gaussian' critic"):
            critic.head.risk_level = "0.5"
    with pytest.raises(ValueError, match="critic of the kind 'gaussian', which is not registered .*in import_modules"):
        load_critic(folder)


def copied_gae(inputs: AdvantageInputs, args: Any) -> Advantages:
    assert inputs.values is not None and inputs.scores is not None and inputs.prompt_ids is not None
    lam = torch.full((len(inputs.rewards),), args.lam, dtype=torch.float64)
    estimated = functional.gae(inputs.rewards, inputs.values, inputs.response_mask, gamma=args.gamma, lam=lam)
    return estimated._replace(advantages=functional.masked_whiten(estimated.advantages, inputs.response_mask))


def copied_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    args: Any,
    weights: Tensor | None,
    denominator: Tensor,
) -> Loss:
    return functional.policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        response_mask,
        cliprange_low=args.cliprange,
        cliprange_high=args.cliprange,
        weights=weights,
        denominator=denominator,
    )


def copied_k3(difference: Tensor) -> Tensor:
    return functional.kl_penalty(difference, torch.zeros_like(difference), "k3")


@pytest.mark.parametrize(
    ("built_in", "registered"),
    [
        ({"adv_estimator": "gae"}, {"adv_estimator": "copied"}),
        ({"policy_loss": "clip"}, {"policy_loss": "copied"}),
        ({"kl_estimator": "k3", "kl_loss_type": "k3"}, {"kl_estimator": "copied", "kl_loss_type": "copied"}),
        ({"generation_backend": "generate"}, {"generation_backend": "copied"}),
    ],
)
def test_a_registered_copy_of_a_built_in_choice_makes_the_same_run(built_in, registered, tmp_path):
    with temporary_choices():
        functional.register_adv_estimator("copied", needs_critic=True)(copied_gae)
        functional.register_policy_loss("copied")(copied_clip)
        functional.register_kl_estimator("copied")(copied_k3)
        register_generation_backend("copied")(GenerateBackend)
        common = {"kl_loss_coef": 0.1, "dtype": torch.float64}
        expected = tiny_trainer(tmp_path / "built_in", **common, **built_in)
        expected.train()
        actual = tiny_trainer(tmp_path / "registered", **common, **registered)
        actual.train()
    assert metric_lines(tmp_path / "registered") == metric_lines(tmp_path / "built_in")
    own = weights(actual)
    assert all(torch.equal(own[name], tensor) for name, tensor in weights(expected).items())
