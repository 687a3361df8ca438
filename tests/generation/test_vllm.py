"""The vLLM backend against a server of the same protocol: which requests it makes, and what it believes."""

import math
import random
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from alpaca_ppo.adapters.adapter_set import from_peft_model
from alpaca_ppo.distributed.preemption import SamplingStopped
from alpaca_ppo.distributed.weight_sums import whole_sums
from alpaca_ppo.functional.rng import uniforms
from alpaca_ppo.generation import Generation, SamplingHooks, SamplingParams, StopStrings, Turns, generate, make_backend
from alpaca_ppo.generation.vllm import sampling, weights
from alpaca_ppo.models import Policy
from tests.fake_vllm import FakeVLLM, ServedInThread, sample
from tests.generation.test_generate import PROMPT_IDS, PROMPTS, padded
from tests.generation.test_turns import ANSWERS, Script
from tests.integration.run_tiny import Talker
from tests.tiny_models import EOS, PAD, SMALLEST, tiny_causal_lm, tiny_tokenizer
from tests.tiny_runs import metric_lines, prompts, tiny_config, tiny_trainer

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 20,
    "temperature": 0.9,
    "pad_token_id": PAD,
    "stop_token_ids": tuple(range(2, 64, 9)),
    "seed": 3,
    "num_return_sequences": 3,
}
TRUNCATES = tuple(range(3, 64, 4))
WORDS = [f"{letter}{number}" for letter in "abcdef" for number in range(10)]
PIECE = 64


def weights_of(policy: Policy, *, base: bool = False) -> Any:
    # As an engine, a tied tensor once.
    once = {tensor.data_ptr(): name for name, tensor in reversed(policy.model.state_dict().items())}
    for name, tensor in policy.model.state_dict().items():
        if once[tensor.data_ptr()] == name and (policy.adapters is None or (".lora_" in name) is not base):
            if ".reference." not in name:
                yield name, tensor


class Setting:
    """A policy and a backend whose servers have its weights."""

    def __init__(
        self, folder: Path, *fakes: FakeVLLM, policy: Policy | None = None, host: str = "127.0.0.1", **options: Any
    ) -> None:
        self.policy = policy or Policy(tiny_causal_lm("llama", **SMALLEST))
        self._served = [ServedInThread(fake, host) for fake in fakes]
        urls = [served.__enter__() for served in self._served]
        options = {"generation_backend": "vllm", "vllm_urls": urls or None, **options}
        self.backend: Any = make_backend("vllm", tiny_config(folder, **options))

    def __enter__(self) -> "Setting":
        return self

    def __exit__(self, *exception: object) -> None:
        for served in self._served:
            served.__exit__()

    def sync(self) -> None:
        self.backend.sync(self.policy, lambda base=False: weights_of(self.policy, base=base))

    def sampled(self, prompts: Any = PROMPTS, ids: Any = PROMPT_IDS, **given: Any) -> Generation:
        names = SamplingParams.__dataclass_fields__.keys() & given.keys()
        params = SamplingParams(**{**SETTINGS, **{name: given.pop(name) for name in names}})
        return generate(self.policy.model, padded(prompts, 0, ids), params, backend=self.backend, **given)


