"""The checks of `gpu_smoke` that need a vLLM server (`--vllm_python`): ten minutes on a GPU, about as long on a CPU.

The runs of `RUNS` take turns; the checks of one share its server. Prompts have 200 tokens and come again in every step,
so that the server has them in its prefix cache. Not checked: several GPUs, servers on other machines, learning.
"""

import asyncio
import gc
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from alpaca_ppo import PPOTrainer
from alpaca_ppo.estimate_memory.estimator import GIB
from alpaca_ppo.generation.vllm.local_server import LocalServer
from alpaca_ppo.generation.vllm.server import Server
from alpaca_ppo.ppo.mismatch import BOUNDS
from examples.gpu_checks import ROWS, Check, Failed, Machine, NotHere, new_trainer, require, take_steps
from examples.gpu_speed import build
from examples.memory_cells import adapter

PROMPT_LEN = 200
SHARE, FILLED = 0.4, 0.55
"""Of the GPU's memory: vLLM's, and that of the trainer beside it."""
BOUND = 1e-4
"""Nats, in float32."""
RUNS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True},
    "LoRA": {"peft_config": adapter({"lora_rank": 8}, "CAUSAL_LM"), "critic_layout": "adapter"},
    "tied head": {},
}
SAMPLE, RELOAD, RESET = "/inference/v1/generate", "/collective_rpc", "/reset_prefix_cache"


def small_model(machine: Machine, *, tied: bool) -> PreTrainedModel:
    """A Qwen2 of random weights with heads of 64, or the user's own model.

    Raises:
        NotHere: if the latter has no tied head, as it should.
    """
    if machine.model is not None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(machine.model, dtype=torch.float32)
        if tied and not model.config.tie_word_embeddings:
            raise NotHere(f"the head of {machine.model} is not tied")
        return model
    layers = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes = layers | {"vocab_size": 4096} if machine.gpus else {"hidden_size": 128}
    return build("tiny", machine.device, torch.float32, **sizes, initializer_range=0.1, tie_word_embeddings=tied)


@contextmanager
def start_times() -> Iterator[list[float]]:
    """The seconds of each start of a server in the block."""
    seconds, start = list[float](), LocalServer.start

    def timed(self: LocalServer, *arguments: Any) -> None:
        begin = time.perf_counter()
        start(self, *arguments)
        seconds.append(time.perf_counter() - begin)

    with patch.object(LocalServer, "start", timed):
        yield seconds


class Run:
    """A trainer for whose responses a server was started."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.trainer: PPOTrainer = new_trainer(
            machine,
            small_model(machine, tied=name == "tied head"),
            [PROMPT_LEN] * ROWS,
            generation_backend="vllm",
            vllm_python=machine.vllm_python,
            vllm_gpu_memory_utilization=SHARE,
            mismatch_action="ignore",
            **RUNS[name],
        )
        with start_times() as seconds:
            self.sample()
        (self.first_start,) = seconds

    def steps(self, count: int) -> list[dict[str, float]]:
        return take_steps(self.trainer, count)

    def sample(self) -> dict[str, torch.Tensor]:
        """The same responses every time, if the weights are the same."""
        (prompts,) = self.trainer.prompt_batches(0)
        self.trainer.collector.sync()
        return self.trainer.collector.sample(prompts, replace(self.trainer.sampling_params, seed=1))

    def processes(self) -> list[psutil.Process]:
        """The server's, and their watchdog."""
        return psutil.Process().children(recursive=True)

    def engine(self) -> psutil.Process:
        """The process that computes."""
        return next(process for process in self.processes() if "EngineCore" in " ".join(process.cmdline()))


_started: dict[str, Run] = {}


def end_servers() -> None:
    """Ends the server of the present run, as its trainer does when it is gone."""
    _started.clear()
    gc.collect()


def with_run(name: str, check: Callable[[Run], str]) -> Check:
    """`check` of the run of this name, which is started unless the check before has left it running."""

    def checked(machine: Machine) -> str:
        if machine.vllm_python is None:
            raise NotHere("needs --vllm_python, an interpreter that alpaca-ppo vllm-env has made")
        if name not in _started:
            end_servers()
            _started[name] = Run(machine, name)
        try:
            return check(_started[name])
        except (NotHere, Failed):
            raise
        # After a surprise the next check gets a run of its own.
        except BaseException:
            _started.clear()
            raise

    return checked


def agrees(run: Run, bound: float = BOUND) -> str:
    """How far sampler and trainer are apart in three steps; the attention kernels, and the speed."""
    steps = run.steps(3)
    gap = max(step["mismatch/logprob_abs_mean"] for step in steps)
    log = (Path(run.trainer.args.output_dir) / "vllm_0.log").read_text(errors="replace")
    named = re.findall(r"Using (?:AttentionBackendEnum\.)?(\w+)(?: attention)? backend", log)
    speeds = [round(step["tokens/sampled_per_second"]) for step in steps]
    figure = f"mean difference {gap:.1e} nats, bound {bound:g}; attention {named[0] if named else 'not in the log'}"
    # On a CPU there is one.
    known = bool(named) or run.trainer.accelerator.device.type == "cpu"
    return require(
        gap <= bound and known, f"{figure}; {speeds} tokens/s in the rollouts; started in {run.first_start:.0f} s"
    )


def stops(run: Run, words: str) -> str:
    """The sentence with which the next step ends; it must have these words, and come before the update."""
    before = run.trainer.state.global_step
    try:
        run.steps(1)
    except ValueError as error:
        told = str(error).splitlines()[0]
        return require(words in told and run.trainer.state.global_step == before, f"stops: {told}")
    raise Failed(f"the run goes on; expected: {words}")


