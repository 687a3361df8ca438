"""What must hold for a trainer's rollouts and updates with any prompts, whatever surrounds them in a batch.

The trainers are of a tiny float64 GPT-2, whose layers stay in float64, and take plain SGD steps of all rows at once, so
that the weights show the gradient itself. Each is built once; every example starts from the same weights.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from alpaca_ppo.data.prompts import collate_prompts
from alpaca_ppo.functional import LOSS_AGG_MODES
from alpaca_ppo.models import build_actor_critic
from alpaca_ppo.models.critic_heads import QuantileHead, ScalarHead
from alpaca_ppo.ppo.losses import correction_weights
from alpaca_ppo.ppo.updates import Applied
from tests.independent.property_cases import assert_same, examples
from tests.tiny_models import PAD, tiny_causal_lm
from tests.tiny_runs import count_even, one_update, tiny_trainer, weights, with_advantages

KL_IN_LOSS = {"kl_loss_coef": 0.3, "entropy_coef": 0.05}
CRITIC_FREE = {"num_return_sequences": 2, "kl_coef": 0.0}
SETTINGS = {
    "gae": {**KL_IN_LOSS, "kl_loss_type": "k3", "kl_estimator": "abs", "cliprange_value": 0.05},
    "corrected": {**KL_IN_LOSS, "kl_loss_type": "k1+", "old_policy": "correct", "whiten_rewards": True},
    "quantile": {"critic": "quantile", "num_atoms": 4, "critic_layout": "shared", "clip_ratio_c": 1.5},
    "grpo": {**CRITIC_FREE, **KL_IN_LOSS, "adv_estimator": "grpo", "kl_loss_type": "k2"},
    "rloo": {**CRITIC_FREE, "adv_estimator": "rloo", "policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "reinforce_plus_plus": {**CRITIC_FREE, "adv_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {**CRITIC_FREE, "adv_estimator": "reinforce_plus_plus_baseline"},
}
SCALE_FREE = ("grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

prompt = st.lists(st.integers(4, 63), min_size=1, max_size=4)
prompts = st.dictionaries(st.integers(0, 1000), prompt, min_size=2, max_size=5)
"""The token ids of each prompt, by the prompt's index in its dataset."""


