"""A training loop of your own: `python train_torch.py`, again after a stop. Needs `raysvc[hf]`."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import raysvc

JOB = "job.yaml"
TOKENIZER = "tokenizer"
MODEL = "tiny"
LEARNING_RATE = 3e-3
OUT = Path("runs/torch")
SAVE_EVERY_STEPS = 50


def main() -> None:
    """Train all steps of the job that are left."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = raysvc.load(JOB)  # or raysvc.attach_rank(name, rank=0), of a job that raysvc serve serves
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(0)
    if MODEL == "tiny":  # random, for trying
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size)).to(device)
    else:
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    OUT.mkdir(parents=True, exist_ok=True)
    saved = OUT / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["data"])

    inputs_of = raysvc.model_inputs(model, loader.job.plan.layout)  # what keeps rows of a line apart
    loss = 0.0
    for micro in loader.micro_batches(device):
        logits = model(**inputs_of(micro.tensors)).logits
        labels = micro.tensors["labels"][:, 1:].flatten().long()  # -100 where there is no loss
        total = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")
        part = total * raysvc.loss_scale(micro.denominators, ranks=1)  # 1 / targets of the whole mini-batch
        part.backward()
        loss += float(part.detach())
        if micro.ends_mini:
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {micro.step}: loss {loss:.4f}", flush=True)
            loss = 0.0
        if micro.ends_step:
            loader.commit(micro.step)
            if loader.next_step % SAVE_EVERY_STEPS == 0 or not len(loader):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "data": loader.state_dict()}, draft := OUT / "draft.pt")
                draft.rename(saved)
    model.save_pretrained(OUT / "model")
    tokenizer.save_pretrained(OUT / "model")


if __name__ == "__main__":
    main()
