"""The command line: flags win over files, values are read as YAML does, and an error names what is wrong in either."""

import dataclasses
import sys
import typing
from typing import Literal

import pytest
from transformers import TrainingArguments

from alpaca_ppo import LoraArguments, PPOConfig, ScriptArguments, parse_args
from alpaca_ppo.config.fields import argument
from alpaca_ppo.config.parser import parse_options
from alpaca_ppo.config.supervised_arguments import SFTArguments
from tests.registered import temporary_choices

REQUIRED = ["--model_name_or_path", "m", "--dataset_name", "d", "--reward_funcs", "a:b"]
TYPES = [ScriptArguments, LoraArguments, PPOConfig]


def write(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def parse(tmp_path, text, *flags):
    """The PPOConfig of a file with this text and these flags."""
    return parse_args([PPOConfig], ["--config", write(tmp_path, text), *flags])[0]


def refusal(types, argv):
    with pytest.raises(ValueError) as refused:
        parse_args(types, argv)
    return str(refused.value)


def test_flags_win_over_files_and_presets_of_which_the_later_ones_win(tmp_path):
    first, second = write(tmp_path, "vf_coef: 0.75\ngamma: 0.5\nseed: 3\n"), write(tmp_path, "gamma: 0.25\n", "b.yaml")
    for order, gamma in (
        (("--config", first, "--config", second), 0.25),
        (("--config", second, "--config", first), 0.5),
    ):
        (args,) = parse_args([PPOConfig], [*order, "--seed", "4"])
        assert (args.vf_coef, args.gamma, args.seed, args.temperature) == (0.75, gamma, 4, 1.0)
    # VAPO has a vf_coef of 1 and a clip range of 0.2 to 0.28.
    for order, vf_coef in (
        (("--preset", "vapo", "--config", first), 0.75),
        (("--config", first, "--preset", "vapo"), 1.0),
    ):
        parsed = parse_options([ScriptArguments, PPOConfig], [*order, *REQUIRED])
        assert (parsed.instances[1].vf_coef, parsed.instances[1].cliprange_high) == (vf_coef, 0.28)
        assert (parsed.presets, list(parsed.config_files)) == (("vapo",), [first])


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(PPOConfig)])
def test_a_flag_can_say_null_for_every_field_that_may_be_none(tmp_path, name):
    if type(None) in typing.get_args(typing.get_type_hints(PPOConfig)[name]):
        for word in ("null", "None"):
            assert getattr(parse_args([PPOConfig], [f"--{name}", word])[0], name) is None


def test_null_by_flag_takes_the_files_value_away(tmp_path):
    text = "cliprange_value: 0.3\nrun_name: mine\nreward_weights: [1, 2]\ntotal_epochs: 3\n"
    flags = ["--cliprange_value", "null", "--run-name", "none", "--reward_weights", "null", "--total_epochs=null"]
    args = parse(tmp_path, text, *flags)
    assert (args.cliprange_value, args.run_name, args.reward_weights, args.total_epochs) == (None,) * 4
    assert parse(tmp_path, text, "--cliprange_value", "null", "--cliprange_value", "0.1").cliprange_value == 0.1


