"""A run with environments that is stopped goes on as if it never was."""

import os
import signal
import threading

import pytest
import torch

from alpaca_ppo.distributed.preemption import Interrupted
from tests.environments.test_games import GAME, Partner
from tests.tiny_runs import metric_lines, tiny_trainer, weights

RUN = {**GAME, "total_episodes": 30, "ppo_epochs": 2, "save_steps": 2, "num_return_sequences": 2}
SOURCES = {"environment_factory": Partner, "reward_funcs": None}


def without_mismatch(folder):
    """The metrics, without those of the sampler's log-probs: which rows it reads together depends on the clock, and the
    last bits with it. Nothing is learned from them."""
    return [{k: v for k, v in line.items() if not k.startswith("mismatch/")} for line in metric_lines(folder)]


def run(folder, **sources):
    settings = {**RUN, "ignore_changes": ["reward"]}
    return tiny_trainer(folder, trainer_arguments={**SOURCES, **sources}, **settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = run(folder)
    trainer.train()
    return folder, weights(trainer)


class Interrupting(Partner):
    """A partner that asks the run to stop in the middle of a reply, and takes its time; once."""

    asked = False

    def reply(self, completion):
        cls = type(self)
        if self.replies == 25 and not cls.asked:
            cls.asked = True
            os.kill(os.getpid(), signal.SIGTERM)
            self.release.wait(60)
            cls.waited = True
        cls.replies += 1
        return super().reply(completion)


def test_a_signal_does_not_wait_for_a_slow_environment_and_the_run_goes_on_to_the_same_bit(tmp_path, whole):
    folder, final = whole
    release = threading.Event()
    partner = type("Partner", (Interrupting,), {"replies": 0, "release": release, "waited": False})
    with pytest.raises(Interrupted):
        run(tmp_path, environment_factory=partner).train()
    assert not partner.waited
    release.set()
    resumed = run(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert without_mismatch(tmp_path) == without_mismatch(folder)
    for name, value in weights(resumed).items():
        assert torch.equal(value, final[name]), name


def test_other_environments_and_tools_are_refused_when_a_run_goes_on(tmp_path, whole):
    folder, _ = whole

    class Another(Partner):
        pass

    Another.__name__ = "Partner"
    trainer = tiny_trainer(
        folder, trainer_arguments={**SOURCES, "environment_factory": Another}, **{**RUN, "total_episodes": 40}
    )
    with pytest.raises(ValueError, match="environments.Partner.environment is .* ignore_changes: .reward."):
        trainer.train(resume_from_checkpoint=True)
