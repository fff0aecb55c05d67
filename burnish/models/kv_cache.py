"""Keys and values of the sequences that are being sampled."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """KV cache of the sequences being decoded: ``[slots, kv_heads, capacity, head_dim]`` per layer.

    Slots ``0 .. B-1`` hold the B active sequences, so a decode step reads a plain slice. A layer is
    allocated on its first write, in the shape and dtype of the keys and values.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(
        self, layer: int, slots: Tensor, positions: Tensor, kv: tuple[Tensor, Tensor]
    ) -> None:
        """Store keys and values [W, kv_heads, head_dim] at (slot, position) pairs."""
        key, value = kv
        if layer not in self.keys:
            _, heads, dim = key.shape
            shape = (self.num_slots, heads, self.capacity, dim)
            self.keys[layer] = key.new_zeros(shape)
            self.values[layer] = value.new_zeros((*shape[:3], value.shape[-1]))
        self.keys[layer][slots, :, positions] = key
        self.values[layer][slots, :, positions] = value

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of slots ``source`` into slots ``target``."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def grow(self, capacity: int) -> None:
        """Extend each slot to ``capacity`` positions and keep its contents. Never shrinks."""
        extra = capacity - self.capacity
        if extra <= 0:
            return
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                store[layer] = F.pad(tensor, (0, 0, 0, extra))
        self.capacity = capacity

    def add_slots(self, num_slots: int) -> None:
        """Extend the cache to ``num_slots`` slots and keep its contents. Never shrinks."""
        extra = num_slots - self.num_slots
        if extra <= 0:
            return
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                store[layer] = F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, extra))
        self.num_slots = num_slots

    def copy_from(self, other: KVCache) -> None:
        """Copy the contents of a cache that is not larger."""
        for own, given in ((self.keys, other.keys), (self.values, other.values)):
            for layer, tensor in given.items():
                if layer not in own:
                    shape = (self.num_slots, tensor.shape[1], self.capacity, tensor.shape[3])
                    own[layer] = tensor.new_zeros(shape)
                own[layer][: other.num_slots, :, : other.capacity] = tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for store in (self.keys, self.values) for t in store.values())