def test_null_is_refused_where_it_is_no_value(tmp_path):
    path = write(tmp_path, "weight_decay: null\n")
    for types in ([PPOConfig], [SFTArguments, TrainingArguments]):
        assert refusal(types, ["--config", path]).startswith(f"weight_decay is null in the --config file {path}; ")
    assert refusal([PPOConfig], ["--seed", "null"]).startswith("seed is null; ")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("learning_rate", "1e-5", 1e-5),
        ("learning_rate", "'1e-5'", 1e-5),
        ("ppo_epochs", '"4"', 4),
        ("penalty_reward_value", "-1e1", -10.0),
        ("lam_policy", "9e-1", 0.9),
        ("lam_policy", "1", 1),
        ("lam_policy", "adaptive", "adaptive"),
        ("lam_policy", "null", None),
        ("padding_free", "auto", "auto"),
        ("padding_free", "False", False),
        ("padding_free", '"false"', False),
        ("bf16", "yes", True),
        ("report_to", "none", ["none"]),
        ("report_to", "[a, b]", ["a", "b"]),
        ("truncate_tokens", '[13, "13", stop, yes]', [13, "13", "stop", True]),
        ("reward_weights", '["1e-1", 1e-2, 3]', [0.1, 0.01, 3]),
        ("reward_weights", "[0.5, 1]", [0.5, 1]),
        ("stop_strings", '["\\n", "User:"]', ["\n", "User:"]),
        ("stop_strings", "['[END]']", ["[END]"]),
        ("stop_on", "[error, kl_runaway]", ["error", "kl_runaway"]),
        ("stop_on", "[]", []),
        ("chat_template_kwargs", '{"a": [1, "\\n"]}', {"a": [1, "\n"]}),
        ("model_init_kwargs", "{a: 1, b: [x]}", {"a": 1, "b": ["x"]}),
        ("run_name", "1_000", "1_000"),
    ],
)
def test_a_file_and_a_flag_are_read_alike(tmp_path, name, text, value):
    if name == "run_name" or "yes]" in text:
        text = text.replace("yes", "'yes'").replace("1_000", "'1_000'")
        value = value if name == "run_name" else [13, "13", "stop", "yes"]
    args = parse(tmp_path, f"{name}: {text}")
    assert getattr(args, name) == value and type(getattr(args, name)) is type(value)
    assert getattr(parse_args([PPOConfig], [f"--{name}", text.strip("\"'")])[0], name) == value


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ('"\\n"', "\n"),
        ("'\\n'", "\\n"),
        ('"[END]"', "[END]"),
        ("'it''s'", "it's"),
        ('"null"', "null"),
        ('"7"', "7"),
        # Not quoted as a whole, which YAML does not read.
        ('"a" b', '"a" b'),
        ("'tis", "'tis"),
        ("\\n", "\\n"),
        ('say "a"', 'say "a"'),
    ],
)
def test_a_quoted_word_of_a_flag_is_read_as_yaml_reads_it(word, text):
    (args,) = parse_args([PPOConfig], ["--stop_strings", word, "b", "--run_name", word])
    assert (args.stop_strings, args.run_name) == ([text, "b"], text)
    (args,) = parse_args([PPOConfig], [f"--stop_strings={word}"])
    assert args.stop_strings == [text]


def test_a_list_in_brackets_is_one_for_the_options_of_every_command(tmp_path):
    script, lora, _ = parse_args(TYPES, [*REQUIRED, "--reward_funcs", "[a:b, c.py:d]", "--tools=[e:f]", "--use_peft",
                                         "--lora_target_modules", "[q_proj, 'v_proj']"])  # fmt: skip
    assert (script.reward_funcs, script.tools) == (["a:b", "c.py:d"], ["e:f"])
    assert lora.lora_target_modules == ["q_proj", "v_proj"]
    flags = [
        "--output_dir",
        str(tmp_path),
        "--label_names",
        "[labels, more]",
        "--lr_scheduler_kwargs",
        "{num_cycles: 2}",
    ]
    (training,) = parse_args([TrainingArguments], [*flags, "--report_to", "[none]", "--optim_target_modules", "[a, b]"])
    assert (training.label_names, training.lr_scheduler_kwargs) == (["labels", "more"], {"num_cycles": 2})
    assert (training.report_to, training.optim_target_modules) == ([], ["a", "b"])


def test_words_and_lists_in_brackets_add_up_and_other_text_with_a_bracket_stays(tmp_path):
    (args,) = parse_args([PPOConfig], ["--truncate_tokens", "13", "[14, '14', end]", "--stop_strings", "[a", "[b] c"])
    assert (args.truncate_tokens, args.stop_strings) == ([13, 14, "14", "end"], ["[a", "[b] c"])
    # Quoted in a file, a list is text, which numbers are read from.
    args = parse(tmp_path, "reward_weights: '[0.5, 1]'\nstop_strings: '[0.5, 1]'\n")
    assert (args.reward_weights, args.stop_strings) == ([0.5, 1], ["[0.5, 1]"])
    assert "reward_weights is [0.5, 'x']; " in refusal([PPOConfig], ["--reward_weights", "[0.5, x]"])
    path = write(tmp_path, "reward_weights: ['[0.5, 1]', 3]")
    assert "reward_weights is [[0.5, 1], 3]; " in refusal([PPOConfig], ["--config", path])


def test_a_list_of_several_lines_is_one_in_a_flag_and_an_empty_word_is_text():
    flags = ["--stop_strings", "- a\n- '\n\n  b'\n", "- c", "\n- ", "--reward_weights", "- 1\n- 1e-1"]
    (args,) = parse_args([PPOConfig], flags)
    # YAML reads an empty line within quotes as a line break.
    assert (args.stop_strings, args.reward_weights) == (["a", "\nb", "- c", "\n- "], [1, 0.1])
    assert "stop_strings is ['x', '']; it should be a string of length 1" in refusal(
        [PPOConfig], ["--stop_strings", "x", ""]
    )


