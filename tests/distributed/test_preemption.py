"""A run that a signal interrupts anywhere saves where it stands, and goes on from there to the same last bit."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from transformers import TrainerCallback

from alpaca_ppo import PPOTrainer
from alpaca_ppo.checkpoint.directory import newest_checkpoint
from alpaca_ppo.distributed.preemption import Interrupted, PreemptionHandler, SamplingStopped
from tests.tiny_runs import before_update, metric_lines, one_update, prompts, tiny_trainer, weights, with_advantages
from tests.tools.warm_python import warm_python

RUN = {
    "total_episodes": 30,
    "ppo_epochs": 2,
    "save_steps": 2,
    "eval_steps": 2,
    "kl_controller": "proportional",
    "target_kl": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 3,
    "trainer_arguments": {"eval_dataset": prompts(3)},
}
LORA = {"adv_estimator": "grpo", "num_return_sequences": 2}


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Also where the tests themselves run in the background, whose shell lets SIGINT be ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class LongFirst(PPOTrainer):
    """Adds a key to the rollouts, and lets it weigh in the loss, with noise of its own."""

    def rollout(self, prompt_batches):
        rollouts = super().rollout(prompt_batches)
        rollouts["weight"] = rollouts["response_mask"].sum(dim=1) / 5 + torch.rand(len(rollouts["responses"]))
        return rollouts

    def compute_policy_loss(self, batch, outputs):
        loss, stats = super().compute_policy_loss(batch, outputs)
        return loss * (batch["weight"].mean() + 0.1 * torch.rand(())), stats


def signal_at(trainer, monkeypatch, *, check: int) -> None:
    """This process gets a SIGTERM just before the run asks for the `check`-th time whether it should end."""
    count = itertools.count(1)

    def counted(ask):
        def asking():
            if next(count) == check:
                os.kill(os.getpid(), signal.SIGTERM)
            return ask()

        return asking

    for name in ("poll", "poll_all_ranks"):
        monkeypatch.setattr(trainer.collector.preemption, name, counted(getattr(trainer.collector.preemption, name)))


def files(folder):
    """What the run wrote for people: tables and final weights."""
    names = [p for kind in ("rollouts/*", "eval/*", "final/*/*.safetensors") for p in folder.glob(kind)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(names)}


@pytest.mark.parametrize(
    ("settings", "trainer_class", "stride"),
    [
        pytest.param({}, PPOTrainer, 5, marks=pytest.mark.proof),
        ({}, LongFirst, 7),
        pytest.param(LORA, None, 9, marks=pytest.mark.proof),
    ],
    ids=["plain", "subclass", "lora"],
)
def test_a_run_interrupted_again_and_again_is_the_run_that_never_was(
    settings, trainer_class, stride, tmp_path, monkeypatch
):
    run = {**RUN, **settings, "trainer_class": trainer_class or PPOTrainer}
    if trainer_class is None:
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=True)
        run["trainer_arguments"] = {**RUN["trainer_arguments"], "peft_config": lora}
    torch.manual_seed(0)
    whole = tiny_trainer(tmp_path / "whole", **run)
    # Ten prompts and four slots: a signal comes while slots are refilled, too.
    assert not whole.start.sampler_fallback
    assert whole.args.rollout_batch_size > whole.args.rollout_per_device_batch_size
    torch.manual_seed(1)
    whole.train()
    parts, moments = tmp_path / "parts", []
    for attempt in itertools.count(1):
        torch.manual_seed(0)
        trainer = tiny_trainer(parts, **run)
        # A resumed run brings its own random states.
        torch.manual_seed(1 if attempt == 1 else 99)
        # Each attempt comes further than the last, so that the run ends.
        signal_at(trainer, monkeypatch, check=attempt * stride)
        try:
            trainer.train(resume_from_checkpoint=newest_checkpoint(parts) is not None)
            break
        except SystemExit as ended:
            assert ended.code == 128 + signal.SIGTERM
            point = trainer.progress
            moments.append("sampling" if point.step_ended else "evaluation")
    assert "sampling" in moments
    assert metric_lines(parts) == metric_lines(tmp_path / "whole")
    assert files(parts) == files(tmp_path / "whole")
    for name, value in weights(whole).items():
        assert torch.equal(weights(trainer)[name], value), name


class SignalAt(TrainerCallback):
    """Sends this process a signal at an event of one step."""

    def __init__(self, event: str, *, step: int = 2, signum: int = signal.SIGINT) -> None:
        self.step, self.signum = step, signum
        setattr(self, event, self._send)

    def _send(self, args, state, control, **context):
        if state.global_step == self.step:
            os.kill(os.getpid(), self.signum)


def interrupted_run(folder, event, **how):
    arguments = {**RUN["trainer_arguments"], "callbacks": [SignalAt(event, **how)]}
    trainer = tiny_trainer(folder, **{**RUN, "trainer_arguments": arguments})
    with pytest.raises(Interrupted) as ended:
        trainer.train()
    return trainer, ended.value


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of the run of `RUN` that is left alone."""
    folder = tmp_path_factory.mktemp("whole")
    tiny_trainer(folder, **RUN).train()
    return folder


