"""The arrays that a model gets of a row's media: bytes by digest, decoded, and given to the processor.

Always true:
- the arrays of a row are what the processor itself gives for its media, and depend on nothing but the row and the processor;
- a processor other than that of the build is refused before it makes a pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from raysvc.errors import TokenizerError
from raysvc.media.decoding import all_decoded
from raysvc.media.kinds import Kind
from raysvc.media.media_processor import MediaProcessor, kinds_in
from raysvc.media.medium import media_of
from raysvc.media.processor_spec import ProcessorSpec

Arrays = Mapping[str, npt.NDArray[Any]]


class RowPixels:
    """See the module.

    Args:
        spec: of the processor.
        recipes: of the entries whose rows come.
        read: gives the bytes of a digest.
    """

    def __init__(
        self, spec: ProcessorSpec, recipes: Sequence[Mapping[str, Any]], read: Callable[[str], bytes]
    ) -> None:
        self._read = read
        built = [recipe["media"]["processor"] for recipe in recipes if "media" in recipe]
        kinds = {kind for one in built for kind in kinds_in(one)}
        self._processor = MediaProcessor.load(spec.name, spec.revision, spec.trust_remote_code, kinds)
        own = self._processor.identity()
        if any(own.get(name) != value for one in built for name, value in one.items()):
            what = f"the processor of {spec.name!r} is not the one that the entry was built with"
            raise TokenizerError("tokenizer", what, "run raysvc tokenize again, on the files that are served")

    def of(self, text: str | None) -> Arrays:
        """The arrays of a row's media together, {} where it has none.

        Args:
            text: value of column `media`.

        Raises:
            EntryError: bytes are missing, or are not those that were written.
            RowFault: they cannot be decoded: a file may be damaged inside.
        """
        found = media_of(text)
        if not found:
            return {}
        with all_decoded(found, self._read) as media:
            return self._processor.arrays(media)

    def blanks(self) -> dict[Kind, tuple[Arrays, int]]:
        """Kind -> (arrays of a small blank medium, its patches)."""
        return dict(self._processor.blanks())
