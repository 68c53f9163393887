"""Trains the built-in demo model (``libs/pdmesh/demo/model``) on a page of questions and answers about pdmesh.

Needs the test extras (transformers). Eight minutes on two cores are enough:

    python examples/train_demo.py libs/pdmesh/demo/model --minutes 8
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as typed_transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pdmesh_testing.tokenizers import SPECIAL_TOKENS, TOOL_TEMPLATE

CORPUS = Path(__file__).with_name("demo_corpus.txt")
transformers: Any = typed_transformers  # only partly typed
END_OF_TEXT, _, END_OF_TURN = SPECIAL_TOKENS
CONTEXT_TOKENS, BATCH = 256, 24
LEARNING_RATE = 3e-3


class Topic(NamedTuple):
    questions: list[str]
    answer: str


def read_topics() -> list[Topic]:
    lines = [line[3:] for line in CORPUS.read_text(encoding="utf-8").splitlines() if line]
    return [Topic(questions.split("|"), answer) for questions, answer in zip(lines[::2], lines[1::2], strict=True)]


def make_tokenizer(topics: list[Topic]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [line for topic in topics for line in (*topic.questions, *[topic.answer] * 3)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([*text, *["system user assistant"] * 5], trainer)
    return tokenizer


def documents(topics: list[Topic], rng: random.Random) -> Iterator[str]:
    """Chats of one to three turns, and now and then plain text."""

    def asked(question: str) -> str:
        variants = [question.lower(), question.rstrip("?!."), f"{question} Please.", question]
        return rng.choices(variants, weights=[3, 2, 1, 6])[0]

    while True:
        if rng.random() < 0.15:
            topic = rng.choice(topics)
            question = f"Question: {rng.choice(topic.questions)}\nAnswer: " if rng.random() < 0.5 else ""
            yield f"{question}{topic.answer}{END_OF_TEXT}"
            continue
        turns: list[str] = []
        if rng.random() < 0.3:
            turns.append(f"system\n{rng.choice(['You are a helpful assistant.', 'Be brief.'])}")
        for topic in rng.choices(topics, k=rng.choice([1, 1, 1, 2, 2, 3])):
            turns += [f"user\n{asked(rng.choice(topic.questions))}", f"assistant\n{topic.answer}"]
        yield "".join(f"<|im_start|>{turn}{END_OF_TURN}\n" for turn in turns)


def batches(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[torch.Tensor]:
    token_ids: list[int] = []
    while True:
        while len(token_ids) < CONTEXT_TOKENS * BATCH:
            token_ids += tokenizer.encode(next(texts)).ids
        yield torch.tensor(token_ids[: CONTEXT_TOKENS * BATCH]).view(BATCH, CONTEXT_TOKENS)
        token_ids = token_ids[CONTEXT_TOKENS * BATCH :]


def train(tokenizer: Tokenizer, topics: list[Topic], minutes: float) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        eos_token_id=tokenizer.token_to_id(END_OF_TURN),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    began_s = time.monotonic()
    for step, batch in enumerate(batches(documents(topics, random.Random(0)), tokenizer)):
        share_done = (time.monotonic() - began_s) / (minutes * 60)
        if share_done >= 1:
            return model
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, step / 50) * (1 - 0.97 * share_done)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}, {share_done:.0%}: loss {loss.item():.3f}")
    raise AssertionError("the batches never end")


def save(model: Any, tokenizer: Tokenizer, directory: Path) -> None:
    end_of_text, end_of_turn = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=end_of_text,
        eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=end_of_text,
        do_sample=True,
        temperature=0.1,
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": TOOL_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    topics = read_topics()
    tokenizer = make_tokenizer(topics)
    save(train(tokenizer, topics, arguments.minutes), tokenizer, arguments.directory)


if __name__ == "__main__":
    main()
