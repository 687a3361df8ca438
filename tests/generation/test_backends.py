"""Registered generation backends: what they get, what is checked of what they return, and weights of their own."""

import copy
from typing import Any

import pytest
import torch

from alpaca_ppo.generation import (
    Backend,
    Generation,
    SamplingHooks,
    SamplingParams,
    StopStrings,
    generate,
    make_backend,
    register_generation_backend,
)
from alpaca_ppo.ppo.mismatch import SamplerMismatch
from tests.generation.test_generate import PROMPTS, SAMPLING, assert_same, padded, run
from tests.registered import temporary_choices
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import metric_lines, tiny_trainer


class Recording(Backend):
    """Returns what `answer` makes, and keeps what it was given."""

    answer: Any = None
    given: dict[str, Any] = {}

    def generate(self, model: Any, prompts: Any, params: Any, **how: Any) -> Any:
        self.given.update(
            how, prompts=prompts, params=params, training=model.training, grad=torch.is_grad_enabled(), args=self.args
        )
        return type(self).answer(how["hooks"])


def generation(rows: int = 12, width: int = 12) -> Generation:
    numbers = torch.arange(rows).unsqueeze(1).expand(rows, width)
    return Generation(numbers, numbers >= 0, -1.0 * numbers, numbers[:, 0] > 0)


def test_a_registered_backend_gets_trimmed_prompts_and_the_params() -> None:
    model = tiny_causal_lm("llama").train()
    Recording.answer = lambda hooks: generation()
    with temporary_choices():
        register_generation_backend("mine")(Recording)
        found = run(model, extra=5, backend="mine", temperature=0.5, rows_at_once=7)
    given = Recording.given
    assert torch.equal(given["prompts"]["queries"], padded(PROMPTS)["queries"])
    assert torch.equal(given["prompts"]["query_attn_masks"], padded(PROMPTS)["query_attn_masks"])
    assert given["params"] == SamplingParams(**{**SAMPLING, "temperature": 0.5})
    assert given["rows_at_once"] == 7 and given["turns"] is None and given["args"] is None
    assert not given["training"] and not given["grad"] and model.training
    assert torch.equal(found.responses, generation().responses)


@pytest.mark.parametrize("returned", ["text", generation(width=11), generation(rows=11)])
def test_what_a_registered_backend_returns_is_checked(returned: Any) -> None:
    Recording.answer = lambda hooks: returned
    with temporary_choices():
        register_generation_backend("mine")(Recording)
        with pytest.raises(ValueError, match=r"generation_backend 'mine' returned .* a Generation of .*\(12, 12\)"):
            run(tiny_causal_lm("llama"), backend="mine")


@pytest.mark.parametrize("reported", [[], [3, 0], list(range(12))])
def test_each_row_is_reported_once_by_the_backend_or_at_its_end(reported: list[int]) -> None:
    def answer(hooks: Any) -> Generation:
        for row in reported:
            hooks.on_finished([row], generation()[[row]])
        return generation()

    seen: list[int] = []

    def on_finished(rows: list[int], finished: Generation) -> None:
        assert finished.responses[:, 0].tolist() == rows
        seen.extend(rows)

    Recording.answer = answer
    backend, hooks = Recording(), SamplingHooks(on_finished=on_finished)
    generate(tiny_causal_lm("llama"), padded(PROMPTS), SamplingParams(**SAMPLING), backend=backend, hooks=hooks)
    assert seen == reported + sorted(set(range(12)) - set(reported))


@pytest.mark.parametrize("backend", ["auto", "generate"])
def test_logits_that_are_not_finite_are_an_error_before_a_row_is_reported(backend: str) -> None:
    model = tiny_causal_lm("llama")
    model.lm_head.weight.data[5] = float("nan")
    hooks = SamplingHooks(on_finished=lambda rows, finished: pytest.fail("reported"))
    with pytest.raises(ValueError, match="logits of row 0 are not finite at response position 0"):
        run(model, backend=backend, rows_at_once=1, num_return_sequences=1, hooks=hooks)


