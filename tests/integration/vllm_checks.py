"""A real vLLM samples as the trainer's policy would, and a run whose weights do not reach it stops (`make vllm-test`).

Not collected by pytest itself: it needs an environment with vLLM (VLLM_PYTHON, which `alpaca-ppo vllm-env` makes) and
minutes. One server of each family serves all checks of that family but those of its process.
"""

import copy
import gc
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import LoraConfig

from alpaca_ppo.async_calls import await_all
from alpaca_ppo.generation import SamplingParams, Turns, generate
from alpaca_ppo.generation.vllm.backend import VLLMBackend
from alpaca_ppo.generation.vllm.process import environment
from alpaca_ppo.generation.vllm.server import Server
from alpaca_ppo.ppo.device_rows import ROW_KEYS
from alpaca_ppo.ppo.teacher import TeacherModel, TeacherServer
from tests.generation.test_generate import full_forward_logprobs, padded
from tests.generation.test_turns import ANSWERS, Script
from tests.generation.test_vllm_process import folders, until
from tests.integration.launching import start
from tests.integration.run_tiny import Talker
from tests.integration.run_vllm import FAMILIES, model_of, trained
from tests.tiny_models import EOS, PAD, SPECIAL_TOKENS
from tests.tiny_runs import metric_lines, weights

