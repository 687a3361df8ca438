"""Names of folders and models that do not exist are refused with what is there, and nothing is asked of the hub."""

import pytest

from alpaca_ppo.cli.commands import main
from alpaca_ppo.config.names import check_folder, check_model_name, model_folder, where


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
         "mean outputs/ppo? (for a model of that name on the hub, start from another folder)"),
        ("outputss", "m is 'outputss', but there is no such folder (relative paths count from {}); did you mean "
         "outputs? (for a model of that name on the hub, start from another folder)"),
        ("outputs/reward", "m is 'outputs/reward', but there is no such folder (relative paths count from {}) "
         "(for a model of that name on the hub, start from another folder)"),
        ("./outputt", "m is './outputt', which is neither a folder nor a hub id (name or owner/name): there is no such "
         "folder (relative paths count from {}); did you mean outputs?"),
        ("/none/run", "m is '/none/run', which is neither a folder nor a hub id (name or owner/name): there is no such "
         "folder"),
        ("./train.py", "m is './train.py', which is neither a folder nor a hub id (name or owner/name): it is a file, "
         "not a folder"),
    ],
)  # fmt: skip
def test_other_names_are_refused_with_what_is_there(outputs, name, message):
    with pytest.raises(ValueError) as caught:
        check_model_name("m", name)
    assert str(caught.value) == message.format(outputs)


def test_a_folder_that_must_exist_and_a_file_have_neighbours_too(outputs):
    assert check_folder("the run", "outputs/ppo").is_dir()
    with pytest.raises(ValueError, match="^the run is 'org/run', but there is no such folder"):
        check_folder("the run", "org/run")
    assert where("trainn.py", what="file").endswith("; did you mean train.py?")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sample", "outputs/ppoo", "--prompt", "x"], "error: model is 'outputs/ppoo', but there is no such folder"),
        (
            ["sft", "--model", "outputss", "--dataset_name", "d"],
            "error: model_name_or_path is 'outputss', but there is no such folder",
        ),
        (
            ["sample", "m", "--prompt", "x", "--reference", "outputs/sfft"],
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
