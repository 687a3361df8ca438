import torch

from alpaca_ppo.checkpoint.size import checkpoint_bytes


def test_a_checkpoint_has_each_weight_and_its_two_moments_in_float32_or_wider():
    float32, bfloat16 = torch.zeros(3, 4), torch.zeros(5, dtype=torch.bfloat16, device="meta")
    float64 = torch.zeros(2, dtype=torch.float64)
    # 12 * 4 + 5 * 4 + 2 * 8 = 84 bytes, and three times that with the moments.
    assert checkpoint_bytes([float32, bfloat16, float64], adamw=False) == 84
    assert checkpoint_bytes([float32, bfloat16, float64], adamw=True) == 252
    assert checkpoint_bytes([], adamw=True) == 0
