"""A step computes its real tokens and nothing else: its FLOPs, which no load of the machine moves, against a formula.

The formula is checked first, on plain passes of transformers over rows without padding.
"""

from contextlib import contextmanager

from tests.benchmarks import workloads
from tests.benchmarks.bare_steps import BareSteps
from tests.benchmarks.flops import Backbone, flop_counter, needed_flops

SMALL = {"hidden_size": 96, "head_size": 32, "num_hidden_layers": 2, "vocab_size": 1024}


def test_the_formula_is_what_plain_passes_without_padding_execute():
    bare, counted = BareSteps(workloads.realistic(4, 8, **SMALL)), {}

    @contextmanager
    def stage(name):
        with flop_counter() as counter:
            yield
        counted[name] = counter.get_total_flops()

    bare.step(stage)
    counted["logprobs"] += counted.pop("old policy")
    needed = needed_flops(
        bare.policy,
        bare.critic,
        bare.reward,
        prompts=[32] * 4,
        responses=[8] * 4,
        texts=[40] * 4,
        epochs=2,
        old_policy_pass=True,
        logits_made_twice=False,
    )
    assert counted == vars(needed)


def test_every_row_attends_to_its_own_tokens_only():
    rows = Backbone(weights=3, attention=2)
    # 3 tokens * 3 weights * 2 = 18; rows of 2 and 1 tokens: 4 * 2 * (2 * 2 + 1 * 1) = 40.
    assert rows.forward([2, 1]) == 58
    # Twice the linear part; five attention products instead of two.
    assert rows.backward([2, 1]) == 36 + 100
    # Two tokens, after 1 and 2 others and with themselves: 2 * 6 + 4 * 2 * (2 + 3).
    assert rows.decode(1, 2) == 52