@pytest.mark.parametrize(
    ("event", "step", "checkpoints"),
    [
        pytest.param("on_train_begin", 0, ["checkpoint-0"], marks=pytest.mark.proof),
        # After the evaluation before the training, which the resumed run repeats.
        ("on_step_begin", 0, ["checkpoint-0"]),
        ("on_step_end", 1, ["checkpoint-1"]),
        ("on_step_end", 2, ["checkpoint-2"]),
        pytest.param("on_log", 2, ["checkpoint-2"], marks=pytest.mark.proof),
        ("on_log", 3, ["checkpoint-2", "checkpoint-3"]),
        ("on_train_end", 3, ["checkpoint-2", "checkpoint-3"]),
    ],
)
def test_a_signal_at_any_event_leaves_a_run_that_can_go_on(event, step, checkpoints, whole, tmp_path, capsys):
    before = signal.getsignal(signal.SIGINT)
    parts = tmp_path / "parts"
    trainer, ended = interrupted_run(parts, event, step=step)
    assert ended.code == 130
    assert signal.getsignal(signal.SIGINT) is before, "Ctrl-C does what it did before"
    assert sorted(path.name for path in parts.glob("checkpoint-*")) == checkpoints
    # The records end with the checkpoint's step, if only without its evaluation.
    lines = metric_lines(parts) if (parts / "metrics.jsonl").exists() else []
    assert max((line["step"] for line in lines), default=0) == step
    output = capsys.readouterr().out
    assert event == "on_train_end" or (checkpoints[-1] in output and "resume_from_checkpoint: true" in output)
    trainer.callback_handler.callbacks.clear()
    trainer.train(resume_from_checkpoint=True)
    assert metric_lines(parts) == metric_lines(whole)
    assert files(parts) == files(whole)


def test_a_checkpoint_that_holds_this_very_point_is_not_written_again(tmp_path, monkeypatch):
    written = []
    save = PPOTrainer.save_checkpoint
    monkeypatch.setattr(
        PPOTrainer, "save_checkpoint", lambda self, *stats: (written.append(self.state.global_step), save(self))
    )
    interrupted_run(tmp_path, "on_save", step=2)
    assert written == [2]


def test_a_resumed_run_that_had_nothing_left_to_do_still_knows_its_figures(tmp_path):
    whole = tiny_trainer(tmp_path, **RUN).train()
    again = tiny_trainer(tmp_path, **RUN).train(resume_from_checkpoint=True)
    assert again == whole
    assert [line["step"] for line in metric_lines(tmp_path)] == [0, 1, 2, 3]


def test_a_step_of_one_s_own_that_moves_the_weights_between_two_rollouts_ends_before_the_run_does(tmp_path):
    class Twice(PPOTrainer):
        def step(self, prompt_batches):
            rollouts = with_advantages(self, prompt_batches)
            one_update(self, rollouts, range(4))
            os.kill(os.getpid(), signal.SIGTERM)
            stats = self.step_with_rollouts(with_advantages(self, prompt_batches))
            return self.record_step_stats(stats, rollouts, self.state.global_step)

    with pytest.raises(Interrupted):
        tiny_trainer(tmp_path, **RUN, trainer_class=Twice).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert [line["step"] for line in metric_lines(tmp_path)] == [0, 1]


def test_handlers_are_installed_in_the_main_thread_only_and_ignored_signals_stay_ignored():
    handler = PreemptionHandler(Accelerator(cpu=True))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with handler.install():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM).__self__ is handler
    finally:
        signal.signal(signal.SIGINT, before)
    seen = []

    def elsewhere():
        with handler.install():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_a_request_that_no_check_met_ends_the_process_afterwards_and_outside_nothing_is_asked():
    handler = PreemptionHandler(Accelerator(cpu=True))
    with pytest.raises(Interrupted, match="SIGTERM"), handler.install():
        os.kill(os.getpid(), signal.SIGTERM)
        handler.poll()  # not sampling: ranks must go on together
        with handler.rollout(can_stop=False):
            handler.poll()
        with handler.rollout(can_stop=True):
            with pytest.raises(SamplingStopped):
                handler.poll()
            handler.poll()
            raise AssertionError("not reached")
    handler.poll()
    handler.poll_all_ranks()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_function_that_takes_long_is_left_at_once(asynchronous, tmp_path):
    # Started in the first call: never before the run handles signals, nor after its end.
    timer, ended = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)), []

    def judge(completions, **columns):
        timer.start()
        time.sleep(60)
        ended.append(True)

    async def async_judge(completions, **columns):
        timer.start()
        await asyncio.sleep(60)
        ended.append(True)

    trainer = tiny_trainer(tmp_path, trainer_arguments={"reward_funcs": async_judge if asynchronous else judge})
    with pytest.raises(Interrupted):
        trainer.train()
    assert ended == []
    assert newest_checkpoint(tmp_path).name == "checkpoint-0"


