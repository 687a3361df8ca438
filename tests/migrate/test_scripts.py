"""What is read of a script, and that it is not executed."""

import textwrap

import pytest

from alpaca_ppo.migrate.scripts import read_script
from alpaca_ppo.migrate.trainer_arguments import add_trainer_arguments
from alpaca_ppo.migrate.translation import Translation


def read(text, *arguments):
    return read_script(textwrap.dedent(text), "script.py", arguments)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("8", 8),
        ("-1", -1),
        ("2 * SIZE + 1", 9),
        ("SIZE // 3", 1),
        ("[SIZE, 'a']", [4, "a"]),
        ("{'a': SIZE}", {"a": 4}),
        ("dict(a=1)", {"a": 1}),
        ("f'run-{SIZE}'", "run-4"),
        ("torch.bfloat16", "bfloat16"),
        ("None", None),
    ],
)
def test_the_value_of_an_expression_is_read(expression, value):
    assert read(f"SIZE = 4\nGRPOConfig(x={expression})").config == {"x": value}


@pytest.mark.parametrize(
    "expression", ["f()", "SIZE + 'a'", "SIZE / 0", "-'a'", "other.name", "UNSET", "a if b else c"]
)
def test_what_the_running_script_alone_knows_is_named(expression):
    script = read(f"SIZE = 4\nSELF = SELF + 1\nGRPOConfig(x={expression}, y=SELF)")
    assert script.config == {} and set(script.unknown) == {"x", "y"}


def test_a_script_is_never_executed(tmp_path):
    mark = tmp_path / "mark"
    read(f"open({str(mark)!r}, 'w')\nGRPOConfig(output_dir=open({str(mark)!r}, 'w').name)")
    assert not mark.exists()


def test_positional_arguments_unpacked_ones_and_later_attributes_are_read():
    script = read(
        """
        base: dict = {"beta": 0.1}
        config = trl.GRPOConfig("out", seed=1, **base, **made())
        config.seed = 2
        config.run_name = made()
        other.seed = 3
        """
    )
    assert script.config == {"output_dir": "out", "seed": 2, "beta": 0.1}
    assert script.unknown == {"**": "made()", "run_name": "made()"}


def test_the_options_of_argparse_have_their_defaults_and_the_command_lines_values():
    text = """
        parser.add_argument("--group-size", "-g", default=8)
        parser.add_argument("--fast", action="store_true")
        parser.add_argument("--name")
        args = parser.parse_args()
        GRPOConfig(num_generations=args.group_size, use_vllm=args.fast, run_name=args.name, seed=args.unset)
        """
    script = read(text)
    assert script.config == {"num_generations": 8, "use_vllm": False, "run_name": None}
    assert script.unknown == {"seed": "args.unset"}
    assert read(text, "--group-size=4", "--fast").config["num_generations"] == 4


def test_a_parser_of_dataclasses_takes_everything_from_the_command_line():
    script = read(
        "TrlParser((ScriptArguments, GRPOConfig))", "--beta", "1e-2", "--reward_weights", "1", "0.5", "--bf16"
    )
    assert (script.kind, script.config) == ("GRPOConfig", {"beta": 0.01, "reward_weights": [1, 0.5], "bf16": True})
    assert read("HfArgumentParser(classes)\nPPOTrainer(args)").kind == "PPOConfig"


def test_arguments_of_the_trainer_that_need_the_user_are_named(tmp_path):
    script = read(
        """
        rewards = [make_reward(), lambda completions: 0]
        value = AutoModel.from_pretrained("critic")
        GRPOTrainer(
            load_model(), rewards, config, make_data(), ref_model="reference", value_model=value, tools=[search],
            callbacks=[log], invented=1, peft_config=make_lora(), quantization_config=four_bit, eval_dataset=held_out,
        )
        """
    )
    result = Translation("test")
    add_trainer_arguments(result, script, tmp_path / "script.py")
    assert result.options["reference"] == "reference" and result.options["value_model_name_or_path"] == "critic"
    assert result.options["reward_funcs"] == ["rewards.py:reward"]
    notes = "\n".join([*result.to_do, *result.to_do_in_yaml, *result.lost, *map(str, result.lost_together.values())])
    for said in ("load_model()", "make_reward()", "make_data()", "callbacks", "invented (1)", "make_lora()", "tools"):
        assert said in notes, said
    assert "load_in_4bit" in notes


def test_lora_and_local_files_are_read(tmp_path):
    script = read(
        """
        path = "rows.jsonl"
        data = load_dataset("json", data_files=path, split="train[:90%]")
        lora = LoraConfig(r=4, target_modules="all-linear", modules_to_save="head", init_lora_weights="pissa", x=f())
        GRPOTrainer("m", "rm", train_dataset=data.shuffle().select(10), peft_config=lora, ref_model=None)
        """
    )
    result = Translation("test")
    add_trainer_arguments(result, script, tmp_path / "script.py")
    assert result.options == {
        "model_name_or_path": "m",
        "reward_model_name_or_path": ["rm"],
        "dataset_name": "rows.jsonl",
        "dataset_train_split": "train[:90%]",
        "use_peft": True,
        "lora_r": 4,
        "lora_alpha": 8,
    }
    assert any("(shuffle, select)" in note for note in result.to_do_in_yaml) and any(
        "x of LoraConfig" in n for n in result.to_do_in_yaml
    )
    assert any("init_lora_weights" in note for note in result.lost)
