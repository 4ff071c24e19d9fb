"""A litdata state taken after an epoch's last batch begins the next epoch, while its `current_epoch` says the one before.

A loop that counts epochs, and goes on in the one that the state names, trains one epoch too many.
"""

import tempfile

import litdata

EPOCHS = 2


def number(row: int) -> dict[str, int]:
    return {"row": row}


def loader(folder: str) -> litdata.StreamingDataLoader:
    data = litdata.StreamingDataset(folder, shuffle=True, seed=7, drop_last=False)
    return litdata.StreamingDataLoader(data, batch_size=4)


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    litdata.optimize(fn=number, inputs=list(range(203)), output_dir=folder, chunk_size=32, num_workers=1)
    one = loader(folder)
    rows = sum(len(batch["row"]) for batch in one)
    state = one.state_dict()
    assert state["current_epoch"] == 1

    one = loader(folder)
    one.load_state_dict(state)
    for _ in range(state["current_epoch"], EPOCHS + 1):  # the rest of epoch 1, and epoch 2
        rows += sum(len(batch["row"]) for batch in one)
    print(f"{EPOCHS} epochs of 203 rows gave {rows} rows")
    assert rows == 203 * (EPOCHS + 1)
