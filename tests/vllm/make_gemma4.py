"""Makes the smallest Gemma 4 with its assistant (the MTP drafter) that vLLM takes for the real thing.

The weights are random, so nothing that the target says makes sense and a real acceptance would be
near 0: the tests use the pair with synthetic acceptance. What matters is that the path through vLLM
is that of Gemma 4: both kinds of attention, and an assistant whose layers share the keys and values
of the target. It runs in the environment that install.sh makes and takes seconds:

    $(tests/vllm/install.sh)/bin/python tests/vllm/make_gemma4.py

It writes into `models/` beside it, or into the folder that is its argument. The tokenizer is that of
train_llama.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
)

MODELS = Path(__file__).parent / "models"

HIDDEN_SIZE = 64
SHARED = {
    "vocab_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "max_position_embeddings": 2048,
    "sliding_window": 128,
    # No embeddings per layer: they are most of a small Gemma's weights.
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


def target() -> Gemma4ForCausalLM:
    return Gemma4ForCausalLM(
        Gemma4TextConfig(
            hidden_size=HIDDEN_SIZE,
            intermediate_size=128,
            num_hidden_layers=6,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
            final_logit_softcapping=30.0,
            **SHARED,
        )
    )


def assistant() -> Gemma4AssistantForCausalLM:
    layers = 4
    text = Gemma4TextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_kv_shared_layers=layers,
        layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
        dtype="bfloat16",
        **SHARED,
    )
    return Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(
            text_config=text, backbone_hidden_size=HIDDEN_SIZE, use_ordered_embeddings=False
        )
    )


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS
    torch.manual_seed(0)
    for name, model in (("gemma4-tiny", target()), ("gemma4-tiny-assistant", assistant())):
        model.to(torch.bfloat16).save_pretrained(folder / name)
        # It repeats the numbers of three tokens that config.json has.
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        print(f"{name}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
