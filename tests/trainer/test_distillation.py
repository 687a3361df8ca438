"""On-policy distillation: a policy learns from a teacher of its tokenizer, in this process or behind a server."""

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alpaca_ppo import PPOTrainer
from alpaca_ppo.checkpoint.compatibility import start_identity
from alpaca_ppo.cli.sample import sample
from alpaca_ppo.functional.shaping import distill
from alpaca_ppo.ppo import teacher as teachers
from alpaca_ppo.ppo.teacher import TeacherServer
from tests.http_servers import RawServer, response
from tests.tiny_models import tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import metric_lines, prompts, tiny_config, tiny_trainer

ALONE = {"trainer_arguments": {"reward_funcs": None}, "kl_coef": 0.0}


@pytest.fixture
def teacher(tmp_path):
    """The folder of a model with other weights than the policy's, whose distributions are less even."""
    model = tiny_causal_lm("llama", seed=7)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2
    model.save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().save_pretrained(tmp_path / "teacher")
    return str(tmp_path / "teacher")


def test_the_log_ratio_of_each_chosen_token_is_added_to_its_reward():
    mask = torch.tensor([[True, False, True], [True, False, False]])
    teacher, policy = torch.tensor([[-1.0, 9.0, -3.0], [-0.5, 9.0, 9.0]]), torch.full((2, 3), -2.0)
    expected = torch.tensor([[0.5, 0.0, 9.5], [20.75, 0.0, 0.0]])
    assert_close(distill(torch.tensor([10.0, 20.0]), policy, teacher, mask, 0.5), expected)
    per_token = torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]])
    assert_close(distill(per_token, policy, teacher, mask, 2.0), torch.tensor([[3.0, 0.0, 0.0], [6.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("settings", "falls"),
    [
        # Summed over a response, the KL also falls if responses end where policy and teacher differ most.
        ({"critic_epochs": 2, "lam": 1.0}, "eval/teacher_kl_sum_seq"),
        ({"critic_epochs": 2, "gamma": 0.0}, "eval/teacher_kl"),
        ({"adv_estimator": "reinforce_plus_plus", "gamma": 0.0, "reference": "none"}, "eval/teacher_kl"),
    ],
)
def test_a_policy_comes_closer_to_its_teacher(settings, falls, teacher, tmp_path, capsys):
    sizes = {"total_episodes": 600, "rollout_batch_size": 40, "step_batch_size": 20, "learning_rate": 3e-3}
    held_out = {"trainer_arguments": {"reward_funcs": None, "eval_dataset": prompts(10)}}
    tiny_trainer(tmp_path / "run", teacher_model_name_or_path=teacher, **ALONE | held_out | sizes | settings).train()
    lines = metric_lines(tmp_path / "run")
    evaluated = [line[falls] for line in lines if falls in line]
    assert evaluated[-1] < 0.9 * evaluated[0]
    for line in lines[1:]:
        assert 0 <= line["teacher/top_token"] <= 1 and line["objective/scores"] == 0
        assert line["teacher/kl"] > 0 and line["teacher/kl_sum_seq"] > line["teacher/kl"]
    printed = capsys.readouterr().out.splitlines()
    titles = next(row for row, line in enumerate(printed) if line.split()[:2] == ["step", "reward"])
    place = 2 if "reference" in settings else 3
    assert printed[titles].split()[place] == "teacher"
    assert float(printed[titles + 1].split()[place]) == pytest.approx(lines[1]["teacher/kl_sum_seq"], abs=1e-3)


def test_its_log_probs_are_those_of_its_model_at_the_run_s_temperature(teacher, tmp_path):
    trainer = tiny_trainer(
        tmp_path / "run", teacher_model_name_or_path=teacher, teacher_offloaded=True, temperature=0.5
    )
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    model = tiny_causal_lm("llama", seed=7)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2
        for i, mask in enumerate(rollouts["response_mask"]):
            prompt = rollouts["queries"][i][rollouts["query_attn_masks"][i].bool()]
            response = rollouts["responses"][i][mask]
            logits = model(torch.cat([prompt, response]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / 0.5).log_softmax(dim=-1).gather(1, response.unsqueeze(1))[:, 0]
            assert_close(rollouts["teacher_logprobs"][i][mask], logprobs, atol=1e-5, rtol=1e-5)
            hits = (logits.argmax(dim=-1) == response).float()
            assert rollouts["teacher_top_tokens"][i][mask].tolist() == hits.tolist()


def test_a_teacher_behind_a_server_says_the_same(teacher, tmp_path):
    trainer = tiny_trainer(tmp_path / "here", teacher_model_name_or_path=teacher)
    here = trainer.rollout(trainer.prompt_batches(0))
    policy = trainer.collector.teacher.policy

    def answer(request):
        """As vLLM answers: nothing for the first token, and rank 1 for the likeliest."""
        ids = torch.tensor(request.body["prompt"])
        with torch.no_grad():
            logprobs = policy.model(ids.unsqueeze(0)).logits[0].log_softmax(dim=-1)
        entries = [None]
        for place, token in enumerate(ids[1:].tolist()):
            rank = 1 + int((logprobs[place] > logprobs[place, token]).sum())
            entries.append({str(token): {"logprob": float(logprobs[place, token]), "rank": rank, "decoded_token": "w"}})
        return response({"choices": [{"prompt_logprobs": entries}]})

    with RawServer(answer) as server:
        url = f"http://{server.address}"
        there = tiny_trainer(tmp_path / "there", teacher_model_name_or_path=url)
        found = there.rollout(there.prompt_batches(0))
        assert {request.path for request in server.requests} == {"/v1/completions"}
        start, first, *_ = [request.body for request in server.requests]
        assert len(start["prompt"]) == 2 < len(first["prompt"]) and first["prompt_logprobs"] == 0
    for name in ("teacher_logprobs", "teacher_top_tokens"):
        assert_close(found[name], here[name], atol=1e-5, rtol=1e-5)
    with (
        RawServer(lambda request: response({"choices": [{}]})) as server,
        pytest.raises(ValueError, match="teacher_model_name_or_path: http.* gave no prompt_logprobs"),
    ):
        TeacherServer(f"http://{server.address}/v1/")(here)


def test_what_a_teacher_cannot_be_is_said_before_the_run(teacher, tmp_path):
    with pytest.raises(ValueError, match=r"temperature is 0.7, but a teacher behind a server .*; set temperature: 1"):
        tiny_config(tmp_path, teacher_model_name_or_path="http://localhost:8000", temperature=0.7)
    with pytest.raises(ValueError, match="teacher_model_name_or_path holds 'http://', no address"):
        tiny_config(tmp_path, teacher_model_name_or_path="http://")
    for option in ({"teacher_dtype": "bfloat16"}, {"teacher_offloaded": True}):
        with pytest.raises(ValueError, match="teacher_.* is .*, but the teacher is behind a server"):
            tiny_config(tmp_path, teacher_model_name_or_path="http://localhost:8000", **option)
    with pytest.raises(ValueError, match="teacher_coef is 0.5, without effect"):
        tiny_config(tmp_path, teacher_coef=0.5)
    with pytest.raises(ValueError, match="there is no reward: .* or a teacher"):
        tiny_trainer(tmp_path / "none", **ALONE)
    with pytest.raises(ValueError, match="'remax' compares scores .* a teacher alone gives none; take reinforce"):
        tiny_trainer(tmp_path / "greedy", teacher_model_name_or_path=teacher, adv_estimator="remax", **ALONE)

    class Scores(PPOTrainer):
        def _score(self, samples):
            return super()._score(samples)

    settings = {"adv_estimator": "remax", "trainer_class": Scores, **ALONE}
    tiny_trainer(tmp_path / "scores", teacher_model_name_or_path=teacher, **settings)
    other = tiny_tokenizer([f"v{i}" for i in range(60)])
    other.save_pretrained(teacher)
    with pytest.raises(
        ValueError, match="teacher_model_name_or_path '.*' has another tokenizer .*; learn from a model"
    ):
        tiny_trainer(tmp_path / "run", teacher_model_name_or_path=teacher)
    with pytest.raises(ValueError, match="need a CUDA device and bitsandbytes"):
        tiny_tokenizer().save_pretrained(teacher)
        tiny_trainer(tmp_path / "run", teacher_model_name_or_path=teacher, teacher_dtype="4bit")


def test_a_reward_adapter_is_no_teacher(teacher, tmp_path):
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": teacher}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="teacher_model_name_or_path is .*, a reward adapter, which writes no text"):
        tiny_trainer(tmp_path / "run", teacher_model_name_or_path=str(tmp_path / "adapter"))


def test_what_judges_scores_alone_leaves_a_teacher_s_run_in_peace(teacher, tmp_path, capsys):
    groups = {"adv_estimator": "grpo", "num_return_sequences": 2, "total_episodes": 40, "stop_on": ["error"]}
    held_out = {"trainer_arguments": {"reward_funcs": None, "eval_dataset": prompts(4)}, "eval_steps": 2}
    trainer = tiny_trainer(tmp_path / "run", teacher_model_name_or_path=teacher, **ALONE | held_out, **groups)
    trainer.train()
    assert trainer.state.global_step == 4
    found = (tmp_path / "run/findings.jsonl").read_text() if (tmp_path / "run/findings.jsonl").exists() else ""
    assert "constant_reward" not in found and "uniform_groups" not in found
    assert "best step" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="dynamic_sampling is 2, but judges prompts by scores, without the teacher"):
        tiny_config(tmp_path, teacher_model_name_or_path=teacher, dynamic_sampling=2, num_return_sequences=2)


def test_a_teacher_that_cannot_read_every_id_is_refused(tmp_path):
    tiny_causal_lm("llama").save_pretrained(tmp_path / "small")
    model = tiny_causal_lm("llama", vocab_size=80)
    with pytest.raises(ValueError, match="has 64 embeddings and the policy 80, .*; take a policy with as many"):
        tiny_trainer(tmp_path / "run", model=model, teacher_model_name_or_path=str(tmp_path / "small"))


def test_a_failed_request_is_sent_again(monkeypatch):
    monkeypatch.setattr(teachers, "_PAUSES", (0.0, 0.0))
    samples = {
        "queries": torch.tensor([[5, 6]]),
        "query_attn_masks": torch.ones(1, 2),
        "responses": torch.tensor([[7]]),
        "response_mask": torch.tensor([[True]]),
    }
    good = {"choices": [{"prompt_logprobs": [None, {}, {"7": {"logprob": -0.5, "rank": 2}}]}]}
    answers = iter([response(b"no", status="503 Busy"), response(good)])
    with RawServer(lambda request: next(answers)) as server:
        found = TeacherServer(f"http://{server.address}")(samples)
    assert found["teacher_logprobs"].tolist() == [[-0.5]] and found["teacher_top_tokens"].tolist() == [[0.0]]
    with RawServer(lambda request: response(b"no", status="503 Busy")) as server:
        with pytest.raises(ValueError, match="teacher_model_name_or_path: http.* 503"):
            TeacherServer(f"http://{server.address}")(samples)
        assert len(server.requests) == 3


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), 0.5])
def test_what_is_no_log_prob_is_refused(logprob):
    answer = {"choices": [{"prompt_logprobs": [None, {"0": {"logprob": logprob, "rank": 1}}]}]}
    with (
        RawServer(lambda request: response(json.dumps(answer).encode())) as server,
        pytest.raises(ValueError, match="gave no prompt_logprobs of each token .*one is no log-prob"),
    ):
        TeacherServer(f"http://{server.address}").ask_once()


