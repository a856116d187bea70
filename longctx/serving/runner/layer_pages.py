"""Where the pool of a device has the pages of each layer.

A layer with a sliding window sees the last tokens alone, so it has window pages for those, far fewer than others have.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from longctx.models import LlamaConfig
from longctx.models.layer_runs import sliding_places


class LayerPages(NamedTuple):
    """The pages of a rank's layers in its pool, which is alike in all stages.

    The pages of full layers come first, layer after layer, then the window pages of sliding layers. A stage with fewer
    layers of a kind than another has as many pages of it.

    Attributes:
      sliding: bool `[stages, places]`, of `sliding_places`.
      num_pages, num_window_pages: of each rank, in each full and in each sliding layer.
    """

    sliding: Bool[np.ndarray, "stages places"]
    num_pages: int
    num_window_pages: int = 0

    @classmethod
    def of(cls, config: LlamaConfig, stages: int, num_pages: int, num_window_pages: int = 0) -> "LayerPages":
        """The pages of a model's layers.

        Raises:
          ValueError: it has sliding layers and no window pages, or the other way round.
        """
        if (config.sliding_window is None) != (num_window_pages == 0):
            wanted = "0 for a model without sliding layers" if num_window_pages else "1 or more for sliding layers"
            raise ValueError(f"num_window_pages must be {wanted}, got {num_window_pages}")
        return cls(sliding_places(config, stages), num_pages, num_window_pages)

    @property
    def num_full(self) -> int:
        """Full layers of the stage that has most."""
        return int(np.max(np.sum(~self.sliding, 1)))

    @property
    def num_sliding(self) -> int:
        """Sliding layers of the stage that has most."""
        return int(np.max(np.sum(self.sliding, 1)))

    @property
    def total(self) -> int:
        """Pages of a pool."""
        return self.num_full * self.num_pages + self.num_sliding * self.num_window_pages

    @property
    def first(self) -> Int32[np.ndarray, "stages places"]:
        """The first page of the layer in each place of each stage."""
        of_full = (np.cumsum(~self.sliding, 1) - 1) * self.num_pages
        of_sliding = self.num_full * self.num_pages + (np.cumsum(self.sliding, 1) - 1) * self.num_window_pages
        return np.where(self.sliding, of_sliding, of_full).astype(np.int32)

    def rows(
        self, stage: int, places: np.ndarray, pages: np.ndarray, window_pages: np.ndarray | None
    ) -> Int32[np.ndarray, "pages places"]:
        """Where pages are in some places of a stage; -1 in those that are sliding where the window page is -1."""
        at = np.broadcast_to(pages[:, None], (len(pages), len(places)))
        if window_pages is not None:
            at = np.where(self.sliding[stage, places], window_pages[:, None], at)
        return np.where(at < 0, -1, self.first[stage, places] + at).astype(np.int32)
