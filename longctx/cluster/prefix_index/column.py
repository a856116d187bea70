"""`Column`: a dense array that grows in place."""

import numpy as np


class Column:
    """Unsigned numbers, zero at first.

    Attributes:
      array: for numpy; a slice of it must not be kept, as `resize` may move it.
      view: the same memory, one number at a time: Python reads it in half the time.
    """

    def __init__(self, dtype: type[np.unsignedinteger], size: int) -> None:
        self.array = np.zeros(size, dtype)
        self.view = memoryview(self.array)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.array)

    def resize(self, size: int) -> None:
        """Make it larger; large ones are not copied where the system can move memory (Linux)."""
        self.view.release()
        self.array.resize(size, refcheck=False)
        self.view = memoryview(self.array)  # type: ignore[arg-type]
