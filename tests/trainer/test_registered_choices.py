"""A critic head that a user registers, through a run of the trainer."""

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from alpaca_ppo import functional
from alpaca_ppo.functional import Loss
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
    with pytest.raises(ValueError, match="a critic 'gaussian', which is not registered; .*in import_modules"):
        load_critic(folder)
