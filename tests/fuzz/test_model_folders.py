"""Saved models: a damaged folder of a policy, critic, adapter or reward model is refused by its name."""

import json
import shutil
import struct
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import load, load_file, save_file
from transformers import AutoModelForCausalLM

from alpaca_ppo.adapters.adapter_set import AdapterSet, load_adapters
from alpaca_ppo.adapters.files import check_adapter_shapes, read_policy_adapter, read_reward_adapter
from alpaca_ppo.estimate_memory.fake_models import without_weights
from alpaca_ppo.models import build_actor_critic, load_critic, write_critic
from alpaca_ppo.models.critic_heads import C51Head
from alpaca_ppo.models.loading import load_causal_lm, load_processing_class, load_sequence_classifier
from alpaca_ppo.rewards.reward_model import build_model_reward
from tests.fuzz.mutations import mutated_bytes, mutated_tree, texts
from tests.fuzz.oracle import Refused, changed, files_unchanged, fuzz, outcome
from tests.tiny_models import SMALLEST, tiny_causal_lm, tiny_sequence_classifier, tiny_tokenizer

attempt = partial(outcome, may_warn=True)
"""`outcome`, with warnings of transformers and PEFT about what they read."""
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind by its name."""
    root = tmp_path_factory.mktemp("folders")
    tiny_causal_lm("llama", **SMALLEST).save_pretrained(root / "policy")
    tiny_sequence_classifier("llama", **SMALLEST).save_pretrained(root / "reward")
    for name in ("policy", "reward"):
        tiny_tokenizer().save_pretrained(root / name)
    base = load_causal_lm(str(root / "policy"))
    head = partial(C51Head, num_atoms=3, v_min=-1.0, v_max=1.0)
    (root / "critic").mkdir()
    write_critic(root / "critic", build_actor_critic(base, critic_layout="shared", head=head))
    peft = get_peft_model(base, LoraConfig(task_type=TaskType.CAUSAL_LM, **LORA))
    peft.save_pretrained(root / "adapter")
    (root / "critic_adapter").mkdir()
    write_critic(root / "critic_adapter", build_actor_critic(AdapterSet(peft), critic_layout="shared", head=head))
    shutil.copytree(root / "adapter", root / "reward_adapter")
    weights = load_file(root / "adapter" / "adapter_model.safetensors")
    weights["base_model.model.score.weight"] = torch.ones(1, 8)
    save_file(weights, root / "reward_adapter" / "adapter_model.safetensors")
    return {path.name: path for path in root.iterdir()}


def load_reward_model(folder: str) -> Any:
    return build_model_reward(
        folder, None, batch_size=2, dtype=torch.float32, trust_remote_code=False, padding_free=True
    )


@lru_cache(maxsize=1)
def base() -> Any:
    return tiny_causal_lm("llama", **SMALLEST)


def check_reward_adapter_on_base(folder: str) -> None:
    read_reward_adapter(folder)
    check_adapter_shapes("reward_adapter", folder, base())


def check_policy_adapter(folder: str) -> None:
    read_policy_adapter(folder)
    check_adapter_shapes("model_name_or_path", folder, base())


LOADS: dict[str, tuple[Any, ...]] = {
    "policy": (load_causal_lm, load_processing_class),
    "reward": (load_sequence_classifier, load_reward_model),
    "critic": (load_critic,),
    "critic_adapter": (load_critic,),
    "adapter": (check_policy_adapter,),
    "reward_adapter": (check_reward_adapter_on_base,),
}


def flat(content: bytes) -> bytes:
    """The tensors of a file with one axis each."""
    return safetensors_of({name: tensor.flatten() for name, tensor in load(content).items()})


def flat_head(content: bytes) -> bytes:
    """A head without axes."""
    return safetensors_of({name: tensor.sum() if "score" in name else tensor for name, tensor in load(content).items()})


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def entries(**new: Any) -> Any:
    """Other entries of a JSON object; None removes one."""

    def change(content: bytes) -> bytes:
        kept = {name: value for name, value in {**json.loads(content), **new}.items() if value is not None}
        return json.dumps(kept).encode()

    return change


DAMAGES = [
    ("critic", "critic_head.json", lambda content: b"{}", "no critic can be loaded from"),
    ("critic", "critic_head.json", cut, "critic_head.json is damaged ("),
    ("critic", "critic_head.json", entries(hidden_size="8"), "no critic 'c51' can be loaded from"),
    ("critic", "critic_head.json", entries(kind=[]), "a critic [], which is not registered"),
    ("critic", "critic_head.json", entries(num_atoms=5), "can be loaded from"),
    ("critic", "critic_head.safetensors", cut, "critic_head.safetensors is damaged ("),
    ("critic", "critic_head.safetensors", lambda content: None, "can be loaded from"),
    ("critic", "config.json", lambda content: None, "no model can be loaded from"),
    ("critic_adapter", "adapter_config.json", cut, "adapter_config.json is damaged"),
    ("critic_adapter", "adapter_config.json", entries(base_model_name_or_path=None), "is an adapter without its base"),
    ("critic_adapter", "adapter_config.json", entries(alora_invocation_tokens=[1]), "has alora_invocation_tokens [1]"),
    ("critic_adapter", "adapter_model.safetensors", cut, "adapter_model.safetensors is damaged"),
    ("policy", "config.json", cut, "config.json is damaged"),
    ("policy", "config.json", entries(hidden_size=16), "model_name_or_path"),
    ("policy", "model.safetensors", cut, "model.safetensors is damaged"),
    ("policy", "tokenizer.json", cut, "tokenizer.json is damaged"),
    ("adapter", "adapter_config.json", cut, "adapter_config.json is damaged"),
    ("adapter", "adapter_config.json", entries(modules_to_save=5), "has modules_to_save 5 in its adapter_config.json"),
    ("adapter", "adapter_config.json", entries(r="2"), "has r '2' in its adapter_config.json"),
    ("adapter", "adapter_config.json", entries(base_model_name_or_path=[1]), "base_model_name_or_path [1]"),
    ("reward_adapter", "adapter_model.safetensors", cut, "adapter_model.safetensors is damaged"),
    ("adapter", "adapter_model.safetensors", flat, "but the layer needs"),
    ("reward_adapter", "adapter_model.safetensors", flat_head, "has no score head with one label"),
]


@pytest.mark.parametrize(("kind", "name", "change", "said"), DAMAGES)
def test_each_kind_of_damage_is_described(folders, kind, name, change, said):
    folder = folders[kind]
    with changed(folder / name, change((folder / name).read_bytes())):
        found = [attempt(lambda call=call: call(str(folder)), names=(str(folder),)) for call in LOADS[kind]]
    refused = [error.text for error in found if isinstance(error, Refused)]
    assert any(said in text for text in refused), found


def test_intact_folders_are_loaded(folders):
    for kind, calls in LOADS.items():
        for call in calls:
            assert not isinstance(attempt(lambda call=call, kind=kind: call(str(folders[kind]))), Refused)


def policy_adapter(folders: Any) -> Any:
    return load_adapters(load_causal_lm(str(folders["policy"])), str(folders["adapter"]))


def test_an_adapter_is_loaded_whole_or_refused(folders):
    folder, stored = folders["adapter"], load_file(folders["adapter"] / "adapter_model.safetensors")
    assert policy_adapter(folders).parameters_of("default")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    less = safetensors_of({name: tensor for name, tensor in stored.items() if "q_proj.lora_A" not in name})
    for path, content, said in (
        (weights, cut(weights.read_bytes()), "adapter_model.safetensors is damaged"),
        (weights, less, "q_proj.lora_A"),
        (config, entries(layers_to_transform="x")(config.read_bytes()), "no adapter can be loaded from"),
    ):
        with changed(path, content):
            assert said in attempt(lambda: policy_adapter(folders), names=(str(folder),)).text


def test_what_reads_only_configurations_reads_no_damaged_ones(folders):
    path = folders["policy"] / "config.json"

    def read(kind: str) -> Any:
        folder = str(folders[kind])
        return attempt(lambda: without_weights(AutoModelForCausalLM, folder, trust_remote_code=False), names=(folder,))

    assert not isinstance(read("policy"), Refused)
    for content in (b"[]", b"{", entries(hidden_size="x")(path.read_bytes())):
        with changed(path, content):
            assert isinstance(read("policy"), Refused)
    with changed(folders["adapter"] / "adapter_config.json", b"[]"):
        assert isinstance(read("adapter"), Refused)


def safetensors_of(tensors: dict[str, torch.Tensor]) -> bytes:
    """The file of these float32 tensors, written by its specification."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        part = tensor.detach().contiguous().numpy().tobytes()
        offsets = [len(data), len(data) + len(part)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += part
    header["__metadata__"] = {"format": "pt"}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


FILES = {
    "policy": "config.json tokenizer.json tokenizer_config.json model.safetensors",
    "reward": "config.json model.safetensors",
    "critic": "config.json critic_head.json model.safetensors critic_head.safetensors",
    "critic_adapter": "adapter_config.json adapter_model.safetensors critic_head.safetensors",
    "adapter": "adapter_config.json adapter_model.safetensors",
    "reward_adapter": "adapter_config.json adapter_model.safetensors",
}
JSON_FILES, WEIGHT_FILES = (
    [(kind, name) for kind, names in FILES.items() for name in names.split() if name.endswith(ending)]
    for ending in (".json", ".safetensors")
)
CHECKED_ON_LOADING = {"adapter", "reward_adapter"}
"""Kinds of which only shapes are read here; weights that are missing are found when the adapter is loaded."""
# No huge numbers, for which a library may build a model of that size.
VALUES = st.none() | st.sampled_from([0, 1, -1, 2, 7, True, 0.5, -1.5, 1e308, float("nan"), [], {}, [1], {"k": 1}])
VALUES |= texts


def check(folders: Any, kind: str, name: str, content: bytes | None) -> list[Any]:
    """What the loading functions make of a folder with this file: each names folder or file, if it refuses it."""
    folder = folders[kind]
    with changed(folder / name, content), files_unchanged(folder):
        return [attempt(lambda call=call: call(str(folder)), names=(str(folder),)) for call in LOADS[kind]]


@fuzz(140, file=st.sampled_from(JSON_FILES), data=st.data())
def test_a_mutated_description_is_accepted_or_refused_by_name(folders, file, data):
    kind, name = file
    content = (folders[kind] / name).read_bytes()
    tree = json.loads(content)
    mutated = data.draw(mutated_tree(tree, values=VALUES).map(lambda tree: json.dumps(tree).encode()))
    found = check(folders, kind, name, mutated)
    if name == "critic_head.json" and not isinstance(found[0], Refused):
        # Accepted settings are those of a head that gives numbers.
        assert found[0].head(torch.ones(2, 8)).values.isfinite().all()


@fuzz(120, file=st.sampled_from(WEIGHT_FILES), data=st.data())
def test_damaged_weights_are_read_as_they_are_or_refused_by_name(folders, file, data):
    kind, name = file
    path = folders[kind] / name
    tensors, content = load_file(path), path.read_bytes()
    change = data.draw(st.sampled_from(["bytes", "drop", "shape", "rename", "value", "empty"]))
    victim = data.draw(st.sampled_from(sorted(tensors)))
    if change == "bytes":
        content = data.draw(mutated_bytes(content))
    elif change == "empty":
        content = b""
    else:
        tensor = tensors.pop(victim)
        new = {"shape": (victim, torch.ones(tensor.numel() + 1)), "rename": (f"{victim}s", tensor)}
        new |= {"value": (victim, tensor + 1)}
        tensors |= dict([new[change]]) if change in new else {}
        content = safetensors_of(tensors)
    found = check(folders, kind, name, content)[0]
    if change in ("empty", "shape") or (change in ("drop", "rename") and kind not in CHECKED_ON_LOADING):
        assert isinstance(found, Refused)
    elif kind in ("policy", "reward") and not isinstance(found, Refused):
        stored = load(content)
        for key, tensor in found.state_dict().items():
            assert torch.equal(tensor.nan_to_num(), stored[key].to(tensor.dtype).nan_to_num()), key
