"""A sampler that is not the policy that is trained: what is refused, what is warned of, and that the check costs no
number of a run.
"""

import copy
import itertools
import json
import math
import random
import re
import warnings

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from alpaca_ppo import PPOTrainer
from alpaca_ppo.generation import Backend, generate, register_generation_backend
from alpaca_ppo.ppo import rollouts
from alpaca_ppo.ppo.mismatch import SamplerMismatch, clipped_difference, exceeded_bounds, spread_by_length
from alpaca_ppo.ppo.rollouts import RolloutCollector
from tests.registered import temporary_choices
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import count_even, metric_lines, prompts, tiny_trainer, weights

ABS, K3, RATIO = "mismatch/logprob_abs_mean", "mismatch/k3", "mismatch/ratio_max"


@pytest.mark.parametrize(
    ("stats", "half", "expected"),
    [
        # Rounding: of float32, of bfloat16.
        ({ABS: 1e-4, K3: 1e-8, RATIO: 1.001}, False, []),
        ({ABS: 0.03, K3: 1e-3, RATIO: 3.0}, True, []),
        ({ABS: 0.03, K3: 1e-3, RATIO: 3.0}, False, [(ABS, 1e-3), (K3, 1e-4), (RATIO, 1.1)]),
        ({ABS: 0.07}, True, []),
        # Measured with vLLM in bfloat16; at the mean's bound, k3 would be 0.0105 * (0.09 / 0.076)^2 = 0.0147.
        ({ABS: 0.076, K3: 0.0105, RATIO: 3.0}, True, []),
        ({ABS: 0.09, K3: 0.0147, RATIO: 3.0}, True, []),
        ({ABS: 0.076, K3: 0.021}, True, [(K3, 0.02)]),
        ({ABS: 0.095}, True, [(ABS, 0.09)]),
        # A tenth of a nat, half of what PPO's clip lets a step do, is too much in any precision.
        ({ABS: 0.11, K3: 0.006}, True, [(ABS, 0.1)]),
        ({ABS: 0.11, K3: 0.006}, False, [(ABS, 0.1), (K3, 1e-4)]),
        ({ABS: 0.04, K3: 0.2}, True, [(K3, 0.1)]),
        # One token alone is clipped.
        ({RATIO: 1e6}, True, [(RATIO, 10.0)]),
        ({ABS: 1e-3, K3: 1e-4, RATIO: 1.1}, False, []),
        ({ABS: math.nan, "policy/ratio_max": 9.0}, False, []),
        ({}, False, []),
    ],
)
def test_a_mismatch_is_judged_by_what_rounding_explains_and_by_what_ruins_an_update(stats, half, expected):
    assert list(exceeded_bounds(stats, half_precision=half).items()) == expected


def test_a_run_in_half_precision_allows_for_the_rounding_at_its_temperature(tmp_path):
    given = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")}
    trainer = tiny_trainer(
        tmp_path, dtype=torch.bfloat16, temperature=0.95, critic_layout="adapter", trainer_arguments=given
    )
    # 0.09 / 0.95 = 0.0947.
    trainer.sampler_check.check({ABS: 0.094})
    with pytest.warns(UserWarning, match="disagree"):
        trainer.sampler_check.check({ABS: 0.096})


def test_a_run_in_float32_allows_for_the_rounding_of_a_sampler_in_half_precision(tmp_path):
    class Narrow(Backend):
        has_own_weights = half_precision = True

        def generate(self, model, prompts, params, **how):
            return generate(model, prompts, params, backend="generate", **how)

    with temporary_choices():
        register_generation_backend("narrow")(Narrow)
        trainer = tiny_trainer(tmp_path, generation_backend="narrow")
    trainer.sampler_check.check({ABS: 0.08})
    with pytest.warns(UserWarning, match="disagree"):
        trainer.sampler_check.check({ABS: 0.095})


