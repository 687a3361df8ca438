"""From sampled responses to rewards: the columns that per-token scores go to, and the penalties for a missing stop
and for length.
"""

from types import SimpleNamespace

import torch

from alpaca_ppo.rewards import build_reward
from alpaca_ppo.rewards.scorer import score_responses
from tests.tiny_models import tiny_tokenizer


def samples(mask: list[list[int]], stopped: list[bool]) -> dict[str, torch.Tensor]:
    """Responses whose token in column t of row i has the id 10 * (i + 1) + t."""
    response_mask = torch.tensor(mask, dtype=torch.bool)
    rows, columns = response_mask.shape
    return {
        "responses": 10 * torch.arange(1, rows + 1).unsqueeze(1) + torch.arange(columns),
        "response_mask": response_mask,
        "stopped": torch.tensor(stopped),
    }


def without_holes() -> dict[str, torch.Tensor]:
    """Three responses of 3, 2 and 1 tokens; the last two did not stop."""
    return samples([[1, 1, 1], [1, 1, 0], [1, 0, 0]], [True, False, False])


def with_holes() -> dict[str, torch.Tensor]:
    """Masked columns 0, 1 and 4; column 2; columns 1 and 3. The last two responses did not stop."""
    return samples([[1, 1, 0, 0, 1], [0, 0, 1, 0, 0], [0, 1, 0, 1, 0]], [True, False, False])


def score(function, sampled, penalty, overlong_buffer_len=None):
    args = SimpleNamespace(penalty_reward_value=penalty, overlong_buffer_len=overlong_buffer_len)
    rows = [{"prompt": "w20"}] * len(sampled["responses"])
    return score_responses(build_reward(function), tiny_tokenizer(), sampled, rows, args)


def token_ids(completion_ids, **columns):
    """Every chosen token's own id as its reward, so that a number in a wrong column is seen."""
    return [[float(token) for token in ids] for ids in completion_ids]


def test_the_penalty_replaces_the_reward_and_the_score_is_kept():
    scored = score(lambda prompts, completions, **columns: [1.0, 2.0, 3.0], without_holes(), penalty=-5.0)
    assert scored["scores"].tolist() == [1.0, 2.0, 3.0]
    assert scored["rewards"].tolist() == [1.0, -5.0, -5.0]
    assert scored["scores_by_source"].tolist() == [[1.0], [2.0], [3.0]]
    kept = score(lambda prompts, completions, **columns: [1.0, 2.0, 3.0], without_holes(), penalty=None)
    assert kept["rewards"].tolist() == [1.0, 2.0, 3.0]


def test_the_penalty_of_token_rewards_goes_to_the_last_token():
    scored = score(lambda completion_ids: [[1.0] * len(ids) for ids in completion_ids], without_holes(), penalty=-5.0)
    assert scored["rewards"].tolist() == [[1, 1, 1], [0, -5, 0], [-5, 0, 0]]
    assert scored["scores"].tolist() == [3.0, 2.0, 1.0]


def test_the_penalty_for_length_grows_over_the_last_tokens_and_leaves_the_scores():
    # 3, 1 and 2 chosen tokens in 5 columns, with a buffer of 4 after the first: -2/4, 0 and -1/4. The last two did
    # not stop.
    overlong = {"overlong_buffer_len": 4}
    ones = {"function": lambda prompts, **columns: [1.0, 2.0, 3.0], "sampled": with_holes()}
    scored = score(**ones, penalty=None, **overlong)
    assert scored["overlong_penalties"].tolist() == [-0.5, 0.0, -0.25]
    assert scored["rewards"].tolist() == [0.5, 2.0, 2.75]
    assert scored["scores"].tolist() == [1.0, 2.0, 3.0] and scored["scores_by_source"].tolist() == [[1.0], [2.0], [3.0]]
    # Beside the penalty for a missing stop, and on the last chosen token.
    assert score(**ones, penalty=-5.0, **overlong)["rewards"].tolist() == [0.5, -5.0, -5.25]
    tokens = score(token_ids, with_holes(), penalty=-5.0, **overlong)
    assert tokens["rewards"].tolist() == [[10.0, 11.0, 0.0, 0.0, 13.5], [0, 0, -5.0, 0, 0], [0, 0, 0, -5.25, 0]]
    assert tokens["scores"].tolist() == [35.0, 22.0, 64.0]


def test_sources_see_the_chosen_tokens_of_a_response_with_holes():
    seen = []

    def record(completion_ids, completions):
        seen.extend(zip(completion_ids, completions, strict=True))
        return [0.0] * len(completion_ids)

    score(record, with_holes(), penalty=None)
    assert seen == [([10, 11, 14], "w10 w11 w14"), ([22], "w22"), ([31, 33], "w31 w33")]


def test_token_rewards_go_to_the_masked_columns_across_holes():
    scored = score(token_ids, with_holes(), penalty=None)
    assert scored["rewards"].tolist() == [[10, 11, 0, 0, 14], [0, 0, 22, 0, 0], [0, 31, 0, 33, 0]]
    # 10 + 11 + 14, 22, 31 + 33
    assert scored["scores"].tolist() == [35.0, 22.0, 64.0]


def test_a_sequence_score_among_token_rewards_goes_to_the_last_masked_column():
    def mixed(completion_ids):
        return [[1.0, 2.0, 3.0], 4.0, 5.0]

    scored = score(mixed, with_holes(), penalty=None)
    assert scored["rewards"].tolist() == [[1, 2, 0, 0, 3], [0, 0, 4, 0, 0], [0, 0, 0, 5, 0]]


def test_a_response_without_chosen_tokens_gets_no_reward_outside_its_mask():
    sampled = samples([[1, 1], [0, 0]], [True, False])
    scored = score(token_ids, sampled, penalty=-5.0)
    assert scored["rewards"].tolist() == [[10, 11], [0, 0]]


def test_a_rank_without_rows_gets_rewards_without_rows():
    scored = score(token_ids, {key: value[:0] for key, value in without_holes().items()}, penalty=-5.0)
    assert scored["rewards"].shape == (0,) and scored["scores_by_source"].shape == (0, 1)