def test_a_server_that_cannot_be_asked_is_named_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(teachers, "_PAUSES", ())
    with pytest.raises(ValueError, match="teacher_model_name_or_path: http://127.0.0.1:9/.* check that it runs"):
        tiny_trainer(tmp_path, teacher_model_name_or_path="http://127.0.0.1:9")


def test_a_run_goes_on_and_is_sampled_though_its_teacher_has_moved(teacher, tmp_path, capsys):
    settings = {"total_episodes": 20, "save_steps": 1, "output_dir": tmp_path / "run"}
    trainer = tiny_trainer(teacher_model_name_or_path=teacher, **settings)
    trainer.train()
    Path(teacher).rename(tmp_path / "moved")
    moved = {"teacher_model_name_or_path": str(tmp_path / "moved"), "teacher_offloaded": True}
    resumed = tiny_trainer(**settings | {"total_episodes": 30}, **moved)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3
    (tmp_path / "moved").rename(tmp_path / "gone")
    assert sample([str(tmp_path / "run"), "--prompt", "w10 w11", "--reference", "none"]) == 0
    assert "policy: w" in capsys.readouterr().out


def test_a_run_does_not_go_on_with_another_teacher(teacher, tmp_path):
    def identity():
        trainer = tiny_trainer(tmp_path / "run", teacher_model_name_or_path=teacher)
        parts = trainer.collector
        return json.dumps(start_identity(trainer.actor_critic, parts.reference, parts.teacher, parts.scorer, None))

    first = identity()
    assert identity() == first
    tiny_causal_lm("llama", seed=8).save_pretrained(teacher)
    assert identity() != first
