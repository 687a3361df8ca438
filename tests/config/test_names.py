"""Names of folders and models that do not exist are refused with what is there, and the hub is asked once at most."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from alpaca_ppo.cli.commands import main
from alpaca_ppo.config.names import check_folder, check_model_name, leads_to_this_machine, model_folder, path_problem
from tests.http_servers import RawServer, response


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """The current folder, which has the folders outputs/ppo and outputs/sft and the files train.py and notes.txt."""
    for name in ("ppo", "sft", ".cache"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
    for name in ("train.py", "notes.txt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["outputs/ppo", "gpt2", "org/model", "Qwen/Qwen2.5-0.5B", None, "outputs"])
def test_folders_and_possible_hub_ids_are_accepted(outputs, name):
    check_model_name("model", name)


def test_of_a_run_the_final_policy_is_taken_and_a_classifier_is_no_policy(outputs, capsys):
    policy = outputs / "outputs/ppo/final/policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert model_folder("model", "outputs/ppo") == "outputs/ppo/final/policy"
    assert capsys.readouterr().err == "model is 'outputs/ppo', a run, whose final/policy is taken\n"
    assert model_folder("model", str(policy)) == str(policy)
    assert model_folder("model", "org/model") == "org/model"
    with pytest.raises(ValueError, match="model is 'outputs/sft', a folder without a model"):
        model_folder("model", "outputs/sft")
    (policy / "config.json").write_text('{"architectures": ["GPT2ForSequenceClassification"]}')
    with pytest.raises(ValueError, match="m is 'outputs/ppo', a GPT2ForSequenceClassification, which writes no text"):
        model_folder("m", "outputs/ppo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("outputs/ppoo", "m is 'outputs/ppoo', but there is no such folder (relative paths count from {}); did you "
         "mean outputs/ppo? (for one on the hub, start from another folder)"),
        ("outputss", "m is 'outputss', but there is no such folder (relative paths count from {}); did you mean "
         "outputs? (for one on the hub, start from another folder)"),
        ("outputs/reward", "m is 'outputs/reward', but there is no such folder (relative paths count from {}) "
         "(for one on the hub, start from another folder)"),
        ("./outputt", "m is './outputt', neither a folder nor a hub id (name or owner/name): there is no such "
         "folder (relative paths count from {}); did you mean outputs?"),
        ("/none/run", "m is '/none/run', neither a folder nor a hub id (name or owner/name): there is no such "
         "folder"),
        ("./train.py", "m is './train.py', neither a folder nor a hub id (name or owner/name): it is a file, "
         "not a folder"),
    ],
)  # fmt: skip
def test_other_names_are_refused_with_what_is_there(outputs, name, message):
    with pytest.raises(ValueError) as caught:
        check_model_name("m", name)
    assert str(caught.value) == message.format(outputs)


LOST = "m is 'gpt2', but there is no such folder (relative paths count from {}), and the hub "


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", LOST + "cannot be asked ("),
        (response(b"", status="404 x", headers="X-Error-Code: RepoNotFound\r\n"), LOST + "has no model of that name;"),
        # An adapter has no config.json, and a hub that is too busy is left to the libraries.
        (response(b"", status="404 x", headers="X-Error-Code: EntryNotFound\r\n"), "gpt2\n"),
        (response(b"", status="503 x"), "gpt2\n"),
        (response(b"", status="403 x", headers="X-Error-Code: GatedRepo\r\n"), "gpt2\n"),
    ],
)
def test_a_name_without_an_owner_is_asked_for_once(answer, said, tmp_path):
    code = "from alpaca_ppo.config.names import model_folder\n"
    code += "try:\n    print(model_folder('m', 'gpt2'))\nexcept ValueError as e:\n    print(e)"
    with RawServer(lambda request: answer) as server:
        hub = {"HF_ENDPOINT": f"http://{server.address}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        environment = {**os.environ, **hub, "no_proxy": "*"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    assert done.stdout.startswith(said.format(tmp_path)) and len(done.stdout.splitlines()) == 1
    asked = [request.path for request in server.requests if "gpt2" in request.path]
    assert asked == ["/gpt2/resolve/main/config.json"]


def own_addresses():
    for addresses in psutil.net_if_addrs().values():
        yield from (each.address for each in addresses if each.family in (socket.AF_INET, socket.AF_INET6))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[(host, True) for host in ("localhost", "LOCALHOST", "localhost.", "app.localhost", "localhost.localdomain")],
        *[(host, True) for host in ("ip6-localhost", "localhost6", "127.0.0.1", "127.0.1.1", "127.1", "2130706433")],
        *[(host, True) for host in ("0x7f.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1", socket.gethostname())],
        *[(address, True) for address in own_addresses()],
        *[(host, False) for host in ("10.255.0.1", "example.invalid", "localhost.example.invalid", "2001:db8::1")],
        *[(host, False) for host in ("localhosts", "notlocalhost", "a" * 70, "")],
    ],
)
def test_this_machine_is_known_by_all_its_names_and_addresses(host, expected):
    assert leads_to_this_machine(host) is expected


def test_a_model_in_the_cache_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="m is 'gpt2', but .* the hub cannot be asked"):
        model_folder("m", "gpt2")
    # No name of the hub.
    with pytest.raises(ValueError, match="m is 'my--model', but there is no such folder .* the hub cannot be asked"):
        model_folder("m", "my--model")
    snapshot = tmp_path / "models--gpt2/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").touch()
    (tmp_path / "models--gpt2/refs").mkdir()
    (tmp_path / "models--gpt2/refs/main").write_text("abc")
    assert model_folder("m", "gpt2") == "gpt2"


def test_a_folder_that_must_exist_and_a_file_have_neighbours_too(outputs):
    assert check_folder("the run", "outputs/ppo").is_dir()
    with pytest.raises(ValueError, match="^the run is 'org/run', but there is no such folder"):
        check_folder("the run", "org/run")
    assert path_problem("trainn.py", what="file").endswith("; did you mean train.py?")
    assert path_problem("outputs", what="file") == " it is a folder, not a file"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sample", "outputs/ppoo", "--prompt", "x"], "error: model is 'outputs/ppoo', but there is no such folder"),
        (
            ["sft", "--model", "outputss", "--dataset_name", "d"],
            "error: model_name_or_path is 'outputss', but there is no such folder",
        ),
        (
            ["sample", "org/m", "--prompt", "x", "--reference", "outputs/sfft"],
            "error: --reference is 'outputs/sfft', but there is no",
        ),
        (["evaluate", "--model", "outputs/ppoo"], "error: model is 'outputs/ppoo', but there is no such folder"),
        (["export", "outputs/ppoo", "--to", "x"], "error: the checkpoint is 'outputs/ppoo', but there is no such"),
        (["report", "outputs/ppoo"], "error: the run is 'outputs/ppoo', but there is no such folder"),
        (["migrate", "trainn.py"], "error: trainn.py: give a script or a YAML file; there is no such file"),
    ],
)
def test_every_command_says_which_folder_is_not_there(outputs, capsys, argv, message):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and "did you mean " in error


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (["sample", "gpt2", "--prompt", "x"], "model"),
        (["evaluate", "--model", "gpt2"], "model"),
        (["sft", "--model", "gpt2", "--dataset_name", "d"], "model_name_or_path"),
        (["reward", "--model", "gpt2", "--dataset_name", "d"], "model_name_or_path"),
        (["train", "--model", "gpt2", "--dataset_name", "d", "--reward_funcs", "a:b"], "model_name_or_path"),
        (["estimate-memory", "--model", "gpt2"], "model_name_or_path"),
    ],
)
def test_every_command_says_at_once_that_the_hub_does_not_answer(outputs, capsys, argv, field):
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"error: {field} is 'gpt2', but there is no such folder")