def test_a_flag_may_have_several_words_other_spellings_or_none():
    (args,) = parse_args(
        [PPOConfig], ["--truncate_tokens", "13", "stop", "yes", "--reward-weights=2", "3", "--no-whiten-advantages"]
    )
    assert (args.truncate_tokens, args.reward_weights, args.whiten_advantages) == ([13, "stop", "yes"], [2, 3], False)
    for flags in (["--bf16"], ["--bf16=true"], ["--bf16", "false", "--bf16", "True"]):
        assert parse_args([PPOConfig], flags)[0].bf16 is True
    assert parse_args([PPOConfig], ["--chat_template_kwargs", '{"a": null}'])[0].chat_template_kwargs == {"a": None}


def test_model_is_another_word_for_model_name_or_path(tmp_path):
    path = write(tmp_path, "model: m\n")
    for flags in (["--model", "m"], ["--model=m"], ["--config", path]):
        assert parse_args([ScriptArguments], [*REQUIRED[2:], *flags])[0].model_name_or_path == "m"
        assert parse_args([SFTArguments], ["--dataset_name", "d", *flags])[0].model_name_or_path == "m"
    assert "  model: " in refusal([ScriptArguments], ["--config", write(tmp_path, "{model: m, model_name_or_path: m}")])
    for flags in (["--modle", "m"], ["--config", write(tmp_path, "modle: m")]):
        assert "  modle: did you mean model?" in refusal([ScriptArguments], flags)
    # It stands for a model that an earlier file cannot bring back.
    first = write(tmp_path, "provenance: {in_memory: {model: M}}", "a.yaml")
    flags = [*REQUIRED[2:], "--config", first, "--config", write(tmp_path, "model: m", "b.yaml")]
    assert parse_args([ScriptArguments], flags)[0].model_name_or_path == "m"


def test_an_unknown_name_suggests_the_nearest_and_lists_no_others():
    text = refusal(TYPES, ["--rollout_size", "8", "--zzz", "1"])
    assert "  rollout_size: did you mean rollout_batch_size?" in text and "  zzz: there is no such name" in text
    assert len(text) < 400 and "valid names" not in text


@pytest.mark.parametrize(("text", "value"), [("true", True), ("no", None), ("null", None), ("run/c-2", "run/c-2")])
def test_the_file_resumes_as_the_flag_does(tmp_path, text, value):
    path = write(tmp_path, f"resume_from_checkpoint: {text}\n")
    for flags in (
        ["--config", path],
        ["--resume_from_checkpoint", text],
        ["--config", path, f"--resume-from-checkpoint={text}"],
    ):
        assert parse_args([ScriptArguments], [*REQUIRED, *flags])[0].resume_from_checkpoint == value
    assert parse_args([ScriptArguments], ["--resume_from_checkpoint", *REQUIRED])[0].resume_from_checkpoint is True


def test_fields_of_other_libraries_are_read_too(tmp_path):
    path = write(tmp_path, 'lr_scheduler_type: cosine\nsave_strategy: "no"\nlearning_rate: 1e-4\n')
    (training,) = parse_args([TrainingArguments], ["--config", path, "--output_dir", str(tmp_path), "--max_steps", "3"])
    assert (training.lr_scheduler_type, training.save_strategy, training.learning_rate) == ("cosine", "no", 1e-4)
    assert training.max_steps == 3


