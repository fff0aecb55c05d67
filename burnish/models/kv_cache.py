"""Keys and values of the sequences that are being sampled."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """KV cache of the sequences being decoded: ``[slots, kv_heads, capacity, head_dim]`` per layer.

    Slots ``0 .. B-1`` hold the B active sequences, so a decode step reads a plain slice. A layer is
    allocated on its first write, in the shape and dtype of the keys and values.

    With ``transposed_keys`` the keys have the same shape, but their positions are contiguous in
    memory, which batch-invariant matmuls need (``models/cache_attention.py``).
    """

    def __init__(self, num_slots: int, capacity: int, *, transposed_keys: bool = False) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.transposed_keys = transposed_keys
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(
        self, layer: int, slots: Tensor, positions: Tensor, kv: tuple[Tensor, Tensor]
    ) -> None:
        """Store keys and values [W, kv_heads, head_dim] at (slot, position) pairs."""
        key, value = kv
        if layer not in self.keys:
            self.keys[layer] = self._zeros(key, transposed=self.transposed_keys)
            self.values[layer] = self._zeros(value, transposed=False)
        self.keys[layer][slots, :, positions] = key
        self.values[layer][slots, :, positions] = value

    def read(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the first ``length`` keys and values [S, kv_heads, length, head_dim] of
        some slots, in the memory order of the cache."""
        keys, values = self.keys[layer][:, :, :length], self.values[layer][:, :, :length]
        if self.transposed_keys:
            keys = keys.transpose(2, 3).index_select(0, slots).transpose(2, 3)
        else:
            keys = keys.index_select(0, slots)
        return keys, values.index_select(0, slots)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of slots ``source`` into slots ``target``."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def resize(self, *, num_slots: int = 0, capacity: int = 0) -> None:
        """Extend the cache to these sizes and keep its contents. Never shrinks."""
        if num_slots <= self.num_slots and capacity <= self.capacity:
            return
        self.num_slots = max(num_slots, self.num_slots)
        self.capacity = max(capacity, self.capacity)
        stores = ((self.keys, self.transposed_keys), (self.values, False))
        for store, transposed in stores:
            for layer, old in store.items():
                store[layer] = self._zeros(old[:, :, 0], transposed=transposed)
                store[layer][: old.shape[0], :, : old.shape[2]] = old

    def copy_from(self, other: KVCache) -> None:
        """Copy the contents of a cache that is not larger."""
        for target, source in ((self.keys, other.keys), (self.values, other.values)):
            for layer, tensor in source.items():
                if layer not in target:
                    transposed = self.transposed_keys and target is self.keys
                    target[layer] = self._zeros(tensor[:, :, 0], transposed=transposed)
                target[layer][: other.num_slots, :, : other.capacity] = tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for store in (self.keys, self.values) for t in store.values())

    def _zeros(self, like: Tensor, *, transposed: bool) -> Tensor:
        """Return the tensor of a layer for keys or values like those given, [W, kv_heads, dim]."""
        _, heads, dim = like.shape
        if transposed:
            return like.new_zeros(self.num_slots, heads, dim, self.capacity).transpose(2, 3)
        return like.new_zeros(self.num_slots, heads, self.capacity, dim)
