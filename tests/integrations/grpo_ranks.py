"""A rank of `accelerate launch`: GRPO on the prompts of a server, then by TRL alone on the raw prompts. Started by `test_trl_prompts.py`.

python -m tests.integrations.grpo_ranks SERVER ADDRESS GROUP FOLDER TOKENIZER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .test_trl_prompts import EACH, behind_server, facts, tokenizer_of, trl_alone


def main(server: str, address: str, group: str, folder: Path, tokenizer_path: str) -> None:
    """Writes what each of both did: facts of its optimizer steps, prompts that this rank generated for."""
    import torch

    import raysvc

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    options = {"per_device_train_batch_size": 3 * EACH // ranks}  # three prompts, one of them on both ranks
    tokenizer = tokenizer_of(tokenizer_path)
    with raysvc.attach_rank(server, ranks, rank=rank, address=address, group=group) as client:
        ours, seen = behind_server("grpo", folder, client, tokenizer, seeded=True, **options)
        ours.train()
        left = client.schedule.num_steps - client.next_step
    raw = json.loads((folder / "in_order.json").read_text())
    theirs, their_seen = trl_alone("grpo", folder, raw, tokenizer, "plain", **options)
    theirs.train()
    made = {"ours": [facts(ours), seen], "theirs": [facts(theirs), their_seen], "left": left}
    (folder / f"rank_{rank}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]), sys.argv[5])
