"""The command line: flags win over the file, and an error names what is wrong in either."""

import dataclasses
import sys
import typing
from typing import Literal

import pytest
from transformers import TrainingArguments

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.fields import argument, options_of
from alpaca_ppo.config.parser import _typed, parse_options
from alpaca_ppo.config.supervised_arguments import SFTArguments
from tests.registered import temporary_choices

REQUIRED = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a:b"]


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1e-5\nkl_coef: 0.3\ncliprange_value: null\ntruncate_tokens: stop\nppo_epochs: 3\n")
    script, args = parse_args([ScriptArguments, PPOConfig], ["--config", str(path), "--kl_coef", "0.1", *REQUIRED])
    assert (args.learning_rate, args.kl_coef, args.ppo_epochs) == (1e-5, 0.1, 3)
    assert args.cliprange_value is None
    assert args.truncate_tokens == ["stop"]
    assert args.gamma == PPOConfig().gamma
    assert script.reward_funcs == ["a:b"]


def test_text_of_a_field_that_is_no_number_stays_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text('lr_scheduler_type: cosine\nsave_strategy: "no"\n')
    (arguments,) = parse_args([TrainingArguments], ["--config", str(path), "--output_dir", str(tmp_path)])
    assert (arguments.lr_scheduler_type, arguments.save_strategy) == ("cosine", "no")


def test_a_config_file_that_is_missing_malformed_or_unknown_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        parse_args([PPOConfig], ["--config", str(tmp_path / "none.yaml")])
    path = tmp_path / "run.yaml"
    path.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="holds a list; it must map option names to values"):
        parse_args([PPOConfig], ["--config", str(path)])
    path.write_text("learning_rat: 1\n")
    with pytest.raises(ValueError, match=r"unknown keys in the --config file .*run.yaml: learning_rat; (.|\n)*rate"):
        parse_args([PPOConfig], ["--config", str(path)])
    path.write_text("learning_rate: fast\n")
    with pytest.raises(ValueError, match="learning_rate is 'fast' in the --config file .*run.yaml; it must be float"):
        parse_args([PPOConfig], ["--config", str(path)])


@pytest.mark.parametrize(
    ("text", "resumes_from"),
    [
        ("true", "true"),
        ("True", "true"),
        ("false", None),
        ("null", None),
        ("None", None),
        ("no", None),
        ("run/checkpoint-2", "run/checkpoint-2"),
    ],
)
def test_the_file_resumes_as_the_flag_does(tmp_path, text, resumes_from):
    path = tmp_path / "run.yaml"
    path.write_text(f"resume_from_checkpoint: {text}\n")
    for flags in (["--config", str(path)], ["--resume_from_checkpoint", text]):
        (script,) = parse_args([ScriptArguments], [*REQUIRED, *flags])
        assert script.resume_from_checkpoint == resumes_from
    # The flag alone is true, wherever it stands.
    for flags in (["--resume_from_checkpoint"], ["--resume_from_checkpoint", *REQUIRED]):
        (script,) = parse_args([ScriptArguments], [*REQUIRED, *flags])
        assert script.resume_from_checkpoint == "true"
    # The flag wins, both ways.
    (script,) = parse_args([ScriptArguments], [*REQUIRED, "--config", str(path), "--resume_from_checkpoint", "false"])
    assert script.resume_from_checkpoint is None
    path.write_text("resume_from_checkpoint: 'null'\n")
    assert parse_args([ScriptArguments], [*REQUIRED, "--config", str(path)])[0].resume_from_checkpoint is None
    path.write_text("resume_from_checkpoint: 2\n")
    with pytest.raises(ValueError, match=r"resume_from_checkpoint is 2 \(int\); it must be str or null, in quotes"):
        parse_args([ScriptArguments], [*REQUIRED, "--config", str(path)])


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_required_script_arguments_are_named(missing):
    given = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a:b"]}
    del given[missing]
    with pytest.raises(ValueError, match=f"{missing} is not set"):
        ScriptArguments(**given)


