"""Train a small Mixtral on sequences that a language model can learn to continue.

python mixture_of_experts.py
python mixture_of_experts.py --hidden 1024 --layers 12 --heads 16 --experts 8 --context 1024 --batch-size 8 --bf16
"""

import argparse

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def make_batch(batch_size: int, context: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Arithmetic sequences modulo the size of the vocabulary."""
    start = torch.randint(vocab, (batch_size, 1), generator=generator)
    stride = torch.randint(1, 8, (batch_size, 1), generator=generator)
    return (start + stride * torch.arange(context)) % vocab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=1000)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 2,
        num_local_experts=args.experts,
        num_experts_per_tok=args.experts_per_token,
        max_position_embeddings=args.context,
        output_router_logits=True,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).to(args.device, torch.bfloat16 if args.bf16 else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=args.device != "cpu")
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        tokens = make_batch(args.batch_size, args.context, args.vocab, generator).to(args.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
