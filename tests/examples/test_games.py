"""The games: their rules, what their players do wrong, and the way from demonstrations to a table, in miniature."""

import json
import random
from statistics import fmean
from types import SimpleNamespace

import pytest
from PIL import Image

from alpaca_ppo import PPOConfig
from alpaca_ppo.config.parser import parse_args, read_yaml
from alpaca_ppo.environments.conversation import Conversation, tool_call_entry, tool_message
from alpaca_ppo.environments.kinds import EnvironmentKind
from alpaca_ppo.environments.tool_calls import ToolCall, find_json_calls
from examples.games import calculator, guessing, pipeline, row, table, train
from examples.games.base import calculator_tokenizer, guessing_tokenizer
from examples.games.calculator import Calculator
from examples.games.guessing import Guess, GuessByTurn, optimal_turns
from examples.games.pipeline import PRESETS, Experiment, GamesArguments, flags_of
from examples.games.results import play_of
from examples.games.rows import BEST, BY_TURN, GRPO, ROWS, TURN_REWARDS, Sizes, settings_of


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


def test_a_game_is_lost_after_twelve_turns():
    game = game_with(20)
    assert [game.reply("1 64 32") for _ in range(11)] == ["lower"] * 11
    assert game.reply("1 64 32") == (None, pytest.approx(-0.96))
    assert game_with(20).reply("20")[1] == pytest.approx(0.92)


@pytest.mark.parametrize("guesses", [["20"], ["1", "2", "20"], ["?"] * 12])
def test_rewards_by_turn_are_the_score_in_parts(guesses):
    once = [game_with(20).reply(guesses[0])]
    game, by_turn = game_with(20), game_with(20, GuessByTurn)
    once = [game.reply(guess) for guess in guesses]
    parts = [by_turn.reply(guess) for guess in guesses]
    assert [text for text, _ in parts] == [said if isinstance(said, str) else None for said in once]
    assert [reward for _, reward in parts[:-1]] == [-0.08] * (len(guesses) - 1)
    assert sum(reward for _, reward in parts) == pytest.approx(once[-1][1])


def test_the_player_of_the_guessing_game_forgets_a_tenth_of_the_answers():
    generator = random.Random(5)
    games = [guessing.play(generator.randint(1, 64), generator) for _ in range(1000)]
    turns = [[tuple(map(int, turn.split())) for turn, _ in game] for game in games]
    pairs = [(one, two) for game in turns for one, two in zip(game, game[1:], strict=False)]
    forgotten = fmean(one[:2] == two[:2] for one, two in pairs)
    # Some six thousand answers: five standard errors of a share of a tenth are 0.02.
    assert len(pairs) > 5000 and abs(forgotten - 0.1) < 0.02
    assert all(low <= guess <= high for game in turns for low, high, guess in game)
    # It contradicts what it was told, and needs well above the 5.1 turns of optimal play.
    assert any(two[2] >= one[2] for game in games for one, two in contradictions(game))
    assert 6.5 < fmean(map(len, games)) < 7.5
    first = [game[0][2] for game in turns]
    assert min(first) < 8 and max(first) > 56


def contradictions(game):
    """Pairs of turns of which the first was answered "lower" and the second does not guess lower."""
    said = [(tuple(map(int, turn.split())), answer) for turn, answer in game]
    return [(one[0], two[0]) for one, two in zip(said, said[1:], strict=False) if one[1] == "lower"]


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


def test_the_player_of_the_calculator_makes_the_mistakes_that_it_is_said_to_make():
    generator = random.Random(2)
    steps = [["multiply", 47, 86], ["add", 13]]
    played = [calculator.play(steps, generator) for _ in range(4000)]
    right = [turns[-1][0] == "4055" for turns in played]
    first = [turns for turns in played if len(turns) > 1]
    good = (calculator.call_text("multiply", 47, 86), "4042")

    def share(found, expected):
        # Six standard errors of a share of at least two thousand, at most 0.5 * 6 / 2000 ** 0.5 = 0.07.
        return abs(fmean(found) - expected) < 0.05

    assert share([len(turns) == 1 for turns in played], 0.3)
    assert share(["error" in turns[0][1] for turns in first], 0.05)
    assert share(["add" in turns[0][0] for turns in first], 0.1)
    # The right tool, arguments and brackets: 0.9 * 0.85 * 0.95; all of it twice, no early end, no wrong copy: 0.25.
    assert share([turns[0] == good for turns in first], 0.727)
    assert share([len(turns) == 2 for turns in first if turns[0] == good], 0.15)
    assert share(right, 0.7 * 0.727**2 * 0.85 * 0.8)


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


def test_demonstrations_of_the_calculator_fit_and_have_no_unknown_piece_but_in_errors(calculator_parts):
    tokenizer, schemas = calculator_parts
    rows = calculator.demonstrations(300, random.Random(4), tokenizer=tokenizer, schemas=schemas)
    for demonstration in rows:
        text = demonstration["prompt"] + demonstration["completion"]
        ids = tokenizer(text)["input_ids"]
        assert len(ids) < calculator.QUERY_LEN + calculator.RESPONSE_LEN
        assert (tokenizer.unk_token_id in ids) == ("error" in text)
    assert any("error" in demonstration["completion"] for demonstration in rows)


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


