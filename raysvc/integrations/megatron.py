"""Makes what Megatron's `get_batch` returns, of a micro-batch of a server. Imports megatron-core for packed lines alone.

    client = raysvc.attach_rank(name)  # after initialize_model_parallel
    for micro in client.micro_batches():
        batch = megatron_batch(micro.tensors, client)

Axes: B lines, L tokens of a line; of this rank's part of it, where the server cuts lines (`plan.cp_split`).
Always true:
- labels and their mask stand at the token that predicts them, before anybody cuts;
- all but `attention_mask` is [B, L], as `get_batch_on_this_cp_rank` and a broadcast to tensor-parallel ranks want it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysvc.collate.columns import IGNORED
from raysvc.errors import ConfigError
from raysvc.integrations.row_tensors import Tensors, moved_labels

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from raysvc.client.rank_client import RankClient


def megatron_batch(tensors: Tensors, client: RankClient) -> dict[str, Any]:
    """Returns `tokens`, `labels` and `position_ids`, int64, and `loss_mask`, float32; `attention_mask` is None: causal.

    Args:
        tensors: of a micro-batch, or an item of `as_torch_dataset()`.
        client: which gave it. Where its server cuts lines, leave out `get_batch_on_this_cp_rank`, which would cut them again.

    Raises:
        ConfigError: lines are whole, and do not divide for that function.
    """
    labels = tensors["labels"]
    labels = labels.long() if client.lease.cuts else moved_labels(labels, client.mesh.cp)
    return {
        "tokens": tensors["input_ids"].long(),
        "labels": labels.clamp(min=0),  # Megatron computes a loss for every label, and masks it afterwards
        "loss_mask": (labels != IGNORED).float(),
        "attention_mask": None,
        "position_ids": tensors["position_ids"].long(),
    }


def packed_rows(tensors: Tensors, client: RankClient) -> PackedSeqParams:
    """Returns where the rows of a packed line begin and end, for attention over `thd`; the padding behind them counts as one more.

    Raises:
        ConfigError: the micro-batch is no packed line, or it was cut otherwise than by row.
    """
    if "cu_seqlens" not in tensors or len(tensors["input_ids"]) != 1:
        raise ConfigError("plan.layout", "makes no micro-batch of one packed line", "use packed")
    parts = client.mesh.cp if client.lease.cuts else 1
    if parts > 1 and "cu_seqlens_local" not in tensors:
        raise ConfigError("plan.cp_split", "cuts a packed line across its rows", "use zigzag, as thd is cut")
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = tensors["cu_seqlens"]
    width = tensors["input_ids"].shape[1] * parts
    if int(ends[-1]) < width:
        ends = torch.cat([ends, ends.new_tensor([width])])
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    longest = int(ends.diff().max())
    return PackedSeqParams("thd", **dict.fromkeys(names, ends), max_seqlen_q=longest, max_seqlen_kv=longest)