@pytest.mark.parametrize(
    ("text", "flags", "lengths"),
    [
        ("total_epochs: 2", ["--total_episodes", "100"], (None, 100, None)),
        ("total_episodes: 100", ["--total_epochs", "null"], (None, 100, None)),
        ("total_epochs: 2", ["--max_steps", "7"], (None, None, 7)),
        ("total_epochs: 2", ["--preset", "verl"], (30, None, None)),
    ],
)
def test_a_later_length_of_the_run_replaces_an_earlier_one(tmp_path, text, flags, lengths):
    args = parse(tmp_path, text, *flags)
    assert (args.total_epochs, args.total_episodes, args.max_steps) == lengths


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed"], "--seed needs a value"),
        (["--config"], "--config needs one name"),
        (["--preset", "verl", "dapo"], "--preset needs one name after it, not verl dapo"),
        (["--seed", "x"], "seed is 'x'; "),
        (["--seed", "1", "2"], "seed has the values ['1', '2']; "),
        (["--cliprange_value", "wide"], "cliprange_value is 'wide'; "),
        (["--cliprange_value", "[1"], "cliprange_value is '[1'; "),
        (["--bf16", "maybe"], "bf16 is 'maybe'; "),
        (["--dtype", "float16"], "dtype is 'float16'; it should be 'float32' or 'bfloat16'"),
        (["--chat_template_kwargs", "[1]"], "chat_template_kwargs is [1]; "),
        (["--learning_rat", "1"], "learning_rat: did you mean learning_rate?"),
        (["--total_epochs", "2", "--total_episodes", "3"], "total_epochs (2) and total_episodes (3) are both set"),
        (["--preset", "vap"], "--preset is 'vap', but there is no preset of that name; did you mean vapo"),
        (["--preset", "run.yaml"], "--preset is 'run.yaml', but there is no preset of that name; the presets are"),
        (["--preset", __file__], f"did you mean --config {__file__}"),
        (["--config", "dap"], "did you mean --preset dapo?"),
        (["--config", "dapo"], "did you mean --preset dapo?"),
        (["--config", "x/setup.yaml"], "--config is 'x/setup.yaml', but there is no such file"),
        (["--config", "x" * 5000], "but there is no such file"),
        (["--config", "a\0b/a"], "but there is no such file"),
    ],
)
def test_what_cannot_be_read_is_named(argv, message):
    assert message in refusal([PPOConfig], argv)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n- b\n", "holds a list; it must map option names to values"),
        ("learning_rat: 1\n", "unknown keys in the --config file {path}: learning_rat; "),
        ("learning_rate: fast\n", "learning_rate is 'fast'; "),
        ("report_to: [3]\n", "report_to is [3]; "),
        ("critic_layout: twin\n", "critic_layout is 'twin'; "),
        (b"seed: [1", "--config {path} cannot be read as YAML: "),
        (b"seed: !!bool x", "cannot be read as YAML: KeyError: 'x'"),
        (b"output_dir: 2020-99-99", "cannot be read as YAML: ValueError: month must be in 1..12"),
        (b"seed: 1\x00", "special characters are not allowed"),
        (b"run_name: \xff", "UnicodeDecodeError"),
        (b"seed: 1\nkl_coef: 0.1\nseed: 2\n", "the key 'seed' occurs twice"),
        (b"seed: " + b"[" * 1000, "RecursionError"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(tmp_path, content, message):
    path = write(tmp_path, content)
    assert message.replace("{path}", path) in refusal([PPOConfig], ["--config", path])


def test_a_key_may_replace_one_that_it_merges(tmp_path):
    assert parse(tmp_path, "<<: &both {seed: 1, ppo_epochs: 3}\nseed: 2\n").seed == 2


def test_a_value_that_aliases_repeat_is_shown_shortened(tmp_path):
    # Ten lists of ten lists, eight levels deep: written out, a hundred million entries.
    levels = "".join(f", &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9))
    assert len(refusal([PPOConfig], ["--config", write(tmp_path, f"seed: [&l0 [x]{levels}]")])) < 100_000


def test_a_closed_set_may_include_null():
    @dataclasses.dataclass
    class Choice:
        mode: Literal["fast", "exact"] | None = argument("fast", "A mode.")

    assert parse_args([Choice], ["--mode", "null"])[0].mode is None
    assert parse_args([Choice], ["--mode", "exact"])[0].mode == "exact"


def test_help_shows_the_options_that_people_set_and_help_all_every_one(capsys):
    shown = {}
    for flag in ("--help", "-h", "--help-all"):
        with pytest.raises(SystemExit):
            parse_options(TYPES, [flag], prog="p", epilog="Last words.", common=["gamma"])
        shown[flag] = " ".join(capsys.readouterr().out.split())
    assert shown["--help"] == shown["-h"]
    assert "Advantages: --gamma float Discount per token. Needs adv_estimator: gae or" in shown["--help"]
    assert "(default 1.0; at least 0 and at most 1)" in shown["--help"] and shown["--help"].endswith("Last words.")
    assert "--help-all" in shown["--help"] and "--seed" not in shown["--help"]
    names = [field.name for kind in TYPES for field in dataclasses.fields(kind)]
    assert all(f"--{name} " in shown["--help-all"] for name in [*names, "config", "preset"])


@pytest.mark.parametrize(("types", "offered"), [([PPOConfig], True), ([SFTArguments], False)])
def test_help_offers_presets_where_their_options_exist(types, offered, capsys):
    with pytest.raises(SystemExit):
        parse_options(types, ["--help"])
    shown = capsys.readouterr().out
    assert ("--preset" in shown, "vc_ppo" in shown, "--config" in shown) == (offered, offered, True)


def test_a_run_without_a_model_a_dataset_or_a_reward_is_refused():
    given = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": ["a:b"]}
    for missing in ("model_name_or_path", "dataset_name"):
        with pytest.raises(ValueError, match=f"{missing} is not set"):
            ScriptArguments(**{name: value for name, value in given.items() if name != missing})
    with pytest.raises(ValueError, match="tool_call_parser is 'a:b', without effect: needs environments or tools"):
        ScriptArguments(**given, tool_call_parser="a:b")
    arguments = ScriptArguments(model_name_or_path="m", dataset_name="d")
    with pytest.raises(ValueError, match="there is no reward"):
        arguments.check_before_loading(PPOConfig())
    arguments.check_before_loading(PPOConfig(reward_adapter="owner/adapter"))


def test_lora_arguments_become_pefts():
    assert LoraArguments().peft_config("CAUSAL_LM") is None
    config = LoraArguments(use_peft=True, lora_r=4, lora_target_modules=["q_proj"]).peft_config("SEQ_CLS")
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 32, 0.0)
    assert config.target_modules == {"q_proj"} and config.task_type == "SEQ_CLS"
    with pytest.raises(ValueError, match="lora_r is 8, without effect: needs use_peft"):
        LoraArguments(lora_r=8)


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
    ):
        path = write(tmp_path, text)
        script, args = parse_args([ScriptArguments, PPOConfig], ["--config", path, *REQUIRED, *flags])
        assert (script.import_modules, args.adv_estimator, args.uses_critic) == ([name], "mine", True)


