"""Array types of the scheduler. Ids, lengths, pages and rows are int32, which takes half the bytes of the default."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
AnyIntArray = npt.NDArray[np.signedinteger[Any]]

TOKEN_ID_BYTES: Final = 4

EMPTY: IntArray = np.empty(0, dtype=np.int32)
EMPTY.setflags(write=False)
