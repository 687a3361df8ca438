"""The games: their rules, what their players do wrong, and the way from demonstrations to a table, in miniature."""

import json
import random
from statistics import fmean
from types import SimpleNamespace

import pytest

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.parser import parse_args, read_yaml
from alpaca_ppo.environments.conversation import Conversation, tool_call_entry, tool_message
from alpaca_ppo.environments.kinds import EnvironmentKind
from alpaca_ppo.environments.tool_calls import ToolCall, find_json_calls
from examples.games import calculator, guessing, pipeline, row, train
from examples.games.base import calculator_tokenizer, guessing_tokenizer
from examples.games.calculator import Calculator
from examples.games.guessing import Guess, GuessByTurn, optimal_turns
from examples.games.pipeline import PRESETS, flags_of
from examples.games.rows import BEST, ROWS, Sizes, settings_of

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def calculator_parts():
    tokenizer = calculator_tokenizer()
    return tokenizer, [tool.schema for tool in EnvironmentKind("calculator", Calculator).tools]


def game_with(secret, kind=Guess):
    game = kind()
    game.reset(secret=secret)
    return game


def test_the_mean_turns_of_optimal_play_are_those_of_a_balanced_tree():
    # One number: a turn. Three: the middle, then one of two. Seven: 1 + 2 * 2 + 4 * 3 = 17. Sixty-four: six full levels
    # are 1 + 2*2 + 4*3 + 8*4 + 16*5 + 32*6 = 321, and one number takes a seventh turn.
    assert [optimal_turns(n) for n in (1, 3, 7, 64)] == [1, 5 / 3, 17 / 7, 328 / 64]


def test_a_bisecting_player_needs_as_many_turns_as_optimal_play():
    turns = []
    for secret in range(1, 65):
        game, low, high, said = game_with(secret), 1, 64, None
        while not isinstance(said, tuple):
            guess = (low + high) // 2
            said = game.reply(f"{low} {high} {guess}")
            low, high = (guess + 1, high) if said == "higher" else (low, guess - 1)
        assert said == (None, pytest.approx(1 - 0.08 * game.turns))
        turns.append(game.turns)
    assert fmean(turns) == 5.125


def test_only_the_last_word_of_a_turn_is_a_guess():
    game = game_with(20)
    said = [game.reply(turn) for turn in ("1 64 32", "20 20 3", "higher", "")]
    assert said == ["lower", "higher", "unclear", "unclear"]
    # The fifth turn: 1 - 5 * 0.08.
    assert game.reply("64 1 20") == (None, pytest.approx(0.6))


@pytest.mark.parametrize("guesses", [["20"], ["1", "2", "20"], ["?"] * 12])
def test_rewards_by_turn_are_the_score_in_parts(guesses):
    once = [game_with(20).reply(guesses[0])]
    game, by_turn = game_with(20), game_with(20, GuessByTurn)
    once = [game.reply(guess) for guess in guesses]
    parts = [by_turn.reply(guess) for guess in guesses]
    assert [text for text, _ in parts] == [said if isinstance(said, str) else None for said in once]
    assert [reward for _, reward in parts[:-1]] == [-0.08] * (len(guesses) - 1)
    assert sum(reward for _, reward in parts) == pytest.approx(once[-1][1])


def test_a_demonstration_of_the_guessing_game_is_read_turn_by_turn():
    rows = guessing.demonstrations(200, random.Random(1), end="<eos>")
    for demonstration in rows:
        turns = demonstration["completion"].split("<eos>")
        assert len(turns) == demonstration["turns"] <= 12
        assert all(turn.split()[0] in ("higher", "lower") for turn in turns[1:])
    assert {row["won"] for row in rows} == {True, False}
    tokenizer = guessing_tokenizer()
    lengths = [len(tokenizer(row["completion"])["input_ids"]) for row in rows]
    # Three words and an end, and an answer between two turns; the last end is not part of the text.
    assert lengths == [5 * row["turns"] - 2 for row in rows]
    assert max(lengths) < guessing.RESPONSE_LEN == 59


def test_the_calculator_computes_and_takes_the_rest_for_the_answer():
    game = Calculator()
    game.reset(answer=4055)
    assert (game.multiply(a=47, b=86), game.add(a=4042, b=13)) == (4042, 4055)
    assert [game.reply(text) for text in (" 4055", "is 4055", "")] == [(None, 1.0), (None, 0.0), (None, 0.0)]
    assert find_json_calls(calculator.call_text("add", 4042, 13)) == [ToolCall("add", {"a": 4042, "b": 13})]


