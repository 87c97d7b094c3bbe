"""Data of a client as ranks compute them."""

from __future__ import annotations

import numpy as np

from rltool.training.served import Datum, batch_of


def test_weights_that_a_datum_lacks_and_another_has_are_1():
    tokens = np.array([1, 2, 3])
    given = Datum(tokens, tokens + 1, {"weights": np.array([0.0, 0.5, 0.25], np.float32)})
    batch = batch_of([given, Datum(tokens, tokens + 2), given])
    assert batch.loss_weights is not None and batch.target_ids is not None
    assert batch.loss_weights.tolist() == [0, 0, 0.5, 0.25, 0, 1, 1, 1, 0, 0, 0.5, 0.25], "0 stands for the first token"
    assert batch.tokens.tolist() == [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4]
    assert batch.target_ids.tolist() == [0, 2, 3, 4, 0, 3, 4, 5, 0, 2, 3, 4]
    assert batch.loss_mask.tolist() == [0, 1, 1, 1] * 3
