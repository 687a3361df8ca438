"""`alpaca-ppo sample`: answers of a trained policy beside its reference's, to one prompt or to those of a file.

Prompts are prepared as in training; transformers samples the answers. For a dialogue, its `transformers chat` reads a
run's final/policy.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from alpaca_ppo.cli.evaluate import model_folder
from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.model_names import check_model_name
from alpaca_ppo.config.parser import read_yaml
from alpaca_ppo.config.run_file import IN_MEMORY, PROVENANCE

_LONGEST_PROMPT = 1_000_000
"""Tokens; the model's own limit shows when it is exceeded."""


def main(argv: Sequence[str]) -> int:
    """Answers prompts; returns the exit status.

    Raises:
        ValueError: for a run without final models, a model or a file that cannot be loaded, or a number out of range.
    """
    given = _parser().parse_args(argv)
    policy, record = model_folder(given.model), Path(given.model) / "run.yaml"
    run: dict[str, Any] = read_yaml(str(record)) if record.is_file() else {}
    template = given.prompt_template or run.get("prompt_template")
    temperature = run.get("temperature", 1.0) if given.temperature is None else given.temperature
    max_new_tokens = run.get("response_len", 256) if given.max_new_tokens is None else given.max_new_tokens
    check_model_name("--reference", None if given.reference == "none" else given.reference)
    reference = given.reference or _reference_of(run)
    # They import torch, for which `--help` need not wait.
    import torch
    from datasets import Dataset

    from alpaca_ppo.data import load_prompt_dataset, prepare_prompts
    from alpaca_ppo.data.templates import PROMPT_TEMPLATES, PromptTemplate
    from alpaca_ppo.generation import resolve_stop_tokens, resolve_turn_end
    from alpaca_ppo.models.loading import load_processing_class

    tokenizer = load_processing_class(policy, trust_remote_code=given.trust_remote_code, field="model")
    if given.prompts is not None:
        dataset = load_prompt_dataset(given.prompts, split=None, config_name=None)
        dataset = dataset.select(range(min(given.num_prompts, len(dataset))))
    elif template is not None:
        columns = (PROMPT_TEMPLATES.get(template) or PromptTemplate(template)).columns
        if len(columns) != 1:
            raise ValueError(f"prompt_template {template!r} has {len(columns)} columns {columns}; give --prompts FILE")
        dataset = Dataset.from_list([{columns[0]: given.prompt}])
    else:
        messages = [{"role": "user", "content": given.prompt}]
        dataset = Dataset.from_list([{"prompt": messages if tokenizer.chat_template else given.prompt}])
    prompts = prepare_prompts(
        dataset,
        tokenizer,
        query_len=_LONGEST_PROMPT,
        prompt_column="prompt" if given.prompts is None else given.prompt_column or run.get("prompt_column", "prompt"),
        prompt_template=template,
        chat_template_kwargs=run.get("chat_template_kwargs"),
    )
    end = resolve_turn_end(tokenizer) if prompts.are_messages else None
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    how: Any = {"max_new_tokens": max_new_tokens, **(sampling if temperature else {"do_sample": False})}
    models = _load(policy, reference, given.trust_remote_code)
    for number in range(len(prompts)):
        ids, text = prompts[number]["input_ids"], prompts[number]["row"]["prompt"]
        if given.prompts is not None:
            # The text itself, because a tokenizer may not know all of its words; of messages, what the template made.
            print(f"prompt {number + 1}: {text if isinstance(text, str) else tokenizer.decode(ids)}")
        for name, (model, active) in models.items():
            stop = list(resolve_stop_tokens(tokenizer, model.generation_config, () if end is None else (end,)))
            torch.manual_seed(given.seed + number)
            with active():
                prompt = torch.tensor([ids], device=model.device)
                tokens = model.generate(prompt, eos_token_id=stop, pad_token_id=stop[0], **how)[0, len(ids) :]
            print(f"{name}: {tokenizer.decode(tokens, skip_special_tokens=True).strip() or '(empty)'}", flush=True)
    return 0


def _reference_of(run: dict[str, Any]) -> str | None:
    """The reference of a run: the model that it names, or the one that it started from; "none" if that was an object
    of a Python program; None = the base of an adapter, else none.
    """
    named = run.get("reference")
    if named == "none" or run.get("use_peft"):
        return "none" if named == "none" else None
    if {"ref_model", "model"} & run.get(PROVENANCE, {}).get(IN_MEMORY, {}).keys():
        print("The run's reference was an object of a Python program and is left out; --reference MODEL names one.")
        return "none"
    return run.get("model_name_or_path") if named in (None, *REFERENCES) else str(named)


def _load(policy: str, reference: str | None, trust_remote_code: bool) -> dict[str, tuple[Any, Callable[[], Any]]]:
    """The models by name, each with what is entered while it answers."""
    import torch

    from alpaca_ppo.adapters import is_adapter, read_policy_adapter
    from alpaca_ppo.models import load_causal_lm

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)

    def load(name: str) -> Any:
        model: Any = load_causal_lm(name, trust_remote_code=trust_remote_code, dtype=dtype)
        return model.to(device).eval()

    models: dict[str, tuple[Any, Callable[[], Any]]] = {}
    if is_adapter(policy):
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(load(str(read_policy_adapter(policy).base_model_name_or_path)), policy)
        models["policy"] = adapted.get_base_model(), nullcontext
        if reference is None:
            models["reference"] = adapted.get_base_model(), adapted.disable_adapter
    else:
        models["policy"] = load(policy), nullcontext
    if reference not in (None, "none"):
        models["reference"] = load(str(reference)), nullcontext
    return models


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alpaca-ppo sample", description="Shows what a policy answers, beside its reference.", allow_abbrev=False
    )
    parser.add_argument("model", help="a run's output_dir, or a model: a folder, an adapter's folder or a hub id")
    parser.add_argument("--reference", metavar="MODEL", help="to compare with, or none (default: the run's)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="answer this prompt")
    source.add_argument("--prompts", metavar="DATA", help="answer the prompts of a file, a folder or a hub dataset")
    parser.add_argument("--num_prompts", type=int, default=8, help="how many of --prompts (default: %(default)s)")
    parser.add_argument("--prompt_column", help="column of --prompts (default: the run's, or prompt)")
    parser.add_argument(
        "--prompt_template", help="named template or format string (default: the run's); '{text}' sends text as it is"
    )
    parser.add_argument("--max_new_tokens", type=int, help="tokens of an answer (default: the run's, or 256)")
    parser.add_argument("--temperature", type=float, help="0 = the likeliest token (default: the run's, or 1)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with a model")
    return parser