def test_what_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no game 'chess'"):
        settings_of("chess", GRPO, Sizes(64, 640))
    with pytest.raises(ValueError, match="guessing has no row 'PPPO'"):
        settings_of("guessing", "PPPO", Sizes(64, 640))
    with pytest.raises(ValueError, match="no game 'chess'"):
        row.RowArguments(game="chess")
    with pytest.raises(ValueError, match=r"no games \['chess'\]"):
        table.TableArguments(games=["chess"])
    with pytest.raises(ValueError, match="two different seeds"):
        table.TableArguments(seeds=[1, 1])


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


def write_run(folder, game, wins, turns):
    """A run of two steps, after which `wins` of ten held-out games are won, each in `turns` turns; before it, one less
    is won.
    """
    for number, won in ((0, wins - 1), (2, wins)):
        path = folder / "eval" / f"step_{number:06}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [game_row(game, i, i < won, turns if number else turns + 1) for i in range(10)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    step = {"objective/turns": float(turns), "objective/scores": 0.5, "time/step": 2.0}
    step |= {"ppo/val/explained_variance": 0.4} if "GRPO" not in folder.name else {}
    lines = [{"step": 0}, {"step": 1, **step}, {"step": 2, **step}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def game_row(game, number, won, turns):
    last = "1 64 7<eos>" if won else "1 64 8<eos>"
    parts = [("policy", "1 64 3<eos>"), ("environment", "higher")] * (turns - 1) + [("policy", last)]
    row = {"prompt_id": number // 8, "score": float(won), "kl": 2.0, "prompt": "p"}
    row["columns"] = {"secret": 7, "answer": 7}
    row["response"] = " ".join(text for _, text in parts)
    if game == "calculator":
        parts[-1] = ("policy", "7<eos>" if won else "8<eos>")
    return {**row, "turns": [{"role": role, "text": text} for role, text in parts]} if turns > 1 else row


def test_the_table_says_how_far_from_optimal_play_a_row_is(tmp_path, monkeypatch):
    turns = {TURN_REWARDS: 5, BY_TURN: 6, GRPO: 7}

    def run(self, name, *, seed):
        return write_run(tmp_path / f"{self.name} {name} {seed}", self.name, 7 + seed, turns.get(name, 8))

    monkeypatch.setattr(Experiment, "run", run)
    monkeypatch.setattr(Experiment, "samples", lambda self, seed: marked(run(self, "samples", seed=seed)))
    monkeypatch.setattr(Experiment, "best_imitated", lambda self, seed: self.samples(seed))
    common = ["--root", str(tmp_path), "--report", str(tmp_path / "RESULTS.md"), "--seeds", "1", "2"]
    outcomes = table.main([*common, *SMALL])
    assert [run.play.won for run in outcomes["guessing"][TURN_REWARDS]] == [80, 90]
    text = (tmp_path / "RESULTS.md").read_text()
    # 80 and 90: a standard deviation of 7.1. Five turns are 0.125 less than optimal play; the lost games have as many.
    assert f"| {TURN_REWARDS} | 2 | 85.0 ± 7.1 | 5.00 ± 0.00 | -0.12 ± 0.00 | 2.0 ± 0.0 | 0.40 ± 0.00 | 4 ± 0 |" in text
    # Before: one turn more than the seven of GRPO, and 70 and 80 % won.
    assert "| imitation of them | 2 | 75.0 ± 7.1 | 8.00 ± 0.00 | 2.88 ± 0.00 | 2.0 ± 0.0 |  |  |" in text
    # Ten games in groups of eight and two: both best ones are won, but for those of seed 1, whose last two are lost.
    assert "| best of 8 of its games | 2 | 75.0 ± 35.4 |" in text
    assert f"| {BEST} | 2 | 85.0 ± 7.1 | 8.00 ± 0.00 | 2.88 ± 0.00 | 2.0 ± 0.0 | no critic | 6 ± 0 |" in text
    # Means of 85 in both rows, each with a standard error of 5.
    assert f"- {GRPO}: +0.0 ± 7.1 points; -2.00 ± 0.00 turns" in text
    assert "| optimal play |  | 100.0 | 5.12 | 0.00 |  |  |  |" in text
    assert "| the demonstrations |" in text and "+0.0 ± 7.1 points\n" in text.partition("Sums with")[2]
    assert "nearer to optimal play than the demonstrations by" in text
    assert "policy       1 64 3\nenvironment  higher" in text and str(tmp_path) not in text
    with Image.open(tmp_path / "results.png") as image:
        image.verify()


def marked(folder):
    (folder / "stage.json").write_text('{"seconds": 3.0}')
    return folder


def test_a_game_of_one_turn_has_no_parts():
    experiment = Experiment("calculator", GamesArguments())
    assert play_of(experiment, [game_row("calculator", 0, True, 1)]).turns == 1
