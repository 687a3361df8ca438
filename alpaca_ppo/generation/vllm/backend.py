"""`generation_backend: vllm`: samples from vLLM servers, which get the weights after each update."""

from typing import Any

from transformers import PreTrainedModel

from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.generation.backends import Backend, PolicyWeights
from alpaca_ppo.generation.responses import Generation, SamplingParams
from alpaca_ppo.generation.vllm.sampling import Sampling
from alpaca_ppo.generation.vllm.servers import Servers
from alpaca_ppo.models.policy import Policy
from alpaca_ppo.types import PromptBatch


class VLLMBackend(Backend):
    """Log-probs are those of the distribution that was sampled from: in evaluation, that of `top_k`, `top_p` or the
    likeliest token.

    Raises:
        ValueError: without the options of a run; see `Servers`.
    """

    takes_turns = takes_stop_strings = has_own_weights = True

    def __init__(self, args: PPOConfig | None = None) -> None:
        super().__init__(args)
        if args is None:
            raise ValueError("backend is 'vllm', which needs the options of a run; use a trainer, or backend='auto'")
        self._seconds, self._servers = args.ddp_timeout, Servers(args)
        self._published = 0

    def sync(self, policy: Policy, weights: PolicyWeights) -> None:
        """Publishes the weights, each time as another version."""
        self._servers.publish(policy, weights, self._published)
        self._published += 1
        self.half_precision = any(server.half_precision for server in self._servers.all)

    def wake(self) -> None:
        self._servers.wake()

    def sleep(self) -> None:
        self._servers.sleep()

    def generate(self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **how: Any) -> Generation:
        rows = zip(prompts["queries"].tolist(), prompts["query_attn_masks"].tolist(), strict=True)
        tokens = [[token for token, real in zip(*row, strict=True) if real] for row in rows]
        vocabulary = model.config.get_text_config().vocab_size
        longest, most = max(map(len, tokens)) + params.max_new_tokens, min(s.longest_row for s in self._servers.all)
        if longest > most:
            raise ValueError(
                f"prompt and response have up to {longest} tokens, but the vLLM server takes {most}; "
                "start it with a longer --max-model-len (vllm_args)"
            )
        if max(map(max, tokens)) >= vocabulary:
            raise ValueError(f"a prompt has token {max(map(max, tokens))}, but the model knows {vocabulary}")
        self._servers.restarts = 0
        keys = params.random_keys(prompts["prompt_ids"])
        return Sampling(
            self._servers,
            tokens,
            keys,
            params,
            how["turns"],
            how["hooks"],
            vocabulary=vocabulary,
            seconds=self._seconds,
        ).run()