def test_a_copy_in_float32_is_judged_by_what_it_differed_at_first(tmp_path):
    class Own(Backend):
        has_own_weights = True

        def generate(self, model, prompts, params, **how):
            return generate(model, prompts, params, backend="generate", **how)

    with temporary_choices():
        register_generation_backend("own")(Own)
        trainer = tiny_trainer(tmp_path, generation_backend="own")
    trainer.sampler_check.check({ABS: 9e-4})
    with pytest.raises(SamplerMismatch, match="bound 0.001"):
        trainer.sampler_check.check({ABS: 1.1e-3})
    # Here they agree to about 1e-7 nats, so that a thousand times as much is no rounding.
    trainer.check_sampler()
    trainer.sampler_check.check({ABS: 9e-5})
    with pytest.raises(SamplerMismatch, match="bound 0.0001"):
        trainer.sampler_check.check({ABS: 1.1e-4})


def test_prompts_of_the_check_range_from_the_shortest_to_the_longest():
    assert spread_by_length([5, 1, 9, 7, 3, 2, 8], count=4) == [1, 4, 3, 2]
    assert spread_by_length([5, 1], count=4) == [1, 0]


def test_no_token_of_the_short_responses_counts_for_more_than_half_a_nat():
    logprobs = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -9.0], [-1.0, -9.0]])
    sampled = torch.tensor([[-1.0, -1.25], [-4.0, -0.5], [-0.75, math.nan], [math.nan, math.nan]])
    mask = torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    # Differences of 0, 0.25, 3 (0.5 counts), 0.5 and 0.25.
    assert float(clipped_difference(logprobs, sampled, mask)) == pytest.approx(1.5 / 5)
    assert clipped_difference(logprobs, sampled, torch.zeros_like(mask)) == 0.0


@pytest.mark.parametrize(
    ("temperature", "value", "bounds"),
    # 0.09 / 0.96 = 0.09375; at 0.25 it would be 0.36, above what makes an update meaningless.
    [(0.96, 0.093, []), (0.96, 0.095, [0.09375]), (0.25, 0.09, []), (0.25, 0.11, [0.1]), (2.0, 0.095, [0.09])],
)
def test_rounding_in_half_precision_counts_more_at_a_low_temperature(temperature, value, bounds):
    found = exceeded_bounds({ABS: value}, half_precision=True, temperature=temperature)
    assert list(found.values()) == pytest.approx(bounds)
    # float32 rounds far below its bounds at any temperature.
    assert exceeded_bounds({ABS: 0.002}, half_precision=False, temperature=temperature) == {ABS: 1e-3}


@pytest.mark.parametrize(("rows", "stops"), [([0], False), ([0, 1, 2, 3], True)])
def test_short_responses_end_a_run_only_if_many_tokens_disagree(rows, stops, tmp_path, monkeypatch):
    """One token of 2.5 nats among 20: 2.5 / 20 = 0.125 nats per token, and a k3 of (e^2.5 - 1 - 2.5) / 20 = 0.43.

    At most 0.5 of a token counts: one makes 0.5 / 20 = 0.025, four of them 0.1, and more if a response is shorter.
    """
    trainer = tiny_trainer(tmp_path)
    plain = RolloutCollector.sample

    def flipped(*inputs, **how):
        samples = plain(*inputs, **how)
        samples["rollout_logprobs"][rows, 0] += 2.5
        return samples

    monkeypatch.setattr(RolloutCollector, "sample", flipped)
    if stops:
        with pytest.raises(ValueError, match="in 4 short responses"):
            trainer.check_sampler()
    else:
        with pytest.warns(UserWarning, match=rf"in 4 .*: {ABS} is .* \(bound 0.1\), {K3} is .* \(bound 0.1\)"):
            trainer.check_sampler()


def never(prompts, completions, **columns):
    raise AssertionError("no reward is computed before sampler and trainer agree")


def test_a_model_that_samples_otherwise_than_it_trains_is_refused(tmp_path):
    arguments = {"reward_funcs": never}
    trainer = tiny_trainer(
        tmp_path, model=tiny_causal_lm("rwkv"), trainer_arguments=arguments, generation_backend="generate"
    )
    before = weights(trainer)
    message = rf"disagree .* in 4 short responses before the first rollout: {ABS} is .* \(bound 0.1\)"
    with pytest.raises(ValueError, match=message + ".*mismatch_action: warn.*in a new run, old_policy: correct"):
        trainer.train()
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())