def test_a_demonstration_has_the_tokens_of_a_conversation(calculator_parts):
    tokenizer, schemas = calculator_parts
    conversation = Conversation(
        tokenizer, messages=True, chat_template_kwargs=None, stop_token_ids=[tokenizer.eos_token_id]
    )
    conversation.check(schemas, replies=True)
    question = [{"role": "user", "content": "what is (47 * 86) + 13?"}]
    turns = [(calculator.call_text("multiply", 47, 86), "4042"), (calculator.call_text("add", 4042, 13), "4055")]
    ids = conversation.prompt_ids(question, schemas)
    assert len(ids) == 16 < calculator.QUERY_LEN
    for number, (text, result) in enumerate(turns):
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        call = find_json_calls(text)[0]
        ids += conversation.reply_ids(
            [tool_message(call.name, result, number)],
            stopped_by_token=True,
            tool_calls=[tool_call_entry(call.name, call.arguments, number)],
            schemas=schemas,
        )
    prompt = tokenizer.apply_chat_template(question, tools=schemas, tokenize=False, add_generation_prompt=True)
    text = calculator.text_of([*turns, ("4055", None)], tokenizer.eos_token)
    assert ids + tokenizer("4055")["input_ids"] == tokenizer(prompt + text)["input_ids"]
    assert tokenizer.decode(ids) + "4055" == prompt + text
    assert tokenizer.unk_token_id not in ids


@pytest.mark.parametrize(("game", "name"), [(game, name) for game in ROWS for name in ROWS[game]])
def test_every_row_is_a_valid_configuration_with_as_many_games_as_the_others(game, name):
    settings = settings_of(game, name, Sizes(64, 640))
    settings.pop("environment", None)
    preset = PRESETS / f"games_{game}.yaml"
    args, *_ = parse_args([PPOConfig], flags_of({"config": preset, **settings, "output_dir": "unused"}))
    assert args.rollout_batch_size * args.num_return_sequences == 64
    assert args.total_episodes * args.num_return_sequences == 640


def test_the_presets_have_room_for_the_longest_game():
    preset = read_yaml(str(PRESETS / "games_guessing.yaml"))
    # A longer turn, or a response that ends before the twelfth one, would be a way not to lose.
    assert (preset["response_len"], preset["max_turn_tokens"]) == (guessing.RESPONSE_LEN, guessing.TURN_LEN)
    preset = read_yaml(str(PRESETS / "games_calculator.yaml"))
    lengths = (preset["query_len"], preset["response_len"], preset["max_turns"])
    assert lengths == (calculator.QUERY_LEN, calculator.RESPONSE_LEN, calculator.MAX_TURNS)


SMALL = ["--demonstrations", "64", "--held_out", "64", "--hidden_size", "16", "--num_layers", "1", "--episodes", "64"]


@pytest.fixture
def in_process(monkeypatch):
    """Runs are made in this process, with small batches."""
    small = ["--step_batch_size", "16", "--step_per_device_batch_size", "16", "--report", "false"]

    def run(command, **_):
        assert command[1:3] == ["-m", "examples.games.train"]
        train.main([*command[3:], *small])

    monkeypatch.setattr(pipeline, "subprocess", SimpleNamespace(run=run))


def test_a_run_of_each_game_in_miniature(tmp_path, in_process, capsys):
    common = ["--root", str(tmp_path), *SMALL]
    guessed = row.main([*common, "--game", "guessing"])
    # 64 games are one step.
    assert len(guessed.curve) == 1 and guessed.explained_variance is not None
    # An untrained player asks nothing that can be answered, or loses.
    assert guessed.play.turns > 5.125 and 0 <= guessed.play.won < 50
    metrics = tmp_path / "guessing/ppo_credit_and_rewards_by_turns_seed_1/metrics.jsonl"
    first = json.loads(metrics.read_text().splitlines()[1])
    assert first["objective/turns"] > 5 and "objective/scores/GuessByTurn" in first
    best = row.main([*common, "--game", "calculator", "--row", BEST])
    assert best.curve == [] and best.explained_variance is None and best.play.won == 0
    chosen = (tmp_path / "calculator/best_games_seed_1/demonstrations.jsonl").read_text().splitlines()
    assert len(chosen) == 64 // 8
    assert f"{BEST}, seed 1: right answers (%) 0.0" in capsys.readouterr().out
