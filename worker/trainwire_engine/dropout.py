"""The random keys of dropout: of seed, update, row and token, so that no split of an update can move a mask."""

from __future__ import annotations

import numpy as np

from trainwire_engine.batches import MicroBatch, mix


def token_keys(batch: MicroBatch, seed: int, step: int) -> np.ndarray:
    """Random keys, uint32 of the shape of `tokens` and 2: the same for a row's token in whatever micro-batch it is."""
    keys = np.zeros((*batch.tokens.shape, 2), np.uint32)
    flat, length = keys.reshape(-1, 2), batch.tokens.shape[1]
    slots = [places for group in batch.spread for places in group]
    for index, row in enumerate(batch.rows):
        at = slots[index][slots[index] >= 0] if slots else np.arange(index * length, (index + 1) * length)
        own = mix(seed, step, row)
        flat[at, 0] = own >> 32
        flat[at, 1] = np.uint32(own & 0xFFFFFFFF) + np.arange(len(at), dtype=np.uint32)
    return keys