def without(route: str, words: str) -> Callable[[Run], str]:
    """A check: the run stops with these words if a request that loads weights is not made, and seems to have been."""

    def check(run: Run) -> str:
        ask = Server.ask

        async def forgets(self: Server, path: str, body: Any = None, **how: Any) -> Any:
            return {"success": True} if path == route else await ask(self, path, body, **how)

        with patch.object(Server, "ask", forgets):
            return stops(run, words)

    return check


def stale_head(run: Run) -> str:
    """The run stops if the head of the step before is written for the server."""
    engine, policy = run.trainer.updater.engine, run.trainer.actor_critic.policy
    head = policy.model.get_output_embeddings().weight
    (name,) = [name for name, parameter in policy.model.named_parameters() if parameter is head]
    old, weights = head.detach().clone(), engine.policy_weights
    run.steps(1)

    def stale(**which: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in weights(**which):
            yield key, old if key == name else tensor

    with patch.object(engine, "policy_weights", stale):
        return stops(run, f"not the policy's: {name}")


def sockets(run: Run) -> str:
    """Every socket on which a process of the server listens is on loopback."""
    run.sample()
    processes = run.processes()
    found = [place for process in processes for place in process.net_connections("inet") if place.status == "LISTEN"]
    outside = sorted({f"{place.laddr.ip}:{place.laddr.port}" for place in found if not is_loopback(place.laddr.ip)})
    figure = f"{len(found)} in {len(processes)} processes, {len(outside)} outside of loopback, bound 0"
    return require(not outside, " ".join([figure, *outside]))


def is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


@contextmanager
def engine_killed(run: Run, route: str) -> Iterator[None]:
    """Kills the engine (SIGKILL) while it answers the block's first request on `route`."""
    ask, engine, killed = Server.ask, run.engine(), False

    async def kills(self: Server, path: str, body: Any = None, **how: Any) -> Any:
        nonlocal killed
        # A request without a seed only tries the cache.
        if killed or path != route or (path == SAMPLE and "seed" not in body["sampling_params"]):
            return await ask(self, path, body, **how)
        killed = True
        request = asyncio.create_task(ask(self, path, body, **how))
        await asyncio.wait([request], timeout=0.01)
        engine.kill()
        # An answer that was quicker is lost.
        return await (ask(self, path, body, **how) if request.done() else request)

    with patch.object(Server, "ask", kills):
        yield


def survives(route: str) -> Callable[[Run], str]:
    """A check: the engine's death during a request on `route` changes no token, and the run goes on."""

    def check(run: Run) -> str:
        expected = run.sample()
        if route == RELOAD:
            # The same weights are published again.
            run.trainer.collector.backend.version = None
        with engine_killed(run, route), start_times() as seconds, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = run.sample()
            # An answer may come when the engine is killed already, whose end this step then meets.
            after = run.steps(1)[0]["mismatch/logprob_abs_mean"]
        same = (found["responses"] == expected["responses"]).all(dim=1)
        gap = float((found["rollout_logprobs"] - expected["rollout_logprobs"])[same].abs().max())
        starts = " and ".join(f"{second:.0f} s" for second in seconds)
        return require(
            bool(same.all()) and gap <= BOUND and after <= BOUND and len(seconds) == 1,
            f"{int(same.sum())} of {len(same)} responses equal, log-probs within {gap:.1e} nats; a step later "
            f"{after:.1e} nats, bound {BOUND:g}; first start {run.first_start:.0f} s, then {starts or 'none'}",
        )

    return check


def sleeps_without_growth(run: Run) -> str:
    """What the server keeps while it sleeps, in five cycles beside a trainer that fills `FILLED` of the GPU."""
    if not run.machine.gpus:
        raise NotHere("needs a GPU")
    _, total = torch.cuda.mem_get_info()
    # In place of a larger trainer.
    filling = torch.empty(int(FILLED * total) - torch.cuda.memory_reserved(), dtype=torch.uint8, device="cuda")
    kept = []
    with start_times() as seconds:
        for _ in range(5):
            run.steps(1)
            free, _ = torch.cuda.mem_get_info()
            kept.append((total - free - torch.cuda.memory_reserved()) / GIB)
    del filling
    half_share = SHARE * total / GIB / 2
    return require(
        max(kept) <= kept[0] + 0.1 and max(kept) <= half_share and not seconds,
        f"{', '.join(f'{size:.2f}' for size in kept)} GiB outside of torch in five cycles, bounds: the first + 0.1, "
        f"and {half_share:.1f}; {len(seconds)} starts in place of waking, bound 0",
    )


HALF = BOUNDS["mismatch/logprob_abs_mean"].warn_half
CHECKS: dict[str, Check] = {
    "vLLM in float32 = trainer": with_run("float32", agrees),
    "vLLM, weights not reloaded": with_run("float32", without(RELOAD, "holds other weights than the published ones")),
    "vLLM, cache not reset": with_run("float32", without(RESET, "answers from the prefix cache of older weights")),
    "vLLM, stale head": with_run("float32", stale_head),
    "vLLM, listening sockets": with_run("float32", sockets),
    "vLLM, engine killed in sampling": with_run("float32", survives(SAMPLE)),
    "vLLM, engine killed in publishing": with_run("float32", survives(RELOAD)),
    "vLLM in bfloat16 = trainer": with_run("bfloat16", lambda run: agrees(run, HALF)),
    "vLLM asleep beside a full trainer": with_run("bfloat16", sleeps_without_growth),
    "vLLM with LoRA = trainer": with_run("LoRA", agrees),
    "vLLM with a tied head = trainer": with_run("tied head", agrees),
}