def plain(
    loaded: str, prompt: list[int], key: Tensor, answers: list[list[int]], params: SamplingParams, *, most: int = 20
) -> tuple[list[int], list[bool], list[float], bool]:
    """One row by the rules: a request for each turn, or for 64 tokens of it, all tokens so far, and a seed of the row's
    key and the position; the turn's end looked for token by token.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    asked = start = 0
    late = bool(params.truncate_token_ids and params.truncate_after)
    stops = params.stop_token_ids if params.truncate_after else params.stop_token_ids + params.truncate_token_ids
    while True:
        limit = min(20, start + most)
        count = min(limit - len(tokens), PIECE if late or params.stop_strings else 20)
        seed = int(uniforms(key.view(1), len(tokens)) * 2**52)
        how = {"max_tokens": count, "stop_token_ids": stops, "seed": seed, "temperature": params.temperature}
        stopped = False
        for token, logprob in sample(loaded, prompt + tokens, how):
            tokens, mask, logprobs = [*tokens, token], [*mask, True], [*logprobs, logprob]
            stopped = token in params.stop_token_ids
            stopped |= token in params.truncate_token_ids and len(tokens) - start > params.truncate_after
            if params.stop_strings is not None:
                text = " ".join(WORDS[token - 4] if token >= 4 else "<special>" for token in tokens[start:])
                stopped |= any(text.find(string) >= 0 for string in params.stop_strings.strings)
            if stopped:
                break
        if len(tokens) == 20 or (not stopped and len(tokens) < limit):
            if len(tokens) < 20:
                continue
            return tokens, mask, logprobs, stopped
        if asked == len(answers):
            return tokens, mask, logprobs, stopped
        appended = answers[asked][: 20 - len(tokens)]
        asked += 1
        tokens, mask = tokens + appended, mask + [False] * len(appended)
        logprobs = logprobs + [0.0] * len(appended)
        if len(tokens) == 20:
            return tokens, mask, logprobs, False
        start = len(tokens)


def assert_rows(found: Generation, wanted: list[tuple[list[int], list[bool], list[float], bool]]) -> None:
    for row, (tokens, mask, logprobs, stopped) in enumerate(wanted):
        rest = 20 - len(tokens)
        assert found.responses[row].tolist() == tokens + [PAD] * rest
        assert found.response_mask[row].tolist() == mask + [False] * rest
        assert torch.equal(found.logprobs[row], torch.tensor(logprobs + [0.0] * rest))
        assert bool(found.stopped[row]) == stopped


def keys() -> Tensor:
    return SamplingParams(**SETTINGS).random_keys(torch.tensor(PROMPT_IDS))


def test_a_row_s_tokens_depend_on_its_key_alone_on_one_server_or_three(tmp_path: Path) -> None:
    fakes = [FakeVLLM() for _ in range(4)]
    with Setting(tmp_path, fakes[0]) as one, Setting(tmp_path, *fakes[1:]) as three:
        one.sync()
        three.sync()
        found = one.sampled()
        params, loaded = SamplingParams(**SETTINGS), fakes[0].loaded
        assert_rows(found, [plain(loaded, PROMPTS[i // 3], key, [], params) for i, key in enumerate(keys())])
        several = three.sampled(PROMPTS[::-1], PROMPT_IDS[::-1])
        for i in range(4):
            assert torch.equal(found.responses[3 * i : 3 * i + 3], several.responses[9 - 3 * i : 12 - 3 * i])
    # Rows of a prompt go to one server.
    for fake in fakes[1:]:
        prompts = [tuple(body["token_ids"]) for path, body in fake.asked if path.endswith("generate")]
        assert len(prompts) == 3 * len(set(prompts)) > 0


def test_a_request_asks_for_the_policy_s_own_distribution(tmp_path: Path) -> None:
    fake = FakeVLLM()
    with Setting(tmp_path, fake) as setting:
        setting.sync()
        setting.sampled(PROMPTS[:1], PROMPT_IDS[:1], num_return_sequences=1)
        setting.sampled(PROMPTS[:1], PROMPT_IDS[:1], num_return_sequences=1, top_k=5, top_p=0.5)
        setting.sampled(PROMPTS[:1], PROMPT_IDS[:1], num_return_sequences=1, do_sample=False)
    plain, cut, greedy = [body for path, body in fake.asked if path.endswith("generate")]
    assert plain["token_ids"] == PROMPTS[0] and plain["model"] == "policy"
    seed = int(uniforms(keys()[:1], 0) * 2**52)
    assert plain["sampling_params"] == {
        "max_tokens": 20,
        "seed": seed,
        "temperature": 0.9,
        "top_k": -1,
        "top_p": 1.0,
        "stop_token_ids": list(range(2, 64, 9)),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    assert cut["sampling_params"] == {**plain["sampling_params"], "top_k": 5, "top_p": 0.5}
    assert greedy["sampling_params"] == {**plain["sampling_params"], "temperature": 0.0}


@pytest.mark.parametrize("limits", [{}, {"max_turn_tokens": 4}, {"max_turn_tokens": 40}])
@pytest.mark.parametrize(
    "rule", [{}, {"truncate_token_ids": TRUNCATES}, {"truncate_token_ids": TRUNCATES, "truncate_after": 3}]
)
def test_turns_are_requests_on_all_tokens_so_far_whenever_answers_come(
    tmp_path: Path, limits: dict[str, int], rule: dict[str, Any]
) -> None:
    params = SamplingParams(**{**SETTINGS, **rule})
    fake = FakeVLLM()
    with Setting(tmp_path, fake) as setting:
        setting.sync()
        loaded = fake.loaded
        most = limits.get("max_turn_tokens", 20)
        wanted = [
            plain(loaded, PROMPTS[i // 3], key, ANSWERS[i % 4], params, most=most) for i, key in enumerate(keys())
        ]
        for delays in (None, random.Random(1)):
            reported: list[int] = []
            hooks = SamplingHooks(on_finished=lambda rows, _, reported=reported: reported.extend(rows))
            found = setting.sampled(turns=Turns(Script(delays), **limits), hooks=hooks, **rule)
            assert_rows(found, wanted)
            assert sorted(reported) == list(range(12))


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(tmp_path: Path) -> None:
    strings = StopStrings(["a1", "3 b", "5"], tiny_tokenizer(WORDS), vocab_size=64)
    fake = FakeVLLM()
    with Setting(tmp_path, fake) as setting:
        setting.sync()
        loaded = fake.loaded
        found = setting.sampled(stop_strings=strings, stop_token_ids=(EOS,))
    params = SamplingParams(**{**SETTINGS, "stop_strings": strings, "stop_token_ids": (EOS,)})
    wanted = [plain(loaded, PROMPTS[i // 3], key, [], params) for i, key in enumerate(keys())]
    assert_rows(found, wanted)
    assert any(stopped and tokens[-1] != EOS for tokens, _, _, stopped in wanted)


def test_an_answer_for_a_row_that_waits_for_none_is_an_error(tmp_path: Path) -> None:
    class Wrong(Script):
        def ready(self, timeout: float) -> Any:
            return [(row + 1, None) for row in list(self.pending)[:1]]

    with Setting(tmp_path, FakeVLLM()) as setting:
        setting.sync()
        with pytest.raises(ValueError, match="answered row 1, which waits for none"):
            setting.sampled(PROMPTS[:1], PROMPT_IDS[:1], num_return_sequences=1, turns=Turns(Wrong(random.Random(0))))


def test_each_version_is_a_folder_that_is_loaded_and_replaces_the_last(tmp_path: Path) -> None:
    fake = FakeVLLM()
    with Setting(tmp_path, fake) as setting:
        setting.sync()
        (published,) = fake.published
        folder = published["kwargs"]["weights_path"]
        assert folder.startswith("/dev/shm/")
        written = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for name, tensor in setting.policy.model.state_dict().items():
            assert torch.equal(written[name], tensor), name
        first, count = setting.sampled(), len(fake.asked)
        with torch.no_grad():
            setting.policy.head.weight += 1
        setting.sync()
        other = str(Path(folder).parent / "1")
        version = f"{Path(folder).parent.name}-1"
        assert fake.asked[count:] == [
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": other}}),
            ("/update_weight_version", {"new_version": version}),
            ("/reset_prefix_cache", {}),
        ]
        assert not Path(folder).exists()
        assert torch.equal(load_file(f"{other}/model.safetensors")["lm_head.weight"], setting.policy.head.weight)
        assert not torch.equal(setting.sampled().responses, first.responses)


def test_of_an_adapter_the_base_is_loaded_once_and_then_each_version_under_its_own_name(tmp_path: Path) -> None:
    model = tiny_causal_lm("llama", **SMALLEST)
    peft = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    adapters = from_peft_model(peft)
    for parameter in adapters.parameters_of("default"):
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))
    fake = FakeVLLM()
    with Setting(tmp_path, fake, policy=Policy(adapters.model, adapters)) as setting:
        setting.sync()
        first = setting.sampled()
        base, adapter = fake.published
        written = AutoModelForCausalLM.from_pretrained(base["kwargs"]["weights_path"])
        for name, tensor in tiny_causal_lm("llama", **SMALLEST).state_dict().items():
            assert torch.equal(written.state_dict()[name], tensor), name
        again = get_peft_model(written, adapters.config_of("default"))
        again.load_adapter(adapter["lora_path"], "loaded")
        for name, tensor in adapters.tensors_of("default").items():
            name = name.replace(".weight", ".loaded.weight")
            assert torch.equal(again.state_dict()[name], tensor), name
        count = len(fake.asked)
        with torch.no_grad():
            adapters.parameters_of("default")[0].add_(1)
        setting.sync()
        old, new = adapter["lora_name"], f"{adapter['lora_name'][:-1]}1"
        assert fake.asked[count:] == [
            ("/v1/load_lora_adapter", {"lora_name": new, "lora_path": adapter["lora_path"][:-1] + "1"}),
            ("/update_weight_version", {"new_version": new}),
            ("/reset_prefix_cache", {}),
            ("/v1/unload_lora_adapter", {"lora_name": old}),
        ]
        assert not torch.equal(setting.sampled().responses, first.responses)
        assert {body["model"] for path, body in fake.asked[count:] if path.endswith("generate")} == {new}


def changed(**fields: Any) -> Any:
    def change(answer: dict[str, Any]) -> Any:
        answer["choices"][0].update(fields)
        return answer

    return change


def entries(*logprobs: float, first: int = 40) -> dict[str, Any]:
    content = [{"token_id": first + i, "logprob": value} for i, value in enumerate(logprobs)]
    return {"token_ids": list(range(40, 40 + len(logprobs))), "logprobs": {"content": content}}


def repeated(token: Any) -> dict[str, Any]:
    return {"token_ids": [token] * 20, "logprobs": {"content": [{"token_id": token, "logprob": -1.0}] * 20}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed(weight_versions=[{"version": "old", "start": 0, "end": 1}]), "of weights old instead of"),
        (changed(weight_versions=[]), "weights  instead of"),
        (changed(**entries(-1.0, -1.0)), "2 tokens without a stop token"),
        (changed(**entries(*[-1.0] * 21)), "21 tokens instead of 1 to 20"),
        (changed(**entries(*[0.5] * 20)), "a log-prob above 0"),
        (changed(**entries(*[-1.0] * 20, first=41)), "log-probs of other tokens"),
        (changed(**entries(*[-1.0] * 20)), "tokens after a stop token"),
        (changed(**entries()), "0 tokens instead of 1 to 20"),
        (changed(token_ids=["x"] * 20), "no number"),
        (changed(logprobs=None), "TypeError"),
        (changed(**repeated(64)), "tokens outside of the vocabulary of 64"),
        (changed(**repeated(-1)), "tokens outside of the vocabulary of 64"),
        (changed(**repeated(2**70)), "tokens outside of the vocabulary of 64"),
        (changed(**repeated(math.inf)), "no number"),
        (changed(**repeated(True)), "no number"),
        (changed(**repeated("40")), "no number"),
        (lambda answer: {**answer, "model": "base"}, "of base instead of policy"),
        (lambda answer: {"choices": []}, "gave a wrong answer"),
        (lambda answer: [], "gave a wrong answer"),
    ],
)
def test_an_answer_that_cannot_be_right_ends_the_run(tmp_path: Path, change: Any, problem: str) -> None:
    fake = FakeVLLM()
    fake.after = change
    with Setting(tmp_path, fake) as setting:
        setting.sync()
        stops = (45,) if problem == "tokens after a stop token" else (EOS,)
        with pytest.raises(ValueError, match=problem):
            setting.sampled(PROMPTS[:1], PROMPT_IDS[:1], num_return_sequences=1, stop_token_ids=stops)


def test_tensors_that_do_not_reach_the_files_end_the_run(tmp_path: Path) -> None:
    first = dict[str, Tensor]()

    def stale(policy: Policy, name: str) -> Any:
        for key, tensor in weights_of(policy):
            yield key, first.setdefault(key, tensor.clone()) if key.endswith(name) else tensor

    for name in ("layers.0.self_attn.q_proj.weight", "lm_head.weight"):
        with Setting(tmp_path, FakeVLLM(dtype="torch.bfloat16"), vllm_dtype="bfloat16") as setting:
            policy = setting.policy
            setting.backend.sync(policy, lambda base=False, name=name, policy=policy: stale(policy, name))
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    # The fewest bits that bfloat16 has.
                    parameter.mul_(1.01)
            with pytest.raises(ValueError, match=rf"not the policy's: model\.{name}|not the policy's: {name}"):
                setting.backend.sync(policy, lambda base=False, name=name, policy=policy: stale(policy, name))
        first.clear()


def swapped(tensors: dict[str, Tensor], name: str) -> dict[str, dict[str, Tensor]]:
    """The same elements as in `tensors`, of which some of `name` have another place, by where they are."""
    tensor, half = tensors[name], len(tensors[name]) // 2
    other = next((key for key in tensors if key != name and tensors[key].shape == tensor.shape), name)
    return {
        "two elements": {name: tensor.flatten().index_select(0, exchange(tensor.numel())).view(tensor.shape)},
        "two halves, as of two ranks": {name: torch.cat((tensor[half:], tensor[:half]))},
        "rows and columns": {name: tensor.transpose(-1, -2).reshape(tensor.shape)},
        "two tensors": {name: tensors[other], other: tensor} if other != name else {name: tensor.flip(0)},
    }


def exchange(count: int) -> Tensor:
    index = torch.arange(count)
    index[3], index[-1] = count - 1, 3
    return index


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stale_or_misplaced_tensor_is_seen_under_whatever_name_it_is_written(
    tmp_path: Path, arch: str, dtype: torch.dtype
) -> None:
    policy = Policy(tiny_causal_lm(arch))
    own = whole_sums(weights.live_tensors(policy, adapter=False), dtype)
    tensors = weights.copied(weights_of(policy), dtype, keep=True)
    weights.write_model(tmp_path / "right", policy, tensors, dtype)
    weights.check_written(tmp_path / "right", own, tensors)
    names = [name for name in tensors if ".0." in name and tensors[name].dim() > 1] + ["lm_head.weight"]
    for name in set(names) & tensors.keys():
        changes = {"one bit": {name: tensors[name] * (1 + 2 * torch.finfo(dtype).eps)}, **swapped(tensors, name)}
        for number, change in enumerate(changes.values()):
            wrong, folder = {**tensors, **change}, tmp_path / f"{name}{number}"
            weights.write_model(folder, policy, wrong, dtype)
            with pytest.raises(ValueError, match="not the policy's"):
                weights.check_written(folder, own, wrong)


@pytest.mark.parametrize("arch", ["mixtral", "llama"])
def test_files_that_others_have_changed_end_the_run(tmp_path: Path, arch: str) -> None:
    policy = Policy(tiny_causal_lm(arch))
    own = whole_sums(weights.live_tensors(policy, adapter=False), torch.float32)
    tensors = weights.copied(weights_of(policy), torch.float32, keep=True)
    weights.write_model(tmp_path, policy, tensors, torch.float32)
    (file,) = tmp_path.glob("*.safetensors")
    written = load_file(file)
    (name, *_) = (name for name in written if "experts.0" in name or "down_proj" in name)
    for changed in ({**written, name: written[name] * 1.001}, {**written, "more": torch.ones(2)}):
        save_file(changed, str(file))
        with pytest.raises(ValueError, match="not the policy's"):
            weights.check_written(tmp_path, own, tensors)
    del written[name]
    save_file(written, str(file))
    with pytest.raises(ValueError, match="not the policy's"):
        weights.check_written(tmp_path, own, tensors)


class Forgets(FakeVLLM):
    """A server that does not do what it is asked for on the route `forgotten`, but says so."""

    forgotten = ""

    def respond(self, path: str, body: Any) -> Any:
        if path != self.forgotten:
            return super().respond(path, body)
        return {"success": True}


@pytest.mark.parametrize("keeps", ["all", "lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("before", ["a run of older weights", "the same norms", "the same weights"])
def test_a_server_that_ignores_the_first_weights_ends_the_run_whatever_it_held(
    tmp_path: Path, before: str, keeps: str
) -> None:
    fake = Forgets(dtype="torch.bfloat16")
    with Setting(tmp_path, fake, vllm_dtype="bfloat16") as setting:
        setting.sync()
        policy = setting.policy
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if before == "a run of older weights" or (before == "the same norms" and parameter.dim() > 1):
                    parameter.mul_(1.01)
    if keeps == "all":
        fake.forgotten = "/collective_rpc"
    fake.keeps = {keeps}
    with Setting(tmp_path, fake, vllm_dtype="bfloat16", policy=policy) as resumed:
        with pytest.raises(ValueError, match="holds other weights.*" + (keeps if keeps != "all" else "lm_head")):
            resumed.sync()
        # It is believed once it has loaded them.
        fake.forgotten, fake.keeps = "", set()
        resumed.sync()


def test_weights_that_a_server_holds_already_under_another_layout_or_as_zeros_are_accepted(tmp_path: Path) -> None:
    fake, zeros = FakeVLLM(), sha256(b"zeros").hexdigest()

    def stored(held: dict[str, str]) -> dict[str, str]:
        # As a head that is padded to a multiple of 64 rows, and the same parts of a tensor of zeros on each GPU.
        layouts = {
            "lm_head.weight": lambda digest: sha256(digest.encode()).hexdigest(),
            "model.norm.weight": lambda _: zeros,
        }
        return {name: layouts.get(name.rpartition(":")[2], str)(digest) for name, digest in held.items()}

    fake.stored, policy = stored, Policy(tiny_causal_lm("llama", **SMALLEST))
    torch.nn.init.zeros_(policy.model.model.norm.weight)
    for _ in range(2):
        with Setting(tmp_path, fake, policy=policy) as setting:
            setting.sync()
            setting.sync()
    with torch.no_grad():
        policy.head.weight.mul_(1.01)
    with Setting(tmp_path, fake, policy=policy) as setting:
        setting.sync()


def test_a_server_that_shows_no_weights_ends_the_run(tmp_path: Path) -> None:
    fake = FakeVLLM()
    fake.stored = lambda held: {}
    with Setting(tmp_path, fake) as setting, pytest.raises(ValueError, match="holds other weights.*none of them"):
        setting.sync()


@pytest.mark.parametrize(
    ("route", "problem"),
    [
        ("/collective_rpc", "holds other weights than the published ones .lm_head.weight, model.embed_tokens.weight"),
        ("/reset_prefix_cache", "answers from the prefix cache of older weights"),
    ],
)
def test_what_a_server_forgets_ends_the_run(tmp_path: Path, route: str, problem: str) -> None:
    fake = Forgets()
    with Setting(tmp_path, fake) as setting:
        setting.sync()
        fake.forgotten = route
        with torch.no_grad():
            for parameter in setting.policy.model.parameters():
                parameter.mul_(1 + 1e-6)
        with pytest.raises(ValueError, match=problem):
            setting.sync()
        # It is judged by what it holds, not by what it held when that was refused.
        fake.forgotten = ""
        setting.sync()


class Halves(Forgets):
    """Holds a part of each matrix on each of two GPUs, and whole norms on both."""

    def respond(self, path: str, body: Any) -> Any:
        answer, zeros = super().respond(path, body), sha256(b"zeros").hexdigest()
        if path != "/weight_checker":
            return answer
        parts = {}
        for name, digest in self.held.items():
            for rank in ("tp0", "tp1"):
                whole = "norm" in name or digest == zeros
                parts[name.replace("tp0", rank)] = digest if whole else sha256((digest + rank).encode()).hexdigest()
        return {"checksums": parts}


@pytest.mark.parametrize("keeps", ["all", "lm_head.weight", "model.embed_tokens.weight"])
def test_weights_in_parts_on_several_gpus_must_have_changed_with_the_files(tmp_path: Path, keeps: str) -> None:
    fake = Halves(dtype="torch.bfloat16")
    with Setting(tmp_path, fake, vllm_dtype="bfloat16") as setting:
        setting.sync()
        setting.sync()
        with torch.no_grad():
            for parameter in setting.policy.model.parameters():
                # Norms stay, as in bfloat16 at a small rate.
                if parameter.dim() > 1:
                    parameter.mul_(1.01)
        if keeps == "all":
            fake.forgotten = "/collective_rpc"
        fake.keeps = {keeps}
        with pytest.raises(ValueError, match="holds other weights.*" + (keeps if keeps != "all" else "lm_head")):
            setting.sync()


def adapted() -> Policy:
    peft = get_peft_model(tiny_causal_lm("llama", **SMALLEST), LoraConfig(r=2, target_modules=["q_proj"]))
    adapters = from_peft_model(peft)
    return Policy(adapters.model, adapters)


def test_with_an_adapter_a_server_that_was_started_again_by_somebody_ends_the_run(tmp_path: Path) -> None:
    fake = FakeVLLM()
    with Setting(tmp_path, fake, policy=adapted()) as setting:
        setting.sync()
        setting.sync()
        fake.loaded, fake.weights = "another base", "default"
        fake.adapters.clear()
        with pytest.raises(ValueError, match=r"the vLLM server at http://\S+ has weights default instead of \S+-1"):
            setting.sync()


def test_a_stale_or_unused_adapter_ends_the_run(tmp_path: Path) -> None:
    fake = Forgets()
    with Setting(tmp_path, fake, policy=adapted()) as setting:
        setting.sync()
        fake.forgotten = "/v1/load_lora_adapter"
        setting.sync()
        with pytest.raises(ValueError, match=r"no '\S+-1'|HTTP status 404"):
            setting.sampled()
    policy = adapted()
    old = {name: tensor.clone() for name, tensor in weights_of(policy)}
    with Setting(tmp_path, FakeVLLM(), policy=policy) as setting:
        setting.sync()
        with torch.no_grad():
            setting.policy.adapters.parameters_of("default")[1].add_(1e-6)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"not the policy's: base_model\.\S+lora_B"):
            setting.backend.sync(policy, lambda base=False: weights_of(policy, base=True) if base else old.items())


def test_logits_that_are_not_finite_are_said_to_be(tmp_path: Path) -> None:
    fake = FakeVLLM(answer=lambda loaded, tokens, params: [(40, -9999.0)] * params["max_tokens"])
    with Setting(tmp_path, fake) as setting:
        setting.sync()
        with pytest.raises(ValueError, match="logits of row 0 are not finite at response position 0"):
            setting.sampled(PROMPTS[:1], PROMPT_IDS[:1], num_return_sequences=1)


def test_a_request_that_is_dropped_or_aborted_is_made_again_for_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "RETRY_DELAYS", (0.0, 0.0, 0.0))
    fake, other = FakeVLLM(), FakeVLLM()
    dropped = dict[int, int]()
    # What an engine sends that gets SIGTERM.
    aborted = b'{"model": "policy", "choices": [{"finish_reason": "abort", "token_ids": [], "weight_versions": null}]}'
    header = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    instead = {1: b"", 2: header % 100 + b"{", 3: header % len(aborted) + aborted}

    def drop(path: str, body: Any) -> Any:
        if path.endswith("generate"):
            seed = body["sampling_params"]["seed"]
            dropped[seed] = dropped.get(seed, 0) + 1
            return instead.get(dropped[seed])
        return None

    fake.before = drop
    with Setting(tmp_path, fake) as setting, Setting(tmp_path, other) as undisturbed:
        setting.sync()
        undisturbed.sync()
        assert torch.equal(setting.sampled().responses, undisturbed.sampled().responses)
        assert set(dropped.values()) == {4}
        fake.before = lambda path, body: b""
        with pytest.raises(ValueError, match=r"127\.0\.0\.1.* could not be asked"):
            setting.sampled()


def test_a_request_that_takes_too_long_ends_the_run_or_goes_to_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "RETRY_DELAYS", (0.0, 0.0, 0.0))
    # Few at a time, so that most begin after the first has failed.
    monkeypatch.setattr(sampling, "_MOST_REQUESTS", 2)
    monkeypatch.setattr("alpaca_ppo.generation.vllm.server.CALL_SHARE", 900)
    hung, well, released = FakeVLLM(), FakeVLLM(), threading.Event()
    hung.before = lambda path, body: released.wait(600) and None if path.endswith("generate") else None
    timeout = 5
    with (
        Setting(tmp_path, hung, ddp_timeout=timeout) as setting,
        Setting(tmp_path, hung, well, ddp_timeout=timeout) as both,
    ):
        setting.sync()
        # Two fifths of it.
        with pytest.raises(ValueError, match=r"the vLLM server at http://\S+ did not answer within 2 s"):
            setting.sampled(PROMPTS[:1], PROMPT_IDS[:1], num_return_sequences=1)
        count = [path for path, _ in hung.asked].count("/inference/v1/generate")
        assert count <= 1
        # It is not asked again, nor given later weights.
        both.sync()
        with pytest.warns(UserWarning, match="did not answer within 2 s; the run goes on without it") as warned:
            both.sampled()
        assert len(warned) == 1
        asked = len(hung.asked)
        both.sampled()
        both.sync()
        both.sampled()
        assert len(hung.asked) == asked
        released.set()


@pytest.mark.parametrize(
    "route", ["/version", "/server_info", "/weight_checker", "/collective_rpc", "/v1/load_lora_adapter", "/metrics"]
)
def test_a_server_that_hangs_while_it_is_checked_or_loads_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr("alpaca_ppo.generation.vllm.server.CALL_SHARE", 1.0)
    released = threading.Event()

    class Hangs(FakeVLLM):
        def respond(self, path: str, body: Any) -> Any:
            if path.partition("?")[0] == route:
                released.wait(600)
            return super().respond(path, body)

    peft = get_peft_model(tiny_causal_lm("llama", **SMALLEST), LoraConfig(r=2, target_modules=["q_proj"]))
    adapters = from_peft_model(peft)
    with Setting(tmp_path, Hangs(), policy=Policy(adapters.model, adapters), ddp_timeout=2) as setting:
        with pytest.raises(ValueError, match=r"the vLLM server at http://127\.0\.0\.1\S+ did not answer within 2 s"):
            setting.sync()
        released.set()


def test_a_signal_gives_up_what_is_being_sampled(tmp_path: Path) -> None:
    fake, released, arrived = FakeVLLM(), threading.Event(), threading.Semaphore(0)

    def hold(path: str, body: Any) -> None:
        arrived.release()
        released.wait(60)

    def before_token() -> None:
        if arrived.acquire(timeout=0.01):
            raise KeyboardInterrupt

    with Setting(tmp_path, fake) as setting:
        setting.sync()
        fake.before = hold
        with pytest.raises(KeyboardInterrupt):
            setting.sampled(hooks=SamplingHooks(before_token=before_token))
        released.set()


@pytest.mark.parametrize("route", ["/version", "/server_info", "/collective_rpc"])
def test_a_signal_ends_the_wait_for_a_server_that_is_checked(tmp_path: Path, route: str) -> None:
    fake, released = FakeVLLM(), threading.Event()
    arrived = threading.Event()

    def hold(path: str, body: Any) -> None:
        if path.startswith(route):
            arrived.set()
            released.wait(60)

    def poll() -> None:
        if arrived.is_set():
            raise SamplingStopped

    fake.before = hold
    with Setting(tmp_path, fake) as setting:
        setting.backend.poll = poll
        with pytest.raises(SamplingStopped):
            setting.sync()
        released.set()


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"version": "0.33.1"}, r"is vLLM 0\.33\.1; 0\.32\.x is needed"),
        ({"without": ["/collective_rpc"]}, "VLLM_SERVER_DEV_MODE=1"),
        ({"without": ["/inference/v1/generate"]}, "--enable-scale-out"),
        ({"config": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode processed_logprobs"),
        ({"working": 1}, "still works for somebody"),
        ({"without": ["/update_weight_version"]}, "HTTP status 404"),
        ({"sees": False}, r"127\.0\.0\.1.* does not see /dev/shm/.*same path"),
        ({"counts": False}, "was started with --disable-log-stats; leave that out"),
        ({"resets": False}, r"127\.0\.0\.1.* gave a wrong answer: .*success"),
        ({"hits": math.nan}, r"127\.0\.0\.1.* gave a wrong answer: .*hits_total is nan"),
        ({"config": {"max_model_len": "abc"}}, r"127\.0\.0\.1.* gave a wrong answer: .*max_model_len is 'abc'"),
        (
            {"config": {"dtype": "torch.bfloat16"}},
            r"127\.0\.0\.1.* in torch\.bfloat16, .* in torch\.float32; set vllm_dtype",
        ),
    ],
)
def test_a_server_that_cannot_serve_a_run_is_refused_by_name(
    tmp_path: Path, broken: dict[str, Any], problem: str
) -> None:
    fake = FakeVLLM(**broken.get("config", {}))
    fake.version, fake.working = broken.get("version", "0.32.0"), broken.get("working", 0)
    fake.routes = [route for route in fake.routes if route not in broken.get("without", ())]
    fake.hits = broken.get("hits", 0)
    fake.sees, fake.counts, fake.resets = (broken.get(name, True) for name in ("sees", "counts", "resets"))
    with Setting(tmp_path, fake) as setting, pytest.raises(ValueError, match=problem):
        setting.sync()


def test_a_server_on_another_machine_reads_in_output_dir_and_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    # An address that is not known for this machine's.
    fake, blind = FakeVLLM(), FakeVLLM()
    with Setting(tmp_path / "seen", fake, host="127.0.0.2") as setting:
        setting.sync()
        assert fake.published[0]["kwargs"]["weights_path"].startswith(str(tmp_path / "seen"))
    blind.sees = False
    with Setting(tmp_path / "unseen", blind, host="127.0.0.2") as setting:
        with pytest.raises(ValueError, match=rf"127\.0\.0\.2.* does not see {tmp_path}/unseen/"):
            setting.sync()
    assert not blind.published and not list((tmp_path / "unseen").glob("*/*/config.json"))


def test_half_precision_and_the_longest_row_are_the_server_s(tmp_path: Path) -> None:
    fake = FakeVLLM(dtype="torch.bfloat16", max_model_len=26)
    with Setting(tmp_path, fake, vllm_dtype="bfloat16") as setting:
        assert not setting.backend.half_precision
        setting.sync()
        assert setting.backend.half_precision
        setting.sampled(PROMPTS[1:], PROMPT_IDS[1:])
        with pytest.raises(ValueError, match="up to 27 tokens, but the vLLM server takes 26.*--max-model-len"):
            setting.sampled()


def test_weights_are_written_in_the_server_s_dtype(tmp_path: Path) -> None:
    fake = FakeVLLM(dtype="torch.bfloat16")
    with Setting(tmp_path, fake, vllm_dtype="bfloat16") as setting:
        setting.sync()
        folder = fake.published[0]["kwargs"]["weights_path"]
        assert {tensor.dtype for tensor in load_file(f"{folder}/model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(("arch", "tied"), [("llama", False), ("gemma2", True)])
def test_a_head_that_is_tied_is_written_too_where_vllm_has_one(tmp_path: Path, arch: str, tied: bool) -> None:
    policy = Policy(tiny_causal_lm(arch, **SMALLEST, tie_word_embeddings=True))
    fake = FakeVLLM()
    with Setting(tmp_path, fake, policy=policy) as setting:
        setting.sync()
        folder = fake.published[0]["kwargs"]["weights_path"]
        written = load_file(f"{folder}/model.safetensors")
        assert AutoConfig.from_pretrained(folder).tie_word_embeddings == tied
        assert ("lm_head.weight" in written) != tied
        assert torch.equal(written["model.embed_tokens.weight"], policy.head.weight)
        assert tied or torch.equal(written["lm_head.weight"], policy.head.weight)


class OwnLogits(Policy):
    def outputs_from_states(self, *positional: Any, **named: Any) -> Any:
        return super().outputs_from_states(*positional, **named)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "OwnLogits has an outputs_from_states of its own"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    ],
)
def test_what_vllm_cannot_compute_is_refused_by_name(tmp_path: Path, config: Any, problem: str) -> None:
    model = tiny_causal_lm("llama", **SMALLEST)
    if config is None:
        policy: Policy = OwnLogits(model)
    else:
        adapters = from_peft_model(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **config)))
        policy = Policy(adapters.model, adapters)
    with Setting(tmp_path, FakeVLLM(), policy=policy) as setting, pytest.raises(ValueError, match=problem):
        setting.sync()


def test_too_little_room_for_two_versions_is_said_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: type("Usage", (), {"free": 1000})())
    with Setting(tmp_path, FakeVLLM()) as setting:
        size = sum(p.numel() for p in setting.policy.model.parameters()) * 4
        with pytest.raises(ValueError, match=f"{2 * size} bytes.*1000 in /dev/shm.*--shm-size"):
            setting.sync()


def test_the_options_name_a_server_or_a_way_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vllm_python and vllm_urls are null"):
        make_backend("vllm", tiny_config(tmp_path, generation_backend="vllm"))
    with pytest.raises(ValueError, match="load_in_4bit is True"):
        four_bits: dict[str, Any] = {"load_in_4bit": True, "critic_layout": "shared", "vllm_python": "python"}
        tiny_config(tmp_path, generation_backend="vllm", **four_bits)
    with pytest.raises(ValueError, match="vllm_urls holds 'localhost:8000', no address"):
        make_backend("vllm", tiny_config(tmp_path, generation_backend="vllm", vllm_urls=["localhost:8000"]))
    with pytest.raises(ValueError, match="needs the options of a run"):
        make_backend("vllm")


@pytest.mark.parametrize(
    "word",
    """--port=3 --no-enable-scale-out --no-skip-tokenizer-init --no-enable-lora --max-cpu-loras=1 --max_cpu_loras
    --no_enforce_eager --no-enf --enable-chunked-prefill --enable-chunked --api-key --ssl-keyfile --ssl_certfile=x --ssl
    --root-path --data-parallel-rank --data-parallel-backend=ray --data_parallel_address --data-parallel.x --nnodes
    --node-rank=1 --master-addr --tensor --device-memory-utilization=1 --grpc --grpc-port -n -n2 -n=2 -r -tp -t -tp=2
    -tp2 -pp -dp -dpn -dcp -pcp -asc -h --served_model_name --gpu_memory_utilization=0.5 --config""".split(),
)
def test_words_of_a_server_s_command_that_the_run_sets_itself_are_refused(tmp_path: Path, word: str) -> None:
    options: dict[str, Any] = {"vllm_python": "/none", "vllm_args": ["--max-num-seqs", "8", word]}
    with pytest.raises(ValueError, match=f"vllm_args has {word!r}, which the run sets itself; leave it out"):
        make_backend("vllm", tiny_config(tmp_path, generation_backend="vllm", **options))


def test_other_words_of_a_server_s_command_are_taken(tmp_path: Path) -> None:
    words = """--max-num-seqs 8 --max_model_len=99 --enforce-eager --no-enable-chunked-prefill --quantization fp8 -q fp8
    -q=fp8 -O3 -O 2 -cc={} -cc.mode=3 -ac {} --seed -1 --model-impl=transformers --config-format hf --max-loras=2
    --attention-backend X --enable-prefix-caching --no-enable-prefix-caching --lora-dtype=auto -sc {}""".split()
    # The first thing that is wrong is the interpreter.
    with pytest.raises(ValueError, match="vllm_python is '/none', which cannot be run"):
        options: dict[str, Any] = {"vllm_python": "/none", "vllm_args": words}
        make_backend("vllm", tiny_config(tmp_path, generation_backend="vllm", **options))


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.proof), True])
def test_a_run_with_evaluations_redrawn_prompts_and_turns_repeats_and_resumes(tmp_path: Path, lora: bool) -> None:
    options: dict[str, Any] = {
        # The stand-in's log-probs are no policy's.
        "mismatch_action": "ignore",
        "generation_backend": "vllm",
        "num_return_sequences": 2,
        "dynamic_sampling": 1,
        "eval_steps": 1,
        "save_steps": 1,
        "max_turn_tokens": 2,
    }
    given: dict[str, Any] = {"eval_dataset": prompts(3), "environment_factory": Talker, "reward_funcs": None}
    if lora:
        given["peft_config"] = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        options["critic_layout"] = "adapter"
    fake = FakeVLLM()
    with ServedInThread(fake) as url:
        for name, episodes in (("whole", 30), ("again", 30), ("parts", 10), ("parts", 30)):
            trainer = tiny_trainer(
                tmp_path / name, trainer_arguments=dict(given), vllm_urls=[url], total_episodes=episodes, **options
            )
            trainer.train(resume_from_checkpoint=True if (tmp_path / name / "metrics.jsonl").exists() else None)
        loads = list(fake.published)
        answers = trainer.generate("w5", num_return_sequences=3)
        assert answers == trainer.generate("w5", num_return_sequences=3) and len(set(answers[0])) == 3
    whole, again, parts = (metric_lines(tmp_path / name) for name in ("whole", "again", "parts"))
    assert whole == again == parts and len(whole) == 4
    # Each of the four runs publishes at its start, and after each step for the next or the last evaluation.
    assert len(loads) == (4 if lora else 0) + 4 + 3 + 3 + 1 + 2