@pytest.fixture
def other_sampler(monkeypatch):
    """The package's sampler runs a copy of the policy with noise on its head: a mismatch of 0.2 nats."""
    sampler = copy.deepcopy(tiny_causal_lm("llama"))
    weight = sampler.get_output_embeddings().weight.data
    weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(7))
    plain = rollouts.generate
    monkeypatch.setattr(rollouts, "generate", lambda model, *args, **how: plain(sampler, *args, **how))


def messages_of(trainer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stats = trainer.train()
    assert stats[ABS] > 0.1
    return [str(warning.message) for warning in caught if "sampler and trainer disagree" in str(warning.message)]


def test_another_sampler_ends_the_run_unless_its_weights_are_corrected_or_the_user_says_otherwise(
    other_sampler, tmp_path
):
    with pytest.raises(ValueError, match="in 4 short responses"):
        tiny_trainer(tmp_path / "a").train()
    (warned,) = messages_of(tiny_trainer(tmp_path / "b", mismatch_action="warn"))
    assert "docs/troubleshooting.md" in warned
    assert len(messages_of(tiny_trainer(tmp_path / "c", old_policy="correct", total_episodes=10))) == 1
    assert messages_of(tiny_trainer(tmp_path / "d", mismatch_action="ignore", total_episodes=10)) == []


def shifted(difference, passes=0):
    """A trainer class whose sampler overstates its log-probs by `difference` nats, after `passes` correct rollouts."""

    class Shifted(PPOTrainer):
        rollouts = itertools.count()

        def _generate(self, prompts, sampling_params):
            samples = super()._generate(prompts, sampling_params)
            if next(self.rollouts) >= passes:
                samples["rollout_logprobs"] += difference * samples["response_mask"]
            return samples

    return Shifted


@pytest.mark.parametrize("old_policy", ["recompute", "rollout"])
def test_a_step_is_refused_before_it_moves_a_weight(old_policy, tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=shifted(0.11), old_policy=old_policy)
    before = weights(trainer)
    with pytest.raises(ValueError, match=rf"in the responses of this step: {ABS} is 0.11 \(bound 0.1\)"):
        trainer.train()
    assert all(torch.equal(before[name], value) for name, value in weights(trainer).items())
    assert trainer.updater.num_updates == 0


def test_a_run_that_was_stopped_in_a_later_step_continues_before_its_rollouts(tmp_path, capsys):
    how = {"trainer_arguments": {"reward_funcs": luck}, "old_policy": "rollout"}
    # Saved only because it was stopped.
    with pytest.raises(SamplerMismatch, match="mismatch_action: warn or, in a new run, old_policy: correct"):
        tiny_trainer(tmp_path / "a", trainer_class=shifted(0.11, passes=1), **how).train()
    assert [path.name for path in (tmp_path / "a").glob("checkpoint-*")] == ["checkpoint-1"]
    assert "sampler and trainer disagree: run saved to" in capsys.readouterr().out
    # The same sampler is refused again, and what was saved remains.
    with pytest.raises(SamplerMismatch):
        tiny_trainer(tmp_path / "a", trainer_class=shifted(0.11), **how).train(resume_from_checkpoint=True)
    repaired = tiny_trainer(tmp_path / "a", **how)
    repaired.train(resume_from_checkpoint=True)
    whole = tiny_trainer(tmp_path / "b", **how)
    whole.train()
    assert metric_lines(tmp_path / "a") == metric_lines(tmp_path / "b")
    assert all(torch.equal(weights(whole)[name], value) for name, value in weights(repaired).items())


def test_a_run_that_is_stopped_in_its_first_step_saves_nothing(tmp_path):
    with pytest.raises(SamplerMismatch):
        tiny_trainer(tmp_path, trainer_class=shifted(0.11)).train()
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_a_difference_beyond_rounding_is_warned_of(tmp_path):
    trainer = tiny_trainer(tmp_path, trainer_class=shifted(0.01), total_episodes=10)
    with pytest.warns(UserWarning, match=rf"{ABS} is 0.01 \(bound 0.001\)"):
        trainer.train()


def test_a_sampler_of_the_user_s_own_is_not_asked_for_short_responses(tmp_path):
    class OwnSampler(PPOTrainer):
        def _generate(self, prompts, sampling_params):
            raise AssertionError("no hook of the user's is called")

    class OwnRollout(PPOTrainer):
        def rollout(self, prompt_batches):
            raise AssertionError("no hook of the user's is called")

    # The package's own sampler, which such a subclass may replace, samples RWKV otherwise than it is trained.
    for trainer_class in (OwnSampler, OwnRollout):
        trainer = tiny_trainer(
            tmp_path / trainer_class.__name__, model=tiny_causal_lm("rwkv"), trainer_class=trainer_class
        )
        trainer.check_sampler()
    with pytest.raises(ValueError, match="sampler and trainer disagree"):
        tiny_trainer(tmp_path / "a", model=tiny_causal_lm("rwkv")).check_sampler()


def luck(prompts, completions, completion_ids, **columns):
    """Draws from the global generators, as a reward may."""
    scores = count_even(prompts, completions, completion_ids)
    return [score + random.random() + float(torch.rand(())) for score in scores]


@pytest.mark.parametrize(("learning_rate", "warns"), [(1e-4, False), (1e-3, True)])
def test_the_end_of_a_run_says_how_far_its_last_update_moved_the_policy(learning_rate, warns, tmp_path, capsys):
    settings = {"rollout_batch_size": 20, "total_episodes": 40, "learning_rate": learning_rate, "temperature": 0.7}
    tiny_trainer(tmp_path, **settings, num_logged_rollouts=20).train()
    printed = capsys.readouterr().out.splitlines()
    (line,) = [line for line in printed if line.startswith("the last update moved the policy by")]
    assert printed.index(line) < printed.index(
        "from start to end, the first and the last step, before the last update:"
    )
    # The saved weights give the first 16 of the 20 responses; k3 = exp(d) - 1 - d with d = new - old.
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "final/policy")
    tokenizer, kls = tiny_tokenizer(), []
    rows = (tmp_path / "rollouts/step_000002.jsonl").read_text().splitlines()
    assert len(rows) == 20
    for row in map(json.loads, rows[:16]):
        prompt, written = tokenizer(row["prompt"])["input_ids"], [token["id"] for token in row["tokens"]]
        logits = policy(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1] / 0.7
        new = logits.log_softmax(-1)[range(len(written)), written]
        d = new - torch.tensor([token["logprobs"] for token in row["tokens"]])
        kls.append((d.exp() - 1 - d).detach())
    per_token, per_response = torch.cat(kls).mean().item(), torch.stack([kl.sum() for kl in kls]).mean().item()
    shown = re.search(r"by (\S+) nats per token, (\S+) per response", line).groups()
    assert [*map(float, shown)] == [pytest.approx(per_token, rel=0.01), pytest.approx(per_response, rel=0.01)]
    assert (per_token > 0.1) == warns == line.endswith("evaluate final/policy, lower learning_rate")
    assert warns or line.endswith("per response")


def test_a_run_that_evaluates_its_last_weights_measures_no_update_of_them(tmp_path, capsys):
    tiny_trainer(tmp_path, trainer_arguments={"eval_dataset": prompts(2)}).train()
    assert "the last update moved" not in capsys.readouterr().out


def test_the_check_moves_no_number_of_a_run(tmp_path):
    class Drawing(Backend):
        has_own_weights = True

        def generate(self, model, prompts, params, **how):
            torch.rand(1)
            return generate(model, prompts, params, backend="generate", **how)

    settings = {"generation_backend": "drawing", "old_policy": "recompute"}
    with temporary_choices():
        register_generation_backend("drawing")(Drawing)
        for action in ("ignore", "stop"):
            arguments = {"reward_funcs": luck}
            tiny_trainer(tmp_path / action, mismatch_action=action, trainer_arguments=arguments, **settings).train()
    assert metric_lines(tmp_path / "stop") == metric_lines(tmp_path / "ignore")
