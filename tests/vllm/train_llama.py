"""Trains the tokenizer and the two Llamas of the test bed on what Python itself ships.

The target (2 layers) and its draft model (1 layer) learn from the standard library's source, so that
the draft has real acceptance: much on code, some on prose, little on random words. It needs no
network and runs in the environment that install.sh makes, at about a second of CPU time a step:

    PYTHON=$(tests/vllm/install.sh)/bin/python
    $PYTHON tests/vllm/train_llama.py tokenizer
    $PYTHON tests/vllm/train_llama.py target --steps 2000
    $PYTHON tests/vllm/train_llama.py draft --steps 1000

It writes into `models/` beside it, or into the folder that `--models` names. All the other models
use this tokenizer too, so a new one makes them all void: run all three, then make_gemma4.py.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MODELS = Path(__file__).parent / "models"

VOCABULARY = 1024
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, BOS, EOS = range(3)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SEQUENCE, BATCH = 256, 16
"""Tokens and sequences of a training step. Prompts beyond a sequence are strange to the models."""
LEARNING_RATE = {"target": 2e-3, "draft": 3e-3}
WARMUP_STEPS = 50
FINAL_RATE = 0.05

SHAPES = {
    "target": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "heads": 4},
    "draft": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 1, "heads": 3},
}
HEAD_SIZE = 32


def corpus() -> list[str]:
    """The standard library's modules without its tests, and the licence texts where Debian has them.

    In an order that is random but the same every time.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    files = [
        file
        for file in sorted(library.rglob("*.py"))
        if left_out.isdisjoint(file.relative_to(library).parts)
    ]
    files += sorted(Path("/usr/share/common-licenses").glob("*"))
    random.Random(0).shuffle(files)
    return [file.read_text(errors="replace") for file in files]


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on the heads of some files, and save it beside the target."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[:20_000] for text in corpus()[:400]), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    ).save_pretrained(folder / "llama-target")


def make_model(kind: str) -> LlamaForCausalLM:
    """An untrained model of one of the `SHAPES`."""
    shape = dict(SHAPES[kind])
    heads = shape.pop("heads")
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=HEAD_SIZE,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            **shape,
        )
    )


def train(kind: str, steps: int, folder: Path) -> None:
    """Train a model for so many steps, and save it as bfloat16.

    Half the bits change its acceptance by less than the choice of prompts does.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama-target")
    ids: list[int] = []
    for text in corpus():
        ids += [BOS, *tokenizer.encode(text, verbose=False), EOS]
    tokens = torch.tensor(ids)
    model = make_model(kind)
    print(f"{kind}: {model.num_parameters():,} parameters, {len(tokens):,} tokens", flush=True)

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE[kind], betas=(0.9, 0.95), weight_decay=0.05
    )
    for step in range(steps):
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        cooled = 1 - (1 - FINAL_RATE) * step / steps
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE[kind] * warm * cooled
        starts = torch.randint(0, len(tokens) - SEQUENCE, (BATCH,)).tolist()
        batch = torch.stack([tokens[start : start + SEQUENCE] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"{kind}: step {step + 1}, loss {loss.item():.3f}", flush=True)
    save(model, folder / f"llama-{kind}")


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Save what vLLM reads: config.json and model.safetensors."""
    model.to(torch.bfloat16).save_pretrained(folder)
    # It repeats the numbers of three tokens that config.json has.
    (folder / "generation_config.json").unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["tokenizer", "target", "draft"])
    parser.add_argument("--steps", type=int, default=2000, help="how long to train")
    parser.add_argument("--models", type=Path, default=MODELS, help="where to write")
    arguments = parser.parse_args()
    if arguments.what == "tokenizer":
        make_tokenizer(arguments.models)
    else:
        train(arguments.what, arguments.steps, arguments.models)


if __name__ == "__main__":
    main()