@pytest.mark.parametrize("most", [1, 2, 4, 7, None])
def test_generate_samples_at_most_so_many_rows_at_once(most: int | None) -> None:
    model, sizes = tiny_causal_lm("bloom"), []
    expected = run(model)
    model.register_forward_pre_hook(lambda _, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True)
    assert_same(run(model, backend="generate", rows_at_once=most), expected)
    # Three samples of a prompt are together where there is room.
    assert max(sizes) == {1: 1, 2: 2, 4: 3, 7: 6, None: 12}[most]


class Copied(Backend):
    """Samples from a copy of the policy, which `sync` brings up to date."""

    has_own_weights = takes_stop_strings = True
    synced = 0

    def generate(self, model: Any, prompts: Any, params: Any, **how: Any) -> Generation:
        return generate(self.model, prompts, params, backend="slots", **how)

    def sync(self, policy: Any, weights: Any) -> None:
        type(self).synced += 1
        if not hasattr(self, "model"):
            self.model = copy.deepcopy(policy.model)
        state = self.model.state_dict()
        for name, tensor in weights():
            state[name].copy_(tensor)


class Stale(Copied):
    """Forgets to take over the weights."""

    def sync(self, policy: Any, weights: Any) -> None:
        if not hasattr(self, "model"):
            super().sync(policy, weights)


LARGE_STEPS = {"learning_rate": 0.05, "total_episodes": 30}


def trained(folder: Any, **options: Any) -> Any:
    trainer = tiny_trainer(folder, **{**LARGE_STEPS, "old_policy": "recompute", **options})
    trainer.train()
    return trainer, metric_lines(folder)


def test_a_sampler_with_weights_of_its_own_trains_as_one_on_the_policy(tmp_path: Any) -> None:
    _, expected = trained(tmp_path / "slots", generation_backend="slots")
    with temporary_choices():
        register_generation_backend("copied")(Copied)
        Copied.synced = 0
        trainer, lines = trained(tmp_path / "copied", generation_backend="copied")
    # Before the first responses and after each update but the last.
    assert Copied.synced == len(lines) == 3
    backend = trainer.collector.backend
    assert backend.args is trainer.args and backend.name == "copied"
    for line, other in zip(lines, expected, strict=True):
        assert {k: v for k, v in line.items() if "time" not in k and "memory" not in k and "per_second" not in k} == {
            k: v for k, v in other.items() if "time" not in k and "memory" not in k and "per_second" not in k
        }


def test_a_sampler_whose_weights_are_a_step_old_stops_the_run(tmp_path: Any) -> None:
    with temporary_choices():
        register_generation_backend("stale")(Stale)
        with pytest.raises(SamplerMismatch, match="mismatch/logprob_abs_mean"):
            trained(tmp_path, generation_backend="stale")
    assert len(metric_lines(tmp_path)) == 1


def test_an_unknown_backend_is_refused_and_auto_is_the_default() -> None:
    with pytest.raises(ValueError, match="generation_backend is 'sglang'; choose one of auto, slots, generate, vllm"):
        make_backend("sglang")
    assert make_backend("auto").takes_turns and not make_backend("generate").takes_turns


def test_stop_strings_are_refused_by_a_backend_that_does_not_take_them() -> None:
    stop = StopStrings(["a"], tiny_tokenizer(["a"]), vocab_size=64)
    with pytest.raises(ValueError, match="does not take stop_strings"):
        run(tiny_causal_lm("llama"), backend=Recording(), stop_strings=stop)


def test_a_run_in_slots_refuses_a_policy_that_they_cannot_sample_before_it_starts(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="generation_backend slots cannot sample .*; set it to auto"):
        tiny_trainer(tmp_path, model=tiny_causal_lm("mamba"), generation_backend="slots")