def test_the_help_and_the_error_list_what_was_imported(extension, tmp_path, capsys):
    path = write(tmp_path, "import_modules: mine.py\n")
    for flags in (["--import_modules", "mine.py", "--help"], ["--config", path, "-h"]):
        with pytest.raises(SystemExit) as caught:
            parse_args([ScriptArguments, PPOConfig], flags)
        assert caught.value.code == 0
        assert "reinforce_plus_plus, remax, mine." in " ".join(capsys.readouterr().out.split())
    given = ["--config", path, *REQUIRED, "--adv_estimator", "yours"]
    assert "adv_estimator is 'yours'; choose one of gae, " in refusal([ScriptArguments, PPOConfig], given)


def test_flags_win_over_the_modules_of_the_file(extension, tmp_path):
    path = write(tmp_path, "import_modules: missing.py\n")
    for flags, imported in ((["--import_modules", "mine.py"], ["mine.py"]), (["--import_modules", "null"], None)):
        script, _ = parse_args([ScriptArguments, PPOConfig], ["--config", path, *REQUIRED, *flags])
        assert script.import_modules == imported
    assert "missing.py does not exist" in refusal([ScriptArguments, PPOConfig], ["--config", path, *REQUIRED])
    path = write(tmp_path, "import_modules: [3]\n")
    assert refusal([ScriptArguments, PPOConfig], ["--config", path, *REQUIRED]).startswith("import_modules is [3]; ")


@pytest.mark.parametrize("spec", ["my_module.fn", "outputs/reward", ":fn", "my_module:"])
def test_a_reward_function_without_its_module_or_name_is_refused(spec):
    with pytest.raises(ValueError, match=f"reward_funcs holds '{spec}'"):
        ScriptArguments(model_name_or_path="m", dataset_name="d", reward_funcs=["a:b", spec])


@pytest.mark.parametrize("name", ["./no/such", "outputs/lab/sft", "~/model", "a:b", "./" + "x" * 5000])
@pytest.mark.parametrize("field", ["model_name_or_path", "value_model_name_or_path", "reference", "reward_adapter"])
def test_a_path_that_is_no_folder_is_named_before_the_hub_is_asked(tmp_path, field, name):
    given = {"model_name_or_path": "owner/name", "dataset_name": "d", "reward_funcs": ["a:b"]}
    if field in ("reference", "reward_adapter"):
        arguments, args = ScriptArguments(**given), PPOConfig(**{field: name})
    else:
        arguments, args = ScriptArguments(**{**given, field: name}), PPOConfig()
    with pytest.raises(ValueError, match=f"^{field} is '{name}', neither a folder nor a hub id"):
        arguments.check_before_loading(args)
    given = {"model_name_or_path": str(tmp_path), "dataset_name": "d", "reward_model_name_or_path": ["gpt2"]}
    ScriptArguments(**given).check_before_loading(PPOConfig(reference="Qwen/Qwen3-0.6B"))
    with pytest.raises(ValueError, match="^reward_model_name_or_path is './such'"):
        ScriptArguments(**{**given, "reward_model_name_or_path": ["gpt2", "./such"]}).check_before_loading(PPOConfig())
