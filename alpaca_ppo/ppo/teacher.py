"""The teacher of on-policy distillation, whose log-probs of the policy's own tokens become rewards (`distill`).

It is a model of the run, frozen, which may stay in host memory between passes, or one behind a vLLM server.
"""

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from alpaca_ppo.async_calls import await_all
from alpaca_ppo.config.names import is_server, model_folder, shown_url
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.functional.packing import PackedRows
from alpaca_ppo.functional.shaping import response_lengths
from alpaca_ppo.generation.responses import unpadded
from alpaca_ppo.http_json import RequestFailed, ask_json
from alpaca_ppo.models.loading import check_same_tokenizer, load_causal_lm
from alpaca_ppo.models.policy import Policy, scatter_tokens
from alpaca_ppo.models.reference import CopiedReference
from alpaca_ppo.models.trial import fit_rows

# The environment variable that holds the bearer token for a server.
KEY_VARIABLE = "TEACHER_API_KEY"
# For one response; servers queue requests.
_SECONDS, _MAX_BYTES = 600.0, 2**26
# How far above 0 rounding may lift a log-prob.
_ROUNDING = 1e-3
# Seconds before a failed request is sent again.
_PAUSES = (0.5, 5.0)


class TeacherOutputs(NamedTuple):
    """(B, R) float32, zero outside the response mask: log-probs in nats, and 1 where the token is the likeliest."""

    logprobs: Tensor
    top_tokens: Tensor


class TeacherModel(Policy):
    """A teacher in this process."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        # The override below adds to the log-probs of the class, which must fit the model.
        self._check_logits()

    def outputs_from_states(
        self, states: Tensor, packed: PackedRows, responses: Tensor, *, chunk_size: int, **options: Any
    ) -> Any:
        outputs = super().outputs_from_states(states, packed, responses, chunk_size=chunk_size, **options)
        tokens = responses[packed.rows, packed.actions]
        weight, bias = self.head.weight, self.head.bias
        # Scaling and soft caps of logits leave their order.
        likeliest = [linear(chunk.to(weight.dtype), weight, bias).argmax(dim=-1) for chunk in states.split(chunk_size)]
        hits = torch.cat([*likeliest, tokens[:0]]) == tokens
        return TeacherOutputs(outputs.logprobs, scatter_tokens(hits.float(), packed, responses))


class TeacherServer:
    """A teacher behind the address of a vLLM server, which reads the policy's token ids."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"

    def __call__(self, samples: Mapping[str, Tensor], poll: Callable[[], Any] = lambda: None) -> dict[str, Tensor]:
        """`teacher_logprobs` and `teacher_top_tokens` (B, R) of sampled rows; calls `poll` while it waits.

        Raises:
            ValueError: if the server gives no usable answer.
        """
        mask, lengths = samples["response_mask"], response_lengths(samples["response_mask"]).tolist()
        answers = [ids[:length].tolist() for ids, length in zip(samples["responses"], lengths, strict=True)]
        rows = zip(unpadded(samples), answers, strict=True)  # type: ignore[arg-type]
        found = await_all([self._ask(prompt, answer) for prompt, answer in rows], poll)
        outputs = torch.zeros(2, *mask.shape)
        for row, entries in enumerate(found):
            if isinstance(entries, RequestFailed):
                entries = ValueError(f"teacher_model_name_or_path: {entries}")
            if isinstance(entries, BaseException):
                raise entries
            outputs[:, row, : len(entries)] = torch.tensor(entries).reshape(-1, 2).T
        logprobs, top_tokens = outputs.where(mask, 0.0)
        return {"teacher_logprobs": logprobs, "teacher_top_tokens": top_tokens}

    def ask_once(self) -> None:
        """Raises a `ValueError` if the server gives no log-prob of a token, so that a run does not begin in vain."""
        token = torch.zeros(1, 1, dtype=torch.long)
        self({"queries": token, "query_attn_masks": token + 1, "responses": token, "response_mask": token == 0})

    async def _ask(self, prompt: list[int], answer: list[int]) -> list[tuple[float, float]]:
        """Log-prob of each token of `answer`, and 1 if it is the likeliest."""
        body = json.dumps({"prompt": prompt + answer, "max_tokens": 1, "prompt_logprobs": 0}).encode()
        url = f"{self.url}/completions"
        for pause in (*_PAUSES, None):
            try:
                got = await ask_json(url, body, key_variable=KEY_VARIABLE, seconds=_SECONDS, max_bytes=_MAX_BYTES)
                break
            except RequestFailed:
                if pause is None:
                    raise
                await asyncio.sleep(pause)
        try:
            entries = got["choices"][0]["prompt_logprobs"][len(prompt) :]
            chosen = [entry[str(token)] for entry, token in zip(entries, answer, strict=True)]
            pairs = [(float(entry["logprob"]), float(entry["rank"] == 1)) for entry in chosen]
            if not all(-math.inf < logprob < _ROUNDING for logprob, _ in pairs):
                raise ValueError("one is no log-prob")
            return pairs
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RequestFailed(shown_url(url), f"gave no prompt_logprobs of each token ({error!r})") from error


Teacher = CopiedReference | TeacherServer


def make_teacher(args: PPOConfig, processing_class: Any, *, vocab_size: int) -> Teacher | None:
    """The teacher that `args` name, or None.

    Args:
        vocab_size: of the policy, which samples the ids that the teacher reads.

    Raises:
        ValueError: when it cannot be loaded or asked, its tokenizer has other ids, or it has too few embeddings or
            positions.
    """
    option, trust = "teacher_model_name_or_path", args.trust_remote_code
    name = args.teacher_model_name_or_path
    if name is None:
        return None
    if is_server(name):
        server = TeacherServer(name)
        server.ask_once()
        return server
    name = model_folder(option, name)
    remedy = "learn from a model with the same one"
    check_same_tokenizer(option, name, processing_class, remedy=remedy, trust_remote_code=trust)
    teacher = load_teacher(name, args)
    if (rows := teacher.model.get_input_embeddings().weight.size(0)) < vocab_size:
        problem = f"has {rows} embeddings and the policy {vocab_size}, so that it may sample ids that are not read"
        raise ValueError(f"{option} {name!r} {problem}; take a policy with as many, or a larger teacher")
    if args.teacher_offloaded:
        # bitsandbytes loads onto the GPU.
        teacher.to("cpu")
    return CopiedReference(teacher, offloaded=args.teacher_offloaded)


def load_teacher(name: str, args: PPOConfig) -> TeacherModel:
    """The teacher `name`, a folder or a hub id. Raises a ValueError as `load_causal_lm`, `TeacherModel` and
    `fit_rows`.
    """
    four_bit = args.teacher_dtype == "4bit"
    dtype = torch.bfloat16 if four_bit else getattr(torch, args.teacher_dtype)
    model = load_causal_lm(name, trust_remote_code=args.trust_remote_code, dtype=dtype, load_in_4bit=four_bit)
    teacher = TeacherModel(model.eval())
    fit_rows(teacher, model, args, owner="teacher")
    return teacher
