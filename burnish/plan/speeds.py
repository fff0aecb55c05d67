"""Speeds of a cluster: rates of its GPUs, memories and links, with the shares of them that are
reached (``efficiency`` in ``hardware.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.models.attention_kernel import AttentionRate
from burnish.plan.hardware import Hardware
from burnish.plan.work import AttentionWork, Work


@dataclass(frozen=True)
class Speeds:
    """Speeds of one GPU of the cluster, or of a machine without GPUs."""

    hardware: Hardware

    def flops_per_s(self, half: bool, share: str = "matmul") -> float:
        """Return FLOP/s of one kind of kernel, a key of ``efficiency``. ``half``: in bf16 or
        fp16."""
        gpu, shares = self.hardware.gpu, self.hardware.tables.efficiency
        if gpu is None:
            return self.hardware.tables.machines["cpu_tflops"] * 1e12 * shares["matmul"]
        return (gpu.bf16_tflops if half else gpu.fp32_tflops) * 1e12 * shares[share]

    @property
    def host_bytes_per_s(self) -> float:
        """Bytes per second of the CPUs' memory."""
        return self.hardware.tables.machines["cpu_gbs"] * 1e9

    def memory_bytes_per_s(self) -> float:
        """Return the bytes per second that kernels read and write."""
        gpu, share = self.hardware.gpu, self.hardware.tables.efficiency["memory"]
        return share * (self.host_bytes_per_s if gpu is None else gpu.memory_gbs * 1e9)

    def link_bytes_per_s(self, ranks: int) -> float:
        """Return the bytes per second that one of ``ranks`` GPUs sends to the others."""
        gpu = self.hardware.gpu
        if gpu is None:
            return self.host_bytes_per_s
        inside = ranks <= self.hardware.gpus_per_node
        speed = gpu.link_gbs if inside else min(gpu.link_gbs, self.hardware.network_gbs)
        return speed * 1e9 * self.hardware.tables.efficiency["link"]

    def pcie_bytes_per_s(self) -> float:
        """Return the bytes per second between a GPU and pinned host memory."""
        gpu, share = self.hardware.gpu, self.hardware.tables.efficiency["pcie"]
        return share * (self.host_bytes_per_s if gpu is None else gpu.pcie_gbs * 1e9)

    def to_host_bytes_per_s(self) -> float:
        """Return the bytes per second from a GPU into new host memory."""
        if self.hardware.gpu is None:
            return self.host_bytes_per_s
        return min(self.hardware.tables.machines["to_host_gbs"] * 1e9, self.pcie_bytes_per_s())

    def launch_s(self, kernels: float) -> float:
        """Return the seconds in which the host launches kernels on a GPU."""
        if self.hardware.gpu is None:
            return 0.0
        return kernels * self.hardware.tables.efficiency["launch_us"] * 1e-6

    def decode_seconds(self, read: float, recorded: float, launched: float) -> float:
        """Return the seconds of a decode step that reads ``read`` bytes of weights and cache, with
        ``recorded`` kernels in a graph and others that the host launches."""
        seconds = read / self.memory_bytes_per_s()
        if self.hardware.gpu is None:
            return seconds
        floor = recorded * self.hardware.tables.efficiency["kernel_us"] * 1e-6
        return seconds + floor + self.launch_s(launched)

    def kernel_seconds(
        self,
        work: Work,
        attention: AttentionWork,
        *,
        half: bool,
        rate: AttentionRate = "attention",
    ) -> dict[str, float]:
        """Return the seconds of kernels on one device by what limits them. ``rate``: of attention
        without masks."""
        attention_s = attention.exact / self.flops_per_s(half, rate)
        attention_s += attention.masked / self.flops_per_s(half, "masked_attention")
        return {
            "matrices": work.matmul_flops / self.flops_per_s(half),
            "attention": attention_s,
            "memory": work.bytes / self.memory_bytes_per_s(),
        }