class Laboratory:
    """A trainer whose weights are put back before each update, and the factor and offset of its rewards."""

    def __init__(self, folder, settings):
        self.factor, self.offset = 1.0, 0.0
        policy, reference = (tiny_causal_lm("gpt2", dtype=torch.float64, n_layer=1, seed=seed) for seed in (0, 1))
        head = partial(QuantileHead, num_quantiles=4) if "critic" in settings else ScalarHead
        layout = None if "adv_estimator" in settings else settings.get("critic_layout", "separate")
        model = build_actor_critic(policy, critic_layout=layout, head=head)
        if model.critic is not None:
            # A new head's values are 0.
            for parameter in model.critic.head.parameters():
                parameter.data.normal_(std=0.2, generator=torch.Generator().manual_seed(2))
        sizes = {"rollout_batch_size": 16, "step_batch_size": 16, "step_per_device_batch_size": 16}
        arguments = {"ref_model": reference, "reward_funcs": self._reward}
        arguments["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1), None)
        settings = {**sizes, "lr_scheduler_type": "constant", "max_grad_norm": 1e9, **settings}
        self.trainer = tiny_trainer(folder, model=model, trainer_arguments=arguments, **settings)
        self.start = weights(self.trainer)

    def _reward(self, completion_ids, **others):
        return [self.factor * count + self.offset for count in count_even([], [], completion_ids)]

    def rollouts(self, prompts, *, width=4, per_device=4):
        """Of the prompts in one batch of `width` columns, with advantages; `per_device` rows at once."""
        trainer = self.trainer
        items = [{"input_ids": ids, "row": {"prompt": ""}} for ids in prompts.values()]
        batch = collate_prompts(items, list(prompts), pad_token_id=PAD, query_len=width)
        args = replace(trainer.args, rollout_per_device_batch_size=per_device)
        trainer.collector = replace(trainer.collector, args=args)
        rollouts = with_advantages(trainer, [batch])
        return {**rollouts, **correction_weights(rollouts, trainer.args)}

    def update(self, rollouts, *, mode=None, max_tokens=1000):
        """By how much one step on all rows moves each parameter, and the step's statistics."""
        trainer = self.trainer
        mode = mode or trainer.args.loss_agg_mode
        trainer.args = replace(trainer.args, loss_agg_mode=mode, max_tokens_per_micro_batch=max_tokens)
        trainer.updater.args = trainer.args
        stats, applied = one_update(trainer, rollouts, torch.arange(len(rollouts["responses"])))
        assert applied == Applied()
        after = weights(trainer)
        trainer.actor_critic.load_state_dict(self.start, strict=False)
        measured = {name: torch.tensor(x) for name, x in stats.items() if name != "padding_fraction"}
        return {name: after[name] - self.start[name] for name in after}, measured


@pytest.fixture(scope="module")
def laboratories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("properties")
    return {name: Laboratory(folder / name, settings) for name, settings in SETTINGS.items()}


def some_mode(data, lab):
    """Any `loss_agg_mode` that the policy loss allows."""
    only = lab.trainer.args.policy_loss == "gspo"
    return lab.trainer.args.loss_agg_mode if only else data.draw(st.sampled_from(LOSS_AGG_MODES))


def assert_same_update(actual, expected):
    for part, expected_part in zip(actual, expected, strict=True):
        assert part.keys() == expected_part.keys()
        assert_same("update", part, expected_part)


def assert_same_rollouts(actual, expected, index):
    """That the rows `index` of `actual` are those of `expected`: tokens exactly, numbers up to rounding."""
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        if name.startswith("quer"):
            continue
        if value.dtype == torch.float64:
            assert_same("rollouts", {name: value[index]}, {name: expected[name]})
        else:
            assert_close(value[index], expected[name], rtol=0, atol=0, equal_nan=True)


@examples(12, shrink=False)
@given(data=st.data(), name=st.sampled_from(list(SETTINGS)), prompts=prompts)
def test_prompts_in_another_order_have_their_rollouts_in_that_order_and_the_same_update(
    data, name, prompts, laboratories
):
    lab = laboratories[name]
    order = data.draw(st.permutations(list(prompts)))
    expected, shuffled = lab.rollouts(prompts), lab.rollouts({i: prompts[i] for i in order})
    n = lab.trainer.args.num_return_sequences
    index = torch.tensor([order.index(i) * n + sample for i in prompts for sample in range(n)])
    assert_same_rollouts(shuffled, expected, index)
    mode = some_mode(data, lab)
    assert_same_update(lab.update(shuffled, mode=mode), lab.update(expected, mode=mode))


@examples(12, shrink=False)
@given(data=st.data(), name=st.sampled_from(list(SETTINGS)), prompts=prompts)
def test_padding_and_the_sizes_of_batches_change_neither_rollouts_nor_update(data, name, prompts, laboratories):
    lab = laboratories[name]
    width, per_device, max_tokens = (data.draw(st.integers(*ends)) for ends in ((4, 9), (2, 7), (9, 50)))
    expected, other = lab.rollouts(prompts), lab.rollouts(prompts, width=width, per_device=per_device)
    assert_same_rollouts(other, expected, slice(None))
    mode = some_mode(data, lab)
    assert_same_update(lab.update(other, mode=mode, max_tokens=max_tokens), lab.update(expected, mode=mode))


@examples(14, shrink=False)
@given(data=st.data(), name=st.sampled_from(list(SETTINGS)), prompts=prompts)
def test_what_stands_outside_the_mask_reaches_no_update(data, name, prompts, laboratories):
    lab = laboratories[name]
    rollouts, mode = lab.rollouts(prompts), some_mode(data, lab)
    # Holes, as of tokens that an environment wrote; the first token of each row stays.
    shape = rollouts["response_mask"].shape
    holes = torch.tensor(data.draw(st.lists(st.booleans(), min_size=shape.numel(), max_size=shape.numel()))).view(shape)
    holes[:, 0] = False
    mask = rollouts["response_mask"] & ~holes
    of_tokens = [key for key, value in rollouts.items() if value.is_floating_point() and value.shape == shape]
    results = []
    for filler in (0.0, torch.nan):
        filled = {key: rollouts[key].where(mask, torch.tensor(filler, dtype=torch.float64)) for key in of_tokens}
        results.append(lab.update({**rollouts, **filled, "response_mask": mask}, mode=mode, max_tokens=20))
    assert_same_update(results[1], results[0])
    # Tokens to the right of the last that counts are never read.
    after = torch.arange(shape[1]) > (mask * torch.arange(shape[1])).amax(dim=1, keepdim=True)
    garbled = {**rollouts, **filled, "response_mask": mask, "responses": rollouts["responses"].where(~after, 17)}
    assert_same_update(lab.update(garbled, mode=mode, max_tokens=20), results[0])


@examples(8, shrink=False)
@given(name=st.sampled_from(SCALE_FREE), prompts=prompts, factor=st.sampled_from([0.5, 8.0, 2.0**20]))
def test_without_critic_and_kl_the_scale_of_rewards_changes_no_update(name, prompts, factor, laboratories):
    lab = laboratories[name]
    updates = []
    for lab.factor in (1.0, factor):
        updates.append(lab.update(lab.rollouts(prompts))[0])
    lab.factor = 1.0
    # Scores are whole numbers. Beside a std of 0.35 or more, GRPO's 1e-6 is 3e-6 of it.
    assert_same("update", updates[1], updates[0], tolerance=1e-5)


@examples(8, shrink=False)
@given(
    name=st.sampled_from(["rloo", *SCALE_FREE[1:]]),
    prompts=prompts,
    offset=st.sampled_from([0.1, 1000.7]) | st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False),
)
def test_rewards_that_are_all_alike_move_no_weight(name, prompts, offset, laboratories):
    lab = laboratories[name]
    lab.factor, lab.offset = 0.0, offset
    rollouts = lab.rollouts(prompts)
    lab.factor, lab.offset = 1.0, 0.0
    assert rollouts["scores"].eq(torch.tensor(offset)).all()
    moved, _ = lab.update(rollouts)
    assert all(change.eq(0).all() for change in moved.values())
