"""The backends of this package, by their names.

All but vLLM sample from the model that training holds, and sample the same tokens.
"""

from typing import Unpack

from transformers import PreTrainedModel

from alpaca_ppo.generation.backends import Backend, GenerateOptions
from alpaca_ppo.generation.hf_generate import GenerateBackend
from alpaca_ppo.generation.responses import Generation, SamplingParams
from alpaca_ppo.generation.slots import SlotLoop, slot_problem
from alpaca_ppo.generation.vllm.backend import VLLMBackend
from alpaca_ppo.registry import GENERATION_BACKENDS
from alpaca_ppo.types import PromptBatch

GENERATION_BACKENDS.implement("generate")(GenerateBackend)
GENERATION_BACKENDS.implement("vllm")(VLLMBackend)


@GENERATION_BACKENDS.implement("slots")
class SlotsBackend(Backend):
    """See `slots`."""

    takes_turns = takes_stop_strings = returns_states = True

    def problem(self, model: PreTrainedModel) -> str | None:
        return slot_problem(model)

    def generate(
        self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> Generation:
        if problem := slot_problem(model):
            remedy = "set generation_backend: auto" if options["turns"] is None else "several turns need slots"
            raise ValueError(f"generation_backend {self.name} cannot run {type(model).__name__}: {problem}; {remedy}")
        return SlotLoop(model, prompts, params, options).run()


@GENERATION_BACKENDS.implement("auto")
class AutoBackend(SlotsBackend):
    """Slots for models that allow them, `model.generate` for the others."""

    returns_states = True
    fallback_reason: str | None = None

    def use_fallback(self, problem: str) -> None:
        self.fallback_reason = problem

    def generate(
        self, model: PreTrainedModel, prompts: PromptBatch, params: SamplingParams, **options: Unpack[GenerateOptions]
    ) -> Generation:
        if options["turns"] is None and (self.fallback_reason or slot_problem(model)):
            return GenerateBackend(self.args).generate(model, prompts, params, **options)
        return super().generate(model, prompts, params, **options)
