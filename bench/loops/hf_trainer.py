"""Fine-tune a sequence classifier with the Hugging Face `Trainer`.

    python hf_trainer.py                                            # a tiny BERT, on the CPU
    python hf_trainer.py --model gpt2 --hidden 768 --layers 12 --heads 12 --seq-len 512 --batch-size 32 \
        --train-samples 6400 --bf16                                 # on a GPU, which Trainer uses if there is one

The weights are random and the dataset is synthetic, so nothing is downloaded.
"""

import argparse
import tempfile
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCAB = 2000


class Reviews(Dataset[dict[str, Any]]):
    """Reviews of random words. Whether one is positive is decided by the words that it starts with."""

    def __init__(self, num_samples: int, max_length: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.samples = []
        for _ in range(num_samples):
            length = int(rng.integers(max_length // 2, max_length + 1))
            label = int(rng.integers(2))
            ids = rng.integers(10, VOCAB, length)
            ids[:4] = rng.integers(10, 60, 4) + 100 * label
            self.samples.append({"input_ids": ids.tolist(), "attention_mask": [1] * length, "labels": label})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows how to pad; the reviews are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"[PAD]": 0, "[UNK]": 1} | {f"w{i}": i for i in range(2, VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", unk_token="[UNK]"
    )


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    if args.model == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=args.seq_len,
            n_embd=args.hidden,
            n_layer=args.layers,
            n_head=args.heads,
            num_labels=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
        return GPT2ForSequenceClassification(config)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden,
        max_position_embeddings=args.seq_len,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    labels = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((labels == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["bert", "gpt2"], default="bert")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--train-samples", type=int, default=240)
    parser.add_argument("--eval-samples", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output-dir", default=None)
    args = parser.parse_args()

    set_seed(42)
    tokenizer = make_tokenizer()
    training_args = TrainingArguments(
        output_dir=args.output_dir or tempfile.mkdtemp(prefix="hf-trainer-"),
        learning_rate=2e-4,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation,
        num_train_epochs=args.epochs,
        weight_decay=0.01,
        warmup_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_steps=10,
        dataloader_num_workers=args.workers,
        bf16=args.bf16,
        torch_compile=args.compile,
        use_cpu=args.device == "cpu",
        report_to="none",
    )
    trainer = Trainer(
        model=make_model(args),
        args=training_args,
        train_dataset=Reviews(args.train_samples, args.seq_len, seed=0),
        eval_dataset=Reviews(args.eval_samples, args.seq_len, seed=1),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
