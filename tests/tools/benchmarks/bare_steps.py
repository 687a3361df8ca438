"""The model compute of a PPO step and nothing else: plain passes of transformers over the real tokens, no padding.

All rows have the mean length, so that nothing is padded and no row of the decoding is idle; the likeliest token comes
next. Log-probs are computed without chunks, losses are sums, and no optimizer steps. The stage `old policy` is the
policy's pass with its old weights, which a step does without if the sampler's log-probs serve.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.tools.benchmarks import workloads
from tests.tools.benchmarks.worker import Finished, StepMeter, given_workload, versions
from tests.tools.benchmarks.workloads import Workload

Stage = Callable[[str], AbstractContextManager[None]]


def policy_loss(model: PreTrainedModel, ids: Tensor, response: int) -> Tensor:
    """The sum of the log-probs of the last `response` tokens of `ids` (B, T)."""
    logits = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=response).logits
    return torch.gather(logits.log_softmax(-1), 2, ids[:, -response:].unsqueeze(2)).sum()


def values(model: PreTrainedModel, ids: Tensor, response: int) -> Tensor:
    """The values of the states before the last `response` tokens of `ids` (B, T)."""
    states = model.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    return model.score(states[:, -response:])


@torch.no_grad()
def sample(model: PreTrainedModel, prompts: Tensor, response: int) -> Tensor:
    """Prompts (B, Q) with `response` tokens appended."""
    cache, ids = DynamicCache(config=model.config), prompts
    step = ids
    for _ in range(response):
        logits = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        step = logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, step], dim=1)
    return ids


class BareSteps:
    """Policy, critic, reference and reward model of a workload."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.response = round(sum(workload.lengths) / workload.num_prompts)
        """Tokens of every response."""
        self.policy, self.reference = (workloads.policy(workload).eval() for _ in range(2))
        self.critic, self.reward = (workloads.classifier(workload, seed).eval() for seed in (1, 2))
        self.prompts = torch.tensor(workloads.prompt_ids(workload))

    def step(self, stage: Stage) -> int:
        """Makes one step; returns the number of response tokens."""
        workload, response = self.workload, self.response
        with stage("rollout"):
            ids = sample(self.policy, self.prompts, response)
        with torch.no_grad():
            with stage("score"):
                # The score of a text is that of its last token.
                self.reward(input_ids=ids)
            with stage("logprobs"):
                policy_loss(self.reference, ids, response)
                values(self.critic, ids, response)
            with stage("old policy"):
                policy_loss(self.policy, ids, response)
        with stage("update"):
            for _ in range(workload.ppo_epochs):
                for batch in ids.split(workload.step_batch_size):
                    self.policy.zero_grad()
                    self.critic.zero_grad()
                    for micro in batch.split(workload.micro_batch_size):
                        policy_loss(self.policy, micro, response).backward()
                        values(self.critic, micro, response).sum().backward()
        return response * workload.num_prompts


def answer_steps(workload: Workload) -> None:
    """Makes a step whenever the parent asks for one."""
    meter = StepMeter()
    steps = BareSteps(workload)
    meter.answer(versions=versions(transformers))
    try:
        while True:
            meter.begin()
            tokens = steps.step(meter.stage)
            meter.end(response_tokens=tokens, recomputed=True)
    except Finished:
        return


if __name__ == "__main__":
    answer_steps(given_workload())
