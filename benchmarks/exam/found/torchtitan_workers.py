"""Two worker processes of torchtitan's text loader read all rows each: with `num_workers=2`, every row is trained twice an epoch."""

import tempfile
from pathlib import Path

from datasets import Dataset
from torchtitan.hf_datasets import DatasetConfig, text_datasets


class Words:
    """A token a row, between a begin and an end."""

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [0, int(text), 0]


def rows_of(num_workers: int) -> list[int]:
    config = text_datasets.HuggingFaceTextDataLoader.Config(
        dataset="rows", infinite=False, num_workers=num_workers
    )
    loader = text_datasets.HuggingFaceTextDataLoader(
        config, dp_world_size=1, dp_rank=0, tokenizer=Words(), seq_len=8, local_batch_size=2
    )
    return [token for inputs, _ in loader for token in inputs["input"].reshape(-1).tolist() if token]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows"
        Dataset.from_dict({"text": [str(row) for row in range(1, 65)]}).save_to_disk(str(path))
        text_datasets.DATASETS["rows"] = DatasetConfig(
            str(path), Dataset.load_from_disk, lambda row: row["text"]
        )
        alone, two = rows_of(0), rows_of(2)
    print(f"{len(alone)} rows without workers, {len(two)} with two")
    assert sorted(two) == sorted([*alone, *alone])
