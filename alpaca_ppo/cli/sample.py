"""`alpaca-ppo sample`: answers of a trained policy and of its reference, to one prompt or to those of a file.

They are sampled as in the run's evaluations, with its templates, tools, environments and stop rules, in one process and
by the trainer's own sampler. There is no dialogue: `transformers chat` reads a run's final/policy.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from alpaca_ppo.cli.evaluate import evaluation_options
from alpaca_ppo.config.fields import options_of
from alpaca_ppo.config.names import check_model_name, model_folder
from alpaca_ppo.config.parser import read_yaml
from alpaca_ppo.config.ppo_config import PPOConfig
from alpaca_ppo.config.run_file import IN_MEMORY, PROVENANCE
from alpaca_ppo.library_output import say_loading

# The options that name a Python object on which answers depend, and the arguments of `PPOTrainer` that are one.
_OBJECT_OPTIONS = ("environments", "tools", "tool_call_parser")
_OBJECT_ARGUMENTS = {"model", "ref_model", "environment_factory", "tools", "tool_call_parser"}
# Those of the command line that stand for the run's.
_OVERRIDES = ("prompt_template", "user_template", "system_prompt", "prompt_column", "reference", "seed")
# Options of a run that do not apply: nothing is scored, and a single process samples, without a server.
_LEFT_OUT = (
    *("generation_backend", "vllm_python", "vllm_urls", "vllm_dtype", "vllm_gpu_memory_utilization", "vllm_args"),
    *("deepspeed", "fsdp", "max_tokens_per_micro_batch"),
    *("teacher_model_name_or_path", "teacher_coef", "teacher_dtype", "teacher_offloaded"),
)


def sample(argv: Sequence[str]) -> int:
    """Prints the answers of the policy, and of its reference if there is one."""
    description = "Shows what a policy answers, beside its reference."
    parser = argparse.ArgumentParser(prog="alpaca-ppo sample", description=description, allow_abbrev=False)
    add = parser.add_argument
    add("model", help="a run's output_dir, or a model: a folder, an adapter's folder or a hub id")
    add("--reference", metavar="MODEL", help="to compare with, or none (default: the run's)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="answer this prompt")
    source.add_argument("--prompts", metavar="DATA", help="answer the prompts of a file, a folder or a hub dataset")
    add("--num_prompts", type=int, default=8, help="how many of --prompts (default: %(default)s)")
    add("--prompt_column", help="column of --prompts (default: the run's, or prompt)")
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--prompt_template", help="for text (default: the run's); '{text}' sends it as it is")
    template.add_argument("--user_template", help="for messages (default: the run's)")
    add("--system_prompt", help="of messages (default: the run's)")
    add("--max_new_tokens", type=int, help="tokens of an answer (default: the run's, or 256)")
    add("--temperature", type=float, help="0 = the likeliest token (default: the run's, or 1)")
    add("--seed", type=int, help="of the random numbers (default: the run's)")
    add("--trust_remote_code", action="store_true", help="run code that comes with a model")
    given = parser.parse_args(argv)
    for name in ("num_prompts", "max_new_tokens"):
        if (count := getattr(given, name)) is not None and count < 1:
            raise ValueError(f"--{name} is {count}; give at least 1")
    policy = model_folder("model", given.model)
    record = Path(given.model) / "run.yaml"
    run: dict[str, Any] = read_yaml(str(record), option="the record") if record.is_file() else {}
    check_model_name("--reference", None if given.reference == "none" else given.reference)
    # Standard output is for the answers; what the trainer prints goes to standard error.
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        args = _configuration(given, run, folder)
        if any(run.get(name) for name in _OBJECT_OPTIONS):
            if given.reference not in (None, "none"):
                raise ValueError(f"--reference {given.reference!r} is not sampled with tools or environments; drop it")
            print("With tools or environments, the policy alone is sampled.")
        if lost := sorted(_OBJECT_ARGUMENTS & run.get(PROVENANCE, {}).get(IN_MEMORY, {}).keys()):
            print(f"Objects of a Python program are left out: {', '.join(lost)}; --reference MODEL names a reference.")
        say_loading()
        from alpaca_ppo.models.loading import load_processing_class
        from alpaca_ppo.trainer.from_arguments import answers_to

        script_args = argparse.Namespace(**{name: run.get(name) for name in ("model_name_or_path", *_OBJECT_OPTIONS)})
        tokenizer = load_processing_class(policy, trust_remote_code=args.trust_remote_code, field="model")
        answers = answers_to(_dataset(given, args, tokenizer), policy, tokenizer, script_args, args)
    for number, answer in enumerate(answers):
        if given.prompts is not None:
            print(f"prompt {number + 1}: {answer.prompt}")
        print(f"policy: {answer.response.strip() or '(empty)'}")
        if answer.of_reference is not None:
            print(f"reference: {answer.of_reference.strip() or '(empty)'}")
    return 0


def _configuration(given: argparse.Namespace, run: Mapping[str, Any], output_dir: str) -> PPOConfig:
    """The options of the run that affect an answer, under those of the command line."""
    options = options_of(PPOConfig)
    groups, names = ["Evaluation", "Rewards"], [*_LEFT_OUT]
    if not any(run.get(name) for name in _OBJECT_OPTIONS):
        groups.append("Environments")
    if given.prompt_template:
        names += ["user_template", "system_prompt", "prompt_column"]
    elif given.user_template:
        names += ["prompt_template", "prompt_column"]
    of_run = evaluation_options({name: value for name, value in run.items() if name in options})
    settings = {n: v for n, v in of_run.items() if n not in names and options[n].group not in groups}
    settings |= {name: value for name in _OVERRIDES if (value := getattr(given, name)) is not None}
    temperature = run.get("temperature", 1.0) if given.temperature is None else given.temperature
    tokens = run.get("response_len", 256) if given.max_new_tokens is None else given.max_new_tokens
    settings |= {"eval_temperature": temperature, "response_len": tokens, "output_dir": output_dir}
    settings["trust_remote_code"] = given.trust_remote_code or run.get("trust_remote_code", False)
    return PPOConfig(**settings)


def _dataset(given: argparse.Namespace, args: PPOConfig, tokenizer: Any) -> Any:
    """The first rows of `--prompts`; or one row with the text of `--prompt`, as a user message if the tokenizer has a
    chat template and no other template is given.
    """
    from datasets import Dataset

    from alpaca_ppo.data import PromptForm, load_prompt_dataset

    if given.prompts is not None:
        dataset = load_prompt_dataset(given.prompts)
        return dataset.select(range(min(given.num_prompts, len(dataset))))
    form = PromptForm.of(args)
    if len(form.columns) != 1:
        raise ValueError(f"{form} has {len(form.columns)} columns {form.columns}; give --prompts FILE")
    messages = [{"role": "user", "content": given.prompt}]
    as_message = tokenizer.chat_template and form.template is None
    return Dataset.from_list([{form.columns[0]: messages if as_message else given.prompt}])
