"""The episodes of a rollout: begun together, answered while the sampler goes on, ended with their rewards.

`Environments` belongs to the run, `Episodes` to the rows of one rollout of one rank.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alpaca_ppo.async_calls import RowCall, RowCalls
from alpaca_ppo.data.prompts import left_padded
from alpaca_ppo.environments.episode import Episode, EpisodeSettings, Steps
from alpaca_ppo.environments.kinds import EnvironmentKind, rewarding_classes
from alpaca_ppo.functional.shaping import response_lengths
from alpaca_ppo.generation.responses import Generation, SamplingParams, unpadded
from alpaca_ppo.generation.turns import PENDING, Pending, Reply, Turn, Turns
from alpaca_ppo.types import EPISODE, PromptBatch

# Seconds to wait for calls between two calls of `poll`.
_POLL_SECONDS = 0.1


class Environments:
    """What answers the policy in a run.

    Args:
        kinds: by the value of a row's `environment` column; under None, the kind of every row.

    Attributes:
        answer: whether a response can have more than one turn.
        reward_per_token: whether rewards are given per token, because some environments reward turns.
    """

    def __init__(self, kinds: Mapping[str | None, EnvironmentKind], settings: EpisodeSettings) -> None:
        self.kinds, self.settings, self.calls = dict(kinds), settings, RowCalls()
        self.answer = any(kind.answers for kind in self.kinds.values())
        self.reward_per_token = any(kind.has_reply for kind in self.kinds.values())

    def reward_functions(self) -> list[tuple[str, Callable[..., list[Any]]]]:
        """A reward source, with its name, for each class that gives rewards."""
        return [(name, partial(_rewards_of, name)) for name in rewarding_classes(self.kinds)]

    @contextmanager
    def episodes(
        self, prompts: PromptBatch, sampling_params: SamplingParams, poll: Callable[[], Any]
    ) -> Iterator["Episodes"]:
        """Resets an environment for each episode, `sampling_params.num_return_sequences` of each prompt, and yields
        the episodes with the prompts that the environments have completed. The end of the block abandons open calls
        and releases the environments, for reuse if they can be.

        `poll` is called several times a second while calls are awaited; an exception in it ends the block.
        """
        n = sampling_params.num_return_sequences
        made = []
        for row, prompt_id in zip(prompts["rows"], prompts["prompt_ids"].tolist(), strict=True):
            settings = replace(self.settings, conversation=self.settings.conversation.of_row(row))
            made += [Episode(kind_of(self.kinds, row), row, prompt_id, settings) for _ in range(n)]
        episodes = Episodes(made, self, poll)
        try:
            # A seed of 31 bits for each prompt in this step and round, the same for all its samples. Its stream is not
            # the sampler's, so that an environment's random numbers do not repeat those of the tokens.
            reset_params = replace(sampling_params, num_return_sequences=1, seed=sampling_params.seed + 1)
            keys = reset_params.random_keys(prompts["prompt_ids"])
            episodes.begin([int(key) & 0x7FFFFFFF for key in keys for _ in range(n)])
            episodes.set_prompts(prompts, sampling_params)
            yield episodes
        finally:
            # The numbers of the episodes whose call has not returned: it may still write to the environment.
            running = self.calls.abandon()
            for number, episode in enumerate(made):
                if episode.environment is not None:
                    episode.kind.release(episode.environment, reusable=episode.reusable and number not in running)


def kind_of(kinds: Mapping[str | None, EnvironmentKind], row: Mapping[str, Any]) -> EnvironmentKind:
    """The kind of environment of a dataset row: the only one, or the one that its column `environment` names."""
    if None in kinds:
        return kinds[None]
    name = row.get("environment")
    if name not in kinds:
        raise ValueError(f"a row's column environment is {name!r}; write one of environment_factory's {list(kinds)}")
    return kinds[name]


class Episodes:
    """The episodes of a rollout, one for each row; also the sampler's `TurnHandler`. For `poll` see
    `Environments.episodes`.

    Attributes:
        prompts: with the observations of `reset`; one prompt for each row if these differ between samples of a prompt.
        sampling_params: of the rollout; with one prompt for each row, for one response to each, with the same random
            numbers.
        turns: for the sampler; None if every response ends with its first turn.
    """

    prompts: PromptBatch
    sampling_params: SamplingParams

    def __init__(self, episodes: Sequence[Episode], environments: Environments, poll: Callable[[], Any]) -> None:
        self.episodes, self._calls, self._poll = list(episodes), environments.calls, poll
        self._args = environments.settings.args
        self.turns = Turns(self, max_turn_tokens=self._args.max_turn_tokens) if environments.answer else None
        self._steps: dict[int, Steps[Any]] = {}
        self._answers: list[tuple[int, Reply]] = []
        self._ending: set[int] = set()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The dataset's rows with the episodes' prompts, and the episodes for the reward sources."""
        return [{**episode.row, "prompt": episode.prompt, EPISODE: episode} for episode in self.episodes]

    def begin(self, seeds: Sequence[int]) -> None:
        """Resets all environments."""
        for together in (True, False):
            for row, (episode, seed) in enumerate(zip(self.episodes, seeds, strict=True)):
                if episode.kind.resets_together is together:
                    self._advance(row, episode.begin(seed))
                    if not together:
                        self._wait(self._steps)
            self._wait(self._steps)
        # The end of a reset is no reply to a turn.
        self._answers.clear()

    def set_prompts(self, prompts: PromptBatch, params: SamplingParams) -> None:
        """Sets the prompts that the episodes begin with, from those of the dataset, and how to sample them."""
        n, query_len = params.num_return_sequences, self._args.query_len
        tokenized = unpadded(prompts)
        ids = [episode.prompt_ids(tokenized[i // n]) for i, episode in enumerate(self.episodes)]
        samples_share_prompt = all(ids[i] == ids[i - i % n] for i in range(len(ids)))
        prompt_rows = range(0, len(ids), n if samples_share_prompt else 1)
        queries, masks = left_padded([ids[i] for i in prompt_rows], query_len, params.pad_token_id)
        source = torch.tensor([i // n for i in prompt_rows], dtype=torch.long)
        batch: Any = {key: value[source] for key, value in prompts.items() if isinstance(value, Tensor)}
        batch |= {"queries": queries, "query_attn_masks": masks}
        batch["rows"] = [{**self.episodes[i].row, "prompt": self.episodes[i].prompt} for i in prompt_rows]
        if not samples_share_prompt:
            params = replace(params, num_return_sequences=1, sample_ids=tuple(range(n)) * len(prompts["rows"]))
        self.prompts, self.sampling_params = batch, params

    def _wait(self, unfinished: Collection[int]) -> None:
        while unfinished:
            self._poll()
            self.listen(_POLL_SECONDS)

    def on_stop(self, turn: Turn) -> Reply | Pending:
        """Begins the work on a turn."""
        done, reply = self._advance(turn.row, self.episodes[turn.row].reply_to(turn))
        return reply if done else PENDING

    def ready(self, timeout: float) -> Sequence[tuple[int, Reply]]:
        """See `TurnHandler.ready`."""
        self.listen(0.0 if self._answers else timeout)
        answers, self._answers = self._answers, []
        return answers

    def listen(self, timeout: float = 0.0) -> None:
        """Goes on with the rows whose calls have ended, or end within `timeout` seconds."""
        for ended in self._calls.finished(timeout):
            row = ended.row
            self.episodes[row].seconds += ended.seconds
            done, value = self._advance(row, self._steps.pop(row), ended)
            if done and row in self._ending:
                self._ending.remove(row)
            elif done:
                self._answers.append((row, value))

    def finish(self, rows: Sequence[int], finished: Generation) -> None:
        """Begins the end of the episodes `rows`, whose responses `finished` are complete."""
        lengths = response_lengths(finished.response_mask).tolist()
        parts = (finished.responses.tolist(), finished.response_mask.tolist(), finished.stopped.tolist())
        for row, length, tokens, mask, stopped in zip(rows, lengths, *parts, strict=True):
            response, episode = tokens[:length], self.episodes[row]
            complete = stopped or length - episode.num_read == self._args.max_turn_tokens
            if not self._advance(row, episode.end(response, mask[:length], complete=complete))[0]:
                self._ending.add(row)

    def wait(self) -> None:
        """Waits until all episodes that `finish` was called for have ended."""
        self._wait(self._ending)

    def statistics(self, samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Further tensors of the samples, (rows,) each: `num_turns`, `environment_tokens`, `tool_calls`,
        `tool_failures` and `environment_seconds`; `tool_tokens` (rows, R); and `stopped`, here also True for an episode
        that its environment ended, and False for one that was cut off after a whole turn.
        """
        mask = samples["response_mask"]
        tool_tokens = torch.zeros_like(mask)
        for row, episode in enumerate(self.episodes):
            for span in episode.tool_spans:
                tool_tokens[row, span] = True

        def column(name: str) -> Tensor:
            return torch.tensor([getattr(episode, name) for episode in self.episodes])

        return {
            **{name: column(name) for name in ("num_turns", "tool_calls", "tool_failures")},
            "environment_tokens": response_lengths(mask) - mask.sum(dim=1),
            "tool_tokens": tool_tokens,
            "environment_seconds": column("seconds"),
            "stopped": (samples["stopped"] | column("ended_by_environment")) & ~column("cut_off"),
        }

    def _advance(self, row: int, steps: Steps[Any], ended: RowCall | None = None) -> tuple[bool, Any]:
        """Runs a row's generator up to its next call, and starts that; returns whether it is done, and its result."""
        try:
            # A generator that has not begun takes None.
            call = next(steps) if ended is None else steps.send(ended)
        except StopIteration as finished:
            return True, finished.value
        self._steps[row] = steps
        self._calls.start(row, call)
        return False, None


def _rewards_of(class_name: str, /, episodes: list[Episode], **columns: Any) -> list[Any]:
    return [episode.rewards_of(class_name) for episode in episodes]
