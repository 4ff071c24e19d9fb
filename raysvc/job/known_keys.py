"""Lists what keys of other trainers are called in a job.

From `transformers.TrainingArguments`, TRL, axolotl and LLaMA-Factory. The table of docs/howto/keys.md is made from this one.

Always true:
- `NAME*` stands for all keys that begin so, and are not listed themselves;
- a key on the right is one of a job, or stands nowhere, with the reason.
"""

from __future__ import annotations

from typing import NamedTuple


class KnownKey(NamedTuple):
    """A key of a job.

    Attributes:
        path: dotted; "": a job has no such key.
        note: what is different.
    """

    path: str
    note: str = ""


_LORA = KnownKey("", "the built-in trainer trains all weights; for TRL with PEFT: raysvc init --trainer trl")
_NONE = KnownKey("", "the built-in trainer has none; for one of TRL: raysvc init --trainer trl")
_ADAMW = KnownKey("", "the built-in trainer has torch's AdamW alone")
_EVERY_STEP = KnownKey("", "every step is logged, in metrics.jsonl of the run folder")
_ROWS_OF_STEP = KnownKey("plan.batch_size", "rows of a step, over all ranks")
_CUT = KnownKey("plan.micro_batch_tokens", "cuts batch_size rows into micro-batches")
KNOWN_KEYS: dict[str, KnownKey] = {
    "model_name_or_path": KnownKey("trainer.model"),
    "base_model": KnownKey("trainer.model"),
    "tokenizer_name_or_path": KnownKey("tokenizer"),
    "tokenizer_name": KnownKey("tokenizer"),
    "eos_token": KnownKey("train_end", "append; the tokenizer's files say which token"),
    "pad_token": KnownKey("", "the tokenizer's files say which"),
    "padding_side": KnownKey("plan.layout", "padded_left"),
    "dataset_name": KnownKey("source.dataset"),
    "datasets": KnownKey("mixture.sources", "each with its weight"),
    "data_files": KnownKey("source.path"),
    "train_file": KnownKey("source.path"),
    "dataset_dir": KnownKey("source.path"),
    "data": KnownKey("source.path"),
    "files": KnownKey("source.path"),
    "type": KnownKey("source.format"),
    "dataset_config": KnownKey("source.subset"),
    "dataset_train_split": KnownKey("source.split"),
    "dataset_streaming": KnownKey("source.stream"),
    "streaming": KnownKey("source.stream"),
    "dataset_mixture": KnownKey("mixture.sources", "each with its weight"),
    "interleave_probs": KnownKey("mixture.sources", "each with its weight"),
    "weights": KnownKey("mixture.sources", "each with its weight"),
    "probabilities": KnownKey("mixture.sources", "each with its weight"),
    "max_samples": KnownKey("plan.rows"),
    "dataset": KnownKey("source.path", "raysvc init dataset_info.json:NAME"),
    "dataset_prepared_path": KnownKey("cache.root"),
    "cache_dir": KnownKey("cache.root"),
    "overwrite_cache": KnownKey("cache.force"),
    "remove_unused_columns": KnownKey("source.carry", "other columns are left out"),
    "dataset_text_field": KnownKey("source.columns", "{text: YOUR_COLUMN}"),
    "dataset_num_proc": KnownKey("workers.max"),
    "preprocessing_num_workers": KnownKey("workers.max"),
    "dataset_processes": KnownKey("workers.max"),
    "dataloader_num_workers": KnownKey("server.collate_threads"),
    "num_workers": KnownKey("server.collate_threads"),
    "dataloader_drop_last": KnownKey("plan.tail"),
    "dataloader_pin_memory": KnownKey("trainer.staging.pin_memory"),
    "dataloader_prefetch_factor": KnownKey("server.look_ahead_steps"),
    "chat_template_path": KnownKey("tokenizer.chat_template", "default: the tokenizer's own"),
    "chat_template": KnownKey("tokenizer.chat_template", "default: the tokenizer's own"),
    "template": KnownKey("tokenizer.chat_template", "default: the tokenizer's own"),
    "max_seq*": KnownKey("max_length"),
    "sequence_len": KnownKey("max_length"),
    "cutoff_len": KnownKey("max_length"),
    "max_prompt_length": KnownKey("max_length", "of prompt and answer"),
    "max_completion_length": KnownKey("max_length", "of prompt and answer"),
    "truncation_mode": KnownKey("truncation"),
    "sample_packing": KnownKey("plan.layout", "packed"),
    "packing": KnownKey("plan.layout", "packed"),
    "neat_packing": KnownKey("plan.layout", "packed"),
    "padding_free": KnownKey("plan.layout", "packed"),
    "group_by_length": KnownKey("plan.layout", "packed needs no padding"),
    "assistant_only_loss": KnownKey("train_on", "all_assistant_messages"),
    "completion_only_loss": KnownKey("train_on", "completion"),
    "train_on_inputs": KnownKey("train_on", "all_tokens trains inputs too"),
    "train_on_prompt": KnownKey("train_on", "all_tokens trains inputs too"),
    "roles_to_train": KnownKey("train_on"),
    "mask_history": KnownKey("train_on", "last_assistant_message"),
    "per_device_train_batch_size": _ROWS_OF_STEP,
    "train_batch_size": _ROWS_OF_STEP,
    "gradient_accumulation_steps": _CUT,
    "per_device_eval_batch_size": KnownKey("evals.NAME.batch_size"),
    "eval_batch_size": KnownKey("evals.NAME.batch_size"),
    "num_train_epochs": KnownKey("plan.epochs"),
    "num_epochs": KnownKey("plan.epochs"),
    "data_seed": KnownKey("plan.seed"),
    "lr": KnownKey("trainer.learning_rate"),
    "lr_scheduler_type": KnownKey("trainer.lr_schedule"),
    "lr_scheduler": KnownKey("trainer.lr_schedule"),
    "warmup_ratio": KnownKey("trainer.warmup_steps", "a number of steps"),
    "optim": _ADAMW,
    "optimizer": _ADAMW,
    "adam*": _ADAMW,
    "bf16": KnownKey("trainer.precision"),
    "bfloat16": KnownKey("trainer.precision"),
    "fp16": KnownKey("trainer.precision"),
    "dtype": KnownKey("trainer.precision"),
    "torch_dtype": KnownKey("trainer.precision"),
    "fsdp": KnownKey("trainer.strategy"),
    "fsdp_config": KnownKey("trainer.strategy"),
    "use_cpu": KnownKey("trainer.device"),
    "deepspeed": KnownKey(
        "trainer.strategy", "fsdp; your own loop may use DeepSpeed, see docs/integrations.md"
    ),
    "gradient_checkpointing": KnownKey("trainer.gradient_checkpointing"),
    "ddp*": _NONE,
    "neftune_noise_alpha": _NONE,
    "label_smoothing_factor": _NONE,
    "lr_scheduler_kwargs": _NONE,
    "use_liger_kernel": _NONE,
    "torch_compile": _NONE,
    "attn_implementation": _NONE,
    "flash*": _NONE,
    "sdp_attention": _NONE,
    "num_processes": KnownKey("trainer.dp_size"),
    "world_size": KnownKey("trainer.dp_size"),
    "num_gpus": KnownKey("trainer.dp_size"),
    "num_nodes": KnownKey("trainer.dp_size"),
    "nproc_per_node": KnownKey("trainer.dp_size"),
    "output_dir": KnownKey("trainer.run_dir"),
    "save_steps": KnownKey("trainer.checkpoint_every_steps"),
    "save_strategy": KnownKey("trainer.checkpoint_every_steps"),
    "saves_per_epoch": KnownKey("trainer.checkpoint_every_steps"),
    "save_total_limit": KnownKey("trainer.keep_checkpoints"),
    "eval_steps": KnownKey("trainer.eval_every_steps"),
    "evals_per_epoch": KnownKey("trainer.eval_every_steps"),
    "val_set_size": KnownKey("evals.NAME.share", "held out by prompt, the same rows for ever"),
    "val_size": KnownKey("evals.NAME.share", "held out by prompt, the same rows for ever"),
    "test*": KnownKey("evals.NAME.share", "held out by prompt, the same rows for ever"),
    "fraction": KnownKey("evals.NAME.share", "held out by prompt, the same rows for ever"),
    "validation_split": KnownKey("evals.NAME.share", "held out by prompt, the same rows for ever"),
    "eval_dataset": KnownKey("evals.NAME.source"),
    "validation_file": KnownKey("evals.NAME.source"),
    "dataset_test_split": KnownKey("evals.NAME.source"),
    "eval_strategy": KnownKey("trainer.eval_every_steps", "without it, evals run at the end"),
    "evaluation_strategy": KnownKey("trainer.eval_every_steps", "without it, evals run at the end"),
    "load_best_model_at_end": KnownKey("trainer.keep_best", "{eval: NAME, metric: loss}"),
    "metric_for_best_model": KnownKey(
        "trainer.keep_best.metric", "loss, bits_per_byte, rewards/accuracies, …"
    ),
    "greater_is_better": KnownKey("", "it follows from trainer.keep_best.metric"),
    "early_stopping_patience": KnownKey("trainer.stop_after.patience", "{eval: NAME, patience: 3}"),
    "early_stopping_threshold": KnownKey("trainer.stop_after.threshold"),
    "logging*": _EVERY_STEP,
    "wandb*": KnownKey("trainer.report_to"),
    "mlflow*": KnownKey("trainer.report_to"),
    "push_to_hub": KnownKey("", "raysvc export writes a folder"),
    "hub_model_id": KnownKey("", "raysvc export writes a folder"),
    "run_name": KnownKey("server.name"),
    "resume_from_checkpoint": KnownKey("trainer.resume", "a run resumes by itself"),
    "overwrite_output_dir": KnownKey("trainer.resume", "false puts an earlier run aside"),
    "loss_type": KnownKey("trainer.objective"),
    "pref_loss": KnownKey("trainer.objective"),
    "pref_beta": KnownKey("trainer.beta"),
    "rl": KnownKey("trainer.objective"),
    "stage": KnownKey("trainer.objective"),
    "ref_model": KnownKey("enrich.ref_logprobs.model"),
    "ref_model_name_or_path": KnownKey("enrich.ref_logprobs.model"),
    "precompute_ref_log_probs": KnownKey("enrich.ref_logprobs"),
    "simpo_gamma": KnownKey("trainer.margin"),
    "lora*": _LORA,
    "peft*": _LORA,
    "use_peft": _LORA,
    "finetuning_type": _LORA,
    "adapter": _LORA,
    "load_in*": _LORA,
    "bnb*": _LORA,
    "quantization*": _LORA,
}


def advice_on(key: str) -> str | None:
    """Returns what to write in place of a key of another trainer, or None where it is not known."""
    alike = (one for name, one in KNOWN_KEYS.items() if name.endswith("*") and key.startswith(name[:-1]))
    found = KNOWN_KEYS.get(key) or next(alike, None)
    if found is None:
        return None
    if not found.path:
        return found.note
    return f"write {found.path}" + (f" ({found.note})" if found.note else "")


def table() -> str:
    """The keys as the rows of a Markdown table: a row for all that are met with the same advice."""
    alike: dict[KnownKey, list[str]] = {}
    for key, one in KNOWN_KEYS.items():
        alike.setdefault(one, []).append(f"`{key}`")
    lines = [
        f"{', '.join(keys)} | {': '.join(filter(None, (f'`{one.path}`' if one.path else 'none', one.note)))}"
        for one, keys in alike.items()
    ]
    return "\n".join(["theirs | a job's", "--- | ---", *lines])
