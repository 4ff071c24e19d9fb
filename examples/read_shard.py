"""Read a shard in a worker that has numpy but not raysvc: copy this file to it. The format: docs/wire.md.

shard = read_shard(value)  # what Ray hands over for a ref of `MiniBatch.shards`
for micro in shard.micro_batches():
    train(micro["input_ids"], micro["labels"])
"""

import json
from types import SimpleNamespace

FORMAT, VERSION = "raysvc.shard", 1


class ForeignShard(SimpleNamespace):
    """The header's keys and the arrays as attributes; see docs/wire.md."""

    def micro_batches(self):
        """Name -> view, for each micro-batch in order."""
        return map(self.micro, range(len(self.micro_bounds)))

    def micro(self, index):
        """Name -> view, for one micro-batch."""
        start, stop, width, _ = self.micro_bounds[index]
        rows = bounds = slice(start, stop)
        if "cu_seqlens_offsets" in self.arrays:  # several rows on a line
            offsets = self.arrays["cu_seqlens_offsets"]
            bounds = slice(int(offsets[start]), int(offsets[stop]))
            rows = slice(bounds.start - start, bounds.stop - stop)
        columns = slice(-width, None) if self.layout == "padded_left" else slice(0, width)
        views = {}
        for name, array in self.arrays.items():
            begins, of = self.arrays.get(name + "_bounds"), name.removesuffix("_bounds")
            if begins is not None:
                views[name] = array[int(begins[rows.start]) : int(begins[rows.stop])]  # media of these rows
            elif of != name and of in self.arrays:
                views[name] = array[rows.start : rows.stop + 1]
            elif array.ndim >= 2 and name not in self.row_vectors:
                views[name] = array[start:stop, columns]  # a cell per token
            elif name == "cu_seqlens":
                views[name] = array[bounds]
            elif name == "cu_seqlens_offsets":
                views[name] = array[start : stop + 1]
            else:
                views[name] = array[rows]  # a value per row
        return views


def read_shard(value):
    """The shard of what a ref holds; copies nothing. The arrays are read-only."""
    text, arrays = value
    header = json.loads(text)
    if header["format"] != FORMAT or header["version"] != VERSION:
        raise ValueError(f"this reader knows {FORMAT} {VERSION}, not {header['format']} {header['version']}")
    return ForeignShard(
        step=header["step"],
        mini=header["mini"],
        rank=header["rank"],
        layout=header["layout"],
        denominators=header["denominators"],
        row_vectors=header["row_vectors"],
        micro_bounds=header["micro_batches"],
        row_ids=arrays["row_ids"],
        arrays={name: array for name, array in arrays.items() if name != "row_ids"},
    )
