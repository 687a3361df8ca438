"""`alpaca-ppo sample`: answers of a trained policy beside its reference's, typed at a prompt or from a file."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from alpaca_ppo.config.checks import REFERENCES
from alpaca_ppo.config.model_names import check_model_name
from alpaca_ppo.config.parser import read_yaml
from alpaca_ppo.config.run_file import IN_MEMORY, PROVENANCE

_DESCRIPTION = (
    "Shows what a policy answers, beside its reference. Without --prompt and --prompts it reads prompts from the "
    "terminal; /new starts a new conversation and /quit ends."
)


def main(argv: Sequence[str]) -> int:
    """Answers prompts; returns the exit status.

    Raises:
        ValueError: for a run without final models, a model or a file that cannot be loaded, or a number out of range.
    """
    given = _parser().parse_args(argv)
    if given.max_new_tokens is not None and given.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {given.max_new_tokens}; it must be at least 1")
    if given.temperature is not None and given.temperature < 0:
        raise ValueError(f"temperature is {given.temperature}; it must be at least 0, which takes the likeliest token")
    policy, run = resolve_policy(given.model)
    check_model_name("--reference", None if given.reference == "none" else given.reference)
    reference = given.reference or _reference_of(run)
    template = given.prompt_template or run.get("prompt_template")
    # They import torch, for which `--help` need not wait.
    from alpaca_ppo.cli.chat import (
        Conversation,
        Sampling,
        load_speakers,
        make_prompts,
        template_columns,
        what_to_type,
    )
    from alpaca_ppo.data import load_prompt_dataset
    from alpaca_ppo.models.loading import load_processing_class

    tokenizer = load_processing_class(policy, trust_remote_code=given.trust_remote_code, field="model")
    temperature = run.get("temperature", 1.0) if given.temperature is None else given.temperature
    how = Sampling(given.max_new_tokens or run.get("response_len", 256), temperature, given.seed)
    chat = template is None and not given.plain and tokenizer.chat_template is not None
    if given.prompt is not None and template is not None:
        template_columns(given.prompt, template)
    prompts = None
    if given.prompts is not None:
        dataset = load_prompt_dataset(given.prompts, split=None, config_name=None)
        dataset, of_chat = dataset.select(range(min(given.num_prompts, len(dataset)))), run.get("chat_template_kwargs")
        column = given.prompt_column or run.get("prompt_column", "prompt")
        prompts = make_prompts(dataset, tokenizer, template, column=column, chat_template_kwargs=of_chat)
    speakers = load_speakers(policy, reference, trust_remote_code=given.trust_remote_code)
    if prompts is not None:
        _answer_all(prompts, speakers, tokenizer, how)
        return 0
    conversation = Conversation(tokenizer, template, chat=chat, chat_template_kwargs=run.get("chat_template_kwargs"))
    if given.prompt is None and template is not None:
        print(what_to_type(template))
    typed = iter([given.prompt]) if given.prompt is not None else _typed(conversation.messages.clear)
    for number, text in enumerate(typed):
        try:
            prompt = conversation.prompt(text)
        except ValueError as error:
            if given.prompt is not None:
                raise
            # What was typed can be typed again.
            print(error)
            continue
        answers = [speaker.answer(prompt, tokenizer, how, chat=chat, number=number) for speaker in speakers]
        for speaker, answer in zip(speakers, answers, strict=True):
            print(f"{speaker.name}: {answer}", flush=True)
        conversation.note(answers[0].text)
    return 0


def resolve_policy(name: str) -> tuple[str, dict[str, Any]]:
    """The folder or hub id of the policy that `name` means, and the options of its run, empty if `name` is no run.

    Raises:
        ValueError: for a run, or a checkpoint of one, without models that `from_pretrained` loads.
    """
    folder = Path(name)
    check_model_name("model", name)
    if (folder / "state.json").is_file():
        raise ValueError(
            f"{name!r} is a checkpoint to resume from; alpaca-ppo export {name} --to FOLDER writes its models, and "
            "FOLDER/policy can be sampled"
        )
    if not (folder / "run.yaml").is_file():
        return name, {}
    if not (folder / "final/policy").is_dir():
        raise ValueError(
            f"the run {name!r} has not ended, so final/policy is not there; alpaca-ppo export {name} --to FOLDER "
            "writes the models of its newest checkpoint"
        )
    return str(folder / "final/policy"), read_yaml(str(folder / "run.yaml"))


def _reference_of(run: dict[str, Any]) -> str | None:
    """The reference of a run: the model that it names, or the one that it started from; "none" if that was an object
    of a Python program.
    """
    in_memory = run.get(PROVENANCE, {}).get(IN_MEMORY, {})
    started_from = "ref_model" if "ref_model" in in_memory else "model"
    if started_from in in_memory and not run.get("use_peft"):
        print(
            f"The run was given its {started_from} in memory ({in_memory[started_from]}), so there is no reference "
            "beside the policy; --reference MODEL names one."
        )
        return "none"
    named = run.get("reference")
    if named == "none" or run.get("use_peft"):
        # An adapter's reference is its base, which the saved adapter names.
        return "none" if named == "none" else None
    return run.get("model_name_or_path") if named in (None, *REFERENCES) else str(named)


def _typed(start_anew: Callable[[], Any]) -> Iterator[str]:
    """What the user types, until the end of the input or /quit."""
    while True:
        try:
            text = input("prompt> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/quit":
            return
        if text == "/new":
            start_anew()
        elif text:
            yield text


def _answer_all(prompts: Any, speakers: Any, tokenizer: Any, how: Any) -> None:
    for number in range(len(prompts)):
        prompt, text = prompts[number]["input_ids"], prompts[number]["row"]["prompt"]
        # The text itself, because a tokenizer may not know all of its words; of messages, what the template made.
        print(f"prompt {number + 1}: {text if isinstance(text, str) else tokenizer.decode(prompt)}")
        for speaker in speakers:
            answer = speaker.answer(prompt, tokenizer, how, chat=prompts.are_messages, number=number)
            print(f"{speaker.name}: {answer}", flush=True)
        print()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="alpaca-ppo sample", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("model", help="a run's output_dir, or a model: a folder, an adapter's folder or a hub id")
    parser.add_argument(
        "--reference",
        metavar="MODEL",
        help="model to compare with, or none (default: the run's reference; of an adapter, its base)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt", metavar="TEXT", help="answer this prompt and end; a JSON object gives several columns of a template"
    )
    source.add_argument("--prompts", metavar="DATA", help="answer the prompts of a file, a folder or a hub dataset")
    parser.add_argument("--num_prompts", type=int, default=8, help="how many of --prompts (default: %(default)s)")
    parser.add_argument("--prompt_column", help="column of --prompts (default: the run's, or prompt)")
    parser.add_argument("--prompt_template", help="named template or format string (default: the run's)")
    parser.add_argument("--plain", action="store_true", help="send text as it is, without the chat template")
    parser.add_argument("--max_new_tokens", type=int, help="tokens of an answer (default: the run's, or 256)")
    parser.add_argument("--temperature", type=float, help="0 = the likeliest token (default: the run's, or 1)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with a model")
    return parser
