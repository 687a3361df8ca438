"""The adapters for gymnasium's interface and for OpenEnv's client: played by hand, and by a trainer.

The game has gymnasium's signatures. The client sends what OpenEnv's does, {"type", "data"}, to a server on this
machine, over a plain socket in place of its WebSocket.
"""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from alpaca_ppo.environments.episode import EnvironmentFailure
from examples.environments.gymnasium_text import GymnasiumText
from examples.environments.openenv_client import OpenEnvPartner
from tests.environments.test_games import play


class Ladder:
    """Ends after two steps, or is cut off after `limit`; a step is worth 0.5, the last one 2."""

    def __init__(self, limit=9):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        self.steps, self.seed, self.options, self.actions = 0, seed, options, []
        return f"w{10 + seed % 5}", {"seed": seed}

    def step(self, action):
        self.steps += 1
        self.actions.append(action)
        ended, cut = self.steps == 2, self.steps == self.limit
        return f"w{20 + self.steps}", 2 if ended else 0.5, ended, cut, {}


def words(completion):
    """Odd numbers of words are no action."""
    count = len(completion.split())
    if count % 2:
        raise ValueError(f"say an even number of words, not {count}")
    return count


def test_a_game_is_played_through_text():
    game = Ladder()
    partner = GymnasiumText(game)
    assert partner.reset(seed=7, options={"hard": True}) == "\nw12\n"
    assert (game.seed, game.options) == (7, {"hard": True})
    assert partner.reply(" up \n") == ("\nw21\n", 0.5)
    assert partner.reply("down") == (None, 2.0)
    assert game.actions == ["up", "down"]


def test_text_that_is_no_action_is_answered_and_does_not_move_the_game():
    game = Ladder()
    partner = GymnasiumText(game, to_action=words, invalid_reward=-1.0)
    partner.reset(seed=0)
    assert partner.reply("one") == ("\nsay an even number of words, not 1\n", -1.0)
    assert game.steps == 0
    assert partner.reply("one two") == ("\nw21\n", 0.5)
    assert game.actions == [2]


def test_a_policy_trains_on_a_game(tmp_path):
    kinds = []

    def make():
        kinds.append(GymnasiumText(Ladder(), to_text=lambda observation: f" {observation} "))
        return kinds[-1]

    trainer = play(tmp_path, make, total_episodes=10)
    trainer.train()
    assert trainer.last["num_turns"].tolist() == [2] * 10
    # 0.5 for the first turn and 2 for the second.
    assert trainer.last["scores"].tolist() == [2.5] * 10
    first = trainer.last["queries"][:, -1]
    assert set(first.tolist()) <= set(range(10, 15)) and len(set(first.tolist())) > 1
    assert len(kinds) == 10


class Server:
    """Counts the steps of each connection's episode, and remembers the seeds; a message of "crash" is an error."""

    def __init__(self):
        self.seeds, self.connections, self.loop = [], 0, asyncio.new_event_loop()
        self._server = self.loop.run_until_complete(asyncio.start_server(self._session, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def _session(self, reader, writer):
        self.connections += 1
        steps = 0
        while line := await reader.readline():
            message = json.loads(line)
            if message["type"] == "reset":
                steps = 0
                self.seeds.append(message["data"]["seed"])
                answer = {"observation": {"text": "w7"}, "reward": None, "done": False}
            else:
                steps += 1
                done = steps == 2
                answer = {"observation": {"text": f"w{30 + steps}"}, "reward": 3.0 if done else None, "done": done}
            crashed = message["data"].get("message") == "crash"
            reply = {"type": "error", "data": {"message": "out of lives"}} if crashed else {"data": answer}
            writer.write(json.dumps(reply).encode() + b"\n")
        writer.close()


class Client:
    """OpenEnv's interface: connects with its first call."""

    def __init__(self, port):
        self._port, self._streams = port, None

    async def _ask(self, kind, data):
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(json.dumps({"type": kind, "data": data}).encode() + b"\n")
        answer = json.loads(await reader.readline())
        if answer.get("type") == "error":
            raise RuntimeError(f"Server error: {answer['data']['message']}")
        return SimpleNamespace(**answer["data"])

    async def reset(self, **arguments):
        return await self._ask("reset", arguments)

    async def step(self, action):
        return await self._ask("step", action)


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.loop.call_soon_threadsafe(server.loop.stop)


def partner_of(server, to_action=lambda text: {"message": text}):
    return OpenEnvPartner(
        Client(server.port), to_action=to_action, to_text=lambda observation: f" {observation['text']}"
    )


def test_a_session_is_played_through_text(server):
    async def session():
        partner = partner_of(server, to_action=lambda text: {"message": str(words(text))})
        return [
            await partner.reset(seed=11),
            await partner.reply("a b"),
            await partner.reply("a"),
            await partner.reply("a b"),
            await partner.reset(seed=12),
            await partner.reply("a b"),
        ]

    assert asyncio.run(session()) == [
        " w7", (" w31", 0.0), ("\nsay an even number of words, not 1\n", 0.0), (None, 3.0), " w7", (" w31", 0.0)
    ]  # fmt: skip
    assert server.seeds[-2:] == [11, 12]


def test_a_policy_trains_on_sessions_that_are_reused(server, tmp_path):
    before, seeds = server.connections, len(server.seeds)
    trainer = play(tmp_path, lambda: partner_of(server), total_episodes=20, num_return_sequences=2)
    trainer.train()
    assert trainer.last["num_turns"].tolist() == [2] * 20
    assert trainer.last["scores"].tolist() == [3.0] * 20
    # Two steps of ten prompts with two samples each, which share a seed; the twenty clients of the first are reused.
    assert server.connections - before == 20
    of_steps = [sorted(server.seeds[seeds : seeds + 20]), sorted(server.seeds[seeds + 20 :])]
    assert [len(set(of_step)) for of_step in of_steps] == [10, 10]
    assert all(of_step[::2] == of_step[1::2] for of_step in of_steps)


def test_an_error_of_the_server_stops_the_run_by_name(server, tmp_path):
    make = lambda: partner_of(server, to_action=lambda text: {"message": "crash"})  # noqa: E731
    with pytest.raises(EnvironmentFailure, match="turn 1: reply raised RuntimeError: Server error: out of lives"):
        play(tmp_path, make, total_episodes=10).train()
