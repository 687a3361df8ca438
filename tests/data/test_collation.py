import torch
from torch.testing import assert_close

from alpaca_ppo.data import collate_prompts

EOS = 2


def item(*ids):
    return {"input_ids": list(ids), "row": {"prompt": str(ids)}}


def test_prompts_are_padded_on_the_left():
    batch = collate_prompts([item(5, 6), item(7), item(8, 9, 10)], [4, 0, 9], pad_token_id=0, query_len=4)
    assert_close(batch["queries"], torch.tensor([[0, 0, 5, 6], [0, 0, 0, 7], [0, 8, 9, 10]]))
    assert_close(batch["query_attn_masks"], torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]))
    assert_close(batch["prompt_ids"], torch.tensor([4, 0, 9]))
    assert batch["rows"] == [{"prompt": "(5, 6)"}, {"prompt": "(7,)"}, {"prompt": "(8, 9, 10)"}]


def test_a_pad_id_inside_a_prompt_counts_as_a_token():
    batch = collate_prompts([item(EOS, 5, EOS)], [0], pad_token_id=EOS, query_len=5)
    assert_close(batch["queries"], torch.tensor([[EOS, EOS, EOS, 5, EOS]]))
    assert_close(batch["query_attn_masks"], torch.tensor([[0, 0, 1, 1, 1]]))
