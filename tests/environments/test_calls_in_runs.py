"""Runs whose policy writes calls itself, in the default form and in that of a tokenizer's `response_template`."""

from itertools import groupby

import pytest
import torch
from tokenizers import AddedToken

from tests.environments.chat import chat_bytes
from tests.environments.test_games import Recorder
from tests.tiny_models import tiny_causal_lm
from tests.tiny_runs import tiny_trainer

BODIES = {'{"name": "increment", "arguments": {"step": 2}}': 2, '{"name": "increment", "arguments": {"step": 5}}': 5}
MALFORMED = '{"name": "increment"'
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"tool_calls": {"open": "[call]", "close": "[/call]", "repeats": True, "content": "json"}},
}


class Counter:
    def reset(self, **row):
        self.count = 0
        return "Count."

    def increment(self, step: int) -> int:
        """Counts on.

        Args:
            step: by how much
        """
        self.count += step
        return self.count

    def get_reward(self):
        return float(self.count)


def saying(tokens):
    """A model that says each of `tokens` as often as any other, whatever was said before, and nothing else."""
    model = tiny_causal_lm("llama", vocab_size=300, max_position_embeddings=2048)
    with torch.no_grad():
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings.copy_(embeddings[:1].expand_as(embeddings).clone())
        (state,) = model.model(torch.tensor([[0]])).last_hidden_state[0]
        head.zero_()
        head[tokens] = 50 * state / state.dot(state)
    return model


def heard(trainer, tokenizer):
    """Of each row: the texts of the turns, and of what was appended."""
    rows = trainer.last
    for response, mask in zip(rows["responses"].tolist(), rows["response_mask"].tolist(), strict=True):
        length = len(mask) - mask[::-1].index(True)
        parts = [
            (chosen, tokenizer.decode([token for token, _ in part]))
            for chosen, part in groupby(zip(response[:length], mask[:length], strict=True), key=lambda pair: pair[1])
        ]
        yield [text for chosen, text in parts if chosen], [text for chosen, text in parts if not chosen]


@pytest.mark.parametrize(
    ("form", "template"), [("<tool_call>\n{}\n</tool_call>", None), ("[call]{}[/call]", TEMPLATE)], ids=["json", "own"]
)
def test_calls_that_the_policy_writes_are_made(tmp_path, form, template):
    tokenizer = chat_bytes()
    written = {form.format(body): step for body, step in {**BODIES, MALFORMED: None}.items()}
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in written])
    if template is not None:
        tokenizer.response_template = template
    tokens = [*tokenizer.convert_tokens_to_ids(list(written)), tokenizer.eos_token_id]
    trainer = tiny_trainer(
        tmp_path,
        model=saying(tokens),
        trainer_class=Recorder,
        trainer_arguments={
            "environment_factory": Counter, "reward_funcs": None, "train_dataset": None, "processing_class": tokenizer,
        },
        query_len=600,
        response_len=600,
        max_turn_tokens=1,
        max_turns=4,
        max_steps=1,
        total_episodes=None,
        rollout_batch_size=16,
    )  # fmt: skip
    trainer.train()
    failures, lengths = 0, set()
    for score, (said, answers) in zip(trainer.last["scores"].tolist(), heard(trainer, tokenizer), strict=True):
        count, results = 0, []
        for text in said:
            step = written.get(text.removesuffix("<|im_end|>"))
            count += step or 0
            failures += text in written and step is None
            results.append(str(count) if step else '{"error": "the tool call ')
        assert score == count
        assert len(answers) == len(said) - 1
        for answer, expected in zip(answers, results, strict=False):
            assert answer.startswith(f"<|im_end|>\n<|im_start|>tool\n{expected}")
        lengths.add(len(said))
    assert int(trainer.last["tool_failures"].sum()) == failures > 0
    assert len(lengths) > 1 and max(trainer.last["scores"].tolist()) >= 7
