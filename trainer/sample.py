"""Text out of a run's newest checkpoint."""

from pathlib import Path

import torch

from trainer import checkpoint, tokenizer
from trainer.errors import UserError
from trainer.model import Decoder
from trainer.plan import Plan


@torch.no_grad()
def sample(run: Path, prompt: str, count: int, temperature: float, top_k: int, seed: int, device: torch.device,
           say=lambda line: None) -> str:
    """The prompt and up to `count` tokens more, drawn at `temperature` (0 takes the likeliest) from the `top_k`
    likeliest; ends at an end of text. UserError if the run has no checkpoint or tokenizer."""
    if not (run / "plan.json").is_file():
        raise UserError(f"run {run} holds no plan.json; name a folder that `train` made, such as results/runs/...")
    plan = Plan.load(run / "plan.json")
    if not (run / "tokenizer.json").is_file():
        raise UserError(f"run {run} has no tokenizer.json: its token file named no tokenizer, so text can't be read")
    coder = tokenizer.load(run / "tokenizer.json")
    tensors = checkpoint.Tensors(checkpoint.newest(run, say)[1])
    model = Decoder(plan.model, plan.step.length, device)
    try:
        model.load_state_dict({name.removeprefix("model."): tensors[name] for name in tensors.names
                               if name.startswith("model.")})
    except RuntimeError as e:
        raise UserError(f"run {run}: its checkpoint is not of its plan's model ({str(e).splitlines()[0]:.80})") from None
    end = coder.token_to_id(tokenizer.END_OF_TEXT)
    ids = coder.encode(prompt, add_special_tokens=False).ids or [end or 0]
    generator = torch.Generator(device).manual_seed(seed)
    for _ in range(count):
        window = torch.tensor([ids[-plan.step.length:]], device=device)
        logits = model.logits(model(model.embed(window))[0, -1])
        if temperature < 1e-4:
            token = int(logits.argmax())
        else:
            best, which = logits.topk(min(top_k, len(logits)))
            token = int(which[torch.multinomial((best / temperature).softmax(0), 1, generator=generator)])
        if token == end:
            break
        ids.append(token)
    return coder.decode(ids)
