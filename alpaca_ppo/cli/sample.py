"""`alpaca-ppo sample`: answers of a trained policy and of its reference, to one prompt or to those of a file.

Prompts are prepared as in training; transformers samples the answers. There is no dialogue: `transformers chat` reads a
run's final/policy.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.names import check_model_name, model_folder
from alpaca_ppo.config.parser import read_yaml
from alpaca_ppo.config.run_file import IN_MEMORY, PROVENANCE
from alpaca_ppo.library_output import say_loading

_FORM = ("prompt_template", "user_template", "system_prompt", "chat_template_kwargs")
# In tokens; more than any model reads, so that no prompt is dropped here.
_LONGEST_PROMPT = 1_000_000


def _parser() -> argparse.ArgumentParser:
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
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--trust_remote_code", action="store_true", help="run code that comes with a model")
    return parser


def _form(given: argparse.Namespace, run: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `PromptForm`: of the command line, or else of the run."""
    form = {name: run.get(name) for name in _FORM}
    if given.prompt_template or given.user_template:
        form |= {"prompt_template": given.prompt_template, "user_template": given.user_template}
    form["system_prompt"] = given.system_prompt or form["system_prompt"]
    form["prompt_column"] = "prompt" if given.prompt else given.prompt_column or run.get("prompt_column", "prompt")
    return form


def _generation(given: argparse.Namespace, run: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `generate`: of the command line, or else of the run."""
    temperature = run.get("temperature", 1.0) if given.temperature is None else given.temperature
    max_new_tokens = run.get("response_len", 256) if given.max_new_tokens is None else given.max_new_tokens
    generation: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature != 0}
    if temperature:
        generation |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    return generation


def sample(argv: Sequence[str]) -> int:
    """Prints the answers of the policy, and of its reference if there is one."""
    given = _parser().parse_args(argv)
    policy = model_folder("model", given.model)
    record = Path(given.model) / "run.yaml"
    run: dict[str, Any] = read_yaml(str(record)) if record.is_file() else {}
    check_model_name("--reference", None if given.reference == "none" else given.reference)
    say_loading()
    import torch

    from alpaca_ppo.data import PromptForm, prepare_prompts
    from alpaca_ppo.data.prompts import prompt_text
    from alpaca_ppo.generation import resolve_stop_tokens, resolve_turn_end
    from alpaca_ppo.models.loading import load_processing_class

    tokenizer = load_processing_class(policy, trust_remote_code=given.trust_remote_code, field="model")
    form = PromptForm(**_form(given, run))
    prompts = prepare_prompts(_dataset(given, form, tokenizer), tokenizer, query_len=_LONGEST_PROMPT, form=form)
    if difference := prompts.other_wording(tokenizer):
        print(difference)
    models = _load_models(given, policy, run)
    turn_end = resolve_turn_end(tokenizer) if prompts.are_messages else None
    turn_ends = [] if turn_end is None else [turn_end]
    stops = {name: list(resolve_stop_tokens(tokenizer, m.generation_config, turn_ends)) for name, m in models.items()}
    generation = _generation(given, run)
    for number, item in enumerate(prompts):
        if given.prompts is not None:
            print(f"prompt {number + 1}: {prompt_text(item, tokenizer)}")
        for name, model in models.items():
            torch.manual_seed(given.seed + number)
            stopping = {"eos_token_id": stops[name], "pad_token_id": stops[name][0]}
            answer = _answer(model, tokenizer, item["input_ids"], {**generation, **stopping})
            print(f"{name}: {answer or '(empty)'}", flush=True)
    return 0


def _answer(model: Any, tokenizer: Any, ids: list[int], generation: dict[str, Any]) -> str:
    """The text that `model` writes after the prompt `ids`."""
    import torch

    prompt = torch.tensor([ids], device=model.device)
    sequences = model.generate(prompt, attention_mask=torch.ones_like(prompt), **generation)
    return str(tokenizer.decode(sequences[0, len(ids) :], skip_special_tokens=True)).strip()


def _load_models(given: argparse.Namespace, policy: str, run: dict[str, Any]) -> dict[str, Any]:
    """The policy, and its reference if there is one, on a GPU in bfloat16 or else on the CPU in float32."""
    import torch

    from alpaca_ppo.adapters.files import is_adapter, read_policy_adapter
    from alpaca_ppo.models.loading import load_causal_lm

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)

    def load(name: str) -> Any:
        return load_causal_lm(name, trust_remote_code=given.trust_remote_code, dtype=dtype).to(device).eval()

    base = str(read_policy_adapter(policy).base_model_name_or_path) if is_adapter(policy) else None
    models = {"policy": load(base or policy)}
    if base is not None:
        from peft import PeftModel

        # The base model, with the LoRA layers that PEFT has put into it.
        models["policy"] = PeftModel.from_pretrained(models["policy"], policy).get_base_model()
    reference = _reference(given.reference, run, base)
    if reference is not None:
        models["reference"] = load(model_folder("reference", reference))
    return models


def _reference(given: str | None, run: dict[str, Any], base: str | None) -> str | None:
    """The model to compare with, or None.

    Args:
        given: `--reference`, which wins over the run's.
        run: the run's record. A reference that was an object of a Python program is left out, with a message.
        base: the model below the policy, if that is an adapter.
    """
    reference = given or run.get("reference") or "auto"
    if reference == "none":
        return None
    if reference not in REFERENCES:
        return str(reference)
    if base is None and {"ref_model", "model"} & run.get(PROVENANCE, {}).get(IN_MEMORY, {}).keys():
        print("The run's reference was an object of a Python program and is left out; --reference MODEL names one.")
        return None
    return base or run.get("model_name_or_path")


def _dataset(given: argparse.Namespace, form: Any, tokenizer: Any) -> Any:
    """The rows of `--prompts`; or one row with `--prompt`, as a message if the tokenizer has a chat template."""
    from datasets import Dataset

    from alpaca_ppo.data import load_prompt_dataset

    if given.prompts is not None:
        dataset = load_prompt_dataset(given.prompts)
        return dataset.select(range(min(given.num_prompts, len(dataset))))
    if len(form.columns) != 1:
        raise ValueError(f"{form} has {len(form.columns)} columns {form.columns}; give --prompts FILE")
    messages = [{"role": "user", "content": given.prompt}]
    as_message = tokenizer.chat_template and form.template is None
    return Dataset.from_list([{form.columns[0]: messages if as_message else given.prompt}])