PYTHON = os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")
TOLERANCE = 1e-5
RUN = Path(__file__).with_name("run_vllm.py")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def started(folder: Path, family: str) -> tuple[subprocess.Popen[bytes], str]:
    """A server as docs/vllm.md says to start it, and its address."""
    model_of(family, seed=9).save_pretrained(folder / "other")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = (
        f"-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {port} --model {folder / 'other'} "
        "--skip-tokenizer-init --generation-config vllm --enable-scale-out --logprobs-mode processed_logprobs "
        "--dtype float32 --max-model-len 128 --block-size 32 --enforce-eager --no-enable-chunked-prefill "
        "--enable-lora --max-lora-rank 8 --max-cpu-loras 2"
    )
    own = {
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "TORCHDYNAMO_DISABLE": "1",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PYTHON, *words.split()],
            env=environment({**own, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    while not Server(url).answers():
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        time.sleep(0.5)
    return process, url


PARAMETERS = [pytest.param(family, marks=[] if family == "qwen2" else pytest.mark.proof) for family in FAMILIES]


@pytest.fixture(scope="module", params=PARAMETERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A family, and the address of a server of it."""
    process, url = started(tmp_path_factory.mktemp("server"), request.param)
    yield request.param, url
    os.killpg(process.pid, 15)
    process.wait()


def check_mismatch(lines: list[dict[str, Any]], *, rounded: bool = False) -> None:
    for line in lines:
        assert (rounded or 0 < line["mismatch/logprob_abs_mean"]) and line["mismatch/logprob_abs_mean"] < TOLERANCE
        assert line["mismatch/recomputed"] == 1
        print({name: value for name, value in line.items() if name.startswith("mismatch/")})


def test_tokens_are_those_of_the_policy_in_any_order(served: tuple[str, str], tmp_path: Path) -> None:
    trainer = trained(tmp_path, served[0], vllm_urls=[served[1]], total_episodes=10)
    model, backend = trainer.actor_critic.policy.model, trainer.collector.backend
    trainer.collector.sync()
    prompts = [[5 + (7 * i + 3 * j) % 50 for j in range(1 + i % 9)] for i in range(125)]
    params = SamplingParams(16, 0.7, PAD, (EOS, 7), num_return_sequences=8, seed=5)
    found = generate(model, padded(prompts, ids=list(range(125))), params, backend=backend)
    assert len(found.responses) == 1000
    order = torch.randperm(125, generator=torch.Generator().manual_seed(0)).tolist()
    again = generate(model, padded([prompts[i] for i in order], ids=order), params, backend=backend)
    for place, i in enumerate(order):
        mine, other = found[8 * i : 8 * i + 8], again[8 * place : 8 * place + 8]
        assert torch.equal(mine.responses, other.responses) and torch.equal(mine.logprobs, other.logprobs)
    # Float32 rounds more where activations nearly cancel, whoever computes them: both are compared with float64.
    exact, vllm, transformers = copy.deepcopy(model).double(), list[float](), list[float]()
    for row in range(0, 1000, 7):
        response = found.responses[row, : int(found.response_mask[row].sum())]
        theirs = full_forward_logprobs(exact, prompts[row // 8], response, 0.7)
        vllm += (found.logprobs[row, : len(response)] - theirs).abs().tolist()
        transformers += (full_forward_logprobs(model, prompts[row // 8], response, 0.7) - theirs).abs().tolist()
    for name, errors in {"vLLM": vllm, "transformers": transformers}.items():
        print(f"{served[0]}: {name} from float64 {sum(errors) / len(errors):.3g}, at most {max(errors):.3g}")
    assert sum(vllm) / len(vllm) < min(TOLERANCE, 2 * sum(transformers) / len(transformers))
    assert max(vllm) < 10 * max(transformers)


def test_no_log_prob_differs_by_more_than_rounding_of_ordinary_weights(served: tuple[str, str], tmp_path: Path) -> None:
    """Those that transformers gives new models; those of the other tests are fifteen times as large."""
    trainer = trained(tmp_path, served[0], vllm_urls=[served[1]], total_episodes=10)
    policy, backend = trainer.actor_critic.policy, trainer.collector.backend
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy.model.load_state_dict(type(policy.model)(policy.model.config).state_dict())
    backend.sync(policy, trainer.updater.engine.policy_weights)
    params = SamplingParams(16, 0.7, PAD, (EOS, 7), num_return_sequences=4, seed=5)
    prompts = [[5 + (7 * i + 3 * j) % 50 for j in range(1 + i % 9)] for i in range(25)]
    found = generate(policy.model, padded(prompts, ids=list(range(25))), params, backend=backend)
    largest = 0.0
    for row in range(100):
        response = found.responses[row, : int(found.response_mask[row].sum())]
        theirs = full_forward_logprobs(policy.model, prompts[row // 4], response, 0.7)
        largest = max(largest, float((found.logprobs[row, : len(response)] - theirs).abs().max()))
    print(f"{served[0]}: largest difference of ordinary weights {largest:.3g}")
    assert largest < TOLERANCE


def test_a_tied_head_is_published_with_the_embedding(served: tuple[str, str], tmp_path: Path) -> None:
    trained(tmp_path, served[0], tied=True, vllm_urls=[served[1]])
    check_mismatch(metric_lines(tmp_path))


def test_more_prompts_wait_than_the_server_reads_at_once(served: tuple[str, str], tmp_path: Path) -> None:
    trainer = trained(tmp_path, served[0], vllm_urls=[served[1]], total_episodes=10)
    model, backend = trainer.actor_critic.policy.model, trainer.collector.backend
    trainer.collector.sync()
    # Of 4,500 tokens it reads 2,048.
    prompts = [[5 + (7 * i + 3 * j) % 50 for j in range(60)] for i in range(75)]
    params = SamplingParams(4, 1.0, PAD, (EOS,), seed=5)
    found = generate(model, padded(prompts, ids=list(range(75))), params, backend=backend)
    expected = full_forward_logprobs(model, prompts[74], found.responses[74][found.response_mask[74]], 1.0)
    assert (found.logprobs[74][found.response_mask[74]] - expected).abs().max() < 10 * TOLERANCE


def test_a_folder_that_the_server_does_not_see_is_refused_and_leaves_the_server_as_it_was(
    served: tuple[str, str], tmp_path: Path
) -> None:
    (missing,) = await_all([Server(served[1]).check(tmp_path / "missing", torch.float32, lora=False)])
    assert isinstance(missing, ValueError) and f"does not see {tmp_path / 'missing'}" in str(missing)
    trained(tmp_path / "run", served[0], vllm_urls=[served[1]], total_episodes=10)
    check_mismatch(metric_lines(tmp_path / "run"))


class Spoofs(Talker):
    """A partner who writes the end of a turn, as text."""

    async def reply(self, completion: str) -> tuple[str | None, float]:
        answer, reward = await super().reply(completion)
        return (None if answer is None else f"w5 {SPECIAL_TOKENS[EOS]} {answer}"), reward


def test_what_an_environment_says_is_sent_without_control_tokens(served: tuple[str, str], tmp_path: Path) -> None:
    arguments = {"environment_factory": Spoofs, "reward_funcs": None}
    options = {"vllm_urls": [served[1]], "response_len": 20, "max_turn_tokens": 3, "total_episodes": 10}
    trainer = trained(tmp_path, served[0], arguments=arguments, **options)
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    said = rollouts["responses"][~rollouts["response_mask"]]
    assert (said == 5).any() and not (said == EOS).any()
    check_mismatch(metric_lines(tmp_path), rounded=True)


def test_a_response_of_several_turns_is_one_row_of_the_policy(served: tuple[str, str], tmp_path: Path) -> None:
    trainer = trained(tmp_path, served[0], vllm_urls=[served[1]], total_episodes=10)
    model, backend = trainer.actor_critic.policy.model, trainer.collector.backend
    trainer.collector.sync()
    params = SamplingParams(20, 1.0, PAD, tuple(range(2, 64, 5)), num_return_sequences=3, seed=5)
    prompts = padded([[5, 9, 11, 20], [40], [33, 12]])
    found = generate(model, prompts, params, backend=backend, turns=Turns(Script(), max_turn_tokens=6))
    assert (found.response_mask.diff(dim=1).long().abs().sum(dim=1) > 1).any(), "no row has a hole"
    assert len(ANSWERS) == 4
    for row in range(9):
        length = int(found.response_mask[row].nonzero().max()) + 1
        prompt = prompts["queries"][row // 3][prompts["query_attn_masks"][row // 3].bool()].tolist()
        expected = full_forward_logprobs(model, prompt, found.responses[row, :length], 1.0)
        expected[~found.response_mask[row, :length]] = 0.0
        assert (found.logprobs[row, :length] - expected).abs().max() < 10 * TOLERANCE


def test_runs_repeat_to_the_bit_and_so_does_one_that_is_resumed(served: tuple[str, str], tmp_path: Path) -> None:
    family, options = served[0], {"vllm_urls": [served[1]]}
    first, second = (trained(tmp_path / name, family, **options) for name in "ab")
    check_mismatch(metric_lines(tmp_path / "a"))
    assert metric_lines(tmp_path / "a") == metric_lines(tmp_path / "b")
    trained(tmp_path / "c", family, total_episodes=20, save_steps=2, **options)
    resumed = trained(tmp_path / "c", family, save_steps=2, resume=True, **options)
    assert metric_lines(tmp_path / "c") == metric_lines(tmp_path / "a")
    for other in (second, resumed):
        assert all(torch.equal(weights(other)[name], tensor) for name, tensor in weights(first).items())


def test_a_teacher_behind_a_server_says_what_its_model_does(served: tuple[str, str], tmp_path: Path) -> None:
    trainer = trained(tmp_path, served[0], vllm_urls=[served[1]], total_episodes=10)
    trainer.collector.sync()
    rollouts = trainer.rollout(trainer.prompt_batches(0))
    found = TeacherServer(served[1])(rollouts)
    teacher = TeacherModel(trainer.actor_critic.policy.model)
    with torch.no_grad():
        here = teacher(*(rollouts[name] for name in ROW_KEYS), temperature=1.0, chunk_size=64)
    torch.testing.assert_close(found["teacher_logprobs"], here.logprobs, atol=1e-3, rtol=1e-4)
    assert (found["teacher_top_tokens"] != here.top_tokens).float().mean() < 0.01


def test_an_adapter_is_published_alone(served: tuple[str, str], tmp_path: Path) -> None:
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    options = {"critic_layout": "adapter", "learning_rate": 0.05, "vllm_urls": [served[1]]}
    trained(tmp_path, served[0], arguments={"peft_config": lora}, **options)
    check_mismatch(metric_lines(tmp_path))


def test_a_cached_critic_reads_the_states_of_a_pass(served: tuple[str, str], tmp_path: Path) -> None:
    critic = {"critic_layout": "cached", "critic_width": 64, "critic_depth": 1, "critic_epochs": 2}
    trained(tmp_path, served[0], vllm_urls=[served[1]], **critic)
    lines = metric_lines(tmp_path)
    check_mismatch(lines)
    assert all(line["ppo/val/error"] > 0 for line in lines if "ppo/val/error" in line)
    assert any("ppo/val/error" in line for line in lines)


def test_an_environment_answers_between_the_turns(served: tuple[str, str], tmp_path: Path) -> None:
    arguments = {"environment_factory": Talker, "reward_funcs": None}
    trained(tmp_path, served[0], arguments=arguments, vllm_urls=[served[1]], response_len=12, max_turn_tokens=3)
    # Rounded, because answers come at different times.
    check_mismatch(metric_lines(tmp_path), rounded=True)


def forget_route(route: str, patch: pytest.MonkeyPatch) -> None:
    """The server is not asked again on `route`, and seems to have been."""
    asked = Server.ask

    async def ask(self: Server, path: str, body: Any = None, **how: Any) -> Any:
        if path == route and self.loaded is not None:
            return {"success": True}
        return await asked(self, path, body, **how)

    patch.setattr(Server, "ask", ask)


def forget_tensors(part: str, patch: pytest.MonkeyPatch) -> None:
    """Tensors with `part` in their name are published as they were at first."""
    sync = VLLMBackend.sync

    def without(self: VLLMBackend, policy: Any, given: Any) -> None:
        old = vars(self).setdefault("old", {})

        def some(base: bool = False) -> Any:
            for name, tensor in given(base=base):
                yield name, old.setdefault(name, tensor.clone()) if part in name else tensor

        sync(self, policy, some)

    patch.setattr(VLLMBackend, "sync", without)


def sample_from_the_base(name: str, patch: pytest.MonkeyPatch) -> None:
    asked = Server.ask

    async def ask(self: Server, path: str, body: Any = None, **how: Any) -> Any:
        if path == "/inference/v1/generate":
            body = {**body, "model": self._model}
        return await asked(self, path, body, **how)

    patch.setattr(Server, "ask", ask)


NOT_PUBLISHED = "not the policy's"
FORGOTTEN = [
    (forget_route, "/collective_rpc", "holds other weights than the published ones"),
    (forget_route, "/reset_prefix_cache", "answers from the prefix cache of older weights"),
    (forget_tensors, "layers.1.self_attn.q_proj.weight", NOT_PUBLISHED),
    (forget_tensors, "embed_tokens.weight", NOT_PUBLISHED),
]
FORGOTTEN_ADAPTERS = [
    (forget_route, "/v1/load_lora_adapter", "HTTP status 404"),
    (forget_tensors, "layers.0.self_attn.v_proj.lora_B", NOT_PUBLISHED),
    (sample_from_the_base, "", "it is of .* instead of"),
]


@pytest.mark.parametrize("forgotten", FORGOTTEN, ids=str)
def test_what_is_forgotten_stops_the_run_at_the_smallest_rate(
    served: tuple[str, str], tmp_path: Path, forgotten: Any
) -> None:
    forget, what, problem = forgotten
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=problem):
        forget(what, patch)
        trained(tmp_path, served[0], vllm_urls=[served[1]], learning_rate=1e-6)
    # The first step trains what is published at the start, and no other does.
    assert len(metric_lines(tmp_path)) == 1


@pytest.mark.parametrize("forgotten", FORGOTTEN_ADAPTERS, ids=str)
def test_a_forgotten_adapter_stops_the_run(served: tuple[str, str], tmp_path: Path, forgotten: Any) -> None:
    forget, what, problem = forgotten
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=problem):
        forget(what, patch)
        trained(
            tmp_path,
            served[0],
            arguments={"peft_config": lora},
            vllm_urls=[served[1]],
            critic_layout="adapter",
            learning_rate=1e-6,
        )
    assert not (tmp_path / "metrics.jsonl").exists() or len(metric_lines(tmp_path)) <= 1


def test_what_is_forgotten_stops_a_run_in_bfloat16(tmp_path: Path) -> None:
    for number, (forget, what, problem) in enumerate(FORGOTTEN[1:3]):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=problem):
            forget(what, patch)
            trained(
                tmp_path / str(number),
                "qwen2",
                vllm_python=PYTHON,
                vllm_dtype="bfloat16",
                learning_rate=1e-4,
                query_len=140,
            )
        assert len(metric_lines(tmp_path / str(number))) <= 1


@pytest.mark.parametrize(
    "config", ["ddp", "zero3", "fsdp", *(pytest.param(stage, marks=pytest.mark.proof) for stage in ("zero1", "zero2"))]
)
def test_several_processes_train_as_one_does(served: tuple[str, str], tmp_path: Path, config: str) -> None:
    for name, launch in (("one", "single"), ("two", config)):
        outcome = start(
            RUN, tmp_path / name, served[0], f"vllm_urls=[{served[1]}]", "learning_rate=0.001", config=launch
        )
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    one, two = (torch.load(tmp_path / name / "weights.pt") for name in ("one", "two"))
    for name, tensor in one.items():
        assert (two[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.proof
def test_a_server_that_is_killed_in_a_rollout_gives_the_same_tokens_again(tmp_path: Path) -> None:
    """Of a process that the trainer starts, which listens on no port, and leaves nothing behind."""
    before = folders()
    trainer = trained(tmp_path, "qwen2", vllm_python=PYTHON, total_episodes=10)
    (folder,) = folders() - before

    def server() -> psutil.Process:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if f"{folder}/0.sock" in command and "watchdog.py" not in str(command):
                return process
        raise AssertionError("no server runs")

    class Kills(Script):
        killed = False

        def on_stop(self, turn: Any) -> Any:
            if not self.killed:
                self.killed = True
                server().kill()
            return super().on_stop(turn)

    model, backend = trainer.actor_critic.policy.model, trainer.collector.backend
    trainer.collector.sync()
    for process in [server(), *server().children(recursive=True)]:
        for connection in process.net_connections("inet"):
            assert connection.status != psutil.CONN_LISTEN or connection.laddr.ip in ("127.0.0.1", "::1"), connection
    params = SamplingParams(20, 1.0, PAD, tuple(range(2, 64, 5)), num_return_sequences=3, seed=5)
    prompts = padded([[5, 9, 11, 20], [40], [33, 12]])
    expected = generate(model, prompts, params, backend=backend, turns=Turns(Script()))
    with pytest.warns(UserWarning, match="SIGKILL.*started again"):
        found = generate(model, prompts, params, backend=backend, turns=Turns(Kills()))
    assert torch.equal(found.responses, expected.responses) and torch.equal(found.logprobs, expected.logprobs)
    del trainer, backend
    gc.collect()
    until(lambda: folders() <= before)