def test_a_run_without_any_reward_is_refused():
    arguments = ScriptArguments(model_name_or_path="m", dataset_name="d")
    with pytest.raises(ValueError, match="there is no reward"):
        arguments.check_names(PPOConfig())
    arguments.check_names(PPOConfig(reward_adapter="owner/adapter"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_peft": True, "lora_r": 0}, "lora_r is 0; it must be at least 1"),
        ({"lora_r": 8}, "lora_r is 8, but use_peft is False; set use_peft: true, or leave lora_r out"),
    ],
)
def test_options_of_lora_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        LoraArguments(**settings)


def test_lora_arguments_become_pefts():
    assert LoraArguments().peft_config("CAUSAL_LM") is None
    config = LoraArguments(use_peft=True, lora_r=4, use_dora=True, lora_target_modules=["q_proj"]).peft_config(
        "SEQ_CLS"
    )
    assert (config.r, config.lora_alpha, config.use_dora, config.lora_dropout) == (4, 32, True, 0.0)
    assert config.target_modules == {"q_proj"} and config.task_type == "SEQ_CLS"


def parse(tmp_path, text, *flags):
    """The PPOConfig of a file with this text and these flags."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return parse_args([PPOConfig], ["--config", str(path), *flags])[0]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(PPOConfig)])
@pytest.mark.parametrize("word", ["null", "none", "None"])
def test_a_flag_can_say_null_for_every_field_that_may_be_none(tmp_path, name, word):
    if type(None) in typing.get_args(typing.get_type_hints(PPOConfig)[name]):
        assert getattr(parse(tmp_path, "seed: 1", f"--{name}", word), name) is None


def test_null_by_flag_takes_the_files_value_away(tmp_path):
    text = "cliprange_value: 0.3\nrun_name: mine\nreward_weights: [1, 2]\ntotal_epochs: 3\n"
    flags = ["--cliprange_value", "null", "--run-name", "none", "--reward_weights", "null", "--total_epochs=null"]
    args = parse(tmp_path, text, *flags)
    assert (args.cliprange_value, args.run_name, args.reward_weights, args.total_epochs) == (None,) * 4
    assert parse(tmp_path, text, "--cliprange_value", "null", "--cliprange_value", "0.1").cliprange_value == 0.1
    (script,) = parse_args([ScriptArguments], [*REQUIRED, "--eval_dataset_name", "null"])
    assert script.eval_dataset_name is None


@pytest.mark.parametrize(
    ("given", "value"), [("0.9", 0.9), ("1", 1), ("9e-1", 0.9), ("adaptive", "adaptive"), ("null", None)]
)
def test_a_number_or_a_word_is_read_as_what_it_is(tmp_path, given, value):
    # YAML takes 9e-1 for text, as it does 1e-5.
    for args in (parse(tmp_path, f"lam_policy: {given}"), parse(tmp_path, "seed: 1", "--lam_policy", given)):
        assert args.lam_policy == value and isinstance(args.lam_policy, str) == (given == "adaptive")


def test_none_stays_a_word_where_it_is_one(tmp_path):
    assert parse(tmp_path, "seed: 1", "--report_to", "none").report_to == ["none"]
    assert parse(tmp_path, "report_to: none").report_to == ["none"]
    for given in (["--report_to", "none"], ["--report_to", "tensorboard"]):
        (training,) = parse_args([TrainingArguments], ["--output_dir", str(tmp_path), *given])
        assert training.report_to == ([] if given[1] == "none" else ["tensorboard"])


@pytest.mark.parametrize(
    ("text", "flags", "epochs", "episodes"),
    [
        ("total_epochs: 2", ["--total_episodes", "100"], None, 100),
        ("total_episodes: 100", ["--total_epochs", "2"], 2, None),
        ("total_episodes: 100", ["--total_epochs", "null"], None, 100),
    ],
)
def test_a_flag_wins_over_its_rival_in_the_file(tmp_path, text, flags, epochs, episodes):
    args = parse(tmp_path, text, *flags)
    assert (args.total_epochs, args.total_episodes) == (epochs, episodes)


def test_two_rivals_in_one_place_are_refused(tmp_path):
    for text, flags in (
        ("total_epochs: 2\ntotal_episodes: 3", []),
        ("seed: 1", ["--total_epochs", "2", "--total_episodes", "3"]),
    ):
        with pytest.raises(ValueError, match="are both set"):
            parse(tmp_path, text, *flags)


def test_a_truncate_token_of_digits_is_an_id_by_flag_and_what_it_is_in_the_file(tmp_path):
    assert parse(tmp_path, "seed: 1", "--truncate_tokens", "13", "stop").truncate_tokens == [13, "stop"]
    assert parse(tmp_path, 'truncate_tokens: [13, "13", stop]').truncate_tokens == [13, "13", "stop"]
    assert parse(tmp_path, "truncate_tokens: 13").truncate_tokens == [13]


def test_the_entries_of_a_list_are_brought_to_the_declared_type(tmp_path):
    assert parse(tmp_path, 'reward_weights: ["1e-1", 1e-2, 3]').reward_weights == [0.1, 0.01, 3]
    with pytest.raises(ValueError, match="reward_weights is 'much' in the --config file .*run.yaml; it must be float"):
        parse(tmp_path, "reward_weights: [much]")
    with pytest.raises(ValueError, match=r"an entry of report_to is 3 \(int\); it must be str, in quotes"):
        parse(tmp_path, "report_to: [3]")


def test_a_flag_that_no_field_has_is_refused(tmp_path):
    with pytest.raises(
        ValueError,
        match="arguments: --learning_rat 1; --help lists the valid ones\n  learning_rat: did you mean learning_rate.",
    ):
        parse(tmp_path, "seed: 1", "--learning_rat", "1")


def test_a_flag_of_the_wrong_type_ends_with_the_usage(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(tmp_path, "seed: 1", "--cliprange_value", "wide")
    assert "argument --cliprange_value: invalid float value: 'wide'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_args([PPOConfig], ["--config"])
    assert "argument --config: expected one argument" in capsys.readouterr().err


def test_one_of_a_closed_set_is_checked_in_the_file_and_on_the_command_line(tmp_path, capsys):
    assert parse(tmp_path, "critic_layout: shared").critic_layout == "shared"
    assert parse(tmp_path, "critic_layout: shared", "--critic_layout", "adapter").critic_layout == "adapter"
    with pytest.raises(ValueError, match="critic_layout is 'twin'; choose one of separate, shared, adapter"):
        parse(tmp_path, "critic_layout: twin")
    with pytest.raises(SystemExit):
        parse(tmp_path, "seed: 1", "--critic_layout", "twin")
    error = capsys.readouterr().err
    assert "--critic_layout: invalid choice: 'twin'" in error and "adapter" in error


TYPES = [ScriptArguments, LoraArguments, PPOConfig]


def never_null(kinds: list) -> list[str]:
    """The fields without None in their type, and with another default; read off the hints of Python itself."""
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    fields = [field for kind in kinds for field in dataclasses.fields(kind) if field.init and field.default is not None]
    return [field.name for field in fields if type(None) not in typing.get_args(hints[field.name])]


def test_null_is_refused_wherever_the_type_has_no_none(tmp_path):
    assert {"learning_rate", "dataset_train_split", "lora_r", "padding_free"} <= set(never_null(TYPES))
    path = tmp_path / "run.yaml"
    for kinds in (TYPES, [SFTArguments, TrainingArguments]):
        options = {name: option for kind in kinds for name, option in options_of(kind).items()}
        for name in never_null(kinds):
            with pytest.raises(ValueError, match=f"^{name} is null in x.yaml; it must be "):
                _typed({name: None}, options, "x.yaml")
    path.write_text("learning_rate: null\n")
    with pytest.raises(
        ValueError, match="^learning_rate is null in the --config file .*; it must be float, or leave it"
    ):
        parse_args([SFTArguments, TrainingArguments], ["--config", str(path)])
    with pytest.raises(ValueError, match="^seed is null in --set; it must be int, or leave it out for 42$"):
        parse_args(TYPES, ["--set", "seed=null"])
    message = "padding_free is null; it must be one of auto, true, false, or leave it out for 'auto'$"
    with pytest.raises(ValueError, match=message):
        PPOConfig(padding_free=None)
    with pytest.raises(ValueError, match="^model_name_or_path is null; it must be str$"):
        ScriptArguments(model_name_or_path=None)


def test_a_closed_set_may_include_null(tmp_path):
    @dataclasses.dataclass
    class Choice:
        mode: Literal["fast", "exact"] | None = argument("fast", "A mode.")

    assert parse_args([Choice], ["--mode", "null"])[0].mode is None
    assert parse_args([Choice], ["--mode", "exact"])[0].mode == "exact"
    with pytest.raises(SystemExit):
        parse_args([Choice], ["--mode", "slow"])


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("true", True), ("False", False)])
def test_a_closed_set_may_include_true_and_false(tmp_path, word, value, capsys):
    assert parse(tmp_path, "seed: 1", "--padding_free", word).padding_free == value
    assert parse(tmp_path, f"padding_free: {word}").padding_free == value
    with pytest.raises(ValueError, match="padding_free is 'never'; choose one of auto, true, false"):
        parse(tmp_path, "padding_free: never")
    with pytest.raises(SystemExit):
        parse(tmp_path, "seed: 1", "--padding_free", "never")


def test_help_shows_the_defaults(capsys):
    with pytest.raises(SystemExit):
        parse_args([PPOConfig], ["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Discount per token. (default: 1.0; at least 0 and at most 1)" in shown
    assert "Advantages: --adv_estimator" in shown
    presets = "alpaca_farm, cispo, dapo, gspo, nemo_ppo, orz, trl, vapo, vc_ppo, verl, verl_gsm8k"
    assert "--config FILE YAML file of options; flags win over it. May be repeated; later ones win." in shown
    assert f"Options by the name of a preset ({presets}). May be repeated; later ones win." in shown
    assert "--critic_layout {separate,shared,adapter}" in shown


def test_a_single_tracker_needs_no_list(tmp_path):
    assert parse(tmp_path, "report_to: tensorboard").report_to == ["tensorboard"]
    assert parse(tmp_path, "report_to: [a, b]", "--report_to", "tensorboard").report_to == ["tensorboard"]


@pytest.fixture
def extension(tmp_path, monkeypatch):
    """A file that registers an estimator, in the current folder; the registration is forgotten after the test."""
    (tmp_path / "mine.py").write_text(
        "from alpaca_ppo.registry import ADV_ESTIMATORS\n\n"
        '@ADV_ESTIMATORS.register("mine", needs_critic=True)\n'
        "def mine(inputs, args): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    modules = dict(sys.modules)
    with temporary_choices():
        yield "mine.py"
    sys.modules.clear()
    sys.modules.update(modules)


@pytest.mark.parametrize("name", ["mine.py", "mine"])
def test_imported_modules_register_names_for_the_file_and_the_flags(extension, tmp_path, name):
    for text, flags in (
        ("adv_estimator: mine", ["--import_modules", name]),
        (f"import_modules: {name}", ["--adv_estimator", "mine"]),
        (f"import_modules: [{name}]\nadv_estimator: mine", []),
    ):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        script, args = parse_args([ScriptArguments, PPOConfig], ["--config", str(path), *REQUIRED, *flags])
        assert (script.import_modules, args.adv_estimator, args.uses_critic) == ([name], "mine", True)


def test_the_help_and_the_error_list_what_was_imported(extension, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("import_modules: mine.py\n")
    for flags in (["--import_modules", "mine.py", "--help"], ["--config", str(path), "-h"]):
        with pytest.raises(SystemExit) as caught:
            parse_args([ScriptArguments, PPOConfig], flags)
        assert caught.value.code == 0
        assert "reinforce_plus_plus, remax, mine." in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="adv_estimator is 'yours'; choose one of gae, .* remax, mine, or register"):
        parse_args([ScriptArguments, PPOConfig], ["--config", str(path), *REQUIRED, "--adv_estimator", "yours"])


def test_flags_win_over_the_modules_of_the_file(extension, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("import_modules: missing.py\n")
    for flags, imported in ((["--import_modules", "mine.py"], ["mine.py"]), (["--import_modules", "null"], None)):
        script, _ = parse_args([ScriptArguments, PPOConfig], ["--config", str(path), *REQUIRED, *flags])
        assert script.import_modules == imported


def test_modules_that_cannot_be_imported_are_named(extension, tmp_path):
    with pytest.raises(ValueError, match="import_modules holds 'missing.py', .* the file .*missing.py does not exist"):
        parse_args([ScriptArguments, PPOConfig], ["--import_modules", "missing.py", *REQUIRED])
    path = tmp_path / "run.yaml"
    path.write_text("import_modules: [3]\n")
    with pytest.raises(ValueError, match="an entry of import_modules is 3"):
        parse_args([ScriptArguments, PPOConfig], ["--config", str(path), *REQUIRED])


@pytest.mark.parametrize("spec", ["my_module.fn", "outputs/reward", ":fn", "my_module:"])
def test_a_reward_function_without_its_module_or_name_is_refused(spec):
    with pytest.raises(ValueError, match=f"reward_funcs holds '{spec}', which is not a function; write module:func"):
        ScriptArguments(model_name_or_path="m", dataset_name="d", reward_funcs=["a:b", spec])


def test_a_configuration_of_no_evaluation_dataset_is_refused():
    given = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a:b"], "dataset_config": "main"}
    with pytest.raises(ValueError, match="eval_dataset_config is 'socratic', but eval_dataset_name is not set"):
        ScriptArguments(**given, dataset_test_split="test", eval_dataset_config="socratic")


@pytest.mark.parametrize("name", ["./no/such", "outputs/lab/sft", "/no/such", "~/model", "./such", "a:b"])
@pytest.mark.parametrize("field", ["model", "value_model", "reward_model"])
def test_a_path_that_is_no_folder_is_named_before_the_hub_is_asked(tmp_path, field, name):
    given = {"model_name_or_path": "owner/name", "dataset_name": "d", "reward_funcs": ["a:b"]}
    value = [str(tmp_path), "gpt2", name] if field == "reward_model" else name
    arguments = ScriptArguments(**{**given, f"{field}_name_or_path": value})
    with pytest.raises(ValueError, match=f"^{field}_name_or_path is '{name}', which is neither a folder nor a hub id"):
        arguments.check_names(PPOConfig())


@pytest.mark.parametrize("field", ["reference", "reward_adapter"])
def test_a_path_in_the_configuration_is_named_too(field):
    arguments = ScriptArguments(model_name_or_path="m", dataset_name="d", reward_funcs=["a:b"])
    with pytest.raises(ValueError, match=f"^{field} is './such', which is neither a folder nor a hub id"):
        arguments.check_names(PPOConfig(**{field: "./such"}))


def test_folders_and_what_may_be_hub_ids_pass(tmp_path):
    ScriptArguments(
        model_name_or_path=str(tmp_path),
        reward_model_name_or_path=["gpt2"],
        dataset_name="d",
    ).check_names(PPOConfig(reference="Qwen/Qwen3-0.6B"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"seed: [1", "line 1"),
        (b"seed: !!bool x", "KeyError: 'x'"),
        (b"seed: !!timestamp x", "AttributeError"),
        (b"output_dir: 2020-99-99", "ValueError: month must be in 1..12"),
        (b"seed: 1\x00", "special characters are not allowed"),
        (b"run_name: \xff", "UnicodeDecodeError"),
        (b"seed: 1\nkl_coef: 0.1\nseed: 2\n", "the key 'seed' occurs twice\n.*line 3, column 1"),
        (b"seed: " + b"[" * 1000, "RecursionError"),
    ],
)
def test_a_file_that_is_no_yaml_is_named_with_the_place(tmp_path, content, reason):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s)^--config {path} cannot be read as YAML: .*{reason}"):
        parse_args([PPOConfig], ["--config", str(path)])


def test_a_key_may_replace_one_that_it_merges(tmp_path):
    assert parse(tmp_path, "<<: &both {seed: 1, ppo_epochs: 3}\nseed: 2\n").seed == 2


def test_a_value_that_aliases_repeat_is_shown_shortened(tmp_path):
    # Ten lists of ten lists, eight levels deep: written out, a hundred million entries.
    levels = "".join(f", &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9))
    with pytest.raises(ValueError, match=r"^seed is \[.*it must be int$") as refused:
        parse(tmp_path, f"seed: [&l0 [x]{levels}]")
    assert len(str(refused.value)) < 100_000


def test_a_path_that_no_file_can_have_is_no_file(tmp_path):
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(ValueError, match="--config is '.*but there is no such file"):
            parse_args([PPOConfig], ["--config", name])
        with pytest.raises(ValueError, match="no folder .*either"):
            parse_args([PPOConfig], ["--config", f"{name}/{name}"])
    arguments = ScriptArguments(model_name_or_path="./" + "x" * 5000, dataset_name="d", reward_funcs=["a:b"])
    with pytest.raises(ValueError, match="model_name_or_path is './x*', which is neither a folder"):
        arguments.check_names(PPOConfig())


@pytest.mark.parametrize(("text", "number"), [("-1e1", -10.0), ("-.5E+1", -5.0), ("-2", -2.0), ("-1_0.", -10.0)])
def test_a_negative_number_may_have_an_exponent(tmp_path, text, number):
    args = parse(tmp_path, "seed: 1", "--penalty_reward_value", text, "--value_support", "-1e2", "3")
    assert (args.penalty_reward_value, args.value_support) == (number, [-100.0, 3.0])


def write(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_of_several_files_and_presets_the_later_ones_win(tmp_path):
    first = write(tmp_path, "first.yaml", "lam: 0.75\ngamma: 0.5\nseed: 3\n")
    second = write(tmp_path, "second.yaml", "gamma: 0.25\n")
    (args,) = parse_args([PPOConfig], ["--config", first, "--config", second])
    assert (args.lam, args.gamma, args.seed) == (0.75, 0.25, 3)
    (args,) = parse_args([PPOConfig], ["--config", second, "--config", first])
    assert args.gamma == 0.5
    # VAPO has gamma 1 and a clip range of 0.2 to 0.28; DAPO's lambda is not set, so that VAPO's stays.
    parsed = parse_options([ScriptArguments, PPOConfig], ["--preset", "vapo", "--config", first, *REQUIRED])
    assert parsed.instances[1].gamma == 0.5 and parsed.instances[1].cliprange_high == 0.28
    assert (parsed.presets, parsed.config_files) == (("vapo",), (first,))
    parsed = parse_options([ScriptArguments, PPOConfig], ["--config", first, "--preset", "vapo", *REQUIRED])
    assert parsed.instances[1].gamma == 1.0
    assert (parsed.presets, parsed.config_files) == (("vapo",), (first,))


def test_a_later_file_wins_over_the_rival_in_an_earlier_one(tmp_path):
    first = write(tmp_path, "first.yaml", "total_epochs: 2\n")
    second = write(tmp_path, "second.yaml", "total_episodes: 100\n")
    (args,) = parse_args([PPOConfig], ["--config", first, "--config", second])
    assert (args.total_epochs, args.total_episodes) == (None, 100)


def test_set_takes_values_as_yaml_and_wins_over_files(tmp_path):
    path = write(tmp_path, "run.yaml", "gamma: 0.5\ntotal_epochs: 2\n")
    flags = ["--set", "gamma=0.25", "reward_weights=[1, 2e-1]", "--set", "total_episodes=7", "--config", path]
    (args,) = parse_args([PPOConfig], [*flags, "--seed", "5"])
    assert (args.gamma, args.reward_weights, args.total_episodes, args.total_epochs) == (0.25, [1, 0.2], 7, None)
    assert args.seed == 5
    assert parse_args([PPOConfig], ["--set", "gamma=0.5", "--set", "gamma=0.25"])[0].gamma == 0.25


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "gamma"], "--set is 'gamma'; write it as option=value"),
        (["--set", "gamma=[1"], r"--set gamma=\[1 cannot be read as YAML"),
        (["--set", "gama=1"], r"unknown keys in --set: gama; (.|\n)*gama: did you mean gamma"),
        (["--set", "gamma=fast"], "gamma is 'fast' in --set; it must be float"),
        (["--set", "gamma=1", "--gamma", "1"], "gamma is given by --set and by a flag; give it once"),
        (["--preset", "vap"], "--preset is 'vap', but there is no preset of that name; did you mean vapo"),
        (["--config", "dap"], r"^--config is 'dap', but there is no such file; did you mean --preset dapo\?$"),
        (["--config", "dapo"], r"^--config is 'dapo', which is a preset and no file; did you mean --preset dapo\?$"),
        (["--config", "x/setup.yaml"], "--config is 'x/setup.yaml', but there is no such file .* no folder x either"),
        (["--preset", "run.yaml"], "--preset is 'run.yaml', but there is no preset of that name; the presets are"),
        (["--preset", __file__], f"but there is no preset of that name; did you mean --config {__file__}"),
    ],
)
def test_a_source_of_options_that_cannot_be_read_is_named(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_args([PPOConfig], flags)


def test_dashes_and_no_are_other_spellings_of_a_flag():
    assert parse_args([PPOConfig], ["--step-batch-size=8", "--rollout-batch-size", "8"])[0].step_batch_size == 8
    for flags in (["--no_whiten_advantages"], ["--no-whiten-advantages"], ["--whiten_advantages", "false"]):
        assert parse_args([PPOConfig], flags)[0].whiten_advantages is False
    assert parse_args([PPOConfig], ["--whiten_rewards"])[0].whiten_rewards is True


def test_a_boolean_is_true_or_false(capsys):
    with pytest.raises(SystemExit):
        parse_args([PPOConfig], ["--whiten_rewards", "maybe"])
    assert "argument --whiten_rewards: 'maybe' is neither true nor false" in capsys.readouterr().err


@dataclasses.dataclass
class WithMapping:
    settings: dict[str, typing.Any] | None = argument(None, "Settings.")


def test_a_mapping_is_written_as_yaml_or_json(capsys):
    assert parse_args([WithMapping], ["--settings", "{a: 1, b: [x]}"])[0].settings == {"a": 1, "b": ["x"]}
    assert parse_args([WithMapping], ["--settings", '{"a": null}'])[0].settings == {"a": None}
    assert parse_args([WithMapping], ["--settings", "null"])[0].settings is None
    for text, message in (("[1]", "is no mapping; write it as '{key: value}'"), ("{a", "is not YAML")):
        with pytest.raises(SystemExit):
            parse_args([WithMapping], ["--settings", text])
        assert message in capsys.readouterr().err