SECOND_SIGNAL = """
import os, signal, sys, time
from accelerate import Accelerator
from alpaca_ppo.distributed.preemption import PreemptionHandler
with PreemptionHandler(Accelerator(cpu=True)).install():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print("one request", flush=True)
    time.sleep(1.1)
    if "fork" in sys.argv and not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    if "fork" in sys.argv:
        print(os.waitpid(child, 0)[1], flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not reached", flush=True)
"""


def test_a_second_signal_ends_the_process_at_once_and_the_same_one_sent_twice_is_one():
    done = subprocess.run([warm_python(), "-c", SECOND_SIGNAL, "fork"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    # 15: the forked child was ended by the signal, as it would have been without us.
    assert done.stdout.split() == ["one", "request", "15"]
    assert "SIGTERM: saving a checkpoint and exiting" in done.stderr


class Failing(TrainerCallback):
    """Ends the process, in effect, at an event."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, args, state, control, **context):
        raise RuntimeError("killed here")


def test_a_signal_in_an_update_finishes_the_step_first(whole, tmp_path):
    parts = tmp_path / "parts"
    trainer = tiny_trainer(parts, **RUN)
    before_update(trainer, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted):
        trainer.train()
    assert [path.name for path in parts.glob("checkpoint-*")] == ["checkpoint-1"]
    tiny_trainer(parts, **RUN).train(resume_from_checkpoint=True)
    assert metric_lines(parts) == metric_lines(whole)


def test_metrics_and_report_of_an_interrupted_run_end_with_the_step_of_its_checkpoint(tmp_path):
    # Prompts are answered at the end of each step, where the run looks for a signal.
    run = {"total_episodes": 40, "num_inspected_prompts": 1, "report": True}
    tiny_trainer(tmp_path / "whole", **run).train()
    parts = tmp_path / "parts"
    trainer = tiny_trainer(parts, **run)
    # Two of the three optimizer steps of the second step.
    before_update(trainer, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted):
        trainer.train()
    assert [path.name for path in parts.glob("checkpoint-*")] == ["checkpoint-2"]
    assert metric_lines(parts) == metric_lines(tmp_path / "whole")[:2]
    assert '"last_step":2' in (parts / "report.html").read_text()
    # Killed before it writes the line again, it can still be resumed.
    killed = tiny_trainer(parts, **run, trainer_arguments={"callbacks": [Failing("on_step_end")]})
    with pytest.raises(RuntimeError, match="killed here"):
        killed.train(resume_from_checkpoint=True)
    tiny_trainer(parts, **run).train(resume_from_checkpoint=True)
    assert metric_lines(parts) == metric_lines(tmp_path / "whole")


def test_a_step_whose_line_was_still_to_be_written_has_one_line_however_often_the_run_is_resumed(whole, tmp_path):
    parts = tmp_path / "parts"
    trainer, _ = interrupted_run(parts, "on_step_end", step=2)
    trainer.callback_handler.callbacks = [Failing("on_log")]
    with pytest.raises(RuntimeError, match="killed here"):
        trainer.train(resume_from_checkpoint=True)
    assert [line["step"] for line in metric_lines(parts)] == [0, 1, 2]
    tiny_trainer(parts, **RUN).train(resume_from_checkpoint=True)
    assert metric_lines(parts) == metric_lines(whole)
    assert files(parts) == files(whole)


def test_ranks_in_lockstep_leave_the_sampling_together():
    handler, sampled = PreemptionHandler(Accelerator(cpu=True)), []
    handler.lockstep = True
    with pytest.raises(Interrupted), handler.install(), handler.rollout(can_stop=True):
        handler.poll()
        with handler.part():
            os.kill(os.getpid(), signal.SIGTERM)
            handler.poll()
            sampled.append("a token")
        sampled.append("all")
    assert sampled == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("prompt", [True, False])
def test_at_a_prompt_ctrl_c_raises_keyboard_interrupt_and_a_second_one_does_at_once(signum, prompt, monkeypatch, capfd):
    ended, now = [], [100.0]
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    if prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    handler, returns = PreemptionHandler(Accelerator(cpu=True)), prompt and signum == signal.SIGINT
    with pytest.raises(KeyboardInterrupt if returns else Interrupted) as late, handler.install():
        signal.raise_signal(signum)
        said = capfd.readouterr().err
        # Within the same second it is the same request.
        signal.raise_signal(signum)
        assert ended == []
        now[0] += 1
        try:
            signal.raise_signal(signum)
        except KeyboardInterrupt:
            ended.append("raised")
    assert ended == ["raised" if returns else 128 + signum]
    assert ("returning to the prompt" in said) is returns
    assert ("exiting; a second signal exits immediately" in said) is not returns
    assert str(late.value) == signal.Signals(signum).name
